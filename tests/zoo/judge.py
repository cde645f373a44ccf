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
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from tests.zoo.case import Case, Truth
from tests.zoo.compare import NAMED, NOTHING, REFUSED, RIGHT, WRONG, compare, raised
from torch import Tensor

import manyheads as mh

ASPECTS = ("heads", "weights", "counts", "silence", "cut")
ORDER = (WRONG, REFUSED, NAMED, RIGHT)
Sites = list[tuple[str, int]]  # the names of the sites of one attention, with their heads


@dataclass
class Verdict:
    """What came of one case: an outcome for each of `ASPECTS`, and why."""

    name: str
    theme: str
    outcomes: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    missed: dict[str, str] = field(default_factory=dict)  # what watch named in this model

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
    truths, names = _judge_watch(case, verdict, case.inputs, "full")
    if case.mixer is not None:
        return verdict
    if case.longer is not None and not verdict.wrong:  # what was learned on one batch must hold on another
        _judge_watch(case, verdict, case.longer, "core")
    _judge_silence(case, verdict, truths, names)
    if case.drive is None:
        _judge_cut(case, verdict, truths, names)
    for name, value in case.model.state_dict().items():
        if not torch.equal(value, before[name]):
            verdict.say("cut", WRONG, f"{name} of the model itself has changed")
    return verdict


def _judge_watch(
    case: Case, verdict: Verdict, inputs: Any, statistics: Literal["core", "full"]
) -> tuple[list[Truth], list[Sites]]:
    """Heads, weights and counts; maps, too, with full statistics. Returns the truths and their sites."""
    truths = case.expected(inputs)[1] if case.mixer is None else []
    names: list[Sites] = [[(truth.path, truth.heads)] for truth in truths]
    plain = case.run(case.model, inputs)
    try:
        with mh.watch(case.model, statistics, tokens=case.tokens) as seen:
            watched = case.run(case.model, inputs)
        table = seen.table if seen.sites else None
    except Exception as error:
        for aspect in ("heads", "weights", "counts"):
            verdict.say(aspect, *raised(error))
        return truths, names
    verdict.missed |= seen.missed
    if case.mixer is not None:
        _judge_mixer(case, verdict, seen)
        return truths, names
    _judge_sites(case, verdict, seen, table, truths, names, maps=statistics == "full")
    if not torch.allclose(plain.nan_to_num(), watched.nan_to_num(), rtol=1e-5, atol=1e-5):
        verdict.say("weights", WRONG, "watching changed the output")
    return truths, names


def _within(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _missed(path: str, missed: Any, sites: Iterable[str] = ()) -> str | None:
    """The reason for which a module, or one that holds it, is in `missed`.

    A part of it counts, too, unless there are sites that make a claim of their own: then only what names
    these.
    """
    for name, reason in missed.items():
        bare = name.partition("#")[0]
        above = bare == path or (bare and _within(path, bare))
        within = _within(bare, path) and all(_within(site, bare) for site in sites)
        if above or within:
            return f"{name}: {reason}"
    return None


def _judge_mixer(case: Case, verdict: Verdict, seen: Any) -> None:
    """A module without attention: no site, and a name in `missed`."""
    assert case.mixer is not None
    reason = _missed(case.mixer, seen.missed)
    claimed = [
        site for site in seen.sites if _within(site.path, case.mixer) and getattr(site, "verified", True)
    ]
    if claimed:
        what = ", ".join(f"{site.name} ({site.heads} heads)" for site in claimed)
        verdict.say("heads", WRONG, f"no attention, but seen as such: {what}")
    elif reason is None and not seen.sites:
        verdict.say("heads", WRONG, "mixes tokens, and is neither seen nor named")
    else:
        verdict.say("heads", NAMED, reason or "")
    for aspect in ASPECTS[1:]:
        verdict.say(aspect, NOTHING)


def _judge_sites(
    case: Case,
    verdict: Verdict,
    seen: Any,
    table: Any,
    truths: list[Truth],
    names: list[Sites],
    maps: bool,
) -> None:
    """Match the sites with the truths of their paths, and compare. Fills in the names of the sites."""
    sites = list(seen.sites)
    results: dict[str, list[tuple[str, str]]] = {aspect: [] for aspect in ("heads", "weights", "counts")}
    for path in dict.fromkeys(truth.path for truth in truths):
        numbers = [number for number, truth in enumerate(truths) if truth.path == path]
        at_path = [
            site for site in sites if _within(site.path, path) or (_within(path, site.path) and site.path)
        ]
        sites = [site for site in sites if site not in at_path]
        groups = [at_path] if truths[numbers[0]].scattered else [[site] for site in at_path]
        for number, group in zip(numbers, filter(None, groups), strict=False):
            names[number] = [(site.name, site.heads) for site in group]
        reason = _missed(path, seen.missed, [site.path for site in at_path])
        doubts = [site for site in at_path if not _verified(site, table)]
        if reason is None and doubts:
            reason = f"not verified: {getattr(doubts[0], 'reason', '') or 'no reason'}"
        if len(groups) != len(numbers) or not all(groups):
            what = f"{len(numbers)} attentions, {[(site.name, site.heads) for site in at_path]} seen"
            for aspect in results:
                results[aspect].append((WRONG, what) if reason is None else (NAMED, reason))
            continue
        for number, group in zip(numbers, groups, strict=True):
            for aspect, (outcome, why) in compare(case, truths[number], group, table, maps).items():
                if outcome != RIGHT and reason is not None:
                    outcome, why = NAMED, f"{reason} ({why})"
                elif outcome == RIGHT and doubts:
                    outcome, why = NAMED, reason or ""
                results[aspect].append((outcome, why))
    for site in sites:
        if _verified(site, table):
            results["heads"].append((WRONG, f"{site.name} ({site.heads} heads) is no attention of the truth"))
    for aspect, outcomes in results.items():
        before = (
            (verdict.outcomes[aspect], verdict.reasons.get(aspect, ""))
            if aspect in verdict.outcomes
            else None
        )
        where = "" if before is None else "on longer inputs: "
        found = [(outcome, f"{where}{why}" if why else "") for outcome, why in outcomes]
        verdict.say(
            aspect, *min([*found, *([before] if before else [])], key=lambda item: ORDER.index(item[0]))
        )


def _verified(site: Any, table: Any) -> bool:
    """What the site says, or its rows of the table."""
    said = getattr(site, "verified", None)
    if said is None and table is not None and "verified" in table.columns:
        rows = [row for row in table if row["site"] == site.name]
        said = all(row["verified"] not in (False, "False", "no", 0, 0.0) for row in rows)
    return True if said is None else bool(said)


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
                outcome, reason = raised(error)
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
        verdict.say("cut", *raised(error))
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
