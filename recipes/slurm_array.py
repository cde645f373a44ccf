"""Measure a text in parts as a Slurm array, and merge the parts: needs `pip install submitit`.

    python recipes/slurm_array.py --shards 20 --out out/parts -- inspect MODEL --text corpus.txt

submits 20 jobs, each of which runs `manyheads inspect MODEL --text corpus.txt --shard i/20 --out out/parts`,
waits for them, starts those again that failed, and runs `manyheads merge out/parts --out out/parts/merged`.
`--cluster local` runs the jobs on this machine, to try it; `--cluster debug` runs them in this process.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def shard_command(verb: Sequence[str], number: int, count: int, out: Path) -> list[str]:
    """The command of one part."""
    return [sys.executable, "-m", "manyheads", *verb, "--shard", f"{number}/{count}", "--out", str(out)]


def run(command: Sequence[str]) -> int:
    """Run a command in a job; its exit code."""
    return subprocess.run(command, check=False).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Submit, wait, start again, merge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cluster", default="slurm", choices=["slurm", "local", "debug"])
    parser.add_argument("--partition", help="of the Slurm cluster")
    parser.add_argument("--minutes", type=int, default=60, help="the most that a part may take")
    parser.add_argument("--attempts", type=int, default=3)
    parser.add_argument(
        "verb", nargs="+", help="after --: the verb with its options, without --shard and --out"
    )
    options = parser.parse_args(arguments)

    import submitit

    executor = submitit.AutoExecutor(folder=options.out / "jobs", cluster=options.cluster)
    executor.update_parameters(timeout_min=options.minutes)
    if options.partition:
        executor.update_parameters(slurm_partition=options.partition)
    for _ in range(options.attempts):
        missing = [
            number
            for number in range(1, options.shards + 1)
            if not (options.out / f"shard-{number}-of-{options.shards}.safetensors").exists()
        ]
        if not missing:
            break
        commands = [shard_command(options.verb, number, options.shards, options.out) for number in missing]
        for job in executor.map_array(run, commands):
            job.wait()
    merged = options.out / "merged"
    return run([sys.executable, "-m", "manyheads", "merge", str(options.out), "--out", str(merged)])


if __name__ == "__main__":
    sys.exit(main())
