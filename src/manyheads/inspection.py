"""What every head of a model does on a corpus: counted exactly, by one process or many, kept on Ctrl-C."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.common.devices import device_of
from manyheads.common.untouched import evaluating
from manyheads.heads.doubts import doubts_in
from manyheads.heads.table import HeadTable
from manyheads.heads.watch import Watch, watch
from manyheads.interrupts import Interrupted, interrupted, interruptible
from manyheads.locks import LOCK, locked
from manyheads.view.document.make import About, document
from manyheads.view.document.sample import TOKENS, Kept, Sample, of_batches
from manyheads.view.report import write_report
from manyheads.view.summary import summary_text
from manyheads.whole_files import tidy, write_whole


@dataclass
class Counted:
    """What one process, or all together, have counted."""

    table: HeadTable | None = None
    units: int = 0  # tokens or images that were read
    seconds: float = 0.0
    stopped: bool = False  # by Ctrl-C
    error: Exception | None = None
    missed: dict[str, str] = field(default_factory=dict)


def inspect(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    tokens: Mapping[str, Iterable[int]] | None = None,
    out: str | os.PathLike[str] | None = None,
    tokenizer: Any = None,
) -> HeadTable:
    """What every head of a model does on these batches: the full set of statistics, one row for each head.

    Parameters
    ----------
    model: any torch.nn.Module. It runs in eval mode, without gradients.
    batches: dicts (passed by name), tuples (passed in order) or tensors.
    tokens: token ids by name, as in `watch`: adds the share of attention on each group.
    out: a folder for ``heads.json``, ``heads.csv``, ``summary.txt`` and ``report.html``, the page for which
        a little more is measured; made if it is not there.
    tokenizer: the model's, so that the page shows words and not the numbers of tokens.

    Ctrl-C ends the counting after the batch that runs, and keeps what was counted; a second one raises
    KeyboardInterrupt at once. Under torchrun or accelerate launch, give each process its own part of the
    batches: every process gets the table of all.

    Examples
    --------
    >>> layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True)
    >>> model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    >>> table = inspect(model, [torch.randn(2, 5, 8), torch.randn(1, 7, 8)])
    >>> len(table), table["tokens"][0].item(), "distance" in table.columns
    (6, 17.0, True)
    """
    kept = Kept(batches, TOKENS)
    with nullcontext() if out is None else prepared(Path(out)), interruptible():
        own = count(model, ((0, batch) for batch in kept), tokens)
        counted = together(own)
        if out is not None and counted.table is not None and rank() == 0:
            write(counted.table, Path(out), summary_text(counted.table))
            about = About(type(model).__name__, notes=notes(counted))
            sample = partial(of_batches, kept.batches, model)
            tell(counted, Path(out), model, sample, about=about, tokenizer=tokenizer)
    return finished(counted)


def count(
    model: nn.Module,
    batches: Iterable[tuple[int, Any]],
    tokens: Mapping[str, Iterable[int]] | None = None,
    step: Callable[[int], None] = lambda units: None,
) -> Counted:
    """Run the model under watch. ``batches`` come with how much they hold, which ``step`` is told.

    A batch counts in every layer or in none: what an error or Ctrl-C leaves is the table of whole batches.
    """
    counted = Counted()
    started = time.perf_counter()
    device = device_of(model)
    seen: Watch | None = None
    try:
        with torch.no_grad(), evaluating(model), watch(model, "full", tokens=tokens) as seen:
            for units, batch in batches:
                if interrupted():
                    counted.stopped = True
                    break
                _run(model, _moved(batch, device))
                counted.table, counted.units = _table(seen), counted.units + units
                step(units)
    except (ValueError, TypeError, OSError) as error:
        counted.error = error
    counted.seconds = time.perf_counter() - started
    counted.missed = seen.missed if seen is not None else {}
    return counted


def _table(seen: Watch) -> HeadTable:
    try:
        return seen.table
    except IndexError as error:
        raise ValueError(
            "MODEL: it has other heads than those that its original_heads name; get the model again"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"MODEL: {str(error).removeprefix('watch: ')}; expected a transformer whose attention is made of "
            "torch functions: give such a model"
        ) from error


def _run(model: nn.Module, batch: Any) -> None:
    try:
        if isinstance(batch, Mapping):
            model(**batch)
        elif isinstance(batch, tuple | list):
            model(*batch)
        else:
            model(batch)
    except Exception as error:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in _tensors(batch))
        said = (str(error).strip().splitlines() or [""])[0][:300]
        raise ValueError(
            f"MODEL: failed on a batch of {shapes or type(batch).__name__} ({type(error).__name__}: {said}); "
            "expected one that it can run: try shorter sequences, smaller batches, other ids"
        ) from error


def _tensors(batch: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(batch, Tensor):
        yield "input", batch
    elif isinstance(batch, Mapping):
        yield from ((str(name), x) for name, x in batch.items() if isinstance(x, Tensor))
    elif isinstance(batch, tuple | list):
        yield from ((f"input {n}", x) for n, x in enumerate(batch) if isinstance(x, Tensor))


def _moved(batch: Any, place: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(place)
    if isinstance(batch, Mapping):
        return {name: _moved(x, place) for name, x in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(_moved(x, place) for x in batch)
    return batch


def finished(counted: Counted) -> HeadTable:
    """The table, or the error that says why there is none."""
    if counted.error is not None:
        raise counted.error
    if counted.table is None:
        if counted.stopped:
            raise Interrupted
        raise ValueError("batches: expected at least one, got none")
    return counted.table


def rank() -> int:
    """Which of the processes this one is, as torchrun and accelerate launch say."""
    return int(os.environ.get("RANK", 0))


def processes() -> int:
    """How many processes share the work."""
    return int(os.environ.get("WORLD_SIZE", 1))


def together(own: Counted) -> Counted:
    """What all processes have counted, merged exactly; the same in each of them."""
    if processes() == 1:
        return own
    from torch import distributed

    started_here = not distributed.is_initialized()
    if started_here:
        distributed.init_process_group("gloo")
    try:
        parts: list[Any] = [None] * distributed.get_world_size()
        told = None if own.error is None else ValueError(str(own.error))  # others' errors may not travel
        distributed.all_gather_object(parts, replace(own, error=told))
    finally:
        if started_here:
            distributed.destroy_process_group()
    tables = [part.table for part in parts if part.table is not None]
    if len({table.model for table in tables}) > 1:
        raise ValueError(
            "MODEL: the processes made different models, so their counts do not add up; expected the same "
            "weights in each: load them from a file, or draw them with a fixed seed"
        )
    return Counted(
        table=tables[0].merge(*tables[1:]) if tables else None,
        units=sum(part.units for part in parts),
        seconds=max(part.seconds for part in parts),
        stopped=any(part.stopped for part in parts),
        error=next((part.error for part in parts if part.error), None),
        missed={path: why for part in parts for path, why in part.missed.items()},
    )


def notes(counted: Counted) -> list[str]:
    """What a reader has to know about a count, besides what the table says of its sites."""
    named = {} if counted.table is None else doubts_in(counted.table).unverified
    missed = {path: why for path, why in counted.missed.items() if path not in named}
    whole = missed.pop("", "")
    found = [f"{path} was not seen: {why}" for path, why in missed.items()]
    if whole and not named:
        found.append(whole)
    if counted.stopped or counted.error is not None:
        found.append("The counting ended early: these are the numbers of a part of the corpus.")
    return found


def tell(counted: Counted, out: Path, model: nn.Module, sample: Callable[[], Sample], **told: Any) -> bool:
    """Make the page of a count and write it to ``report.html``; whether all that it needs was measured.

    Ctrl-C ends the measuring, and the page has what there is. After a count that ended early, the page has
    the numbers of the table alone. Keywords as in `document`.
    """
    assert counted.table is not None
    whole = not counted.stopped and counted.error is None
    chosen = sample() if whole and not interrupted() else None
    page = document(counted.table, model if chosen is not None else None, chosen, **told)
    with _writing(out):
        write_report(page, out / "report.html")
    return chosen is not None and not page["made"]["stopped"]


@contextmanager
def prepared(out: Path) -> Iterator[None]:
    """Make the folder and see that it can be written, before the work and not after it; then hold it, so that
    no other process mixes its files with ours.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out) as probe:
            probe.write(b"\0")
    except OSError as error:
        raise OSError(f"out: {out} cannot be written ({error.strerror}); give another folder") from error
    if rank() > 0:
        yield
        return
    with locked(out / LOCK, f"out: {out}"):
        tidy(out)
        yield


def write(table: HeadTable, out: Path, text: str) -> list[Path]:
    """Write the table and its summary under a folder, each file whole or not at all; returns the files."""
    files = [out / name for name in ("heads.json", "heads.csv", "summary.txt")]
    with _writing(out):
        out.mkdir(parents=True, exist_ok=True)
        table.save(files[0])
        table.save(files[1])
        write_whole(files[2], text)
    return files


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(
            f"out: writing under {out} failed ({error.strerror}); make room or give another folder"
        ) from error
