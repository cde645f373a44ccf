"""Training: what is reached on real data, and how fast the loop is with our module and with the textbook's.

    python -m bench.learn shakespeare --data DIR     2000 steps of the known laptop recipe
    python -m bench.learn multi30k --data DIR        100 minutes; a second call goes on where the first ended
    python -m bench.learn speed                      tokens a second, our modules against the textbook's
    python -m bench.learn watching                   what looking at the heads costs

DIR holds language/tinyshakespeare.txt and translation/{train,val,test}.{en,de}. Every run is kept under
--out and goes on after Ctrl-C or a crash.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from bench import harness
from manyheads.nn.transformers import Decoder
from manyheads.tasks.language import Language
from manyheads.tasks.translation import Translation
from manyheads.training.evaluation import evaluate
from manyheads.training.live import looking
from manyheads.training.loop import Result, train
from manyheads.training.report import Report
from manyheads.training.task import Task

SHAKESPEARE = 1.88
BLEU = 36.0


def shakespeare(data: Path, out: Path) -> str:
    """4 layers, 4 heads, width 128, context 64, 12 windows a step, 2000 steps, no dropout."""
    task = Language(context=64, d_model=128, heads=4, layers=4, positions="learned")
    result, seconds = _run(
        task,
        data / "language" / "tinyshakespeare.txt",
        out / "shakespeare",
        steps=2000,
        batch_tokens=12 * 64,
        learning_rate=1e-3,
        evaluate_every=250,
        save_every=250,
        evaluate_examples=200,
    )
    return _reached("validation loss", result.metrics["loss"], "<=", SHAKESPEARE, seconds)


def multi30k(data: Path, out: Path) -> str:
    """English to German captions: 3 layers a side, width 256, shared pieces, an average of the weights."""
    task = Translation(
        d_model=256, heads=8, layers=3, d_hidden=512, dropout=0.3, vocabulary=6000, max_tokens=100
    )
    folder = data / "translation"
    result, seconds = _run(
        task,
        folder,
        out / "multi30k",
        steps=9000,
        batch_tokens=3000,
        learning_rate=2e-3,
        warmup=1000,
        decay="cosine",
        ema=0.999,
        evaluate_every=500,
        evaluate_examples=300,
        save_every=250,
    )
    task.beams = 5
    bleu = evaluate(task, result.model, task.read(str(folder)))["bleu"]
    return _reached("sacreBLEU, test, 5 beams", bleu, ">=", BLEU, seconds)


def _run(task: Task, data: Path, out: Path, **options: object) -> tuple[Result, float]:
    """Begin a run or go on with it; the seconds are those of steps and evaluations in this call."""
    started = time.perf_counter()

    def tell(report: Report) -> None:
        if report.metrics:
            numbers = ", ".join(f"{name} {value:.3f}" for name, value in report.metrics.items())
            harness.say(f"step {report.step}: loss {report.loss:.3f}; {numbers}")

    result = train(task, str(data), out=out, resume=True, callbacks=[tell], **options)
    if result.ended == "interrupted":
        raise SystemExit(f"stopped at step {result.step}; the same command goes on")
    return result, time.perf_counter() - started


def _reached(what: str, figure: float, sign: str, wanted: float, seconds: float) -> str:
    return f"{harness.targets((what, figure, sign, wanted))}\n\n{seconds:.0f} s in this call."


class Textbook(nn.Module):
    """Attention as tutorials write it: all weights at once, a triangle of minus infinity."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (
            inner.query,
            inner.key,
            inner.value,
            inner.output,
        )
        self.heads = inner.heads
        self.chunk = None

    def forward(self, x: Tensor, **ours: object) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return self.output((weights @ v).transpose(1, 2).reshape(batch, length, -1))


def speed(context: int = 512) -> str:
    """One update of the language task, with our attention and with the textbook's in the same model."""
    rows, goals = [], []
    for width, heads, wanted in ((128, 4, 2.0), (512, 8, 1.2)):
        batch = 8 if width == 128 else 4
        steps = {
            name: _step(_model(width, heads, textbook), batch, context)
            for name, textbook in (("manyheads", False), ("textbook", True))
        }
        times = harness.race(steps)
        rows.append([f"width {width}, {heads} heads"] + [f"{batch * context / times[n]:,.0f}" for n in steps])
        goals.append((f"width {width}, {heads} heads", times["textbook"] / times["manyheads"], ">=", wanted))
    table = harness.table(["tokens/s", "manyheads", "textbook"], rows)
    return f"{table}\n\n{harness.targets(*goals)}"


def _model(width: int, heads: int, textbook: bool) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(width, heads=heads, layers=4, vocabulary=67)
    if textbook:
        for block in model.blocks:
            block.attention = Textbook(block.attention)
    return model


def _step(model: nn.Module, batch: int, context: int) -> Callable[[], None]:
    task = Language(context=context)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(67, (batch, context + 1))
    taken = {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}

    def step() -> None:
        loss, count = task.loss(model, taken)
        (loss / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def watching(every: int = 100) -> str:
    """A step that looks at the heads against one that does not: the share of time with a look every 100."""
    rows, goals = [], []
    for width, context, batch in ((128, 64, 12), (128, 128, 16), (256, 256, 8)):
        plain = _step(_model(width, 4, False), batch, context)
        model = _model(width, 4, False)
        inner = _step(model, batch, context)

        def looked(model: nn.Module = model, inner: Callable[[], None] = inner) -> None:
            with looking(model) as look:
                inner()
            _ = look.table

        times = harness.race({"plain": plain, "looking": looked})
        share = (times["looking"] / times["plain"] - 1) / every
        rows.append([f"width {width}, context {context}, batch {batch}"]
                    + [harness.milliseconds(times[name]) for name in ("plain", "looking")]
                    + [f"{share:.2%}"])  # fmt: skip
        goals.append((f"width {width}, context {context}: % of the time", 100 * share, "<=", 5.0))
    return f"{harness.table(['ms a step', 'plain', 'looking', 'share'], rows)}\n\n{harness.targets(*goals)}"


def run(quick: bool) -> str:
    """The parts that need no data, for `python -m bench learn`."""
    return f"{speed(256 if quick else 512)}\n\n{watching()}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.learn", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("part", choices=["shakespeare", "multi30k", "speed", "watching"])
    parser.add_argument("--data", type=Path, help="the folder with language/ and translation/")
    parser.add_argument("--out", type=Path, default=Path("out/learn"), help="where runs are kept")
    options = parser.parse_args()
    print(harness.machine(f"python -m bench.learn {options.part}"), flush=True)
    if options.part in ("speed", "watching"):
        print({"speed": speed, "watching": watching}[options.part]())
        return
    if options.data is None:
        parser.error("--data: expected the folder with language/ and translation/")
    print({"shakespeare": shakespeare, "multi30k": multi30k}[options.part](options.data, options.out))


if __name__ == "__main__":
    main()
