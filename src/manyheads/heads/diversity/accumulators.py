"""The sums over batches, for every pair of heads that can be compared."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor

from manyheads.common.types import JsonObject
from manyheads.heads.diversity.attention_distance import RowSums
from manyheads.heads.diversity.collect import CallRecord
from manyheads.heads.diversity.output_moments import Moments, Outputs
from manyheads.heads.diversity.pair_sums import Pairs


class Sums:
    """The sums over batches: attention rows, outputs, gradients, and which heads met.

    across: whether outputs are compared between layers, too.
    """

    def __init__(self, across: bool = True) -> None:
        self.first: dict[str, int] = {}  # the number of a site's first head
        self.heads = 0
        self.tokens: dict[str, int] = {}
        self.rows = RowSums()
        self.moments = Moments(across)
        self.pairs = Pairs("meetings", "gradients", "gradient meetings")

    def add(self, records: Iterable[CallRecord]) -> None:
        """Add the calls of one batch."""
        meetings: dict[Hashable, list[CallRecord]] = {}
        for record in records:
            if record.site.name not in self.first:
                self.first[record.site.name] = self.heads
                self.heads += record.site.heads
                self.pairs.reserve(self.heads)
                self.rows.pairs.reserve(self.heads)
            self.tokens[record.site.name] = self.tokens.get(record.site.name, 0) + record.tokens
            meetings.setdefault(record.meeting, []).append(record)
        for group in meetings.values():
            if group[0].tokens:
                self._meet(group)

    def _meet(self, group: list[CallRecord]) -> None:
        heads = self._numbers(group)
        self.pairs.add("meetings", heads, torch.ones(len(heads), len(heads)))
        rows = [record.rows for record in group if record.rows is not None]
        if rows:
            self.rows.add(torch.cat(rows), heads, group[0].tokens / rows[0].shape[1])
        outputs = [
            Outputs(record.site.name, record.outputs) for record in group if record.outputs is not None
        ]
        if outputs:
            self.moments.add(outputs)
        with_gradient = [record for record in group if record.gradient is not None]
        if with_gradient:
            gradient = torch.cat(
                [record.gradient for record in with_gradient if record.gradient is not None], 1
            )
            heads = self._numbers(with_gradient)
            self.pairs.add("gradients", heads, gradient.T @ gradient)
            self.pairs.add("gradient meetings", heads, torch.ones(len(heads), len(heads)))

    def _numbers(self, group: list[CallRecord]) -> Tensor:
        starts = [(self.first[record.site.name], record.site.heads) for record in group]
        return torch.tensor([start + head for start, count in starts for head in range(count)])

    def merge(self, others: Sums) -> None:
        """Add the sums of the same model over other batches."""
        if others.first != self.first:
            raise ValueError(
                "merge: attention was called at other sites, or in another order, in one part of the text "
                "than in another; such a model must be measured as a whole"
            )
        for site, tokens in others.tokens.items():
            self.tokens[site] += tokens
        self.pairs.merge(others.pairs)
        self.rows.pairs.merge(others.rows.pairs)
        self.moments.merge(others.moments)

    def document(self) -> dict[str, object]:
        """The sums as nested dictionaries of tensors and plain values, to be saved."""
        return {
            "first": self.first, "heads": self.heads, "tokens": self.tokens,
            "rows": vars(self.rows.pairs), "pairs": vars(self.pairs), "moments": vars(self.moments),
        }  # fmt: skip

    @classmethod
    def restored(cls, document: JsonObject) -> Sums:
        """What `document` gave."""
        sums = cls()
        sums.first, sums.heads, sums.tokens = (document[name] for name in ("first", "heads", "tokens"))
        vars(sums.rows.pairs).update(document["rows"])
        vars(sums.pairs).update(document["pairs"])
        vars(sums.moments).update(document["moments"])
        return sums

    @property
    def met(self) -> Tensor:
        """Which heads can be compared: they saw the same queries and keys each time that either was seen."""
        return self.pairs.where_always("meetings", self.pairs["meetings"]).isfinite()
