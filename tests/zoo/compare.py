"""Hold what watch and maps say about one attention against its truth."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from tests.zoo.case import Case, Truth, View
from tests.zoo.numbers import OF_KEYS, OF_PLACES, OF_WEIGHTS, means, normalised_entropies
from torch import Tensor

import manyheads as mh
from manyheads.common.preserved_state import seed_generators

RIGHT, NAMED, REFUSED, WRONG, NOTHING = "right", "named", "refused", "wrong", ""
RESTS = ("normalised", "sink", "raw")


def raised(error: BaseException) -> tuple[str, str]:
    """An error that manyheads raises on purpose is a refusal; one out of something else is a crash."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    ours = "/manyheads/" in where.filename and (where.line or "").startswith("raise")
    if ours and isinstance(error, ValueError | TypeError | RuntimeError | NotImplementedError):
        return REFUSED, text
    return WRONG, f"crash: {text} ({where.filename.rpartition('/')[2]}:{where.lineno})"


def _note(site: Any, table: Any) -> str:
    """What the site says about its numbers."""
    return "; ".join(site.notes)


def compare(case: Case, truth: Truth, group: list[Any], table: Any, maps: bool) -> dict[str, tuple[str, str]]:
    """Hold one attention's rows against the truth."""
    number = sum(site.heads for site in group)
    if number != truth.heads:
        what = f"{truth.heads} heads, {number} seen"
        return dict.fromkeys(("heads", "weights", "counts"), (WRONG, what))
    kinds = {site.kind for site in group}
    heads = (
        (RIGHT, "")
        if kinds <= set(truth.kinds)
        else (WRONG, f"kind {'/'.join(kinds)}, true {'/'.join(truth.kinds)}")
    )
    rows = [i for site in group for i, row in enumerate(table.rows) if row.site == site.name]
    ours = {name: table[name][rows] for name in table.metrics} | {"tokens": table["tokens"][rows]}
    return {"heads": heads} | _numbers(case, truth, ours, group, table, maps)


def _numbers(
    case: Case, truth: Truth, ours: dict[str, Tensor], group: list[Any], table: Any, maps: bool
) -> dict[str, tuple[str, str]]:
    """Counts and weights: every statistic, in some view of the weights, and the maps."""
    counts: tuple[str, str] = WRONG, ""
    closest: tuple[int, str] | None = None
    for view, rest, counted in _readings(truth):
        expected = means(truth, view, rest, counted)
        if torch.allclose(ours["tokens"], expected["tokens"]):
            counts = RIGHT, ""
        elif counts[0] == WRONG:
            counts = WRONG, f"tokens {_short(ours['tokens'])}, true {_short(expected['tokens'])}"
        off = _off(case, truth, view, rest, counted, expected, ours)
        wrong = {name: text for name, text in off.items() if text != "withheld"}
        if closest is None or len(wrong) < closest[0]:
            closest = len(wrong), "; ".join(list(wrong.values())[:3])
            withheld = [name for name, text in off.items() if text == "withheld"]
            best = rest
    assert closest is not None
    if closest[0]:
        return {"counts": counts, "weights": (WRONG, closest[1])}
    why = _maps_off(case, truth, group) if maps else None
    if why:
        return {"counts": counts, "weights": why}
    sums = truth.weights.sum(-1)
    uneven = sums[((sums - 1).abs() > 1e-3) & (sums.abs() > 1e-9)]
    if uneven.numel() and best != "sink" and not all(_note(site, table) for site in group):
        return {"counts": counts, "weights": (WRONG, f"rows sum to {uneven.mean():.2g}, and nothing says so")}
    if withheld and not truth.vague:
        return {"counts": counts, "weights": (NAMED, f"no number for {', '.join(withheld)}")}
    return {"counts": counts, "weights": (RIGHT, "")}


