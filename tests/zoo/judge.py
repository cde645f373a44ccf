"""Is what manyheads says about a model right, named, refused, or wrong without a word?

`judge(case)` runs the public functions (watch, maps, silence, cut) on one model of the zoo and holds them
against the truth of the case:

right     the numbers are those of the truth.
named     they are not, or are missing, and the site is in `seen.missed`, or its `verified` is False.
refused   the function raised an error that manyheads wrote for this.
wrong     none of these: a number that is not true, without a word, or a crash.
"""

from __future__ import annotations

import copy
import itertools
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.zoo.case import Case, Truth, View
from tests.zoo.numbers import OF_KEYS, OF_PLACES, OF_WEIGHTS, means, normalised_entropies
from torch import Tensor

import manyheads as mh

ASPECTS = ("heads", "weights", "counts", "silence", "cut")
RIGHT, NAMED, REFUSED, WRONG, NOTHING = "right", "named", "refused", "wrong", ""
RESTS = ("normalised", "sink", "raw")
Sites = list[tuple[str, int]]  # the names of the sites of one attention, with their heads


@dataclass
class Verdict:
    """What came of one case: an outcome for each of `ASPECTS`, and why."""

    name: str
    theme: str
    outcomes: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def wrong(self) -> list[str]:
        """The aspects that are wrong, with the reasons."""
        return [
            f"{aspect}: {self.reasons.get(aspect, '')}"
            for aspect in ASPECTS
            if self.outcomes.get(aspect) == WRONG
        ]

    def say(self, aspect: str, outcome: str, reason: str = "") -> None:
        self.outcomes[aspect] = outcome
        if reason:
            self.reasons[aspect] = reason


def judge(case: Case) -> Verdict:
    """Hold watch, maps, silence and cut to the truth of one case."""
    verdict = Verdict(case.name, case.theme)
    before = {name: value.clone() for name, value in case.model.state_dict().items()}
    plain = case.run(case.model, case.inputs)
    try:
        with mh.watch(case.model, "full", tokens=case.tokens) as seen:
            watched = case.run(case.model, case.inputs)
        table = seen.table if seen.sites else None
    except Exception as error:
        for aspect in ("heads", "weights", "counts"):
            verdict.say(aspect, *_raised(error))
        seen = None
    else:
        if not torch.allclose(plain.nan_to_num(), watched.nan_to_num(), rtol=1e-5, atol=1e-5):
            verdict.say("weights", WRONG, "watching changed the output")
    if case.mixer is not None:
        if seen is not None:
            _judge_mixer(case, verdict, seen)
        return verdict
    truths = case.expected(case.inputs)[1]
    names: list[Sites] = [[(truth.path, truth.heads)] for truth in truths]
    if seen is not None:
        names = _judge_watch(case, verdict, seen, table, truths)
    _judge_silence(case, verdict, truths, names)
    if case.drive is None:
        _judge_cut(case, verdict, truths, names)
    for name, value in case.model.state_dict().items():
        if not torch.equal(value, before[name]):
            verdict.say("cut", WRONG, f"{name} of the model itself has changed")
    return verdict


