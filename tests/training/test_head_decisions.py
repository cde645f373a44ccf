"""Decisions from prices that the test makes up."""

from __future__ import annotations

import torch

from manyheads.capture.site import Site
from manyheads.training.head_budget import Unit, units_of
from manyheads.training.head_costs import Cost, HeadObservation
from manyheads.training.head_decisions import Limits, Moment, decide

NOISE = 0.01


def moment(scores, prices=None, *, allowed, after, most=9, similar=None, influence=None, **limits):
    """A moment in which heads cost what their scores say, unless ``prices`` says otherwise."""
    sites = {name: Site(name, n, len(s), tuple(range(len(s)))) for n, (name, s) in enumerate(scores.items())}
    scored = {name: torch.tensor(values) for name, values in scores.items()}
    priced = scored | {name: torch.tensor(values) for name, values in (prices or {}).items()}
    nothing = {name: torch.zeros(len(values)) for name, values in scores.items()}
    seen = HeadObservation(sites, torch.zeros(3), scored, influence or scored, nothing | (similar or {}))
    asked = []

    def price(units):
        asked.append(units)
        return Cost(float(sum(priced[unit.site][list(unit.numbers)].sum() for unit in units)), 0.0)

    bounds = Limits(allowed, after, dict.fromkeys(scores, most), **limits)
    return Moment(seen, units_of(sites), bounds, NOISE, price), asked


def chosen(pairs):
    return sorted((pair[0].site, *pair[0].numbers) for pair in pairs)


def test_heads_that_cost_less_than_the_noise_are_cut():
    now, _ = moment({"a": [0.001, 0.5, 0.6, 0.7], "b": [0.5, 0.002, 0.5, 0.5]}, allowed=8, after=4)
    decisions = decide(now)
    assert chosen(decisions.cut) == [("a", 0), ("b", 1)]
    assert "removing it costs 0.001 +- 0; the loss varies by 0.01" in [r for _, r in decisions.cut]


def test_prices_decide_and_not_scores():
    now, _ = moment({"a": [0.001, 0.002, 0.6, 0.7]}, {"a": [0.4, 0.003, 0.6, 0.7]}, allowed=4, after=1)
    assert chosen(decide(now).cut) == [("a", 1)]


def test_heads_that_cost_nothing_one_by_one_may_cost_much_together():
    now, asked = moment({"a": [0.006, 0.007, 0.5, 0.5], "b": [0.5] * 4}, allowed=8, after=4)
    assert chosen(decide(now).cut) == [("a", 0)]
    assert [len(units) for units in asked].count(2) == 1


def test_the_budget_is_met_by_the_cheapest_whatever_they_cost():
    scores = {"a": [0.3, 0.5, 0.6, 0.7], "b": [0.5, 0.2, 0.9, 0.8]}
    now, _ = moment(scores, allowed=6, after=2)
    decisions = decide(now)
    assert chosen(decisions.cut) == [("a", 0), ("b", 1)]
    assert "the budget is 6 heads of 8" in decisions.cut[0][1]


def test_each_site_keeps_a_head_and_half_of_them_at_a_time():
    cheap = {"a": [0.0001, 0.0002, 0.0003, 0.0004], "b": [0.7, 0.8, 0.9, 1.0]}
    now, _ = moment(cheap, allowed=5, after=2)
    assert chosen(decide(now).cut) == [("a", 0), ("a", 1), ("b", 0)]
    now, _ = moment(cheap, allowed=2, after=2, last=True)
    assert chosen(decide(now).cut) == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1), ("b", 2)]
    now, _ = moment({"a": [0.0], "b": [0.0]}, allowed=2, after=2, last=True)
    assert decide(now).cut == []


def test_fixed_sites_and_young_heads_are_left_alone():
    scores = {"a": [0.001, 0.5, 0.5, 0.5], "b": [0.001, 0.002, 0.5, 0.5]}
    young = frozenset({Unit(("b",), (0,))})
    now, _ = moment(scores, allowed=8, after=4, fixed=frozenset({"a"}), young=young)
    assert chosen(decide(now).cut) == [("b", 1)]


def test_saturated_sites_grow_where_there_is_room():
    scores = {"a": [0.5, 0.4, 0.6], "b": [0.001, 0.5, 0.5]}
    now, _ = moment(scores, allowed=8, after=8)
    decisions = decide(now)
    assert decisions.cut == []
    [(unit, kind, reason)] = decisions.grow
    assert (unit.site, kind) == ("a", "add")
    assert "removing the least of them (1) costs 0.4" in reason
    now, _ = moment({"a": [0.1, 0.1, 0.9]}, allowed=4, after=4)
    [(unit, kind, reason)] = decide(now).grow
    assert (unit.numbers, kind) == ((2,), "split")
    assert "has 82% of the influence" in reason


def test_sites_do_not_grow_beyond_their_width_or_the_budget_or_when_they_are_not_saturated():
    scores = {"a": [0.5, 0.4, 0.6]}
    assert decide(moment(scores, allowed=8, after=8, most=3)[0]).grow == []
    assert decide(moment(scores, allowed=3, after=8)[0]).grow == []
    assert decide(moment({"a": [0.5, 0.015, 0.6]}, allowed=8, after=8)[0]).grow == []


def test_a_head_moves_from_where_it_costs_nothing_to_where_all_matter():
    scores = {"a": [0.5, 0.4, 0.6], "b": [0.001, 0.5, 0.5]}
    now, _ = moment(scores, allowed=6, after=6)
    decisions = decide(now)
    assert chosen(decisions.cut) == [("b", 0)]
    assert "its room is needed" in decisions.cut[0][1]
    assert chosen(decisions.grow) == [("a", 2)]
    now, _ = moment({"a": [0.5, 0.001, 0.6], "b": [0.001, 0.5, 0.5]}, allowed=6, after=6)
    assert not decide(now).cut


def test_twins_and_dead_heads_begin_anew_if_they_cost_nothing():
    similar = {"a": torch.tensor([0.99, 0.99, 0.1]), "b": torch.tensor([0.99, 0.99, 0.1])}
    scores = {"a": [0.5, 0.4, 0.6], "b": [0.3, 0.4, 0.5], "c": [0.0, 0.5, 0.5]}
    prices = {"a": [0.5, 0.002, 0.6], "b": [0.3, 0.4, 0.5]}
    now, _ = moment(scores, prices, allowed=9, after=9, similar=similar, most=3)
    decisions = decide(now)
    assert chosen(decisions.anew) == [("a", 1), ("c", 0)]
    assert decisions.anew[0][1].startswith("another head says the same (CKA 0.99)")
    assert decisions.anew[1][1].startswith("it is dead; removing it costs 0 +- 0")


def test_groups_go_together():
    sites = {"a": Site("a", 0, 4, (0, 0, 1, 1))}
    values = {"a": torch.tensor([0.001, 0.002, 0.5, 0.5])}
    seen = HeadObservation(sites, torch.zeros(3), values, values, {"a": torch.zeros(4)})
    now = Moment(seen, units_of(sites), Limits(2, 2, {"a": 4}), NOISE, lambda units: Cost(0.1, 0.0))
    assert chosen(decide(now).cut) == [("a", 0, 1)]
