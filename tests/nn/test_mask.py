"""Masks: what each says, how they compose, and that every shortcut agrees with the dense square."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers import formula

from manyheads.nn import mask
from manyheads.nn.mask import Mask, as_mask, check

modest = settings(max_examples=60, derandomize=True, deadline=None)
sizes = st.integers(1, 23)
geometry = st.fixed_dictionaries(
    {"causal": st.booleans(), "window": st.none() | st.integers(1, 9), "chunk": st.none() | st.integers(1, 9)}
)


def full(m: Mask, queries: int, keys: int, batch: int = 1) -> torch.Tensor:
    return m.dense(queries, keys).expand(batch, 1, queries, keys)


def test_each_mask_by_hand():
    one, none = True, False
    assert mask.causal().dense(2, 3).tolist() == [[one, one, none], [one, one, one]]
    assert mask.causal().dense(3, 2).tolist() == [[none, none], [one, none], [one, one]]
    assert mask.window(2).dense(2, 4).tolist() == [[none, one, one, one], [none, none, one, one]]
    assert mask.chunk(2).dense(3, 3).tolist() == [[one, one, none], [one, one, none], [none, none, one]]
    # With more queries than keys the first queries stand before every key, at positions -2 and -1.
    assert mask.chunk(2).dense(4, 2).tolist() == [[none, none], [none, none], [one, one], [one, one]]
    lengths = torch.tensor([2, 0])
    assert mask.padding(lengths).dense(1, 3).tolist() == [[[[one, one, none]]], [[[none, none, none]]]]
    both = mask.padding(torch.tensor([2]), queries=torch.tensor([1])).dense(2, 3)
    assert both.tolist() == [[[[one, one, none], [none, none, none]]]]


@modest
@given(options=geometry, queries=sizes, keys=sizes)
def test_dense_is_the_formula(options, queries, keys):
    dense = full(Mask(**options), queries, keys)
    assert torch.equal(dense, formula.allowed(queries, keys, **options))


@modest
@given(options=geometry, queries=sizes, keys=sizes, data=st.data())
def test_dense_with_padding_is_the_formula(options, queries, keys, data):
    lengths = data.draw(st.lists(st.integers(0, keys + 2), min_size=3, max_size=3))
    query_lengths = data.draw(st.none() | st.lists(st.integers(0, queries + 2), min_size=3, max_size=3))
    padding = mask.padding(torch.tensor(lengths), query_lengths and torch.tensor(query_lengths))
    dense = full(Mask(**options) & padding, queries, keys, batch=3)
    expected = formula.allowed(queries, keys, lengths=lengths, query_lengths=query_lengths, **options)
    assert torch.equal(dense, expected.expand(3, 1, queries, keys))


@modest
@given(a=geometry, b=geometry, queries=sizes, keys=sizes, data=st.data())
def test_and_allows_what_both_allow(a, b, queries, keys, data):
    if a["chunk"] is not None and b["chunk"] is not None:
        b["chunk"] = a["chunk"]
    masks = []
    for options in (a, b):
        m = Mask(**options)
        if data.draw(st.booleans()):
            lengths = data.draw(st.lists(st.integers(0, keys), min_size=2, max_size=2))
            m = m & mask.padding(torch.tensor(lengths), data.draw(st.none() | st.just(torch.tensor([1, 5]))))
        if data.draw(st.booleans()):
            generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
            m = m & (torch.rand(2, 1, queries, keys, generator=generator) > 0.4)
        masks.append(m)
    left, right = masks
    expected = full(left, queries, keys, 2) & full(right, queries, keys, 2)
    assert torch.equal(full(left & right, queries, keys, 2), expected)
    assert torch.equal(full(right & left, queries, keys, 2), expected)


def test_and_adds_what_both_add():
    a, b = torch.randn(3, 5), torch.randn(2, 1, 1, 5)
    shown = torch.rand(3, 5) > 0.5
    joined = as_mask(a) & b & shown & mask.alibi(4)
    expected = (a + b + formula.alibi(4, 3, 5).float()).masked_fill(~shown, -torch.inf)
    torch.testing.assert_close(joined.dense(3, 5), expected)


def test_tensors_join_from_either_side():
    shown = torch.tensor([True, False, True])
    for joined in (shown & mask.causal(), mask.causal() & shown):
        assert joined.dense(2, 3).flatten(0, 2).tolist() == [[True, False, False], [True, False, True]]


@modest
@given(options=geometry, queries=sizes, keys=sizes, data=st.data())
def test_ranges_bound_what_a_block_of_queries_sees(options, queries, keys, data):
    start = data.draw(st.integers(0, queries - 1))
    rows = range(start, data.draw(st.integers(start + 1, queries)))
    m, offset = Mask(**options), keys - queries
    block = formula.allowed(queries, keys, **options)[0, 0, rows.start : rows.stop]
    low, high = m.key_range(rows, keys, offset)
    assert 0 <= low <= high <= keys
    assert not block[:, :low].any()
    assert not block[:, high:].any()
    low, high = m.open_range(rows, keys, offset)
    inside = block[:, max(0, low) : max(0, high)]
    assert inside.all()
    if low < high:  # and nothing that all of them see lies outside
        assert int(block.all(0).sum()) == inside.shape[1]
    else:
        assert not block.all(0).any()


@modest
@given(options=geometry, queries=sizes, keys=sizes, data=st.data())
def test_count_is_how_many_keys_each_query_sees(options, queries, keys, data):
    lengths = data.draw(st.none() | st.lists(st.integers(0, keys), min_size=3, max_size=3))
    query_lengths = data.draw(st.none() | st.lists(st.integers(0, queries), min_size=3, max_size=3))
    m = Mask(**options)
    if lengths is not None:
        m = m & mask.padding(torch.tensor(lengths), query_lengths and torch.tensor(query_lengths))
    elif query_lengths is not None:
        m = m & Mask(queries=torch.tensor(query_lengths))
    expected = formula.allowed(queries, keys, lengths=lengths, query_lengths=query_lengths, **options)
    count = m.count(queries, keys)
    assert torch.equal(count.expand(3, queries), expected.sum(-1)[:, 0].expand(3, queries))


@modest
@given(options=geometry, queries=sizes, keys=sizes)
def test_allows_agrees_at_every_pair_of_positions(options, queries, keys):
    i, j = formula.positions(queries, keys)
    found = Mask(**options).allows(i, j).expand(queries, keys)
    assert torch.equal(found, formula.allowed(queries, keys, **options)[0, 0])


@modest
@given(options=geometry, queries=sizes, keys=sizes, data=st.data())
def test_rectangle_is_a_part_of_dense(options, queries, keys, data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    shape = data.draw(
        st.sampled_from([(queries, keys), (2, 1, 1, keys), (4, queries, 1), (2, 4, queries, keys)])
    )
    m = Mask(**options) & torch.randn(shape, generator=generator) & mask.alibi(4)
    m = m & mask.padding(torch.tensor([keys // 2, keys]), queries=torch.tensor([queries, queries // 2]))
    ends = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in (queries, keys)]
    rows, columns = (range(*pair) for pair in ends)
    batch, heads = slice(1, 2), slice(1, 3)
    allowed, bias = m.rectangle(rows, columns, keys - queries, torch.device("cpu"), batch, heads)
    part = torch.where(allowed, bias, -torch.inf).expand(1, 2, len(rows), len(columns))
    whole = m.dense(queries, keys).expand(2, 4, queries, keys)
    assert torch.equal(part, whole[batch, heads, rows.start : rows.stop, columns.start : columns.stop])


@modest
@given(queries=sizes, keys=sizes, size=st.integers(1, 9), more=st.integers(0, 5), times=st.integers(1, 4))
def test_larger_windows_and_multiple_chunks_allow_more(queries, keys, size, more, times):
    small, large = mask.window(size).dense(queries, keys), mask.window(size + more).dense(queries, keys)
    assert not (small & ~large).any()
    small, large = mask.chunk(size).dense(queries, keys), mask.chunk(size * times).dense(queries, keys)
    assert not (small & ~large).any()


@modest
@given(options=geometry, queries=sizes, keys=sizes)
def test_geometry_only_depends_on_positions(options, queries, keys):
    """The last queries of a longer sequence see what a cache shows them."""
    m, rows = Mask(**options), min(queries, keys)
    assert torch.equal(m.dense(rows, keys), m.dense(keys, keys)[keys - rows :])


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 6, 8, 12, 16, 31])
def test_alibi_slopes(heads):
    dense = mask.alibi(heads).dense(3, 5).double()
    torch.testing.assert_close(dense, formula.alibi(heads, 3, 5), rtol=1e-6, atol=0)
    assert len(set(dense[:, 0, 0].tolist())) == heads


def test_of_sequence_keeps_the_rest():
    bias = torch.randn(3, 2, 5, 7)
    m = (
        mask.causal() & mask.padding(torch.tensor([7, 4, 2]), queries=torch.tensor([5, 3, 1])) & bias
    ).of_sequence(1, 3, 4)
    assert m.causal
    assert m.lengths is None
    assert m.queries is None
    assert torch.equal(m.tensors[0], bias[1:2, :, :3, :4])


def test_kinds():
    assert Mask().empty
    assert mask.causal().geometric
    assert not mask.causal().empty
    for m in (mask.padding(torch.tensor([1])), mask.alibi(2), as_mask(torch.tensor([True]))):
        assert not m.geometric


@pytest.mark.parametrize("make", [mask.window, mask.chunk, mask.alibi])
def test_sizes_that_cannot_be(make):
    name = "heads" if make is mask.alibi else make.__name__
    for size in (0, -3):
        with pytest.raises(ValueError, match=rf"{name}: expected at least 1, got {size}"):
            make(size)
    for size in (2.5, True, "3"):
        with pytest.raises(TypeError, match=rf"{name}: expected a whole number, got {size!r}"):
            make(size)


def test_lengths_that_cannot_be():
    for wrong, said in (
        (torch.tensor([1.5]), "torch.float32"),
        (torch.tensor([True]), "torch.bool"),
        ([3], "list"),
    ):
        with pytest.raises(TypeError, match=rf"lengths: expected an integer tensor .* got {said}"):
            mask.padding(wrong)
    with pytest.raises(ValueError, match=r"lengths: expected shape \(batch,\), got \(1, 2\)"):
        mask.padding(torch.tensor([[1, 2]]))
    with pytest.raises(ValueError, match=r"queries: expected shape \(batch,\), got \(\)"):
        mask.padding(torch.tensor([1]), queries=torch.tensor(1))


def test_masks_that_cannot_be():
    with pytest.raises(TypeError, match=r"mask: got a tensor of torch.int64; give a boolean mask"):
        as_mask(torch.tensor([1, 0]))
    with pytest.raises(TypeError, match="mask: expected a Mask or a tensor, got list"):
        as_mask([[True]])
    with pytest.raises(TypeError, match=r"the right side of &: got a tensor of torch.uint8"):
        mask.causal() & torch.tensor([1], dtype=torch.uint8)
    with pytest.raises(ValueError, match="different chunks cannot be joined: got 3 and 5"):
        mask.chunk(3) & mask.chunk(5)
    with pytest.raises(ValueError, match="both masks add an ALiBi bias"):
        mask.alibi(2) & mask.alibi(2)


def test_masks_that_do_not_fit():
    target = (2, 4, 5, 7)
    said = r"does not broadcast to \(batch, heads, queries, keys\) = \(2, 4, 5, 7\)"
    for shape in ((7, 5), (3, 1, 5, 7), (1, 2, 4, 5, 7), (2, 5, 6)):
        with pytest.raises(ValueError, match=said):
            check(as_mask(torch.zeros(shape)), *target)
    with pytest.raises(ValueError, match=said + r"; a padding mask of \(batch, keys\) is given as"):
        check(as_mask(torch.zeros(2, 7)), *target)
    with pytest.raises(ValueError, match=said + r"; a mask of \(batch, queries, keys\) is given as"):
        check(as_mask(torch.zeros(2, 5, 7)), *target)
    with pytest.raises(ValueError, match="mask lengths: got 3 lengths for a batch of 2"):
        check(mask.padding(torch.tensor([1, 2, 3])), *target)
    with pytest.raises(ValueError, match="mask queries: got 1 lengths for a batch of 2"):
        check(mask.padding(torch.tensor([1, 2]), queries=torch.tensor([1])), *target)
    with pytest.raises(ValueError, match="alibi was made for 3 heads, attention has 4"):
        check(mask.alibi(3), *target)
    check(as_mask(torch.zeros(4, 1, 7)) & mask.padding(torch.tensor([1, 2])) & mask.alibi(4), *target)
