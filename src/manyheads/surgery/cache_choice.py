"""cache_plan: which key/value heads may forget, found without training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from manyheads.common.progress import Progress, no_progress
from manyheads.common.types import Batch
from manyheads.heads.fingerprint import fingerprint
from manyheads.surgery.cache_layers import kv_heads_by_layer
from manyheads.surgery.cache_plan import CachePlan, check_kept
from manyheads.surgery.forgetting_price import PriceSums, forgetting_prices

PROTECTED = 0.02  # nats: a head that costs more where text is copied from far back never forgets


def cache_plan(
    model: nn.Module,
    batches: Iterable[Batch],
    budget: float = 0.5,
    *,
    first: int = 4,
    window: int = 256,
    protect: Mapping[int, Sequence[int]] | None = None,
    protected: float = PROTECTED,
    rounds: int = 1,
    seed: int = 0,
    progress: Progress = no_progress,
) -> CachePlan:
    """Which key/value heads may forget all but the first and the last tokens, at the least cost.

    Each head is priced by what the model's predictions would change if it forgot: half the Fisher form of
    the difference in its output, in nats for each token, on the text and on copies of early text planted at
    the end of it, which only heads that read far back can continue. The cheapest heads forget. Heads that
    matter for those copies (retrieval and induction heads) are protected.

    Parameters
    ----------
    model: causal: of transformers, or a `Decoder`. It runs in eval mode and is left unchanged.
    batches: token ids, several times as long as the window: tensors (batch, length), or dicts with input_ids.
        A few thousand tokens are enough. They need the memory of a backward pass.
    budget: the share of key/value heads that keep everything, between 0 and 1. For long texts, that is the
        share of the cache that is left.
    first, window: how many of the first and of the last tokens a head that forgets keeps.
    protect: heads that keep everything in any case, ``{layer: [head numbers]}``.
    protected: protect heads that cost more nats than this for each copied token; ``math.inf`` for none.
    rounds: let the heads forget in this many rounds, and price the others again in between.
    seed: of the tokens that are drawn from the model's predictions.
    progress: called with the stage, and how many batches are done.

    See Also
    --------
    HeadwiseCache: follows the plan.
    CachePlan: what is returned.
    importance: what silencing a head costs.

    References
    ----------
    Xiao et al. 2024, DuoAttention: efficient long-context LLM inference with retrieval and streaming heads.
    Wu et al. 2024, Retrieval head mechanistically explains long-context factuality.

    Examples
    --------
    >>> from manyheads.nn.transformers import Decoder
    >>> model = Decoder(12, heads=3, layers=2, vocabulary=101)
    >>> cache_plan(model, [torch.randint(101, (2, 60))], 0.5, first=1, window=8, protected=math.inf)
    CachePlan(3 of 6 key/value heads keep 1 first and 8 last tokens: {...})
    """
    check_kept(first, window)
    check_budget(budget)
    if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 1:
        raise ValueError(f"rounds: expected a whole number of at least 1, got {rounds!r}")
    if math.isnan(protected):
        raise ValueError("protected: expected nats for each copied token, math.inf to protect none, got nan")
    sizes = kv_heads_by_layer(model)
    CachePlan.of(model, protect or {})  # raises on heads that do not exist
    if rounds > 1 and not isinstance(batches, Sequence):
        batches = list(batches)
    forget: dict[int, list[int]] = {}
    prices: dict[int, list[float]] = {layer: [0.0] * size for layer, size in sizes.items()}
    kept: set[tuple[int, int]] = {(layer, head) for layer, heads in (protect or {}).items() for head in heads}
    count = forgetting_count(budget, sizes)
    for number in range(1, rounds + 1):
        sums = forgetting_prices(
            model, batches, first=first, window=window, forget=forget, seed=seed,
            stage="price" if rounds == 1 else f"price {number}/{rounds}", progress=progress,
        )  # fmt: skip
        for layer, values in total_prices(sums).items():
            for head, value in enumerate(values):
                if head not in forget.get(layer, []):
                    prices[layer][head] = value
        if number == 1:
            kept |= far_readers(sums, protected)
        forget = cheapest(prices, forget, kept, math.ceil(count * number / rounds), budget)
    return CachePlan(forget, sizes, first, window, fingerprint(model), prices, _by_layer(kept))


def with_budget(plan: CachePlan, budget: float) -> CachePlan:
    """The plan for another budget, by the prices that a plan of `cache_plan` has.

    >>> plan = CachePlan({0: [1]}, {0: 3}, 4, 256, "5e1a", prices={0: [3.0, 1.0, 2.0]})
    >>> with_budget(plan, 1 / 3).forget
    {0: [1, 2]}
    """
    check_budget(budget)
    if not plan.prices:
        raise ValueError("plan: it has no prices; expected one that mh.cache_plan made")
    kept = {(layer, head) for layer, heads in plan.protected.items() for head in heads}
    count = forgetting_count(budget, plan.sizes)
    return replace(plan, forget=cheapest(plan.prices, {}, kept, count, budget))


def check_budget(budget: float) -> None:
    """Raise unless this is a share.

    >>> check_budget(1.5)
    Traceback (most recent call last):
    ValueError: budget: expected the share of key/value heads that keep everything, 0 to 1, got 1.5
    """
    if not isinstance(budget, int | float) or isinstance(budget, bool) or not 0 <= budget <= 1:
        raise ValueError(
            f"budget: expected the share of key/value heads that keep everything, 0 to 1, got {budget!r}"
        )


def forgetting_count(budget: float, sizes: Mapping[int, int]) -> int:
    """How many heads forget so that at least this share of them keeps everything."""
    return int((1 - budget) * sum(sizes.values()) + 1e-9)


def total_prices(sums: PriceSums) -> dict[int, list[float]]:
    """The price of each head: on the text, plus on copies."""
    copies = sums.by_copies
    return {
        layer: (value + copies.get(layer, torch.zeros_like(value))).tolist()
        for layer, value in sums.by_text.items()
    }


def far_readers(sums: PriceSums, protected: float) -> set[tuple[int, int]]:
    """The heads that cost more than this for each copied token."""
    return {
        (layer, head)
        for layer, values in sums.by_copies.items()
        for head, value in enumerate(values.tolist())
        if value > protected
    }


def cheapest(
    prices: Mapping[int, Sequence[float]],
    forget: Mapping[int, Sequence[int]],
    kept: set[tuple[int, int]],
    count: int,
    budget: float,
) -> dict[int, list[int]]:
    """``count`` heads to forget: those that do, and the cheapest of the others that need not be kept.

    >>> cheapest({0: [3.0, 1.0], 1: [2.0, 4.0]}, {}, {(0, 1)}, 2, budget=0.5)
    {0: [0], 1: [0]}
    >>> cheapest({0: [3.0, 1.0]}, {}, {(0, 1)}, 2, budget=0.0)
    Traceback (most recent call last):
    ValueError: budget: 0.0 lets 2 of 2 key/value heads forget, but 1 must keep everything ...
    """
    priced = [(price, layer, head) for layer, row in prices.items() for head, price in enumerate(row)]
    free = sorted(entry for entry in priced if entry[1:] not in kept)
    if count > len(free):
        fixed = len(priced) - len(free)
        raise ValueError(
            f"budget: {budget} lets {count} of {len(priced)} key/value heads forget, but {fixed} must keep "
            f"everything (they read far back, or are protected); expected at least "
            f"{math.ceil(1000 * fixed / len(priced)) / 1000}, or a higher `protected`"
        )
    chosen = {(layer, head) for layer, heads in forget.items() for head in heads}
    for _, layer, head in free:
        if len(chosen) < count:
            chosen.add((layer, head))
    return _by_layer(chosen)


def _by_layer(heads: set[tuple[int, int]]) -> dict[int, list[int]]:
    by_layer: dict[int, list[int]] = {}
    for layer, head in sorted(heads):
        by_layer.setdefault(layer, []).append(head)
    return by_layer