def _raised(error: BaseException) -> tuple[str, str]:
    """An error that manyheads raises on purpose is a refusal; one out of something else is a crash."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    ours = "/manyheads/" in where.filename and (where.line or "").startswith("raise")
    if ours and isinstance(error, ValueError | TypeError | RuntimeError | NotImplementedError):
        return REFUSED, text
    return WRONG, f"crash: {text} ({where.filename.rpartition('/')[2]}:{where.lineno})"


def _within(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _missed(path: str, missed: Any) -> str | None:
    """The reason for which a module, one that holds it or a part of it is in `missed`."""
    for name, reason in missed.items():
        bare = name.partition("#")[0]
        if (bare and _within(path, bare)) or _within(bare, path) or bare == path:
            return f"{name}: {reason}" if isinstance(reason, str) else str(name)
    return None


def _judge_mixer(case: Case, verdict: Verdict, seen: Any) -> None:
    """A module without attention: no site, and a name in `missed`."""
    assert case.mixer is not None
    reason = _missed(case.mixer, seen.missed)
    unproved = [site for site in seen.sites if getattr(site, "verified", True)]
    if unproved:
        what = ", ".join(f"{site.name} ({site.heads} heads)" for site in unproved)
        verdict.say("heads", WRONG, f"no attention, but seen as such: {what}")
    elif reason is None and not seen.sites:
        verdict.say("heads", WRONG, "mixes tokens, and is neither seen nor named")
    else:
        verdict.say("heads", NAMED, reason or "")
    for aspect in ASPECTS[1:]:
        verdict.say(aspect, NOTHING)


def _judge_watch(case: Case, verdict: Verdict, seen: Any, table: Any, truths: list[Truth]) -> list[Sites]:
    """Heads, weights and counts of every attention. Returns the names of the sites of each."""
    sites = list(seen.sites)
    names: list[Sites] = []
    results: dict[str, list[tuple[str, str]]] = {aspect: [] for aspect in ("heads", "weights", "counts")}
    for path in dict.fromkeys(truth.path for truth in truths):
        here = [truth for truth in truths if truth.path == path]
        at_path = [
            site for site in sites if _within(site.path, path) or (_within(path, site.path) and site.path)
        ]
        sites = [site for site in sites if site not in at_path]
        groups = [at_path] if here[0].scattered else [[site] for site in at_path]
        reason = _missed(path, seen.missed)
        doubts = [site for site in at_path if not _verified(site, table)]
        if reason is None and doubts:
            reason = f"not verified: {getattr(doubts[0], 'reason', '') or 'no reason'}"
        if len(groups) != len(here) or not all(groups):
            what = f"{len(here)} attentions, {[(site.name, site.heads) for site in at_path]} seen"
            for aspect in results:
                results[aspect].append((WRONG, what) if reason is None else (NAMED, reason))
            names += [[(site.name, site.heads) for site in group] for group in groups[: len(here)] if group]
            names += [[(path, here[0].heads)]] * (len(here) - min(len(here), sum(map(bool, groups))))
            continue
        for truth, group in zip(here, groups, strict=True):
            names.append([(site.name, site.heads) for site in group])
            for aspect, (outcome, why) in _compare(case, truth, group, table).items():
                if outcome != RIGHT and reason is not None:
                    outcome, why = NAMED, f"{reason} ({why})"
                elif outcome == RIGHT and doubts:
                    outcome, why = NAMED, reason or ""
                results[aspect].append((outcome, why))
    for site in sites:
        if _verified(site, table):
            results["heads"].append((WRONG, f"{site.name} ({site.heads} heads) is no attention of the truth"))
    order = (WRONG, REFUSED, NAMED, RIGHT)
    for aspect, outcomes in results.items():
        worst = min(outcomes, key=lambda item: order.index(item[0]))
        if verdict.outcomes.get(aspect) != WRONG:
            verdict.say(aspect, *worst)
    return names


def _verified(site: Any, table: Any) -> bool:
    """What the site says, or its rows of the table."""
    said = getattr(site, "verified", None)
    if said is None and table is not None and "verified" in table.columns:
        rows = [row for row in table if row["site"] == site.name]
        said = all(row["verified"] not in (False, "False", "no", 0, 0.0) for row in rows)
    return True if said is None else bool(said)


def _note(site: Any, table: Any) -> str:
    """What the site says about its numbers."""
    note = getattr(site, "note", None)
    if note is None and "note" in table.columns:
        note = next(row["note"] for row in table if row["site"] == site.name)
    return str(note or "")


def _compare(case: Case, truth: Truth, group: list[Any], table: Any) -> dict[str, tuple[str, str]]:
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
    return {"heads": heads} | _numbers(case, truth, ours, group, table)


def _numbers(
    case: Case, truth: Truth, ours: dict[str, Tensor], group: list[Any], table: Any
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
    why = _maps_off(case, truth, group)
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
        rests = ("normalised",) if not uneven else RESTS[:2] if positive else ("raw",)
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
    torch.manual_seed(7)
    parts = []
    for site in group:
        try:
            maps = mh.maps(case.model, case.inputs, {site.name: list(range(site.heads))}, size=None)
        except Exception as error:
            return _raised(error)
        parts.append(maps[site.name].weights.double())
    got = torch.cat(parts, 1)
    for view in truth.all_views():
        real = view.counted[:, None, :, None]
        if got.shape == view.weights.shape and bool(
            ((got - view.weights).abs() * real < 10 * case.tolerance).all()
        ):
            return None
    shape = tuple(got.shape)
    if shape != tuple(truth.weights.shape):
        return WRONG, f"maps of shape {shape}, true {tuple(truth.weights.shape)}"
    return WRONG, f"maps differ by {(got - truth.weights).abs().max():.2g}"


def _agree(got: Tensor, want: Tensor, effect: Tensor) -> bool:
    """Whether a silenced output is the expected one, to a thousandth of what silencing changes."""
    if got.shape != want.shape:
        return False
    off = (got.double() - want).abs().max()
    return bool(off <= 1e-3 * effect.abs().max() + 2e-5 * want.abs().max().clamp(min=1.0))


def _selected(sites: Sites, heads: frozenset[int]) -> dict[int | str, list[int]]:
    """The heads by the name of their site, where several sites may hold the heads of one attention."""
    out: dict[int | str, list[int]] = {}
    for head in sorted(heads):
        number = head
        for name, count in sites:
            if number < count or (name, count) == sites[-1]:
                out.setdefault(name, []).append(number)
                break
            number -= count
    return out


def _judge_silence(case: Case, verdict: Verdict, truths: list[Truth], names: list[Sites]) -> None:
    """Silence the first, a middle and the last head of each attention."""
    plain = case.expected(case.inputs)[0]
    outcome, reason = RIGHT, ""
    for i in sorted({0, len(truths) // 2, len(truths) - 1}):
        truth = truths[i]
        for head in sorted({0, truth.heads // 2, truth.heads - 1}):
            heads = frozenset({head})
            want = case.expected(case.inputs, {i: heads})[0]
            try:
                with mh.silence(case.model, _selected(names[i], heads)):
                    got = case.run(case.model, case.inputs)
            except Exception as error:
                outcome, reason = _raised(error)
            else:
                if not _agree(got, want, plain - want):
                    off = (got.double() - want).abs().max() if got.shape == want.shape else float("nan")
                    outcome = WRONG
                    reason = f"head {head} off by {off:.2g}, where it makes {(plain - want).abs().max():.2g}"
            if outcome == WRONG:
                verdict.say("silence", outcome, f"{names[i][0][0]}: {reason}")
                return
    verdict.say("silence", outcome, reason)


def _judge_cut(case: Case, verdict: Verdict, truths: list[Truth], names: list[Sites]) -> None:
    """Cut heads, and run the smaller model on the inputs and on longer ones."""
    heads: dict[int | str, list[int]] = {}
    for i, chosen in case.cut.items():
        for name, numbers in _selected(names[i], chosen).items():
            heads[name] = sorted({*heads.get(name, []), *numbers})
    try:
        small = mh.cut(copy.deepcopy(case.model), heads, batch=case.inputs).eval()
    except Exception as error:
        verdict.say("cut", *_raised(error))
        return
    for what, inputs in (("inputs", case.inputs), ("longer inputs", case.longer)):
        if inputs is None:
            continue
        want = case.expected(inputs, case.cut, evaluating=True)[0]
        effect = case.expected(inputs, evaluating=True)[0] - want
        try:
            got = case.run(small, inputs)
        except Exception as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            verdict.say("cut", WRONG, f"the cut model does not run on {what}: {text}")
            return
        if not _agree(got, want, effect):
            off = (got.double() - want).abs().max() if got.shape == want.shape else float("nan")
            verdict.say(
                "cut", WRONG, f"off by {off:.2g} on {what}, where cutting makes {effect.abs().max():.2g}"
            )
            return
    verdict.say("cut", RIGHT)
