"""A cache whose heads forget equals the same model under a mask that hides those keys from those heads.

The reference is a plain softmax with all weights in memory, registered as an attention function of its own.
"""

import copy
import json
import math

import pytest
import torch
from tests.helpers.models import CACHE_VOCABULARY, cached_llama, gpt2_config, random_ids, t5_config
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5ForConditionalGeneration,
)
from transformers.masking_utils import sdpa_mask

import manyheads as mh

FIRST, WINDOW = 3, 5


def dense(
    batch_mask: Tensor | None, windows: list[int | None], first: int, batch: int, length: int
) -> Tensor:
    """Who sees whom, (batch, kv_heads, length, length), by the definition, with loops."""
    real = torch.ones(batch, length, dtype=torch.bool) if batch_mask is None else batch_mask.bool()
    seen = torch.zeros(batch, len(windows), length, length, dtype=torch.bool)
    for b in range(batch):
        start = int(real[b].int().argmax())
        for head, window in enumerate(windows):
            for i in range(length):
                for j in range(i + 1):
                    kept = window is None or j > i - window or start <= j < start + first
                    seen[b, head, i, j] = bool(real[b, j]) and kept
    return seen


class Reference:
    """The plan and the padding under which `softmax_attention` computes."""

    plan: mh.CachePlan
    padding: Tensor | None = None


def softmax_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **_):
    batch, heads, length, width = query.shape
    group = heads // key.shape[1]
    windows = Reference.plan.windows(module.layer_idx)
    padding = Reference.padding
    if padding is not None:
        padding = padding[:, :length].repeat_interleave(batch // len(padding), 0)
        padding = nn.functional.pad(padding, (0, length - padding.shape[1]), value=1)
    seen = dense(padding, windows, Reference.plan.first, batch, length).repeat_interleave(group, 1)
    k, v = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = (query @ k.transpose(2, 3)) * (scaling or 1 / math.sqrt(width))
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    return (weights @ v).transpose(1, 2).contiguous(), None


AttentionInterface.register("headwise reference", softmax_attention)
AttentionMaskInterface.register("headwise reference", sdpa_mask)


def qwen3() -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=20, intermediate_size=31, num_attention_heads=4, num_key_value_heads=2, head_dim=10,
        vocab_size=CACHE_VOCABULARY, num_hidden_layers=2, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).double().eval()


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = gpt2_config(n_embd=21, n_head=3, n_layer=2, vocab_size=CACHE_VOCABULARY, initializer_range=0.3)
    return GPT2LMHeadModel(config).double().eval()


MODELS = {"llama": cached_llama, "qwen3": qwen3, "gpt2": gpt2}


def reference(model: nn.Module, plan: mh.CachePlan, ids: Tensor, padding: Tensor | None = None) -> Tensor:
    """The logits of the same model under the dense mask."""
    Reference.plan, Reference.padding = plan, padding
    before = model.config._attn_implementation
    model.set_attn_implementation("headwise reference")
    positions = None if padding is None else (padding.cumsum(1) - 1).clamp(min=0)
    try:
        with torch.no_grad():
            return model(ids, attention_mask=padding, position_ids=positions, use_cache=False).logits
    finally:
        model.set_attn_implementation(before)


def plan_of(model: nn.Module, window: int = WINDOW, first: int = FIRST) -> mh.CachePlan:
    return mh.CachePlan.of(model, {0: [1], 1: [0, 1]}, first=first, window=window)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunks", [(29,), (2, 11, 1, 1, 1, 9, 1, 3), (1,) * 29])
def test_forgetting_equals_a_dense_mask_in_any_chunks(name, chunks):
    model = MODELS[name]()
    plan, ids = plan_of(model), random_ids(2, 29)
    cache = mh.HeadwiseCache(model, plan)
    with torch.no_grad():
        parts = [model(part, past_key_values=cache).logits for part in ids.split(chunks, 1)]
    got, expected = torch.cat(parts, 1), reference(model, plan, ids)
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=1e-10)
    with torch.no_grad():
        full = model(ids).logits
    assert (full - expected).abs().max() > 1e-3  # forgetting does change something


