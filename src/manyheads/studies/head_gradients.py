"""Heads receive different gradients, which grow less alike while training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyheads.common.types import Batch
from manyheads.heads.diversity import diversity
from manyheads.studies.drawing import line, panels
from manyheads.studies.fitting import fit, new_model
from manyheads.studies.head_weights import attentions, by_head
from manyheads.studies.language_models import FULL, TINY, LanguageModel, held_out
from manyheads.studies.result import Result
from manyheads.studies.study import Claim, Judgement, Language, Part, Row, Size, Words, grid, judge_effect
from manyheads.training.task import Data, Task

if TYPE_CHECKING:
    from matplotlib.figure import Figure

claim = Claim(
    sentence=Words(
        "Heads receive different gradients, and their gradients grow less alike while training.",
        "各个头得到不同的梯度，而且训练中这些梯度越来越不相像。",
    ),
    explanation=Words(
        "All heads of a layer serve the same loss, but each through weights of its own. Whether the loss "
        "wants more or less of a head on a token depends on what the head says there. Two heads that say "
        "the same on all tokens get the same gradients; heads with different jobs get different ones.\n\n"
        "To compare heads, multiply the output of each by a gate that is one, and take the gradient of "
        "the loss with respect to the gate, token by token. The cosine between the gradients of two heads "
        "is 1 if the loss wants the same of both on every token, -1 if it wants the opposite, and 0 if "
        "they have nothing to do with each other. Its absolute value says how much of one gradient lies "
        "along the other. It can be high at the start, when attention is nearly uniform and all heads "
        "average the same tokens; the claim says that it falls when they specialise.",
        "同一层的各个头服务于同一个损失，但各自通过自己的权重。损失在某个词元上希望一个头多一些还是少一些"
        "，取决于这个头在那里给出了什么。在所有词元上输出都相同的两个头得到相同的梯度；分工不同的头得到不"
        "同的梯度。\n\n"
        "为了比较，给每个头的输出乘上一个值为一的门，逐个词元求损失对门的梯度。如果损失在每个词元上对两个"
        "头的要求都相同，两者梯度的余弦为 1；要求相反则为 -1；互不相干则为 0。它的绝对值说明一个梯度有多少"
        "落在另一个的方向上。初始时注意力接近均匀，所有头平均的是同样的词元，余弦可能较大；这个说法认为，"
        "头有了分工之后它会下降。",
    ),
    formulas=(
        r"g^{(h)}_t=\frac{\partial L}{\partial \gamma^{(h)}_t},\qquad "
        r"\cos(g^{(a)},g^{(b)})=\frac{\sum_t g^{(a)}_t g^{(b)}_t}{\|g^{(a)}\|\,\|g^{(b)}\|}",
    ),
    rule=Words(
        "The mean absolute cosine between the gate gradients of a layer's heads is measured on held-out "
        "text before and after training. Gradients are different if it is below 0.5 at the end; they grow "
        "less alike if it falls (each by its 95% interval over seeds). Holds if both are so, holds in "
        "part if one is and the other is not, does not hold if neither is; else it cannot be told.",
        "在留出文本上测量训练前后同一层各头门梯度余弦绝对值的平均。若训练后低于 0.5，就算不同；若它下降了"
        "，就算越来越不相像（均按各随机种子的 95% 区间）。两者都是，则成立；一是一否，则部分成立；都不是，"
        "则不成立；否则无法判断。",
    ),
    caption=Words(
        "Mean absolute cosine between the gradients of a layer's heads, while training: of their gates, "
        "over tokens, and of their weights (those of one training batch, as the articles compare them). "
        "1: alike, 0: different. Bars: 95% interval over seeds.",
        "训练过程中同一层各头梯度余弦绝对值的平均：门的梯度（逐词元），以及权重的梯度（一个训练批次上，即"
        "文章所用的比较方法）。1 为相像，0 为不同。误差线：各随机种子的 95% 区间。",
    ),
    sources=("Michel, Levy and Neubig 2019, Are sixteen heads really better than one? (gates of heads)",),
)


@dataclass(frozen=True)
class Setup(LanguageModel):
    """The language model, and how often its gradients are compared."""

    seeds: int = 5
    comparisons: int = 5


SIZES: Mapping[Size, Setup] = {
    "tiny": Setup(**TINY, comparisons=1),
    "quick": Setup(),
    "full": Setup(**FULL, comparisons=10),
}
DIFFERENT = 0.5

COLUMNS: Mapping[str, Words] = {
    "gate_cosine": Words("of the gates", "门的梯度"),
    "weight_cosine": Words("of the weights", "权重的梯度"),
}


def parts(setup: Setup) -> Sequence[Part]:
    """A part for every seed."""
    return grid(setup, _measure)


def _measure(setup: Setup, seed: int) -> list[Row]:
    task, data = setup.open()
    last = setup.steps - 1
    rows: list[Row] = []
    steps = {round(last * n / setup.comparisons) for n in range(setup.comparisons + 1)}

    def after_backward(step: int, model: nn.Module) -> None:
        if step in steps:
            rows.append({"step": step, "gate_cosine": gate_cosine(task, data, model)})
            rows[-1]["weight_cosine"] = weight_cosine(model)

    fit(task, data, new_model(task, seed), setup.recipe, seed, after_backward=after_backward)
    return rows


def gate_cosine(task: Task, data: Data, model: nn.Module) -> float:
    """The mean absolute cosine between the gradients of the gates of a layer's heads, on held-out text."""
    batch = held_out(task, data)

    def loss(logits: Tensor, inputs: Batch) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")

    table = diversity(model, [task.inputs(batch)], measures=["gradients"], loss=loss)
    sites, cosines = table["site"], table.matrices["gradient_cosine"]
    heads = [torch.tensor([i for i, site in enumerate(sites) if site == one]) for one in dict.fromkeys(sites)]
    return _mean([_off_diagonal(cosines[numbers][:, numbers]) for numbers in heads])


