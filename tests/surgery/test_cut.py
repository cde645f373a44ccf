"""cut gives a smaller model that does what the silenced one does."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.helpers import models
from tests.helpers.cut_models import BOTH, IDS, MODELS, chosen, torch_encoder
from tests.helpers.models import tokens
from torch import nn

import manyheads as mh
from manyheads.common.compare_outputs import relative_difference, seeded_evaluation
from manyheads.common.run_batch import run
from manyheads.surgery.arrangement import Arrangement
from manyheads.surgery.verify import verify


@pytest.mark.filterwarnings("ignore:`torch.jit")  # DeBERTa scripts some functions when it is imported
@pytest.mark.parametrize("name", MODELS)
def test_cut_equals_silenced(name):
    make, batch = MODELS[name]
    model = make().eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    heads = chosen(model, batch)
    small = mh.cut(model, heads, batch)
    with torch.no_grad():
        with mh.silence(model, heads):
            wanted = run(model, batch)
        got = run(small, batch)
    assert relative_difference(wanted, got) < 1e-5
    with torch.no_grad(), mh.watch(small) as seen:
        run(small, batch)
    for site in seen.sites:
        assert site.heads == len(small.original_heads[site.name])
        assert not set(small.original_heads[site.name]) & set(heads[site.name])
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert not hasattr(model, "original_heads")


def test_the_rows_and_columns_of_the_other_heads_stay():
    model = models.bert()
    small = mh.cut(model, {0: [1]}, tokens())
    mine, theirs = small.encoder.layer[0].attention, model.encoder.layer[0].attention
    rows = [*range(5), *range(10, 15)]
    assert torch.equal(mine.self.query.weight, theirs.self.query.weight[rows])
    assert torch.equal(mine.self.value.bias, theirs.self.value.bias[rows])
    assert torch.equal(mine.output.dense.weight, theirs.output.dense.weight[:, rows])
    assert torch.equal(mine.output.dense.bias, theirs.output.dense.bias)
    assert mine.self.query.out_features == mine.output.dense.in_features == 10
    assert small.encoder.layer[1].attention.self.query.weight.shape == (15, 15)


def test_key_heads_go_only_with_their_whole_group():
    small = mh.cut(models.llama(), {0: [0, 1], 1: [0, 2, 4]}, tokens())
    first, second = (layer.self_attn for layer in small.model.layers)
    assert first.q_proj.weight.shape == (16, 18)
    assert first.k_proj.weight.shape == (8, 18)
    assert second.q_proj.weight.shape == (12, 18)
    assert second.k_proj.weight.shape == (12, 18)
    assert (first.num_key_value_groups, second.num_key_value_groups) == (2, 1)


def test_sinks_tables_and_norms_of_a_head_go_with_it():
    assert mh.cut(models.gpt_oss(), {0: [0, 1]}, tokens()).layers[0].self_attn.sinks.shape == (4,)
    t5 = mh.cut(models.t5(), {"encoder.block.1.layer.0.SelfAttention": [0]}, BOTH)
    first, second = (block.layer[0].SelfAttention for block in t5.encoder.block)
    assert first.relative_attention_bias.weight.shape[1] == 3
    assert second.relative_attention_bias.weight.shape[1] == 2


class Sunk(nn.Module):
    """Six heads in three groups whose outputs are weighed against a sink, by scores computed once more."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = nn.Linear(11, 24), nn.Linear(11, 12), nn.Linear(11, 12)
        self.output, self.sinks = nn.Linear(24, 11), nn.Parameter(torch.randn(6))

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (self.query, self.key, self.value))
        heads = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        total = (q @ k.transpose(-1, -2) / 2).logsumexp(-1)
        heads = heads * (total - self.sinks[:, None]).sigmoid()[..., None]
        return self.output(heads.transpose(1, 2).flatten(2))


def test_one_head_of_every_group_goes_where_a_sink_reads_the_keys_again():
    torch.manual_seed(0)
    x = torch.randn(2, 7, 11)
    # its sinks read the keys again, which no attention call shows
    small = mh.cut(nn.Sequential(Sunk()).eval(), {0: [0, 2, 4]}, x, unverified="allow")
    assert small[0].query.weight.shape == (12, 11)
    assert small[0].key.weight.shape == (12, 11)
    assert small[0].sinks.shape == (3,)


