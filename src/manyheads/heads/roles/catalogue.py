"""The roles. To add one, write a function here: it gets some rows of attention and returns its cases.

A role's decorator says what the model reads meanwhile, when a head may be called so, and what it is held
against. See docs/roles.md.
"""

from __future__ import annotations

import torch

from manyheads.heads.roles.attention_rows import Rows
from manyheads.heads.roles.role import (
    Cases,
    above_chance,
    at_least,
    points_more,
    role,
    times_at_least,
    times_at_most,
)

# Offsets that a positional head may have.
OFFSETS = range(-5, 6)
_NAMED = {-1: "previous", 0: "self", 1: "next"}


@role("positional", on="text", claims={"{variant}": at_least(0.9)}, against="a random visible key")
def positional(rows: Rows) -> dict[str, Cases]:
    """For 9 of 10 queries the largest weight is always at the same distance: the token before, after, ..."""
    cases = {}
    for offset in OFFSETS:
        target = rows.position + offset
        cases[_NAMED.get(offset, f"offset {offset:+d}")] = Cases(
            rows.largest == target, 1 / rows.seen, rows.counted & rows.may(target), rows.at(target)
        )
    return cases


@role(
    "reach",
    on="text",
    claims={"local": times_at_most(0.5), "global": times_at_least(1.0)},
    against="a uniform reader",
)
def reach(rows: Rows) -> Cases:
    """It looks less than half as far as a uniform reader (local), or as far as one and farther (global)."""
    distance = (rows.position[:, None] - rows.keys).abs()
    return Cases(rows.mean(distance), rows.uniform(distance), rows.counted)


@role("sink", on="text", claims=above_chance(0.5), against="a uniform reader", cross=True)
def sink(rows: Rows) -> Cases:
    """It leaves most of its attention on the first token, on special tokens, or on a learned sink."""
    resting = (rows.keys == 0)[None, None, None]
    special = rows.of_keys(rows.facts.special)
    if special is not None:
        resting = resting | special
    score = rows.mean(resting)
    if rows.sinks is not None:
        score = score + rows.sinks.sum(-1)
    return Cases(score, rows.uniform(resting), rows.counted)


@role("broad", on="text", claims=times_at_least(0.9), against="the largest entropy there is", cross=True)
def broad(rows: Rows) -> Cases:
    """Its entropy is at least nine tenths of that of a uniform reader: it averages over all it sees."""
    entropy = -torch.special.xlogy(rows.weights, rows.weights).sum(-1)
    places = rows.seen
    if rows.sinks is not None:
        entropy = entropy - torch.special.xlogy(rows.sinks, rows.sinks).sum(-1)
        places = places + rows.sinks.shape[-1]
    return Cases(entropy, places.clamp(min=1).to(entropy.dtype).log(), rows.counted)


@role(
    "rare",
    on="text",
    claims=above_chance(0.5),
    against="a random visible key",
    cross=True,
    needs=["tokens"],
)
def rare(rows: Rows) -> Cases:
    """Its largest weight is on the rarest token that the query may see."""
    assert rows.facts.frequencies is not None
    assert rows.tokens is not None
    frequency = rows.facts.frequencies.to(rows.tokens.device)[rows.tokens]  # (batch, length)
    special = torch.isin(rows.tokens, rows.facts.special.to(rows.tokens.device))
    frequency = frequency.masked_fill(special, torch.inf)
    part = frequency[:, None, None, rows.start : rows.start + rows.weights.shape[-1]]
    visible = torch.where(rows.allowed, part, torch.inf)  # (batch, 1, rows, keys)
    rarest = visible.amin(-1)  # (batch, 1, rows)
    several = (visible == rarest.unsqueeze(-1)) & rows.allowed
    frequency_there = frequency[:, None].expand(-1, rows.weights.shape[1], -1)
    at_largest = frequency_there.gather(-1, rows.largest.clamp(min=0))
    hit = (at_largest == rarest) & (rows.largest >= 0)
    return Cases(hit, several.sum(-1) / rows.seen, rows.counted & rarest.isfinite())


