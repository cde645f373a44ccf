"""In every layer most heads are alike and one or two stand apart: outliers by Jensen-Shannon distance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from manyheads.common.intervals import Interval, interval
from manyheads.heads.diversity import diversity
from manyheads.studies.drawing import line, panels
from manyheads.studies.result import Result
from manyheads.studies.study import Claim, Judgement, Language, Part, Row, Size, Value, Words, grid
from manyheads.studies.subjects import FULL, NAMES, Subjects, subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

claim = Claim(
    sentence=Words(
        "In every layer most heads are alike, and one or two stand apart.",
        "在每一层里，大多数头彼此相似，只有一两个头与众不同。",
    ),
    explanation=Words(
        "If the heads of a layer are drawn as points whose distances are those of their attention, "
        "pictures often show a crowd and a lonely point or two. Articles conclude that most heads of a "
        "layer do the same, and that the odd ones are the price or the profit of having many.\n\n"
        "A picture of twelve points always has an outermost point. So here a head only stands apart if "
        "its mean distance to the other heads of its layer is an outlier by the usual robust test: more "
        "than three (scaled) median deviations above the median head. And the others only count as alike "
        "if they are nearer to each other than heads of different layers are.",
        "如果把一层的头画成点，让点间的距离等于它们注意力的距离，图上常常是一群点加上一两个孤立的点。有文"
        "章由此认为：一层里大多数头做的是同样的事，少数与众不同的头是多头的代价或收益。\n\n"
        "但是十二个点的图总会有最外面的一个点。所以这里只有当一个头到同层其他头的平均距离按常用的稳健检验"
        "是离群值时，才算与众不同：比中位的头高出三倍以上的（换算后的）中位绝对偏差。其余的头也只有在彼此"
        "的距离比不同层的头之间更近时，才算相似。",
    ),
    formulas=(
        r"m_h=\frac{1}{H-1}\sum_{g\neq h}\mathrm{JS}(h,g),\qquad "
        r"m_h>\mathrm{median}(m)+3\cdot 1.4826\cdot\mathrm{median}\,|m-\mathrm{median}(m)|",
    ),
    rule=Words(
        "A layer fits the claim if one or two of its heads are outliers and the others are on average "
        "nearer to each other than heads of different layers. The share of layers that fit, of all models "
        "together, is taken for each repetition. Holds if its 95% interval lies above 0.9; holds in part "
        "if it lies above 0.5; does not hold if it lies below 0.5; else it cannot be told.",
        "若一层里有一个或两个头是离群值，且其余的头彼此平均比不同层的头更近，则这一层符合该说法。每次重复"
        "都计算所有模型中符合的层所占的比例。若其 95% 区间高于 0.9，则成立；若高于 0.5，则部分成立；若低于"
        " 0.5，则不成立；否则无法判断。",
    ),
    caption=Words(
        "By layer: the mean distance of the farthest head and of the median head to the other heads of "
        "their layer, and the limit above which a head is an outlier. A layer has a head that stands "
        "apart where the farthest head lies above the limit. Bars: 95% interval over samples of text "
        "(MiniLM) or training seeds (our model).",
        "各层中最远的头和中位的头到同层其他头的平均距离，以及判为离群值的界限。最远的头高于界限的层里，有"
        "头与众不同。误差线：各文本样本（MiniLM）或各训练种子（自训模型）的 95% 区间。",
    ),
    sources=("Clark, Khandelwal, Levy and Manning 2019, What does BERT look at?, section 6.",),
)


@dataclass(frozen=True)
class Setup(Subjects):
    """The models, what they read, and how many queries of each batch are compared."""

    rows: int = 128


SIZES: Mapping[Size, Setup] = {
    "tiny": Setup(
        seeds=2, sentences=4, windows=2, d_model=16, heads=4, layers=2, context=16, steps=2, rows=16
    ),
    "quick": Setup(seeds=5, steps=200),
    "full": Setup(**FULL),
}
DEVIATIONS = 3 * 1.4826  # median deviations: three standard deviations of a normal distribution

COLUMNS: Mapping[str, Words] = {
    "outliers": Words("heads that stand apart", "与众不同的头数"),
    "farthest": Words("farthest head", "最远的头"),
    "median": Words("median head", "中位的头"),
    "limit": Words("limit of outliers", "离群界限"),
    "inner": Words("distance between the other heads", "其余的头之间的距离"),
    "between_layers": Words("distance between heads of different layers", "不同层的头之间的距离"),
}


def parts(setup: Setup) -> Sequence[Part]:
    """A part for every model and repetition."""
    return grid(setup, _measure, model=setup.models)


def _measure(setup: Setup, name: str, seed: int) -> list[Row]:
    looked = subject(setup, name, seed)
    table = diversity(looked.model, looked.all_batches, measures=["attention"], rows=setup.rows)
    distances = table.matrices["js"]
    sites = table["site"]
    numbers = torch.tensor([list(dict.fromkeys(sites)).index(site) for site in sites])
    apart = distances[numbers[:, None] != numbers]
    between = float(apart[apart.isfinite()].mean())
    return [
        standing_apart(distances[numbers == layer][:, numbers == layer])
        | {"layer": layer + 1, "between_layers": between}
        for layer in range(int(numbers.max()) + 1)
    ]


def standing_apart(distances: Tensor) -> Row:
    """How many heads of a layer are outliers by their mean distance to the others, and the numbers behind.

    >>> near = torch.full((5, 5), 0.2) + torch.diag(torch.full((4,), 0.01), 1)
    >>> near[0, 1:] = near[1:, 0] = 0.9
    >>> row = standing_apart((near + near.T) / 2)
    >>> row["outliers"], round(row["farthest"], 2), round(row["inner"], 2)
    (1, 0.9, 0.2)
    """
    count = len(distances)
    pairs = ~torch.eye(count, dtype=torch.bool)
    means = (distances * pairs).sum(1) / (count - 1)
    middle = means.quantile(0.5)
    limit = middle + DEVIATIONS * (means - middle).abs().quantile(0.5)
    outliers = means > limit
    others = pairs & ~outliers & ~outliers[:, None]
    return {
        "outliers": int(outliers.sum()),
        "farthest": float(means.max()),
        "median": float(middle),
        "limit": float(limit),
        "inner": float(distances[others].mean()),
    }


def figure(result: Result, language: Language) -> Figure:
    """The farthest and the median head of every layer."""
    models = [str(name) for name in result.distinct("model")]
    drawing, axes = panels(len(models))
    for each, name in zip(axes, models, strict=True):
        numbers = [int(row["layer"] or 0) for row in result.where(model=name, seed=0)]
        for number, (column, style) in enumerate((("farthest", "o-"), ("limit", "--"), ("median", "s-"))):
            points = {layer: result.interval(column, model=name, layer=layer) for layer in numbers}
            line(each, points, COLUMNS[column][language], number, style)
        each.set_title(NAMES[name][language], fontsize=11, loc="left")
        each.set_ylim(0, 1)
        each.set_xticks(numbers)
        each.set_xlabel(Words("layer", "层")[language])
    axes[0].set_ylabel(Words("Jensen-Shannon distance", "Jensen-Shannon 距离")[language])
    axes[-1].legend(frameon=False)
    return drawing


def verdict(result: Result) -> Judgement:
    """By the share of layers with one or two outliers among heads that are alike."""
    share, apart = _fitting_layers(result)
    numbers = Words(
        f"{share:.2f} of the layers have one or two heads apart from others that are alike; on average "
        f"{apart:.1f} heads of a layer stand apart.",
        f"符合的层占 {share:.2f}；平均每层有 {apart:.1f} 个头与众不同。",
    )
    if share.low > 0.5:
        return Judgement("holds" if share.low > 0.9 else "holds in part", numbers)
    return Judgement("does not hold" if share.high < 0.5 else "cannot be told", numbers)


def _fitting_layers(result: Result) -> tuple[Interval, float]:
    """The share of layers that fit the claim over repetitions, and the mean number of outliers of a layer."""
    fits: dict[Value, list[bool]] = {}
    for row in result.rows:
        alike = _number(row["inner"]) < _number(row["between_layers"])
        fits.setdefault(row["seed"], []).append(alike and 1 <= _number(row["outliers"]) <= 2)
    share = interval(fmean(each) for each in fits.values())
    return share, fmean(_number(row["outliers"]) for row in result.rows)


def _number(value: Value) -> float:
    return float(value or 0)
