"""The shape of a study: a claim, the parts that are run, the figure and the rule for the verdict.

A study is a module of this room. It defines ``claim``, ``SIZES``, ``COLUMNS``, ``parts``, ``figure`` and
``verdict``, as `Study` says; `manyheads.studies.run` does the rest: resume, progress, files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, get_args, get_origin, get_type_hints

from manyheads.common.intervals import Interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from manyheads.studies.result import Result

Language = Literal["en", "zh"]
Size = Literal["tiny", "quick", "full"]
Value = float | int | str | bool | None
Row = dict[str, Value]
Verdict = Literal["holds", "holds in part", "does not hold", "cannot be told"]


@dataclass(frozen=True)
class Words:
    """A text in English and in Chinese."""

    en: str
    zh: str

    def __getitem__(self, language: Language) -> str:
        return self.en if language == "en" else self.zh


VERDICTS: Mapping[Verdict, Words] = {
    "holds": Words("holds", "成立"),
    "holds in part": Words("holds in part", "部分成立"),
    "does not hold": Words("does not hold", "不成立"),
    "cannot be told": Words("cannot be told", "无法判断"),
}


@dataclass(frozen=True)
class Claim:
    """A statement about multi-head attention.

    Parameters
    ----------
    sentence: the claim itself, in one sentence.
    explanation: what a beginner has to know to follow it: paragraphs, with an empty line between.
    formulas: in matplotlib's mathematical notation (a part of TeX), without the dollar signs.
    rule: how the verdict follows from the numbers. It is written before the numbers are seen.
    caption: what the figure shows, and how to read it.
    sources: papers, with authors and year.
    """

    sentence: Words
    explanation: Words
    rule: Words
    caption: Words
    formulas: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Settings:
    """What a study can be run with; studies add fields, which are options of `manyheads study NAME --set`."""

    seeds: int = 3
    data: str | None = None

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ValueError(f"seeds: expected 1 or more, got {self.seeds}")


Kind = TypeVar("Kind", bound=Settings)


@dataclass(frozen=True)
class Part:
    """A piece of a study that is run and kept as a whole.

    key: what it was run with, such as ``{"heads": 4, "seed": 0}``. Keys tell parts apart.
    measure: does the work; returns one or more rows. Each gets the key's columns, too.
    """

    key: Row
    measure: Callable[[], Row | list[Row]]


def grid(setup: Kind, measure: Callable[..., Row | list[Row]], **columns: Iterable[Value]) -> list[Part]:
    """A part for every combination of these columns and every seed, the first seed first: what it measures is
    ``measure(setup, *values, seed)``.

    >>> [part.key for part in grid(Settings(seeds=1), print, heads=(1, 2))]
    [{'heads': 1, 'seed': 0}, {'heads': 2, 'seed': 0}]
    """
    return [
        Part(dict(zip(columns, values, strict=True)) | {"seed": seed}, partial(measure, setup, *values, seed))
        for seed in range(setup.seeds)
        for values in product(*columns.values())
    ]


@dataclass(frozen=True)
class Judgement:
    """A verdict, and the numbers it follows from, in words."""

    verdict: Verdict
    because: Words


class Study(Protocol):
    """What a module of this room defines."""

    @property
    def claim(self) -> Claim:
        """The claim."""

    @property
    def SIZES(self) -> Mapping[Size, Any]:  # noqa: N802
        """The settings of every size: tiny (seconds, for tests), quick (at most 90 seconds) and full."""

    @property
    def COLUMNS(self) -> Mapping[str, Words]:  # noqa: N802
        """The columns that are measured, in words; all others say what was run."""

    def parts(self, settings: Any) -> Sequence[Part]:
        """The parts, those with the first seed first."""

    def figure(self, result: Result, language: Language) -> Figure:
        """The figure of a result, which may lack seeds but no setting."""

    def verdict(self, result: Result) -> Judgement:
        """The verdict by the rule of the claim."""


def judge_effect(effect: Interval, least: float) -> Verdict:
    """The verdict on an effect that a claim says is above ``least``: by the interval, not by the mean.

    >>> judge_effect(Interval(1.9, 1.5, 2.3, 3), 0.0), judge_effect(Interval(0.1, -0.5, 0.7, 3), 0.0)
    ('holds', 'cannot be told')
    >>> judge_effect(Interval(-1.0, -1.5, -0.5, 3), 0.0)
    'does not hold'
    """
    if effect.low > least:
        return "holds"
    return "does not hold" if effect.high <= least else "cannot be told"


def judge_effects(effects: Sequence[tuple[Interval, float]]) -> Verdict:
    """The verdict on a claim of several effects, each with the least it should be above: *holds in part* if
    some are, *does not hold* if none is or may be.

    >>> clear, none = Interval(1.9, 1.5, 2.3, 3), Interval(-1.0, -1.5, -0.5, 3)
    >>> judge_effects([(clear, 0.0), (clear, 1.0)]), judge_effects([(clear, 0.0), (none, 0.0)])
    ('holds', 'holds in part')
    """
    verdicts = [judge_effect(effect, least) for effect, least in effects]
    if "holds" in verdicts:
        return "holds" if set(verdicts) == {"holds"} else "holds in part"
    return "does not hold" if set(verdicts) == {"does not hold"} else "cannot be told"


def with_settings(settings: Kind, chosen: Mapping[str, str]) -> Kind:
    """Settings with some replaced by what a user wrote: numbers, or several with commas between.

    >>> with_settings(Settings(), {"seeds": "5"}).seeds
    5
    >>> with_settings(Settings(), {"heads": "5"})
    Traceback (most recent call last):
    ValueError: set: this study has no setting 'heads'; it has seeds, data
    """
    hints = get_type_hints(type(settings))
    names = [field.name for field in fields(settings)]
    for name in chosen:
        if name not in names:
            raise ValueError(f"set: this study has no setting {name!r}; it has {', '.join(names)}")
    values: dict[str, Any] = {name: _parse(name, text, hints[name]) for name, text in chosen.items()}
    return replace(settings, **values)


def _parse(name: str, text: str, hint: Any) -> object:
    """A text as a value of this type.

    >>> _parse("heads", "1, 2", tuple[int, ...]), _parse("noise", "1e-3", float)
    ((1, 2), 0.001)
    """
    if get_origin(hint) is tuple:
        return tuple(_parse(name, part, get_args(hint)[0]) for part in text.split(","))
    kind = next((part for part in get_args(hint) if part is not type(None)), hint)
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.strip().lower()]
        return kind(text.strip())
    except (KeyError, ValueError):
        words = {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "a text")
        raise ValueError(f"set: {name}={text}: expected {words}") from None