def weight_cosine(model: nn.Module) -> float:
    """The mean absolute cosine between the gradients of all weights of a layer's heads."""
    matrices = []
    for module in attentions(model):
        gradients = torch.cat([view.flatten(1) for view in by_head(module, gradients=True)], 1)
        matrices.append(F.cosine_similarity(gradients[:, None], gradients[None], dim=-1))
    return _mean([_off_diagonal(matrix) for matrix in matrices])


def _off_diagonal(matrix: Tensor) -> float:
    """The mean absolute value over pairs."""
    rows, columns = torch.triu_indices(len(matrix), len(matrix), 1)
    return float(matrix[rows, columns].abs().mean())


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _steps(result: Result) -> list[int]:
    return sorted(int(step) for step in result.distinct("step") if isinstance(step, int))


def figure(result: Result, language: Language) -> Figure:
    """Cosines by the step of the training."""
    drawing, (axes,) = panels()
    for number, (column, label) in enumerate(COLUMNS.items()):
        points = {step: result.interval(column, step=step) for step in _steps(result)}
        line(axes, points, label[language], number)
    axes.set_ylim(0, 1)
    axes.legend(frameon=False, title=Words("gradients", "梯度")[language])
    axes.set_xlabel(Words("step", "训练步数")[language])
    axes.set_ylabel(Words("mean absolute cosine", "余弦绝对值的平均")[language])
    return drawing


def verdict(result: Result) -> Judgement:
    """By the cosine at the end, and by how much it fell."""
    steps = _steps(result)
    start, end = (result.interval("gate_cosine", step=step) for step in (steps[0], steps[-1]))
    fall, of_weights = (
        result.difference(column, {"step": steps[0]}, {"step": steps[-1]}) for column in COLUMNS
    )
    numbers = Words(
        f"The mean absolute cosine between the gradients of heads is {start:.3f} at the start and {end:.3f} "
        f"after {steps[-1] + 1} steps; it falls by {fall:.3f}, that of the weights by {of_weights:.3f} "
        f"({fall.count} seeds).",
        f"各头梯度余弦绝对值的平均在初始时是 {start:.3f}，{steps[-1] + 1} 步之后是 {end:.3f}，"
        f"下降了 {fall:.3f}；权重梯度的余弦下降了 {of_weights:.3f}（{fall.count} 个随机种子）。",
    )
    alike, less = judge_effect(end, DIFFERENT), judge_effect(fall, 0.0)
    different = {"holds": "does not hold", "does not hold": "holds"}.get(alike, alike)
    if "cannot be told" in (different, less):
        return Judgement("cannot be told", numbers)
    if different == less:
        return Judgement(less, numbers)
    return Judgement("holds in part", numbers)
