"""Leave-one-out: what the model gives without each head, one after the other. Exact: the judge of all."""

from __future__ import annotations

import hashlib
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from manyheads.common.json_files import in_one_sentence, read_json
from manyheads.common.whole_files import write_whole
from manyheads.heads.importance.losses import called, units
from manyheads.heads.importance.replay import Recording
from manyheads.heads.importance.request import Loss, Task
from manyheads.heads.model_outputs import difference
from manyheads.heads.observer import Forward, Observer, Sums, moved, observed, tensors
from manyheads.heads.table import HeadTable
from manyheads.heads.watch import fingerprint

_FORMAT = "manyheads leave-one-out state"
_VERSION = 1


def leave_one_out(task: Task) -> HeadTable:
    """What changes when each head is silenced, by running the model without it.

    Without a loss, how far the output is from the full model's (see `model_outputs`); with one, by how
    much it grows. The layers before a head are not computed again, where giving back what they returned was
    seen to change nothing. With a state file, what was computed is kept after each layer, and computed once.
    """
    sums = Sums()
    state = State(task.state, fingerprint(task.model), task.loss)
    sound: dict[str, bool] = {}  # whether the model can be run from this site on
    with observed(task.model) as observer:
        recording = Recording(task.model)
        for number, batch in enumerate(moved(task.batches, observer.device)):
            known = state.of(batch)
            with recording.recorded():
                full = observer.forward(batch, mark=recording.mark)
            observer.check("leave-one-out", task.unverified)
            for layer, site in enumerate(full.heads, 1):
                if site in known and not state.fits(known[site], full.heads[site][0]):
                    del known[site]
                if site not in known:
                    if site not in sound:
                        sound[site] = _sound(observer, recording, batch, full, site)
                    reused = recording if sound[site] else None
                    known[site] = _silenced(observer, reused, batch, full, site, task.loss)
                    state.save()
                task.report("leave-one-out", number + layer / len(full.heads))
            sums.add({site: known[site] for site in full.heads})
        return observer.table(sums.found, _measure(task.loss, full))


def _measure(loss: Loss | None, full: Forward) -> str:
    return full.output.measure if loss is None else f"increase of the loss {called(loss)}"


def _silenced(
    observer: Observer, recording: Recording | None, batch: Any, full: Forward, site: str, loss: Loss | None
) -> Tensor:
    """What silencing each head of a site changes, (units, heads): a unit is a sequence or the batch."""
    columns = []
    before = None if loss is None else units(loss, full.result, batch)
    for gate in 1 - torch.eye(full.heads[site][0].shape[1]):
        with recording.given_back(site) if recording else nullcontext():
            result = observer.gated(batch, {site: gate})
        if loss is None or before is None:
            columns.append(difference(full.output, observer.output(result, full)))
        else:
            columns.append(units(loss, result, batch) - before)
    return torch.stack(columns, 1).cpu().double()


def _sound(observer: Observer, recording: Recording, batch: Any, full: Forward, site: str) -> bool:
    """Whether running from a site on shows its attention, and gives the same to the bit. Calls of a shared
    module cannot be told apart when some of them are left out.
    """
    if any("#" in name for name in full.heads):
        return False
    with recording.given_back(site):
        again = observer.gated(batch, {site: torch.ones(full.heads[site][0].shape[1])})
    return site in observer.gated_sites and observer.output(again, full).value.equal(full.output.value)


class State:
    """What was computed so far, by batch and site, in a file that is there whole or not at all.

    Batches are known by their content, so it does not matter in which order they come again.
    """

    def __init__(self, path: Path | None, model: str, loss: Loss | None) -> None:
        self._path = path
        measured = "difference" if loss is None else called(loss)
        self._about = {"format": _FORMAT, "version": _VERSION, "model": model, "measured": measured}
        self._batches: dict[str, dict[str, Tensor]] = {}
        if path is not None and path.exists():
            self._batches = self._read(path)

    def of(self, batch: Any) -> dict[str, Tensor]:
        """What is known about a batch, {site: (units, heads)}; what is put there is kept by `save`."""
        digest = hashlib.sha256()
        for name, tensor in tensors(batch).items():
            plain = tensor.detach().cpu().contiguous()
            digest.update(f"{name} {tuple(plain.shape)} {plain.dtype}".encode())
            digest.update(plain.flatten().view(torch.uint8).numpy().tobytes())
        return self._batches.setdefault(digest.hexdigest(), {})

    @staticmethod
    def fits(values: Tensor, outputs: Tensor) -> bool:
        """Whether what was kept, (units, heads), can be of a site with these outputs (batch, heads, ...)."""
        return values.dim() == 2 and values.shape[1] == outputs.shape[1]

    def save(self) -> None:
        """Write what is known, if there is a file for it."""
        if self._path is None:
            return
        batches = {
            digest: {site: value.tolist() for site, value in found.items()}
            for digest, found in self._batches.items()
        }
        write_whole(self._path, json.dumps(self._about | {"batches": batches}))

    def _read(self, path: Path) -> dict[str, dict[str, Tensor]]:
        document = read_json(path, _Document, "state", format=_FORMAT, version=_VERSION, infinite=True)
        about: dict[str, Any] = {name: document[name] for name in self._about}  # type: ignore[literal-required]
        if about != self._about:
            odd = next(name for name in about if about[name] != self._about[name])
            raise ValueError(
                f"state: {path} is of another {odd} ({about[odd]}, here {self._about[odd]}); take it away to "
                "begin anew, or give another file"
            )
        with in_one_sentence(f"state: {path} is damaged; take it away to begin anew"):
            return {
                digest: {site: torch.tensor(value, dtype=torch.float64) for site, value in kept.items()}
                for digest, kept in document["batches"].items()
            }


class _Document(TypedDict):
    format: str
    version: int
    model: str
    measured: str
    batches: dict[str, dict[str, list[list[float]]]]
