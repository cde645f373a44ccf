"""How fast the training loop is with our module and with the textbook's, and what monitoring heads costs."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bench import harness
from manyheads.nn.transformers import Decoder
from manyheads.tasks.language import Language
from manyheads.training.head_health import HeadHealth

VOCABULARY = 67
SPEED = ((128, 4, 8, 2.0), (512, 8, 4, 1.2))  # width, heads, batch, times the textbook's tokens a second
LOOKS = ((128, 64, 12), (128, 128, 16), (256, 256, 8))  # width, context, batch
SHARE = 5.0  # % of the time


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
    for width, heads, batch, wanted in SPEED:
        steps = {
            name: one_step(plain_model(width, heads, textbook), batch, context)
            for name, textbook in (("manyheads", False), ("textbook", True))
        }
        times = harness.race(steps)
        rows.append([f"width {width}, {heads} heads"] + [f"{batch * context / times[n]:,.0f}" for n in steps])
        goals.append((f"width {width}, {heads} heads", times["textbook"] / times["manyheads"], ">=", wanted))
    table = harness.table(["tokens/s", "manyheads", "textbook"], rows)
    return f"{table}\n\n{harness.targets(*goals)}"


def watching(every: int = 100) -> str:
    """A step that looks at the heads against one that does not: the share of time with a look every 100."""
    rows, goals = [], []
    for width, context, batch in LOOKS:
        plain = one_step(plain_model(width, 4, False), batch, context)
        model = plain_model(width, 4, False)
        inner, monitored = one_step(model, batch, context), HeadHealth(model, 1)

        def looked(health: HeadHealth = monitored, inner: Callable[[], None] = inner) -> None:
            health.before_step()
            inner()
            health.after_step()

        times = harness.race({"plain": plain, "monitored": looked})
        share = (times["monitored"] / times["plain"] - 1) / every
        rows.append([f"width {width}, context {context}, batch {batch}"]
                    + [harness.milliseconds(times[name]) for name in ("plain", "monitored")]
                    + [f"{share:.2%}"])  # fmt: skip
        goals.append((f"width {width}, context {context}: % of the time", 100 * share, "<=", SHARE))
    return f"{harness.table(['ms a step', 'plain', 'monitored', 'share'], rows)}\n\n{harness.targets(*goals)}"


def plain_model(width: int, heads: int, textbook: bool) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(width, heads=heads, layers=4, vocabulary=VOCABULARY)
    if textbook:
        for block in model.blocks:
            block.attention = Textbook(block.attention)
    return model


def one_step(model: nn.Module, batch: int, context: int) -> Callable[[], None]:
    task = Language(context=context)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(VOCABULARY, (batch, context + 1))
    taken = {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}

    def step() -> None:
        loss, count = task.loss(model, taken)
        (loss / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step
