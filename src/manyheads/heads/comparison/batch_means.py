"""What the heads of a model do on each batch, and how far their attention is from another model's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manyheads.common.devices import device_of, to_device
from manyheads.common.labelled_batch import without_labels
from manyheads.common.nested_tensors import tensors_in
from manyheads.common.preserved_state import evaluating
from manyheads.common.progress import Progress
from manyheads.common.types import Batch
from manyheads.heads.comparison.matching import have_the_same_sites
from manyheads.heads.diversity.attention_distance import jensen_shannon_between
from manyheads.heads.diversity.collect import Collector
from manyheads.heads.table import HeadTable
from manyheads.heads.watch import watch


@dataclass(eq=False)
class BatchMeans:
    """One model on its batches.

    table: of all batches together.
    means: for each metric its mean on every batch, (batches, heads); NaN where nothing was counted.
    """

    table: HeadTable
    means: dict[str, Tensor]

    def __len__(self) -> int:
        return len(next(iter(self.means.values())))


class WatchedModel:
    """A model that is watched, batch by batch, with attention rows of sampled queries."""

    def __init__(
        self,
        model: nn.Module,
        tokens: Mapping[str, Iterable[int]] | None,
        rows: int,
        seed: int,
        stack: ExitStack,
    ) -> None:
        self._device = device_of(model)
        stack.enter_context(evaluating(model))
        self._seen = stack.enter_context(watch(model, "full", tokens=tokens))
        self._collector = stack.enter_context(
            Collector(model, rows=rows, outputs=False, gates=False, seed=seed)
        )
        self._sums: list[BySite] = []  # after each batch

    def run(self, batch: Batch) -> dict[str, tuple[object, Tensor]]:
        """Run a batch: for each site the queries sampled, and their attention (heads, rows, keys)."""
        batch = to_device(without_labels(batch), self._device)
        records, _ = self._collector.run(batch)
        self._sums.append(_by_site(self._seen.table))
        sites = [record.site.name for record in records]
        return {
            record.site.name: (record.meeting[-2:], record.rows)  # type: ignore[index]
            for record in records
            if record.rows is not None and sites.count(record.site.name) == 1
        }

    def side(self) -> BatchMeans:
        """What was collected."""
        table = self._seen.table
        means = {
            name: torch.stack([self._mean(n, name) for n in range(len(self._sums))]) for name in table.metrics
        }
        return BatchMeans(table, means)

    def _mean(self, number: int, metric: str) -> Tensor:
        """The mean of a metric on one batch, (heads,); NaN at a site that the batch did not reach."""
        mean = torch.full((len(self._seen.table),), torch.nan, dtype=torch.float64)
        for site, rows in _rows_by_site(self._seen.table).items():
            nothing = torch.zeros(2, len(rows), dtype=torch.float64)
            after = self._sums[number].get((metric, site), nothing)
            before = self._sums[number - 1].get((metric, site), nothing) if number else nothing
            count, total = after - before
            mean[rows] = total / count
        return mean


BySite = dict[tuple[str, str], Tensor]  # count and sum (2, heads), by metric and site


def _by_site(table: HeadTable) -> BySite:
    rows = _rows_by_site(table)
    return {
        (name, site): value[:2, numbers].double()
        for name, value in table.sums.items()
        for site, numbers in rows.items()
    }


def _rows_by_site(table: HeadTable) -> dict[str, list[int]]:
    rows: dict[str, list[int]] = {}
    for number, row in enumerate(table.rows):
        rows.setdefault(row.site, []).append(number)
    return rows


def run_both(
    models: tuple[nn.Module, nn.Module],
    batches: tuple[Sequence[Batch], Sequence[Batch]],
    tokens: Mapping[str, Iterable[int]] | None,
    *,
    rows: int,
    seed: int,
    progress: Progress,
) -> tuple[BatchMeans, BatchMeans, Tensor | None]:
    """Both sides, and the distance of attention between every head of one and every head of the other on each
    batch, (batches, heads, others), where both read the same tokens; NaN between heads not compared.
    """
    same = len(batches[0]) == len(batches[1]) and all(
        _same(one, other) for one, other in zip(*batches, strict=True)
    )
    if not same:
        first, second = _run_in_turn(models, batches, tokens, progress)
        return first, second, None
    with torch.no_grad(), ExitStack() as stack:
        heads = WatchedModel(models[0], tokens, rows, seed, stack)
        others = heads if models[0] is models[1] else WatchedModel(models[1], tokens, rows, seed, stack)
        distances = []
        for number, batch in enumerate(batches[0], 1):
            seen = heads.run(batch)
            distances.append(_distances(seen, seen if others is heads else others.run(batch)))
            progress("compare", number, len(batches[0]))
        sides = heads.side(), others.side()
    return *sides, torch.stack([_arrange(each, *sides) for each in distances])


def _run_in_turn(
    models: Iterable[nn.Module],
    batches: tuple[Sequence[Batch], Sequence[Batch]],
    tokens: Mapping[str, Iterable[int]] | None,
    progress: Progress,
) -> list[BatchMeans]:
    """Both sides without distances; they may be the same model."""
    sides, done = [], 0
    for model, of_model in zip(models, batches, strict=True):
        with torch.no_grad(), ExitStack() as stack:
            heads = WatchedModel(model, tokens, 0, 0, stack)
            for batch in of_model:
                heads.run(batch)
                done += 1
                progress("compare", done, sum(map(len, batches)))
            sides.append(heads.side())
    return sides


def _same(one: Batch, other: Batch) -> bool:
    tensors = list(tensors_in(one)), list(tensors_in(other))
    return len(tensors[0]) == len(tensors[1]) and all(map(torch.equal, *tensors))


Distances = dict[tuple[str, str], Tensor]


def _distances(seen: dict[str, tuple[object, Tensor]], others: dict[str, tuple[object, Tensor]]) -> Distances:
    """The distance (heads, others) of each pair of sites that attend from the same queries to the same keys:
    of the same name, if both models have the same sites, else of all.
    """
    heads, numbers = ({site: len(rows) for site, (_, rows) in side.items()} for side in (seen, others))
    same_sites = have_the_same_sites(heads, numbers)
    distances: Distances = {}
    for site, (queries, rows) in seen.items():
        for name, (other_queries, other_rows) in others.items():
            if (
                (same_sites and site != name)
                or queries != other_queries
                or rows.shape[1:] != other_rows.shape[1:]
            ):
                continue
            divergence = jensen_shannon_between(rows, other_rows.to(rows.device))
            distances[site, name] = divergence.sqrt().mean(-1).cpu()
    return distances


def _arrange(distances: Distances, side: BatchMeans, other: BatchMeans) -> Tensor:
    """Distances in the order of the rows of both tables."""
    whole = torch.full((len(side.table), len(other.table)), torch.nan, dtype=torch.float64)
    for (site, name), values in distances.items():
        rows, columns = _rows_by_site(side.table)[site], _rows_by_site(other.table)[name]
        heads = [side.table.rows[i].head for i in rows]
        numbers = [other.table.rows[i].head for i in columns]
        whole[torch.tensor(rows)[:, None], torch.tensor(columns)] = values[heads][:, numbers]
    return whole
