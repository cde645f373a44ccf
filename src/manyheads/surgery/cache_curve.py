"""What a smaller cache costs: perplexity by budget, measured on text that the plan has not seen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from manyheads.common.devices import device_of
from manyheads.common.out_folder import check_file, writing
from manyheads.common.preserved_state import evaluating
from manyheads.common.progress import Progress, no_progress
from manyheads.common.types import Batch
from manyheads.data.text_lines import pieces, read_lines
from manyheads.heads.importance.losses import causal, units
from manyheads.models.loaded import Loaded
from manyheads.surgery.cache_choice import PROTECTED, cache_plan, check_budget, with_budget
from manyheads.surgery.cache_layers import kv_heads_by_layer
from manyheads.surgery.cache_plan import CachePlan, check_kept
from manyheads.surgery.forgetting_price import TokenBatch, token_batches
from manyheads.surgery.headwise_cache import HeadwiseCache
from manyheads.surgery.quality import compared

BUDGETS = (0.75, 0.5, 0.25)  # of the curve, beside the one that was asked for


@dataclass(frozen=True)
class CurvePoint:
    """A budget, and what it costs.

    Attributes
    ----------
    budget: the share of key/value heads that keep everything.
    forgetting: how many heads forget.
    share: of the full cache's bytes after the texts that were read.
    perplexity: on them.
    factor, low, high: the perplexity beside that of the full cache, and its 95% interval over texts.
    """

    budget: float
    forgetting: int
    share: float
    perplexity: float
    factor: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class PlannedCache:
    """A plan, and its curve. Made by `plan_cache`."""

    model: str
    plan: CachePlan
    points: list[CurvePoint]
    length: int
    priced: int
    compared: int
    text: str

    def document(self) -> dict[str, object]:
        """What ``--json`` prints."""
        return {
            "model": self.model,
            "text": self.text,
            "length": self.length,
            "priced": self.priced,
            "compared": self.compared,
            "first": self.plan.first,
            "window": self.plan.window,
            "forget": {str(layer): heads for layer, heads in self.plan.forget.items()},
            "protected": {str(layer): heads for layer, heads in self.plan.protected.items()},
            "curve": [asdict(point) for point in self.points],
        }


def plan_cache(
    loaded: Loaded,
    text: str | None,
    budget: float = 0.5,
    *,
    first: int = 4,
    window: int = 256,
    length: int = 2048,
    texts: int = 8,
    protected: float = PROTECTED,
    out: str | PathLike[str] | None = None,
    progress: Progress = no_progress,
) -> PlannedCache:
    """Find the heads that may forget on every other piece of a text, and measure the curve on those between.

    Parameters
    ----------
    loaded: a causal model with its tokenizer.
    text: a text file, read as one long text; ``-`` for standard input, None for an embedded one.
    budget, first, window, protected: as for `cache_plan`.
    length: how many tokens a piece has.
    texts: how many pieces are read, half of them to price and half to compare.
    out: the file for the plan.
    """
    check_budget(budget)
    check_kept(first, window)
    if texts < 2:
        raise ValueError(f"texts: expected at least 2, one to price and one to compare, got {texts}")
    if length <= first + window:
        raise ValueError(
            f"length: pieces of {length} tokens are no longer than what a head keeps, {first} + {window}; "
            "expected several times the window"
        )
    if out is not None:
        check_file(Path(out))
    kv_heads_by_layer(loaded.model)  # refuses models without such a cache before anything is read
    rows = _pieces(loaded, text, length, texts)
    batches: list[Batch] = [torch.tensor([row]) for row in rows]
    plan = cache_plan(
        loaded.model, batches[::2], budget, first=first, window=window, protected=protected, progress=progress
    )
    points = cache_curve(loaded.model, plan, batches[1::2], progress=progress)
    if out is not None:
        with writing(Path(out).parent):
            Path(out).parent.mkdir(parents=True, exist_ok=True)
            plan.save(out)
    what = "an embedded text" if text is None else "standard input" if text == "-" else text
    sizes = len(batches[::2]), len(batches[1::2])
    return PlannedCache(loaded.name, plan, points, length, *sizes, what)


def cache_curve(
    model: nn.Module,
    plan: CachePlan,
    batches: Iterable[Batch],
    budgets: Sequence[float] = BUDGETS,
    *,
    progress: Progress = no_progress,
) -> list[CurvePoint]:
    """The perplexity of a model by the budget of its cache, a full one first.

    Budgets below what the plan's protected heads need are left out.

    Parameters
    ----------
    plan: as `cache_plan` makes it.
    batches: token ids that the plan has not seen.
    budgets: beside that of the plan.
    """
    tokens = list(token_batches(batches, device_of(model)))
    least = sum(map(len, plan.protected.values())) / sum(plan.sizes.values())
    chosen = sorted({1.0, plan.budget, *(one for one in budgets if one >= least)}, reverse=True)
    longest = max(one.ids.shape[1] for one in tokens)
    points: list[CurvePoint] = []
    full: Tensor | None = None
    with evaluating(model), torch.no_grad():
        for number, budget in enumerate(chosen):
            this = plan if budget == plan.budget else with_budget(plan, budget)
            scored = []
            for n, one in enumerate(tokens, 1):
                scored.append(_scores(model, one, HeadwiseCache(model, this)))
                progress("curve", number * len(tokens) + n, len(chosen) * len(tokens))
            scores = torch.cat(scored)
            full = scores if full is None else full
            quality = compared("perplexity", full, scores)
            change = quality.change
            points.append(
                CurvePoint(
                    this.budget,
                    this.forgetting,
                    this.share(longest),
                    quality.after.value,
                    change.value,
                    change.low,
                    change.high,
                )
            )
    return points


def _scores(model: nn.Module, tokens: TokenBatch, cache: HeadwiseCache) -> Tensor:
    """For each sequence its mean cross-entropy and how many tokens it has, (batch, 2) in float64."""
    real = torch.ones_like(tokens.ids) if tokens.real is None else tokens.real.long()
    batch = {"input_ids": tokens.ids, "attention_mask": real}
    loss = units(causal, {"logits": tokens.run(model, cache)}, batch)
    return torch.stack([loss.double().cpu(), (real.sum(1) - 1).double().cpu()], 1)


def _pieces(loaded: Loaded, path: str | None, length: int, count: int) -> list[list[int]]:
    """``count`` pieces of ``length`` tokens of a long text."""
    tokenizer = loaded.tokenizer()
    longest = loaded.longest(length, tokenizer)
    if longest is not None and longest < length:
        raise ValueError(f"length: the model reads at most {longest} tokens, got {length}")
    whole = "\n".join(read_lines(path, None))
    rows = [row for row in pieces(tokenizer, whole, length) if len(row) == length]
    if len(rows) < 2:
        raise ValueError(
            f"text: it has fewer than two pieces of {length} tokens; expected a longer text, or a smaller "
            "--length"
        )
    return rows[:count]
