"""Attention costs the square of the length: time and memory of exact, sparse and linear attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from manyheads.common.intervals import Interval, interval
from manyheads.nn.attention import attention
from manyheads.studies.drawing import line, log_ticks, panels
from manyheads.studies.processor_time import processor_seconds
from manyheads.studies.result import Result
from manyheads.studies.sparse_patterns import global_window, linear_attention
from manyheads.studies.study import (
    Claim,
    Judgement,
    Language,
    Part,
    Row,
    Settings,
    Size,
    Words,
    judge_effects,
)  # fmt: skip
from manyheads.studies.tensor_memory import TensorMemory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

claim = Claim(
    sentence=Words(
        "Attention costs the square of the length, in time and in memory; windows, chunks and linear "
        "attention cost only the length.",
        "注意力的代价是长度的平方，时间和内存都是如此；窗口、分块和线性注意力的代价只与长度成正比。",
    ),
    explanation=Words(
        "Every token is compared with every other: n tokens have n times n scores. A text twice as long "
        "costs four times as much. The textbook formula also keeps all scores in memory. A fused kernel "
        "computes the same numbers a piece at a time and forgets each piece: its time stays quadratic, "
        "its memory does not.\n\n"
        "To cost less, something must be left out. A window lets a token see its neighbours only, chunks "
        "cut the text into pieces, a few global tokens that see and are seen by all add a road between "
        "them. Linear attention replaces the softmax by a product that can be summed once for all "
        "queries. On a logarithmic scale in both directions a power of the length is a straight line, and "
        "its exponent is the slope.",
        "每个词元都要与其他所有词元比较：n 个词元有 n 乘 n 个分数。文本长一倍，代价是四倍。教科书公式还把"
        "所有分数都放在内存里。融合内核一块一块地算出同样的数，算完即丢：时间仍是平方，内存却不是。\n\n"
        "要想更省，就得舍弃一些东西。窗口让词元只看邻居；分块把文本切成小段；少数全局词元能看到所有词元，"
        "也被所有词元看到，在各段之间架起通路。线性注意力把 softmax 换成一个乘积，对所有查询只需求和一次。"
        "在双对数坐标里，长度的幂是一条直线，斜率就是指数。",
    ),
    formulas=(
        r"\mathrm{exact}:\ n^2 d\qquad \mathrm{window,\ chunk}:\ n\,w\,d\qquad "
        r"\mathrm{linear}:\ \varphi(Q)\,(\varphi(K)^{T}V)\ \Rightarrow\ n\,d^2",
    ),
    rule=Words(
        "The exponent is the slope of time (processor seconds, the least of several repeats) and of "
        "memory (bytes of the tensors that exist at once) over the three greatest lengths. Four "
        "statements, each by 95% intervals over seeds: both exact kernels have an exponent above 1.7 in "
        "time; both in memory; all others have one below 1.3 in time; all in memory. Holds if all four "
        "hold, holds in part if some do, does not hold if none does; else it cannot be told.",
        "指数是时间（处理器秒数，多次重复取最小）和内存（同时存在的张量的字节数）在三个最大长度上的斜率。"
        "四个陈述，都按各种子的 95% 区间判断：两个精确内核的时间指数都大于 1.7；内存指数都大于 1.7；其他方"
        "法的时间指数都小于 1.3；内存指数都小于 1.3。四个都成立则成立，有些成立则部分成立，没有一个成立则"
        "不成立；否则无法判断。",
    ),
    caption=Words(
        "Time (left) and memory (right) of one forward pass by length, both axes logarithmic: a line "
        "twice as steep is a square. Where two lines cross, the other becomes cheaper.",
        "一次前向计算的时间（左）和内存（右）随长度的变化，两轴都是对数：斜率为二就是平方。两条线相交之处"
        "，便宜的一方易主。",
    ),
    sources=(
        "Dao, Fu, Ermon, Rudra and Re 2022, FlashAttention: fast and memory-efficient exact attention "
        "with IO-awareness.",
        "Beltagy, Peters and Cohan 2020, Longformer: the long-document transformer.",
        "Katharopoulos, Vyas, Pappas and Fleuret 2020, Transformers are RNNs: fast autoregressive "
        "transformers with linear attention.",
    ),
)


@dataclass(frozen=True)
class Setup(Settings):
    """Lengths and sizes; ``longest_textbook`` is how far the textbook formula goes, which needs memory."""

    seeds: int = 5
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    longest_textbook: int = 4096
    heads: int = 4
    width: int = 64
    window: int = 128
    global_tokens: int = 8
    repeats: int = 3


SIZES: Mapping[Size, Setup] = {
    "tiny": Setup(seeds=2, lengths=(32, 64), heads=1, width=4, window=8, global_tokens=2, repeats=1),
    "quick": Setup(),
    "full": Setup(
        lengths=(256, 512, 1024, 2048, 4096, 8192, 16384, 32768), longest_textbook=8192, heads=8, repeats=2
    ),
}
SQUARE, LINE = 1.7, 1.3  # exponents above and below which growth counts as one or the other
POINTS = 3  # lengths that a slope is taken over

COLUMNS: Mapping[str, Words] = {
    "seconds": Words("processor time (s)", "处理器时间（秒）"),
    "bytes": Words("memory of tensors (bytes)", "张量占用的内存（字节）"),
}
EXACT = {"textbook": Words("textbook", "教科书公式"), "fused": Words("fused", "融合内核")}
CHEAP = {
    "window": Words("window", "窗口"),
    "chunk": Words("chunks", "分块"),
    "global": Words("window and global", "窗口加全局"),
    "linear": Words("linear", "线性注意力"),
}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def parts(setup: Setup) -> Sequence[Part]:
    """A part for every kind of attention, length and seed."""
    return [
        Part({"kind": kind, "length": length, "seed": seed}, partial(_measure, setup, kind, length, seed))
        for seed in range(setup.seeds)
        for kind in (*EXACT, *CHEAP)
        for length in setup.lengths
        if kind != "textbook" or length <= setup.longest_textbook
    ]


def _kinds(setup: Setup) -> dict[str, Attend]:
    return {
        "textbook": partial(attention, kernel="reference"),
        "fused": partial(attention, kernel="fused"),
        "window": partial(attention, window=setup.window),
        "chunk": partial(attention, chunk=setup.window),
        "global": partial(global_window, window=setup.window, global_tokens=setup.global_tokens),
        "linear": linear_attention,
    }


def _measure(setup: Setup, kind: str, length: int, seed: int) -> Row:
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, setup.heads, length, setup.width, generator=random) for _ in range(3))
    attend = _kinds(setup)[kind]
    with torch.no_grad():
        with TensorMemory() as memory:
            attend(q, k, v)
        seconds = processor_seconds(lambda: attend(q, k, v), setup.repeats)
    return {"seconds": seconds, "bytes": memory.peak}


def figure(result: Result, language: Language) -> Figure:
    """Time and memory by length."""
    drawing, axes = panels(2, height=4.2)
    for each, (column, title) in zip(axes, COLUMNS.items(), strict=True):
        for number, (kind, label) in enumerate((EXACT | CHEAP).items()):
            points = {n: result.interval(column, kind=kind, length=n) for n in _lengths(result, kind)}
            line(each, points, label[language], number, "o-" if kind in EXACT else "s--")
        log_ticks(each, _lengths(result, "fused"))
        each.tick_params(axis="x", labelsize=8)
        each.set_yscale("log")
        each.set_xlabel(Words("length (tokens)", "长度（词元）")[language])
        each.set_title(title[language], fontsize=11, loc="left")
    drawing.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return drawing


def verdict(result: Result) -> Judgement:
    """By the exponents of time and memory."""
    kinds = EXACT | CHEAP
    exponents = {(kind, column): _exponent(result, kind, column) for kind in kinds for column in COLUMNS}
    squares = [_least([exponents[kind, column] for kind in EXACT]) for column in COLUMNS]
    lines = [_least([_negative(exponents[kind, column]) for kind in CHEAP]) for column in COLUMNS]
    slopes = {k: f"{exponents[k, 'seconds']:.2f} / {exponents[k, 'bytes'].mean:.2f}" for k in kinds}
    crossings = {kind: str(_crossing(result, kind, "fused") or "-") for kind in CHEAP}
    numbers = Words(
        f"Exponents of time / memory: {_listed(slopes, 'en')}. Cheaper than the fused kernel from this "
        f"length on: {_listed(crossings, 'en')}.",
        f"时间 / 内存的指数：{_listed(slopes, 'zh')}。"
        f"从以下长度起比融合内核便宜：{_listed(crossings, 'zh')}。",
    )
    effects = [(each, SQUARE) for each in squares] + [(each, -LINE) for each in lines]
    return Judgement(judge_effects(effects), numbers)


def _listed(values: Mapping[str, str], language: Language) -> str:
    names = EXACT | CHEAP
    words = [f"{names[kind][language]} {value}" for kind, value in values.items()]
    return ("、" if language == "zh" else ", ").join(words)


def _exponent(result: Result, kind: str, column: str) -> Interval:
    """The slope of a column in logarithms over the greatest lengths."""
    lengths = _lengths(result, kind)[-POINTS:]
    by_length = [result.values(column, kind=kind, length=n) for n in lengths]
    seeds = sorted(set.intersection(*(set(values) for values in by_length)))
    return interval(
        float(np.polyfit(np.log(lengths), np.log([values[seed] for values in by_length]), 1)[0])
        for seed in seeds
    )


def _least(values: Sequence[Interval]) -> Interval:
    """An interval that is above a number if all of these are, and below it if one of them is."""
    means, lows, highs = zip(*((value.mean, value.low, value.high) for value in values), strict=True)
    return Interval(min(means), min(lows), min(highs), min(value.count for value in values))


def _negative(value: Interval) -> Interval:
    return Interval(-value.mean, -value.high, -value.low, value.count)


def _crossing(result: Result, cheap: str, exact: str) -> int:
    """The shortest length that was measured from which on one kind takes less time than another; 0: none."""
    first = 0
    for length in reversed(_lengths(result, exact)):
        times = [result.interval("seconds", kind=kind, length=length).mean for kind in (cheap, exact)]
        if times[0] >= times[1]:
            break
        first = length
    return first


def _lengths(result: Result, kind: str) -> list[int]:
    return sorted({int(row["length"] or 0) for row in result.where(kind=kind)})
