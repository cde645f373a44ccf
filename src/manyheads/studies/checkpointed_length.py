"""Checkpointing trains longer sequences in the same memory: how much longer, and what it costs in time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from manyheads.common.intervals import Interval, interval
from manyheads.common.preserved_state import seed_generators
from manyheads.nn.transformers import Encoder
from manyheads.studies.drawing import GREY, bars, line, log_ticks, panels
from manyheads.studies.processor_time import processor_seconds
from manyheads.studies.result import Result
from manyheads.studies.study import Claim, Judgement, Language, Part, Row, Settings, Size, Words
from manyheads.studies.tensor_memory import TensorMemory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

claim = Claim(
    sentence=Words(
        "Checkpointing trains sequences 70 times longer in the same memory.",
        "用检查点技术，同样的内存可以训练长 70 倍的序列。",
    ),
    explanation=Words(
        "To compute gradients, training keeps what every layer computed on the way forward. Activation "
        "checkpointing keeps only the input of each layer and computes the rest again on the way back. "
        "Memory falls, and time grows by about a third: one more forward pass beside one forward and one "
        "backward pass, which costs two.\n\n"
        "How much longer a sequence may be depends on what the layers keep. The textbook formula keeps "
        "the square of the length in every layer, and one layer at a time must still fit. A fused kernel "
        "keeps no square at all. Here the bytes of all tensors of a forward and backward pass are "
        "counted, without computing them, so that any length can be tried.",
        "为了计算梯度，训练要保留前向过程中每一层算出的结果。激活检查点只保留每层的输入，反向时再重新计算"
        "其余部分。内存减少，时间大约增加三分之一：一次前向和一次反向（相当于两次前向）之外，多了一次前向"
        "。\n\n"
        "序列能长多少，取决于各层保留了什么。教科书公式在每一层都保留长度的平方，而至少有一层必须放得下。"
        "融合内核完全不保留平方。这里统计一次前向和反向过程中所有张量的字节数，而不真正计算，因此任何长度"
        "都可以尝试。",
    ),
    formulas=(r"\mathrm{memory}:\ L\,(c\,n\,d+h\,n^2)\ \rightarrow\ L\,n\,d+(c\,n\,d+h\,n^2)",),
    rule=Words(
        "For the deepest model: the longest sequence that trains with checkpointing in the memory that "
        "training takes without it, divided by the length without it. Holds if that is 70 or more with "
        "the same kernel; holds in part if it takes the fused kernel as well (textbook without "
        "checkpointing against fused with it); else it does not hold.",
        "对最深的模型：在不用检查点时所需的内存里，用检查点能训练的最长序列，除以不用时的长度。若同一内核"
        "下达到 70 倍，则成立；若还要加上融合内核（不用检查点的教科书公式对比用检查点的融合内核）才达到，"
        "则部分成立；否则不成立。",
    ),
    caption=Words(
        "Left: how many times longer a sequence trains in the same memory, by the number of layers; the "
        "dashed line is the claim. Right: processor time of a forward and backward pass with "
        "checkpointing, relative to that without it. Bars: 95% interval over repetitions.",
        "左：同样内存下可训练的序列长多少倍，横轴为层数；虚线是文章中的说法。右：用检查点时一次前向和反向"
        "的处理器时间与不用时之比。误差线：各次重复的 95% 区间。",
    ),
    sources=("Chen, Xu, Zhang and Guestrin 2016, Training deep nets with sublinear memory cost.",),
)


@dataclass(frozen=True)
class Setup(Settings):
    """The encoder, the length without checkpointing, that at which time is taken; also resident memory?"""

    layers: tuple[int, ...] = (6, 24)
    length: int = 1024
    timed_length: int = 256
    d_model: int = 512
    heads: int = 8
    repeats: int = 1
    resident: bool = False


SIZES: Mapping[Size, Setup] = {
    "tiny": Setup(seeds=2, layers=(1, 2), length=32, timed_length=8, d_model=8, heads=2, repeats=1),
    "quick": Setup(),
    "full": Setup(
        seeds=5, layers=(6, 12, 24, 48, 96), length=2048, timed_length=1024, repeats=5, resident=True
    ),
}
CLAIMED = 70
STATUS = Path("/proc/self/status")  # where Linux says how much memory a process has had at most
KERNELS = {"reference": Words("textbook", "教科书公式"), "fused": Words("fused kernel", "融合内核")}

COLUMNS: Mapping[str, Words] = {
    "memory": Words("memory of tensors (MB)", "张量占用的内存（MB）"),
    "times_longer": Words("times longer", "长多少倍"),
    "times_longer_than_textbook": Words("times longer than the textbook", "比教科书公式长多少倍"),
    "seconds": Words("processor time (s)", "处理器时间（秒）"),
    "resident_bytes": Words("resident memory that a pass adds (bytes)", "一次计算增加的常驻内存（字节）"),
}


def parts(setup: Setup) -> Sequence[Part]:
    """Memory for every depth, kernel, with and without checkpointing; time for the first depth by seed."""
    return [
        Part(
            {"layers": layers, "kernel": kernel, "checkpoint": checkpoint, "seed": seed},
            partial(_measure, setup, layers, kernel, checkpoint, seed),
        )
        for seed in range(setup.seeds)
        for layers in setup.layers
        if seed == 0 or layers == setup.layers[0]
        for kernel in KERNELS
        for checkpoint in (False, True)
    ]


def _measure(setup: Setup, layers: int, kernel: str, checkpoint: bool, seed: int) -> Row:
    row: Row = dict.fromkeys(COLUMNS)
    if seed == 0:  # memory does not depend on it
        plain, textbook = (_bytes(setup, layers, k, False, setup.length) for k in (kernel, "reference"))
        row["memory"] = _bytes(setup, layers, kernel, checkpoint, setup.length) / 1e6
        row["times_longer"] = _longest(setup, layers, kernel, checkpoint, plain) / setup.length
        longest = _longest(setup, layers, kernel, checkpoint, textbook)
        row["times_longer_than_textbook"] = longest / setup.length
    if layers == setup.layers[0]:
        row["seconds"] = _seconds(setup, layers, kernel, checkpoint, seed)
        if setup.resident and STATUS.exists():
            row["resident_bytes"] = _resident(setup, layers, kernel, checkpoint)
    return row


def _longest(setup: Setup, layers: int, kernel: str, checkpoint: bool, budget: int) -> float:
    """The longest sequence whose training takes this many bytes, within 2%: by the secant method."""
    low, high = float(setup.length), 4.0 * setup.length
    for _ in range(8):
        first, second = (_bytes(setup, layers, kernel, checkpoint, round(n)) for n in (low, high))
        guess = high + (budget - second) * (high - low) / (second - first)
        if abs(guess - high) < 0.02 * high:
            break
        low, high = high, max(guess, 1.0)
    return guess


@cache
def _bytes(setup: Setup, layers: int, kernel: str, checkpoint: bool, length: int) -> int:
    """The most bytes of tensors at once in a forward and a backward pass; nothing is computed."""
    memory = TensorMemory()
    with FakeTensorMode(), memory:
        before = _encoder(setup, layers, kernel, checkpoint), torch.zeros(1, length, setup.d_model)
        fixed = memory.live
        _pass(*before)
    return memory.peak - fixed


def _seconds(setup: Setup, layers: int, kernel: str, checkpoint: bool, seed: int) -> float:
    seed_generators(seed)
    encoder = _encoder(setup, layers, kernel, checkpoint)
    x = torch.randn(1, setup.timed_length, setup.d_model)
    return processor_seconds(lambda: _pass(encoder, x), setup.repeats)


def _resident(setup: Setup, layers: int, kernel: str, checkpoint: bool) -> int:
    """What a pass at the full length adds to the peak of the resident memory of a process of its own."""
    call = f"_grown({setup!r}, {layers}, {kernel!r}, {checkpoint})"
    code = f"from {__name__} import Setup, _grown; print({call})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(run.stdout)


def _grown(setup: Setup, layers: int, kernel: str, checkpoint: bool) -> int:
    encoder = _encoder(setup, layers, kernel, checkpoint)
    peaks = []
    for length in (8, setup.length):  # the first makes room for the gradients of the weights and the kernels
        _pass(encoder, torch.zeros(1, length, setup.d_model))
        lines = STATUS.read_text().splitlines()
        peaks.append(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")))
    return 1024 * (peaks[1] - peaks[0])


def _encoder(setup: Setup, layers: int, kernel: str, checkpoint: bool) -> Encoder:
    return Encoder(
        setup.d_model, setup.heads, layers, positions="rotary", checkpoint=checkpoint, kernel=kernel
    )


def _pass(encoder: Encoder, x: torch.Tensor) -> None:
    output = encoder(x)
    assert isinstance(output, torch.Tensor)
    output.sum().backward()


def figure(result: Result, language: Language) -> Figure:
    """Times longer by depth, and time relative to that without checkpointing."""
    drawing, (left, right) = panels(2, height=4.0)
    layers = _layers(result)
    lines = {
        ("reference", "times_longer"): Words("textbook, with checkpointing", "教科书公式，用检查点"),
        ("fused", "times_longer"): Words("fused, with checkpointing", "融合内核，用检查点"),
        ("fused", "times_longer_than_textbook"): Words(
            "fused with, against textbook without", "融合内核用检查点，对比教科书公式不用"
        ),
    }
    for number, ((kernel, column), label) in enumerate(lines.items()):
        points = {n: interval([_value(result, column, n, kernel)]) for n in layers}
        line(left, points, label[language], number)
    left.axhline(CLAIMED, color=GREY, linestyle="--", linewidth=1)
    log_ticks(left, layers)
    left.set_ylim(0, CLAIMED * 1.6)
    left.legend(frameon=False, fontsize=8, loc="upper left")
    left.set_xlabel(Words("layers", "层数")[language])
    left.set_title(Words("times longer in the same memory", "同样内存下长多少倍")[language], fontsize=11)
    bars(right, {words[language]: _time_ratio(result, kernel) for kernel, words in KERNELS.items()})
    right.axhline(1.0, color=GREY, linestyle="--", linewidth=1)
    right.set_title(Words("time relative to that without", "与不用时的时间之比")[language], fontsize=11)
    return drawing


def verdict(result: Result) -> Judgement:
    """By the length in the same memory, at the deepest model."""
    deepest = _layers(result)[-1]
    same = {kernel: _value(result, "times_longer", deepest, kernel) for kernel in KERNELS}
    both = _value(result, "times_longer_than_textbook", deepest, "fused")
    slower = _time_ratio(result, "fused")
    numbers = Words(
        f"With {deepest} layers checkpointing trains sequences {same['fused']:.1f} times longer with the "
        f"fused kernel, {same['reference']:.1f} times with the textbook formula, and {both:.1f} times longer "
        f"than the textbook formula without it if the fused kernel is used, too. It takes {slower:.2f} times "
        "the time.",
        f"{deepest} 层时，检查点使融合内核能训练的序列长 {same['fused']:.1f} 倍，"
        f"教科书公式长 {same['reference']:.1f} 倍；"
        f"若同时改用融合内核，则比不用检查点的教科书公式长 {both:.1f} 倍。时间是原来的 {slower:.2f} 倍。",
    )
    if max(same.values()) >= CLAIMED:
        return Judgement("holds", numbers)
    return Judgement("holds in part" if both >= CLAIMED else "does not hold", numbers)


def _value(result: Result, column: str, layers: int, kernel: str) -> float:
    """What was counted with checkpointing; it is the same for all seeds."""
    return result.values(column, layers=layers, kernel=kernel, checkpoint=True, seed=0)[0]


def _time_ratio(result: Result, kernel: str) -> Interval:
    shallowest: Row = {"layers": _layers(result)[0], "kernel": kernel}
    with_it, without = (result.values("seconds", **shallowest, checkpoint=c) for c in (True, False))
    return interval(with_it[seed] / without[seed] for seed in sorted(with_it.keys() & without.keys()))


def _layers(result: Result) -> list[int]:
    return sorted({int(row["layers"] or 0) for row in result.rows})
