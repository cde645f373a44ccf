"""The cache: a prompt and steps give what one full pass gives; out of order or past its size it refuses."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.helpers import formula

from manyheads.nn import mask
from manyheads.nn.cache import KVCache
from manyheads.nn.multihead import MultiHeadAttention
from manyheads.nn.positions import Rotary


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(5)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def module(**options):
    return MultiHeadAttention(**({"d_model": 32, "heads": 4, "dtype": torch.float64} | options))


def tokens(length, batch=2, width=32):
    return torch.randn(batch, length, width, dtype=torch.float64)


VARIANTS = {
    "plain": {},
    "grouped": {"kv_heads": 2},
    "one key head": {"kv_heads": 1},
    "rotary": {"rotary": Rotary(8)},
    "rotary, interleaved, in part": {"rotary": Rotary(4, interleaved=True), "kv_heads": 2},
    "window": {"window": 4},
    "chunk": {"chunk": 5},
    "normalised": {"qk_norm": True},
    "wide values": {"d_value": 11, "d_key": 6},
    "everything": {
        "rotary": Rotary(4),
        "kv_heads": 2,
        "window": 6,
        "d_key": 6,
        "d_value": 5,
        "qk_norm": True,
    },
}
SPLITS = {"prompt and steps": [7, 1, 1, 1, 1], "steps": [1] * 11, "pieces": [2, 5, 3, 1], "at once": [11]}


@pytest.mark.parametrize("kernel", ["auto", "reference", "fused", "tiled"])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_pieces_give_what_one_pass_gives(variant, split, kernel):
    mha, x, cache = module(kernel=kernel, **VARIANTS[variant]), tokens(11), KVCache(13)
    pieces = [mha(piece, causal=True, cache=cache) for piece in x.split(SPLITS[split], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), mha(x, causal=True), rtol=1e-10, atol=1e-10)
    assert cache.length == 11


def test_padding_and_weights_and_statistics_through_the_cache():
    mha, x, cache = module(kv_heads=2), tokens(9), KVCache(9)
    hidden = mask.padding(torch.tensor([9, 3]))
    whole, weights, seen = mha(x, mask=hidden, causal=True, return_weights=True, return_statistics="full")
    mha(x[:, :6], causal=True, mask=mask.padding(torch.tensor([6, 3])), cache=cache)
    last, last_weights, last_seen = mha(
        x[:, 6:], mask=hidden, causal=True, cache=cache, return_weights=True, return_statistics="full"
    )
    torch.testing.assert_close(last, whole[:, 6:], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(last_weights, weights[:, :, 6:], rtol=1e-10, atol=1e-10)
    for name in ("entropy", "self", "previous", "distance"):
        torch.testing.assert_close(last_seen[name], seen[name][:, :, 6:], rtol=1e-9, atol=1e-9)


def test_remember_projects_a_memory_once():
    mha = module(d_context=17, kv_heads=2)
    memory, x = tokens(7, width=17), tokens(5)
    cache = mha.remember(memory)
    projected = []
    mha.key.register_forward_hook(lambda *_: projected.append(1))
    for step in range(5):
        out = mha(x[:, step : step + 1], cache=cache)
        expected, _ = formula.multihead(mha, x[:, step : step + 1], memory, memory, formula.allowed(1, 7))
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    assert not projected
    assert cache.length == 7
    hidden = mask.padding(torch.tensor([3, 7]))
    torch.testing.assert_close(mha(x, cache=cache, mask=hidden), mha(x, memory, mask=hidden))


def test_remember_with_values_of_their_own():
    mha, key, value, x = module(), tokens(7), tokens(7), tokens(3)
    torch.testing.assert_close(
        mha(x, cache=mha.remember(key, value)), mha(x, key, value), rtol=1e-10, atol=1e-10
    )


def test_remember_has_no_place_for_rotary_positions():
    with pytest.raises(ValueError, match="rotary: it rotates by positions in one sequence"):
        module(rotary=Rotary(8)).remember(tokens(7))


def test_append_returns_everything_in_order_as_views():
    cache = KVCache(5)
    k, v = torch.randn(2, 3, 4, 7), torch.randn(2, 3, 4, 2)
    keys, values = cache.append(k[:, :, :3], v[:, :, :3])
    more, _ = cache.append(k[:, :, 3:], v[:, :, 3:])
    assert torch.equal(more, k)
    assert torch.equal(cache.held()[1], v)
    assert keys.data_ptr() == more.data_ptr()
    assert torch.equal(values, v[:, :, :3])
    assert (cache.length, cache.max_length) == (4, 5)


def test_truncate_goes_back():
    mha, x, cache = module(rotary=Rotary(8)), tokens(9), KVCache(9)
    expected = mha(x, causal=True)
    mha(x[:, :6], causal=True, cache=cache)
    cache.truncate(4)
    torch.testing.assert_close(
        mha(x[:, 4:], causal=True, cache=cache), expected[:, 4:], rtol=1e-10, atol=1e-10
    )
    for length in (-1, 10):
        with pytest.raises(ValueError, match=f"length: expected 0 to 9, what the cache holds, got {length}"):
            cache.truncate(length)


def test_reorder_lets_rows_continue_others():
    mha, x, cache = module(), tokens(6, batch=3), KVCache(6)
    rows = torch.tensor([2, 0, 2])
    mha(x[:, :4], causal=True, cache=cache)
    cache.reorder(rows)
    expected = mha(torch.cat((x[rows, :4], x[:, 4:]), dim=1), causal=True)[:, 4:]
    torch.testing.assert_close(mha(x[:, 4:], causal=True, cache=cache), expected, rtol=1e-10, atol=1e-10)


def test_reset_forgets_sizes_and_owner():
    cache = KVCache(5)
    module()(tokens(3), cache=cache)
    cache.reset()
    assert (cache.length, cache.max_length) == (0, 5)
    other, x = module(heads=8), tokens(4, batch=3)
    torch.testing.assert_close(other(x, cache=cache), other(x))
    fixed = other.remember(x)
    fixed.reset()
    torch.testing.assert_close(other(x, cache=fixed), other(x))


def test_a_module_with_a_used_cache_still_copies():
    mha, cache = module(), KVCache(5)
    mha(tokens(3), cache=cache)
    copy.deepcopy(mha)


@pytest.mark.parametrize("size", [0, -1, 2.5, None])
def test_sizes_that_cannot_be(size):
    with pytest.raises(ValueError, match=f"max_length: expected a whole number of at least 1, got {size!r}"):
        KVCache(size)


def test_past_its_size():
    mha, cache = module(), KVCache(5)
    mha(tokens(4), cache=cache)
    with pytest.raises(ValueError, match="cache: 4 tokens held and 2 more make 6, past its max_length of 5"):
        mha(tokens(2), cache=cache)
    assert cache.length == 4
    mha(tokens(1), cache=cache)


def test_another_module_or_batch_or_dtype():
    mha, cache = module(), KVCache(5)
    mha(tokens(2), cache=cache)
    with pytest.raises(ValueError, match="cache: it holds the keys of another attention module"):
        module()(tokens(1), cache=cache)
    with pytest.raises(ValueError, match=r"cache: it holds keys .*\(2, 4, 1, 8\), got \(3, 4, 1, 8\)"):
        mha(tokens(1, batch=3), cache=cache)
    with pytest.raises(ValueError, match=r"cache: .* got \(2, 4, 1, 8\) of torch.float32"):
        mha.float()(tokens(1).float(), cache=cache)
    assert cache.length == 2


def test_a_refused_append_leaves_the_cache_as_it_was():
    cache = KVCache(5)
    k, v = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
    cache.append(k, v)
    with pytest.raises(ValueError, match=r"cache: it holds values .* got \(1, 2, 2, 4\)"):
        cache.append(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 2, 4))
    keys, values = cache.held()
    assert torch.equal(keys, k)
    assert torch.equal(values, v)
    cache.append(k[:, :, :1], v[:, :, :1])
    assert cache.length == 4


def test_used_out_of_order():
    mha = module()
    with pytest.raises(ValueError, match="cache: it is empty; run the prompt"):
        KVCache(5).held()
    fixed = mha.remember(tokens(3))
    with pytest.raises(ValueError, match="key: the cache already holds the memory"):
        mha(tokens(1), tokens(3), cache=fixed)
    with pytest.raises(ValueError, match=r"cache: it was made by remember\(\) and takes no further keys"):
        fixed.append(torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8))
    with pytest.raises(ValueError, match="key: expected the batch of query, 3, got 2"):
        mha(tokens(1, batch=3), cache=fixed)


def test_gradients_are_those_of_one_whole_pass():
    mha, x = module(kv_heads=2), tokens(7)
    with torch.enable_grad():
        mha(x, causal=True).square().sum().backward()
        whole = {name: p.grad.clone() for name, p in mha.named_parameters()}
        mha.zero_grad()
        cache = KVCache(7)
        parts = [mha(x[:, a:b], causal=True, cache=cache) for a, b in ((0, 3), (3, 4), (4, 7))]
        torch.cat(parts, 1).square().sum().backward()
    for name, p in mha.named_parameters():
        torch.testing.assert_close(p.grad, whole[name])


def test_a_cache_goes_on_without_gradients():
    """What autograd keeps is not written over."""
    mha, x = module(), tokens(7)
    cache = KVCache(7)
    with torch.enable_grad():
        first = mha(x[:, :3], causal=True, cache=cache)
    cache.truncate(2)
    rest = mha(x[:, 2:], causal=True, cache=cache)
    torch.testing.assert_close(rest, mha(x, causal=True)[:, 2:])
    with torch.enable_grad():
        first.sum().backward()
        frozen = module().requires_grad_(False)
        frozen(tokens(2), cache=KVCache(5))


def test_a_copy_serves_a_copy_of_the_module():
    mha, x, cache = module(), tokens(5), KVCache(9)
    mha(x[:, :4], causal=True, cache=cache)
    twin, held = copy.deepcopy(mha), copy.deepcopy(cache)
    expected = mha(x, causal=True)[:, 4:]
    torch.testing.assert_close(twin(x[:, 4:], causal=True, cache=held), expected)
    assert (cache.length, held.length) == (4, 5)
    with pytest.raises(ValueError, match="keys of another attention module"):
        mha(x[:, 4:], causal=True, cache=held)
