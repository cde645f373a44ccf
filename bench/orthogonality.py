"""heads kept orthogonal, by a term and by a constraint: what it does to their diversity and to quality.

    MANYHEADS_DATA=DIR python -m bench orthogonality --out bench/results

DIR holds language/tinyshakespeare.txt and translation/{train,val,test}.{en,de}. Eighteen runs: two tasks,
three ways (nothing, ``--diversity orthogonality=0.1``, ``--orthogonal query,key``), three seeds; about 60
minutes of two cores in all. What was measured is kept in results/orthogonality.json, runs in
out/orthogonality: a run that was stopped goes on where it was. Delete both to begin anew. With --quick, tiny
models on embedded data, in a folder that is thrown away: to try, not to quote.
"""

import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import manyheads as mh
from bench.harness import say, table
from bench.record import Record
from bench.runs import run as run_task
from manyheads.common.intervals import interval
from manyheads.data.batches import bucketed
from manyheads.data.examples import spread
from manyheads.tasks.language import Language
from manyheads.tasks.translation import Translation
from manyheads.training.evaluation import evaluate
from manyheads.training.task import Task

RECORD = Path(__file__).parent / "results" / "orthogonality.json"
OUT = Path("out/orthogonality")
SEEDS = (0, 1, 2)
WAYS: dict[str, dict[str, str]] = {
    "none": {},
    "term": {"diversity": "orthogonality=0.1"},
    "constraint": {"orthogonal": "query,key"},
}
HELD_OUT = 64  # examples on which heads are compared
# What is measured of every run, and what more of it means.
MEASURES = {
    "js": "Jensen-Shannon distance of attention",
    "cka": "CKA of outputs",
    "query_angle": "query angle, degrees",
    "key_angle": "key angle, degrees",
    "quality": "quality",
}
QUALITY = {"language": "perplexity, held out (lower is better)", "translation": "BLEU, test"}
TASKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "language": (
        {"context": 128, "d_model": 128, "heads": 8, "layers": 4},
        {"steps": 1000, "batch_tokens": 2048, "learning_rate": 2e-3, "warmup": 100},
    ),
    "translation": (
        {
            "d_model": 128, "heads": 8, "layers": 3, "decoder_layers": 3, "d_hidden": 256, "dropout": 0.1,
            "vocabulary": 5000,
        },
        {"steps": 1200, "batch_tokens": 2400, "learning_rate": 3e-3, "warmup": 300, "decay": "inverse"},
    ),
}  # fmt: skip
SMALL = {"d_model": 16, "heads": 4, "layers": 1}
FEW = {"steps": 4, "batch_tokens": 256}


def run(quick: bool) -> str:
    """The table of all runs, and what it says."""
    if not quick and not os.environ.get("MANYHEADS_DATA"):
        raise SystemExit("MANYHEADS_DATA: not set; expected the folder with language/ and translation/")
    data = None if quick else Path(os.environ["MANYHEADS_DATA"])
    with tempfile.TemporaryDirectory() as folder:
        record = Record(Path(folder) / "orthogonality.json" if quick else RECORD)
        out = Path(folder) if quick else OUT
        seeds = SEEDS[:2] if quick else SEEDS
        for name in TASKS:
            for seed in seeds:
                for way in WAYS:
                    record.once(f"{name}, {way}, seed {seed}", lambda: _measured(name, way, seed, data, out))  # noqa: B023
        comparisons = len(TASKS) * len(MEASURES) * (len(WAYS) - 1)
        note = (
            f"Means over {len(seeds)} seeds with 95% intervals (Student's t), differences seed by seed. Of "
            f"{comparisons} differences, one in twenty would seem to be there by chance."
        )
        return "\n\n".join([*(report(name, record.found, seeds) for name in TASKS), note])


