"""self-attention without anything special, against every peer.

About the same number of tokens in each cell (8192), so that short lengths come in large batches. A ratio is
a peer's time over ours: above 1 we are faster. "Alike" holds every peer against ours with the same
parameters (x-transformers has no biases) and takes the smallest; "with biases" is the fastest peer over ours
with biases, whatever the peer leaves out.
"""

from bench.harness import (
    GIB,
    against,
    geometric_mean,
    matmul_peak,
    mebibytes,
    milliseconds,
    race,
    say,
    table,
    targets,
)
from bench.inputs import MODES
from bench.memory import peak
from bench.peers import BARE, CONTESTANTS, MAPS, NOTE, OURS, alike, step

TOKENS = 8192
SIZES = ((512, 8), (768, 12))
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
LIMIT = 10 * GIB
PEERS = [name for name in CONTESTANTS if name not in (OURS, BARE)]


def run(quick: bool) -> str:
    cells: list[list[object]] = []
    ratios: dict[str, float] = {}
    with_biases: dict[str, float] = {}
    for d_model, heads in SIZES[: 1 if quick else None]:
        for length in (128, 512, 2048) if quick else LENGTHS:
            for mode in MODES:
                shape = {"d_model": d_model, "heads": heads, "batch": TOKENS // length, "length": length}
                times = race(
                    {name: step(name, mode, **shape) for name in CONTESTANTS if _fits(name, mode, **shape)},
                    quick,
                )
                cell, peers = f"{d_model}/{heads} {length} {mode}", [name for name in PEERS if name in times]
                ratio, fastest = min((times[name] / times[alike(name)], name) for name in peers)
                ratios[cell], with_biases[cell] = ratio, against(times, OURS, peers)[1]
                share = _operations(mode, d_model, length) / times[OURS] / matmul_peak()
                shown = [milliseconds(times[name]) if name in times else "-" for name in CONTESTANTS]
                both = f"{ratio:.2f}", f"{with_biases[cell]:.2f}"
                cells.append([f"{d_model}/{heads}", length, mode, *shown, fastest, *both, f"{share:.0%}"])
                say(f"{cell}: {' and '.join(both)} of {fastest}, {share:.0%} of peak")
    worst, lowest = (min(found, key=found.__getitem__) for found in (ratios, with_biases))
    return "\n\n".join(
        [
            table(
                ["size", "length", "mode", *CONTESTANTS, "closest peer", "alike", "with biases", "of peak"],
                cells,
            ),
            f"Milliseconds, {TOKENS} tokens per call. {NOTE} A dash: it would take over {LIMIT // GIB} GiB. "
            "Share of peak counts the textbook's operations, the backward pass as twice the forward.",
            targets(
                ("geometric mean, alike", geometric_mean(list(ratios.values())), ">=", 1.0),
                (f"smallest, alike ({worst})", ratios[worst], ">=", 0.9),
                ("geometric mean, with biases", geometric_mean(list(with_biases.values())), ">=", 1.0),
                (f"smallest, with biases ({lowest})", with_biases[lowest], ">=", 0.9),
            ),
            _memory(quick),
        ]
    )


def _fits(name: str, mode: str, d_model: int, heads: int, batch: int, length: int) -> bool:
    maps = MAPS.get(name, (0, 0))[MODES.index(mode)]
    return maps * batch * heads * length**2 * 4 <= LIMIT


def _operations(mode: str, d_model: int, length: int) -> float:
    forward = TOKENS * (4 * 2 * d_model**2 + 4 * length * d_model)
    return forward if mode == "forward" else 3 * forward


def _memory(quick: bool) -> str:
    d_model, heads = SIZES[0]
    rows = []
    for length in (512,) if quick else (512, 2048, 8192):
        for mode in MODES:
            shape = {"d_model": d_model, "heads": heads, "batch": TOKENS // length, "length": length}
            say(f"peak memory, {length} {mode}")
            peaks = [
                mebibytes(peak("peers:step", name=name, mode=mode, **shape).extra)
                if _fits(name, mode, **shape)
                else "-"
                for name in CONTESTANTS
            ]
            rows.append([f"{d_model}/{heads}", length, mode, *peaks])
    return table(["peak memory, MiB", "length", "mode", *CONTESTANTS], rows)
