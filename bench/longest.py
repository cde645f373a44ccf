"""the longest sequence that can be trained on: a 4-layer, d_model 256, 8-head encoder.

One training step (forward, backward, AdamW) runs in a fresh process at several lengths, and
bytes = constant + a * length + b * length^2 is fitted to the peaks and solved for the length that fits a
budget. The predictions for 2 GiB are then run for real. Budgets are for the whole process; what the
interpreter and its imports take is given beside them.

Memory does not depend on who else uses the machine: this part needs no quiet, only time.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bench.harness import GIB, MIB, say, table, targets
from bench.memory import peak
from bench.peers import Textbook
from manyheads.nn.transformers import Encoder

D_MODEL, HEADS, LAYERS, CHUNK = 256, 8, 4, 512
BUDGETS = (2, 24, 80)  # GiB
SHORT = (512, 1024, 1536, 2048, 3072)  # for those that hold length^2 tensors
LONG = (4096, 8192, 12288, 16384)
LONGER = (
    8192,
    16384,
    32768,
    65536,
)  # minutes each; from shorter ones the fit sees squares that are not there
# glibc keeps freed pieces up to 32 MiB for itself (mallopt(3), M_MMAP_THRESHOLD), up to half of the peak at
# these lengths; long sequences have no tensors that small. Lowering its limit shows at short lengths what
# holds at long ones.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**18)}
VARIANTS = {
    "textbook": SHORT,
    "textbook, checkpointed": SHORT,
    "chunked": LONG,
    "fused": LONG,
    "fused, checkpointed": LONGER,
}
BEST = "fused, checkpointed"


class InBlock(Textbook):
    """The textbook's attention under the call that our blocks make."""

    def forward(self, x: Tensor, mask: None = None, causal: bool = False, cache: None = None) -> Tensor:
        return super().forward(x)


def step(variant: str, length: int):
    """One training step; the model and its input are made inside, so that they count."""

    def train(length: int) -> None:
        options = {"checkpoint": "checkpointed" in variant, "chunk": CHUNK if variant == "chunked" else None}
        encoder = Encoder(D_MODEL, HEADS, LAYERS, **options)
        if variant.startswith("textbook"):
            for block in encoder.blocks:
                block.attention = InBlock(D_MODEL, HEADS)
        optimiser = torch.optim.AdamW(encoder.parameters())
        x = torch.randn(1, length, D_MODEL)
        encoder(x).square().mean().backward()
        optimiser.step()

    train(8)  # a first step imports another 100 MiB of torch: that is the process's, not the sequence's
    return lambda: train(length)


class Fit(NamedTuple):
    """Bytes = constant + per_token * length + per_pair * length^2."""

    constant: float
    per_token: float
    per_pair: float

    def longest(self, budget: float) -> int:
        """The length at which the bytes reach the budget.

        >>> Fit(0.0, 10.0, 0.0).longest(1000), Fit(0.0, 0.0, 2.0).longest(200)
        (100, 10)
        """
        a, b, c = self.per_pair, self.per_token, self.constant - budget
        if c >= 0:
            return 0
        return int(-c / b) if a == 0 else int((-b + math.sqrt(b * b - 4 * a * c)) / (2 * a))


def fit(lengths: Sequence[int], sizes: Sequence[float]) -> Fit:
    """Least squares over terms that cannot be negative. A square term below 2% of the largest measurement is
    noise and is left out: at millions of tokens it would say anything."""
    x, y = torch.tensor(lengths, dtype=torch.float64), torch.tensor(sizes, dtype=torch.float64)
    unit = x.max()  # powers of numbers up to 1 keep the problem well conditioned
    powers = (x[:, None] / unit) ** torch.arange(3)

    def solve(terms: list[int]) -> tuple[float, Fit]:
        found = torch.zeros(3, dtype=torch.float64)
        found[terms] = torch.linalg.lstsq(powers[:, terms], y[:, None]).solution.flatten()
        fits = found.min() >= 0 and (2 not in terms or found[2] > 0.02 * y.max())
        error = (powers @ found - y).square().sum().item() if fits else math.inf
        return error, Fit(*(found / unit ** torch.arange(3)).tolist())

    return min(solve(terms) for terms in ([0, 1, 2], [0, 2], [0, 1]))[1]


def run(quick: bool) -> str:
    fits, imports, measured = {}, 0, []
    for variant, lengths in VARIANTS.items():
        sizes = []
        for length in lengths[:3] if quick else lengths:
            weighed = peak("longest:step", ALLOCATOR, variant=variant, length=length)
            imports = weighed.before
            sizes.append(weighed.highest)
            measured.append([variant, length, f"{weighed.highest / MIB:.0f}", f"{weighed.seconds:.1f}"])
            say(f"{variant} at {length}: {weighed.highest / MIB:.0f} MiB, {weighed.seconds:.1f} s")
        fits[variant] = fit(lengths[: len(sizes)], sizes)
    longest = {name: [found.longest(budget * GIB) for budget in BUDGETS] for name, found in fits.items()}
    alone = {
        name: [found.longest(budget * GIB + imports) for budget in BUDGETS] for name, found in fits.items()
    }
    rows = [
        [
            name,
            f"{found.constant / MIB:.0f}",
            f"{found.per_token:.0f}",
            f"{found.per_pair:.3g}",
            *longest[name],
            *alone[name],
        ]
        for name, found in fits.items()
    ]
    budgets = [f"{budget} GiB" for budget in BUDGETS]
    header = [
        "",
        "constant, MiB",
        "bytes per token",
        "per token^2",
        *budgets,
        *(f"{name}, step alone" for name in budgets),
    ]
    return "\n\n".join(
        [
            table(["measured", "length", "peak of the process, MiB", "seconds"], measured),
            table(header, rows),
            "Tokens that fit. The first three columns of lengths count the whole process, of which the "
            f"interpreter and its imports are {imports / MIB:.0f} MiB; the last three give the budget to the "
            "step alone (model, optimiser, input and activations).",
            targets(
                *(
                    (
                        f"{BEST} over textbook, {budget} GiB{kind}",
                        sizes[BEST][n] / sizes["textbook"][n],
                        ">=",
                        goal,
                    )
                    for kind, sizes in (("", longest), (", step alone", alone))
                    for n, (budget, goal) in enumerate(zip(BUDGETS[:2], (25, 70), strict=True))
                )
            ),
            "" if quick else _confirm({name: lengths[0] for name, lengths in longest.items()}),
        ]
    )


def _confirm(predictions: dict[str, int]) -> str:
    """Run each variant at the length predicted for the smallest budget."""
    rows = []
    for variant, length in predictions.items():
        say(f"confirming {variant} at {length} tokens")
        weighed = peak("longest:step", ALLOCATOR, variant=variant, length=length)
        off = weighed.highest / (BUDGETS[0] * GIB) - 1
        rows.append(
            [variant, length, f"{weighed.highest / MIB:.0f}", f"{off:+.1%}", f"{weighed.seconds:.1f}"]
        )
        say(f"{variant} at {length}: {weighed.highest / MIB:.0f} MiB, {weighed.seconds:.1f} s")
    return table([f"run at its {BUDGETS[0]} GiB length", "tokens", "peak, MiB", "off by", "seconds"], rows)
