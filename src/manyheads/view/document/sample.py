"""Which part of a corpus a document is made from: a few inputs to show, and a small sample to measure on."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.data.batches import Corpus, bucketed

# Tokens that the extra measurements read, fewer of a large model's: its parameters times tokens are bounded.
TOKENS, FEWEST, WORK = 2048, 256, 4e11
# Examples that are wanted: their lengths.
LENGTHS = (14, 28, 56)
# No example is longer than this, and one that stands in for a short one is as long as that.
LONGEST, CUT = 1024, 32
NEIGHBOURS = 48


@dataclass
class Sample:
    """What the extra measurements read.

    batches: a few batches, for measurements.
    examples: batches of one sequence, to be shown.
    others: batches of one sequence, whose outputs are the neighbours that are named.
    note: what it is, in words.
    """

    batches: list[Any] = field(default_factory=list)
    examples: list[Any] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)
    note: str = ""


def tokens_for(model: nn.Module) -> int:
    """How many tokens the extra measurements of a model may read.

    >>> tokens_for(nn.Linear(2, 2))
    2048
    """
    size = sum(p.numel() for p in model.parameters())
    return int(min(TOKENS, max(FEWEST, WORK / max(1, size))))


def of_corpus(corpus: Corpus, model: nn.Module) -> Sample:
    """A fair sample of a corpus, the same every time."""
    most = tokens_for(model)
    order = list(range(len(corpus.sizes)))
    random.Random(0).shuffle(order)
    chosen: list[int] = []
    read = 0
    for i in order:
        if read + corpus.sizes[i] <= most or not chosen:
            chosen.append(i)
            read += corpus.sizes[i]
    sizes = [corpus.sizes[i] for i in chosen]
    plan = bucketed(sizes, max(most // 4, *sizes), corpus.padding)
    batches = [shortened(corpus.make([chosen[n] for n in part]), most) for part in plan]
    if corpus.unit != "tokens":
        shown = [corpus.make([i]) for i in range(min(3, len(corpus.sizes)))]
        note = f"{len(chosen)} of {len(corpus.sizes)} {corpus.unit}"
        return Sample(batches, shown, [], note)
    examples = [corpus.make([i]) for i in _lengths(corpus.sizes)]
    if min(corpus.sizes) > 2 * max(LENGTHS):
        examples.insert(0, shortened(corpus.make([0]), CUT))
    near = sorted(order[: 4 * NEIGHBOURS], key=lambda i: corpus.sizes[i])[:NEIGHBOURS]
    others = [corpus.make([i]) for i in near if corpus.sizes[i] <= LONGEST]
    note = f"{read:,} tokens in {len(chosen)} of {len(corpus.sizes)} texts"
    return Sample(batches, examples, others, note)


def _lengths(sizes: Sequence[int]) -> list[int]:
    """Sequences of the wanted lengths, and the longest that can be shown."""
    found: list[int] = []
    for wanted in LENGTHS:
        left = [i for i in range(len(sizes)) if i not in found]
        best = min(left, key=lambda i: abs(sizes[i] - wanted), default=None)
        if best is not None and sizes[best] <= 2 * wanted:
            found.append(best)
    fitting = [i for i in range(len(sizes)) if sizes[i] <= LONGEST and i not in found]
    longest = max(fitting, key=lambda i: sizes[i], default=None)
    if longest is not None and (not found or sizes[longest] > max(sizes[i] for i in found)):
        found.append(longest)
    return found or [min(range(len(sizes)), key=lambda i: sizes[i])]


class Kept:
    """Batches on their way, the first few of them kept.

    >>> kept = Kept([torch.ones(1, 5), torch.ones(1, 5)], most=5)
    >>> len(list(kept)), len(kept.batches)
    (2, 1)
    """

    def __init__(self, batches: Iterable[Any], most: int) -> None:
        self._given, self._left = batches, most
        self.batches: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        for batch in self._given:
            if self._left > 0:
                self.batches.append(batch)
                first = next(iter(tensors(batch)), None)
                shape = (1,) if first is None else first.shape[:2]
                self._left -= int(torch.Size(shape).numel())
            yield batch


def of_batches(batches: Sequence[Any], model: nn.Module) -> Sample:
    """A sample of batches that somebody gave, whatever they are."""
    most = tokens_for(model)
    batches = [_fewer(batch, most) for batch in batches]
    rows = [row for batch in batches for row in singles(batch)]
    sizes = [_length(row) for row in rows]
    examples = [rows[i] for i in _lengths(sizes)] if rows else list(batches[:1])
    if rows and min(sizes) > 2 * max(LENGTHS) and _ids(rows[0]):
        examples.insert(0, shortened(rows[0], CUT))
    note = "the first batch" if len(batches) == 1 else f"the first {len(batches)} batches"
    return Sample(batches, examples, rows[:NEIGHBOURS], f"{note} (up to {most:,} tokens)")


def _fewer(batch: Any, most: int) -> Any:
    """A batch with fewer and shorter sequences, where it is known which axis is which."""
    whole = list(tensors(batch))
    if not _ids(batch) or any(x.dim() == 0 or len(x) != len(whole[0]) for x in whole):
        return batch
    rows = max(2, most // max(1, _length(batch)))
    return shortened(_mapped(batch, lambda x: x[:rows]), most)


def singles(batch: Any) -> list[Any]:
    """The sequences or pictures of a batch one by one, without padding; none where they cannot be told apart.

    >>> mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    >>> batch = {"input_ids": torch.ones(2, 3).long(), "attention_mask": mask}
    >>> [one["input_ids"].shape for one in singles(batch)]
    [torch.Size([1, 2]), torch.Size([1, 3])]
    """
    whole = list(tensors(batch))
    if not whole or not (_ids(batch) or any(x.dim() == 4 for x in whole)):
        return []
    number = len(whole[0])
    if any(x.dim() == 0 or len(x) != number for x in whole):
        return []
    found = []
    for i in range(number):
        one = _mapped(batch, lambda x, i=i: x[i : i + 1])
        if isinstance(one, Mapping):
            one = _unpadded(dict(one), "attention_mask", "decoder")
            one = _unpadded(one, "decoder_attention_mask", "")
        found.append(one)
    return found


def _unpadded(batch: dict[str, Any], name: str, not_of: str) -> dict[str, Any]:
    mask = batch.get(name)
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return batch
    real = mask[0].nonzero().flatten()
    own = {
        key
        for key, x in batch.items()
        if isinstance(x, Tensor)
        and x.shape[:2] == mask.shape
        and not (not_of and key.startswith(not_of))
        and (not_of or key.startswith("decoder") or key == "labels")
    }
    return {key: x[:, real] if key in own else x for key, x in batch.items()}


def shortened(batch: Any, length: int) -> Any:
    """The beginning of a sequence: whatever has a number for each token is cut."""
    whole = _length(batch)
    return _mapped(batch, lambda x: x[:, :length] if x.dim() > 1 and x.shape[1] == whole else x)


def _ids(batch: Any) -> bool:
    return any(x.dim() == 2 and not x.is_floating_point() and x.dtype != torch.bool for x in tensors(batch))


def _length(batch: Any) -> int:
    return next((x.shape[1] for x in tensors(batch) if x.dim() > 1), 1)


def tensors(batch: Any) -> Iterator[Tensor]:
    """The tensors of a batch, whatever it is."""
    values: Iterable[Any] = (
        batch.values()
        if isinstance(batch, Mapping)
        else batch
        if isinstance(batch, tuple | list)
        else [batch]
    )
    yield from (value for value in values if isinstance(value, Tensor))


def _mapped(batch: Any, change: Any) -> Any:
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {name: _mapped(item, change) for name, item in batch.items()}
    return tuple(_mapped(item, change) for item in batch) if isinstance(batch, tuple | list) else batch
