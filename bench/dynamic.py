"""heads cut while training, against fixed numbers of heads, on Multi30k.

    MANYHEADS_DATA=DIR python -m bench dynamic --out bench/results

DIR/translation holds train, val and test of both languages. Each seed trains 8 fixed heads and `--dynamic`
side by side, in turns of a minute, so that whatever else the machine does hits both alike, and then the other
fixed numbers. MANYHEADS_SEEDS says how many seeds (3), MANYHEADS_STEPS how many updates (1500),
MANYHEADS_FIXED which other numbers (2,4). What was measured is kept in results/dynamic.json and the runs in
out/dynamic: a run that was stopped goes on where it was. Delete both to begin anew.
"""

import json
import os
import statistics
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import harness
from bench.record import Record
from bench.runs import run as train
from manyheads.tasks.translation import Translation
from manyheads.training.evaluation import evaluate

RECORD = Path(__file__).parent / "results" / "dynamic.json"
OUT = Path("out/dynamic")
DATA = Path(os.environ.get("MANYHEADS_DATA", "../shared/data"))
SEEDS = int(os.environ.get("MANYHEADS_SEEDS", "3"))
STEPS = int(os.environ.get("MANYHEADS_STEPS", "1500"))
FIXED = [int(number) for number in os.environ.get("MANYHEADS_FIXED", "2,4").split(",")]
HEADS, FINAL = 8, 0.34  # heads at the start, and the share of them at the end
TURN = 1.0  # minutes of two cores, then the other one is next
BEHIND, FEWER, FASTER = 0.3, 0.4, 1.15  # BLEU, share of head-steps, times
BEAMS = 4


def run(quick: bool) -> str:
    """The whole part; quick: a few steps of one seed, to see that it works."""
    steps, seeds = (40, 1) if quick else (STEPS, SEEDS)
    out = OUT / f"quick-{steps}" if quick else OUT / str(steps)
    record = Record(out / "dynamic.json" if quick else RECORD)
    fixed = [] if quick else FIXED
    for seed in range(seeds):
        names = [f"{HEADS} heads, seed {seed}", f"dynamic, seed {seed}"]
        if not all(f"{steps} steps, {name}" in record.found for name in names):
            for name, figures in _side_by_side(out, steps, seed, names):
                record.note(f"{steps} steps, {name}", figures)
        for heads in fixed:
            name = f"{steps} steps, {heads} heads, seed {seed}"
            record.once(name, lambda heads=heads, seed=seed: _alone(out, steps, seed, heads))
    return report(record, steps, seeds, [*fixed, HEADS])


def report(record: Record, steps: int, seeds: int, fixed: list[int]) -> str:
    """A table with a row for every way to train, and the verdicts."""

    def of(name: str, figure: str) -> list[float]:
        return [record.found[f"{steps} steps, {name}, seed {seed}"][figure] for seed in range(seeds)]

    rows = []
    names = [*(f"{heads} heads" for heads in fixed), "dynamic"]
    for name in names:
        bleu = of(name, "bleu")
        spread = f" +- {statistics.stdev(bleu) / len(bleu) ** 0.5:.2f}" if len(bleu) > 1 else ""
        rows.append(
            [
                name,
                f"{statistics.mean(bleu):.2f}{spread}", f"{statistics.mean(of(name, 'head_steps')):,.0f}",
                f"{statistics.mean(of(name, 'processor')):.0f}", f"{statistics.mean(of(name, 'wall')):.0f}",
                f"{statistics.mean(of(name, 'heads')):.0f}",
            ]
        )  # fmt: skip
    header = ["", "BLEU, test", "head-steps", "processor s", "wall s", "heads at the end"]
    best = max(statistics.mean(of(name, "bleu")) for name in names[:-1])
    whole = f"{HEADS} heads"
    fewer = [1 - a / b for a, b in zip(of("dynamic", "head_steps"), of(whole, "head_steps"), strict=True)]
    faster = [b / a for a, b in zip(of("dynamic", "processor"), of(whole, "processor"), strict=True)]
    passed = [b / a for a, b in zip(of("dynamic", "wall"), of(whole, "wall"), strict=True)]
    goals = harness.targets(
        ("BLEU behind the best fixed number", best - statistics.mean(of("dynamic", "bleu")), "<=", BEHIND),
        ("share of head-steps saved", statistics.mean(fewer), ">=", FEWER),
        ("times as fast, processor time", harness.geometric_mean(faster), ">=", FASTER),
        ("times as fast, wall", harness.geometric_mean(passed), ">=", FASTER),
    )
    about = f"{steps:,} steps, {seeds} seeds, {BEAMS} beams, {HEADS} heads of which {FINAL:.0%} remain."
    return f"{harness.table(header, rows)}\n\n{goals}\n\n{about}"


def _task(heads: int) -> Translation:
    return Translation(
        d_model=128, heads=heads, layers=3, decoder_layers=3, d_hidden=256, dropout=0.1, vocabulary=4000
    )


def _options(steps: int, seed: int, dynamic: bool) -> dict[str, Any]:
    return {
        "steps": steps, "batch_tokens": 2400, "learning_rate": 3e-3, "warmup": min(300, steps // 5),
        "decay": "inverse", "ema": 0.995, "seed": seed, "evaluate_every": max(steps // 6, 1),
        "evaluate_examples": 200, "save_every": 100, "watch_every": 0, "dynamic": dynamic,
        "final_heads": FINAL,
    }  # fmt: skip


def _side_by_side(
    out: Path, steps: int, seed: int, names: list[str]
) -> Iterator[tuple[str, dict[str, float]]]:
    """Train both in turns, and measure each when it is done."""
    todo = {name: name.startswith("dynamic") for name in names}
    minutes = TURN
    while todo:
        for name, dynamic in list(todo.items()):
            task, folder = _task(HEADS), out / name.replace(", ", "-").replace(" ", "-")
            result, cost = train(
                task, DATA / "translation", folder, minutes, **_options(steps, seed, dynamic)
            )
            if result.ended != "interrupted":
                del todo[name]
                yield name, _figures(task, result, cost, folder)
        minutes += TURN


def _alone(out: Path, steps: int, seed: int, heads: int) -> dict[str, float]:
    task, folder = _task(heads), out / f"{heads}-heads-seed-{seed}"
    result, cost = train(task, DATA / "translation", folder, **_options(steps, seed, False))
    return _figures(task, result, cost, folder)


def _figures(task: Translation, result: Any, cost: Any, folder: Path) -> dict[str, float]:
    """BLEU on the test sentences, what it cost, and how many heads it had."""
    task.beams = BEAMS
    bleu = evaluate(task, result.model, task.read(str(DATA / "translation")))["bleu"]
    layers = task.layers + 2 * (task.decoder_layers or task.layers)  # the decoder looks twice
    heads = task.heads * layers
    if result.dynamic is not None:
        result.dynamic.draw(folder / "heads.png")
        heads = sum(result.dynamic.history[-1][1].values())
        harness.say(json.dumps([str(act) for act in result.dynamic.acts], indent=1))
    head_steps = result.dynamic.head_steps if result.dynamic else heads * result.step
    return {"bleu": bleu, "head_steps": head_steps, "heads": heads, **asdict(cost)}
