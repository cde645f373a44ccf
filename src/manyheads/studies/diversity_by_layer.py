"""Heads differ less in higher layers: the Jensen-Shannon distance between heads, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from manyheads.common.intervals import paired_difference
from manyheads.heads.diversity import diversity, layers
from manyheads.studies.by_layer import draw_by_layer, lower_and_upper
from manyheads.studies.drawing import panels
from manyheads.studies.result import Result
from manyheads.studies.study import Claim, Judgement, Language, Part, Row, Size, Words, grid
from manyheads.studies.subjects import FULL, Subjects, judge_all, list_models, subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

claim = Claim(
    sentence=Words(
        "Heads differ less in higher layers.",
        "层数越高，头与头之间的差别越小。",
    ),
    explanation=Words(
        "Every head gives each token a distribution over the tokens it may look at. Two heads can be "
        "compared by these distributions: the Jensen-Shannon distance is 0 if they look at the same "
        "places with the same weights, and 1 if they have no place in common. Averaged over the pairs of "
        "heads of a layer, it says how much the heads of this layer differ.\n\n"
        "Articles show this number falling from the first layer to the last and conclude that heads of "
        "high layers do the same work several times. A fixed trained model gives one set of heads, so "
        "that its repetitions here are samples of text that share no sentence; our own model is trained "
        "again for each repetition.",
        "每个头为每个词元给出一个分布：它在能看到的词元上各放多少权重。两个头可以用这些分布来比较：若它们"
        "以相同的权重看相同的位置，Jensen-Shannon 距离为 0；若没有任何共同位置，距离为 1。对一层里所有成对"
        "的头取平均，就得到这一层的头有多不同。\n\n"
        "一些文章指出这个数从第一层到最后一层不断下降，并由此认为高层的头在重复同样的工作。已训练好的模型"
        "只有一组头，所以这里对它的重复是互不重叠的文本样本；我们自己的模型则每次重复都重新训练。",
    ),
    formulas=(
        r"\mathrm{JS}(p,q)=\sqrt{H\left(\frac{p+q}{2}\right)-\frac{H(p)+H(q)}{2}}"
        r"\quad(H\ \mathrm{in\ bits})",
    ),
    rule=Words(
        "For each model the mean distance in the lower half of its layers minus that in the upper half, "
        "with the 95% interval over repetitions, has to be above 0.02. Holds if it is for every model, "
        "does not hold if for each the interval lies below, holds in part if it is for some models; else "
        "it cannot be told.",
        "对每个模型，用下半部分各层的平均距离减去上半部分各层的平均距离，其各次重复的 95% 区间必须高于 "
        "0.02。若每个模型都如此，则成立；若每个模型的区间都在其下，则不成立；若只有部分模型如此，则部分成"
        "立；否则无法判断。",
    ),
    caption=Words(
        "Mean Jensen-Shannon distance between the heads of a layer (0: the same attention, 1: nothing in "
        "common), from the first layer to the last. Bars: 95% interval over samples of text (MiniLM) or "
        "training seeds (our model).",
        "一层中各头之间的平均 Jensen-Shannon 距离（0：注意力相同，1：毫无共同之处），从第一层到最后一层。"
        "误差线：各文本样本（MiniLM）或各训练种子（自训模型）的 95% 区间。",
    ),
    sources=(
        "Clark, Khandelwal, Levy and Manning 2019, What does BERT look at?, section 6.",
        "Lin 1991, Divergence measures based on the Shannon entropy.",
    ),
)


@dataclass(frozen=True)
class Setup(Subjects):
    """The models, what they read, and how many queries of each batch are compared."""

    rows: int = 128


SIZES: Mapping[Size, Setup] = {
    "tiny": Setup(
        seeds=2, sentences=4, windows=2, d_model=16, heads=2, layers=2, context=16, steps=2, rows=16
    ),
    "quick": Setup(),
    "full": Setup(**FULL),
}
LEAST = 0.02

COLUMNS: Mapping[str, Words] = {
    "distance": Words("Jensen-Shannon distance between heads", "头之间的 Jensen-Shannon 距离"),
}


def parts(setup: Setup) -> Sequence[Part]:
    """A part for every model and repetition."""
    return grid(setup, _measure, model=setup.models)


def _measure(setup: Setup, name: str, seed: int) -> list[Row]:
    looked = subject(setup, name, seed)
    table = diversity(looked.model, looked.all_batches, measures=["attention"], rows=setup.rows)
    return [{"layer": number, "distance": each.mean["js"]} for number, each in enumerate(layers(table), 1)]


def figure(result: Result, language: Language) -> Figure:
    """Distance by layer."""
    drawing, (axes,) = panels()
    draw_by_layer(axes, result, "distance", language)
    axes.set_ylabel(COLUMNS["distance"][language])
    axes.legend(frameon=False, loc="lower left")
    return drawing


def verdict(result: Result) -> Judgement:
    """By the lower half of the layers minus the upper half, for each model."""
    models = [str(name) for name in result.distinct("model")]
    falls = {name: paired_difference(*lower_and_upper(result, "distance", model=name)) for name in models}
    listed = list_models(falls, ".3f")
    numbers = Words(
        f"The distance between heads falls from the lower to the upper half of the layers by: {listed.en}.",
        f"从下半部分各层到上半部分各层，头之间的距离下降了：{listed.zh}。",
    )
    return Judgement(judge_all(falls.values(), LEAST), numbers)
