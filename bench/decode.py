"""one new token against 8192 cached ones, 4 query heads for each key head.

The common way repeats the keys and values for every query head at each step; torch's own is `enable_gqa`.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.harness import mebibytes, milliseconds, race, say, table, targets
from bench.memory import peak
from manyheads.nn.attention import attention
from manyheads.nn.cache import KVCache
from manyheads.nn.multihead import MultiHeadAttention

BATCH, HEADS, KV_HEADS, LENGTH, WIDTH = 4, 32, 8, 8192, 64


def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group = HEADS // KV_HEADS
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(q, k, v)


def gqa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


FUNCTIONS = {"manyheads": attention, "repeated keys": repeated, "enable_gqa": gqa}


def function(name: str):
    torch.manual_seed(0)
    q = torch.randn(BATCH, HEADS, 1, WIDTH)
    k, v = (torch.randn(BATCH, KV_HEADS, LENGTH, WIDTH) for _ in range(2))
    return lambda: FUNCTIONS[name](q, k, v)


def module(name: str):
    """The whole step of our module: projections, one more row in the cache, attention, output."""
    mha = MultiHeadAttention(HEADS * WIDTH, HEADS, kv_heads=KV_HEADS).eval()
    cache = KVCache(LENGTH)
    token = torch.randn(BATCH, 1, HEADS * WIDTH)
    with torch.no_grad():
        mha(torch.randn(BATCH, LENGTH - 1, HEADS * WIDTH)[:, :8], cache=cache)
        rest = torch.randn(BATCH, KV_HEADS, LENGTH - 9, WIDTH)
        cache.append(rest, rest)

    @torch.no_grad()
    def step() -> Tensor:
        cache.truncate(LENGTH - 1)
        return mha(token, cache=cache, causal=True)

    return step


def run(quick: bool) -> str:
    contestants = {name: function(name) for name in FUNCTIONS}
    torch.testing.assert_close(
        contestants["manyheads"](), contestants["repeated keys"](), atol=1e-5, rtol=1e-4
    )
    times = race(contestants | {"manyheads, whole module": module("manyheads")}, quick)
    ours = times["manyheads"]
    rows = []
    for name, time in times.items():
        level = "module" if name not in FUNCTIONS else "function"
        rows.append(
            [
                name,
                milliseconds(time),
                f"{time / ours:.2f}",
                mebibytes(peak(f"decode:{level}", name=name).extra),
            ]
        )
        say(f"{name}: {milliseconds(time)} ms")
    return "\n\n".join(
        [
            table(["one step", "ms", "times ours", "peak memory, MiB"], rows),
            f"Batch {BATCH}, {HEADS} heads on {KV_HEADS} key heads of width {WIDTH}, {LENGTH} tokens cached. "
            "Same answers to 1e-5. Memory beyond the cache.",
            targets(
                ("repeating the keys over ours", times["repeated keys"] / ours, ">=", 10.0),
                ("enable_gqa over ours", times["enable_gqa"] / ours, ">=", 1.0),
            ),
        ]
    )
