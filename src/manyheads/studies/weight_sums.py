"""What of the attention weights sums to one: each row of each head, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from manyheads.common.preserved_state import seed_generators
from manyheads.data.text_lines import read_lines
from manyheads.heads.maps import maps
from manyheads.models import embedded
from manyheads.studies.drawing import COLOURS, GREY, panels
from manyheads.studies.result import Result
from manyheads.studies.study import Claim, Judgement, Language, Part, Row, Settings, Size, Words, grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

claim = Claim(
    sentence=Words(
        "The attention weights of all heads sum to one.",
        "所有头的注意力权重之和为一。",
    ),
    explanation=Words(
        "Softmax turns the scores of one query into shares: it divides the exponentials by their sum, so "
        "that the weights over all keys sum to one. Every head computes a softmax of its own, for every "
        "query. So a layer with 12 heads gives each query 12 shares of one each, 12 in all. The heads do "
        "not compete with each other; only the keys of one head do.\n\n"
        "Other sums have no such rule. What one key receives from all queries can be near zero or many "
        "times one: an important word is read by many. And while a model trains with dropout on the "
        "weights, some are set to zero and the others are enlarged, so that a row sums to one only on "
        "average.",
        "softmax 把一个查询的分数变成份额：各指数除以它们的总和，于是对所有键的权重之和为一。每个头对每个"
        "查询都单独计算一次 softmax。所以 12 个头的一层给每个查询 12 份、每份之和为一，总共是 12。头与头之"
        "间并不竞争，竞争的只是同一个头里的各个键。\n\n"
        "其他的和没有这样的规则。一个键从所有查询得到的权重之和可以接近零，也可以是一的许多倍：重要的词会"
        "被许多词注意。训练时若对权重使用 dropout，一部分权重被置零，其余的被放大，每一行之和只在平均意义"
        "上为一。",
    ),
    formulas=(
        r"\sum_j p^{(h)}_{ij}=1,\qquad \sum_h\sum_j p^{(h)}_{ij}=H,\qquad "
        r"\sum_i p^{(h)}_{ij}\neq 1,\qquad \sum_h p^{(h)}_{ij}\neq 1",
    ),
    rule=Words(
        "The weights of a real sentence encoder are added up in several ways. Holds if the weights of all "
        "heads together sum to one for every query (within 0.001); holds in part if that is wrong, but "
        "each row of each head does; does not hold if not even that is so.",
        "用一个真实的句子编码器，把权重按几种方式相加。若每个查询上所有头的权重合起来都等于一（误差不超过 "
        "0.001），则成立；若并非如此，但每个头的每一行之和为一，则部分成立；若连这一点也不成立，则不成立。",
    ),
    caption=Words(
        "The mean of the sums (dot) and the range from the least to the largest (line), for the ways to "
        "add up the weights of MiniLM on sentences; logarithmic. The dashed line is one.",
        "MiniLM 读句子时，用各种方式把权重相加：点是平均值，线是从最小到最大的范围；对数坐标。虚线为一。",
    ),
    sources=("Vaswani and others 2017, Attention is all you need, section 3.2.",),
)


@dataclass(frozen=True)
class Setup(Settings):
    """How many sentences are read; each seed reads others."""

    seeds: int = 5
    sentences: int = 8
    dropout: float = 0.1


SIZES: Mapping[Size, Setup] = {
    "tiny": Setup(seeds=1, sentences=1),
    "quick": Setup(),
    "full": Setup(seeds=10, sentences=10),
}
NEAR_ONE = 1e-3
ROW, ALL_HEADS = "keys", "keys and heads"
SUMS: Mapping[str, Words] = {
    ROW: Words("one query, one head", "一个查询、一个头"),
    "keys with dropout": Words("the same, with dropout", "同上，使用 dropout"),
    ALL_HEADS: Words("one query, all heads", "一个查询、所有头"),
    "heads": Words("one query and key, all heads", "一对查询和键、所有头"),
    "queries": Words("one key, one head", "一个键、一个头"),
}
SUMMED: Mapping[str, tuple[int, ...]] = {  # axes of (batch, heads, queries, keys)
    ROW: (3,), "keys with dropout": (3,), ALL_HEADS: (1, 3), "heads": (1,), "queries": (2,),
}  # fmt: skip

COLUMNS: Mapping[str, Words] = {
    "least": Words("least sum", "最小的和"),
    "mean": Words("mean sum", "和的平均"),
    "largest": Words("largest sum", "最大的和"),
}


def parts(setup: Setup) -> Sequence[Part]:
    """A part for every sum and seed; a seed reads sentences of its own."""
    return grid(setup, _measure, over=SUMS)


def _measure(setup: Setup, name: str, seed: int) -> Row:
    model, tokenizer = _minilm()
    lines = list(read_lines(setup.data, None))
    random = torch.Generator().manual_seed(seed)
    seed_generators(seed)
    sums = []
    for number in torch.randperm(len(lines), generator=random)[: setup.sentences].tolist():
        batch = tokenizer(lines[number], return_tensors="pt", truncation=True)
        heads = {layer: range(model.config.num_attention_heads) for layer in range(len(model.encoder.layer))}
        for attention in maps(model, dict(batch), heads, size=None).values():
            sums.append(_summed(attention.weights.double(), name, setup.dropout).flatten())
    x = torch.cat(sums)
    return {"least": float(x.min()), "mean": float(x.mean()), "largest": float(x.max())}


@cache
def _minilm() -> tuple[Any, Any]:
    return embedded.load()


def _summed(weights: Tensor, name: str, dropout: float) -> Tensor:
    """Weights (batch, heads, queries, keys), added up in one of the ways of `SUMS`."""
    if name == "keys with dropout":
        weights = F.dropout(weights, dropout)
    return weights.sum(SUMMED[name])


def figure(result: Result, language: Language) -> Figure:
    """The range of every sum."""
    drawing, (axes,) = panels(width=7.0, height=3.2)
    for number, name in enumerate(SUMS):
        rows = result.where(over=name)
        least, largest = min(_of(rows, "least")), max(_of(rows, "largest"))
        middle = sum(_of(rows, "mean")) / len(rows)
        colour = COLOURS[number]
        axes.plot([max(least, 1e-4), largest], [-number, -number], color=colour, linewidth=3, alpha=0.5)
        axes.plot([middle], [-number], "o", color=colour, markersize=7)
    axes.axvline(1.0, color=GREY, linestyle="--", linewidth=1)
    axes.set_xscale("log")
    axes.set_ylim(0.6 - len(SUMS), 0.6)
    axes.set_yticks([-number for number in range(len(SUMS))], [words[language] for words in SUMS.values()])
    axes.set_xlabel(Words("sum of the weights", "权重之和")[language])
    return drawing


def verdict(result: Result) -> Judgement:
    """By the largest distance from one, of all heads together and of each row."""
    off = {name: _distance(result, name) for name in (ROW, ALL_HEADS)}
    together = _of(result.where(over=ALL_HEADS), "mean")
    mean = sum(together) / len(together)
    received = result.where(over="queries")
    numbers = Words(
        f"For one query the weights of one head sum to one within {off[ROW]:.0e}; those of all heads "
        f"together sum to {mean:.2f}. What one key receives from one head lies between "
        f"{min(_of(received, 'least')):.2g} and {max(_of(received, 'largest')):.3g}.",
        f"对一个查询，一个头的权重之和与一相差不超过 {off[ROW]:.0e}；所有头的权重合起来是 {mean:.2f}。"
        f"一个键从一个头得到的权重之和在 {min(_of(received, 'least')):.2g} 与 "
        f"{max(_of(received, 'largest')):.3g} 之间。",
    )
    if off[ALL_HEADS] < NEAR_ONE:
        return Judgement("holds", numbers)
    return Judgement("holds in part" if off[ROW] < NEAR_ONE else "does not hold", numbers)


def _distance(result: Result, name: str) -> float:
    """The largest distance of a sum from one."""
    rows = result.where(over=name)
    return max(1 - min(_of(rows, "least")), max(_of(rows, "largest")) - 1)


def _of(rows: list[Row], column: str) -> list[float]:
    return [float(row[column]) for row in rows]  # type: ignore[arg-type]
