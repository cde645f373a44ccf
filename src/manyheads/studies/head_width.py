"""A head needs a width: the loss by the width of a head, at a fixed number of heads and a fixed d_model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from manyheads.common.intervals import Interval
from manyheads.common.preserved_state import seed_generators
from manyheads.studies.drawing import line, log_ticks, panels
from manyheads.studies.fitting import fit, new_model
from manyheads.studies.language_models import FULL, TINY, LanguageModel
from manyheads.studies.recall import Pairs, Recall, training
from manyheads.studies.result import Result
from manyheads.studies.study import Claim, Judgement, Language, Part, Row, Size, Words, grid, judge_effect

if TYPE_CHECKING:
    from matplotlib.figure import Figure

claim = Claim(
    sentence=Words(
        "A head needs a width: 64 or more.",
        "头需要足够的宽度：至少 64。",
    ),
    explanation=Words(
        "A head compares a query and a key of d_key numbers each. With one number the scores of all pairs "
        "are a table of rank one: if a query prefers a key, every query of the same sign prefers it, too. "
        "With more numbers a head can tell more kinds of pairs apart. The rule of thumb in articles is 64 "
        "or more, as in the models of the first paper and in BERT.\n\n"
        "There are two ways to ask. At a fixed number of heads a wider head costs parameters, and it can "
        "only help. At a fixed d_model a wider head means fewer heads, and the question is which of the "
        "two is worth more.",
        "一个头用各 d_key 个数比较查询和键。只有一个数时，所有词对的分数是一张秩为一的表：如果一个查询偏好"
        "某个键，那么符号相同的每个查询都偏好它。数越多，一个头能区分的词对种类就越多。文章中的经验法则是 "
        "64 或更多，最初的论文和 BERT 都是如此。\n\n"
        "这个问题有两种问法。头数固定时，更宽的头要更多参数，只会有帮助。d_model 固定时，头更宽就意味着头"
        "更少，问题是哪一样更有价值。",
    ),
    formulas=(
        r"\mathrm{rank}\left(Q_i K_i^{T}\right)\leq d_{key},\qquad "
        r"\mathrm{fixed}\ d_{model}:\ h=d_{model}/d_{key}",
    ),
    rule=Words(
        "Language models decide. A width is worse than another if its held-out loss is higher by more "
        "than 0.01 nats a token (95% interval over seeds, paired). At a fixed number of heads, holds if "
        "the narrowest heads and the next width below 64 are both worse than 64; holds in part if the "
        "narrowest are, but the next width below 64 is not; does not hold if not even the narrowest are "
        "worse; else it cannot be told. The recall task was added after a first run and is not judged.",
        "由语言模型决定。若留出损失每词元高出 0.01 奈特以上（按随机种子配对的 95% 区间），就说一种宽度比另"
        "一种差。在头数固定时：若最窄的头和 64 以下的下一档宽度都比 64 差，则成立；若最窄的差，而 64 以下"
        "的下一档并不差，则部分成立；若连最窄的也不差，则不成立；否则无法判断。查值任务是第一次运行之后才"
        "加入的，不参与判断。",
    ),
    caption=Words(
        "Held-out loss (nats, lower is better) by the width of a head. Left: predicting the next "
        "character, which is judged. Right: recalling the value of one of many keys, an illustration of "
        "what a narrow head cannot do. At a fixed number of heads only queries and keys grow, at a fixed "
        "d_model there are fewer heads when they are wider. Bars: 95% interval over seeds.",
        "各种头宽度下的留出损失（奈特，越低越好）。左：预测下一个字符，据此判断。右：从许多键中找出一个键"
        "所对应的值，用来说明窄的头做不到什么。头数固定时，只有查询和键变宽；d_model 固定时，头越宽，头数"
        "越少。误差线：各随机种子的 95% 区间。",
    ),
    sources=(
        "Vaswani and others 2017, Attention is all you need, table 3 (A and B).",
        "Bhojanapalli and others 2020, Low-rank bottleneck in multi-head attention models.",
    ),
)


@dataclass(frozen=True)
class Setup(LanguageModel):
    """Widths of a head, and how long the models of both tasks are trained with each."""

    d_key: tuple[int, ...] = (1, 16, 64)
    layers: int = 1
    steps: int = 120
    recall_steps: int = 300
    recall_batch: int = 64


SIZES: Mapping[Size, Setup] = {
    "tiny": Setup(**TINY, d_key=(1, 64), recall_steps=3, recall_batch=4),
    "quick": Setup(),
    "full": Setup(
        **FULL | {"seeds": 3, "heads": 4, "layers": 2, "steps": 300},
        d_key=(1, 2, 4, 8, 16, 32, 64, 128),
        recall_steps=600,
    ),
}
ARTICLES, WORSE = 64, 0.01
TASKS: Mapping[str, Words] = {
    "language": Words("next character (judged)", "下一个字符（据此判断）"),
    "recall": Words("recall by key (not judged)", "按键查值（不参与判断）"),
}
HEADS, D_MODEL = "heads", "d_model"
FIXED: Mapping[str, Words] = {
    HEADS: Words("fixed number of heads", "头数固定"),
    D_MODEL: Words("fixed d_model", "d_model 固定"),
}

COLUMNS: Mapping[str, Words] = {
    "loss": Words("held-out loss", "留出损失"),
    "parameters": Words("parameters", "参数量"),
}


def parts(setup: Setup) -> Sequence[Part]:
    """A part for every task, width, what is fixed, and seed."""
    return grid(setup, _measure, task=TASKS, fixed=FIXED, d_key=setup.d_key)


def _measure(setup: Setup, task: str, fixed: str, d_key: int, seed: int) -> Row:
    heads = setup.heads if fixed == HEADS else max(setup.d_model // d_key, 1)
    run = _recall if task == "recall" else _language
    model, loss = run(setup, heads, d_key, seed)
    return {"loss": loss, "parameters": sum(parameter.numel() for parameter in model.parameters())}


def _language(setup: Setup, heads: int, d_key: int, seed: int) -> tuple[nn.Module, float]:
    task, data = setup.open()
    task.heads, task.d_key, task.d_value = heads, d_key, setup.d_model // heads
    task.positions = "sinusoidal"  # rotary needs an even width
    fitted = fit(task, data, new_model(task, seed), setup.recipe, seed)
    return fitted.model, fitted.metrics()["loss"]


def _recall(setup: Setup, heads: int, d_key: int, seed: int) -> tuple[nn.Module, float]:
    seed_generators(seed)
    pairs, random = Pairs(), torch.Generator().manual_seed(seed)
    model = Recall(pairs, setup.d_model, heads, d_key=d_key, d_value=setup.d_model // heads)
    for _ in training(model, partial(pairs.draw, setup.recall_batch, random), setup.recall_steps, 3e-3):
        pass
    ids, answers = pairs.draw(1024, random)
    with torch.no_grad():
        return model, float(F.cross_entropy(model(ids), answers))


def _widths(result: Result) -> list[int]:
    return sorted(int(width) for width in result.distinct("d_key") if isinstance(width, int))


def figure(result: Result, language: Language) -> Figure:
    """Loss by the width of a head, for each task."""
    drawing, axes = panels(2)
    widths = _widths(result)
    for each, (task, title) in zip(axes, TASKS.items(), strict=True):
        for number, (fixed, label) in enumerate(FIXED.items()):
            points = {width: result.interval("loss", task=task, fixed=fixed, d_key=width) for width in widths}
            line(each, points, label[language], number, ("o-", "s--")[number])
        log_ticks(each, widths)
        each.set_title(title[language], fontsize=11, loc="left")
        each.set_xlabel(Words("width of a head (d_key)", "头的宽度 (d_key)")[language])
    axes[0].set_ylabel(Words("held-out loss (nats)", "留出损失（奈特）")[language])
    axes[0].legend(frameon=False)
    return drawing


def verdict(result: Result) -> Judgement:
    """By the loss of language models with narrow heads, at a fixed number of them, relative to width 64."""
    widths = _widths(result)
    wide = min(width for width in widths if width >= ARTICLES)
    narrowest, below = widths[0], max(width for width in widths if width < ARTICLES)
    excess = {width: _excess(result, "language", width, wide) for width in (narrowest, below)}
    recall = _excess(result, "recall", narrowest, wide)
    best = _best_width(result, "language")
    numbers = Words(
        f"At a fixed number of heads, the loss of width {narrowest} is above that of width {wide} by "
        f"{excess[narrowest]:.3f} nats a token, that of width {below} by {excess[below]:.3f} "
        f"({excess[below].count} seeds). At a fixed d_model the best width is {best}. In the recall task, "
        f"which is not judged, width {narrowest} is above width {wide} by {recall:.3f}.",
        f"头数固定时，宽度 {narrowest} 的损失比宽度 {wide} 每词元高 {excess[narrowest]:.3f} 奈特，"
        f"宽度 {below} 高 {excess[below]:.3f} 奈特（{excess[below].count} 个随机种子）。"
        f"d_model 固定时，最佳宽度是 {best}。在不参与判断的查值任务中，宽度 {narrowest} 比宽度 {wide} "
        f"高 {recall:.3f}。",
    )
    narrow = judge_effect(excess[narrowest], WORSE)
    if narrow != "holds":
        return Judgement(narrow, numbers)
    next_below = judge_effect(excess[below], WORSE)
    return Judgement("holds in part" if next_below == "does not hold" else next_below, numbers)


def _best_width(result: Result, task: str) -> int:
    """The width with the lowest loss at a fixed d_model."""
    losses = {w: result.interval("loss", task=task, fixed=D_MODEL, d_key=w).mean for w in _widths(result)}
    return min(losses, key=lambda width: losses[width])


def _excess(result: Result, task: str, width: int, wide: int) -> Interval:
    fixed: Row = {"task": task, "fixed": HEADS}
    return result.difference("loss", fixed | {"d_key": width}, fixed | {"d_key": wide})
