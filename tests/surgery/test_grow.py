"""grow gives a larger model that does what the model does."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers import models
from tests.helpers.cut_models import IDS, MODELS, tiny, torch_encoder
from tests.helpers.models import tokens
from tests.zoo.catalogue import HANDWRITTEN
from torch import Tensor, nn

import manyheads as mh
from manyheads.common.compare_outputs import relative_difference
from manyheads.common.run_batch import run
from manyheads.models.changes import changes_of


def neox():
    return tiny(
        hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig, hidden_size=24, num_hidden_layers=2, num_attention_heads=3,
        intermediate_size=11, max_position_embeddings=32,
    )  # fmt: skip


def falcon():
    """Multi-query: queries of all heads and one key and value in one projection."""
    return tiny(
        hf.FalconForCausalLM, hf.FalconConfig, hidden_size=24, num_hidden_layers=2, num_attention_heads=3,
        multi_query=True, alibi=False,
    )  # fmt: skip


GROWN = MODELS | {"neox": (neox, tokens()), "falcon": (falcon, tokens())}
HOWS = ("zero", "split")


def sites_of(model, batch):
    with torch.no_grad(), mh.watch(model) as seen:
        run(model, batch)
    return seen.sites


def wanted(model, batch):
    """More heads at every site: whole groups at even sites, one head for every group at odd ones."""
    numbers = {}
    for order, site in enumerate(sites_of(model, batch)):
        key_heads = len(set(site.kv_heads))
        group = site.heads // key_heads
        numbers[site.name] = 1 + order % 2 if group == 1 else group if order % 2 == 0 else key_heads
    return numbers


def added(model):
    return {
        site: [h for h, old in enumerate(heads) if old < 0] for site, heads in model.original_heads.items()
    }


@pytest.mark.filterwarnings("ignore:`torch.jit")  # DeBERTa scripts some functions when it is imported
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", GROWN)
def test_the_function_stays(name, how, tmp_path):
    make, batch = GROWN[name]
    model = make().eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    numbers = wanted(model, batch)
    large = mh.grow(model, numbers, batch, how=how)
    with torch.no_grad():
        expected, got = run(model, batch), run(large, batch)
    assert relative_difference(expected, got) < 1e-5
    heads = {site.name: site.heads for site in sites_of(model, batch)}
    for site in sites_of(large, batch):
        assert site.heads == heads[site.name] + numbers[site.name] == len(large.original_heads[site.name])
        assert len(added(large)[site.name]) == numbers[site.name]
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert not hasattr(model, "original_heads")
    if how == "split":
        return
    ours = type(model).__module__.startswith(("transformers.", "manyheads."))
    mh.save(large, tmp_path / "large")
    again = mh.load(tmp_path / "large", None if ours else make)
    with torch.no_grad():
        assert relative_difference(got, run(again, batch)) == 0.0
    assert again.original_heads == large.original_heads
    back = mh.cut(again, added(large), batch)
    with torch.no_grad():
        assert relative_difference(expected, run(back, batch)) < 1e-5
    assert {name: list(range(count)) for name, count in heads.items()} == back.original_heads


def attention_by_hand(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Head by head, in float64."""
    d = q.shape[-1] // heads
    outputs = []
    for head in range(heads):
        part = slice(head * d, (head + 1) * d)
        scores = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(d)
        outputs.append(scores.softmax(-1) @ v[..., part])
    return torch.cat(outputs, -1)


@pytest.mark.parametrize("how", HOWS)
def test_new_weights_beside_the_formula(how):
    """The grown layer's weights, read by hand as one more head, give what the layer gave."""
    layer = mh.MultiHeadAttention(15, heads=3, dtype=torch.float64).eval()
    x = torch.randn(2, 7, 15, dtype=torch.float64)
    large = mh.grow(layer, {0: [1] if how == "split" else 1}, x, how=how)
    with torch.no_grad():
        q, k, v = (part(x) for part in (large.query, large.key, large.value))
        by_hand = attention_by_hand(q, k, v, 4) @ large.output.weight.T + large.output.bias
        torch.testing.assert_close(by_hand, layer(x), rtol=0, atol=1e-12)
    new = slice(10, 15) if how == "split" else slice(15, 20)
    old = slice(5, 10)
    if how == "zero":
        assert large.output.weight[:, new].abs().max() == 0
        assert large.query.bias[new].abs().max() == 0
        for part in (large.query, large.key, large.value):
            scales = part.weight[new].square().mean().sqrt() / part.weight[:15].square().mean().sqrt()
            assert 0.7 < scales < 1.4
            assert not torch.equal(part.weight[new], part.weight[10:15])
    else:
        torch.testing.assert_close(
            large.output.weight[:, old] - large.output.weight[:, new], layer.output.weight[:, old]
        )
        assert torch.equal(large.query.weight[new], layer.query.weight[old])
        assert torch.equal(large.value.weight[new], -layer.value.weight[old])
        assert large.original_heads == {"": [0, 1, -1, 2]}


