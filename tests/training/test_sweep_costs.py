"""What a run costs, against plain counts."""

import pytest
import torch

import manyheads as mh
from manyheads.tasks.language import Language
from manyheads.tasks.translation import Translation
from manyheads.training.options import Options
from manyheads.training.sweep_costs import cache_bytes, flops_per_step, peak_memory

ONE = Options(batch_tokens=10**6)  # all examples in one batch


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("a few words, and a few more of them.\n" * 20)
    return str(path)


def by_hand(task, batch, length):
    """Operations of a step of a `Decoder`: a matrix product forward, and two of its size backward."""
    heads, kv_heads = task.heads, task.kv_heads or task.heads
    d_key, d_value = task.d_key or task.d_model // heads, task.d_value or task.d_model // heads
    d_hidden, tokens = task.d_hidden or 4 * task.d_model, batch * length
    width = heads * (d_key + d_value) + kv_heads * (d_key + d_value) + 2 * d_hidden
    vocabulary = task.describe()["options"]["vocabulary"]
    products = 2 * tokens * task.d_model * (task.layers * width + vocabulary)
    pairs = 2 * batch * heads * length**2
    wide = max(d_key, d_value)  # the fused kernel pads the narrower one
    attention = task.layers * pairs * (2 * wide + 5 * wide)  # scores are computed again in the backward pass
    return 3 * products + attention


@pytest.mark.parametrize(
    "sizes",
    [
        {"heads": 3},
        {"heads": 1, "positions": "sinusoidal"},
        {"heads": 6, "kv_heads": 2},
        {"heads": 3, "d_key": 5, "d_value": 7},
        {"heads": 3, "kernel": "tiled"},
    ],
)
def test_operations_are_those_counted_by_hand(text, sizes):
    task = Language(context=13, d_model=12, layers=2, **sizes)
    data = task.open(text)
    batch, length = len(data.train), data.train.sizes[0]
    assert flops_per_step(task, data, ONE) == by_hand(task, batch, length)


def test_the_reference_counts_all_but_the_scores_that_the_fused_kernel_computes_again(text):
    plain, fused = (
        Language(context=13, d_model=12, heads=3, layers=2, kernel=k) for k in ("reference", "auto")
    )
    data, _ = plain.open(text), fused.open(text)
    again = 2 * 2 * len(data.train) * 3 * data.train.sizes[0] ** 2 * 4
    assert flops_per_step(fused, data, ONE) == flops_per_step(plain, data, ONE) + again


def test_parts_of_a_step_add_up_to_it_and_nothing_is_drawn(text):
    task = Language(context=13, d_model=12, heads=3, layers=2, dropout=0.1)
    data = task.open(text)
    before = torch.get_rng_state()
    whole = flops_per_step(task, data, ONE)
    assert torch.equal(torch.get_rng_state(), before)
    assert flops_per_step(task, data, Options(batch_tokens=10**6, accumulate=3)) == whole


@pytest.mark.parametrize("sizes", [{}, {"kv_heads": 1}, {"d_key": 5, "d_value": 3}])
def test_cache_bytes_are_those_of_a_cache(sizes):
    decoder = mh.Decoder(12, heads=2, layers=3, vocabulary=11, **sizes)
    cache = decoder.new_cache(max_length=7)
    with torch.no_grad():
        decoder(torch.randint(11, (1, 7)), cache=cache)
    held = sum(tensor.numel() * 4 for block in cache.blocks for tensor in block.held())
    assert cache_bytes(decoder) == held / 7
    whole = mh.Seq2Seq(12, heads=2, layers=5, decoder_layers=3, vocabulary=11, **sizes)
    assert cache_bytes(whole) == cache_bytes(decoder)


def test_translation_is_counted_too():
    task = Translation(d_model=12, heads=3, layers=1, vocabulary=300)
    data = task.open(None)
    few = Options(batch_tokens=300)
    wide = Translation(d_model=12, heads=1, layers=1, vocabulary=300)
    wide.open(None)
    assert flops_per_step(task, data, few) == flops_per_step(wide, data, few) > 0


def test_peak_memory_is_of_the_context_alone():
    torch.ones(2**26).sum()
    with peak_memory() as peak:
        low = peak()
        torch.ones(2**25).sum()
    if low is None:
        pytest.skip("the system does not say")
    assert 2**26 <= peak() - low < 2**28
