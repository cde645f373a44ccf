"""The step of generation without modules: the logits of the plain decoder, and who is not run that way."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode

import manyheads as mh
from manyheads.nn import generate as generation
from manyheads.nn.decoding import steps_of
from manyheads.nn.transformers import Decoder, Seq2Seq

OPTIONS = {
    "as it is": {},
    "no biases": {"bias": False},
    "one key head": {"kv_heads": 1},
    "two key heads, gated": {"kv_heads": 2, "gated": True, "activation": "silu", "rms_norm": True},
    "post-norm": {"norm": "post"},
    "queries and keys normalised": {"qk_norm": True},
    "other widths": {"d_key": 6, "d_value": 10},
    "no residual": {"residual": False},
    "narrow": {"d_hidden": 7},
    "untied": {"tied": False},
}
POSITIONS = ("rotary", "learned", "sinusoidal", "none")
LEFT = torch.tensor([0, 3, 5])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def decoder(positions="rotary", **options):
    longest = {"max_length": 61} if positions == "learned" else {}
    return Decoder(20, 4, 3, vocabulary=23, positions=positions, **longest, **options).double().eval()


def lone_logits(model, ids, left=0):
    """The logits after a sequence that is alone in the world: (vocabulary,)."""
    return model(ids[None, left:])[0, -1]


@pytest.mark.parametrize("rows", [1, 3, 7])
@pytest.mark.parametrize("options", OPTIONS)
@torch.no_grad()
def test_steps_are_the_plain_decoder(options, rows):
    model = decoder(POSITIONS[(rows + len(options)) % 4], **OPTIONS[options])
    ids = torch.randint(23, (rows, 11))
    steps = steps_of(model, model.new_cache(11), rows, 1)
    logits = [steps.prompt(ids[:, :7])] + [steps.token(ids[:, n : n + 1]) for n in range(7, 11)]
    torch.testing.assert_close(torch.stack(logits, 1), model(ids)[:, 6:], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("positions", POSITIONS)
@torch.no_grad()
def test_padding_at_the_left_is_not_seen(positions):
    model, ids = decoder(positions), torch.randint(23, (3, 11))
    steps = steps_of(model, model.new_cache(11, left=LEFT), 3, 1)
    steps.prompt(ids[:, :7])
    for n in range(7, 11):
        logits = steps.token(ids[:, n : n + 1])
    for row, left in enumerate(LEFT.tolist()):
        torch.testing.assert_close(logits[row], lone_logits(model, ids[row], left), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("left", [None, LEFT])
@pytest.mark.parametrize("options", ["as it is", "two key heads, gated", "other widths"])
@torch.no_grad()
def test_hypotheses_read_what_their_parents_wrote(options, left):
    model, beams = decoder("sinusoidal", **OPTIONS[options]), 5
    prompt = torch.randint(23, (3, 7))
    steps = steps_of(model, model.new_cache(7 + 4 * beams, left=left), 3, beams)
    steps.prompt(prompt)
    written = prompt[:, None].expand(-1, beams, -1)
    for _ in range(4):
        parents, token = torch.randint(beams, (3, beams)), torch.randint(23, (3, beams))
        written = written.gather(1, parents[..., None].expand_as(written))
        written = torch.cat([written, token[..., None]], -1)
        logits = steps.token(token.view(-1, 1), parents).view(3, beams, -1)
    for row in range(3):
        skip = 0 if left is None else int(left[row])
        for beam in range(beams):
            alone = lone_logits(model, written[row, beam], skip)
            torch.testing.assert_close(logits[row, beam], alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("lengths", [None, torch.tensor([7, 2, 5])])
@torch.no_grad()
def test_seq2seq_steps_read_the_source(lengths, beams):
    model = Seq2Seq(20, 4, 2, vocabulary=23, kv_heads=2, qk_norm=True).double().eval()
    source, target = torch.randint(23, (3, 7)), torch.randint(23, (3, beams, 5))
    target[:, :, 0] = 1
    read = model.encoder(source, lengths=lengths)
    cache = model.decoder.new_cache(1 + 4 * beams, read, context_lengths=lengths)
    steps = steps_of(model.decoder, cache, 3, beams)
    steps.prompt(torch.ones(3, 1, dtype=torch.int64))
    stay = torch.arange(beams).expand(3, -1)
    for n in range(1, 5):
        logits = steps.token(target[:, :, n].reshape(-1, 1), stay).view(3, beams, -1)
    for beam in range(beams):
        expected = model(source, target[:, beam], source_lengths=lengths)[:, -1]
        torch.testing.assert_close(logits[:, beam], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("beams", [1, 4])
def test_generate_writes_the_same_either_way(beams, monkeypatch):
    model, prompt = decoder(), torch.randint(23, (3, 7))
    options = {"new_tokens": 19, "lengths": torch.tensor([7, 3, 5]), "beams": beams, "end": 4}
    fast = mh.generate(model, prompt, **options)
    monkeypatch.setattr(generation, "steps_of", lambda *_: None)
    assert torch.equal(fast, mh.generate(model, prompt, **options))


class Adapter(nn.Linear):
    """A projection that somebody put in the place of ours."""

    def forward(self, x):
        return super().forward(x) * 2


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def hooked(model):
    model.blocks[1].attention.query.register_forward_hook(lambda module, args, out: out * 2)


def replaced(model):
    linear = model.blocks[1].attention.key
    model.blocks[1].attention.key = Adapter(linear.in_features, linear.out_features).double()


def patched(model):
    model.blocks[0].feed_forward.forward = lambda x: x


def normed(model):
    parametrizations.weight_norm(model.blocks[0].attention.value)


@pytest.mark.parametrize("change", [hooked, replaced, patched, normed])
def test_a_model_that_somebody_changed_is_run_as_it_is(change, monkeypatch):
    model, prompt = decoder(), torch.randint(23, (2, 5))
    assert steps_of(model, model.new_cache(9), 2, 1) is not None
    change(model)
    assert steps_of(model, model.new_cache(9), 2, 1) is None
    written = mh.generate(model, prompt, new_tokens=17)
    ids = prompt
    with torch.no_grad():
        for _ in range(17):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
    assert torch.equal(written, ids[:, 5:])


@pytest.mark.parametrize(
    "options", [{"window": 5}, {"chunk": 5}, {"positions": "alibi"}, {"kernel": "reference"}]
)
def test_what_the_step_cannot_do_is_left_to_the_modules(options):
    model = decoder(**options)
    assert steps_of(model, model.new_cache(9), 2, 1) is None


def test_who_looks_sees_the_modules():
    model, prompt = decoder(), torch.randint(23, (2, 5))
    with Doubled():
        assert steps_of(model, model.new_cache(9), 2, 1) is None
    with mh.silence(model, {1: [0, 2]}, unverified="allow"):  # a cache cannot be probed
        assert steps_of(model, model.new_cache(9), 2, 1) is None
        silenced = mh.generate(model, prompt, new_tokens=29)
    assert not torch.equal(silenced, mh.generate(model, prompt, new_tokens=29))
    with mh.watch(model) as seen:
        mh.generate(model, prompt, new_tokens=17)
    assert int(seen.table["tokens"].max()) == 2 * (5 + 16)


def test_half_precision_is_left_to_the_modules():
    model = decoder().bfloat16()
    assert steps_of(model, model.new_cache(9), 2, 1) is None
