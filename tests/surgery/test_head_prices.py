"""head_prices and plan(save=...): what heads cost is what a cut saves."""

import pytest
import torch
from tests.helpers.models import gpt2_config

import manyheads as mh
from manyheads.heads.table import HeadTable, Row
from manyheads.surgery.decoding_speed import cache_bytes, decoding_speed
from manyheads.surgery.prices import HeadPrices

IDS = torch.randint(17, (3, 7), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return mh.Decoder(12, heads=6, kv_heads=3, layers=2, vocabulary=17, d_key=5, d_value=3).eval()


def ranking(model, values, sites=("blocks.0.attention", "blocks.1.attention"), kv=(0, 0, 1, 1, 2, 2)):
    rows = [
        Row(site, layer, h, h, kv[h], "causal") for layer, site in enumerate(sites) for h in range(len(kv))
    ]
    worth = torch.tensor(values, dtype=torch.float64)
    columns = {"importance": torch.stack([worth**0, worth, worth**2])}
    return HeadTable(rows, torch.ones(len(rows)), columns, model=mh.heads.fingerprint.fingerprint(model))


def size(model):
    return sum(p.numel() for p in model.parameters())


def test_prices_are_what_a_cut_saves(model):
    prices = mh.head_prices(model, IDS)
    for heads in ({0: [2, 3]}, {0: [0, 2, 4]}, {0: [0, 1], 1: [4, 5]}):
        smaller = mh.cut(model, heads, IDS)
        removed = {f"blocks.{layer}.attention": numbers for layer, numbers in heads.items()}
        assert prices.saved("parameters", removed) == size(model) - size(smaller)
        assert prices.saved("cache", removed) == cache_bytes(model) - cache_bytes(smaller)
    assert prices.totals == {"cache": cache_bytes(model), "parameters": size(model)}
    assert prices.totals["cache"] == 2 * 3 * (5 + 3) * 4


def test_whole_groups_go_for_the_cache(model):
    """The cheapest heads, one of each group, save nothing; the plan takes the least important groups."""
    table = ranking(model, [1, 9, 1, 8, 1, 7, 5, 5, 6, 6, 7, 7])
    plan = mh.plan(table, save={"cache": 0.5}, prices=mh.head_prices(model, IDS))
    assert plan.heads == {"blocks.0.attention": [2, 3, 4, 5], "blocks.1.attention": [0, 1]}
    assert mh.plan(table, save={"cache": 0.5}).heads == plan.heads
    assert cache_bytes(mh.cut(model, plan, IDS)) == cache_bytes(model) / 2
    for_parameters = mh.plan(table, save={"parameters": 0.05}, prices=mh.head_prices(model, IDS))
    assert for_parameters.heads == {"blocks.0.attention": [0, 2, 4]}
    assert 1 - size(mh.cut(model, for_parameters, IDS)) / size(model) >= 0.05


def test_expensive_layers_go_first():
    """By time, heads of equal importance leave the layer whose heads cost most."""
    sites = ("a.0", "b.1")
    prices = HeadPrices(
        "x", {"latency": 1.0}, {}, dict.fromkeys(sites, 0.0), dict.fromkeys(sites, (0, 1, 2)),
        {"a.0": 0.05, "b.1": 0.1},
    )  # fmt: skip
    rows = [Row(site, layer, h, h, h, "self") for layer, site in enumerate(sites) for h in range(3)]
    worth = torch.ones(6, dtype=torch.float64)
    table = HeadTable(rows, torch.ones(6), {"importance": torch.stack([worth, worth, worth])}, model="x")
    plan = mh.plan(table, save={"latency": 0.25}, prices=prices)
    assert {site: len(heads) for site, heads in plan.items()} == {"b.1": 2, "a.0": 1}
    with pytest.raises(ValueError, match=r"at most 30\.0%"):
        mh.plan(table, save={"latency": 0.4}, prices=prices)


def test_latency_is_measured(model):
    prices = mh.head_prices(model, IDS, latency=True, repeats=1)
    assert prices.totals["latency"] > 0
    assert set(prices.seconds) == {"blocks.0.attention", "blocks.1.attention"}
    assert all(seconds >= 0 for seconds in prices.seconds.values())


def test_prune_saves_what_was_asked(model):
    small = mh.prune(model, [IDS], save={"cache": 0.3}, method="fisher", refit=False)
    assert cache_bytes(small) <= 0.7 * cache_bytes(model)


def test_refusals(model):
    table, prices = ranking(model, range(1, 13)), mh.head_prices(model, IDS)
    for save, words in (
        ({"cache": 1.5}, "got 1.5 for cache"),
        ({"cache": True}, "got True"),
        ({"heat": 0.5}, "expected cache, parameters, latency"),
        ({}, "shares by name"),
        ({"latency": 0.5}, "latency=True"),
        ({"parameters": 0.9}, "can be lowered by at most"),
    ):
        with pytest.raises(ValueError, match=words):
            mh.plan(table, save=save, prices=prices)
    with pytest.raises(ValueError, match="needs them"):
        mh.plan(table, save={"parameters": 0.1})
    with pytest.raises(ValueError, match="expected one of them"):
        mh.plan(table, 0.5, save={"cache": 0.1})
    other = mh.head_prices(mh.Decoder(12, heads=6, kv_heads=3, layers=2, vocabulary=17), IDS)
    with pytest.raises(ValueError, match="measure those of this model"):
        mh.plan(table, save={"cache": 0.1}, prices=other)


def test_decoding_says_what_it_measured(model):
    speeds = decoding_speed(model, model, sizes=(1, 2), lengths=(5, 20_011))
    assert [bool(one.why_not) for one in speeds] == [False, True, False, True]
    assert min(speeds[0].before, speeds[0].after) > 0
    assert speeds[-1].why_not == "40,022 tokens to read first"
    assert decoding_speed(mh.Encoder(12, heads=3, layers=1), mh.Encoder(12, heads=3, layers=1)) == []


def test_a_cache_is_measured_not_assumed():
    """GPT-2 with merged keys keeps one for every head, whatever is computed."""
    from transformers import GPT2LMHeadModel

    config = gpt2_config(
        vocab_size=17, n_embd=12, n_layer=1, n_head=3, n_positions=300, bos_token_id=1, eos_token_id=2
    )
    model = GPT2LMHeadModel(config).eval()
    small = mh.merge(model, 1, [{"input_ids": IDS}], refit=False)
    assert size(small) == size(model) - 2 * (8 * 12 + 8)
    assert cache_bytes(small) == cache_bytes(model) == 2 * 12 * 4
    prices = mh.head_prices(small, {"input_ids": IDS})
    assert prices.totals["cache"] == cache_bytes(small)


def held_for_a_token(model):
    """Bytes by which the model's own cache grows with a token, far beyond every window."""
    from transformers import DynamicCache

    sizes = []
    for length in (20, 30):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(torch.ones(1, length, dtype=torch.long), past_key_values=cache, use_cache=True)
        held = [x for layer in cache.layers for x in (layer.keys, layer.values)]
        sizes.append(sum(x.numel() * x.element_size() for x in held))
    return (sizes[1] - sizes[0]) / 10


@pytest.mark.parametrize("kind", ["window", "compressed"])
def test_windows_and_compressed_keys_are_priced_by_what_the_cache_holds(kind):
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 17, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 7, "num_key_value_heads": 4, "initializer_range": 0.3, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    if kind == "window":
        layers = ["sliding_attention", "full_attention"]
        config = Gemma3TextConfig(**sizes, head_dim=6, sliding_window=5, layer_types=layers, pad_token_id=0)
        model = Gemma3ForCausalLM(config).eval()
    else:
        config = DeepseekV3Config(
            **sizes, q_lora_rank=5, kv_lora_rank=6, qk_rope_head_dim=4, qk_nope_head_dim=3, v_head_dim=5,
            first_k_dense_replace=2, n_routed_experts=2, num_experts_per_tok=1, n_group=1, topk_group=1,
            moe_intermediate_size=3,
        )  # fmt: skip
        model = DeepseekV3ForCausalLM(config).eval()
    prices = mh.head_prices(model)
    assert prices.totals["cache"] == cache_bytes(model) == held_for_a_token(model)
    for layer, site in enumerate(prices.kv_heads):
        small = mh.cut(model, {layer: [1]})
        saved = held_for_a_token(model) - held_for_a_token(small)
        assert prices.saved("cache", {site: [1]}) == saved == (48.0 if (kind, layer) == ("window", 1) else 0)
