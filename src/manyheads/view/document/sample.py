"""Which part of a corpus a document is made from: a few inputs to show, and a small sample to measure on."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.common.labelled_batch import LabelledBatch, without_labels
from manyheads.common.nested_tensors import map_tensors, tensors_in
from manyheads.common.types import Batch
from manyheads.data.batches import WINDOW, Corpus
from manyheads.data.labelled import Labelled

# Tokens that the extra measurements read, fewer for a large model: parameters times tokens are bounded.
TOKENS, FEWEST_TOKENS, WORK = 1024, 256, 1e11
# No text is read further than this: errors are over texts, so that many beginnings say more than a few texts.
PIECE = 64
# The lengths of the examples that are wanted.
LENGTHS = (14, 28, 56)
# No example is longer than LONGEST; where all are long, the first one is also shown cut to CUT tokens.
LONGEST, CUT = 1024, 32
NEIGHBOURS = 48


@dataclass
class Sample:
    """What the extra measurements of a document read.

    Attributes
    ----------
    batches: a few batches to measure on.
    examples: batches of one sequence, to be shown.
    labels: what is right for each example, for people; empty where there are no labels.
    others: batches of one sequence; their outputs are the neighbours that are named.
    note: where the sample comes from, in words.
    piece: how many tokens of a text were read, where texts are longer; 0 where they were read whole.
    """

    batches: list[Batch] = field(default_factory=list)
    examples: list[Batch] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    others: list[Batch] = field(default_factory=list)
    note: str = ""
    piece: int = 0


def token_limit(model: nn.Module) -> int:
    """How many tokens the extra measurements of a model may read.

    >>> token_limit(nn.Linear(2, 2))
    1024
    """
    size = sum(p.numel() for p in model.parameters())
    return int(min(TOKENS, max(FEWEST_TOKENS, WORK / max(1, size))))


def of_corpus(corpus: Corpus, model: nn.Module) -> Sample:
    """A random sample of a corpus, the same every time: the beginnings of some texts."""
    limit = token_limit(model)
    if len(corpus.sizes) > WINDOW:
        corpus = corpus.sampled(WINDOW * PIECE)
    order = list(range(len(corpus.sizes)))
    random.Random(0).shuffle(order)
    piece = PIECE if _can_be_cut(corpus) else limit
    cut = replace(corpus, sizes=[min(piece, size) for size in corpus.sizes])
    chosen: list[int] = []
    tokens = 0
    for i in order:
        if tokens + cut.sizes[i] <= limit or not chosen:
            chosen.append(i)
            tokens += cut.sizes[i]
    plan = cut.buckets(chosen, max(limit // 4, *(cut.sizes[i] for i in chosen)))
    batches = [shortened(corpus.make(part), piece) for part in plan]
    if not all(isinstance(batch, LabelledBatch) for batch in batches):  # a part of a text has no label
        batches = [without_labels(batch) for batch in batches]
    if corpus.unit != "tokens":
        shown = range(min(3, len(corpus.sizes)))
        note = f"{len(chosen)} of {len(corpus.sizes)} {corpus.unit}"
        return Sample(batches, [corpus.make([i]) for i in shown], [corpus.label(i) for i in shown], [], note)
    wanted = _of_wanted_lengths(corpus.sizes)
    examples, labels = [corpus.make([i]) for i in wanted], [corpus.label(i) for i in wanted]
    if min(corpus.sizes) > 2 * max(LENGTHS):
        examples.insert(0, shortened(corpus.make([0]), CUT))
        labels.insert(0, corpus.label(0))
    shortest = sorted(order[: 4 * NEIGHBOURS], key=lambda i: corpus.sizes[i])[:NEIGHBOURS]
    others = [corpus.make([i]) for i in shortest if corpus.sizes[i] <= LONGEST]
    note = f"{tokens:,} tokens in {len(chosen)} of {len(corpus.sizes)} texts"
    shorter = any(corpus.sizes[i] > piece for i in chosen)
    return Sample(batches, examples, labels, others, note, piece if shorter else 0)


def _can_be_cut(corpus: Corpus) -> bool:
    """Whether the beginning of a text can be read alone: it has no label, and no other text beside it."""
    if isinstance(corpus, Labelled) or corpus.unit != "tokens":
        return False
    longest = max(range(len(corpus.sizes)), key=lambda i: corpus.sizes[i])
    return len({x.shape[1] for x in tensors_in(corpus.make([longest])) if x.dim() > 1}) == 1


def _of_wanted_lengths(sizes: Sequence[int]) -> list[int]:
    """Sequences of about the wanted lengths, and the longest that can be shown."""
    chosen: list[int] = []
    for wanted in LENGTHS:
        left = [i for i in range(len(sizes)) if i not in chosen]
        best = min(left, key=lambda i: abs(sizes[i] - wanted), default=None)
        if best is not None and sizes[best] <= 2 * wanted:
            chosen.append(best)
    fitting = [i for i in range(len(sizes)) if sizes[i] <= LONGEST and i not in chosen]
    longest = max(fitting, key=lambda i: sizes[i], default=None)
    if longest is not None and (not chosen or sizes[longest] > max(sizes[i] for i in chosen)):
        chosen.append(longest)
    return chosen or [min(range(len(sizes)), key=lambda i: sizes[i])]


class FirstBatches:
    """An iterable of batches that remembers the first few.

    >>> first = FirstBatches([torch.ones(1, 5), torch.ones(1, 5)], tokens=5)
    >>> len(list(first)), len(first.batches)
    (2, 1)
    """

    def __init__(self, batches: Iterable[Batch], tokens: int) -> None:
        self._source, self._left = batches, tokens
        self.batches: list[Batch] = []

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._source:
            if self._left > 0:
                self.batches.append(batch)
                first = next(tensors_in(batch), None)
                shape = (1,) if first is None else first.shape[:2]
                self._left -= int(torch.Size(shape).numel())
            yield batch


def of_batches(batches: Sequence[Batch], model: nn.Module) -> Sample:
    """A sample of batches: their beginning. Sequences are shown one by one where they can be separated."""
    limit = token_limit(model)
    batches = [fewer(batch, limit) for batch in batches]
    rows = [row for batch in batches for row in singles(batch)]
    sizes = [_length(row) for row in rows]
    examples = [rows[i] for i in _of_wanted_lengths(sizes)] if rows else list(batches[:1])
    if rows and min(sizes) > 2 * max(LENGTHS) and _has_ids(rows[0]):
        examples.insert(0, shortened(rows[0], CUT))
    note = "the first batch" if len(batches) == 1 else f"the first {len(batches)} batches"
    labels = [each.examples[0].shown if isinstance(each, LabelledBatch) else "" for each in examples]
    return Sample(batches, examples, labels, rows[:NEIGHBOURS], f"{note} (up to {limit:,} tokens)")


def fewer(batch: Batch, limit: int) -> Batch:
    """A batch with fewer and shorter sequences, where it is clear which axis is which."""
    tensors = list(tensors_in(batch))
    if not _has_ids(batch) or any(x.dim() == 0 or len(x) != len(tensors[0]) for x in tensors):
        return batch
    rows = max(2, limit // max(1, _length(batch)))
    return shortened(map_tensors(lambda x: x[:rows], batch), limit)


def singles(batch: Batch) -> list[Batch]:
    """The sequences or images of a batch one by one, without padding; none where they cannot be separated.

    >>> mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    >>> batch = {"input_ids": torch.ones(2, 3).long(), "attention_mask": mask}
    >>> [one["input_ids"].shape for one in singles(batch)]
    [torch.Size([1, 2]), torch.Size([1, 3])]
    """
    tensors = list(tensors_in(batch))
    if not tensors or not (_has_ids(batch) or any(x.dim() == 4 for x in tensors)):
        return []
    number = len(tensors[0])
    if any(x.dim() == 0 or len(x) != number for x in tensors):
        return []
    rows: list[Batch] = []
    for i in range(number):
        row = map_tensors(lambda x, i=i: x[i : i + 1], batch)  # type: ignore[misc]
        if isinstance(row, LabelledBatch):
            row.examples = row.examples[i : i + 1]
        if isinstance(row, Mapping):
            row = _unpadded(row, "attention_mask", "decoder")
            row = _unpadded(row, "decoder_attention_mask", "")
        rows.append(row)
    return rows


def _unpadded(batch: Mapping[str, Any], name: str, not_of: str) -> Mapping[str, object]:
    """A batch of one sequence without what the mask of that name hides."""
    mask = batch.get(name)
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return batch
    real = mask[0].nonzero().flatten()
    masked = {
        key
        for key, x in batch.items()
        if isinstance(x, Tensor)
        and x.shape[:2] == mask.shape
        and not (not_of and key.startswith(not_of))
        and (not_of or key.startswith("decoder") or key == "labels")
    }
    unpadded = {key: x[:, real] if key in masked else x for key, x in batch.items()}
    return (
        LabelledBatch(unpadded, batch.task, batch.examples) if isinstance(batch, LabelledBatch) else unpadded
    )


def shortened(batch: Batch, length: int) -> Batch:
    """The beginning of a sequence: every tensor with a value for each token is cut."""
    full = _length(batch)
    if full <= length:
        return batch
    batch = without_labels(batch)
    cut: Batch = map_tensors(lambda x: x[:, :length] if x.dim() > 1 and x.shape[1] == full else x, batch)
    return cut


def _has_ids(batch: Batch) -> bool:
    return any(
        x.dim() == 2 and not x.is_floating_point() and x.dtype != torch.bool for x in tensors_in(batch)
    )


def _length(batch: Batch) -> int:
    return next((x.shape[1] for x in tensors_in(batch) if x.dim() > 1), 1)
