"""whole training runs to the same validation loss: `manyheads train language` against its peers.

    MANYHEADS_DATA=DIR python -m bench train_run --out bench/results

DIR holds language/tinyshakespeare.txt. All runs see the same batches in the same order, with the same
optimiser, learning rates and evaluations; models are as their makers build them (ours has rotary positions,
the others learned ones). The peers are trained by a plain loop; ours by the loop of the command, with its
checkpoints and its looks at heads. Processor time of one thread, evaluations included, so that other work on
the machine counts little. What was measured is kept in results/train_run.json: delete it to begin anew.
"""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bench.decoders import NANO, Shape, build
from bench.harness import geometric_mean, say, table, targets
from bench.learn_speed import Textbook
from bench.record import Record
from manyheads.data.examples import Order, spread
from manyheads.models import config
from manyheads.tasks.language import Language
from manyheads.training.evaluation import evaluate
from manyheads.training.options import Options, rate, with_options
from manyheads.training.report import Report
from manyheads.training.train import train

OURS, COMPILED, TEXTBOOK = "manyheads", "manyheads --compile", "textbook module"
FASTER = 1.2
RECORD = Path(__file__).parent / "results" / "train_run.json"


class Recipe(NamedTuple):
    """A model and how it is trained."""

    name: str
    sizes: dict[str, Any]
    options: dict[str, Any]


LAPTOP = Recipe(
    "nanoGPT's laptop recipe: 4 layers, 4 heads, width 128, 12 x 64 tokens",
    {"context": 64, "d_model": 128, "heads": 4, "layers": 4, "dropout": 0.0},
    {"steps": 1500, "batch_tokens": 768, "learning_rate": 1e-3, "warmup": 100, "evaluate_every": 100},
)
WIDE = Recipe(
    "6 layers, 6 heads, width 384, 8 x 256 tokens, dropout 0.2",
    {"context": 256, "d_model": 384, "heads": 6, "layers": 6, "dropout": 0.2},
    {"steps": 200, "batch_tokens": 2048, "learning_rate": 1e-3, "warmup": 50, "evaluate_every": 20},
)
FEW = {"steps": 8, "evaluate_every": 4}
Curve = list[tuple[float, float]]  # processor seconds, validation loss