class Masked(Sunk):
    """Leaves out half of its input by chance, in evaluation, too."""

    def forward(self, x):
        return super().forward(x * (torch.rand((*x.shape[:2], 1)) > 0.5))


def test_models_that_draw_numbers_are_cut():
    torch.manual_seed(0)
    model, x = nn.Sequential(Masked()).eval(), torch.randn(2, 7, 11)
    assert mh.cut(model, {0: [2, 3]}, x, unverified="allow")[0].query.weight.shape == (16, 11)


class Layer(nn.Module):
    """Attention, and apart from it what reads its heads."""

    def __init__(self):
        super().__init__()
        self.attention, self.mix = Sunk(), nn.Linear(24, 11)
        self.attention.output = nn.Identity()

    def forward(self, x):
        return self.mix(self.attention(x))


class Sidestepped(nn.Module):
    """Runs a layer without calling it."""

    def __init__(self):
        super().__init__()
        self.layer = Layer()

    def forward(self, x):
        return self.layer.forward(x)


def test_attention_that_is_never_called_is_refused_by_name():
    with pytest.raises(ValueError, match=r"projections lie in '0\.layer', which is never called as a module"):
        mh.cut(nn.Sequential(Sidestepped()), {0: [2, 3]}, torch.randn(2, 7, 11), unverified="allow")


def test_groups_left_unequal_are_refused():
    with pytest.raises(ValueError, match=r"key heads 0, 1, 2 would have 1, 2, 2 of them.*0-1, 2-3, 4-5"):
        mh.cut(models.llama(), {0: [0]}, tokens())


def test_shared_weights_are_cut_together_or_not_at_all():
    model = models.albert()
    with torch.no_grad(), mh.watch(model) as seen:
        model(**tokens())
    with pytest.raises(ValueError, match="name the same heads there, too"):
        mh.cut(model, {seen.sites[0].name: [1]}, tokens())
    small = mh.cut(model, {site.name: [1] for site in seen.sites}, tokens())
    assert list(small.original_heads.values()) == [[0, 2]] * 3


@pytest.mark.parametrize(
    "name", ["bert", "gpt2", "llama", "bloom", "t5", "nn.TransformerEncoder", "Decoder", "Encoder"]
)
def test_all_heads_of_a_layer_can_go(name):
    make, batch = MODELS[name]
    model = make().eval()
    with torch.no_grad(), mh.watch(model) as seen:
        run(model, batch)
    first, second = seen.sites[:2]
    small = mh.cut(model, {first.name: range(first.heads)}, batch)
    assert small.original_heads == {first.name: []}
    with torch.no_grad(), mh.silence(model, {first.name: range(first.heads)}):
        wanted = run(model, batch)
    assert relative_difference(wanted, run(small, batch)) < 1e-5
    heads = [0] if len(set(second.kv_heads)) == second.heads else [0, 1]
    assert mh.cut(small, {second.name: heads}, batch).original_heads[first.name] == []


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bloom", "nn.TransformerEncoder", "Encoder"])
def test_cutting_twice_is_cutting_at_once(name):
    make, batch = MODELS[name]
    model = make().eval()
    with torch.no_grad(), mh.watch(model) as seen:
        run(model, batch)
    site = seen.sites[0]
    whole = [[0], [2]] if len(set(site.kv_heads)) == site.heads else [[0, 1], [4, 5]]
    shifted = [head - len(whole[0]) for head in whole[1]]
    twice = mh.cut(mh.cut(model, {site.name: whole[0]}, batch), {site.name: shifted}, batch)
    once = mh.cut(model, {site.name: whole[0] + whole[1]}, batch)
    assert twice.original_heads == once.original_heads
    for (key, a), (other, b) in zip(twice.state_dict().items(), once.state_dict().items(), strict=True):
        assert key == other
        assert torch.equal(a, b)
    assert relative_difference(run(once, batch), run(twice, batch)) < 1e-6