@role(
    "separator",
    on="text",
    claims=above_chance(0.5),
    against="a uniform reader",
    cross=True,
    needs=["tokens", "tokenizer"],
)
def separator(rows: Rows) -> Cases:
    """Most of its attention is on punctuation and on special tokens behind the first."""
    assert rows.facts.separators is not None
    stops = rows.of_keys(rows.facts.separators)
    assert stops is not None
    stops = stops & (rows.keys > 0)
    return Cases(rows.mean(stops), rows.uniform(stops), rows.counted & (rows.allowed & stops).any(-1))


@role(
    "no-op",
    on="text",
    claims=times_at_most(0.5),
    against="a uniform reader",
    cross=True,
    needs=["values"],
)
def no_op(rows: Rows) -> Cases:
    """The values it reads are less than half as long as what a uniform reader gets: it does nothing much."""
    assert rows.value_norm is not None
    norm = rows.value_norm.unsqueeze(2)
    return Cases(rows.mean(norm), rows.uniform(norm), rows.counted)


@role("duplicate", on="repeated", claims=above_chance(0.3), against="another token of the first copy")
def duplicate(rows: Rows) -> Cases:
    """In random tokens that come twice, it attends to the first occurrence of the same token."""
    return _in_first_copy(rows, "duplicate")


@role("induction", on="repeated", claims=above_chance(0.3), against="another token of the first copy")
def induction(rows: Rows) -> Cases:
    """In random tokens that come twice, it attends to the token that came next the first time."""
    return _in_first_copy(rows, "induction")


def _in_first_copy(rows: Rows, name: str) -> Cases:
    """The weight on a role's target in the first copy, against the mean weight on the other tokens there."""
    same, after = rows.target("duplicate"), rows.target("induction")
    copy, target = rows.facts.copy, rows.target(name)
    others = rows.mean((rows.keys >= copy.start) & (rows.keys < copy.stop)) - rows.at(same) - rows.at(after)
    number = len(copy) - 1 - (after >= 0).long()
    return Cases(rows.at(target), others / number, rows.counted & (target >= 0) & rows.may(target))


@role(
    "copying",
    on="repeated",
    claims=above_chance(0.5),
    against="another token",
    needs=["lens", "tokens", "values"],
)
def copying(rows: Rows) -> Cases:
    """What it writes raises the logit of the token it attends to: more than those of 3 in 4 others."""
    assert rows.facts.lens is not None
    assert rows.tokens is not None
    assert rows.output is not None
    copy = rows.facts.copy
    ids = rows.tokens[:, copy.start : copy.stop]  # (batch, n), all different
    logits = rows.facts.lens.logits(rows.site.name, rows.output, rows.heads, ids)  # (batch, heads, rows, n)
    index = (rows.largest - copy.start) % len(copy)  # the same tokens stand in both copies
    inside = (rows.largest >= copy.start) & (rows.largest < copy.stop + len(copy))
    attended_logit = logits.gather(-1, index.unsqueeze(-1))
    less = (logits < attended_logit).sum(-1) + 0.5 * ((logits == attended_logit).sum(-1) - 1)
    return Cases(
        less / (len(copy) - 1),
        torch.tensor(0.5, device=logits.device),
        rows.counted & inside & (rows.position >= copy.stop),
    )


@role("retrieval", on="planted", claims=above_chance(0.5), against="a random visible key")
def retrieval(rows: Rows) -> Cases:
    """When a key planted in a long text comes again, its largest weight is on what followed the key there."""
    target = rows.target("retrieval")
    return Cases(
        rows.largest == target,
        1 / rows.seen,
        rows.counted & (target >= 0) & rows.may(target),
        rows.at(target),
    )


@role(
    "syntactic",
    on="treebank",
    claims={"syntactic: {variant}": points_more(0.1)},
    against="the best fixed offset",
    unit="pairs",
)
def syntactic(rows: Rows) -> dict[str, Cases]:
    """From a word its largest weight is on the word of a dependency, 10 points over the best fixed offset."""
    words = rows.facts.words
    assert words is not None
    cases = {}
    for relation, targets in words.targets.items():
        target = targets.unsqueeze(1)  # (batch, 1, words)
        offset = words.offset(relation, rows.site.kind)
        cases[relation] = Cases(
            rows.largest == target,
            target - rows.position == offset,
            rows.counted & (target >= 0) & rows.may(target),
            rows.at(target),
        )
    return cases
