"""Heads that look far get the stronger gradient where the loss needs far context: two heads, built."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from manyheads.common.intervals import Interval, interval, paired_difference
from manyheads.common.preserved_state import seed_generators
from manyheads.nn.multihead import MultiHeadAttention
from manyheads.studies.drawing import line, panels
from manyheads.studies.head_weights import by_head
from manyheads.studies.recall import training
from manyheads.studies.result import Result
from manyheads.studies.study import (
    Claim,
    Judgement,
    Language,
    Part,
    Row,
    Settings,
    Size,
    Verdict,
    Words,
    grid,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

claim = Claim(
    sentence=Words(
        "Where the loss needs far context, the heads that look far get the stronger gradient.",
        "当损失需要远处的上下文时，看远处的头得到更强的梯度。",
    ),
    explanation=Words(
        "The gradient of a weight says how much the loss would change if the weight did. A head that "
        "cannot see what the answer depends on can change the loss only a little, whatever it does. A "
        "head that sees it can lower the loss, so that the loss pulls at its weights. Articles explain "
        "with two heads why some come to look far: the loss teaches those who can reach.\n\n"
        "Here is that example, built. One layer has two heads. One sees only the near half of a sequence, "
        "the other only the far half, and both see equally many tokens. One token is marked, and the last "
        "position has to repeat it. In one task the marked token is always far, in the other always near.",
        "一个权重的梯度说明：这个权重改变时，损失会改变多少。如果一个头看不到答案所依赖的内容，那么无论它"
        "做什么，都只能稍微改变损失。看得到的头能够降低损失，损失就会拉动它的权重。文章用两个头的例子解释"
        "为什么有的头学会看远处：损失只教得动够得着的头。\n\n"
        "这里把这个例子造了出来。一层有两个头：一个只看得到序列中近的一半，另一个只看得到远的一半，两者看"
        "到的词元一样多。有一个词元带标记，最后一个位置要复述它。一个任务中带标记的词元总在远处，另一个任"
        "务中总在近处。",
    ),
    formulas=(
        r"r=\log\frac{\sum_t \|\partial L_t/\partial W_{far}\|}{\sum_t \|\partial L_t/\partial W_{near}\|}",
    ),
    rule=Words(
        "r is the logarithm of the ratio between the gradient norms of the far and the near head, summed "
        "over training. Holds if r is above zero in the task that needs far context and below zero in the "
        "other one (95% intervals over seeds): then it is the need that decides, not the head. Holds in "
        "part if r is only larger in the first task than in the second, does not hold if it is not "
        "larger; else it cannot be told.",
        "r 是远头与近头的梯度范数（在训练过程中求和）之比的对数。若在需要远处上下文的任务中 r 高于零，在另"
        "一个任务中低于零（各随机种子的 95% 区间），则成立：这说明起决定作用的是需要，而不是头本身。若只是"
        "前一个任务的 r 比后一个大，则部分成立；若并不更大，则不成立；否则无法判断。",
    ),
    caption=Words(
        "Norm of the gradient of all weights of each head, while training, in the task whose answer is "
        "far (left) and in the one whose answer is near (right). Bars: 95% interval over seeds.",
        "训练过程中每个头全部权重的梯度范数。左：答案在远处的任务；右：答案在近处的任务。误差线：各随机种"
        "子的 95% 区间。",
    ),
    sources=("Vig and Belinkov 2019, Analyzing the structure of attention in a transformer language model.",),
)


@dataclass(frozen=True)
class Setup(Settings):
    """The sequences and the layer; ``span`` is how many tokens each head sees."""

    seeds: int = 5
    span: int = 16
    values: int = 16
    d_model: int = 32
    batch: int = 64
    steps: int = 300
    learning_rate: float = 3e-3
    bins: int = 10


SIZES: Mapping[Size, Setup] = {
    "tiny": Setup(seeds=2, span=3, values=4, d_model=8, batch=4, steps=4, bins=2),
    "quick": Setup(),
    "full": Setup(seeds=5, span=64, values=64, d_model=64, batch=64, steps=1000, learning_rate=1e-3),
}
FAR, NEAR = "far", "near"
HEADS = (NEAR, FAR)  # head 0, head 1
NEEDS: Mapping[str, Words] = {
    FAR: Words("the answer is far", "答案在远处"),
    NEAR: Words("the answer is near", "答案在近处"),
}

COLUMNS: Mapping[str, Words] = {
    "far_gradient": Words("far head", "远头"),
    "near_gradient": Words("near head", "近头"),
    "accuracy": Words("accuracy", "正确率"),
}


class TwoHeads(nn.Module):
    """Embedding, one layer of attention from the last position, and a projection to the answers.

    The near head sees the last ``span`` tokens, the far head the ``span`` before these.

    >>> TwoHeads(span=3, values=4, d_model=8)(torch.zeros(2, 6, dtype=torch.int64)).shape
    torch.Size([2, 4])
    """

    def __init__(self, span: int, values: int, d_model: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2 * values, d_model)  # each value without a mark and with it
        self.query = nn.Parameter(torch.randn(1, 1, d_model))
        self.attention = MultiHeadAttention(d_model, heads=2)
        self.answer = nn.Linear(d_model, values)
        far = torch.arange(2 * span) < span
        self.register_buffer("sees", torch.stack([~far, far])[None, :, None])  # (1, heads, 1, keys)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids ``(batch, 2 * span)`` to logits ``(batch, values)``."""
        tokens = self.embedding(ids)
        query = self.query.expand(len(ids), -1, -1)
        output: Tensor = self.answer(self.attention(query, tokens, mask=self.sees)[:, 0])
        return output


