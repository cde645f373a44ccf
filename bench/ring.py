"""statistics of a long sequence whose keys are spread over two processes.

A ring over gloo, each process with half of the queries and keys, against one process that holds all, and
against the formula in float64 for some queries.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from bench.harness import mebibytes, say, table, targets
from bench.memory import status
from manyheads.nn.key_shards import ring_statistics
from manyheads.nn.statistics import statistics

LENGTH, HEADS, WIDTH, PROCESSES = 65_536, 1, 64, 2
SAMPLED = 97  # every so many queries are held to the formula


def inputs(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys (1, heads, length, width) in float64, the same in every process."""
    generator = torch.Generator().manual_seed(5)
    q, k = torch.randn(2, 1, HEADS, length, WIDTH, generator=generator, dtype=torch.float64)
    return q, k + 1.0


def one_process(rank: int, size: int, length: int, folder: str) -> None:
    """Measure this process's queries, and write them with seconds and peak memory."""
    q, k = inputs(length)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
        q, k = (x.chunk(size, dim=2)[rank].clone() for x in (q, k))
    before, started = time.process_time(), time.perf_counter()
    measure = ring_statistics if size > 1 else statistics
    seen = measure(q, k, causal=True)
    wall, spent = time.perf_counter() - started, time.process_time() - before
    save_file({name: x.contiguous() for name, x in seen.items()}, f"{folder}/{size}-{rank}.safetensors")
    Path(f"{folder}/{size}-{rank}.json").write_text(json.dumps([spent, wall, status("VmHWM")]))
    if size > 1:
        dist.destroy_process_group()


def measured(size: int, length: int, folder: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The statistics of all queries from this many processes; the most time and memory that one needed."""
    say(f"{size} processes, {length} tokens")
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-m", "bench.ring"]
    runs = [
        subprocess.Popen([*command, str(rank), str(size), str(length), folder], cwd=root)
        for rank in range(size)
    ]
    codes = [run.wait() for run in runs]
    if any(codes):
        raise RuntimeError(f"ring of {size}: a process failed")
    parts = [load_file(f"{folder}/{size}-{rank}.safetensors") for rank in range(size)]
    costs = [json.loads(Path(f"{folder}/{size}-{rank}.json").read_text()) for rank in range(size)]
    joined = {name: torch.cat([part[name] for part in parts], dim=2) for name in parts[0]}
    return joined, [max(values) for values in zip(*costs, strict=True)]


def formula(length: int, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """The core statistics of a few queries from their weights."""
    q, k = inputs(length)
    parts = []
    for i in rows.tolist():
        s = (q[:, :, i : i + 1] @ k.transpose(-1, -2) * WIDTH**-0.5).squeeze(2)
        s[..., i + 1 :] = -torch.inf
        p = s.softmax(-1)
        parts.append(
            {
                "logsumexp": s.logsumexp(-1),
                "entropy": -torch.xlogy(p, p).sum(-1),
                "first": p[..., 0],
                "self": p[..., i],
            }
        )
    return {name: torch.stack([part[name] for part in parts], dim=-1) for name in parts[0]}


def off(x: torch.Tensor, y: torch.Tensor) -> float:
    """The largest difference, relative to numbers above one."""
    return ((x.double() - y.double()).abs() / (1 + y.double().abs())).max().item()


def run(quick: bool) -> str:
    length = 4096 if quick else LENGTH
    chosen = torch.arange(0, length, length // SAMPLED)
    expected = formula(length, chosen)
    with tempfile.TemporaryDirectory() as folder:
        whole, alone = measured(1, length, folder)
        ring, shared = measured(PROCESSES, length, folder)
    costs = [
        [label, f"{spent:.1f}", f"{wall:.1f}", mebibytes(peak)]
        for label, (spent, wall, peak) in (("one process", alone), (f"each of {PROCESSES}", shared))
    ]
    apart = {name: off(ring[name], whole[name]) for name in ring}
    exact = {name: off(ring[name][..., chosen], value) for name, value in expected.items()}
    rows = [[n, f"{apart[n]:.1e}", f"{exact[n]:.1e}" if n in exact else ""] for n in sorted(apart)]
    worst = max(*apart.values(), *exact.values())
    return "\n\n".join(
        [
            f"{length} tokens, {HEADS} head of {WIDTH}, causal, float64. Largest differences, relative to "
            f"numbers above one; the formula for every {length // SAMPLED}th query.",
            table(["statistic", "ring and whole", "ring and formula"], rows),
            table(["", "processor seconds", "seconds", "peak of a process, MiB"], costs),
            targets(("largest difference", worst, "<=", 1e-6)),
        ]
    )


if __name__ == "__main__":
    one_process(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
