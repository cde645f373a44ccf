"""Several methods of importance on one corpus, side by side: what ``manyheads importance`` measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from manyheads.capture.site import Unverified
from manyheads.common.interrupts import (
    Interrupted,
    UntilInterrupted,
    interrupted,
    interruptible,
    stop_if_interrupted,
)
from manyheads.common.numbered_batches import Numbered, generator_of, numbered
from manyheads.common.progress import Progress, no_progress
from manyheads.data.batches import Corpus
from manyheads.data.labelled import Labelled
from manyheads.heads.importance import METHODS, WITH_LOSS, Agreement, add_plugins, agreement, importance
from manyheads.heads.importance.losses import find_loss, hide_tokens
from manyheads.heads.table import HeadTable
from manyheads.models.loaded import Loaded

# Methods that run the model many times: a part of that says nothing. The others read the batches once.
MANY_PASSES = ("leave-one-out", "mean-ablation", "gates")


@dataclass
class MethodComparison:
    """The rankings of a model's heads by several methods.

    tables: by method, those that were computed.
    seconds: by method.
    stopped: the method that Ctrl-C ended; empty where none was. Its table is there, of the batches that were
        read until then, unless it needs many passes.
    resumable: whether what a method computed is kept in a file, to continue from.
    error: what ended the comparison early.
    """

    tables: dict[str, HeadTable] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    stopped: str = ""
    resumable: bool = False
    error: ValueError | None = None

    @property
    def agreements(self) -> list[Agreement]:
        """Between each two methods."""
        return agreement(self.tables) if len(self.tables) > 1 else []


def check_methods(
    methods: Sequence[str] | None, loss: str | None = None, corpus: Corpus | None = None
) -> list[str]:
    """The methods, each once, or those by default; a ValueError if one of them, or the loss, is unknown.

    >>> check_methods(["fisher", "random", "fisher"]), check_methods(None)
    (['fisher', 'random'], ['fisher'])
    """
    if methods is None:
        methods = ("gradient", "fisher") if isinstance(corpus, Labelled) else ("fisher",)
    add_plugins()
    unknown = [name for name in methods if name not in METHODS]
    if unknown or not methods:
        wrong = ", ".join(unknown) or "none"
        raise ValueError(f"method: expected some of {', '.join(METHODS)}, got {wrong}")
    find_loss(loss)
    return list(dict.fromkeys(methods))


def compare_methods(
    loaded: Loaded,
    corpus: Corpus,
    methods: Sequence[str] | None = None,
    loss: str | None = None,
    *,
    gates: int | None = None,
    seed: int = 0,
    state: Path | None = None,
    unverified: Unverified = "refuse",
    memory: str | int | None = None,
    share: tuple[int, int] = (0, 1),
    progress: Progress = no_progress,
) -> MethodComparison:
    """Rank the heads of a model by several methods.

    Parameters
    ----------
    loaded, corpus: the model, and what it reads.
    methods: of `importance`. Default: ``fisher``; with labels, ``gradient`` before it.
    loss, gates: as for `importance`, for those of the methods that take them; with labels, the loss is that
        of their task by default.
    seed, unverified, memory, progress: as for `importance`.
    state: a file in which ``leave-one-out`` keeps what it has after Ctrl-C, to continue from.
    share: the part of the batches to read, (number from 0, count).

    Ctrl-C and mistakes end the comparison; what was computed before is kept.

    Examples
    --------
    >>> from manyheads.data.corpus import text
    >>> from manyheads.models.open import open_model
    >>> loaded = open_model()
    >>> comparison = compare_methods(loaded, text(loaded, limit=2), ["fisher", "random"])
    >>> list(comparison.tables), comparison.agreements[0].heads
    (['fisher', 'random'], 72)
    """
    if loss is None and isinstance(corpus, Labelled):
        loss = "labels"
    result = MethodComparison()
    length = len(corpus.numbered(share))

    def report(stage: str, done: float, total: float | None) -> None:
        progress(stage, done, length if total is None else total)
        if stage in MANY_PASSES:
            stop_if_interrupted()

    with interruptible():
        for method in check_methods(methods, loss, corpus):
            batches: Numbered[Any] = corpus.numbered(share)
            if method not in MANY_PASSES:
                batches = UntilInterrupted(batches, length)
            if loss == "masked":
                batches = _masked(loaded, batches, seed)
            started = perf_counter()
            try:
                stop_if_interrupted()
                report(method, 0, None)
                result.tables[method] = importance(
                    loaded.model,
                    batches,
                    method,
                    loss if method in WITH_LOSS else None,
                    gates=gates if method == "gates" else None,
                    seed=seed,
                    state=state,
                    unverified=unverified,
                    memory=memory,
                    progress=report,
                )
            except Interrupted:
                break
            except ValueError as error:
                result.error = error
                break
            result.seconds[method] = perf_counter() - started
            if state is not None and method == "leave-one-out":
                state.unlink(missing_ok=True)
        result.stopped = method if interrupted() else ""
        result.resumable = state is not None and state.exists()
    return result


def _masked(loaded: Loaded, batches: Numbered[Any], seed: int) -> Numbered[Any]:
    """The batches with some tokens masked, by the mask token of the model's tokenizer."""
    tokenizer = loaded.tokenizer()
    mask = getattr(tokenizer, "mask_token_id", None)
    if mask is None:
        raise ValueError(
            f"loss: masked needs a tokenizer with a mask token, but that of {loaded.name} has none; use "
            "another loss"
        )
    special = tokenizer.all_special_ids
    hidden = (
        hide_tokens(batch, mask, special, generator_of(seed, number)) for number, batch in numbered(batches)
    )
    return Numbered(hidden, batches.numbers, batches.total)