@pytest.mark.parametrize(("window", "first"), [(1, 0), (1, 3), (7, 0), (13, 1), (3, 11)])
def test_other_windows_and_numbers_of_first_tokens(window, first):
    model = cached_llama()
    plan, ids = plan_of(model, window, first), random_ids(2, 23)
    cache = mh.HeadwiseCache(model, plan)
    with torch.no_grad():
        parts = [model(part, past_key_values=cache).logits for part in ids.split((5, 1, 1, 7, 1, 1, 7), 1)]
    expected = reference(model, plan, ids)
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-10, rtol=1e-10)


def test_blocks_of_queries(monkeypatch):
    """A long prompt is computed in blocks; here in blocks of four queries."""
    monkeypatch.setattr("manyheads.nn.head_memory.BLOCK", 4)
    model = cached_llama()
    plan, ids = plan_of(model), random_ids(2, 23)
    with torch.no_grad():
        got = model(ids, past_key_values=mh.HeadwiseCache(model, plan)).logits
    torch.testing.assert_close(got, reference(model, plan, ids), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("chunks", [(23,), (2, 9, 1, 1, 7, 1, 1, 1), (1,) * 23])
@pytest.mark.parametrize("block", [4, 512])
def test_padding_on_the_left(monkeypatch, chunks, block):
    monkeypatch.setattr("manyheads.nn.head_memory.BLOCK", block)
    model = cached_llama()
    plan, ids = plan_of(model), random_ids(3, 23)
    padding = torch.ones(3, 23, dtype=torch.int64)
    padding[0, :4], padding[2, :11] = 0, 0  # the first chunk is all padding in two rows
    cache, parts, done = mh.HeadwiseCache(model, plan), [], 0
    positions = (padding.cumsum(1) - 1).clamp(min=0)
    for size in chunks:
        end = done + size
        with torch.no_grad():
            result = model(
                ids[:, done:end], attention_mask=padding[:, :end], position_ids=positions[:, done:end],
                past_key_values=cache,
            )  # fmt: skip
        parts.append(result.logits)
        done = end
    real = padding.bool()
    expected = reference(model, plan, ids, padding)
    torch.testing.assert_close(torch.cat(parts, 1)[real], expected[real], atol=1e-10, rtol=1e-10)


def test_alibi_biases_follow_their_heads():
    """Our own decoder with a bias for each head, and prompts of different lengths."""
    torch.manual_seed(0)
    model = mh.Decoder(
        24, heads=6, kv_heads=3, layers=2, vocabulary=CACHE_VOCABULARY, positions="alibi"
    ).double()
    model.eval()
    plan, ids = mh.CachePlan.of(model, {0: [1], 1: [0, 2]}, first=2, window=4), random_ids(2, 17)
    cache = mh.HeadwiseCache(model, plan)
    cache.left = torch.tensor([0, 5])
    padding = (torch.arange(17) >= cache.left[:, None]).long()
    with torch.no_grad():
        got = torch.cat([model(part, cache=cache) for part in ids.split((7, 1, 1, 8), 1)], 1)
    expected = _own_reference(model, plan, ids, padding)
    real = padding.bool()
    torch.testing.assert_close(got[real], expected[real], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("positions", ["rotary", "sinusoidal"])
def test_our_own_decoder(positions):
    torch.manual_seed(0)
    model = mh.Decoder(24, heads=6, kv_heads=3, layers=2, vocabulary=CACHE_VOCABULARY, positions=positions)
    model = model.double().eval()
    plan, ids = mh.CachePlan.of(model, {0: [1], 1: [0, 2]}, first=2, window=4), random_ids(2, 17)
    cache = mh.HeadwiseCache(model, plan)
    with torch.no_grad():
        got = torch.cat([model(part, cache=cache) for part in ids.split((7, 1, 1, 8), 1)], 1)
    assert cache.length == 17
    torch.testing.assert_close(got, _own_reference(model, plan, ids, None), atol=1e-10, rtol=1e-10)


def _own_reference(model: nn.Module, plan: mh.CachePlan, ids: Tensor, padding: Tensor | None) -> Tensor:
    """Our decoder, block by block, with a dense mask for each."""
    batch, length = ids.shape
    left = None if padding is None else length - padding.sum(1)
    with torch.no_grad():
        x = model.enter(ids, 0, left)
        for number, block in enumerate(model.blocks):
            group = block.attention.heads // block.attention.kv_heads
            seen = dense(padding, plan.windows(number), plan.first, batch, length)
            mask = mh.mask.as_mask(seen.repeat_interleave(group, 1))
            mask = mask if model.alibi is None else mask & model.alibi
            x = block(x, mask=mask, causal=True)
        return model.norm(x) @ model.embedding.weight.T


def test_our_own_generation():
    torch.manual_seed(0)
    model = mh.Decoder(
        24, heads=6, kv_heads=3, layers=2, vocabulary=CACHE_VOCABULARY, positions="rotary"
    ).eval()
    prompt, lengths = random_ids(3, 13), torch.tensor([13, 4, 9])
    options = {"new_tokens": 11, "lengths": lengths}
    nothing = mh.CachePlan.of(model, {})
    for how in ({}, {"beams": 3}):
        plain = mh.generate(model, prompt, **options, **how)
        assert torch.equal(
            plain, mh.generate(model, prompt, **options, **how, cache=mh.HeadwiseCache(model, nothing))
        )
    plan = mh.CachePlan.of(model, {0: [0, 1, 2], 1: [1]}, first=1, window=3)
    got = mh.generate(model, prompt, **options, cache=mh.HeadwiseCache(model, plan))
    for row, length in enumerate(lengths.tolist()):  # each prompt continues as it would alone
        alone = mh.generate(
            model, prompt[row : row + 1, :length], new_tokens=11, cache=mh.HeadwiseCache(model, plan)
        )
        assert torch.equal(got[row], alone[0])
    with pytest.raises(ValueError, match="a new cache"):
        mh.generate(model, prompt, **options, cache=_used(model, plan))


def _used(model: nn.Module, plan: mh.CachePlan) -> mh.HeadwiseCache:
    cache = mh.HeadwiseCache(model, plan)
    with torch.no_grad():
        model(random_ids(1, 2), cache=cache)
    return cache


@pytest.mark.parametrize(
    "how",
    [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 7}, {"num_beams": 2, "num_return_sequences": 2}],
)
@pytest.mark.parametrize("forgets", [False, True])
def test_generate_of_transformers(how, forgets):
    model = cached_llama()
    plan = plan_of(model) if forgets else mh.CachePlan.of(model, {})
    ids, padding = random_ids(2, 11), torch.ones(2, 11, dtype=torch.int64)
    ids[0, :4], padding[0, :4] = 0, 0
    options = {"max_new_tokens": 9, "attention_mask": padding} | how
    torch.manual_seed(3)
    got = model.generate(ids, past_key_values=mh.HeadwiseCache(model, plan), **options)
    Reference.plan, Reference.padding = plan, padding
    model.set_attn_implementation("headwise reference")
    torch.manual_seed(3)
    assert torch.equal(got, model.generate(ids, use_cache=False, **options))


def test_nothing_forgets_equals_the_full_cache():
    model = cached_llama().float()
    ids = random_ids(2, 31)
    caches = [DynamicCache(config=model.config), mh.HeadwiseCache(model, mh.CachePlan.of(model, {}))]
    outputs = []
    for cache in caches:
        with torch.no_grad():
            parts = [model(part, past_key_values=cache).logits for part in ids.split((17, 1, 1, 12), 1)]
        outputs.append(torch.cat(parts, 1))
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-5)


