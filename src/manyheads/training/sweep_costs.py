"""What a run costs: floating-point operations, parameters, memory, and bytes of keys and values."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from manyheads.common.devices import choose_device
from manyheads.common.preserved_state import seed_generators, untouched
from manyheads.data.examples import Order, spread
from manyheads.models.config import build
from manyheads.nn.blocks import TransformerBlock
from manyheads.nn.multihead import MultiHeadAttention
from manyheads.nn.transformers import Decoder
from manyheads.training.options import Options
from manyheads.training.task import Data, Task

COUNTED = 4  # batches, evenly over an epoch
# The operators behind scaled_dot_product_attention; torch's counter does not count the one of the CPU.
FUSED = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")


def flops_per_step(task: Task, data: Data, options: Options) -> float:
    """Floating-point operations of a training step, forward and backward: the mean of some batches.

    The model runs on real batches under torch's FlopCounterMode: matrix products and convolutions count, two
    operations for each multiplication with its addition. Attention is counted as the fused kernel computes
    it; a causal mask halves nothing, as torch counts it. The same batches are counted for every model.

    Parameters
    ----------
    task: opened, so that it can describe its model.
    data: what it opened.
    options: of training; the batches depend on ``batch_tokens`` and ``accumulate``.
    """
    device = choose_device()
    order = Order(data.train.sizes, options.batch_tokens, seed=0)
    with untouched():
        seed_generators(0)
        model = build(task.describe()).to(device).train()
        for part in model.modules():
            if isinstance(part, MultiHeadAttention) and part.kernel != "reference":
                part.kernel = "fused"  # the tiled kernel is one opaque operator, and computes the same
        steps = spread(order.batches, COUNTED)
        with FlopCounterMode(display=False, custom_mapping=_formulas()) as counter:
            for step in steps:
                for part_of_step in range(options.accumulate):
                    indices = order.batch(step)[part_of_step :: options.accumulate]
                    if indices:
                        batch = send_to_device(task.collate(data.train.take(indices, 0)), device)
                        task.loss(model, batch)[0].backward()
        return float(counter.get_total_flops()) / len(steps)


def _formulas() -> dict[object, Callable[..., int]]:
    """How many operations the fused kernels make, from the shapes of their arguments."""

    def forward(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
        batch, heads, queries, d_key = query
        return 2 * batch * heads * queries * key[2] * (d_key + value[3])  # scores, then values

    def backward(
        gradient: Sequence[int], query: Sequence[int], key: Sequence[int], value: Sequence[int],
        *_: object, **__: object,
    ) -> int:  # fmt: skip
        batch, heads, queries, d_key = query
        # scores again, gradients of queries and keys; gradients of weights and values
        return 2 * batch * heads * queries * key[2] * (3 * d_key + 2 * value[3])

    formulas: dict[object, Callable[..., int]] = {}
    for name in FUSED:
        formulas[getattr(torch.ops.aten, f"_scaled_dot_product_{name}")] = forward
        formulas[getattr(torch.ops.aten, f"_scaled_dot_product_{name}_backward")] = backward
    return formulas


def cache_bytes(model: nn.Module) -> int:
    """Bytes of the keys and values of one token in all layers: what a cache keeps of each token.

    Counted are the layers of self-attention; where the model has a decoder, only those of the decoder.

    >>> cache_bytes(Decoder(12, heads=4, layers=2, kv_heads=2, vocabulary=53))    # 2 x 2 x (3 + 3) x 4 bytes
    96
    """
    decoders: list[nn.Module] = [part for part in model.modules() if isinstance(part, Decoder)]
    blocks = [
        part
        for whole in decoders or [model]
        for part in whole.modules()
        if isinstance(part, TransformerBlock)
    ]
    sites = [block.attention for block in blocks]
    widths = ((site.kv_heads * (site.d_key + site.d_value), site.key.weight.element_size()) for site in sites)
    return sum(width * size for width, size in widths)


@contextmanager
def peak_memory() -> Iterator[Callable[[], int | None]]:
    """A function that says how many bytes were in use at most since the context began; None if unknown.

    On CUDA, what tensors took. Elsewhere, the resident memory of the process, Python and torch included; only
    Linux lets a process begin its peak again.

    >>> with peak_memory() as peak:
    ...     x = torch.ones(2**24)
    >>> peak() is None or peak() > 2**26
    True
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        yield torch.cuda.max_memory_allocated
        return
    resettable = sys.platform.startswith("linux")
    with suppress(AttributeError, OSError):  # memory that was freed goes back to the system first (glibc)
        ctypes.CDLL(None).malloc_trim(0)
    try:
        if resettable:
            Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # forbidden in some containers
        resettable = False
    yield _most_resident if resettable else lambda: None


def _most_resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
