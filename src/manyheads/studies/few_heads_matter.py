"""Few heads matter: heads silenced by rank, at random and in the reverse order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from manyheads.common.intervals import Interval
from manyheads.heads.importance import importance
from manyheads.studies.drawing import legend_below, line, panels
from manyheads.studies.result import Result
from manyheads.studies.silencing import candidates, damages, reverse
from manyheads.studies.study import Claim, Judgement, Language, Part, Row, Size, Verdict, Words, grid
from manyheads.studies.subjects import (
    FULL,
    NAMES,
    Subjects,
    join_verdicts,
    list_models,
    subject,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

claim = Claim(
    sentence=Words(
        "Few heads matter: most of them can be removed.",
        "只有少数头重要：大部分头可以去掉。",
    ),
    explanation=Words(
        "A head is removed by setting what it puts out to zero. If heads are first ranked by how much the "
        "output of the model would change without them, and the least important ones go first, how many "
        "can go before the model gets worse? The paper on translation removed 38 of 48 encoder heads and "
        "lost 0.15 BLEU, with training in between; here nothing is trained after the cut.\n\n"
        "Two controls show whether it is the choice that matters or just the number: the same number of "
        "heads at random, and the most important ones first. The loss is counted as a share of what is "
        "lost when all of these heads are gone, so that 0 is the full model and 1 a model without them. "
        "Heads are ranked on one half of the text and removed on the other.",
        "去掉一个头，就是把它的输出设为零。先按“没有它输出会改变多少”给头排序，再从最不重要的开始去掉："
        "去掉多少之后模型才会变差？那篇翻译论文去掉了编码器 48 个头中的 38 个，只损失 0.15 BLEU，但其间有"
        "继续训练；这里剪掉之后不再训练。\n\n"
        "两个对照说明起作用的是选择还是数量：随机去掉同样多的头，以及先去掉最重要的头。损失以“这些头全部"
        "去掉时的损失”为单位：0 是完整的模型，1 是完全没有这些头的模型。排序用文本的一半，去掉之后的测量"
        "用另一半。",
    ),
    formulas=(r"\mathrm{damage}(S)=\frac{L(\mathrm{without}\ S)-L}{L(\mathrm{without\ all})-L}",),
    rule=Words(
        "For a model the claim holds if, with three quarters of the heads gone by rank, the 95% interval "
        "of the damage lies below 0.1 and the damage is smaller than at random (interval of the "
        "difference above zero); in part if this is so with half of the heads gone; it does not hold if "
        "with half of them gone the interval lies above 0.1, or rank is no better than random; else it "
        "cannot be told. Over models: the verdict that all share; in part if the claim holds for some at "
        "least in part; else it cannot be told.",
        "对一个模型：若按排序去掉四分之三的头后，损害的 95% 区间低于 0.1，且小于随机去掉时的损害（差的区间"
        "高于零），则成立；若去掉一半时如此，则部分成立；若去掉一半时区间高于 0.1，或排序并不比随机好，则"
        "不成立；否则无法判断。对全部模型：若结论相同，则取该结论；若对其中一些至少部分成立，则部分成立；"
        "否则无法判断。",
    ),
    caption=Words(
        "Damage (0: full model, 1: without all these heads) by the share of heads that are gone: the "
        "least important first, at random, the most important first. Bars: 95% interval over samples of "
        "text (MiniLM) or training seeds (ours). Dotted: the limit of the rule.",
        "损害（0：完整的模型，1：去掉全部这些头）随去掉的头的比例变化：先去掉最不重要的、随机、先去掉最重"
        "要的。误差线：各文本样本（MiniLM）或各训练种子（自训模型）的 95% 区间。点线：规则的界限。",
    ),
    sources=(
        "Michel, Levy and Neubig 2019, Are sixteen heads really better than one?",
        "Voita, Talbot, Moiseev, Sennrich and Titov 2019, Analyzing multi-head self-attention.",
    ),
)


@dataclass(frozen=True)
class Setup(Subjects):
    """The models, and how many random orders are tried for each."""

    sentences: int = 20
    windows: int = 64
    steps: int = 250
    method: str = "fisher"
    draws: int = 3


SIZES: Mapping[Size, Setup] = {
    "tiny": Setup(
        seeds=2, sentences=4, windows=4, d_model=16, heads=4, layers=2, context=16, steps=2, draws=1
    ),
    "quick": Setup(),
    "full": Setup(**FULL, models=("MiniLM", "language", "translation"), draws=5),
}  # fmt: skip
SHARES = (0.25, 0.5, 0.625, 0.75, 0.875)
LARGEST_DAMAGE = 0.1
ORDERS: Mapping[str, Words] = {
    "rank": Words("least important first", "先去掉最不重要的"),
    "random": Words("at random", "随机"),
    "reverse": Words("most important first", "先去掉最重要的"),
}

COLUMNS: Mapping[str, Words] = {"damage": Words("damage", "损害")}


def parts(setup: Setup) -> Sequence[Part]:
    """A part for every model and repetition."""
    return grid(setup, _measure, model=setup.models)


def _measure(setup: Setup, name: str, seed: int) -> list[Row]:
    looked = subject(setup, name, seed)
    ranking = candidates(importance(looked.model, looked.batches, setup.method, seed=seed))
    draws = [
        candidates(importance(looked.model, looked.batches[:1], "random", seed=seed * setup.draws + draw))
        for draw in range(setup.draws)
    ]
    orders = {"rank": [ranking], "random": draws, "reverse": [reverse(ranking)]}
    rows: list[Row] = []
    for order, rankings in orders.items():
        by_ranking = zip(*(damages(looked, each, SHARES) for each in rankings), strict=True)
        rows += [
            {"order": order, "removed": share, "damage": fmean(values)}
            for share, values in zip(SHARES, by_ranking, strict=True)
        ]
    return rows


def figure(result: Result, language: Language) -> Figure:
    """Damage by the share of heads that are gone."""
    models = [str(name) for name in result.distinct("model")]
    drawing, axes = panels(len(models))
    start, end = Interval(0.0, 0.0, 0.0, 1), Interval(1.0, 1.0, 1.0, 1)
    for each, name in zip(axes, models, strict=True):
        for number, (order, label) in enumerate(ORDERS.items()):
            points = {
                100 * share: result.interval("damage", model=name, order=order, removed=share)
                for share in SHARES
            }
            line(each, {0.0: start, **points, 100.0: end}, label[language], number)
        each.axhline(LARGEST_DAMAGE, color="black", linestyle=":", linewidth=1)
        each.set_title(NAMES[name][language], fontsize=11, loc="left")
        each.set_xlabel(Words("heads that are gone (%)", "去掉的头（%）")[language])
    axes[0].set_ylabel(COLUMNS["damage"][language])
    legend_below(drawing, axes[0])
    return drawing


def verdict(result: Result) -> Judgement:
    """By the damage with half and with three quarters of the heads gone."""
    models = [str(name) for name in result.distinct("model")]
    half, most = (
        list_models(
            {name: result.interval("damage", model=name, order="rank", removed=share) for name in models},
            ".2f",
        )
        for share in (0.5, 0.75)
    )
    numbers = Words(
        f"Damage with half of the heads gone by rank: {half.en}; with three quarters: {most.en}.",
        f"按排序去掉一半的头时的损害：{half.zh}；去掉四分之三时：{most.zh}。",
    )
    return Judgement(join_verdicts(_of_model(result, name) for name in models), numbers)


def _of_model(result: Result, name: str) -> Verdict:
    levels: tuple[tuple[float, Verdict], ...] = ((0.75, "holds"), (0.5, "holds in part"))
    for share, level in levels:
        key: Row = {"model": name, "removed": share}
        damage = result.interval("damage", **key | {"order": "rank"})
        gain = result.difference("damage", key | {"order": "random"}, key | {"order": "rank"})
        if damage.high < LARGEST_DAMAGE and gain.low > 0:
            return level
    refuted = damage.low > LARGEST_DAMAGE or gain.high <= 0
    return "does not hold" if refuted else "cannot be told"
