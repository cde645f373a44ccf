"""training with dropout 0.1 on the attention weights, length 2048.

On the CPU torch's scaled_dot_product_attention (SDPA) materialises all weights as soon as dropout is on.
"""

from torch.nn import functional as F

from bench import peers
from bench.harness import mebibytes, milliseconds, race, say, table, targets
from bench.inputs import MODES, heads_of, timed
from bench.memory import peak
from manyheads.nn.attention import attention

BATCH, HEADS, LENGTH, WIDTH, DROPOUT = 2, 8, 2048, 64, 0.1
FUNCTIONS = {
    "manyheads": lambda q, k, v: attention(q, k, v, dropout=DROPOUT),
    "SDPA": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=DROPOUT),
    "SDPA without dropout": F.scaled_dot_product_attention,
}
MODULES = ("manyheads", "textbook", "torch", "x-transformers, flash")


def function(name: str):
    return timed(MODES[1], FUNCTIONS[name], [heads_of(BATCH, HEADS, LENGTH, WIDTH) for _ in range(3)])


def module(name: str):
    return peers.step(name, MODES[1], HEADS * WIDTH, HEADS, BATCH, LENGTH, DROPOUT)


def run(quick: bool) -> str:
    rows, figures = [], {}
    for level, make, names in (("function", function, list(FUNCTIONS)), ("module", module, MODULES)):
        times = race({name: make(name) for name in names}, quick)
        for name in names:
            extra = peak(f"dropout:{level}", name=name).extra
            figures[level, name] = times[name], extra
            rows.append([f"{level}: {name}", milliseconds(times[name]), mebibytes(extra)])
            say(f"{level} {name}: {milliseconds(times[name])} ms, {mebibytes(extra)} MiB")
    (ours, our_memory), (theirs, their_memory) = figures["function", "manyheads"], figures["function", "SDPA"]
    module_ratio = min(figures["module", name][0] for name in MODULES[1:]) / figures["module", "manyheads"][0]
    return "\n\n".join(
        [
            table(["forward+backward", "ms", "peak memory, MiB"], rows),
            f"Batch {BATCH}, {HEADS} heads of width {WIDTH}, length {LENGTH}. "
            "Memory beyond inputs and parameters.",
            targets(
                ("function: SDPA's time over ours", theirs / ours, ">=", 2.0),
                ("function: our memory over SDPA's", our_memory / their_memory, "<=", 0.1),
                ("module: fastest peer's time over ours", module_ratio, ">=", 2.0),
            ),
        ]
    )
