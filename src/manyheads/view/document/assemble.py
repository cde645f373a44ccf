"""The document: all that a page shows about a model, from its table and a small sample of the corpus.

Every part beyond the numbers of the table may fail or be interrupted; it is then null, and a note says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from manyheads.common.devices import batches_to_device, device_of
from manyheads.common.interrupts import Interrupted, interruptible, stop_if_interrupted
from manyheads.common.json_numbers import plain
from manyheads.common.labelled_batch import LabelledBatch
from manyheads.common.preserved_state import evaluating
from manyheads.common.progress import Progress, no_progress
from manyheads.common.types import Batch
from manyheads.common.version import __version__
from manyheads.heads.effects import page_measurements
from manyheads.heads.roles.probe_texts import COPIES, PLANTED, SEQUENCES
from manyheads.heads.table import HeadTable
from manyheads.heads.unverified_sites import doubts_in
from manyheads.surgery.silencing_curve import DRAWS, SHARES
from manyheads.view.document import head_numbers
from manyheads.view.document.contract import VERSION, HeadDocument, Measured
from manyheads.view.document.examples import WORK, Examples, left_out, profiles
from manyheads.view.document.packing import Budget, byte_size
from manyheads.view.document.sample import CUT, LENGTHS, LONGEST, PIECE, Sample, fewer, token_limit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Bytes of a document in a report; the parts that are wanted most get their room first.
ROOM = 4_300_000
# Estimates of each head's importance, and tokens around a planted key: fewer than where these are all that is
# asked for, so that a page does not take minutes.
ESTIMATES, CONTEXT = 32, 96

T = TypeVar("T")


@dataclass
class About:
    """What a document is about, in words that are shown as they are.

    >>> About("MiniLM", "a text", 1222).unit
    'tokens'
    """

    model: str = ""
    corpus: str = ""
    units: int = 0
    unit: str = "tokens"
    groups: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()


def document(
    table: HeadTable,
    model: nn.Module | None = None,
    sample: Sample | None = None,
    *,
    about: About | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    processor: object = None,
    room: int = ROOM,
    progress: Progress = no_progress,
    only_examples: bool = False,
) -> HeadDocument:
    """All that a page shows: the numbers of a table; with a model and a sample also what is measured there.

    Parameters
    ----------
    table: of any kind; the columns that `roles`, `diversity` and `importance` add are shown, too.
    model: the model of the table.
    sample: what it reads for the parts that the table does not have, as `of_corpus` gives it.
    about: names for the title of the page.
    tokenizer, processor: the model's, for words and images.
    room: how many bytes the document may take in a report.
    progress: called with the part that is being measured, and how much of it is done.
    only_examples: of what is measured, the examples with their attention alone, which takes seconds: neither
        roles nor importance nor redundancy nor a curve, and no head is silenced.

    Ctrl-C ends the measuring; the document has the parts that were finished by then.

    Examples
    --------
    >>> from manyheads.heads.table import Row
    >>> rows = [Row("h.0.attn", 0, head, head, head, "causal") for head in range(2)]
    >>> sums = {"entropy": torch.tensor([[4.0, 4.0], [2.0, 8.0], [1.0, 16.0]])}
    >>> page = document(HeadTable(rows, torch.tensor([4.0, 4.0]), sums))
    >>> page["heads"]["metrics"]["entropy"]["mean"], page["examples"]
    ([0.5, 2.0], [])
    """
    about = about or About()
    page: HeadDocument = {
        "version": VERSION,
        "header": {
            "manyheads": __version__,
            "model": Path(about.model).name if Path(about.model).is_absolute() else about.model,
            "fingerprint": table.model,
            "corpus": about.corpus,
            "units": about.units or int(table.tokens.max().item() if len(table) else 0),
            "unit": about.unit,
            "notes": [*doubts_in(table).sentences(), *about.notes],
            "stopped": False,
        },
        "heads": head_numbers.heads(table),
        "stacks": head_numbers.stacks(table),
        "profiles": None,
        "roles": head_numbers.roles(table, table),
        "importance": _importance_in(table),
        "redundancy": head_numbers.redundancy(table, table),
        "curve": None,
        "groups": dict(about.groups),
        "examples": [],
    }
    if model is not None and sample is not None and sample.batches:
        with evaluating(model), interruptible():
            parts = _Parts(page, progress)
            batches = [] if only_examples else list(batches_to_device(sample.batches, device_of(model)))
            rankings = {} if only_examples else _rank(page, table, model, batches, sample, parts)
            examples = Examples(
                model, table, _most_important(table, rankings.get("fisher")), tokenizer, processor,
                parts.notes, silencing=not only_examples,
            )  # fmt: skip
            parts.measure("examples", lambda progress: examples.add(sample, device_of(model), progress))
            page["profiles"] = profiles(examples.seen, table)
            if not only_examples:
                _judge(page, table, model, batches, rankings, tokenizer, parts)
            if examples.changes:
                page["importance"]["leave-one-out"] = _leave_one_out(
                    examples.changes, examples.measure_of_changes
                )
        page["examples"] = examples.fitted(Budget(room - byte_size(page)))
    return page


def page_work(model: nn.Module, heads: int, longest: int) -> float:
    """About how many tokens a model reads for a page, those of backward passes included.

    ``longest`` is the length of the longest text. For a rough idea of how long it takes.

    >>> 8000 < page_work(nn.Linear(2, 2), heads=12, longest=100) < 20000
    True
    """
    limit, piece = token_limit(model), min(longest, PIECE)
    size = max(1, sum(p.numel() for p in model.parameters()))
    silencing = min(heads * CUT, WORK / size) * len(LENGTHS) / 2
    examples = sum(LENGTHS) + min(longest, LONGEST)
    planted = PLANTED * CONTEXT + 2 * SEQUENCES * sum(COPIES)
    curve_points = (1 + DRAWS) * len(SHARES) * limit / 8
    return 5 * limit + 2 * ESTIMATES * piece + silencing + examples + planted + curve_points


# Methods of `importance` that look at the head alone: what their tables say they measure, and their names.
_OF_THE_HEAD_ALONE = {
    "length of the head's output": "output-norm",
    "largest attention weight of a query": "confidence",
    "nothing": "random",
}


def _importance_in(table: HeadTable) -> dict[str, Measured]:
    """Importance by the methods that a table itself holds."""
    rankings: dict[str, HeadTable] = {}
    if "importance" in table.sums:
        measure = next(iter(table.labels.get("measure", [])), "")
        rankings[_OF_THE_HEAD_ALONE.get(measure, "importance")] = table
    by_method = head_numbers.importance(rankings, table)
    for metric, method in (("output_norm", "output-norm"), ("confidence", "confidence")):
        if metric in table.sums:
            by_method[method] = head_numbers.measured(table, metric)
    return by_method


class _Parts:
    """Measures one part after the other, until Ctrl-C; a part that fails is left out, with a note."""

    def __init__(self, page: HeadDocument, progress: Progress) -> None:
        self._header, self._progress = page["header"], progress
        self.notes = self._header["notes"]

    def measure(self, name: str, function: Callable[[Progress], T]) -> T | None:
        """What a function returns that is called with a Progress; None if it fails or is interrupted."""
        if self._header["stopped"]:
            return None

        def progress(stage: str, done: float, total: float | None) -> None:
            stop_if_interrupted()
            self._progress(name, done, total)

        try:
            progress(name, 0, 1)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                result = function(progress)
            messages = [str(warning.message) for warning in caught]
            self.notes += [f"{name}: {message}" for message in messages if _is_ours(message)]
        except Interrupted:
            self._header["stopped"] = True
            self.notes.append(f"{name}: interrupted; this part and all later parts are left out")
            return None
        except Exception as error:  # whatever an unusual model does, the rest of the page stands
            self.notes.append(left_out(name, error))
            return None
        self._progress(name, 1, 1)
        return result


def _is_ours(message: str) -> bool:
    return message.startswith(("diversity:", "roles:", "importance:"))


def _rank(
    page: HeadDocument,
    table: HeadTable,
    model: nn.Module,
    batches: Sequence[Batch],
    sample: Sample,
    parts: _Parts,
) -> dict[str, HeadTable]:
    """Fill in the importance of heads on a sample; returns the rankings by method."""
    parts.notes.append(f"roles, importance, redundancy and the curve are measured on {sample.note}")
    if sample.piece:
        parts.notes.append(f"of each of these texts no more than the first {sample.piece} tokens were read")
    if doubts_in(table).unverified:
        parts.notes.append("heads that are not verified are not silenced, neither alone nor in the curve")
    ranked = parts.measure(
        "importance",
        lambda progress: page_measurements.fisher_ranking(model, batches, ESTIMATES, progress),
    )
    rankings = {} if ranked is None else {"fisher": ranked}
    if all(isinstance(batch, LabelledBatch) for batch in batches):
        by_labels = parts.measure(
            "importance",
            lambda progress: page_measurements.ranking(model, batches, "gradient", progress),
        )
        rankings |= {} if by_labels is None else {"gradient": by_labels}
    page["importance"] = head_numbers.importance(rankings, table) | page["importance"]
    return rankings


def _judge(
    page: HeadDocument,
    table: HeadTable,
    model: nn.Module,
    batches: Sequence[Batch],
    rankings: Mapping[str, HeadTable],
    tokenizer: PreTrainedTokenizerBase | None,
    parts: _Parts,
) -> None:
    """Fill in redundancy, roles and the curve on a sample."""
    judged = parts.measure(
        "redundancy",
        lambda progress: page_measurements.redundancy(model, batches, outputs=True, progress=progress),
    )
    if judged is not None:
        page["redundancy"] = head_numbers.redundancy(judged, table)
        page["heads"] = head_numbers.heads(table, judged)
    evidence = parts.measure(
        "roles",
        lambda progress: page_measurements.roles_of_heads(model, batches, tokenizer, CONTEXT, progress),
    )
    if evidence is not None:
        page["roles"] = head_numbers.roles(evidence, table)
    if rankings:
        first = batches[0]
        few_texts = first if isinstance(first, LabelledBatch) else fewer(first, token_limit(model) // 8)
        page["curve"] = parts.measure(
            "curve",
            lambda progress: page_measurements.silencing_curve(model, [few_texts], rankings, progress),
        )


def _most_important(table: HeadTable, ranking: HeadTable | None) -> list[int]:
    """The rows of a table, the most important first; without importance, those of the least entropy."""
    if ranking is not None:
        value = ranking["importance"][head_numbers.aligned(ranking, table)]
    elif "entropy_normalised" in table.sums:
        value = -table["entropy_normalised"]
    else:
        value = torch.zeros(len(table), dtype=torch.float64)
    order: list[int] = value.nan_to_num(-1e300).argsort(descending=True, stable=True).tolist()
    return order


def _leave_one_out(changes: Sequence[Sequence[float | None]], measure: str) -> Measured:
    """Leave-one-out as a method of importance: the mean over the examples on which heads were silenced."""
    values = torch.tensor([[torch.nan if x is None else x for x in one] for one in changes]).double()
    mean = values.nanmean(0)
    error = values.std(0) / len(changes) ** 0.5 if len(changes) > 1 else torch.full_like(mean, torch.nan)
    return {"mean": plain(mean), "se": plain(error), "measure": measure}