def _readings(truth: Truth) -> Iterator[tuple[View, str, Tensor]]:
    """Each view of the weights, each meaning of rows that do not sum to one, each count of empty rows."""
    for view in truth.all_views():
        total = view.weights.sum(-1)
        positive = bool((view.weights >= -1e-9).all())
        uneven = bool(((total - 1).abs() > 1e-6)[total > 0].any())
        empty = (total.abs() < 1e-12).all(1)  # (batch, queries): no key in any head
        options = [view.counted]
        if bool((empty & view.counted).any()):
            options.append(view.counted & ~empty)
        rests = ("normalised",) if not uneven else RESTS if positive else ("raw",)
        for rest, counted in itertools.product(rests, options):
            yield view, rest, counted


def _off(
    case: Case,
    truth: Truth,
    view: View,
    rest: str,
    counted: Tensor,
    expected: dict[str, Tensor],
    ours: dict[str, Tensor],
) -> dict[str, str]:
    """What is not as expected, by statistic."""
    out: dict[str, str] = {}
    wanted: dict[str, list[Tensor]] = {name: [value] for name, value in expected.items()}
    wanted["entropy_normalised"] = normalised_entropies(truth, view, rest, counted)
    if truth.ids is not None and view.weights is truth.weights:
        for name, ids in case.tokens.items():
            share = (view.weights * torch.isin(truth.ids, torch.tensor(ids))[:, None, None]).sum(-1)
            wanted[name] = [torch.where(counted[:, None], share, 0.0).sum((0, 2)) / counted.sum()]
    names = ("tokens", *OF_WEIGHTS, "entropy_normalised", *OF_PLACES, *OF_KEYS, "output_norm", *case.tokens)
    for name in names:
        if name not in ours:
            continue
        mine = ours[name]
        if bool(mine.isnan().all()) and name != "tokens":
            if name in wanted and not (name == "first" and not view.first):
                out[name] = "withheld"
            continue
        if name not in wanted:
            if name in OF_PLACES:
                out[name] = f"{name} {_short(mine)}, but positions have no meaning here"
            continue
        if name == "first" and not view.first:
            continue
        scale = 10.0 if name == "distance_spread" else 1.0  # a square root: float32 leaves some near zero
        errors = [((mine - want).abs() / want.abs().clamp(min=1.0)).nan_to_num(9.0) for want in wanted[name]]
        both = [mine.isnan() & want.isnan() for want in wanted[name]]
        if all(
            float(error.masked_fill(same, 0.0).max()) > case.tolerance * scale
            for error, same in zip(errors, both, strict=True)
        ):
            out[name] = f"{name} {_short(mine)}, true {_short(wanted[name][0])}"
    return out


def _short(values: Tensor) -> str:
    return "[" + ", ".join(f"{value:.3g}" for value in values.tolist()[:4]) + "]"


def _maps_off(case: Case, truth: Truth, group: list[Any]) -> tuple[str, str] | None:
    """Hold the maps of all heads against each view of the weights."""
    if case.drive is not None:
        return None
    seed_generators(7)
    parts = []
    for site in group:
        try:
            maps = mh.maps(case.model, case.inputs, {site.name: list(range(site.heads))}, size=None)
        except Exception as error:
            return raised(error)
        parts.append(maps[site.name].weights.double())
    got = torch.cat(parts, 1)
    for view in truth.all_views():
        real = view.counted[:, None, :, None]
        if view.tokens is not None and got.shape[-1] != view.weights.shape[-1]:
            view = View(view.weights[..., slice(*view.tokens)], view.own, view.counted)
        if got.shape == view.weights.shape and bool(
            ((got - view.weights).abs() * real < 10 * case.tolerance).all()
        ):
            return None
    shape = tuple(got.shape)
    if shape != tuple(truth.weights.shape):
        return WRONG, f"maps of shape {shape}, true {tuple(truth.weights.shape)}"
    return WRONG, f"maps differ by {(got - truth.weights).abs().max():.2g}"
