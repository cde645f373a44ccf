"""What the picture book reaches on emoji with their names in four languages: a part of bench.learn."""

from pathlib import Path

import torch

from bench import harness
from bench.cost import Cost
from bench.runs import run
from manyheads.data.batches import bucketed
from manyheads.data.examples import Examples
from manyheads.tasks.picturebook.models import Stream, picture_shares
from manyheads.tasks.picturebook.task import Picturebook
from manyheads.training.evaluation import evaluate

STEPS, TOKENS = 3000, 1600
BOOKS = (("cross", "pictures"), ("single", "pictures"), ("cross", "captions"), ("single", "captions"))


def picturebook(data: Path, out: Path) -> str:
    """Names of emoji in English, German, French and Chinese, by cross-attention and in a single stream."""
    rows, cost, shares = [], Cost(), torch.zeros(0)
    for kind, held_out in BOOKS:
        task = Picturebook(
            kind=kind, held_out=held_out, size=32, patch=8, vocabulary=1000, d_model=96, heads=4, layers=4,
            decoder_layers=2, dropout=0.0,
        )  # fmt: skip
        result, one = run(
            task,
            data / "picturebook",
            out / f"picturebook-{kind}-{held_out}",
            steps=STEPS,
            batch_tokens=TOKENS,
            learning_rate=2e-3,
            ema=0.995,
            evaluate_every=STEPS,
            save_every=250,
            watch_every=0,
        )
        found = result.metrics
        languages = [found[f"chrf_{name}"] for name in ("en", "de", "fr", "zh")]
        examples = task.open(str(data / "picturebook")).valid
        blind = evaluate(task, result.model, strangers(examples))["chrf"]
        scores = (found["chrf"], blind, *languages)
        numbers = [*(f"{score:.1f}" for score in scores), f"{found['exact']:.1%}"]
        rows.append([f"{kind}, {held_out}", *numbers])
        cost = Cost(cost.wall + one.wall, cost.processor + one.processor)
        harness.say(f"{kind}, {held_out}: {numbers}")
        if (kind, held_out) == ("single", "pictures"):
            assert isinstance(result.model, Stream)
            plan = bucketed(examples.sizes, TOKENS)
            batches = (task.inputs(task.collate(examples.take(places, 0))) for places in plan)
            shares = picture_shares(result.model, batches)
    header = ["words see by, held out", "chrF", "of other pictures", "en", "de", "fr", "zh", "exact"]
    layers = [
        [str(number), *(f"{share:.2f}" for share in layer.tolist()), f"{layer.mean():.2f}"]
        for number, layer in enumerate(shares)
    ]
    heads = [f"head {number}" for number in range(shares.shape[1])]
    return (
        f"{harness.table(header, rows)}\n\nAll together {cost}. In the single stream, pictures held out, the "
        "share of the attention of words that goes to the picture, by layer and head; the rest goes to text:"
        f"\n\n{harness.table(['layer', *heads, 'mean'], layers)}"
    )


def strangers(examples: Examples) -> Examples:
    """The same captions, each beside the picture of another: what is said well here, nobody saw."""

    def make(index: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        other = (index + len(examples) // 2) % len(examples)
        return examples.make(other, random)[0], examples.make(index, random)[1]

    return Examples(examples.sizes, make)