class Reading(nn.Module):
    """A peer that takes its ids by the name that the task gives them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def run(quick: bool) -> str:
    folder = os.environ.get("MANYHEADS_DATA")
    if not quick and not folder:
        raise SystemExit("MANYHEADS_DATA: not set; expected the folder with language/tinyshakespeare.txt")
    data = None if quick else str(Path(folder or "") / "language" / "tinyshakespeare.txt")
    record = Record(Path(tempfile.mkdtemp()) / "train_run.json" if quick else RECORD)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    parts, ratios = [], {}
    for recipe in (LAPTOP,) if quick else (LAPTOP, WIDE):
        chosen = recipe._replace(options=recipe.options | FEW) if quick else recipe
        report, faster = compare(chosen, data, record)
        parts.append(report)
        ratios |= {
            f"{name}, {recipe.name.split(':')[0].split(',')[0]}": value for name, value in faster.items()
        }
    torch.set_num_threads(threads)
    worst = min(ratios, key=ratios.__getitem__)
    goals = targets(
        (f"times as fast to the same loss, smallest ({worst})", ratios[worst], ">=", FASTER),
        ("geometric mean", geometric_mean(list(ratios.values())), ">=", FASTER),
    )
    return "\n\n".join([*parts, goals])


def compare(recipe: Recipe, data: str | None, record: Record) -> tuple[str, dict[str, float]]:
    """A table of one recipe, and how much faster ours is than each peer."""
    curves = {
        name: record.once(f"{recipe.name}, {name}", lambda measure=measure: measure(recipe, data))
        for name, measure in CONTESTANTS.items()
    }
    goal = max(min(loss for _, loss in curve) for curve in curves.values())  # all have reached it
    times = {name: reached(curve, goal) for name, curve in curves.items()}
    rows = [
        [name, f"{times[name]:.0f}", f"{curve[-1][0]:.0f}", f"{min(loss for _, loss in curve):.3f}"]
        for name, curve in curves.items()
    ]
    header = [recipe.name, f"s to a loss of {goal:.3f}", "s in all", "lowest loss"]
    faster = {name: times[name] / times[OURS] for name in (TEXTBOOK, NANO)}
    return f"{table(header, rows)}", faster


def reached(curve: Curve, goal: float) -> float:
    """When a curve first comes down to a loss, between two evaluations by a straight line.

    >>> reached([(10.0, 3.0), (20.0, 2.0)], 2.5)
    15.0
    """
    before: tuple[float, float] | None = None
    for seconds, loss in curve:
        if loss <= goal:
            if before is None or before[1] == loss:
                return seconds
            return before[0] + (seconds - before[0]) * (before[1] - goal) / (before[1] - loss)
        before = seconds, loss
    raise ValueError(f"goal: the loss never came down to {goal}")


def _ours(recipe: Recipe, data: str | None, **more: object) -> Curve:
    """The command's own loop."""
    curve: Curve = []

    def note(report: Report) -> None:
        if report.metrics:
            curve.append((time.process_time() - started, report.metrics["loss"]))
            say(f"{OURS} {more or ''}: step {report.step}, {curve[-1]}")

    with tempfile.TemporaryDirectory() as out:
        started = time.process_time()
        train(
            Language(**recipe.sizes), data, out=Path(out) / "run", callbacks=[note], **recipe.options, **more
        )
    return curve


def _peer(recipe: Recipe, data: str | None, build_model: Callable[[Language, Recipe], nn.Module]) -> Curve:
    """A plain loop with the same batches, learning rates and evaluations."""
    started = time.process_time()
    task = Language(**recipe.sizes)
    opened = task.open(data)
    options: Options = with_options(task.training, recipe.options)
    torch.manual_seed(0)
    model = build_model(task, recipe)
    matrices, others = ([p for p in model.parameters() if (p.dim() > 1) is wide] for wide in (True, False))
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, betas=(0.9, options.beta2), weight_decay=options.weight_decay, fused=True
    )
    order = Order(opened.train.sizes, options.batch_tokens, options.seed)
    indices = spread(len(opened.valid), options.evaluate_examples)
    curve: Curve = []
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, options)
        model.train()
        batch = task.collate(opened.train.take(order.batch(step), options.seed, order.epoch(step)))
        loss, count = task.loss(model, batch)
        (loss / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % options.evaluate_every == 0 or step + 1 == options.steps:
            valid = evaluate(task, model, opened.valid, indices, batch_tokens=options.batch_tokens)["loss"]
            curve.append((time.process_time() - started, valid))
            say(f"peer: step {step + 1}, {curve[-1]}")
    return curve


def _nano(task: Language, recipe: Recipe) -> nn.Module:
    sizes = recipe.sizes
    vocabulary = task.tokenizer.get_vocab_size()
    shape = Shape(
        sizes["d_model"], sizes["heads"], sizes["layers"], sizes["context"], vocabulary, sizes["dropout"]
    )
    return Reading(build(NANO, shape))


def _textbook(task: Language, recipe: Recipe) -> nn.Module:
    task.positions = "learned"  # the textbook's module has none of its own
    model = config.build(task.describe())
    for block in model.blocks:
        block.attention = Textbook(block.attention)
    return model


CONTESTANTS: dict[str, Callable[[Recipe, str | None], Curve]] = {
    OURS: _ours,
    TEXTBOOK: lambda recipe, data: _peer(recipe, data, _textbook),
    NANO: lambda recipe, data: _peer(recipe, data, _nano),
    COMPILED: lambda recipe, data: _ours(recipe, data, compile=True),
}
