"""What speech reaches on the Free Spoken Digit Dataset: parts of bench.learn.

3,000 recordings of six speakers, fifty takes of each digit by each. The takes that are held out are the first
five of each, as the data set's own test set has them. The weights are those of the last step: nothing is
chosen by what is measured.
"""

from pathlib import Path
from typing import Any

from bench import harness
from bench.cost import Cost
from bench.runs import run
from manyheads.tasks.speech.task import Speech
from manyheads.training.loop import Result

RIGHT = 0.97
SPEAKERS = ("george", "jackson", "lucas", "nicolas", "theo", "yweweler")
STEPS, STRING_STEPS = 1200, 1500
SIZES: dict[str, Any] = {"d_model": 96, "heads": 4, "layers": 3}


def spoken(data: Path, out: Path) -> str:
    """Spoken digits, takes held out: which of ten a recording is."""
    result, cost = _learn(Speech(**SIZES), data, out / "spoken", STEPS)
    right = result.metrics["accuracy"]
    return f"{harness.targets(('accuracy, test (300 takes)', right, '>=', RIGHT))}\n\n{cost}."


def speakers(data: Path, out: Path) -> str:
    """Spoken digits by a speaker who was never heard, for each of the six."""
    rows, cost = [], Cost()
    for name in SPEAKERS:
        task = Speech(held_out=name, **(SIZES | {"speed": 0.2, "masks": 0.25}))
        result, one = _learn(task, data, out / f"speaker-{name}", STEPS)
        rows.append([name, f"{result.metrics['accuracy']:.3f}"])
        cost = Cost(cost.wall + one.wall, cost.processor + one.processor)
        harness.say(f"{name}: {rows[-1][1]}")
    mean = sum(float(row[1]) for row in rows) / len(rows)
    rows.append(["mean", f"{mean:.3f}"])
    return f"{harness.table(['held out', 'accuracy of 500 takes'], rows)}\n\nAll together {cost}."


def strings(data: Path, out: Path) -> str:
    """Strings of 3 to 7 digits joined from held-out takes of one speaker: by ctc, and by a decoder."""
    rows, cost = [], Cost()
    for kind in ("ctc", "decoder"):
        result, one = _learn(Speech(kind=kind, **SIZES), data, out / f"strings-{kind}", STRING_STEPS)
        errors, exact = result.metrics["word_error"], result.metrics["exact"]
        rows.append([kind, f"{errors:.2%}", f"{exact:.1%}", f"{one.minutes:.1f}"])
        cost = Cost(cost.wall + one.wall, cost.processor + one.processor)
        harness.say(f"{kind}: {rows[-1]}")
    header = ["read by", "word error rate", "strings all right", "minutes of two cores"]
    return f"{harness.table(header, rows)}\n\n300 strings, 1,500 words. All together {cost}."


def _learn(task: Speech, data: Path, out: Path, steps: int) -> tuple[Result, Cost]:
    return run(
        task,
        data / "speech" / "spoken_digits.zip",
        out,
        steps=steps,
        batch_tokens=1600,
        learning_rate=3e-3,
        ema=0.995,
        evaluate_every=steps,
        save_every=250,
        watch_every=0,
    )
