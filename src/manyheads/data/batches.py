"""The batches of a corpus: bucketed by length, the same for every process."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import overload

import torch
from torch import Tensor

from manyheads.common.nested_tensors import tensors_in
from manyheads.common.numbered_batches import Numbered
from manyheads.common.types import Batch

BATCH_TOKENS = 4096
# Rare are the rarest tokens that together make up this share of a corpus; frequent, the most frequent ones.
QUARTER = 0.25
# Sequences that are put into batches together.
WINDOW = 2**16


@dataclass(frozen=True)
class CorpusSummary:
    """What a reader has to know about a corpus besides what was measured on it, by the names of `Corpus`.

    >>> CorpusSummary("a text", "tokens", 19, 7, 4096).total()
    19
    """

    what: str
    unit: str
    units: int
    longest: int
    batch_tokens: int
    shares: dict[str, float] = field(default_factory=dict)
    unknown: float | None = None
    notes: list[str] = field(default_factory=list)

    def total(self) -> int:
        """The number of tokens (or images)."""
        return self.units


@dataclass
class Corpus:
    """What a model is to read: sequences of token ids, images, or the examples of a task.

    Attributes
    ----------
    what: its name, for people.
    unit: what is counted: ``tokens``, ``images`` or the unit of a task.
    sizes: the number of tokens of each sequence.
    make: from the indices of some sequences to the batch that the model takes.
    batch_tokens: the most tokens of a batch, padding included.
    padding: whether sequences of different lengths may share a batch.
    groups: token ids by the name of their group, for `watch`.
    shares: the share of the corpus that each group makes up.
    unknown: the share of unknown tokens; None if the tokenizer has no unknown token.
    sampled_from: the number of sequences of the corpus that this is a sample of; 0 where it is the whole.
    drawn_from: the number of texts from which some were drawn as they were read; 0 where all are kept.
    """

    what: str
    unit: str
    sizes: Sequence[int]
    make: Callable[[Sequence[int]], Batch] = field(repr=False)
    batch_tokens: int = BATCH_TOKENS
    padding: bool = True
    groups: dict[str, list[int]] = field(default_factory=dict, repr=False)
    shares: dict[str, float] = field(default_factory=dict)
    unknown: float | None = None
    sampled_from: int = 0
    drawn_from: int = 0

    @property
    def reading(self) -> str:
        """What is read as what, in a sentence; "" where there is nothing to say."""
        return ""

    @property
    def notes(self) -> list[str]:
        """Sentences that a reader of the results should know."""
        sentences = []
        if self.drawn_from:
            sentences.append(
                f"measured on a sample: {len(self.sizes):,} sequences ({sum(self.sizes):,} tokens) of texts "
                f"that were drawn at random from {self.drawn_from:,}"
            )
        elif self.sampled_from:
            sentences.append(
                f"measured on a sample of {len(self.sizes):,} of {self.sampled_from:,} "
                f"{'texts' if self.unit == 'tokens' else self.unit} ({sum(self.sizes):,} tokens)"
            )
        if self.unknown:
            sentences.append(
                f"{self.unknown:.1%} of the tokens are unknown to the tokenizer: one token stands for all "
                "these words, and what heads do with it says nothing about them"
            )
        return sentences

    @property
    def longest(self) -> int:
        """The number of tokens of the longest sequence."""
        return max(self.sizes)

    @property
    def summary(self) -> CorpusSummary:
        """What a reader has to know about it."""
        return CorpusSummary(
            self.what, self.unit, self.total(), self.longest, self.batch_tokens, self.shares, self.unknown,
            self.notes,
        )  # fmt: skip

    @property
    def fingerprint(self) -> str:
        """A short name for all that a model reads: what is in every batch, and the order of the batches.

        >>> ids = torch.tensor([7, 3]), torch.tensor([7, 5])
        >>> one, other = (Corpus("a text", "tokens", [2], lambda _, x=x: x) for x in ids)
        >>> one.fingerprint == one.fingerprint, one.fingerprint == other.fingerprint
        (True, False)
        """
        digest = hashlib.sha256(str(sorted(self.groups.items())).encode())
        for _, batch in self.batches():
            for tensor in tensors_in(batch):
                digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
                digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def part(self, indices: Sequence[int]) -> Corpus:
        """Some of the sequences, as a corpus."""
        chosen, make = list(indices), self.make
        sizes = [self.sizes[i] for i in chosen]
        return replace(self, sizes=sizes, make=lambda some: make([chosen[i] for i in some]))

    def sampled(self, tokens: int, seed: int = 0) -> Corpus:
        """A random sample of the sequences that has at most this many tokens, the same every time.

        The corpus itself where it has no more, and for 0. Sequences are drawn one by one until the next one
        would be too many, whatever its length, so that long ones are as likely as short ones. One sequence is
        always in it.

        >>> corpus = Corpus("a text", "tokens", [5, 7, 3, 4], lambda indices: torch.tensor(indices))
        >>> sample = corpus.sampled(12)
        >>> sum(sample.sizes) <= 12, sample.notes
        (True, ['measured on a sample of 2 of 4 texts (8 tokens)'])
        >>> corpus.sampled(19) is corpus, corpus.sampled(0) is corpus
        (True, True)
        """
        if not tokens or sum(self.sizes) <= tokens:
            return self
        generator, number = random.Random(seed), len(self.sizes)
        if number > WINDOW:  # a sequence has a token or more: no more of them than tokens are drawn
            order = generator.sample(range(number), min(number, tokens + 1))
        else:
            generator.shuffle(order := list(range(number)))
        room, count = tokens - self.sizes[order[0]], 1
        while count < len(order) and room >= self.sizes[order[count]]:
            room -= self.sizes[order[count]]
            count += 1
        sample = self.part(sorted(order[:count]))
        sample.sampled_from = self.sampled_from or len(self.sizes)
        return sample

    def batches(self, rank: int = 0, processes: int = 1) -> Iterator[tuple[int, Batch]]:
        """The batches of one process, each with the number of its tokens (or images).

        The batches do not depend on the number of processes that share them.
        """
        for indices in islice(self.plan(), rank, None, processes):
            yield (
                sum(self.sizes[i] for i in indices) if self.unit == "tokens" else len(indices),
                self.make(indices),
            )

    def numbered(self, share: tuple[int, int] = (0, 1)) -> Numbered[Batch]:
        """The batches of a share, (number from 0, count), each with its number among all of them."""
        total = len(self.plan())
        return Numbered(_Batches(self, share), range(total)[share[0] :: share[1]], total)

    def plan(self) -> Sequence[list[int]]:
        """The indices of the sequences of each batch, shuffled: a part of them is a fair sample.

        Of many sequences, `WINDOW` at a time are put into batches, so that memory does not grow with them.
        """
        windows = [range(at, min(at + WINDOW, len(self.sizes))) for at in range(0, len(self.sizes), WINDOW)]
        if len(windows) > 1:
            random.Random(0).shuffle(windows)
            return WindowedPlan(windows, self._shuffled)
        return self._shuffled(range(len(self.sizes)))

    def _shuffled(self, indices: Sequence[int]) -> list[list[int]]:
        planned = self.buckets(indices)
        random.Random(0).shuffle(planned)
        return planned

    def buckets(
        self, indices: Sequence[int] | None = None, batch_tokens: int | None = None
    ) -> list[list[int]]:
        """Some of the sequences (all by default) in batches of similar lengths, the longest first."""
        chosen = list(range(len(self.sizes)) if indices is None else indices)
        plan = bucketed([self.sizes[i] for i in chosen], batch_tokens or self.batch_tokens, self.padding)
        return [[chosen[n] for n in part] for part in plan]

    def label(self, index: int) -> str:
        """What is right for a sequence, for people; "" where nothing is."""
        return ""

    def total(self, rank: int = 0, processes: int = 1) -> int:
        """The number of tokens (or images) of one process."""
        plan = islice(self.plan(), rank, None, processes)
        return sum(
            sum(self.sizes[i] for i in batch) if self.unit == "tokens" else len(batch) for batch in plan
        )


class _Batches:
    """The batches of a share of a corpus, as often as they are asked for."""

    def __init__(self, corpus: Corpus, share: tuple[int, int]) -> None:
        self.corpus, self.share = corpus, share

    def __iter__(self) -> Iterator[Batch]:
        return (batch for _, batch in self.corpus.batches(*self.share))


class WindowedPlan(Sequence[list[int]]):
    """The batches of many sequences, made for one window of them after the other.

    >>> plan = WindowedPlan([range(2), range(2, 5)], lambda indices: [[i] for i in indices])
    >>> len(plan), list(plan), plan[3]
    (5, [[0], [1], [2], [3], [4]], [3])
    """

    def __init__(
        self, windows: Sequence[Sequence[int]], plan: Callable[[Sequence[int]], list[list[int]]]
    ) -> None:
        self._windows, self._plan = windows, plan
        self._count: int | None = None

    def __len__(self) -> int:
        if self._count is None:
            self._count = sum(len(self._plan(window)) for window in self._windows)
        return self._count

    def __iter__(self) -> Iterator[list[int]]:
        for window in self._windows:
            yield from self._plan(window)

    @overload
    def __getitem__(self, index: int) -> list[int]: ...

    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...

    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        if isinstance(index, slice):
            return list(self)[index]
        return next(islice(self, range(len(self))[index], None))


def bucketed(sizes: Sequence[int], batch_tokens: int, padding: bool = True) -> list[list[int]]:
    """Batches of sequences of similar lengths: number times longest is at most ``batch_tokens`` in each.

    A sequence longer than that is a batch alone. Without padding, only equal lengths share a batch.

    >>> bucketed([5, 2, 3, 5, 2], batch_tokens=10)
    [[0, 3], [2, 1, 4]]
    >>> bucketed([5, 2, 3, 5, 2], batch_tokens=10, padding=False)
    [[0, 3], [2], [1, 4]]
    """
    batches: list[list[int]] = []
    longest = 0
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if batches and (len(batches[-1]) + 1) * longest <= batch_tokens and (padding or sizes[i] == longest):
            batches[-1].append(i)
        else:
            batches.append([i])
            longest = sizes[i]
    return batches


def groups(
    counts: Mapping[int, int], special: Iterable[int]
) -> tuple[dict[str, list[int]], dict[str, float]]:
    """Special, frequent and rare token ids, and the share of the corpus that each group is.

    Frequent are the most frequent tokens that together make up at most a quarter of all that are not
    special (at least one); rare, the rarest that do.

    >>> groups({1: 4, 7: 4, 8: 2, 9: 1, 5: 1}, special=[1, 2])
    ({'special': [1], 'frequent': [7], 'rare': [5, 9]},
     {'special': 0.333..., 'frequent': 0.333..., 'rare': 0.166...})
    """
    total = sum(counts.values())
    ids_by_group = {"special": sorted(set(special) & set(counts))}
    ordinary = {token: n for token, n in counts.items() if token not in set(ids_by_group["special"])}
    rising = sorted(ordinary, key=lambda token: (ordinary[token], token))
    room = QUARTER * sum(ordinary.values())
    for name, order in (("frequent", rising[::-1]), ("rare", rising)):
        ids: list[int] = []
        total_count = 0
        for token in order:
            total_count += ordinary[token]
            if ids and total_count > room:
                break
            ids.append(token)
        ids_by_group[name] = sorted(ids)
    ids_by_group = {name: ids for name, ids in ids_by_group.items() if ids}
    return ids_by_group, {
        name: sum(counts[token] for token in ids) / total for name, ids in ids_by_group.items()
    }


def unknown_id(tokenizer: object) -> int | None:
    """The id of a tokenizer's unknown token; None if it has none.

    Byte-level tokenizers name their end of text here, since nothing is unknown to them.
    """
    unknown = getattr(tokenizer, "unk_token_id", None)
    others = [getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos")]
    return unknown if isinstance(unknown, int) and unknown not in others else None


def unknown_share(counts: Mapping[int, int], tokenizer: object) -> float | None:
    """The share of tokens, counted by id, that are unknown to a tokenizer."""
    unknown = unknown_id(tokenizer)
    return None if unknown is None else counts.get(unknown, 0) / max(1, sum(counts.values()))


def padded(rows: Sequence[Sequence[int]], fill: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids ``(rows, longest)``, shorter rows filled up, and 1 where a token is real.

    >>> ids, real = padded([[5, 6, 7], [8]])
    >>> ids.tolist(), real.tolist()
    ([[5, 6, 7], [8, 0, 0]], [[1, 1, 1], [1, 0, 0]])
    """
    ids = torch.full((len(rows), max(map(len, rows))), fill)
    real = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
        real[number, : len(row)] = 1
    return ids, real
