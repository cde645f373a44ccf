"""Leave-one-out: the output without each head, one after the other. Exact, the reference for the others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

from manyheads.common.devices import batches_to_device
from manyheads.common.json_files import in_one_sentence, read_json
from manyheads.common.types import Batch
from manyheads.common.whole_files import write_whole
from manyheads.heads.fingerprint import fingerprint
from manyheads.heads.head_means import head_means
from manyheads.heads.importance.losses import loss_name, units
from manyheads.heads.importance.replay import RecordedForward
from manyheads.heads.importance.request import Loss, Request
from manyheads.heads.model_outputs import output_distance
from manyheads.heads.observer import Forward, Observer, Sums, observed, tensors
from manyheads.heads.table import HeadTable

_FORMAT = "manyheads leave-one-out state"
_VERSION = 1


def leave_one_out(request: Request) -> HeadTable:
    """What changes when each head is silenced, by running the model without it.

    Without a loss, how far the output is from the full model's (see `model_outputs`); with one, by how
    much it grows. The layers before a head are replayed, not computed again, where that was checked to change
    nothing. With a state file, results are saved after each layer, and computed only once.
    """
    state = State(request.state, fingerprint(request.model), request.loss)
    return _one_by_one(request, "leave-one-out", state)


def mean_ablation(request: Request) -> HeadTable:
    """What changes when each head gives its mean over all batches, whatever the input: as leave-one-out,
    without counting what a head adds to every token alike.
    """
    request = replace(request, batches=list(request.batches), state=None)
    means = head_means(request.model, request.batches)
    state = State(None, "", request.loss)
    return _one_by_one(request, "mean-ablation", state, means)


def _one_by_one(
    request: Request, method: str, state: State, means: Mapping[str, Tensor] | None = None
) -> HeadTable:
    sums = Sums()
    sound: dict[str, bool] = {}  # whether the model can be run from this site on
    with observed(request.model) as observer:
        recording = RecordedForward(request.model)
        for number, batch in enumerate(batches_to_device(request.batches, observer.device)):
            changes = state.of(batch)
            with recording.recorded():
                full = observer.forward(batch, mark=recording.mark)
            observer.check(method, request.unverified)
            for layer, site in enumerate(full.heads, 1):
                if site in changes and not state.fits(changes[site], full.heads[site][0]):
                    del changes[site]
                if site not in changes:
                    if site not in sound:
                        sound[site] = _sound(observer, recording, batch, full, site)
                    reused = recording if sound[site] else None
                    changes[site] = _silenced(observer, reused, batch, full, site, request.loss, means)
                    state.save()
                request.report(method, number + layer / len(full.heads))
            sums.add({site: changes[site] for site in full.heads})
        instead = "" if means is None else ", each head replaced by its mean"
        return observer.table(sums.by_column, _measure(request.loss, full) + instead)


def _measure(loss: Loss | None, full: Forward) -> str:
    return full.output.measure if loss is None else f"increase of the loss {loss_name(loss)}"


def _silenced(
    observer: Observer,
    recording: RecordedForward | None,
    batch: Batch,
    full: Forward,
    site: str,
    loss: Loss | None,
    means: Mapping[str, Tensor] | None,
) -> Tensor:
    """What silencing each head of a site changes, (units, heads): a unit is a sequence or the batch."""
    columns = []
    before = None if loss is None else units(loss, full.result, batch)
    for gate in 1 - torch.eye(full.heads[site][0].shape[1]):
        with recording.replayed(site) if recording else nullcontext():
            result = observer.gated(batch, {site: gate}, means=means)
        if loss is None or before is None:
            columns.append(output_distance(full.output, observer.output(result, full)))
        else:
            columns.append(units(loss, result, batch) - before)
    return torch.stack(columns, 1).cpu().double()


def _sound(observer: Observer, recording: RecordedForward, batch: Batch, full: Forward, site: str) -> bool:
    """Whether replaying up to a site shows its attention and gives the same output to the bit. Calls of a
    shared module cannot be replayed: with some of them left out, they cannot be told apart.
    """
    if any("#" in name for name in full.heads):
        return False
    with recording.replayed(site):
        result = observer.gated(batch, {site: torch.ones(full.heads[site][0].shape[1])})
    return site in observer.gated_sites and observer.output(result, full).value.equal(full.output.value)


class State:
    """Results so far, by batch and site, in a file that is written atomically.

    Batches are identified by their content, so their order may change.
    """

    def __init__(self, path: Path | None, model: str, loss: Loss | None) -> None:
        self._path = path
        measured = "difference" if loss is None else loss_name(loss)
        self._about = {"format": _FORMAT, "version": _VERSION, "model": model, "measured": measured}
        self._batches: dict[str, dict[str, Tensor]] = {}
        if path is not None and path.exists():
            self._batches = self._read(path)

    def of(self, batch: Batch) -> dict[str, Tensor]:
        """The results for a batch, {site: (units, heads)}; `save` writes what is added there."""
        digest = hashlib.sha256()
        for name, tensor in tensors(batch).items():
            plain = tensor.detach().cpu().contiguous()
            digest.update(f"{name} {tuple(plain.shape)} {plain.dtype}".encode())
            digest.update(plain.flatten().view(torch.uint8).numpy().tobytes())
        return self._batches.setdefault(digest.hexdigest(), {})

    @staticmethod
    def fits(values: Tensor, outputs: Tensor) -> bool:
        """Whether saved results (units, heads) fit a site with these outputs (batch, heads, ...)."""
        return values.dim() == 2 and values.shape[1] == outputs.shape[1]

    def save(self) -> None:
        """Write the results, if there is a file for them."""
        if self._path is None:
            return
        batches = {
            digest: {site: value.tolist() for site, value in by_site.items()}
            for digest, by_site in self._batches.items()
        }
        write_whole(self._path, json.dumps(self._about | {"batches": batches}))

    def _read(self, path: Path) -> dict[str, dict[str, Tensor]]:
        document = read_json(path, _Document, "state", format=_FORMAT, version=_VERSION, infinite=True)
        about: dict[str, object] = {name: document[name] for name in self._about}  # type: ignore[literal-required]
        if about != self._about:
            differing = next(name for name in about if about[name] != self._about[name])
            raise ValueError(
                f"state: {path} is of another {differing} ({about[differing]}, here {self._about[differing]}"
                "); delete it to start again, or choose another file"
            )
        with in_one_sentence(f"state: {path} is damaged; delete it to start again"):
            return {
                digest: {site: torch.tensor(value, dtype=torch.float64) for site, value in by_site.items()}
                for digest, by_site in document["batches"].items()
            }


class _Document(TypedDict):
    format: str
    version: int
    model: str
    measured: str
    batches: dict[str, dict[str, list[list[float]]]]
