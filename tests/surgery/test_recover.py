"""Recovery: it learns, goes on where it was, and stops cleanly."""

import copy
import os
import signal

import pytest
import torch

import manyheads as mh
from manyheads.surgery.paused_passes import passes


@pytest.fixture
def model():
    torch.manual_seed(0)
    return mh.Encoder(14, heads=2, layers=2, vocabulary=19).eval()


def texts(count=3):
    return [torch.randint(19, (13, 11), generator=torch.Generator().manual_seed(i)) for i in range(count)]


def silenced(model):
    small = copy.deepcopy(model)
    small.blocks[0].attention.output.weight.data[:, :7] = 0.0
    return small


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_the_loss_falls_and_the_teacher_stays(model):
    small, before = silenced(model), copy.deepcopy(model)
    found = mh.recover(small, texts(), teacher=model, steps=40, learning_rate=3e-3)
    assert len(found.losses) == 40
    assert not found.stopped
    assert sum(found.losses[-3:]) < 0.3 * sum(found.losses[:3])
    assert same(model, before)
    assert small.embedding.weight.equal(model.embedding.weight)
    assert all(p.requires_grad and p.grad is None for p in small.parameters())


def test_language_models_learn_the_distribution():
    torch.manual_seed(0)
    model = mh.Decoder(14, heads=2, layers=2, vocabulary=19).eval()
    small = silenced(model)
    before = divergence(model, small)
    mh.recover(small, texts(), teacher=model, steps=40, learning_rate=3e-3)
    assert divergence(model, small) < 0.3 * before


def divergence(model, small):
    with torch.no_grad():
        a, b = (m(texts()[0]).log_softmax(-1) for m in (model, small))
    return (a.exp() * (a - b)).sum(-1).mean().item()


def streams(model, ids):
    """The stream behind each writer."""
    found = []
    with passes(model, [ids]) as (only,):
        while (stop := only.advance()) is not None:
            found.append((stop.stream + stop.written).flatten(0, 1))
    return found


def test_every_layer_is_told_what_it_should_do():
    torch.manual_seed(0)
    model = mh.Decoder(14, heads=2, layers=2, vocabulary=19).double().eval()
    small = silenced(model)
    ids = texts(1)[0]
    shares = [
        (a - b).square().sum() / (a - a.mean(0)).square().sum()
        for a, b in zip(streams(model, ids), streams(small, ids), strict=True)
    ]
    assert len(shares) == 4
    found = mh.recover(copy.deepcopy(small), [ids], teacher=model, steps=1, learning_rate=1e-9)
    expected = divergence(model, small) + torch.stack(shares).mean().item()
    assert found.losses[0] == pytest.approx(expected, rel=1e-5)


def test_it_goes_on_where_it_stopped(model, tmp_path):
    whole, parts = silenced(model), silenced(model)
    state = tmp_path / "recovery.safetensors"
    mh.recover(whole, texts(), teacher=model, steps=9, learning_rate=1e-3)

    def interrupt(stage, done, total):
        if done > 0.4 * total:
            os.kill(os.getpid(), signal.SIGINT)

    first = mh.recover(
        parts, texts(), teacher=model, steps=9, learning_rate=1e-3, state=state, progress=interrupt
    )
    assert first.stopped
    assert 0 < len(first.losses) < 9
    fresh = silenced(model)
    second = mh.recover(fresh, texts(), teacher=model, steps=9, learning_rate=1e-3, state=state)
    assert not second.stopped
    assert second.losses[: len(first.losses)] == first.losses
    assert same(fresh, whole)


def test_a_state_of_something_else_is_refused(model, tmp_path):
    state = tmp_path / "recovery.safetensors"
    mh.recover(silenced(model), texts(), teacher=model, steps=2, state=state)
    with pytest.raises(ValueError, match="its steps is 2, here it is 3"):
        mh.recover(silenced(model), texts(), teacher=model, steps=3, state=state)
    with pytest.raises(ValueError, match="of another recovery: its model"):
        mh.recover(copy.deepcopy(model), texts(), teacher=model, steps=2, state=state)
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(ValueError, match="damaged"):
        mh.recover(silenced(model), texts(), teacher=model, steps=2, state=state)


def test_what_makes_no_sense_is_refused(model):
    with pytest.raises(ValueError, match="steps: got 0"):
        mh.recover(silenced(model), texts(), teacher=model, steps=0)
    with pytest.raises(ValueError, match="learning_rate: got -1"):
        mh.recover(silenced(model), texts(), teacher=model, learning_rate=-1)
    with pytest.raises(ValueError, match="batches: expected at least one"):
        mh.recover(silenced(model), [], teacher=model)
    with pytest.raises(ValueError, match=r"ends in \.safetensors"):
        mh.recover(silenced(model), texts(), teacher=model, state="here.bin")
