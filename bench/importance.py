"""how well heads are ranked without silencing each of them.

Every method against leave-one-out on the same text: Spearman's rank correlation with its 95% interval over
heads, and its time as a share of leave-one-out's. Times are processor seconds, which other work on the
machine changes little. Learned gates run a model hundreds of times, longer than leave-one-out itself, and are
left out.
"""

from collections.abc import Callable, Iterator
from importlib import resources
from time import process_time
from typing import Any

import torch

from bench.harness import say, table, targets
from bench.models import minilm, smollm2
from manyheads.heads.importance import agreement, importance

SPEARMAN, SHARE = 0.9, 0.1
JUDGE = "leave-one-out"
METHODS = ("fisher", "gradient", "relevance", "output-norm", "confidence", "random")
PIECE = 48  # tokens of a sequence for the language model


def lines() -> list[str]:
    """The text that comes with the package."""
    return (
        resources.files("manyheads").joinpath("data/files/text.txt").read_text(encoding="utf-8").splitlines()
    )


def sentences(tokenizer: Any, quick: bool) -> Iterator[Any]:
    """Batches of sentences, padded."""
    chosen = lines()[:12] if quick else lines()
    for start in range(0, len(chosen), 31):
        yield dict(tokenizer(chosen[start : start + 31], padding=True, return_tensors="pt"))


def pieces(tokenizer: Any, quick: bool) -> Iterator[Any]:
    """One batch of equal pieces of running text: few, because each head runs through them."""
    ids = torch.tensor(tokenizer(" ".join(lines()))["input_ids"])
    batch = ids[: 2 * PIECE if quick else 4 * PIECE].view(-1, PIECE)
    yield {"input_ids": batch, "attention_mask": torch.ones_like(batch)}


def judged(
    name: str, make: Callable[[], Any], feed: Callable[[Any, bool], Iterator[Any]], quick: bool
) -> tuple[str, list[tuple[str, float, str, float]]]:
    """The table of one model, and what was to be reached."""
    model, tokenizer = make()
    batches = list(feed(tokenizer, quick))
    tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
    found, seconds = {}, {}
    for method in (JUDGE, *METHODS):
        started = process_time()
        found[method] = importance(model, batches, method)
        seconds[method] = process_time() - started
        say(f"{name}: {method} {seconds[method]:.1f} s")
    rows = []
    for method in METHODS:
        (agreed,) = agreement({method: found[method], JUDGE: found[JUDGE]})
        share = seconds[method] / seconds[JUDGE]
        figures = f"{agreed.spearman:.3f}", f"{agreed.low:.2f} to {agreed.high:.2f}"
        rows.append([method, *figures, f"{seconds[method]:.1f}", f"1/{1 / share:.0f}"])
        if method == "fisher":
            goals = [
                (f"{name}: fisher, Spearman with leave-one-out", agreed.spearman, ">=", SPEARMAN),
                (f"{name}: fisher, share of leave-one-out's time", share, "<=", SHARE),
            ]
    header = [name, "Spearman", "95% interval", "seconds", "of leave-one-out"]
    measured = (
        f"{len(found[JUDGE])} heads; {tokens} tokens in {sum(len(b['input_ids']) for b in batches)} "
        f"sequences. Leave-one-out takes {seconds[JUDGE]:.0f} seconds."
    )
    return f"{table(header, rows)}\n\n{measured}", goals


def run(quick: bool) -> str:
    parts, goals = [], []
    for name, make, feed in (("MiniLM", minilm, sentences), ("SmolLM2-135M", smollm2, pieces)):
        part, reached = judged(name, make, feed, quick)
        parts.append(part)
        goals += reached
    return "\n\n".join([*parts, targets(*goals)])
