"""Without 1/sqrt(d_key) the softmax saturates: entropy and gradient at the start, loss after training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from manyheads.nn.multihead import MultiHeadAttention
from manyheads.studies.drawing import line, log_ticks, panels
from manyheads.studies.fitting import Recipe, fit, new_model
from manyheads.studies.language_text import opened
from manyheads.studies.result import Result
from manyheads.studies.study import Claim, Judgement, Language, Part, Row, Settings, Size, Words, grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

claim = Claim(
    sentence=Words(
        "Without the division by the square root of the key width, softmax saturates and its gradient "
        "vanishes.",
        "如果不除以键宽度的平方根，softmax 会饱和，梯度会消失。",
    ),
    explanation=Words(
        "A score is a sum of d_key products. If queries and keys have components of variance one, the "
        "score has variance d_key: with 64 channels scores of plus or minus 8 are common, and e^8 is 3000 "
        "times e^0. Softmax then gives nearly all weight to one key. Where one weight is 1 and all others "
        "are 0, changing the scores changes nothing: the gradient is p_i (1 - p_i), which is zero at both "
        "ends.\n\n"
        "Dividing by the square root of d_key brings the variance back to one, whatever the width.",
        "一个分数是 d_key 个乘积之和。若查询和键各分量的方差为一，分数的方差就是 d_key:64 个通道时，正负 "
        "8 的分数很常见，而 e^8 是 e^0 的 3000 倍，softmax 几乎把全部权重给了一个键。当一个权重为 1、其余"
        "为 0 时，改变分数什么也不会改变：梯度是 p_i (1 - p_i)，在两端都为零。\n\n"
        "除以 d_key 的平方根，使方差在任何宽度下都回到一。",
    ),
    formulas=(
        r"\mathrm{Var}(q\cdot k)=d_{key},\qquad \frac{\partial p_i}{\partial s_j}=p_i(\delta_{ij}-p_j)",
    ),
    rule=Words(
        "At the widest heads, three things are looked at: whether the entropy without scaling is below a "
        "third of that with it, whether the gradient with respect to the scores is below half, and "
        "whether the held-out loss after training is worse (its 95% interval is above zero). Holds if all "
        "three are so, in part if some are, does not hold if none is.",
        "在最宽的头上看三件事：不缩放时的熵是否不到缩放时的三分之一，对分数的梯度是否不到一半，训练后的留"
        "出损失是否更差（95% 区间高于零）。三项都是则成立，有些是则部分成立，都不是则不成立。",
    ),
    caption=Words(
        "By the width of a head, with and without scaling. Left: entropy of the weights at the start, as "
        "a share of the largest possible. Middle: gradient of the scores at the start. Right: held-out "
        "loss after training.",
        "横轴为头的宽度，比较缩放与不缩放。左：初始时权重的熵（占最大可能值的比例）。中：初始时分数的梯度"
        "。右：训练后的留出损失。",
    ),
    sources=("Vaswani and others 2017, Attention is all you need, section 3.2.1.",),
)


@dataclass(frozen=True)
class Setup(Settings):
    """Widths of a head, and the language model that is trained with each."""

    d_key: tuple[int, ...] = (4, 16, 64, 256)
    keys: int = 128
    d_model: int = 64
    heads: int = 2
    layers: int = 2
    context: int = 64
    steps: int = 120


SIZES: Mapping[Size, Setup] = {
    "tiny": Setup(seeds=2, d_key=(4, 64), keys=16, d_model=16, layers=1, context=16, steps=2),
    "quick": Setup(),
    "full": Setup(seeds=5, d_key=(4, 16, 64, 256, 1024), d_model=128, layers=4, context=128, steps=300),
}

COLUMNS: Mapping[str, Words] = {
    "entropy": Words("entropy at the start", "初始的熵"),
    "gradient": Words("gradient of the scores", "分数的梯度"),
    "loss": Words("held-out loss", "留出损失"),
}


def parts(setup: Setup) -> Sequence[Part]:
    """A part for every width, with and without scaling, and seed."""
    return grid(setup, _measure, d_key=setup.d_key, scaled=(True, False))


def _measure(setup: Setup, d_key: int, scaled: bool, seed: int) -> Row:
    task, data = opened(setup.data, setup.context)
    task.d_model, task.layers, task.heads, task.d_key = setup.d_model, setup.layers, setup.heads, d_key
    model = new_model(task, seed)
    if not scaled:
        for module in model.modules():
            if isinstance(module, MultiHeadAttention):
                module.query.register_forward_hook(_undo_scaling(d_key))
    fitted = fit(task, data, model, Recipe(steps=setup.steps), seed)
    return _at_start(d_key, setup.keys, scaled, seed) | {"loss": fitted.metrics()["loss"]}


def _undo_scaling(d_key: int) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output * math.sqrt(d_key)

    return hook


def _at_start(d_key: int, keys: int, scaled: bool, seed: int) -> Row:
    """Entropy of the weights, and the gradient of the scores, for random queries, keys and values."""
    random = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(keys, d_key, generator=random, dtype=torch.float64) for _ in range(2))
    value = torch.randn(keys, 1, generator=random, dtype=torch.float64)
    scores = (query @ key.T / (math.sqrt(d_key) if scaled else 1.0)).requires_grad_()
    weights = scores.softmax(-1)
    entropy = -(weights * weights.clamp(min=1e-300).log()).sum(-1).mean() / math.log(keys)
    (gradient,) = torch.autograd.grad((weights @ value).sum(), scores)
    return {"entropy": float(entropy.detach()), "gradient": float(gradient.norm(dim=-1).mean())}


def figure(result: Result, language: Language) -> Figure:
    """Entropy, gradient and loss by the width of a head."""
    drawing, axes = panels(3)
    widths = [int(w) for w in result.distinct("d_key") if isinstance(w, int)]
    labels = {True: Words("scaled", "缩放"), False: Words("not scaled", "不缩放")}
    for each, (column, title) in zip(axes, COLUMNS.items(), strict=True):
        for number, (scaled, label) in enumerate(labels.items()):
            points = {w: result.interval(column, d_key=w, scaled=scaled) for w in widths}
            line(each, points, label[language], number)
        log_ticks(each, widths)
        each.set_xlabel(Words("width of a head (d_key)", "头的宽度 (d_key)")[language])
        each.set_title(title[language], fontsize=11, loc="left")
        if column != "loss":
            each.set_ylim(bottom=0)
    axes[0].legend(frameon=False)
    return drawing


def verdict(result: Result) -> Judgement:
    """By entropy and gradient at the start and loss after training, at the widest heads."""
    width = max(int(w) for w in result.distinct("d_key") if isinstance(w, int))
    with_scaling, without = {"d_key": width, "scaled": True}, {"d_key": width, "scaled": False}
    shares = {
        column: result.interval(column, **without).mean / result.interval(column, **with_scaling).mean
        for column in ("entropy", "gradient")
    }
    worse = result.difference("loss", without, with_scaling)
    numbers = Words(
        f"At d_key {width} the entropy without scaling is {shares['entropy']:.2f} of that with it, the "
        f"gradient {shares['gradient']:.2f}; the loss after training is worse by {worse:.3f}.",
        f"d_key 为 {width} 时，不缩放的熵是缩放时的 {shares['entropy']:.2f}，"
        f"梯度是 {shares['gradient']:.2f}；训练后的损失高出 {worse:.3f}。",
    )
    true = [shares["entropy"] < 1 / 3, shares["gradient"] < 0.5, worse.low > 0]
    return Judgement("holds" if all(true) else "holds in part" if any(true) else "does not hold", numbers)
