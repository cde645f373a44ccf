"""Heads work with and against each other through the output projection: who adds, and who cancels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from manyheads.heads.diversity.pair_sums import cosines
from manyheads.nn.multihead import MultiHeadAttention
from manyheads.studies.drawing import COLOURS, bars, panels
from manyheads.studies.fitting import fit, new_model
from manyheads.studies.head_weights import attentions
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
)  # fmt: skip

if TYPE_CHECKING:
    from matplotlib.figure import Figure

claim = Claim(
    sentence=Words(
        "Heads work with and against each other through the output projection: some add, some cancel, and "
        "without the mixing the model is worse.",
        "各个头通过输出投影互相配合、互相抵消：有的相加，有的相消；去掉这种混合，模型会变差。",
    ),
    explanation=Words(
        "The output projection gives every head its own matrix from the width of a head to the width of "
        "the model, and adds up what they write. All heads write into the same channels. Two of them can "
        "write in the same direction and strengthen each other, or in opposite directions and cancel, as "
        "one head corrects another.\n\n"
        "What is this mixing worth? Take it away in two ways. Either each head gets channels of its own, "
        "which no other head of the layer writes to, or all heads share one matrix, which reads their "
        "average. Both have fewer weights, so their feed-forward networks are made wider until all models "
        "have the same number of parameters.",
        "输出投影为每个头准备了一个从头的宽度到模型宽度的矩阵，再把各头写出的内容相加。所有头都写入同样的"
        "通道。两个头可以朝同一方向写，互相加强；也可以朝相反方向写，互相抵消，例如一个头纠正另一个头。"
        "\n\n"
        "这种混合有多大价值？用两种办法去掉它：一种是每个头有自己的通道，同一层的其他头不写入；另一种是所"
        "有头共用一个矩阵，它只读各头的平均。两种办法的权重都更少，所以把前馈网络加宽，使所有模型的参数量"
        "相同。",
    ),
    formulas=(
        r"y=\sum_h W_h\,o_h,\qquad \cos(a,b)=\frac{\sum_t (W_a o_a)\cdot(W_b o_b)}"
        r"{\|W_a o_a\|\,\|W_b o_b\|}",
    ),
    rule=Words(
        "Two heads of a layer add if the cosine between what they write, over all tokens of a held-out "
        "text, is above 0.1, and cancel if it is below -0.1. There are four conditions: over 5% of pairs "
        "add, over 5% cancel, the held-out loss with channels of their own is higher than with mixing, "
        "and so is that with the average (95% intervals over seeds). Holds if all four are so, holds in "
        "part if some are, does not hold if none is; else it cannot be told.",
        "若在一段留出文本的所有词元上，同一层两个头写出内容的余弦高于 0.1，就说它们相加；低于 -0.1，就说它"
        "们相消。有四个条件：5% 以上的头对相加；5% 以上的头对相消；各头用自己的通道时留出损失比混合时高；"
        "读平均时也比混合时高（均按各随机种子的 95% 区间）。四项都满足，则成立；满足一部分，则部分成立；一"
        "项也不满足，则不成立；否则无法判断。",
    ),
    caption=Words(
        "Left: shares of the pairs of heads that add and that cancel, in the model with mixing. Right: "
        "held-out loss with mixing, with channels of its own for each head, and with the average of all "
        "heads; the same number of parameters; this axis does not start at zero. Bars: 95% interval over "
        "seeds.",
        "左：有混合的模型中，相加和相消的头对所占比例。右：有混合、每个头用自己的通道、读所有头的平均这三"
        "种情况的留出损失；参数量相同；此纵轴不从零开始。误差线：各随机种子的 95% 区间。",
    ),
    sources=(
        "Vaswani and others 2017, Attention is all you need, section 3.2.2.",
        "Cordonnier, Loukas and Jaggi 2020, Multi-head attention: collaborate instead of concatenate.",
    ),
)


@dataclass(frozen=True)
class Setup(LanguageModel):
    """The language model, which is trained with every kind of output."""


SIZES: Mapping[Size, Setup] = {
    "tiny": Setup(**TINY),
    "quick": Setup(),
    "full": Setup(**FULL),
}
CLEAR, SHARE = 0.1, 0.05
MIXING, CHANNELS, AVERAGE = "mixing", "own channels", "average"
OUTPUTS: Mapping[str, Words] = {
    MIXING: Words("mixing", "混合"),
    CHANNELS: Words("own channels", "各用通道"),
    AVERAGE: Words("average", "平均"),
}

COLUMNS: Mapping[str, Words] = {
    "adding": Words("pairs that add", "相加的头对"),
    "cancelling": Words("pairs that cancel", "相消的头对"),
    "loss": Words("held-out loss", "留出损失"),
    "parameters": Words("parameters", "参数量"),
}


class OwnChannels(nn.Module):
    """An output projection in which each head writes to channels of its own: a square matrix for each.

    >>> OwnChannels(heads=3, d_model=12)(torch.randn(2, 5, 12)).shape
    torch.Size([2, 5, 12])
    """

    def __init__(self, heads: int, d_model: int) -> None:
        super().__init__()
        width = d_model // heads
        self.weight = nn.Parameter(torch.randn(heads, width, width) / width**0.5)
        self.bias = nn.Parameter(torch.zeros(d_model))

    def forward(self, x: Tensor) -> Tensor:
        """All heads' outputs (batch, length, d_model) to the same shape."""
        written = torch.einsum("bnhi,hij->bnhj", x.unflatten(2, (len(self.weight), -1)), self.weight)
        return written.flatten(2) + self.bias