def parts(setup: Setup) -> Sequence[Part]:
    """A part for every task and seed."""
    return grid(setup, _measure, needs=NEEDS)


def _measure(setup: Setup, needs: str, seed: int) -> list[Row]:
    seed_generators(seed)
    model = TwoHeads(setup.span, setup.values, setup.d_model)
    draw = partial(sequences, setup, needs, torch.Generator().manual_seed(seed))
    norms, correct = [], []
    for logits, answers in training(model, draw, setup.steps, setup.learning_rate):
        gradients = torch.cat([view.flatten(1) for view in by_head(model.attention, gradients=True)], 1)
        norms.append(gradients.norm(dim=1))
        correct.append((logits.argmax(1) == answers).float().mean())
    size = setup.steps // setup.bins
    rows: list[Row] = []
    for start in range(0, size * setup.bins, size):
        means = dict(zip(HEADS, torch.stack(norms[start : start + size]).mean(0).tolist(), strict=True))
        accuracy = float(torch.stack(correct[start : start + size]).mean())
        gradients_of_heads = {f"{head}_gradient": means[head] for head in (FAR, NEAR)}
        rows.append({"step": start + size} | gradients_of_heads | {"accuracy": accuracy})
    return rows


def sequences(setup: Setup, needs: str, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random tokens ``(batch, 2 * span)``, one of them marked, far or near; and their values ``(batch,)``."""
    ids = torch.randint(setup.values, (setup.batch, 2 * setup.span), generator=random)
    marked = torch.randint(setup.span, (setup.batch, 1), generator=random)
    if needs == NEAR:
        marked = marked + setup.span
    answers = ids.gather(1, marked)
    return ids.scatter(1, marked, answers + setup.values), answers[:, 0]


def figure(result: Result, language: Language) -> Figure:
    """The gradients of both heads in both tasks, by step."""
    drawing, axes = panels(2)
    steps = [int(step) for step in result.distinct("step") if isinstance(step, int)]
    for each, (needs, title) in zip(axes, NEEDS.items(), strict=True):
        for number, column in enumerate(("far_gradient", "near_gradient")):
            points = {step: result.interval(column, needs=needs, step=step) for step in steps}
            line(each, points, COLUMNS[column][language], number, ("o-", "s--")[number])
        each.set_title(title[language], fontsize=11, loc="left")
        each.set_xlabel(Words("step", "训练步数")[language])
        each.set_ylim(bottom=0)
    axes[0].set_ylabel(Words("norm of the gradient", "梯度的范数")[language])
    axes[0].legend(frameon=False)
    return drawing


def verdict(result: Result) -> Judgement:
    """By the ratio of the gradients in both tasks, and by the difference of these."""
    ratios = {needs: _ratios(result, needs) for needs in NEEDS}
    far, near = interval(ratios[FAR].values()), interval(ratios[NEAR].values())
    more = paired_difference(ratios[FAR], ratios[NEAR])
    numbers = Words(
        f"Where the answer is far, the far head's gradient is {math.exp(far.mean):.2f} times the near head's "
        f"(r = {far:.2f}); where it is near, {math.exp(near.mean):.2f} times (r = {near:.2f}; "
        f"{more.count} seeds).",
        f"答案在远处时，远头的梯度是近头的 {math.exp(far.mean):.2f} 倍（r = {far:.2f}）；"
        f"答案在近处时，是 {math.exp(near.mean):.2f} 倍（r = {near:.2f}；{more.count} 个随机种子）。",
    )
    return Judgement(_judge(far, near, more), numbers)


def _judge(far: Interval, near: Interval, more: Interval) -> Verdict:
    if far.low > 0 > near.high:
        return "holds"
    if more.low > 0:
        return "holds in part"
    return "does not hold" if more.high <= 0 else "cannot be told"


def _ratios(result: Result, needs: str) -> dict[int, float]:
    """The logarithm of the ratio of summed gradients, far to near, by seed."""
    sums: dict[int, list[float]] = {}
    for row in result.where(needs=needs):
        total = sums.setdefault(int(row["seed"] or 0), [0.0, 0.0])
        for n, head in enumerate((FAR, NEAR)):
            total[n] += float(row[f"{head}_gradient"] or 0.0)
    return {seed: math.log(far / near) for seed, (far, near) in sums.items()}
