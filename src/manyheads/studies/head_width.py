"""A head needs a width: the loss by the width of a head, at a fixed number of heads and a fixed d_model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from manyheads.studies.drawing import line, log_ticks, panels
from manyheads.studies.fitting import fit, new_model
from manyheads.studies.language_models import FULL, TINY, LanguageModel
from manyheads.studies.result import Result
from manyheads.studies.study import Claim, Judgement, Language, Part, Row, Size, Words, judge_effect

if TYPE_CHECKING:
    from matplotlib.figure import Figure

claim = Claim(
    sentence=Words(
        "A head needs a width: 64 or more.",
        "头需要足够的宽度：至少 64。",
    ),
    explanation=Words(
        "A head compares a query and a key of d_key numbers each. With one number the scores of all pairs "
        "are a table of rank one: if a query prefers a key, every query of the same sign prefers it, too. "
        "With more numbers a head can tell more kinds of pairs apart. The rule of thumb in articles is 64 "
        "or more, as in the models of the first paper and in BERT.\n\n"
        "There are two ways to ask. At a fixed number of heads a wider head costs parameters, and it can "
        "only help. At a fixed d_model a wider head means fewer heads, and the question is which of the "
        "two is worth more.",
        "一个头用各 d_key 个数比较查询和键。只有一个数时，所有词对的分数是一张秩为一的表：如果一个查询偏好"
        "某个键，那么符号相同的每个查询都偏好它。数越多，一个头能区分的词对种类就越多。文章中的经验法则是 "
        "64 或更多，最初的论文和 BERT 都是如此。\n\n"
        "这个问题有两种问法。头数固定时，更宽的头要更多参数，只会有帮助。d_model 固定时，头更宽就意味着头"
        "更少，问题是哪一样更有价值。",
    ),
    formulas=(
        r"\mathrm{rank}\left(Q_i K_i^{T}\right)\leq d_{key},\qquad "
        r"\mathrm{fixed}\ d_{model}:\ h=d_{model}/d_{key}",
    ),
    rule=Words(
        "A width is worse than another if its held-out loss is higher by more than 0.01 nats a token (95% "
        "interval over seeds, paired). At a fixed number of heads, holds if the narrowest heads and the "
        "next width below 64 are both worse than 64; holds in part if the narrowest are, but the next "
        "width below 64 is not; does not hold if not even the narrowest are worse; else it cannot be told.",
        "若留出损失每词元高出 0.01 奈特以上（按随机种子配对的 95% 区间），就说一种宽度比另一种差。在头数固"
        "定时：若最窄的头和 64 以下的下一档宽度都比 64 差，则成立；若最窄的差，而 64 以下的下一档并不差，"
        "则部分成立；若连最窄的也不差，则不成立；否则无法判断。",
    ),
    caption=Words(
        "Held-out loss (nats a token, lower is better) by the width of a head. At a fixed number of heads "
        "only queries and keys grow, at a fixed d_model there are fewer heads when they are wider. Bars: "
        "95% interval over seeds.",
        "各种头宽度下的留出损失（每个词元的奈特数，越低越好）。头数固定时，只有查询和键变宽；d_model 固定"
        "时，头越宽，头数越少。误差线：各随机种子的 95% 区间。",
    ),
    sources=(
        "Vaswani and others 2017, Attention is all you need, table 3 (A and B).",
        "Bhojanapalli and others 2020, Low-rank bottleneck in multi-head attention models.",
    ),
)


@dataclass(frozen=True)
class Setup(LanguageModel):
    """Widths of a head, and the language model that is trained with each."""

    d_key: tuple[int, ...] = (1, 4, 16, 64)
    layers: int = 1
    steps: int = 150


SIZES: Mapping[Size, Setup] = {
    "tiny": Setup(**TINY, d_key=(1, 64)),
    "quick": Setup(),
    "full": Setup(
        **FULL | {"seeds": 3, "heads": 4, "layers": 2, "steps": 500}, d_key=(1, 2, 4, 8, 16, 32, 64, 128)
    ),
}
ARTICLES, WORSE = 64, 0.01
HEADS, D_MODEL = "heads", "d_model"
FIXED: Mapping[str, Words] = {
    HEADS: Words("fixed number of heads", "头数固定"),
    D_MODEL: Words("fixed d_model", "d_model 固定"),
}

COLUMNS: Mapping[str, Words] = {
    "loss": Words("held-out loss", "留出损失"),
    "parameters": Words("parameters", "参数量"),
}


def parts(setup: Setup) -> Sequence[Part]:
    """A part for every width, what is fixed, and seed."""
    return [
        Part({"fixed": fixed, "d_key": d_key, "seed": seed}, partial(_measure, setup, fixed, d_key, seed))
        for seed in range(setup.seeds)
        for fixed in FIXED
        for d_key in setup.d_key
    ]


def _measure(setup: Setup, fixed: str, d_key: int, seed: int) -> Row:
    task, data = setup.open()
    task.d_key = d_key
    if fixed == D_MODEL:
        task.heads = max(setup.d_model // d_key, 1)
    task.d_value = setup.d_model // task.heads
    task.positions = "sinusoidal"  # rotary needs an even width
    model = new_model(task, seed)
    return {
        "loss": fit(task, data, model, setup.recipe, seed).metrics()["loss"],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def _widths(result: Result) -> list[int]:
    return sorted(int(width) for width in result.distinct("d_key") if isinstance(width, int))


def figure(result: Result, language: Language) -> Figure:
    """Loss by the width of a head."""
    drawing, (axes,) = panels()
    widths = _widths(result)
    for number, (fixed, label) in enumerate(FIXED.items()):
        points = {width: result.interval("loss", fixed=fixed, d_key=width) for width in widths}
        line(axes, points, label[language], number, ("o-", "s--")[number])
    log_ticks(axes, widths)
    axes.legend(frameon=False)
    axes.set_xlabel(Words("width of a head (d_key)", "头的宽度 (d_key)")[language])
    axes.set_ylabel(COLUMNS["loss"][language])
    return drawing


def verdict(result: Result) -> Judgement:
    """By the loss of narrow heads, at a fixed number of them, relative to a width of 64."""
    widths = _widths(result)
    wide = min(width for width in widths if width >= ARTICLES)
    narrowest, below = widths[0], max(width for width in widths if width < ARTICLES)
    excess = {
        width: result.difference("loss", {"fixed": HEADS, "d_key": width}, {"fixed": HEADS, "d_key": wide})
        for width in (narrowest, below)
    }
    best = min(widths, key=lambda width: result.interval("loss", fixed=D_MODEL, d_key=width).mean)
    numbers = Words(
        f"At a fixed number of heads, width {narrowest} is worse than width {wide} by "
        f"{excess[narrowest]:.3f} nats a token, width {below} by {excess[below]:.3f} "
        f"({excess[below].count} seeds). At a fixed d_model the best width is {best}.",
        f"头数固定时，宽度 {narrowest} 的损失比宽度 {wide} 每词元高 {excess[narrowest]:.3f} 奈特，"
        f"宽度 {below} 高 {excess[below]:.3f} 奈特（{excess[below].count} 个随机种子）。"
        f"d_model 固定时，最佳宽度是 {best}。",
    )
    narrow = judge_effect(excess[narrowest], WORSE)
    if narrow != "holds":
        return Judgement(narrow, numbers)
    next_below = judge_effect(excess[below], WORSE)
    return Judgement("holds in part" if next_below == "does not hold" else next_below, numbers)
