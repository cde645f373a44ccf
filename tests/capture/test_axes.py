"""What the axes are after a reshape: never an error, never a guess that moves an element."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads.capture.axes import canonical, regroup, restore

ROLES = st.sampled_from(
    [tuple("bhqk"), tuple("nqk"), tuple("bhgqk"), tuple("bqhk"), tuple("qnk"), tuple("bbhqk")]
)


@settings(max_examples=300, deadline=None)
@given(roles=ROLES, data=st.data())
def test_regroup_names_every_axis_or_gives_up(roles: tuple[str, ...], data: st.DataObject) -> None:
    before = tuple(data.draw(st.lists(st.integers(1, 4), min_size=len(roles), max_size=len(roles))))
    rest = math.prod(before)
    after: list[int] = []
    while rest > 1 or data.draw(st.booleans()):
        size = data.draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
        after.append(size)
        rest //= size
    named = regroup(roles, before, tuple(after))
    assert named is None or len(named) == len(after)
    for role in "qk":  # whoever is still there has kept its size
        if named is not None and named.count(role) == 1 and "n" not in roles:
            assert after[named.index(role)] == before[roles.index(role)]


@settings(max_examples=100, deadline=None)
@given(batch=st.integers(1, 3), heads=st.integers(1, 3), order=st.permutations("bhqd"))
def test_canonical_and_back(batch: int, heads: int, order: list[str]) -> None:
    sizes = {"b": batch, "h": heads, "q": 5, "d": 7}
    x = torch.arange(batch * heads * 35).view(batch, heads, 5, 7)
    mixed = x.permute(*("bhqd".index(role) for role in order))
    roles = tuple(order)
    assert mixed.shape == tuple(sizes[role] for role in order)
    assert torch.equal(canonical(mixed, roles, 1), x)
    assert torch.equal(restore(x, roles, mixed.shape), mixed)
    merged = x.flatten(0, 1)
    assert torch.equal(canonical(merged, ("n", "q", "d"), heads), x)
    assert torch.equal(restore(x, ("n", "q", "d"), merged.shape), merged)
    assert regroup(tuple("bhqd"), tuple(x.shape), tuple(merged.shape)) in (
        ("n", "q", "d"), ("b", "q", "d"), ("h", "q", "d"),
    )  # fmt: skip
