"""From a model and a corpus to a folder: the pruned model, its plan, its card, its curve.

This is what ``manyheads prune`` does. Every tenth sequence is held out to compare the two models on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from manyheads.capture.site import Unverified
from manyheads.common.import_names import import_from_here
from manyheads.common.interrupts import Interrupted, interrupted, interruptible, stop_if_interrupted
from manyheads.common.json_numbers import plain
from manyheads.common.labelled_batch import LabelledBatch, without_labels
from manyheads.common.locks import locked
from manyheads.common.memory_budget import memory_budget
from manyheads.common.out_folder import check_free
from manyheads.common.processes import processes, rank
from manyheads.common.progress import Progress, no_progress
from manyheads.common.registry import registered
from manyheads.common.types import Batch, JsonObject
from manyheads.common.whole_files import tidy, whole_folder, write_whole
from manyheads.data.batches import Corpus
from manyheads.heads.fingerprint import fingerprint
from manyheads.heads.table import HeadTable
from manyheads.models.export import Exported, check_installed, export
from manyheads.models.folder import save
from manyheads.models.loaded import Loaded, if_any
from manyheads.models.model_card import write_card
from manyheads.surgery.card import Card, card
from manyheads.surgery.merge import merge
from manyheads.surgery.plan import Plan, check_plan, with_roles
from manyheads.surgery.prices import read_save
from manyheads.surgery.prune import first_sequences, prune
from manyheads.surgery.prune_options import PruneOptions
from manyheads.surgery.pruning_curve import METHODS, PruningCurve, pruning_curve
from manyheads.surgery.recover import steps_done
from manyheads.surgery.refit import check_refit
from manyheads.surgery.refit_memory import tokens_within

LENGTHS = (512, 8192)  # tokens before those whose generation is timed
HELD_OUT = 10  # every tenth sequence
FEWEST = 20  # sequences

Metric = Callable[[nn.Module], float]


@dataclass(frozen=True)
class PrunedFolder:
    """What was written.

    card: the model before and after, on the held-out sequences.
    plan: the heads that were removed.
    document: what card.json holds.
    has_curve: whether the curve was measured and drawn.
    unfinished: the file from which a recovery that Ctrl-C ended continues; None if there is none.
    interrupted: whether Ctrl-C was pressed.
    """

    out: Path
    card: Card
    plan: Plan
    document: JsonObject
    has_curve: bool
    unfinished: Path | None
    interrupted: bool


def prune_to_folder(
    loaded: Loaded,
    corpus: Corpus,
    out: Path,
    options: PruneOptions,
    *,
    unverified: Unverified = "refuse",
    progress: Progress = no_progress,
) -> PrunedFolder | None:
    """Prune a model on a corpus, compare it with the uncut one, and write it to a folder that `load` reads.

    The folder appears complete or not at all. The first Ctrl-C ends a recovery, or the measuring of the
    curve, and the model is written; before that, it raises `Interrupted` and nothing is written.
    ``unverified`` is as for `prune`. The processes of torchrun share ranking and refit; all but the first
    return None.

    Examples
    --------
    >>> import tempfile
    >>> from manyheads.data.corpus import text
    >>> from manyheads.models.open import open_model
    >>> loaded = open_model("manyheads/small")
    >>> corpus = text(loaded, limit=30)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pruned = prune_to_folder(loaded, corpus, Path(folder) / "small", PruneOptions(keep=0.75))
    ...     sorted(path.name for path in pruned.out.glob("*.json") if path.name in ("card.json", "plan.json"))
    ['card.json', 'plan.json']
    """
    check_free(out)
    if options.save is not None:
        read_save(options.save)
    if options.export is not None:
        check_installed(options.export)
    model = loaded.model
    metric = None if options.metric is None else _metric_function(options.metric)
    plan = None if options.plan is None else Plan.load(options.plan)
    if plan is not None:
        plan.check(model)
    protected = protected_heads(options.protect, model)
    fitting, holding = split(corpus)
    sample = _calibration(model, fitting, options)
    holding = holding.sampled(options.sample)
    fitted, held_out = without_outside_labels(batches_of(sample)), batches_of(holding)
    every = without_outside_labels(batches_of(fitting)) if options.recover else fitted
    if options.keep is not None:
        limits: JsonObject = {"scope": options.scope, "floor": options.floor, "groups": options.groups}
        check_plan(model, first_sequences(fitted[0]), options.keep, protect=protected, **limits)
    together = processes() > 1
    if together and (options.recover or options.kv_heads is not None):
        raise ValueError(
            "torchrun: several processes share ranking and refit only; expected neither --recover nor "
            "--kv-heads: run them in one process"
        )
    state = out.with_name(f"{out.name}.recovery.safetensors") if options.recover else None

    def report(stage: str, done: float, total: float | None) -> None:
        progress(stage, done, total)
        if stage != "recover":  # which ends by itself, and keeps its state
            stop_if_interrupted()

    if rank() > 0:
        with interruptible():
            _smaller(model, every, fitted, options, plan, protected, unverified, state, report)
        return None
    with locked(out.with_name(f".{out.name}.lock"), f"out: {out}"), interruptible():
        tidy(out.parent, out.name)
        small = _smaller(model, every, fitted, options, plan, protected, unverified, state, report)
        costs = card(model, small, held_out, metric=metric, lengths=LENGTHS)
        curve: PruningCurve | None = None
        if options.curve and not interrupted():
            with suppress(Interrupted):
                curve = pruning_curve(
                    model,
                    fitted,
                    held_out,
                    methods=tuple(dict.fromkeys((options.method, *METHODS))),
                    refit=options.refit,
                    scope=options.scope,
                    metric=metric,
                    unverified=unverified,
                    progress=report,
                )
        removed = Plan.of(model, small, fitted[0])
        document: JsonObject = {"model": loaded.name, "corpus": corpus.what, "out": str(out)}
        document |= {"notes": [*corpus.notes, *_notes_of(sample, options.recover)]}
        document |= {"fitted": corpus_sizes(sample), "held_out": corpus_sizes(holding)}
        document |= {**costs.as_json(), "original_heads": getattr(small, "original_heads", {})}
        if curve is not None:
            document["curve"] = plain(asdict(curve))
        with whole_folder(out) as folder:
            save(small, folder, _Readers(loaded))
            removed.save(folder / "plan.json")
            write_whole(folder / "card.json", json.dumps(document, indent=1))
            write_card(folder, out.name)
            if curve is not None:
                draw = registered("view.pruning_curve")  # drawing is a room above this one
                draw(curve, folder / "curve.png", f"{loaded.name}, {corpus.what}")
        if options.export is not None:
            try:
                exported = export(out, to=options.export, out=out / options.export)
            except ValueError as error:
                raise ValueError(f"export: {error}; the smaller model is in {out}") from error
            document["export"] = _exported(exported)
            write_whole(out / "card.json", json.dumps(document, indent=1))
            write_card(out, out.name)
        unfinished = state if state is not None and _is_unfinished(state, options.recover) else None
        if state is not None and unfinished is None:
            state.unlink(missing_ok=True)
        return PrunedFolder(out, costs, removed, document, curve is not None, unfinished, interrupted())


def _smaller(
    model: nn.Module,
    batches: list[Batch],
    calibration: list[Batch],
    options: PruneOptions,
    plan: Plan | None,
    protected: dict[int | str, list[int]],
    unverified: Unverified,
    state: Path | None,
    report: Progress,
) -> nn.Module:
    """The smaller model: with fewer key heads, or with fewer heads."""
    if options.kv_heads is not None:
        return merge(
            model,
            options.kv_heads,
            batches,
            refit=options.refit,
            recover=options.recover,
            calibration=calibration,
            unverified=unverified,
            state=state,
            progress=report,
        )
    if plan is None:
        report("rank", 0, None)
    return prune(
        model,
        batches,
        options.keep,
        save=None if options.save is None else read_save(options.save),
        rounds=options.rounds,
        refit=options.refit,
        recover=options.recover,
        method=options.method,
        scope=options.scope,
        floor=options.floor,
        protect=protected,
        groups=options.groups,
        using=plan,
        calibration=calibration,
        unverified=unverified,
        state=state,
        memory=options.memory,
        together=processes() > 1,
        progress=report,
    )


def _calibration(model: nn.Module, fitting: Corpus, options: PruneOptions) -> Corpus:
    """A sample to rank and refit on, no larger than the memory allows."""
    memory_budget(options.memory)
    sample = fitting.sampled(options.sample)
    if not options.refit or options.kv_heads is not None:
        return sample
    first = sample.buckets()[0][:2]
    (batch,) = without_outside_labels([sample.make(first)])
    tokens = sum(sample.sizes[number] for number in first)
    check_refit(model, batch)
    return fitting.sampled(
        min(options.sample or sum(fitting.sizes), tokens_within(model, batch, tokens, options.memory))
    )


class _Readers:
    """All that makes the input of a model: what `save` writes beside it."""

    def __init__(self, loaded: Loaded) -> None:
        makers: tuple[Callable[[], object], ...] = (loaded.tokenizer, loaded.processor, loaded.extractor)
        self._readers = [reader for make in makers if (reader := if_any(make)) is not None]

    def save_pretrained(self, folder: str) -> None:
        """Write them, each into its file."""
        for reader in self._readers:
            if hasattr(reader, "save_pretrained"):
                reader.save_pretrained(folder)


def _exported(exported: Exported) -> dict[str, object]:
    """What was exported, for the card."""
    files = {name: (exported.out / name).stat().st_size for name in exported.files}
    return {
        "to": exported.target,
        "out": str(exported.out),
        "bytes": files,
        "differences": exported.differences,
        "notes": exported.notes,
    }


def split(corpus: Corpus) -> tuple[Corpus, Corpus]:
    """What to fit on, and what is held out: every tenth sequence."""
    if len(corpus.sizes) < FEWEST:
        raise ValueError(
            f"text: {corpus.what} has {len(corpus.sizes)} texts; expected at least {FEWEST}, better "
            "thousands, to fit on some and measure on others"
        )
    every, last = range(len(corpus.sizes)), HELD_OUT - 1
    fitting = corpus.part([i for i in every if i % HELD_OUT != last])
    return fitting, corpus.part([i for i in every if i % HELD_OUT == last])


def batches_of(corpus: Corpus) -> list[Batch]:
    """All batches of a corpus, the longest sequences first."""
    return [corpus.make(indices) for indices in corpus.buckets()]


def without_outside_labels(batches: list[Batch]) -> list[Batch]:
    """The batches without labels, except those of `labelled`, which the model does not see."""
    return [one if isinstance(one, LabelledBatch) else without_labels(one) for one in batches]


def corpus_sizes(corpus: Corpus) -> dict[str, int]:
    """How many sequences and tokens a corpus has."""
    return {"sequences": len(corpus.sizes), "tokens": sum(corpus.sizes)}


def _notes_of(sample: Corpus, recover: int) -> list[str]:
    """That only a sample was fitted to, where that is so."""
    if not sample.sampled_from:
        return []
    recovery = "; recovery read all of them" if recover else ""
    of = f"{len(sample.sizes):,} of {sample.sampled_from:,} sequences"
    return [f"ranked and refitted on a sample: {of}, {sum(sample.sizes):,} tokens{recovery}"]


def protected_heads(text: str, model: nn.Module) -> dict[int | str, list[int]]:
    """Heads by a text: "3.5,4.0" for heads of layers, "roles.json:induction" for those that have a role.

    >>> protected_heads("3.5,3.7, 4.0", nn.Identity())
    {3: [5, 7], 4: [0]}
    """
    heads: dict[int | str, list[int]] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        file, ending, role = part.partition(".json")
        layer, dot, head = part.partition(".")
        if ending:
            for site, numbers in _with_role(Path(file + ending), role.removeprefix(":"), model).items():
                heads[site] = sorted({*heads.get(site, ()), *numbers})
        elif dot and layer.isdecimal() and head.isdecimal():
            heads.setdefault(int(layer), []).append(int(head))
        else:
            raise ValueError(
                f"protect: got {part!r}; expected heads as layer.head, such as 3.5,4.0, or a roles.json"
            )
    return heads


def _with_role(path: Path, role: str, model: nn.Module) -> dict[str, list[int]]:
    """The heads with a role, retrieval by default, in a file of ``manyheads roles`` for this model."""
    role = role or "retrieval"
    if not path.is_file():
        raise ValueError(f"protect: there is no file {path}; expected one that manyheads roles wrote")
    table = HeadTable.load(path)
    if table.model != fingerprint(model):
        raise ValueError(f"protect: {path} is of another model; run manyheads roles on this one")
    try:
        heads = with_roles(table, [role])
    except ValueError as error:
        raise ValueError(f"protect: {path}: {error}") from None
    if not heads:
        raise ValueError(f"protect: no head in {path} has the role {role}, so there is nothing to protect")
    return heads


def _metric_function(name: str) -> Metric:
    """A function of a model, by its name."""
    module, _, function = name.partition(":")
    try:
        metric: Any = getattr(import_from_here(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"metric: {name!r} cannot be imported ({error}); expected package.module:function"
        ) from error
    if not callable(metric):
        raise ValueError(
            f"metric: {name} is not a function; expected one that takes the model and returns a number"
        )
    return metric  # type: ignore[no-any-return]


def _is_unfinished(state: Path, steps: int) -> bool:
    """Whether a recovery stopped before its last step."""
    return state.exists() and steps_done(state) < steps
