"""Refit: the least-squares solution itself, on the refitted model's inputs, padding left out."""

import copy
import weakref

import pytest
import torch
from tests.helpers.models import gpt2_config
from torch import nn

import manyheads as mh
from manyheads.surgery.paused_passes import passes
from manyheads.surgery.refit import writers
from manyheads.surgery.refit_memory import refit_memory


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return mh.Encoder(14, heads=2, layers=2, vocabulary=19).double().eval()


@pytest.fixture(scope="module")
def without(model):
    """The model without a head."""
    return mh.cut(model, {0: [0]}, texts(2))


@pytest.fixture
def small(without):
    return copy.deepcopy(without)


def texts(count=60, length=11, seed=1):
    return torch.randint(19, (count, length), generator=torch.Generator().manual_seed(seed))


def distance(model, small, ids):
    with torch.no_grad():
        return (model(ids) - small(ids)).square().mean().item()


def test_it_comes_closer_on_text_it_has_not_seen(model, small):
    held_out = texts(seed=2)
    before = distance(model, small, held_out)
    fitted = mh.refit(small, [texts()], teacher=model)
    assert distance(model, small, held_out) < 0.8 * before
    names = ["attention.output", "feed_forward.down"]
    assert [f.writer for f in fitted] == [f"blocks.{i}.{name}" for i in range(2) for name in names]
    assert all(f.after <= f.before for f in fitted)
    assert fitted[0].rows == 60 * 11


def solved(small, model, batch, lengths, advances, ridge):
    """The change of a map's weights by the formula: sequences count alike, a ridge holds to the old ones."""
    with passes(small, [batch]) as (own,), passes(model, [batch]) as (full,):
        for _ in range(advances):
            stop, wanted = own.advance(), full.advance()
        read, missing = stop.read, wanted.stream + wanted.written - stop.stream - stop.written
    real = torch.arange(11) < lengths[:, None]
    weight = (1 / lengths.double())[:, None].expand(len(lengths), 11)[real].sqrt().unsqueeze(1)
    x = torch.cat([read[real], torch.ones(int(real.sum()), 1, dtype=torch.float64)], 1) * weight
    held = torch.full((x.shape[1],), ridge * (x * x).sum(0).mean().item(), dtype=torch.float64)
    held[-1] = 1e-9 * (weight**2).sum()
    return torch.linalg.solve(x.T @ x + held.diag(), x.T @ (missing[real] * weight))