def test_generation_with_a_cache_is_that_of_the_silenced_model():
    for make in (models.gpt2, models.llama):
        model, ids = make(), tokens(batch=1)["input_ids"]
        heads = {0: [0] if make is models.gpt2 else [2, 3], 1: range(3) if make is models.gpt2 else [0, 3, 5]}
        small = mh.cut(model, heads)
        options = {"max_new_tokens": 7, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        with mh.silence(model, heads):
            wanted = model.generate(ids, **options)
        assert torch.equal(small.generate(ids, **options), wanted)


@pytest.mark.parametrize("whole", [False, True])
def test_a_static_cache_holds_layers_of_different_sizes(whole):
    model, ids = models.llama(), tokens(batch=1)["input_ids"]
    heads = {0: range(6) if whole else [2, 3], 1: [0, 3, 5]}
    small = mh.cut(model, heads)
    options = {"max_new_tokens": 7, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    with mh.silence(model, heads):
        wanted = model.generate(ids, **options)
    got = small.generate(ids, **options, cache_implementation="static", disable_compile=True)
    assert torch.equal(got, wanted)


class LaterOff:
    """Changes what a module gives by little, and only when it is given a single token: with a cache."""

    def __call__(self, module, args, kwargs, output):
        x = args[0] if args else kwargs["hidden_states"]
        first, *rest = output if isinstance(output, tuple) else (output,)
        if x.shape[1] == 1:
            first = torch.cat([first[..., :1] + 3e-3, first[..., 1:]], -1)
        return (first, *rest) if rest else first


@pytest.mark.parametrize("name", ["gpt2", "llama", "Decoder", "Seq2Seq"])
def test_what_goes_wrong_only_with_the_cache_is_found(name):
    make, batch = MODELS[name]
    model = make().eval()
    heads = chosen(model, batch)
    small = mh.cut(model, heads, batch)
    last = {"gpt2": "transformer.h.1", "llama": "model.layers.1", "Decoder": "blocks.1"}.get(
        name, "decoder.blocks.0"
    )
    hook = small.get_submodule(last).register_forward_hook(LaterOff(), with_kwargs=True)
    with pytest.raises(RuntimeError, match="generating with the cache, the cut model differs"):
        verify(model, small, batch, Arrangement("cut", {}, removed=heads), [])
    hook.remove()
    verify(model, small, batch, Arrangement("cut", {}, removed=heads), [])


def test_bad_input_is_refused():
    model = models.bert()
    with pytest.raises(ValueError, match="there is no head 3"):
        mh.cut(model, {0: [3]}, tokens())
    with pytest.raises(ValueError, match=r"no module 'encoder.layer.9'"):
        mh.cut(model, {"encoder.layer.9": [0]}, tokens())
    with pytest.raises(ValueError, match="all heads of the whole model"):
        mh.cut(model, {0: range(3), 1: range(3)}, tokens())
    with pytest.raises(ValueError, match="fits several sites"):
        mh.cut(models.t5(), {0: [0]}, BOTH)
    with pytest.raises(ValueError, match="batch: TransformerEncoder is not a transformers model"):
        mh.cut(torch_encoder(), {0: [0]})
    with pytest.raises(ValueError, match="no attention was seen"):
        mh.cut(nn.Linear(2, 3), {}, torch.randn(1, 2))


def test_nothing_to_remove_gives_a_copy():
    model = models.bert()
    copied = mh.cut(model, {}, tokens())
    assert copied is not model
    assert relative_difference(model(**tokens()), copied(**tokens())) == 0


class Tied(nn.Module):
    """One norm over the queries of all heads: no head is alone."""

    def __init__(self):
        super().__init__()
        self.heads = 3
        self.query, self.key, self.value, self.output = (nn.Linear(15, 15) for _ in range(4))
        self.norm = nn.RMSNorm(15)

    def forward(self, x):
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for y in (self.norm(self.query(x)), self.key(x), self.value(x))
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.output(out.transpose(1, 2).flatten(2))


class Stubborn(Tied):
    """Knows its number of heads by heart."""

    def forward(self, x):
        q, k, v = (
            y.view(*x.shape[:2], 3, -1).transpose(1, 2) for y in (self.query(x), self.key(x), self.value(x))
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.output(out.transpose(1, 2).flatten(2))


def test_heads_that_depend_on_each_other_are_refused():
    with pytest.raises(ValueError, match=r"every head depends on all of 0.query.weight"):
        mh.cut(nn.Sequential(Tied()), {0: [1]}, torch.randn(2, 5, 15))


def test_a_cut_that_fails_names_the_module_and_changes_nothing():
    model = nn.Sequential(Stubborn())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"cut: 0 \(Stubborn\) without heads \[1\] does not give"):
        mh.cut(model, {0: [1]}, torch.randn(2, 5, 15))
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert model[0].heads == 3
    assert not model[0]._forward_pre_hooks


def test_a_wrong_cut_is_found_and_the_first_module_that_differs_is_named():
    model, heads = models.bert(), {"encoder.layer.0.attention.self": [1]}
    small = mh.cut(model, heads, tokens())
    with torch.no_grad():
        small.encoder.layer[0].output.dense.bias[0] += 0.1
    with pytest.raises(RuntimeError, match=r"first at 'encoder.layer.0.output.dense'"):
        verify(model, small, tokens(), Arrangement("cut", {}, removed=heads), ["encoder.layer.0.attention"])


def test_the_cut_model_trains_and_copies():
    model = models.gpt2()
    small = copy.deepcopy(mh.cut(model, {0: [1], 1: [0, 2]}, tokens())).train()
    batch = tokens() | {"labels": IDS}
    optimiser = torch.optim.SGD(small.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = small(**batch).loss
        loss.backward()
        assert small.transformer.h[0].attn.c_attn.weight.grad.shape == (15, 30)
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert small.original_heads == {"transformer.h.0.attn": [0, 2], "transformer.h.1.attn": [1]}


def test_training_mode_comes_through():
    model = models.bert().train()
    small = mh.cut(model, {0: [1]}, tokens())
    assert model.training
    assert small.training
    assert small.encoder.layer[0].attention.self.training


@pytest.mark.filterwarnings("ignore")  # of torch's compiler and exporter
@pytest.mark.parametrize("name", ["bert", "llama", "bloom", "nn.TransformerEncoder"])
def test_the_cut_model_compiles_and_exports(name):
    make, batch = MODELS[name]
    model = make().eval()
    small = mh.cut(model, chosen(model, batch), batch).eval()
    args, kwargs = ((), batch) if isinstance(batch, dict) else ((batch,), {})
    if name in ("bloom", "llama"):
        kwargs = kwargs | {"use_cache": False}
    with torch.no_grad():
        wanted = small(*args, **kwargs)
        exported = torch.export.export(small, args, kwargs).module()
        assert relative_difference(wanted, exported(*args, **kwargs)) < 1e-5
        compiled = torch.compile(small, backend="eager")
        assert relative_difference(wanted, compiled(*args, **kwargs)) < 1e-5
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore")  # of torch's exporter
@pytest.mark.parametrize("name", ["bert", "nn.TransformerEncoder"])
def test_the_cut_model_goes_to_onnx(name, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    make, batch = MODELS[name]
    model = make().eval()
    small = mh.cut(model, chosen(model, batch), batch).eval()
    args, kwargs = ((), batch) if isinstance(batch, dict) else ((batch,), {})
    torch.onnx.export(small, args, tmp_path / "small.onnx", kwargs=kwargs, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(str(tmp_path / "small.onnx"), providers=["CPUExecutionProvider"])
    given = [value.numpy() for value in (*args, *kwargs.values())]
    names = [taken.name for taken in session.get_inputs()]
    got = session.run(None, dict(zip(names, given, strict=True)))
    with torch.no_grad():
        assert relative_difference(small(*args, **kwargs), [torch.from_numpy(each) for each in got]) < 1e-5


def test_other_batches_agree_too():
    """The batch that was cut with is not the only one: other lengths, other padding."""
    model, other = models.bert(), tokens(seed=3, batch=2, length=11)
    heads = {0: [0], 1: [1, 2]}
    small = mh.cut(model, heads)
    with seeded_evaluation(model), mh.silence(model, heads):
        wanted = model(**other)
    assert relative_difference(wanted, small(**other)) < 1e-5
