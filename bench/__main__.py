"""`python -m bench [PART ...] [--quick] [--out DIR]`: run the parts named, or all, and print their tables."""

import argparse
import importlib
from pathlib import Path

from bench import harness

PARTS = ("plain", "dropout", "widths", "window", "padded", "decode", "statistics", "longest")
ALSO = (
    "coverage",
    "coverage_cut",
    "coverage_grow",
    "coverage_opaque",
    "cache",
    "export",
    "importance",
    "roles",
    "scale",
    "ring",
    "watch",
    "prune",
    "merge",
    "orthogonality",
    "dynamic",
    "live",
    "report",
    "verbs",
    "probe",
    "health",
    "train_step",
    "train_step_compiled",
    "train_run",
    "generation",
)  # only when named: they take long; `python -m bench.learn` has a command of its own


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Measure manyheads against its peers."
    )
    parser.add_argument(
        "part",
        nargs="*",
        metavar="PART",
        help=f"one or more of {', '.join(PARTS)} (default all) or {', '.join(ALSO)}",
    )
    parser.add_argument("--quick", action="store_true", help="few sizes and repeats: to try, not to quote")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="also write DIR/PART.md, for example bench/results"
    )
    options = parser.parse_args()
    unknown = [part for part in options.part if part not in PARTS + ALSO]
    if unknown:
        parser.error(f"no part {', '.join(unknown)}: expected {', '.join(PARTS + ALSO)}")
    command = " ".join(["python -m bench", *options.part, *(["--quick"] if options.quick else [])])
    machine = harness.machine(command)
    print(machine, flush=True)
    for name in options.part or PARTS:
        harness.say(f"[bold]{name}[/bold]")
        part = importlib.import_module(f"bench.{name}")
        title = (part.__doc__ or name).strip().splitlines()[0]
        report = f"## {name}: {title}\n\n{part.run(options.quick)}\n"
        print(f"\n{report}", flush=True)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            path = options.out / f"{name}.md"
            path.write_text(f"{report}\n{machine}\n")
            harness.say(f"written to {path}")


if __name__ == "__main__":
    main()
