"""The whole suite under hard conditions: `make test-hard`, or a part of it by the options.

Each run has another instruction set, another number of threads, another random order, and two processes
beside it that keep cores busy. A seed that failed is printed: `pytest --shuffle SEED` has the same order.
Every run is added to bench/results/test_hard.json, and settings that have passed there often enough are not
run again: some hours of runs can be spread over days. bench/results/test_hard.md is the table of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

RECORD = Path("bench/results/test_hard.json")


class Run(TypedDict):
    """One run of the suite."""

    date: str
    commit: str
    capability: str
    threads: int
    busy: int
    seed: int
    passed: bool
    result: str  # pytest's last line


@contextmanager
def load(processes: int) -> Iterator[None]:
    """Processes that do nothing but keep cores busy; they end with this one, whatever ends it."""
    spin = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"
    busy = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def run(capability: str, threads: int, workers: str, busy: int) -> Run:
    """Run the suite once."""
    seed = random.randrange(2**31)
    setting = {"ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": str(threads)}
    options = ["-n", workers, "--shuffle", str(seed), "-q", "--no-header", "-rf"]
    print(*(f"{name}={value}" for name, value in setting.items()), "--shuffle", seed, flush=True)
    with load(busy):
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", *options],
            env=os.environ | setting,
            stdout=subprocess.PIPE,
            text=True,
        )
    if ended.returncode:
        print(ended.stdout, flush=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout
    return {
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "commit": commit.strip(),
        "capability": capability,
        "threads": threads,
        "busy": busy,
        "seed": seed,
        "passed": ended.returncode == 0,
        "result": (ended.stdout.splitlines() or ["no output"])[-1].strip("= "),
    }


def write(runs: list[Run]) -> None:
    """The record, and its table."""
    RECORD.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    rows = [
        f"| {run['date']} | {run['commit']} | {run['capability']} | {run['threads']} | {run['result']} |"
        for run in runs
    ]
    head = [
        "## test_hard: the whole suite under other instruction sets and threads, in random order, beside "
        "processes that keep cores busy.",
        "",
        "| end, UTC | commit | ATEN_CPU_CAPABILITY | OMP_NUM_THREADS | result |",
        "|---|---|---|---:|---|",
    ]
    RECORD.with_suffix(".md").write_text(
        "\n".join([*head, *rows, "", "`make test-hard`", ""]), encoding="utf-8"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", nargs="*", default=["default", "avx2"])
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2, 4])
    parser.add_argument("--times", type=int, default=3, help="how often each setting has to pass")
    parser.add_argument("--workers", default="auto", help="as for pytest -n")
    parser.add_argument("--busy", type=int, default=2, help="processes that keep cores busy")
    chosen = parser.parse_args()
    runs: list[Run] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else []
    failed = False
    for times, capability, threads in itertools.product(
        range(chosen.times), chosen.capability, chosen.threads
    ):
        setting = capability, threads
        if sum(each["passed"] and (each["capability"], each["threads"]) == setting for each in runs) > times:
            continue
        runs.append(run(capability, threads, chosen.workers, chosen.busy))
        failed |= not runs[-1]["passed"]
        print(runs[-1]["result"], flush=True)
        write(runs)
    sys.exit(failed)


if __name__ == "__main__":
    main()
