"""Time series forecasting, by a transformer that reads patches of the past."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from manyheads.common.csv_cells import to_cell
from manyheads.common.devices import device_of, in_float64
from manyheads.common.json_files import check_type
from manyheads.common.preserved_state import evaluating
from manyheads.data.examples import Example, Examples
from manyheads.data.readers.table import Table, read_table
from manyheads.models.config import ModelDescription
from manyheads.nn.residual import Dropout
from manyheads.nn.transformers import Encoder
from manyheads.tasks.architecture import Architecture
from manyheads.training.options import option
from manyheads.training.run_folder import read_config
from manyheads.training.task import Data

EMBEDDED = "sunspots.csv"
TINY = 1e-5  # added to a standard deviation, which may be zero


class Forecaster(nn.Module):
    """The next values of a series, from patches of its past; every column of a table is one series.

    The past is scaled to mean 0 and standard deviation 1 before it is read, and the forecast scaled back
    (instance normalisation).

    Parameters
    ----------
    columns: the names of columns with the mean and standard deviation that its input was scaled by.
    context, horizon: number of values that it reads, and that it forecasts.
    patch, stride: values per token, and from the start of a token to the start of the next.
    output_dropout: dropout before the output layer.
    options: of `Encoder`.

    References
    ----------
    Nie et al. 2023, A time series is worth 64 words: long-term forecasting with transformers.

    Examples
    --------
    >>> model = Forecaster({"a": [0.0, 1.0]}, 32, 7, patch=8, stride=4, d_model=12, heads=3, layers=1)
    >>> model(torch.randn(2, 32)).shape                                     # (batch, horizon)
    torch.Size([2, 7])
    """

    def __init__(
        self,
        columns: Mapping[str, Sequence[float]],
        context: int,
        horizon: int,
        *,
        patch: int,
        stride: int,
        output_dropout: float = 0.0,
        d_model: int,
        **options: Any,
    ) -> None:
        super().__init__()
        self.columns = {name: list(scale) for name, scale in columns.items()}
        self.patch, self.stride = patch, stride
        self.enter = nn.Linear(patch, d_model)
        self.encoder = Encoder(d_model, **options)
        self.dropout = Dropout(output_dropout)
        self.output = nn.Linear(tokens(context, patch, stride) * d_model, horizon)

    def forward(self, x: Tensor) -> Tensor:
        """The past ``(batch, context)`` to the forecast ``(batch, horizon)``."""
        mean = x.mean(1, keepdim=True)
        spread = x.std(1, keepdim=True, correction=0) + TINY
        z = (x - mean) / spread
        # the first patch reaches beyond the start, so that the last one ends with the last value
        left = (self.patch - x.shape[1]) % self.stride
        patches = torch.cat([z[:, :1].expand(-1, left), z], 1).unfold(1, self.patch, self.stride)
        hidden: Tensor = self.encoder(self.enter(patches))
        forecast: Tensor = self.output(self.dropout(hidden.flatten(1)))
        return forecast * spread + mean


def tokens(context: int, patch: int, stride: int) -> int:
    """The number of patches in a context.

    >>> tokens(336, 16, 8), tokens(10, 4, 3)
    (41, 3)
    """
    return -(-(context - patch) // stride) + 1


@dataclass(kw_only=True)
class Series(Architecture):
    """Time series forecasting.

    ``data`` is a CSV file: a line of names, a column of times, columns of numbers. Each column is scaled to
    mean 0 and standard deviation 1 on the training rows, and errors are in these units. ``split`` says which
    rows are for training, validation and testing: shares, or numbers of rows. evaluate --data FILE reads the
    test rows of the file that the model was trained on, and all rows of another. Default: the yearly number
    of sunspots since 1700.

    Examples
    --------
    >>> task = Series(d_model=12, heads=3, layers=1)
    >>> data = task.open(None)
    >>> batch = task.collate(data.train.take([0, 1]))
    >>> batch["x"].shape, batch["y"].shape                                  # (batch, context and horizon)
    (torch.Size([2, 66]), torch.Size([2, 11]))
    """

    name: ClassVar[str] = "series"
    unit: ClassVar[str] = "windows"
    metric: ClassVar[str] = "mse"
    higher_is_better: ClassVar[bool] = False
    training: ClassVar[Mapping[str, float | str]] = {
        "steps": 200,
        "batch_tokens": 1024,
        "learning_rate": 1e-3,
        "warmup": 20,
        "evaluate_every": 25,
        "evaluate_examples": 0,
    }

    d_model: int = option(32, "Width of a token.")
    layers: int = option(2, "Number of layers.")
    positions: str = option("learned", "sinusoidal, learned, rotary, alibi or none.")
    dropout: float = option(0.2, "Dropout on the output of every sublayer.")
    context: int = option(66, "Rows that a forecast is made from.")
    horizon: int = option(11, "Rows to forecast.")
    patch: int = option(11, "Rows per token.")
    stride: int = option(5, "Rows from the start of a token to the start of the next.")
    output_dropout: float = option(0.0, "Dropout before the output layer.")
    time: str | None = option(None, "The column of times, or none; by default found by its name.")
    columns: str | None = option(None, "Columns to forecast, separated by commas; all by default.")
    split: str = option("0.7,0.1,0.2", "Shares, or numbers of rows: for training, validation and testing.")

    def __post_init__(self) -> None:
        for name in ("context", "horizon", "patch", "stride"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        if self.patch > self.context:
            raise ValueError(f"patch: expected at most the context, {self.context}, got {self.patch}")
        self.parts = _parts(self.split)
        self.scale: dict[str, list[float]] = {}  # mean and spread of each column
        self.learned_from: str | None = None

    def open(self, data: str | None, valid: str | None = None) -> Data:
        """Windows of the training rows, and of the validation rows."""
        table = self._table(data)
        first, second, _ = self._rows(len(table.values))
        if not self.scale:
            means = table.values[:first].mean(0).tolist()
            spreads = table.values[:first].std(0, correction=0).clamp(min=TINY).tolist()
            self.scale = {name: [*one] for name, *one in zip(table.columns, means, spreads, strict=True)}
        self.learned_from = data
        values = self._scaled(table)
        learned = self._windows(values, 0, first, "to train on")
        if valid is None:
            held_out = self._windows(values, first, first + second, "to validate on")
        else:
            held_out = self._all(self._table(valid))
        names = ", ".join(self.scale)
        notes = [f"{len(table.values):,} rows of {names}; trained on the first {first:,}"]
        if table.uneven:
            notes.append(f"{table.uneven:,} steps in time are longer or shorter than the others")
        return Data(learned, held_out, notes)

    def read(self, data: str) -> Examples:
        """The test rows of the file that the model was trained on; all rows of another."""
        table = self._table(data)
        if self.learned_from is None or Path(data).resolve() != Path(self.learned_from).resolve():
            return self._all(table)
        first, second, third = self._rows(len(table.values))
        return self._windows(self._scaled(table), first + second, first + second + third, "to test")

    def has_test(self, data: str) -> bool:
        """Always: the last rows, as ``split`` says."""
        return True

    def describe(self) -> ModelDescription:
        """A `Forecaster`."""
        options = self.of_the_stack(max_length=self._tokens()) | {
            "columns": self.scale,
            "context": self.context,
            "horizon": self.horizon,
            "patch": self.patch,
            "stride": self.stride,
            "output_dropout": self.output_dropout,
        }
        return {"class": "series.forecast", "options": options}

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """The past ``x (batch, context)`` and the future ``y (batch, horizon)``."""
        x, y = zip(*examples, strict=True)
        return {"x": torch.stack(x), "y": torch.stack(y)}

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The past."""
        return {"x": batch["x"]}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Squared errors, summed over all forecast values."""
        error = model(**self.inputs(batch)).float() - batch["y"]
        return error.square().sum(), torch.tensor(error.numel(), device=error.device)

    def measure(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[float, float, int]:
        """Sums of squared and of absolute errors, and the number of values."""
        error = in_float64(model(**self.inputs(batch)).float() - batch["y"])
        return error.square().sum().item(), error.abs().sum().item(), error.numel()

    def metrics(self, parts: list[tuple[float, float, int]]) -> dict[str, float]:
        """Mean squared and mean absolute error, in standard deviations of the training rows."""
        squared, absolute, count = (sum(column) for column in zip(*parts, strict=True))
        return {"mse": squared / count, "mae": absolute / count}

    def predict(self, model: nn.Module, inputs: list[str]) -> list[str]:
        """The forecast after the last row of each CSV file, as CSV."""
        device = device_of(model)
        forecasts = []
        for path in inputs:
            values = self._scaled(self._table(path))
            if len(values) < self.context:
                raise ValueError(f"{path}: {len(values)} rows are too few; expected {self.context} or more")
            with evaluating(model), torch.no_grad():
                scaled = model(values[-self.context :].T.contiguous().to(device)).T.cpu().double()
            mean, spread = torch.tensor(list(self.scale.values()), dtype=torch.float64).T
            text = io.StringIO()
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow(["step", *map(to_cell, self.scale)])
            for step, row in enumerate((scaled * spread + mean).tolist(), 1):
                writer.writerow([step, *(f"{value:.6g}" for value in row)])
            forecasts.append(text.getvalue().rstrip("\n"))
        return forecasts

    def save(self, folder: Path) -> None:
        """Nothing: columns and their scales are in the description of the model."""

    def restore(self, folder: Path) -> None:
        """Read columns and scales from the description of the model, and which data it was trained on."""
        config = read_config(folder)
        self.scale = config["options"]["columns"]
        check_type(self.scale, dict[str, tuple[float, float]], "options.columns")
        self.learned_from = config["training"]["data"]

    def _table(self, data: str | None) -> Table:
        if data is None:
            with resources.as_file(resources.files("manyheads").joinpath("data", "files", EMBEDDED)) as path:
                return read_table(path)
        table = read_table(Path(data).expanduser(), self.time, ",".join(self.scale) or self.columns)
        if self.scale and (unknown := [name for name in table.columns if name not in self.scale]):
            expected = ", ".join(self.scale)
            raise ValueError(f"data: {data} has the column {unknown[0]!r}; expected some of {expected}")
        return table

    def _scaled(self, table: Table) -> Tensor:
        """(rows, columns) in float32."""
        mean, spread = torch.tensor([self.scale[name] for name in table.columns], dtype=torch.float64).T
        scaled: Tensor = (table.values - mean) / spread
        return scaled.float()

    def _rows(self, total: int) -> tuple[int, int, int]:
        """The number of rows of each part."""
        if sum(self.parts) <= 1 + 1e-9:
            first, third = (int(total * self.parts[i]) for i in (0, 2))
            left = total - first - third
            return first, left if sum(self.parts) > 1 - 1e-9 else int(total * self.parts[1]), third
        first, second, third = (int(part) for part in self.parts)
        if first + second + third > total:
            raise ValueError(f"split: {self.split} asks for more rows than the {total:,} there are")
        return first, second, third

    def _all(self, table: Table) -> Examples:
        return self._windows(self._scaled(table), 0, len(table.values), "in all")

    def _windows(self, values: Tensor, start: int, end: int, purpose: str) -> Examples:
        """Every window of past and future of each column whose future lies within these rows."""
        earliest = max(start, self.context)  # the first row that can begin a forecast
        number, columns = end - self.horizon - earliest + 1, values.shape[1]
        if number < 1:
            raise ValueError(
                f"split: {end - start:,} rows {purpose} are too few; expected "
                f"{self.horizon + max(0, self.context - start):,} or more for a context of {self.context} "
                f"and a horizon of {self.horizon}"
            )
        by_column = values.T.contiguous()

        def make(index: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
            now, column = earliest + index // columns, index % columns
            series = by_column[column]
            return series[now - self.context : now], series[now : now + self.horizon]

        return Examples([self._tokens()] * (number * columns), make)

    def _tokens(self) -> int:
        return tokens(self.context, self.patch, self.stride)


def _parts(split: str) -> list[float]:
    try:
        parts = [float(part) for part in split.split(",")]
    except ValueError:
        parts = []
    integers = all(part == int(part) for part in parts)
    if len(parts) != 3 or min(parts) < 0 or (sum(parts) > 1 + 1e-9 and not integers):
        raise ValueError(
            "split: expected three shares of at most 1 together, as in 0.7,0.1,0.2, or three "
            f"numbers of rows, got {split!r}"
        )
    return parts
