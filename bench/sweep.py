"""sweep: Multi30k, English to German, with 1 to 16 heads at equal compute, beside the paper's table 3 (A).

    python -m bench.sweep --data DIR [--out DIR] [--results bench/results]

DIR holds translation/{train,val,test}.{en,de}. 15 runs of at most 8 minutes of two cores, two hours in all;
after Ctrl-C, a crash or kill -9 the same command goes on, and a second one beside it shares the work. With
--results it writes sweep.md, sweep.json, sweep.png and sweep.svg there. --quick is to try it: two settings,
two seeds, few steps.

The paper (Vaswani et al. 2017, table 3, rows A) gives BLEU on its development set, newstest2013, for models
of 65 million parameters: their curve and ours are comparable in shape, not in height.
"""

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import manyheads as mh
from bench import harness
from manyheads.common.json_numbers import plain
from manyheads.common.whole_files import write_whole
from manyheads.tasks.translation import Translation

PAPER = {1: 24.9, 4: 25.5, 8: 25.8, 16: 25.8, 32: 25.4}
HEADS, SEEDS, LONGEST = (1, 2, 4, 8, 16), 3, 8.0  # minutes of two cores
STEPS, QUICK_STEPS = 1200, 20
RECIPE: dict[str, Any] = {
    "batch_tokens": 2400, "learning_rate": 3e-3, "warmup": 200, "ema": 0.99, "evaluate_examples": 16,
    "save_every": 100, "watch_every": 0,
}  # fmt: skip


def sweep(data: Path, out: Path, quick: bool = False) -> Any:
    """The sweep, from where it was left. BLEU is that of the last weights on all validation sentences."""
    task = Translation(
        d_model=128, heads=8, layers=3, decoder_layers=3, d_hidden=256, dropout=0.1, vocabulary=5000
    )
    steps = QUICK_STEPS if quick else STEPS
    return mh.sweep(
        task,
        str(data / "translation"),
        out=out,
        heads=HEADS[1:4:2] if quick else HEADS,
        seeds=2 if quick else SEEDS,
        equal="compute",
        steps=steps,
        evaluate_every=steps,
        progress=lambda stage, done, total: harness.say(f"{stage}: {done} of {total}"),
        **RECIPE,
    )


def minutes(report: Mapping[str, Any]) -> float:
    """Minutes of two cores of a whole run; of one that was taken up again, as its last sitting went on."""
    whole = report["steps"] / max(report["steps_timed"], 1)
    return float(report["seconds_processor"]) * whole / 2 / 60


def page(result: Any) -> str:
    """The table beside the paper's, the targets and the answer."""
    rows = []
    for row in result.table:
        heads = row["heads"]
        margin = row["high"] - row["mean"]
        rows.append([
            heads, row["seeds"], f"{row['mean']:.2f} ± {margin:.2f}", PAPER.get(heads, ""),
            "best" if row["worse_by"] == 0 else f"{row['worse_by']:.2f} ± {row['worse_by_margin']:.2f}",
            "yes" if row["apart"] else "no", f"{1000 * row['seconds_per_step_median']:.0f}",
            f"{row['parameters']:,}", row["steps"], f"{row['flops']:.4g}",
        ])  # fmt: skip
    header = ["heads", "seeds", "BLEU, validation", "paper", "behind the best", "shows", "ms a step"]
    header += ["parameters", "steps", "FLOPs"]
    costs = [minutes(outcome.report) for outcome in result.outcomes if outcome.report]
    flops = [row["flops"] for row in result.table]
    goals = harness.targets(
        ("runs", len(costs), ">=", len(result.settings) * len(result.seeds)),
        ("longest run, minutes of two cores", max(costs), "<=", LONGEST),
        ("FLOPs, largest / smallest", max(flops) / min(flops), "<=", 1.01),
    )
    return f"{harness.table(header, rows)}\n\n{goals}\n\n{result.answer}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.sweep", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="the folder with the data")
    parser.add_argument("--out", type=Path, default=Path("out/learn/sweep"), help="where runs are kept")
    parser.add_argument("--results", type=Path, metavar="DIR", help="keep the figures there: bench/results")
    parser.add_argument("--quick", action="store_true", help="few steps: to try, not to quote")
    options = parser.parse_args()
    machine = harness.machine("python -m bench.sweep")
    print(machine, flush=True)
    result = sweep(options.data, options.out, options.quick)
    if result.ended != "finished":
        raise SystemExit(f"{result.left} runs are not done; the same command goes on")
    report = page(result)
    print(report)
    if options.results is not None and not options.quick:
        title = (__doc__ or "").splitlines()[0]
        write_whole(options.results / "sweep.json", json.dumps(plain(result.document()), indent=1) + "\n")
        for kind in ("png", "svg"):
            shutil.copyfile(options.out / f"curve.{kind}", options.results / f"sweep.{kind}")
        picture = "![BLEU by number of heads](sweep.png)"
        write_whole(options.results / "sweep.md", f"## {title}\n\n{report}\n\n{picture}\n\n{machine}\n")
        harness.say(f"written to {options.results / 'sweep.md'}")


if __name__ == "__main__":
    main()
