"""What a sweep shows: means, intervals and costs of its settings, and which of them can be told apart."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from io import StringIO
from os import PathLike
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from scipy import stats

from manyheads.common.csv_cells import to_cell
from manyheads.common.intervals import interval
from manyheads.common.json_numbers import plain
from manyheads.common.registry import registered
from manyheads.common.types import JsonObject
from manyheads.common.whole_files import write_whole
from manyheads.training.sweep_plan import Setting
from manyheads.training.sweep_storage import Outcome

CONFIDENCE = 0.95
FILES = ("table.json", "table.csv", "curve.png", "curve.svg", "answer.txt")


@dataclass(frozen=True)
class SweepResult:
    """What `sweep` measured.

    Attributes
    ----------
    out: the folder of the sweep. Each run has a folder in it, a model for every other verb.
    task, metric, higher_is_better: whose metric it is, and which way it points.
    equal: what was held equal.
    settings, outcomes: the settings, and the runs that have ended.
    seeds: the seeds of the sweep.
    notes: sentences about the data and about settings that were left out.
    ended: ``finished``, ``interrupted`` by Ctrl-C, or ``elsewhere``: other workers are at the last runs.
    left: how many runs are not done yet.
    """

    out: Path
    task: str
    metric: str
    higher_is_better: bool
    equal: str
    settings: list[Setting]
    outcomes: list[Outcome]
    seeds: list[int]
    notes: list[str]
    ended: str
    left: int

    @cached_property
    def comparison(self) -> Comparison | None:
        """The settings against the best; None if no run has finished."""
        return compare(self._values, self.higher_is_better) if self._values else None

    @cached_property
    def table(self) -> list[JsonObject]:
        """A row for each setting: its options, the metric with its interval, and its costs.

        ``low`` and ``high`` bound the mean over seeds with 95% confidence (Student's t), NaN for one seed.
        ``worse_by`` is the difference to the best setting, ``worse_by_margin`` its margin, and ``apart``
        whether the difference shows: see `compare`. Seconds are those of a training step: the shortest and
        the median.
        """
        return [self._row(setting) for setting in self.settings]

    @property
    def best(self) -> dict[str, int]:
        """The options of the setting with the best mean, such as ``{"heads": 8}``."""
        if self.comparison is None:
            raise ValueError(f"best: no run in {self.out} has finished; {self.answer}")
        return next(each.options for each in self.settings if each.name == self.comparison.best)

    @cached_property
    def answer(self) -> str:
        """What the sweep shows in words, and what it cannot show."""
        sentences = [self._verdict()]
        if failures := [outcome for outcome in self.outcomes if outcome.value is None]:
            named = [
                f"{each.setting}-seed={each.seed} ({each.failure or 'no reason noted'})" for each in failures
            ]
            sentences.append(f"{_count(len(failures), 'run')} failed: {'; '.join(named)}.")
        if self.left:
            verb = "is" if self.left == 1 else "are"
            sentences.append(f"{_count(self.left, 'run')} {verb} not done yet.")
        return " ".join(sentences)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the metric against the number of heads: a .png or .svg, with every seed and the intervals."""
        registered("view.sweep_curve")(self, Path(path))  # drawing is a room above this one

    def document(self) -> JsonObject:
        """All of it as plain data, for JSON."""
        columns = ("setting", "seed", "value", "failure", "report")
        return {
            "task": self.task, "metric": self.metric, "higher_is_better": self.higher_is_better,
            "equal": self.equal, "answer": self.answer, "best": self.best if self.comparison else None,
            "ended": self.ended, "left": self.left, "notes": self.notes, "out": str(self.out),
            "settings": self.table,
            "runs": [{name: getattr(outcome, name) for name in columns} for outcome in self.outcomes],
        }  # fmt: skip

    def save(self) -> None:
        """Write the table, the curve and the answer into the folder of the sweep."""
        write_whole(self.out / FILES[0], json.dumps(plain(self.document()), indent=1))
        text = StringIO()
        rows = [{key: to_cell(value) for key, value in row.items()} for row in self.table]
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_whole(self.out / FILES[1], text.getvalue())
        if self.comparison is not None:
            for name in FILES[2:4]:
                self.plot(self.out / name)
        write_whole(self.out / FILES[4], f"{self.answer}\n")

    @cached_property
    def _values(self) -> dict[str, dict[int, float]]:
        values: dict[str, dict[int, float]] = {}
        for outcome in self.outcomes:
            if outcome.value is not None:
                values.setdefault(outcome.setting, {})[outcome.seed] = outcome.value
        return values

    def _row(self, setting: Setting) -> JsonObject:
        values = list(self._values.get(setting.name, {}).values())
        spread = interval(values)
        ended = [each for each in self.outcomes if each.setting == setting.name]
        reports = [each.report for each in ended if each.report]
        difference, margin = math.nan, math.nan
        if self.comparison is not None and values:
            difference, margin = self.comparison.worse_by[setting.name]
        fastest = [report["seconds_min"] for report in reports if report.get("seconds_min") is not None]
        medians = [report["seconds_median"] for report in reports if report.get("seconds_median") is not None]
        memory = [report["memory"] for report in reports if report.get("memory") is not None]
        steps = [report["steps"] for report in reports] or [setting.steps]
        return {
            "setting": setting.name, **setting.options, "seeds": len(values),
            "failed": sum(each.value is None for each in ended),
            "mean": spread.mean, "low": spread.low, "high": spread.high,
            "worse_by": difference, "worse_by_margin": margin,
            "apart": self.comparison is not None and setting.name in self.comparison.apart,
            "seconds_per_step_min": min(fastest, default=math.nan),
            "seconds_per_step_median": median(medians) if medians else math.nan,
            "peak_memory_bytes": max(memory, default=None), "cache_bytes_per_token": setting.cache_bytes,
            "parameters": setting.parameters, "steps": round(fmean(steps)),
            "flops": fmean(steps) * setting.flops_per_step,
        }  # fmt: skip

    def _verdict(self) -> str:
        comparison = self.comparison
        if comparison is None:
            return "No run has finished, so there is nothing to compare."
        names = [setting.name for setting in self.settings if setting.name in self._values]
        goal = f"{self.metric}, {'higher' if self.higher_is_better else 'lower'} is better"
        best = comparison.best
        mean = interval(self._values[best].values()).mean
        if len(names) == 1:
            return f"Only {self._phrase(names)} a result: {mean:.4g} ({goal})."
        if comparison.freedom == 0:
            return (
                f"One seed cannot tell settings apart: run at least 3. Until then, {self._phrase([best])} "
                f"the best result, {mean:.4g} ({goal}), which may be chance."
            )
        how = (
            f"{goal}; margins of {CONFIDENCE:.0%} confidence for all comparisons together, "
            f"{'paired by seed' if comparison.paired else 'not paired'}"
        )
        equals = [name for name in names if name not in comparison.apart]
        if len(equals) == len(names):
            last = max(names, key=lambda name: comparison.worse_by[name][0])
            return (
                f"{self._called(names)} cannot be told apart: the largest difference, between "
                f"{self._called([last])} and {self._called([best])}, is "
                f"{with_margin(*comparison.worse_by[last])} ({how})."
            )
        first = f"{self._phrase(equals, 'is', 'are')} the best"
        worse = [
            f"{self._phrase([name], 'is', 'are')} worse by {with_margin(*comparison.worse_by[name])}"
            for name in names
            if name in comparison.apart
        ]
        together = " and not distinguishable" if len(equals) > 1 else ""
        return f"{'; '.join([first + together, *worse])} ({how})."

    def _phrase(self, names: Sequence[str], one: str = "has", several: str = "have") -> str:
        """The settings with a verb: "8 and 16 heads have", "1 head has"."""
        called = self._called(names)
        single = len(names) == 1 and not called.endswith("heads")
        return f"{called} {one if single else several}"

    def _called(self, names: Sequence[str]) -> str:
        """The settings for people: "8 and 16 heads" where only heads vary."""
        called = list(names)
        if all(list(setting.options) == ["heads"] for setting in self.settings):
            called = [name.removeprefix("heads=") for name in names]
            called[-1] += " head" if called == ["1"] else " heads"
        return called[0] if len(called) == 1 else f"{', '.join(called[:-1])} and {called[-1]}"


@dataclass(frozen=True)
class Comparison:
    """Settings against the best of them; see `compare`."""

    best: str
    worse_by: dict[str, tuple[float, float]]  # the difference to the best, and its margin (NaN if unknown)
    apart: set[str]  # those whose difference to the best shows
    freedom: int  # degrees of freedom of the error
    paired: bool


def compare(values: Mapping[str, Mapping[int, float]], higher_is_better: bool) -> Comparison:
    """Which settings differ from the best, by a linear model with an effect of each setting and of each seed.

    Where settings share seeds, what a seed does to all of them cancels: with the same seeds everywhere, the
    differences are those of paired runs. Where they share too few, the seeds are left out of the model. The
    margins are Tukey's and Kramer's: with 95% confidence, all differences between settings together are
    within them, so that choosing the best after the fact, and comparing many, costs no false claims. The
    scatter between seeds is taken to be the same for all settings, since a few seeds cannot tell it for each.

    Parameters
    ----------
    values: the metric, by setting and seed.
    higher_is_better: which way it points.

    Examples
    --------
    >>> values = {"a": {0: 30.1, 1: 30.4, 2: 29.9}, "b": {0: 28.0, 1: 28.5, 2: 27.9}}
    >>> result = compare(values, higher_is_better=True)
    >>> result.best, result.apart, [round(number, 2) for number in result.worse_by["b"]]
    ('a', {'b'}, [2.0, 0.25])
    """
    names = list(values)
    y = np.array([value for name in names for value in values[name].values()])
    setting_index = [number for number, name in enumerate(names) for _ in values[name]]
    seeds = [seed for name in names for seed in values[name]]
    design, freedom, paired = _design(setting_index, seeds, len(names))
    effects = np.linalg.lstsq(design, y, rcond=None)[0]
    spread = float(np.square(y - design @ effects).sum() / freedom) if freedom else math.nan
    covariance = np.linalg.pinv(design.T @ design) * spread
    sign = 1 if higher_is_better else -1
    best = int(np.argmax(sign * effects[: len(names)]))
    quantile = _tukey(len(names), freedom) if freedom and len(names) > 1 else 0.0
    rounding = 1e-9 * float(np.abs(y).max())
    worse_by, apart = {}, set()
    for number, name in enumerate(names):
        contrast = np.zeros(design.shape[1])
        contrast[best] += 1
        contrast[number] -= 1
        difference = float(sign * contrast @ effects)
        variance = max(float(contrast @ covariance @ contrast), 0.0) if freedom else math.nan
        margin = quantile * math.sqrt(variance / 2)
        worse_by[name] = difference, margin
        if freedom and difference > margin + rounding:
            apart.add(name)
    return Comparison(names[best], worse_by, apart, freedom, paired)


@cache
def _tukey(count: int, freedom: int) -> float:
    """The quantile of the studentized range; it takes a tenth of a second."""
    return float(stats.studentized_range.ppf(CONFIDENCE, count, freedom))


def _design(setting_index: Sequence[int], seeds: Sequence[int], count: int) -> tuple[Any, int, bool]:
    """The matrix of the linear model, the degrees of freedom that it leaves, and whether seeds are in it."""
    settings = np.equal.outer(setting_index, np.arange(count)).astype(float)
    blocks = np.equal.outer(seeds, sorted(set(seeds))[1:]).astype(float)
    full_design = np.concatenate([settings, blocks], 1)
    rank = np.linalg.matrix_rank(full_design)
    if rank == full_design.shape[1] < len(seeds):
        return full_design, len(seeds) - int(rank), True
    return settings, len(seeds) - count, False


def with_margin(value: float, margin: float) -> str:
    """A number with its margin, both to two digits of the margin; without a margin, to four digits.

    >>> with_margin(1.8765, 0.4321), with_margin(1234.5, 67.8), with_margin(0.5, math.nan)
    ('1.88 ± 0.43', '1234 ± 68', '0.5')
    """
    if math.isnan(margin):
        return f"{value:.4g}"
    size = margin if margin > 1e-6 * abs(value) else abs(value)  # runs may agree to the last bit
    digits = max(0, 1 - math.floor(math.log10(size))) if size > 0 else 1
    return f"{value:.{digits}f} ± {margin:.{digits}f}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
