"""The whole suite under hard conditions: `make test-hard`, or a part of it by the options.

Each run has another instruction set, another number of threads, another random order, and two processes
beside it that keep cores busy. A seed that failed is printed: `pytest --shuffle SEED` has the same order.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

BUSY = 2


@contextmanager
def load() -> Iterator[None]:
    """Processes that do nothing but keep cores busy; they end with this one, whatever ends it."""
    spin = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"
    busy = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(BUSY)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def run(capability: str, threads: int, workers: str) -> tuple[str, bool]:
    """Run the suite once: what it was run with and how it ended, and whether it passed."""
    seed = random.randrange(2**31)
    setting = {"ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": str(threads)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        workers,
        "--shuffle",
        str(seed),
        "-q",
        "--no-header",
        "-rf",
    ]
    words = " ".join(f"{name}={value}" for name, value in setting.items())
    print(f"{words} --shuffle {seed}", flush=True)
    with load():
        ended = subprocess.run(command, env=os.environ | setting, stdout=subprocess.PIPE, text=True)
    lines = ended.stdout.splitlines()
    if ended.returncode:
        print(ended.stdout, flush=True)
    return f"{words} --shuffle {seed}: {lines[-1] if lines else 'no output'}", ended.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", nargs="*", default=["default", "avx2"])
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2, 4])
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--workers", default="auto", help="as for pytest -n")
    chosen = parser.parse_args()
    settings = itertools.product(range(chosen.times), chosen.capability, chosen.threads)
    ended = [run(capability, threads, chosen.workers) for _, capability, threads in settings]
    print(*(line for line, _ in ended), sep="\n")
    sys.exit(not all(passed for _, passed in ended))


if __name__ == "__main__":
    main()