class Average(nn.Linear):
    """An output projection that reads the average of all heads; as large at the start as with mixing.

    >>> Average(heads=3, d_model=12)(torch.randn(2, 5, 12)).shape
    torch.Size([2, 5, 12])
    """

    def __init__(self, heads: int, d_model: int) -> None:
        super().__init__(d_model // heads, d_model)
        self.heads = heads
        nn.init.normal_(self.weight, std=heads / d_model**0.5)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """All heads' outputs (batch, length, d_model) to the same shape."""
        return super().forward(x.unflatten(2, (self.heads, -1)).mean(2))


def parts(setup: Setup) -> Sequence[Part]:
    """A part for every kind of output and seed."""
    return grid(setup, _measure, output=OUTPUTS)


def _measure(setup: Setup, kind: str, seed: int) -> Row:
    task, data = setup.open()
    d_model, heads = setup.d_model, setup.heads
    if kind != MIXING:  # a feed-forward network has two weights of d_model for each hidden channel
        task.d_hidden = 4 * d_model + (d_model - d_model // heads) // 2
    model = new_model(task, seed)
    for module in attentions(model) if kind != MIXING else []:
        projection = OwnChannels(heads, d_model) if kind == CHANNELS else Average(heads, d_model)
        module.output = projection  # type: ignore[assignment]
    fitted = fit(task, data, model, setup.recipe, seed)
    batch = task.inputs(held_out(task, data))
    pairs = torch.cat([_cosines(model, module, batch) for module in attentions(model)])
    return {
        "adding": float((pairs > CLEAR).double().mean()),
        "cancelling": float((pairs < -CLEAR).double().mean()),
        "loss": fitted.metrics()["loss"],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


@torch.no_grad()
def _cosines(model: nn.Module, module: MultiHeadAttention, batch: dict[str, Tensor]) -> Tensor:
    """The cosines between what the heads of a layer write, (pairs,): each head written by itself."""
    read: list[Tensor] = []
    handle = module.output.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    model(**batch)
    handle.remove()
    heads = read[0].unflatten(2, (module.heads, -1))
    nothing = module.output(torch.zeros_like(read[0]))  # the bias
    written = []
    for head in range(module.heads):
        alone = torch.zeros_like(heads)
        alone[:, :, head] = heads[:, :, head]
        written.append((module.output(alone.flatten(2)) - nothing).flatten().double())
    matrix = torch.stack(written)
    rows, columns = torch.triu_indices(module.heads, module.heads, 1)
    return cosines(matrix @ matrix.T)[rows, columns]


def figure(result: Result, language: Language) -> Figure:
    """Shares of pairs, and the loss of each kind of output."""
    drawing, (left, right) = panels(2)
    shares = {
        COLUMNS[column][language]: result.interval(column, output=MIXING)
        for column in ("adding", "cancelling")
    }
    bars(left, shares, COLOURS[2:4])
    left.set_ylim(0, 1)
    left.set_ylabel(Words("share of the pairs of heads", "占头对的比例")[language])
    losses = {label[language]: result.interval("loss", output=kind) for kind, label in OUTPUTS.items()}
    bars(right, losses, COLOURS[:3])
    right.set_ylabel(Words("held-out loss (nats a token)", "留出损失（每词元奈特数）")[language])
    lowest, highest = (pick(each.mean for each in losses.values()) for pick in (min, max))
    right.set_ylim(max(lowest - 4 * (highest - lowest) - 0.05, 0.0), highest + (highest - lowest) + 0.05)
    return drawing


def verdict(result: Result) -> Judgement:
    """By the shares of pairs, and by the loss without mixing."""
    adding, cancelling = (result.interval(column, output=MIXING) for column in ("adding", "cancelling"))
    worse = {
        kind: result.difference("loss", {"output": kind}, {"output": MIXING}) for kind in (CHANNELS, AVERAGE)
    }
    numbers = Words(
        f"Of the pairs of heads, {adding:.0%} add and {cancelling:.0%} cancel. Without mixing the loss is "
        f"higher by {worse[CHANNELS]:.3f} nats a token with channels of their own, and by "
        f"{worse[AVERAGE]:.3f} with the average ({adding.count} seeds).",
        f"头对中有 {adding:.0%} 相加，{cancelling:.0%} 相消。去掉混合后，各用通道时损失每词元高 "
        f"{worse[CHANNELS]:.3f} 奈特，读平均时高 {worse[AVERAGE]:.3f} 奈特（{adding.count} 个随机种子）。",
    )
    effects = [(adding, SHARE), (cancelling, SHARE), *((each, 0.0) for each in worse.values())]
    return Judgement(judge_effects(effects), numbers)
