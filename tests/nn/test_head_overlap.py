"""The overlap of heads against the formula with materialised weights: values, gradients, memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from manyheads.nn import tiles
from manyheads.nn.head_overlap import overlap, overlap_of_scores
from manyheads.nn.mask import Mask, alibi
from manyheads.nn.reference import weights

BATCH, HEADS, KV_HEADS, QUERIES, KEYS, WIDTH = 2, 6, 3, 11, 13, 5


def inputs(queries=QUERIES, keys=KEYS, kv_heads=KV_HEADS, seed=0):
    torch.manual_seed(seed)
    q = torch.randn(BATCH, HEADS, queries, WIDTH, dtype=torch.float64, requires_grad=True)
    k = torch.randn(BATCH, kv_heads, keys, WIDTH, dtype=torch.float64, requires_grad=True)
    return q, k


def by_pairs(p):
    """The mean cosine over pairs of heads (batch, queries), from weights (batch, heads, queries, keys)."""
    pairs = [(a, b) for b in range(p.shape[1]) for a in range(b)]
    cosines = [torch.nn.functional.cosine_similarity(p[:, a], p[:, b], dim=-1) for a, b in pairs]
    return torch.stack(cosines).mean(0)


def bias(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


MASKS = {
    "none": Mask(),
    "causal": Mask(causal=True),
    "window": Mask(window=3),
    "chunk": Mask(causal=True, chunk=4),
    "lengths": Mask(lengths=torch.tensor([13, 7])),
    "alibi": alibi(HEADS),
    "heads": Mask(tensors=(bias(1, HEADS, 1, KEYS) > -0.5,)),
    "dense": Mask(causal=True, tensors=(bias(BATCH, 1, QUERIES, KEYS),)),
    "minus 1e9": Mask(tensors=((bias(BATCH, 1, 1, KEYS) > 0.3) * -1e9,)),
}


@pytest.mark.parametrize("small", [False, True], ids=["one tile", "many tiles"])
@pytest.mark.parametrize("kv_heads", [1, KV_HEADS, HEADS])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_values_and_gradients_are_those_of_the_formula(mask, kv_heads, small, monkeypatch):
    if small:
        monkeypatch.setattr(tiles, "TILE_ELEMENTS", 200)
    q, k = inputs(kv_heads=kv_heads)
    values, counted = overlap(q, k, mask, 0.7)
    wanted = by_pairs(weights(q, k, mask, 0.7, KEYS - QUERIES))
    assert counted.any()
    torch.testing.assert_close(values[counted], wanted[counted])
    direction = torch.randn_like(values)
    ours = torch.autograd.grad((values * direction).sum(), [q, k])
    theirs = torch.autograd.grad((wanted * direction * counted).sum(), [q, k])
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [(1, HEADS, QUERIES, KEYS), (HEADS, 1, KEYS), (BATCH, 1, QUERIES, 1)])
def test_a_learned_bias_gets_its_gradient(shape, monkeypatch):
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 400)
    q, k = inputs()
    learned = bias(*shape).requires_grad_()
    mask = Mask(causal=True, tensors=(learned, bias(KEYS) > -1))
    values, counted = overlap(q, k, mask, 0.4)
    wanted = by_pairs(weights(q, k, mask, 0.4, KEYS - QUERIES))
    direction = torch.randn_like(values)
    ours = torch.autograd.grad((values * direction).sum(), [learned, q, k])
    theirs = torch.autograd.grad((wanted * direction * counted).sum(), [learned, q, k])
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_torch_finds_the_same_gradients_by_small_steps():
    q, k = inputs(queries=3, keys=5)
    learned = bias(1, HEADS, 3, 5).requires_grad_()

    def mean(q, k, learned):
        return overlap(q, k, Mask(causal=True, tensors=(learned,)), 0.5)[0]

    assert torch.autograd.gradcheck(mean, (q, k, learned))


def test_scores_of_a_model_give_the_same():
    q, k = inputs()
    mask = Mask(causal=True, lengths=torch.tensor([13, 7]))
    scores = 0.7 * q @ k.repeat_interleave(2, 1).mT
    allowed, _ = mask.rectangle(range(QUERIES), range(KEYS), KEYS - QUERIES, q.device)
    (ours, counted), (theirs, of_scores) = (
        overlap(q, k, mask, 0.7),
        overlap_of_scores(scores.masked_fill(~allowed, -torch.inf)),
    )
    assert torch.equal(counted, of_scores)
    torch.testing.assert_close(ours, theirs)
    gradients = [torch.autograd.grad(x.square().sum(), [q, k], retain_graph=True) for x in (ours, theirs)]
    torch.testing.assert_close(*gradients)


def test_equal_maps_overlap_fully_and_disjoint_ones_not_at_all():
    q = torch.eye(4).view(1, 4, 1, 4) * 200.0  # each head looks at another key
    k = torch.eye(4).view(1, 1, 4, 4)
    assert overlap(q, k, Mask(), 1.0)[0].item() == pytest.approx(0.0, abs=1e-6)
    assert overlap(q[:, :1].expand(1, 4, 1, 4), k, Mask(), 1.0)[0].item() == pytest.approx(1.0, abs=1e-6)


def test_queries_without_a_choice_do_not_count():
    q, k = inputs(queries=5, keys=5)
    hidden = Mask(causal=True, queries=torch.tensor([5, 3]))
    values, counted = overlap(q, k, hidden, 1.0)
    assert counted.tolist() == [[False, True, True, True, True], [False, True, True, False, False]]
    assert not values[~counted].any()
    assert not torch.autograd.grad(values.sum(), q)[0][1, :, 3:].any()


@settings(max_examples=25, deadline=None)
@given(
    heads=st.sampled_from([2, 3, 5]),
    queries=st.integers(1, 7),
    more=st.integers(0, 4),
    causal=st.booleans(),
    sharp=st.floats(0.1, 30),
    elements=st.integers(1, 60),
)
def test_any_size_is_between_zero_and_one(heads, queries, more, causal, sharp, elements):
    torch.manual_seed(heads * queries)
    q = sharp * torch.randn(2, heads, queries, 3)
    k = torch.randn(2, heads, queries + more, 3) + 100.0  # a shift of all keys changes nothing
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "TILE_ELEMENTS", elements)
        values, counted = overlap(q, k, Mask(causal=causal), 0.5)
    wanted = by_pairs(weights(q.double(), k.double(), Mask(causal=causal), 0.5, more))
    torch.testing.assert_close(values[counted].double(), wanted[counted], rtol=1e-3, atol=1e-3)
    assert values.min() >= 0
    assert values.max() <= 1


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any function gives."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


def test_nothing_of_the_size_length_times_length_is_held(monkeypatch):
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 2**13)
    monkeypatch.setattr(tiles, "_thread_memory", type(tiles._thread_memory)())
    sizes = {}
    for length in (512, 1024):
        q = torch.randn(1, 2, length, 7, requires_grad=True)
        k = torch.randn(1, 1, length, 7, requires_grad=True)
        with Largest() as largest:
            overlap(q, k, Mask(causal=True), 0.4)[0].sum().backward()
        sizes[length] = largest.elements
    assert sizes[512] <= 2**13  # a tile
    assert sizes[1024] <= 2 * 7 * 1024  # the queries themselves: the scores would be 2 * 1024 * 1024