def test_memory_is_freed():
    model = cached_llama(heads=6, kv_heads=3, layers=2).float()
    plan = mh.CachePlan.of(model, {0: [0, 1, 2], 1: [2]}, first=2, window=10)
    cache = mh.HeadwiseCache(model, plan)
    with torch.no_grad():
        model(random_ids(1, 700), past_key_values=cache)
    token = 2 * 8 * 4  # keys and values of one head, 8 wide, float32
    room = 2 * 64  # to grow into
    assert cache.layers[0].memory.bytes == 3 * 12 * token
    assert cache.bytes <= (4 * 12 + 2 * 700 + room) * token
    assert plan.share(700) == pytest.approx((4 * 12 + 2 * 700) / (6 * 700))


def test_reset_and_reorder():
    model = cached_llama()
    plan, ids = plan_of(model), random_ids(2, 19)
    cache = mh.HeadwiseCache(model, plan)
    with torch.no_grad():
        first = model(ids, past_key_values=cache).logits
        cache.reset()
        again = model(ids, past_key_values=cache).logits
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0]))
        swapped = model(ids[:, :1], past_key_values=cache).logits
    assert torch.equal(first, again)
    rows = torch.stack([torch.cat([ids[1], ids[0, :1]]), torch.cat([ids[0], ids[1, :1]])])
    expected = reference(model, plan, rows)[:, -1:]
    torch.testing.assert_close(swapped, expected, atol=1e-10, rtol=1e-10)
    with pytest.raises(ValueError, match="cannot be cropped"):
        cache.crop(-1)


