"""Forcing heads to be orthogonal makes them differ more, and helps: a term of the loss, and a constraint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from manyheads.common.intervals import Interval
from manyheads.heads.diversity import diversity, layers
from manyheads.nn.orthogonal_rows import plain
from manyheads.studies.drawing import bars, panels
from manyheads.studies.fitting import fit, new_model
from manyheads.studies.language_models import FULL, TINY, LanguageModel, held_out
from manyheads.studies.result import Result
from manyheads.studies.study import Claim, Judgement, Language, Part, Row, Size, Words, grid, judge_effects
from manyheads.training.diversity_terms import diversity_terms
from manyheads.training.orthogonal_heads import orthogonal_heads

if TYPE_CHECKING:
    from matplotlib.figure import Figure

claim = Claim(
    sentence=Words(
        "Heads that are forced to be orthogonal differ more, and the model is better for it.",
        "强制各个头正交，会让它们差别更大，模型也因此更好。",
    ),
    explanation=Words(
        "If heads should look at different things, one can make them: add a term to the loss that grows "
        "when the queries and keys of two heads read the same directions, or constrain the weights so "
        "that they never can. The term is a wish with a price, the constraint is exact after every step."
        "\n\n"
        "Orthogonal weights need not give different attention: two heads can read different directions "
        "and still look at the same tokens. So what counts here is the distance between the attention of "
        "heads, and the loss on held-out text.",
        "如果希望各个头看不同的东西，可以强制它们：在损失里加一项，当两个头的查询和键读取相同的方向时，这"
        "一项就变大；或者直接约束权重，使它们永远不能这样。前者是有代价的愿望，后者在每一步之后都严格成立"
        "。\n\n"
        "权重正交并不等于注意力不同：两个头可以读取不同的方向，却仍然看同样的词元。所以这里看的是各个头的"
        "注意力之间的距离，以及留出文本上的损失。",
    ),
    formulas=(
        r"\mathrm{loss}+\lambda\,\frac{2}{h(h-1)}\sum_{a<b}\frac{\|U_a^T U_b\|^2}{d_{key}},\qquad "
        r"U_a\ \mathrm{an\ orthonormal\ basis\ of}\ W_a",
    ),
    rule=Words(
        "Language models are trained with nothing, with the term and with the constraint, from the same "
        "seeds. Four statements, by 95% intervals over seeds against nothing: with each of both, the "
        "Jensen-Shannon distance between heads of a layer is larger, and the held-out loss is lower. "
        "Holds if all four hold, in part if some do, does not hold if none does or may; else it cannot be "
        "told.",
        "用同样的随机种子训练语言模型：什么都不加、加上这一项、加上约束。四个陈述，按与什么都不加之差在各"
        "种子上的 95% 区间判断：这两种做法各自使同层头之间的 Jensen-Shannon 距离更大，留出损失更低。四个都"
        "成立则成立，有些成立则部分成立，一个都不成立也不可能成立则不成立；否则无法判断。",
    ),
    caption=Words(
        "Difference to the model trained with nothing, by seed; bars: 95% interval. Left: Jensen-Shannon "
        "distance between the attention of heads (above zero: they differ more). Right: held-out loss in "
        "nats a token (below zero: better).",
        "与什么都不加的模型之差，按随机种子配对；误差线：95% 区间。左：各个头的注意力之间的 "
        "Jensen-Shannon 距离（大于零：差别更大）。右：留出损失，每词元奈特数（小于零：更好）。",
    ),
    sources=(
        "Li, Tu, Yang, Lyu and Zhang 2018, Multi-head attention with disagreement regularization.",
        "Lee and others 2019, Orthogonality constrained multi-head attention for keyword spotting.",
    ),
)
WAYS = {
    "none": Words("nothing", "什么都不加"),
    "term": Words("term", "损失项"),
    "constraint": Words("constraint", "约束"),
}


@dataclass(frozen=True)
class Setup(LanguageModel):
    """The language model, and the weight of the term."""

    seeds: int = 5
    steps: int = 150
    weight: float = 1.0


SIZES: Mapping[Size, Setup] = {
    "tiny": Setup(**TINY),
    "quick": Setup(),
    "full": Setup(**FULL),
}
COLUMNS: Mapping[str, Words] = {
    "loss": Words("held-out loss", "留出损失"),
    "js": Words("Jensen-Shannon distance", "Jensen-Shannon 距离"),
    "cka": Words("CKA of outputs", "输出的 CKA"),
    "query_orthogonality": Words("orthogonality of queries", "查询的正交性"),
}


def parts(setup: Setup) -> Sequence[Part]:
    """A part for every way and seed."""
    return grid(setup, _measure, way=WAYS)


def _measure(setup: Setup, way: str, seed: int) -> Row:
    task, data = setup.open()
    model = new_model(task, seed)
    batch = task.inputs(held_out(task, data))
    term = None
    if way == "constraint":
        orthogonal_heads(model, ("query", "key"), batch)
    elif way == "term":
        term = diversity_terms(model, orthogonality=setup.weight, batch=batch).loss
    fitted = fit(task, data, model, setup.recipe, seed, term=term)
    fitted.model = plain(model)
    measures = ("attention", "outputs", "subspaces")
    summaries = layers(diversity(fitted.model, [batch], measures=measures))
    row: Row = {
        column: sum(layer.mean[column] for layer in summaries) / len(summaries)
        for column in COLUMNS
        if column != "loss"
    }
    return {"loss": fitted.metrics()["loss"]} | row


def figure(result: Result, language: Language) -> Figure:
    """The differences to nothing."""
    drawing, (left, right) = panels(2)
    for axes, column in ((left, "js"), (right, "loss")):
        differences = {WAYS[way][language]: _more(result, column, way) for way in WAYS if way != "none"}
        bars(axes, differences)
        axes.axhline(0, color="#333333", linewidth=0.8)
        axes.set_title(COLUMNS[column][language], fontsize=11, loc="left")
    return drawing


def verdict(result: Result) -> Judgement:
    """By the distance between heads and by the loss, for both ways."""
    ways = [way for way in WAYS if way != "none"]
    apart = {way: _more(result, "js", way) for way in ways}
    worse = {way: _more(result, "loss", way) for way in ways}
    numbers = Words(
        " ".join(f"With the {way}, the distance changes by {apart[way]:.3f}, the loss by {worse[way]:.3f}."
                 for way in ways),
        "".join(f"加上{WAYS[way].zh}，距离变化 {apart[way]:.3f}，损失变化 {worse[way]:.3f}。"
                for way in ways),
    )  # fmt: skip
    better = [Interval(-each.mean, -each.high, -each.low, each.count) for each in worse.values()]
    return Judgement(judge_effects([(effect, 0.0) for effect in (*apart.values(), *better)]), numbers)


def _more(result: Result, column: str, way: str) -> Interval:
    return result.difference(column, {"way": way}, {"way": "none"})