def _measured(name: str, way: str, seed: int, data: Path | None, out: Path) -> dict[str, float]:
    """Train one model, and compare its heads."""
    sizes, options = TASKS[name]
    if data is None:
        sizes, options = {key: SMALL.get(key, value) for key, value in sizes.items()}, options | FEW
    task: Task = Language(**sizes) if name == "language" else Translation(**sizes)
    source = None if data is None else data / name / ("tinyshakespeare.txt" if name == "language" else "")
    often = max(1, options["steps"] // 2)
    result, cost = run_task(
        task,
        source,
        out / f"{name}-{way}-{seed}",
        seed=seed,
        evaluate_every=often,
        evaluate_examples=128,
        save_every=100,
        watch_every=0,
        **options,
        **WAYS[way],
    )
    say(f"{name}, {way}, seed {seed}: {result.metrics}; {cost}")
    held_out = task.open(None if source is None else str(source)).valid
    measured = heads_apart(result.model, _batches(task, held_out))
    quality = result.metrics.get("perplexity", result.metrics.get("bleu"))
    if name == "translation" and source is not None:
        quality = evaluate(task, result.model, task.read(str(source)))["bleu"]
    assert quality is not None
    return measured | {"quality": quality, "minutes": cost.minutes}


def _batches(task: Task, examples: Any) -> list[dict[str, torch.Tensor]]:
    chosen = spread(len(examples), HELD_OUT)
    places = bucketed([examples.sizes[i] for i in chosen], 2000)
    return [task.inputs(task.collate(examples.take([chosen[i] for i in batch]))) for batch in places]


def heads_apart(model: torch.nn.Module, batches: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, float]:
    """The means over pairs of heads of one site of what `mh.diversity` measures."""
    compared = mh.diversity(model, batches, measures=["attention", "outputs", "subspaces"])
    sites = compared["site"]
    pairs = torch.tensor([[a == b for b in sites] for a in sites]).fill_diagonal_(False)
    return {name: compared.matrices[name][pairs].nanmean().item() for name in MEASURES if name != "quality"}


def _mean_and_half(values: Sequence[float]) -> tuple[float, float]:
    over_seeds = interval(values)
    return over_seeds.mean, over_seeds.half


def report(name: str, measured: Mapping[str, Mapping[str, float]], seeds: Sequence[int]) -> str:
    """The table of a task: means with intervals, differences to none seed by seed, and a verdict in words."""
    values = {
        way: {key: [measured[f"{name}, {way}, seed {seed}"][key] for seed in seeds] for key in MEASURES}
        for way in WAYS
    }
    rows = [
        [way, *(_plus_minus(*_mean_and_half(values[way][key])) for key in MEASURES),
         f"{statistics.mean(measured[f'{name}, {way}, seed {seed}']['minutes'] for seed in seeds):.1f}"]
        for way in WAYS
    ]  # fmt: skip
    sentences = []
    for way in WAYS:
        if way == "none":
            continue
        differences = {}
        for key in MEASURES:
            pairs = zip(values[way][key], values["none"][key], strict=True)
            differences[key] = _mean_and_half([one - other for one, other in pairs])
        rows.append([f"{way} - none", *(_plus_minus(*differences[key]) for key in MEASURES), ""])
        sentences.append(verdict(name, way, differences))
    header = [name, *(QUALITY[name] if key == "quality" else label for key, label in MEASURES.items())]
    return f"{table([*header, 'minutes of two cores'], rows)}\n\n{' '.join(sentences)}"


def verdict(name: str, way: str, differences: Mapping[str, tuple[float, float]]) -> str:
    """What differs, and what cannot be distinguished.

    >>> verdict("language", "term", {"quality": (0.3, 0.5)})
    'language, term against none: nothing differs. Not distinguishable with these seeds: perplexity (+0.3 ...
    >>> verdict("language", "term", {"js": (0.1, 0.02)})
    'language, term against none: Jensen-Shannon distance of attention +0.1 ± 0.02.'
    """
    labels = MEASURES | {"quality": QUALITY[name].split(",")[0]}
    apart = [key for key, (mean, half) in differences.items() if abs(mean) > half]
    same = [key for key in differences if key not in apart]
    changed = ", ".join(f"{labels[key]} {_signed(*differences[key])}" for key in apart) or "nothing differs"
    rest = ", ".join(f"{labels[key]} ({_signed(*differences[key])})" for key in same)
    others = f" Not distinguishable with these seeds: {rest}." if rest else ""
    return f"{name}, {way} against none: {changed}.{others}"


def _plus_minus(mean: float, half: float) -> str:
    return f"{mean:.3g} ± {half:.2g}"


def _signed(mean: float, half: float) -> str:
    return f"{mean:+.3g} ± {half:.2g}"