def test_the_seed_decides_and_random_generators_are_left_alone():
    layer, x = mh.MultiHeadAttention(15, heads=3), torch.randn(2, 7, 15)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    one, same, other = (mh.grow(layer, {0: 1}, x, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one.query.weight, same.query.weight)
    assert not torch.equal(one.query.weight, other.query.weight)
    halves = [mh.grow(layer, {0: 1}, x, how="split", seed=seed).output.weight for seed in (5, 5, 6)]
    assert torch.equal(halves[0], halves[1])
    assert not torch.equal(halves[0], halves[2])


def test_the_heads_with_the_largest_columns_are_split():
    layer, x = mh.MultiHeadAttention(15, heads=3), torch.randn(2, 7, 15)
    with torch.no_grad():
        layer.output.weight[:, 5:10] *= 3
        layer.output.weight[:, :5] *= 0.1
    assert mh.grow(layer, {0: 1}, x, how="split").original_heads == {"": [0, 1, -1, 2]}
    assert mh.grow(layer, {0: 2}, x, how="split").original_heads == {"": [0, 1, -1, 2, -2]}


@pytest.mark.parametrize("how", HOWS)
def test_new_heads_learn_and_part(how):
    model, batch = models.gpt2().eval(), tokens()
    large = mh.grow(model, {0: 1, 1: 2}, batch, how=how).train()
    for module in large.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    optimiser = torch.optim.Adam(large.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        loss = large(**batch, labels=IDS).loss
        losses.append(loss.item())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert losses[-1] < losses[0]
    attention, width = large.transformer.h[0].attn, 5
    columns = attention.c_proj.weight.detach().view(4, width, -1)
    gradients = attention.c_attn.weight.grad.view(-1, 3, 4, width)  # (d_model, query key value, head, width)
    new = added(large)["transformer.h.0.attn"][0]
    assert columns[new].abs().max() > 0
    assert gradients[:, :, new].abs().amax((0, 2)).min() > 0
    source = new - 1
    queries = attention.c_attn.weight.detach().view(-1, 3, 4, width)[:, 0]
    assert (queries[:, new] - queries[:, source]).abs().max() > 1e-3


@pytest.mark.parametrize("how", HOWS)
def test_what_was_cut_can_grow_and_be_cut_again(how):
    model, batch = models.llama().eval(), tokens()
    first, second = (site.name for site in sites_of(model, batch))
    small = mh.cut(model, {first: [2, 3], second: [0, 2, 4]}, batch)
    large = mh.grow(small, {first: 2, second: 3}, batch, how=how)
    larger = mh.grow(large, {second: 3}, batch, how=how)
    with torch.no_grad():
        assert relative_difference(run(small, batch), run(larger, batch)) < 1e-5
    numbers = larger.original_heads
    assert sorted(n for n in numbers[first] if n >= 0) == [0, 1, 4, 5]
    assert sorted(n for n in numbers[second] if n < 0) == [-6, -5, -4, -3, -2, -1]
    counts = changes_of(larger).counts
    assert counts[first]["after"] == [6, 3]
    assert counts[second]["after"] == [9, 9] if how == "zero" else counts[second]["after"][0] == 9
    table = mh.importance(larger, [batch])
    assert [row.original_head for row in table.rows if row.site == second] == numbers[second]
    if how == "zero":
        again = mh.cut(larger, added(larger), batch)
        with torch.no_grad():
            assert relative_difference(run(small, batch), run(again, batch)) < 1e-5
        assert again.original_heads == small.original_heads


def test_tables_with_new_heads_are_saved_and_planned(tmp_path):
    model = mh.grow(mh.Encoder(15, heads=3, layers=2, vocabulary=models.VOCABULARY), {0: 1, 1: 2}, IDS)
    table = mh.importance(model, [IDS])
    for suffix in ("json", "csv"):
        table.save(tmp_path / f"table.{suffix}")
        assert mh.HeadTable.load(tmp_path / f"table.{suffix}")["original_head"] == table["original_head"]
    plan = mh.plan(table, keep=0.7)
    assert set(plan["blocks.1.attention"]) <= {3, 4}  # nothing reads the new heads yet
    small = mh.cut(model, plan, IDS)
    assert dict(mh.Plan.of(model, small, IDS)) == dict(plan)
    with torch.no_grad(), mh.silence(model, {0: [3]}):
        silenced = model(IDS)
    torch.testing.assert_close(silenced, model(IDS), rtol=0, atol=1e-6)


@pytest.mark.parametrize("how", HOWS)
def test_generation_with_a_cache_stays(how):
    model, batch = models.llama().eval(), {"input_ids": IDS[:1]}
    large = mh.grow(model, wanted(model, tokens()), tokens(), how=how)
    options = {"max_new_tokens": 6, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    assert torch.equal(model.generate(**batch, **options), large.generate(**batch, **options))


def test_uniform_layers_load_without_manyheads(tmp_path):
    model = MODELS["qwen3"][0]().eval()
    large = mh.grow(model, {0: 2, 1: 2}, tokens())
    mh.save(large, tmp_path / "large")
    plain = hf.Qwen3ForCausalLM.from_pretrained(tmp_path / "large")
    assert plain.config.num_attention_heads == 8
    assert plain.config.num_key_value_heads == 4
    with torch.no_grad():
        torch.testing.assert_close(plain(**tokens()).logits, large(**tokens()).logits)


@settings(max_examples=25, deadline=None)
@given(
    key_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    more=st.integers(1, 6),
    how=st.sampled_from(HOWS),
    options=st.sampled_from(
        [{}, {"qk_norm": True}, {"bias": False}, {"d_key": 3, "d_value": 5}, {"window": 4}]
    ),
    causal=st.booleans(),
)
def test_any_number_of_heads_and_groups(key_heads, group, more, how, options, causal):
    heads = key_heads * group
    torch.manual_seed(heads)
    options = {"d_key": 4, "d_value": 4} | options
    layer = mh.MultiHeadAttention(12, heads=heads, kv_heads=key_heads, dtype=torch.float64, **options)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    batch = {"query": x, "causal": causal}
    if how == "split" and more > heads:
        with pytest.raises(ValueError, match=rf"has {heads} heads, and {more} cannot be split"):
            mh.grow(layer, {0: more}, batch, how=how)
    elif more % group and more % key_heads:
        with pytest.raises(ValueError, match=r"would leave them unequal"):
            mh.grow(layer, {0: more}, batch, how=how)
    elif heads == 1 and options.get("qk_norm"):  # it may be one norm over the queries of all heads
        with pytest.raises(ValueError, match=r"every head depends on all of query.weight"):
            mh.grow(layer, {0: more}, batch, how=how)
    else:
        large = mh.grow(layer, {0: more}, batch, how=how)
        assert large.heads == heads + more
        assert large.heads % large.kv_heads == 0
        torch.testing.assert_close(large(**batch), layer(**batch), rtol=0, atol=1e-9)


def test_cross_attention_from_another_width():
    layer = mh.MultiHeadAttention(12, heads=3, d_context=10).eval()
    x, y = torch.randn(2, 5, 12), torch.randn(2, 7, 10)
    for how in HOWS:
        large = mh.grow(layer, {0: 2}, (x, y), how=how)
        torch.testing.assert_close(large(x, y), layer(x, y), rtol=0, atol=1e-5)


def test_masks_for_every_head_follow_a_split_head():
    layer = nn.MultiheadAttention(15, 3, batch_first=True).eval()
    x, mask = torch.randn(2, 5, 15), torch.randn(6, 5, 5)
    for heads, how in (({0: [0, 2]}, "split"), ({0: 2}, "zero")):
        large = mh.grow(layer, heads, {"query": x, "key": x, "value": x, "attn_mask": mask}, how=how)
        twice = mh.grow(large, {0: 1}, {"query": x, "key": x, "value": x, "attn_mask": mask}, how=how)
        for model in (large, twice):
            got = model(x, x, x, attn_mask=mask)[0]
            torch.testing.assert_close(got, layer(x, x, x, attn_mask=mask)[0], rtol=0, atol=1e-5)


UNUSUAL = (
    "grouped, repeated in turns (x-transformers)",
    "keys wider than values",
    "latent attention (DeepSeek)",
    "windows of heads as a list of numbers",
    "relative bias from buckets",
    "a gate of each channel after attention (Qwen3-Next)",
    "rotary by complex numbers",
)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_modules_beside_plain_code(name, how):
    case = HANDWRITTEN[name]()
    with torch.no_grad(), mh.watch(case.model) as seen:
        case.run(case.model, case.inputs)
    numbers = {site.name: site.heads // len(set(site.kv_heads)) for site in seen.sites}
    large = mh.grow(case.model, numbers, batch=case.inputs, how=how).eval()
    for inputs in (case.inputs, case.longer):
        expected = case.expected(inputs, evaluating=True)[0]  # in float64
        torch.testing.assert_close(case.run(large, inputs).double(), expected, rtol=1e-4, atol=1e-4)
    assert all(len(large.original_heads[site.name]) > site.heads for site in seen.sites)


class Windows(nn.Module):
    """Each head sees as far as its entry of a list says."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.windows = 3, [2, 4, 9]
        self.packed, self.output = nn.Linear(15, 45), nn.Linear(15, 15)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.packed(x).chunk(3, -1))
        places = torch.arange(x.shape[1])
        distance = (places[:, None] - places).abs()
        mask = torch.stack([distance < self.windows[head] for head in range(self.heads)])
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.output(out.transpose(1, 2).flatten(2))


def test_settings_of_a_split_head_are_those_of_both_parts(tmp_path):
    model, x = nn.Sequential(Windows()).eval(), torch.randn(2, 11, 15)
    large = mh.grow(model, {0: [0, 1]}, x, how="split")
    assert large[0].windows == [2, 2, 4, 4, 9]
    assert mh.grow(large, {0: 1}, x)[0].windows == [2, 2, 4, 4, 9, 9]
    mh.save(large, tmp_path / "large")
    assert mh.load(tmp_path / "large", lambda: nn.Sequential(Windows()))[0].windows == [2, 2, 4, 4, 9]
    assert mh.cut(large, {0: [1, 3]}, x)[0].windows == [2, 4, 9]


class Strided(nn.Module):
    """The channels of the heads lie side by side: channel c of head h is row c * heads + h."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 3
        self.query, self.key, self.value, self.output = (nn.Linear(15, 15) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, self.heads)).permute(0, 3, 1, 2)
            for part in (self.query, self.key, self.value)
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.output(out.permute(0, 2, 3, 1).flatten(2))


@pytest.mark.parametrize("how", HOWS)
def test_heads_side_by_side(how):
    model, x = nn.Sequential(Strided()).eval(), torch.randn(2, 7, 15)
    large = mh.grow(model, {0: 2}, x, how=how)
    torch.testing.assert_close(large(x), model(x), rtol=0, atol=1e-5)
    assert large[0].heads == 5


class Signed(nn.Module):
    """The values pass through a function in which their sign matters."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 3
        self.packed, self.output = nn.Linear(15, 45), nn.Linear(15, 15)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.packed(x).chunk(3, -1))
        out = nn.functional.scaled_dot_product_attention(q, k, v.relu())
        return self.output(out.transpose(1, 2).flatten(2))


def test_values_keep_their_sign_where_it_matters():
    model, x = nn.Sequential(Signed()).eval(), torch.randn(2, 7, 15)
    large = mh.grow(model, {0: [1]}, x, how="split")
    torch.testing.assert_close(large(x), model(x), rtol=0, atol=1e-5)
    values = large[0].packed.weight[40:]
    assert torch.equal(values[5:10], values[10:15])


class Stubborn(nn.Module):
    """The number of heads is written into its code."""

    def __init__(self) -> None:
        super().__init__()
        self.packed, self.output = nn.Linear(15, 45), nn.Linear(15, 15)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.view(*x.shape[:2], 3, 5).transpose(1, 2) for y in self.packed(x).chunk(3, -1))
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.output(out.transpose(1, 2).flatten(2))


class Tied(nn.Module):
    """One norm goes over the queries of all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 3
        self.packed, self.output, self.norm = nn.Linear(15, 45), nn.Linear(15, 15), nn.LayerNorm(15)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.packed(x).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (self.norm(q), k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.output(out.transpose(1, 2).flatten(2))


def test_modules_that_cannot_grow_are_refused_and_left_alone():
    x = torch.randn(2, 5, 15)
    model = nn.Sequential(Stubborn())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"grow: 0 \(Stubborn\) with 1 more head does not give .* number"):
        mh.grow(model, {0: 1}, x)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    with pytest.raises(ValueError, match=r"heads: cannot grow .* as when one norm goes over"):
        mh.grow(nn.Sequential(Tied()), {0: 1}, x)


def test_bad_input_is_refused():
    model, x = torch_encoder(), torch.randn(2, 5, 15)
    for heads, how, error, message in (
        ({0: 0}, "zero", ValueError, r"heads\[0\]: expected at least 1 more head, got 0"),
        ({0: -1}, "split", ValueError, r"expected at least 1 more head, got -1"),
        ({0: 1.5}, "zero", TypeError, r"expected a number of heads to add, got 1.5"),
        ({0: True}, "zero", TypeError, r"expected a number of heads to add, got True"),
        ({0: [1]}, "zero", TypeError, r"expected a number of heads to add, got \[1\]"),
        ({0: []}, "split", ValueError, r"got no heads to split"),
        ({0: [3]}, "split", ValueError, r"has 3 heads, 0 to 2; there is no head 3"),
        ({0: 4}, "split", ValueError, r"has 3 heads, and 4 cannot be split; split at most 3 at a time"),
        ({5: 1}, "zero", ValueError, r"layer 5 was never called"),
        ({"nothing": 1}, "zero", ValueError, r"the model has no module 'nothing'"),
        (
            {0: 1, "layers.0.self_attn": 1},
            "zero",
            ValueError,
            r"layer 0 is 'layers.0.self_attn'; name it once",
        ),
        ({}, "zero", ValueError, r"heads: got none"),
        ([0], "zero", TypeError, r"expected \{layer or site: number of heads\}, got list"),
        ({0: 1}, "double", ValueError, r"how: got 'double'; expected 'zero' or 'split'"),
    ):
        with pytest.raises(error, match=message):
            mh.grow(model, heads, x, how=how)
    with pytest.raises(TypeError, match=r"seed: expected a whole number, got 'a'"):
        mh.grow(model, {0: 1}, x, seed="a")
    grouped = mh.MultiHeadAttention(12, heads=6, kv_heads=2)
    with pytest.raises(ValueError, match=r"2 key heads with 3 heads each, and 1 more head would leave"):
        mh.grow(grouped, {0: 1}, torch.randn(2, 5, 12))
    with pytest.raises(ValueError, match=r"splitting 0, 1 would leave them unequal; split a multiple of 3"):
        mh.grow(grouped, {0: [0, 1]}, torch.randn(2, 5, 12), how="split")
    with pytest.raises(ValueError, match=r"grow: no attention was seen"):
        mh.grow(nn.Linear(3, 3), {"": 1}, torch.randn(2, 3))


def test_calls_of_one_module_grow_together_or_not_at_all():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = mh.MultiHeadAttention(15, heads=3)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x + self.attention(x))

    model, x = Twice().eval(), torch.randn(2, 5, 15)
    with pytest.raises(ValueError, match=r"shares attention.query.weight with attention#2; name the same"):
        mh.grow(model, {"attention": 1}, x)
    for how in HOWS:
        large = mh.grow(model, {"attention": 1, "attention#2": 1}, x, how=how)
        torch.testing.assert_close(large(x), model(x), rtol=0, atol=1e-5)
        assert large.attention.query.weight.shape == (20, 15)