def test_a_copy_continues_on_its_own():
    model = cached_llama()
    plan, ids = plan_of(model), random_ids(2, 19)
    cache = mh.HeadwiseCache(model, plan)
    with torch.no_grad():
        model(ids[:, :11], past_key_values=cache)
        other = copy.deepcopy(cache)
        model(random_ids(2, 29)[:, 21:], past_key_values=cache)
        got = model(ids[:, 11:], past_key_values=other).logits
    torch.testing.assert_close(got, reference(model, plan, ids)[:, 11:], atol=1e-10, rtol=1e-10)


def test_layers_that_slide_stay_as_they_are():
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=24, intermediate_size=31, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=CACHE_VOCABULARY, num_hidden_layers=2, sliding_window=7, use_sliding_window=True,
        initializer_range=0.3,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).double().eval()
    plan, ids = mh.CachePlan.of(model, {1: [0]}, first=2, window=3), random_ids(2, 17)
    assert plan.sizes == {1: 2}
    cache, whole = mh.HeadwiseCache(model, plan), mh.HeadwiseCache(model, mh.CachePlan.of(model, {}))
    with torch.no_grad():
        parts = [model(part, past_key_values=cache).logits for part in ids.split((7, 1, 9), 1)]
        once = model(ids, past_key_values=mh.HeadwiseCache(model, plan)).logits
        full = model(ids).logits
        kept = model(ids, past_key_values=whole).logits
    torch.testing.assert_close(torch.cat(parts, 1), once, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(kept, full, atol=1e-10, rtol=1e-10)
    assert (full - once).abs().max() > 1e-3


class TestBadInput:
    def test_a_cache_used_by_two_models(self):
        first, second = cached_llama(), cached_llama(seed=1)
        cache = mh.HeadwiseCache(first, plan_of(first))
        with torch.no_grad(), pytest.raises(ValueError, match="one HeadwiseCache for each model"):
            second(random_ids(1, 3), past_key_values=cache)

    def test_a_cache_used_by_two_decoders(self):
        models = [mh.Decoder(12, heads=3, layers=2, vocabulary=CACHE_VOCABULARY).eval() for _ in range(2)]
        cache = mh.HeadwiseCache(models[0], mh.CachePlan.of(models[0], {}))
        with torch.no_grad(), pytest.raises(ValueError, match="one HeadwiseCache for each model"):
            models[1](random_ids(1, 3), cache=cache)

    def test_a_plan_for_another_model(self):
        with pytest.raises(ValueError, match="plan: it was made for the model"):
            mh.HeadwiseCache(cached_llama(seed=1), plan_of(cached_llama()))

    def test_something_else_than_a_plan(self):
        with pytest.raises(TypeError, match="expected a CachePlan, got dict"):
            mh.HeadwiseCache(cached_llama(), {0: [1]})

    @pytest.mark.parametrize(
        ("model", "message"),
        [
            (nn.Linear(3, 3), "a class without a cache"),
            (mh.Encoder(12, heads=3, layers=1, vocabulary=7), "a class without a cache"),
            (mh.Decoder(12, heads=3, layers=1, vocabulary=7, cross=True), "cross-attention"),
            (mh.Decoder(12, heads=3, layers=1, vocabulary=7, window=3), "a window or chunks"),
        ],
    )
    def test_models_without_such_a_cache(self, model, message):
        with pytest.raises((ValueError, TypeError), match=message):
            mh.CachePlan.of(model, {})

    def test_models_of_transformers_without_such_a_cache(self):
        sizes = {"d_model": 12, "d_kv": 4, "d_ff": 5, "num_layers": 1, "num_heads": 3, "vocab_size": 11}
        with pytest.raises(ValueError, match="cross-attention"):
            mh.CachePlan.of(T5ForConditionalGeneration(t5_config(**sizes)), {})
        sliding = MistralConfig(
            hidden_size=12, intermediate_size=7, num_attention_heads=3, num_key_value_heads=3,
            vocab_size=11, num_hidden_layers=1, sliding_window=5,
        )  # fmt: skip
        with pytest.raises(ValueError, match="DynamicSlidingWindowLayer"):
            mh.CachePlan.of(MistralForCausalLM(sliding), {})

    def test_eager_attention(self):
        model = cached_llama()
        model.set_attn_implementation("eager")
        with pytest.raises(ValueError, match="attn_implementation='sdpa'"):
            mh.CachePlan.of(model, {})

    def test_gradients(self):
        model = cached_llama()
        with pytest.raises(ValueError, match="no_grad"):
            model(random_ids(1, 3), past_key_values=mh.HeadwiseCache(model, plan_of(model)))

    def test_another_batch(self):
        model = cached_llama()
        cache = mh.HeadwiseCache(model, plan_of(model))
        with torch.no_grad():
            model(random_ids(2, 3), past_key_values=cache)
            with pytest.raises(ValueError, match="it holds a batch of 2"):
                model(random_ids(3, 1), past_key_values=cache)

    @pytest.mark.parametrize(
        ("forget", "message"),
        [
            ({7: [0]}, "no layer 7"),
            ({0: [3]}, "no key/value head 3"),
            ({0: [-1]}, "0 or more, got -1"),
            ({"0": [1]}, "no layer '0'"),
            ({0: 1}, "a list of head numbers for 0, got 1"),
            ({0: [1.0]}, "a whole number, got 1.0"),
            ({0: [True]}, "a whole number, got True"),
            ([0, 1], "got list"),
        ],
    )
    def test_heads_that_do_not_exist(self, forget, message):
        with pytest.raises((ValueError, TypeError), match=message):
            mh.CachePlan.of(cached_llama(), forget)

    @pytest.mark.parametrize("kept", [{"first": -1}, {"window": 0}, {"window": 2.5}, {"first": True}])
    def test_numbers_of_tokens(self, kept):
        with pytest.raises(ValueError, match="expected a whole number"):
            mh.CachePlan.of(cached_llama(), {}, **kept)


class TestPlanFiles:
    def test_save_and_load(self, tmp_path):
        model = cached_llama()
        plan = plan_of(model)
        plan.save(tmp_path / "plan.json")
        loaded = mh.CachePlan.load(tmp_path / "plan.json")
        loaded.check(model)
        assert (loaded.forget, loaded.sizes) == ({0: [1], 1: [0, 1]}, {0: 3, 1: 3})
        assert (loaded.first, loaded.window) == (FIRST, WINDOW)

    @pytest.mark.parametrize(
        "change",
        [
            {"format": "manyheads plan"},
            {"forget": {"0": [5]}},
            {"forget": {"9": [0]}},
            {"forget": {"0": [1, 1]}},
            {"sizes": {}},
            {"sizes": {"x": 3}},
            {"window": 0},
            {"first": -2},
            {"version": 99},
        ],
    )
    def test_damaged_files(self, tmp_path, change):
        path = tmp_path / "plan.json"
        plan_of(cached_llama()).save(path)
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        with pytest.raises(ValueError, match=r"plan\.json is damaged"):
            mh.CachePlan.load(path)
