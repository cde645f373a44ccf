"""Heads become more orthogonal while training: angles between what they read, likeness of outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from manyheads.common.types import Batch
from manyheads.heads.diversity import diversity, layers
from manyheads.studies.block_gradients import first_batch
from manyheads.studies.drawing import line, panels
from manyheads.studies.fitting import Recipe, fit, new_model
from manyheads.studies.language_text import opened
from manyheads.studies.result import Result
from manyheads.studies.study import (
    Claim,
    Judgement,
    Language,
    Part,
    Row,
    Settings,
    Size,
    Words,
    grid,
    judge_effects,
)  # fmt: skip

if TYPE_CHECKING:
    from matplotlib.figure import Figure

claim = Claim(
    sentence=Words(
        "Heads become more orthogonal while they are trained.",
        "训练过程中，各个头变得越来越正交。",
    ),
    explanation=Words(
        "Each head reads the residual stream through its projections: its queries, keys and values see a "
        "subspace of it. Two heads whose subspaces are at right angles have nothing in common, two with "
        "the same subspace are doubles. The mean squared sine of the angles between two subspaces is 1 "
        "for the first and 0 for the second.\n\n"
        "Articles say that training drives heads apart. But at the start they are apart already: two "
        "random subspaces of width w in d dimensions have a mean squared sine of 1 - w/d, so that heads "
        "of 16 of 64 channels begin at 0.75. The question is whether training adds to that. What heads "
        "give is another matter; CKA compares their outputs and is 1 where these are the same up to a "
        "rotation.",
        "每个头通过自己的投影读取残差流：它的查询、键和值只看到其中一个子空间。两个头的子空间互相垂直时，"
        "没有任何共同之处；子空间相同时，就是重复的头。两个子空间之间夹角正弦平方的平均，前一种情况是 1，"
        "后一种是 0。\n\n"
        "文章说训练会把各个头推开。但一开始它们就已经分开了：d 维空间里两个宽度为 w 的随机子空间，正弦平方"
        "的平均是 1 - w/d，因此 64 个通道里各占 16 个的头从 0.75 开始。问题在于训练能否再增加一些。头的输"
        "出又是另一回事：CKA 比较它们的输出，若两者只差一个旋转，则为 1。",
    ),
    formulas=(
        r"\mathrm{orthogonality}(A,B)=\frac{1}{w}\sum_{i=1}^{w}\sin^2\theta_i,\qquad "
        r"\cos\theta_i=\sigma_i(Q_A^{T}Q_B)",
    ),
    rule=Words(
        "Language models are trained, and all pairs of heads of a layer are compared at the start and at "
        "the end. Four statements, by 95% intervals over seeds of the change: the orthogonality of "
        "queries, of keys, of values rises; the CKA of outputs falls. Holds if all four hold, in part if "
        "some do, does not hold if none does; else it cannot be told.",
        "训练语言模型，在开始和结束时比较同一层里的每一对头。四个陈述，按变化在各种子上的 95% 区间判断：查"
        "询的、键的、值的正交性上升；输出的 CKA 下降。四个都成立则成立，有些成立则部分成立，没有一个成立则"
        "不成立；否则无法判断。",
    ),
    caption=Words(
        "Mean over the pairs of heads of each layer, by training step. Left: orthogonality of what heads "
        "read (1: at right angles). Right: CKA of what heads give (1: the same). Bars: 95% interval over "
        "seeds.",
        "各层每一对头的平均，横轴为训练步数。左：头所读取内容的正交性（1 为互相垂直）。右：头的输出的 CKA"
        "（1 为相同）。误差线：各随机种子的 95% 区间。",
    ),
    sources=(
        "Kornblith, Norouzi, Lee and Hinton 2019, Similarity of neural network representations revisited "
        "(CKA).",
        "Cordonnier, Loukas and Jaggi 2020, Multi-head attention: collaborate instead of concatenate.",
    ),
)


@dataclass(frozen=True)
class Setup(Settings):
    """The language model, how long it is trained, and how many times it is looked at."""

    seeds: int = 5
    looks: int = 5
    d_model: int = 64
    heads: int = 4
    layers: int = 2
    context: int = 64
    steps: int = 240
    batch_tokens: int = 1024


SIZES: Mapping[Size, Setup] = {
    "tiny": Setup(seeds=2, looks=2, d_model=8, heads=2, layers=1, context=8, steps=2, batch_tokens=64),
    "quick": Setup(),
    "full": Setup(looks=11, d_model=128, heads=8, layers=4, context=128, steps=600, batch_tokens=1024),
}
EXAMPLES = 16  # of the batch on which outputs are compared

COLUMNS: Mapping[str, Words] = {
    "query_orthogonality": Words("queries", "查询"),
    "key_orthogonality": Words("keys", "键"),
    "value_orthogonality": Words("values", "值"),
    "cka": Words("CKA of outputs", "输出的 CKA"),
}
LANGUAGES: tuple[Language, ...] = ("en", "zh")
READ = [column for column in COLUMNS if column != "cka"]


def parts(setup: Setup) -> Sequence[Part]:
    """A part for every seed."""
    return grid(setup, _measure)


def _measure(setup: Setup, seed: int) -> list[Row]:
    task, data = opened(setup.data, setup.context)
    task.d_model, task.heads, task.layers = setup.d_model, setup.heads, setup.layers
    model = new_model(task, seed)
    batch = task.inputs(first_batch(task, data, EXAMPLES, seed))
    looks = {round(n * setup.steps / (setup.looks - 1)) for n in range(1, setup.looks)}
    rows: list[Row] = [{"step": 0} | _likeness(model, batch)]

    def look(step: int, trained: nn.Module) -> None:
        if step + 1 in looks:
            rows.append({"step": step + 1} | _likeness(trained, batch))

    recipe = Recipe(steps=setup.steps, batch_tokens=setup.batch_tokens)
    fit(task, data, model, recipe, seed, after_step=look)
    return rows


def _likeness(model: nn.Module, batch: Batch) -> Row:
    """How orthogonal and how alike heads are: the mean over layers of the mean over pairs."""
    summaries = layers(diversity(model, [batch], measures=("subspaces", "outputs")))
    return {column: sum(layer.mean[column] for layer in summaries) / len(summaries) for column in COLUMNS}


def figure(result: Result, language: Language) -> Figure:
    """Orthogonality and CKA by step."""
    drawing, (left, right) = panels(2)
    steps = _steps(result)
    for number, column in enumerate(READ):
        line(left, {n: result.interval(column, step=n) for n in steps}, COLUMNS[column][language], number)
    line(right, {n: result.interval("cka", step=n) for n in steps}, None, len(READ))
    left.legend(frameon=False)
    left.set_title(Words("orthogonality of what heads read", "读取内容的正交性")[language], fontsize=11)
    right.set_title(COLUMNS["cka"][language], fontsize=11)
    for axes in (left, right):
        axes.set_xlabel(Words("training step", "训练步数")[language])
    return drawing


def verdict(result: Result) -> Judgement:
    """By the change from the start to the end."""
    first, *_, last = _steps(result)
    changes = {column: result.difference(column, {"step": last}, {"step": first}) for column in COLUMNS}
    falls = result.difference("cka", {"step": first}, {"step": last})
    listed = {
        to: Words(", ", "，")[to].join(
            f"{COLUMNS[column][to]} {'+' if change.mean > 0 else ''}{change:.3f}"
            for column, change in changes.items()
        )
        for to in LANGUAGES
    }
    numbers = Words(
        f"Change from step {first} to step {last} (orthogonality of what is read, then CKA): {listed['en']} "
        f"({falls.count} seeds).",
        f"从第 {first} 步到第 {last} 步的变化（先是读取内容的正交性，再是 CKA）：{listed['zh']}"
        f"（{falls.count} 个随机种子）。",
    )
    effects = [*(changes[column] for column in READ), falls]
    return Judgement(judge_effects([(effect, 0.0) for effect in effects]), numbers)


def _steps(result: Result) -> list[int]:
    return sorted({int(row["step"] or 0) for row in result.rows})