def test_the_weights_are_those_of_ridge_regression(model, without, small):
    """The second map is fitted to the stream that the first one's new weights make."""
    lengths = torch.tensor([5, 11, 7, 11, 3, 9, 11, 8, 2, 11, 6, 11])
    batch = {"x": texts(12), "lengths": lengths}
    fitted = mh.refit(small, [batch], teacher=model)
    assert fitted[0].rows == int(lengths.sum())
    before = copy.deepcopy(without)
    for number, path in enumerate(("attention.output", "feed_forward.down")):
        old, new = (m.blocks[0].get_submodule(path) for m in (before, small))
        change = solved(before, model, batch, lengths, number + 1, fitted[number].ridge)
        torch.testing.assert_close(new.weight - old.weight, change[:-1].T, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(new.bias - old.bias, change[-1], rtol=1e-6, atol=1e-9)
        old.load_state_dict(new.state_dict())


def test_padding_has_no_say(model, without):
    lengths = torch.tensor([4] * 30)
    one, other = copy.deepcopy(without), copy.deepcopy(without)
    ids = texts(30)
    changed = ids.clone()
    changed[:, 4:] = 3
    mh.refit(one, [{"x": ids, "lengths": lengths}], teacher=model)
    mh.refit(other, [{"x": changed, "lengths": lengths}], teacher=model)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_batches_add_up(model, without):
    one, other = copy.deepcopy(without), copy.deepcopy(without)
    mh.refit(one, [texts()], teacher=model)
    mh.refit(other, list(texts().split(20)), teacher=model)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


def test_an_uncut_model_stays_as_it_is(model):
    same = copy.deepcopy(model)
    fitted = mh.refit(same, [texts()], teacher=model)
    assert all(f.ridge is None and f.before == 0 for f in fitted)
    assert all(torch.equal(a, b) for a, b in zip(same.parameters(), model.parameters(), strict=True))


def test_with_too_little_text_it_says_so_and_does_no_harm(model, small):
    before = distance(model, small, texts(seed=2))
    fitted = mh.refit(small, [texts(1, 9)], teacher=model)
    assert fitted[0].note == "little text: 9 tokens for 7 inputs"
    assert distance(model, small, texts(seed=2)) < 1.5 * before


def test_torch_attention_is_refitted_after_it_was_cut():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, nhead=3, dim_feedforward=13, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    batches = [torch.randn(40, 7, 12, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    small = mh.cut(model, {0: [1]}, batches[0][:2])
    fitted = mh.refit(small, batches, teacher=model)
    assert [f.writer for f in fitted][:2] == ["layers.0.self_attn.output", "layers.0.linear2"]
    assert fitted[0].after < fitted[0].before


def test_transposed_weights_are_refitted():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = gpt2_config(vocab_size=19, n_positions=16, n_embd=12, n_layer=2, n_head=3)
    model = transformers.GPT2LMHeadModel(config).eval()
    batches = [{"input_ids": texts()}]
    small = mh.cut(model, {0: [1], 1: [0]})
    fitted = mh.refit(small, batches, teacher=model)
    assert fitted[0].writer == "transformer.h.0.attn.c_proj"
    assert fitted[0].after < fitted[0].before


def test_the_threads_end_when_something_goes_wrong(small):
    import threading

    before = threading.active_count()
    with pytest.raises(ValueError, match="teacher: it never writes"):
        mh.refit(small, [texts()], teacher=nn.Sequential(nn.Embedding(19, 14)).double())
    assert threading.active_count() == before


def test_a_model_without_a_stream_is_refused():
    plain = nn.Sequential(nn.Embedding(19, 5), nn.Linear(5, 5))
    with pytest.raises(ValueError, match="nothing to refit"):
        mh.refit(plain, [texts()], teacher=plain)


@pytest.mark.parametrize("known", [True, False])
def test_only_what_one_layer_knows_is_kept_where_thewriters_are_known(model, known):
    names, made = writers(model, texts(2)), []
    note = model.blocks[0].attention.query.register_forward_hook(
        lambda module, args, output: made.append(weakref.ref(output))
    )
    with passes(model, [texts(2)], names if known else None) as (only,):
        while only.advance().writer != names[-1]:
            pass
        assert [each() is None for each in made] == [known]
    note.remove()


class Flat(nn.Module):
    """A stream of all tokens of a batch in one row after the other, as in OPT, around an encoder's blocks."""

    def __init__(self, encoder, flat):
        super().__init__()
        self.encoder, self.flat = copy.deepcopy(encoder), flat

    def forward(self, x, lengths):
        hidden = self.encoder.embedding(x)
        for block in self.encoder.blocks:
            normed = block.attention_norm(hidden)
            hidden = hidden + block.attention(normed, mask=mh.mask.padding(lengths))
            shape = hidden.shape
            hidden = hidden.flatten(0, 1) if self.flat else hidden
            hidden = (hidden + block.feed_forward(block.feed_forward_norm(hidden))).view(shape)
        return hidden


def test_a_stream_that_is_flat_is_refitted_like_any_other(model, without):
    """Padding has no say in it, and sequences count alike."""
    lengths = torch.tensor([4, 11, 7] * 10)
    batch = {"x": texts(30), "lengths": lengths}
    plain, flat = Flat(without, flat=False), Flat(without, flat=True)
    for small in (plain, flat):
        mh.refit(small, [batch], teacher=Flat(model, small.flat))
    for a, b in zip(plain.parameters(), flat.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert distance_of(flat, Flat(without, flat=True), batch) > 1e-4


def distance_of(one, other, batch):
    with torch.no_grad():
        return (one(**batch) - other(**batch)).abs().max().item()


def test_a_budget_of_memory_limits_what_is_read(model, small):
    """Fewer batches, said in the notes, or a sentence; with room for all of them nothing changes."""
    batches = [texts(6, seed=seed) for seed in range(20)]
    needs = refit_memory(model, batches[0])
    plenty = copy.deepcopy(small)
    everything = mh.refit(plenty, batches, teacher=model, memory="1GB")
    assert all(f.note == "" and f.rows == 20 * 6 * 11 for f in everything)
    budget = int(needs.fixed + 7.5 * needs.batch)
    some = mh.refit(small, batches, teacher=model, memory=budget)
    assert {f.rows for f in some} == {7 * 6 * 11}
    assert all(f.note.startswith("7 of 20 batches, to keep within") for f in some)
    assert some[0].after < some[0].before
    with pytest.raises(ValueError, match=r"memory: got .*, and a refit needs .* for one layer and one batch"):
        mh.refit(small, batches, teacher=model, memory=int(needs.fixed))
