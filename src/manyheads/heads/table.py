"""HeadTable: one row per head, with sums behind every number, so that tables merge exactly."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from manyheads.common.registry import registered
from manyheads.common.types import JsonObject
from manyheads.heads import table_files
from manyheads.heads.table_files import Row as Row

if TYPE_CHECKING:
    import pandas

METRICS = (
    "entropy", "entropy_normalised", "effective_keys", "confidence", "distance", "distance_spread", "self",
    "previous", "next", "first", "special", "rare", "local", "output_norm", "largest_logit",
)  # fmt: skip


MOST_ROWS = 60  # of a longer table, the first and the last half of these


@dataclass(eq=False)
class HeadTable:
    """One row per head: which head it is, how many tokens it was seen on, and the mean of each metric with
    its standard error.

    Parameters
    ----------
    rows: the heads.
    tokens: (heads,) how many queries counted.
    sums: for each metric its count, sum and sum of squares over queries (or batches), (3, heads) in float64.
    model: a fingerprint; tables of different models do not merge.
    profiles: for each site, for each metric its count and sum by position, (2, heads, positions).
    labels: text columns, each a list as long as the rows: ``roles``, ``twin``. `merge` leaves them out,
        except for ``verified`` and ``notes``, which are present where a site was not proved or needs an
        explanation.
    matrices: numbers for each pair of heads, (heads, heads): ``js``, ``cka``. `merge` leaves them out, too.

    See Also
    --------
    watch, inspect, roles, diversity, importance: which make tables.
    plan: which reads one.

    References
    ----------
    Clark, Khandelwal, Levy, Manning, "What does BERT look at?" (2019).

    Examples
    --------
    >>> rows = [Row("h.0.attn", 0, head, head, head, "causal") for head in range(2)]
    >>> sums = {"entropy": torch.tensor([[4.0, 4.0], [2.0, 8.0], [1.0, 16.0]], dtype=torch.float64)}
    >>> table = HeadTable(rows, torch.tensor([4.0, 4.0]), sums)
    >>> table["entropy"]
    tensor([0.5000, 2.0000], dtype=torch.float64)
    >>> table.columns
    ['site', 'layer', 'head', 'original_head', 'kv_head', 'kind', 'tokens', 'entropy', 'entropy_se']
    >>> both = table.merge(table)
    >>> both["tokens"], both["entropy"]
    (tensor([8., 8.], dtype=torch.float64), tensor([0.5000, 2.0000], dtype=torch.float64))
    """

    rows: list[Row]
    tokens: Tensor
    sums: dict[str, Tensor]
    model: str = ""
    profiles: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    labels: dict[str, list[str]] = field(default_factory=dict)
    matrices: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows = [Row(*row) for row in self.rows]
        self.tokens = torch.as_tensor(self.tokens, dtype=torch.float64)
        self.sums = {name: torch.as_tensor(value, dtype=torch.float64) for name, value in self.sums.items()}
        if self.tokens.shape != (len(self.rows),):
            raise ValueError(f"tokens: expected shape ({len(self.rows)},), got {tuple(self.tokens.shape)}")
        for name, value in self.sums.items():
            if value.shape != (3, len(self.rows)):
                raise ValueError(
                    f"sums[{name!r}]: expected shape (3, {len(self.rows)}), got {tuple(value.shape)}"
                )
        for name, words in self.labels.items():
            if len(words) != len(self.rows):
                raise ValueError(f"labels[{name!r}]: expected {len(self.rows)} words, got {len(words)}")
        square = (len(self.rows), len(self.rows))
        for name, matrix in self.matrices.items():
            if matrix.shape != square:
                raise ValueError(f"matrices[{name!r}]: expected shape {square}, got {tuple(matrix.shape)}")
        for site, by_metric in self.profiles.items():
            for name, profile in by_metric.items():
                if profile.dim() != 3 or len(profile) != 2:
                    raise ValueError(
                        f"profiles[{site!r}][{name!r}]: expected shape (2, heads, positions), got "
                        f"{tuple(profile.shape)}"
                    )
        heads = {(row.site, row.head) for row in self.rows}
        if len(heads) < len(self.rows):
            raise ValueError("rows: the same head of the same site appears twice")

    @property
    def metrics(self) -> list[str]:
        """The metrics collected, the usual ones in their usual order first."""
        return [m for m in METRICS if m in self.sums] + [m for m in self.sums if m not in METRICS]

    @property
    def columns(self) -> list[str]:
        """The names of all columns."""
        numbers = (column for name in self.metrics for column in (name, f"{name}_se"))
        return [*Row._fields, *self.labels, "tokens", *numbers]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, column: str) -> Any:
        """A column: a list for keys and labels, a float64 tensor (rows,) for numbers."""
        if column in Row._fields:
            return [getattr(row, column) for row in self.rows]
        if column in self.labels:
            return self.labels[column]
        if column == "tokens":
            return self.tokens
        name = column.removesuffix("_se")
        if name not in self.sums:
            raise KeyError(f"no column {column!r}; there are {', '.join(self.columns)}")
        count, total, squares = self.sums[name]
        mean = total / count  # nan where nothing was counted
        if name == column:
            return mean
        variance = ((squares - total * mean) / (count - 1)).clamp(min=0.0)  # nan for a single count
        return torch.where(count > 1, (variance / count).sqrt(), math.nan)

    def __iter__(self) -> Iterator[JsonObject]:
        """The rows as dictionaries."""
        columns = {c: self[c] for c in self.columns}
        values = {c: x.tolist() if isinstance(x, Tensor) else x for c, x in columns.items()}
        for i in range(len(self)):
            yield {column: values[column][i] for column in values}

    def __repr__(self) -> str:
        sites = len({row.site for row in self.rows})
        tokens = int(self.tokens.max()) if len(self) else 0
        return f"HeadTable({len(self)} heads at {sites} sites, {tokens} tokens: {', '.join(self.metrics)})"

    def __str__(self) -> str:
        """The rows as text: the heads, and the mean of each metric; not the middle of a long table."""
        return _as_text(self)

    def _repr_mimebundle_(self, **options: object) -> object:
        """In a notebook it shows itself as a page."""
        return registered("view.notebook")(self, self, **options)

    def merge(self, *others: HeadTable) -> HeadTable:
        """One table as if all had been collected together. The tables must be of the same model and
        metrics.
        """
        tables = (self, *others)
        for other in others:
            if not isinstance(other, HeadTable):
                raise TypeError(f"merge: expected a HeadTable, got {type(other).__name__}")
            if other.model != self.model:
                raise ValueError(
                    f"merge: the tables are of different models, {self.model or 'unknown'} and "
                    f"{other.model or 'unknown'}; expected one model with the same weights: keep the tables "
                    "of each apart"
                )
            if set(other.sums) != set(self.sums):
                differing = sorted(set(other.sums) ^ set(self.sums))
                raise ValueError(
                    f"merge: only one of the tables has {', '.join(differing)}; expected the same columns in "
                    "all: watch with the same statistics, tokens and segments"
                )
        rows: dict[tuple[str, int], Row] = {}
        for table in sorted(tables, key=lambda t: float(t.tokens.sum())):
            rows |= {(row.site, row.head): row for row in table.rows}
        order = {
            key: i for i, key in enumerate(dict.fromkeys((r.site, r.head) for t in tables for r in t.rows))
        }
        tokens = torch.zeros(len(order), dtype=torch.float64)
        sums = {name: torch.zeros(3, len(order), dtype=torch.float64) for name in self.sums}
        profiles: dict[str, dict[str, Tensor]] = {}
        for table in tables:
            index = torch.tensor([order[row.site, row.head] for row in table.rows], dtype=torch.long)
            tokens[index] += table.tokens
            for name, value in table.sums.items():
                sums[name][:, index] += value
            for site, by_metric in table.profiles.items():
                site_profiles = profiles.setdefault(site, {})
                for name, profile in by_metric.items():
                    site_profiles[name] = _longer(site_profiles.get(name), profile)
        labels = {name: _joined_labels(name, tables, order) for name in ("verified", "notes")}
        labels = {name: words for name, words in labels.items() if any(name in t.labels for t in tables)}
        return HeadTable([rows[key] for key in order], tokens, sums, self.model, profiles, labels)

    def profile(self, site: str, metric: str) -> Tensor:
        """The mean of a metric by position (heads, positions): of the query, or of the key for
        ``received``.
        """
        if site not in self.profiles or metric not in self.profiles[site]:
            available = {name: sorted(by_metric) for name, by_metric in self.profiles.items()}
            hint = available or "none: watch with profiles=True"
            raise KeyError(f"no profile of {metric!r} at {site!r}; there are {hint}")
        count, total = self.profiles[site][metric].unbind()
        return total / count

    def to_pandas(self) -> pandas.DataFrame:
        """The table as a pandas DataFrame."""
        try:
            import pandas
        except ImportError:
            raise ImportError("to_pandas needs pandas: pip install pandas") from None
        return pandas.DataFrame(list(self), columns=self.columns)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the table, with its sums, to a ``.json``, ``.csv`` or ``.parquet`` file, atomically."""
        table_files.save(self, path)

    @staticmethod
    def load(path: str | PathLike[str]) -> HeadTable:
        """Read what `save` wrote."""
        return table_files.load(path, HeadTable)


