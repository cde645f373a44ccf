"""The statistics of docs/statistics.md from weights (batch, heads, queries, keys), plainly, in float64."""

from __future__ import annotations

import torch
from tests.zoo.case import Truth, View
from torch import Tensor

OF_PLACES = ("self", "previous", "next", "distance", "local")
OF_KEYS = ("first", "distance_spread")
OF_WEIGHTS = ("entropy", "effective_keys", "confidence")
LOCAL = 8


def means(truth: Truth, view: View, rest: str, counted: Tensor) -> dict[str, Tensor]:
    """The mean of each statistic over the queries that count, for each head: (heads,) each.

    rest: what becomes of rows that do not sum to one: "normalised" divides them by their sum, "sink" takes
    what is missing as one more place without a position, "raw" takes the weights as they are.
    """
    p = view.weights.double()
    total = p.sum(-1, keepdim=True)
    shares = p / torch.where(total > 0, total, 1.0)
    sink = torch.zeros_like(total)
    if rest == "normalised":
        p = shares
    elif rest == "sink":
        sink = torch.where((total > 0) & (total < 1 - 1e-6), 1 - total, 0.0)
    whole = torch.cat([p, sink], -1)
    values = {
        "entropy": -torch.special.xlogy(whole, whole).sum(-1),
        "effective_keys": torch.where((whole != 0).any(-1), 1 / (whole**2).sum(-1), 0.0),
        "confidence": whole.amax(-1),
    }
    if view.tokens is not None:
        p, shares = p[..., slice(*view.tokens)], shares[..., slice(*view.tokens)]
        total = shares.sum(-1, keepdim=True)
        shares = shares / torch.where(total > 0, total, 1.0)
    places = torch.arange(p.shape[-1], dtype=torch.float64)
    centre = (shares * places).sum(-1, keepdim=True)
    values |= {
        "first": p[..., 0],
        "distance_spread": (shares * (places - centre) ** 2).sum(-1).sqrt(),
    }
    if view.own is not None:
        gaps = places - view.own[:, None]
        values |= {
            "self": (p * (gaps == 0)).sum(-1),
            "previous": (p * (gaps == -1)).sum(-1),
            "next": (p * (gaps == 1)).sum(-1),
            "distance": (shares * gaps.abs()).sum(-1),
            "local": (p * (gaps.abs() <= LOCAL)).sum(-1),
        }
    if truth.outputs is not None and truth.outputs.shape[:3] == p.shape[:3]:
        values["output_norm"] = truth.outputs.norm(dim=-1)
    number = counted.sum()
    out = {
        name: torch.where(counted[:, None], value, 0.0).sum((0, 2)) / number for name, value in values.items()
    }
    out["tokens"] = number.double().expand(p.shape[1])
    return out


def normalised_entropies(truth: Truth, view: View, rest: str, counted: Tensor) -> list[Tensor]:
    """Entropy over the logarithm of the number of keys: those the mask shows, those with a weight, or all.

    The mean is over queries with more than one key.
    """
    p = view.weights.double()
    total = p.sum(-1, keepdim=True)
    if rest == "normalised":
        p = p / torch.where(total > 0, total, 1.0)
    sink = torch.where((total > 0) & (total < 1 - 1e-6), 1 - total, 0.0) if rest == "sink" else total * 0
    whole = torch.cat([p, sink], -1)
    entropy = -torch.special.xlogy(whole, whole).sum(-1)
    weighted = (whole > 0).sum(-1)
    numbers = [weighted, (p > 0).sum(-1), torch.full_like(weighted, p.shape[-1])]
    if truth.hidden is not None and truth.hidden.shape[-1] == p.shape[-1]:
        shown = (~truth.hidden).expand(p.shape).sum(-1)
        numbers += [shown, shown + (sink > 0).squeeze(-1)]
    out = []
    for keys in numbers:
        several = counted[:, None] & (keys > 1)
        value = torch.where(several, entropy / keys.clamp(min=2).double().log(), 0.0)
        out.append(value.sum((0, 2)) / several.sum((0, 2)))
    return out
