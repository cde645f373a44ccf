"""the longest sequence that can be trained on: a 4-layer, d_model 256, 8-head encoder.

One training step (forward, backward, AdamW) runs in a fresh process at several lengths, and
bytes = constant + a * length + b * length^2 is fitted to the peaks and solved for the length that fits a
budget. The prediction for 2 GiB is then run for real, and for the larger budgets fitted again with what that
run took: it is several times longer than the others, so it says more about length. Budgets are for the whole
process; what the interpreter and its imports take is given beside them.

Memory does not depend on who else uses the machine: this part needs no quiet, only time. What was measured is
kept in results/longest.json, and not measured again: delete the file to begin anew. A prediction within 3% of
a length on record is not run again, either: the longest run takes a quarter of an hour.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
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
    "fused, checkpointed": LONG,
}
BEST = "fused, checkpointed"
RECORD = Path(__file__).parent / "results" / "longest.json"


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
    points: dict[str, list[tuple[int, float]]] = {}
    for variant, lengths in VARIANTS.items():
        points[variant] = [(n, weigh(variant, n)["highest"]) for n in (lengths[:3] if quick else lengths)]
    measured = [[name, n, f"{size / MIB:.0f}"] for name, found in points.items() for n, size in found]
    predicted = {
        name: fit(*zip(*found, strict=True)).longest(BUDGETS[0] * GIB) for name, found in points.items()
    }
    confirmed = ""
    if not quick:
        predicted = {name: on_record(name, length) for name, length in predicted.items()}
        runs = {name: weigh(name, length) for name, length in predicted.items()}
        confirmed = table(
            [f"run at its {BUDGETS[0]} GiB length", "tokens", "peak, MiB", "off by", "seconds"],
            [
                [
                    name,
                    predicted[name],
                    f"{found['highest'] / MIB:.0f}",
                    f"{found['highest'] / (BUDGETS[0] * GIB) - 1:+.1%}",
                    f"{found['seconds']:.1f}",
                ]
                for name, found in runs.items()
            ],
        )
        for name, found in runs.items():
            points[name].append((predicted[name], found["highest"]))
    fits = {name: fit(*zip(*found, strict=True)) for name, found in points.items()}
    imports = weigh(BEST, VARIANTS[BEST][0])["before"]
    longest = {
        name: [predicted[name], *(found.longest(budget * GIB) for budget in BUDGETS[1:])]
        for name, found in fits.items()
    }
    rows = [
        [
            name,
            f"{found.constant / MIB:.0f}",
            f"{found.per_token:.0f}",
            f"{found.per_pair:.3g}",
            *longest[name],
        ]
        for name, found in fits.items()
    ]
    goals = zip(BUDGETS[:2], (25, 70), strict=True)
    return "\n\n".join(
        [
            table(["measured", "length", "peak of the process, MiB"], measured),
            confirmed,
            table(
                ["", "constant, MiB", "bytes per token", "per token^2", *(f"{size} GiB" for size in BUDGETS)],
                rows,
            ),
            "Tokens that fit into a budget for the whole process, of which the interpreter and its imports "
            f"are {imports / MIB:.0f} MiB. {BUDGETS[0]} GiB is what was predicted from the lengths above and "
            "then run; the larger budgets are by the fit through all runs.",
            targets(
                *(
                    (
                        f"{BEST} over textbook, {budget} GiB",
                        longest[BEST][n] / longest["textbook"][n],
                        ">=",
                        goal,
                    )
                    for n, (budget, goal) in enumerate(goals)
                )
            ),
        ]
    )


def on_record(variant: str, length: int) -> int:
    """The length on record that is nearest to this one, if it is within 3%; else this one."""
    lengths = [int(key.rsplit(" ", 1)[1]) for key in _record() if key.rsplit(" at ", 1)[0] == variant]
    nearest = min(lengths, key=lambda other: abs(other - length), default=length)
    return nearest if abs(nearest - length) <= 0.03 * length else length


def _record() -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return found


def weigh(variant: str, length: int) -> dict[str, float]:
    """Bytes before and at the peak of one step, and its seconds; from the record if it is there."""
    record = _record()
    key = f"{variant} at {length}"
    if key not in record:
        say(f"running {key}")
        record[key] = peak("longest:step", ALLOCATOR, variant=variant, length=length)._asdict()
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    say(f"{key}: {record[key]['highest'] / MIB:.0f} MiB, {record[key]['seconds']:.1f} s")
    return record[key]