def _joined_labels(name: str, tables: tuple[HeadTable, ...], order: dict[tuple[str, int], int]) -> list[str]:
    """The labels of each head from all tables: the first that is a doubt, or a note."""
    words = ["yes" if name == "verified" else ""] * len(order)
    for table in reversed(tables):
        for row, word in zip(table.rows, table.labels.get(name, ()), strict=False):
            if word not in ("yes", ""):
                words[order[row.site, row.head]] = word
    return words


def _longer(a: Tensor | None, b: Tensor) -> Tensor:
    """The sum of two profiles, as long as the longer one."""
    if a is None:
        return b.clone()
    if a.shape[-1] < b.shape[-1]:
        a, b = b, a
    total = a.clone()
    total[..., : b.shape[-1]] += b
    return total


def _as_text(table: HeadTable) -> str:
    """The rows of a table, a line each: site, layer, head, labels, tokens, and the mean of each metric."""
    columns = ["site", "layer", "head", *table.labels, "tokens", *table.metrics]
    values = {
        name: table[name] if isinstance(table[name], list) else table[name].tolist() for name in columns
    }
    half = MOST_ROWS // 2
    count = len(table)
    numbers = [*range(count)] if count <= MOST_ROWS else [*range(half), *range(count - half, count)]
    cells = [[_cell(values[name][row]) for name in columns] for row in numbers]
    widths = [max(map(len, (name, *(row[i] for row in cells)))) for i, name in enumerate(columns)]
    lines = [_line(columns, widths), *(_line(row, widths) for row in cells)]
    if count > MOST_ROWS:
        lines.insert(half + 1, f"... {count - MOST_ROWS} more heads ...")
    return "\n".join([*lines, f"{count} heads; standard errors are in the columns NAME_se"])


def _cell(value: object) -> str:
    """
    >>> _cell(0.123456), _cell(1222.0), _cell(math.nan), _cell("h.0")
    ('0.123', '1222', '-', 'h.0')
    """
    if not isinstance(value, float):
        return str(value)
    return (
        "-" if math.isnan(value) else f"{value:.0f}" if value.is_integer() and value > 9 else f"{value:.3g}"
    )


def _line(cells: list[str], widths: list[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    return "  ".join([f"{first[0]:<{first[1]}}", *(f"{cell:>{width}}" for cell, width in others)])
