"""Softmax makes heads differ: the same model with softmax, with sigmoid, and without normalisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from manyheads.heads.diversity.output_moments import Moments, Outputs
from manyheads.heads.diversity.pair_sums import cosines
from manyheads.nn.blocks import TransformerBlock
from manyheads.nn.multihead import MultiHeadAttention
from manyheads.studies.drawing import COLOURS, bars, panels
from manyheads.studies.fitting import fit, new_model
from manyheads.studies.language_models import FULL, TINY, LanguageModel, held_out
from manyheads.studies.result import Result
from manyheads.studies.study import (
    Claim,
    Judgement,
    Language,
    Part,
    Row,
    Size,
    Words,
    grid,
    judge_effects,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

claim = Claim(
    sentence=Words(
        "Softmax makes heads differ: without it they would all look at the same.",
        "softmax 使各个头产生差异：没有它，所有头看到的都会一样。",
    ),
    explanation=Words(
        "Softmax takes exponentials and divides by their sum. A score that is a little larger gets a much "
        "larger share, and what one key gains the others lose. So small differences between the scores of "
        "two heads become large differences between their weights. Articles conclude that this is what "
        "makes heads specialise.\n\n"
        "There are other ways to turn scores into weights. A sigmoid decides for every key alone, between "
        "0 and 1, and the weights need not sum to one. Without any normalisation the scores themselves "
        "are the weights, divided by the number of keys. Here the same model, from the same start, is "
        "trained with each of them, and its heads are compared.",
        "softmax 取指数，再除以总和。分数稍大一点，份额就大得多；一个键得到的，正是其他键失去的。于是两个"
        "头分数上的小差别变成权重上的大差别。文章由此得出结论：正是它使头有了分工。\n\n"
        "把分数变成权重还有别的办法。sigmoid 对每个键单独决定 0 到 1 之间的权重，总和不必为一。完全不归一"
        "化时，分数除以键的个数就直接作为权重。这里从同样的初始值出发，用每种办法训练同一个模型，再比较它"
        "的各个头。",
    ),
    formulas=(
        r"p_{ij}=\frac{e^{s_{ij}}}{\sum_k e^{s_{ik}}},\qquad p_{ij}=\sigma(s_{ij}-\log n_i),\qquad "
        r"p_{ij}=\frac{s_{ij}}{n_i}",
    ),
    rule=Words(
        "After training, heads of a layer are compared by their weights (1 - |cosine| of all weights) and "
        "by their outputs (1 - linear CKA). Softmax is set against sigmoid and against no normalisation: "
        "four comparisons, paired by seed. Holds if softmax's heads differ more in all of them (95% "
        "intervals above zero), holds in part if in some, does not hold if all intervals lie below zero "
        "or end there; else it cannot be told.",
        "训练后，按权重（所有权重的 1 - |余弦|）和输出（1 - 线性 CKA）比较同一层的头。把 softmax 分别与 "
        "sigmoid 和不归一化相比，按随机种子配对，共四项比较。若每一项中 softmax 的头差异都更大（95% 区间高"
        "于零），则成立；若只有一部分如此，则部分成立；若所有区间都不高于零，则不成立；否则无法判断。",
    ),
    caption=Words(
        "How different the heads of a layer are after training, by their weights and by their outputs (0: "
        "alike, 1: nothing in common), and the held-out loss. Bars: 95% interval over seeds.",
        "训练后同一层各头的差异：按权重、按输出（0 为相像，1 为毫无共同之处），以及留出损失。误差线：各随"
        "机种子的 95% 区间。",
    ),
    sources=(
        "Ramapuram and others 2024, Theory, analysis, and best practices for sigmoid self-attention.",
        "Kornblith and others 2019, Similarity of neural network representations revisited.",
    ),
)


@dataclass(frozen=True)
class Setup(LanguageModel):
    """The language model, which is trained with every kind of weights."""


SIZES: Mapping[Size, Setup] = {
    "tiny": Setup(**TINY),
    "quick": Setup(),
    "full": Setup(**FULL),
}
KINDS: Mapping[str, Words] = {
    "softmax": Words("softmax", "softmax"),
    "sigmoid": Words("sigmoid", "sigmoid"),
    "none": Words("none", "不归一化"),
}
DIFFERENCES = ("weight_difference", "output_difference")

COLUMNS: Mapping[str, Words] = {
    "weight_difference": Words("difference of the weights", "权重的差异"),
    "output_difference": Words("difference of the outputs", "输出的差异"),
    "loss": Words("held-out loss", "留出损失"),
}


class CausalAttention(nn.Module):
    """The attention of a block with weights of some kind, which are kept, as are the outputs of the heads.

    >>> module = CausalAttention(MultiHeadAttention(12, heads=3), "softmax")
    >>> x = torch.randn(2, 5, 12)
    >>> torch.allclose(module(x), module.plain(x, causal=True), atol=1e-6)
    True
    """

    def __init__(self, plain: MultiHeadAttention, kind: str) -> None:
        super().__init__()
        self.plain, self.kind = plain, kind
        self.weights = self.outputs = torch.empty(0)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        """``x (batch, length, d_model)`` to the same shape."""
        q, k, v = self.plain.project_heads(x)
        weights = causal_weights(q @ k.mT / self.plain.d_key**0.5, self.kind)
        outputs = (weights @ v).transpose(1, 2)  # (batch, length, heads, d_value)
        self.weights, self.outputs = weights.detach(), outputs.detach()
        mixed: Tensor = self.plain.output(outputs.flatten(2))
        return mixed


def causal_weights(scores: Tensor, kind: str) -> Tensor:
    """Weights (batch, heads, queries, keys) from scores; no query sees past itself.

    >>> causal_weights(torch.zeros(1, 1, 2, 2), "sigmoid")[0, 0]
    tensor([[0.5000, 0.0000],
            [0.3333, 0.3333]])
    """
    length = scores.shape[-1]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    if kind == "softmax":
        return scores.masked_fill(hidden, -torch.inf).softmax(-1)
    count = torch.arange(1.0, length + 1)[:, None]  # of the keys that a query sees
    weights = torch.sigmoid(scores - count.log()) if kind == "sigmoid" else scores / count
    return weights.masked_fill(hidden, 0.0)


def parts(setup: Setup) -> Sequence[Part]:
    """A part for every kind of weights and seed."""
    return grid(setup, _measure, weights=KINDS)


def _measure(setup: Setup, kind: str, seed: int) -> Row:
    task, data = setup.open()
    model = new_model(task, seed)
    modules = []
    for block in model.modules():
        if isinstance(block, TransformerBlock):
            modules.append(CausalAttention(block.attention, kind))
            block.attention = modules[-1]  # type: ignore[assignment]
    loss = fit(task, data, model, setup.recipe, seed).metrics()["loss"]
    with torch.no_grad():
        model(**task.inputs(held_out(task, data, 32)))
    differences = [_differences(module) for module in modules]
    means = [sum(values) / len(values) for values in zip(*differences, strict=True)]
    return dict(zip(DIFFERENCES, means, strict=True)) | {"loss": loss}


def _differences(module: CausalAttention) -> tuple[float, float]:
    """The mean over pairs of heads of 1 - |cosine| of the weights, and of 1 - CKA of the outputs."""
    weights = module.weights.transpose(0, 1).flatten(1).double()  # (heads, batch * queries * keys)
    moments = Moments()
    moments.add([Outputs("", module.outputs.flatten(0, 1))])
    rows, columns = torch.triu_indices(len(weights), len(weights), 1)
    alike = cosines(weights @ weights.T).abs(), cosines(moments.dependence("", ""))
    first, second = (float(1 - matrix[rows, columns].mean()) for matrix in alike)
    return first, second


def figure(result: Result, language: Language) -> Figure:
    """A bar for every kind of weights."""
    drawing, axes = panels(3)
    for each, (column, title) in zip(axes, COLUMNS.items(), strict=True):
        values = {label[language]: result.interval(column, weights=kind) for kind, label in KINDS.items()}
        bars(each, values, COLOURS[: len(KINDS)])
        each.set_title(title[language], fontsize=11, loc="left")
    axes[0].set_ylabel(Words("0: alike, 1: nothing in common", "0 为相像，1 为毫无共同之处")[language])
    axes[2].set_ylabel(Words("nats a token", "每词元奈特数")[language])
    return drawing


def verdict(result: Result) -> Judgement:
    """By four differences between softmax and the others."""
    gains = {
        (column, kind): result.difference(column, {"weights": "softmax"}, {"weights": kind})
        for column in DIFFERENCES
        for kind in ("sigmoid", "none")
    }
    above = sum(gain.low > 0 for gain in gains.values())
    en = [f"{COLUMNS[column].en} {gain:.3f} against {kind}" for (column, kind), gain in gains.items()]
    zh = [f"{COLUMNS[c].zh}比 {KINDS[kind].zh} 多 {gain:.3f}" for (c, kind), gain in gains.items()]
    numbers = Words(
        f"Heads with softmax differ more in {above} of {len(gains)} comparisons: {'; '.join(en)}.",
        f"{len(gains)} 项比较中，有 {above} 项 softmax 的头差异更大：{'；'.join(zh)}。",
    )
    return Judgement(judge_effects([(gain, 0.0) for gain in gains.values()]), numbers)
