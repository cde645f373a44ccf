"""One input with heads silenced: what is observed is what the silenced model does, and no trace is left."""

import pytest
import torch

import manyheads as mh
from manyheads.heads.effects.ablated import exact_maps, forwards, observe_answer, observe_input
from manyheads.heads.effects.followed_attention import FollowedAttention

FIRST, SECOND = (f"blocks.{n}.attention" for n in range(2))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return mh.Decoder(12, heads=3, layers=2, vocabulary=31).eval()


@pytest.fixture
def ids():
    return torch.randint(31, (1, 7), generator=torch.Generator().manual_seed(0))


def test_the_maps_and_the_answer_are_those_of_the_silenced_model(model, ids):
    heads = {FIRST: [0, 2]}
    observation, answer = observe_answer(model, ids, heads)
    with torch.no_grad(), mh.silence(model, heads):
        expected = model(ids)
        weights = mh.maps(model, ids, {SECOND: [1]})[SECOND].weights[0, 0]
    assert torch.equal(observation.seen.result, expected)
    assert answer["items"][0][1] == pytest.approx(expected[0, -1].softmax(-1).max().item(), abs=1e-6)
    torch.testing.assert_close(observation.seen.maps[1].exact[1], weights)
    torch.testing.assert_close(exact_maps(model, ids, {SECOND: [1]}, heads)[SECOND][0], weights)
    row = exact_maps(model, ids, {SECOND: [1]}, heads, queries=[3])[SECOND][0, 0]
    torch.testing.assert_close(row, weights[3])
    full = observe_answer(model, ids)[0].seen
    assert not torch.allclose(full.result, expected)
    torch.testing.assert_close(forwards(model, [ids], heads)[0].result, expected)
    torch.testing.assert_close(forwards(model, [ids])[0].result, full.result)


def test_steps_are_read_with_heads_silenced_too(model, ids):
    full, without = (observe_input(model, ids, heads, steps=True).steps for heads in (None, {FIRST: [1]}))
    assert [step.name for step in full] == [step.name for step in without]
    by_name = {step.name: step.values for step in full}
    torch.testing.assert_close(by_name["joined"], by_name["heads"].transpose(0, 1).flatten(1))
    assert observe_input(model, ids).steps is None


def test_the_hooks_are_gone_afterwards(model, ids):
    with pytest.raises(RuntimeError, match="stop"), FollowedAttention(model):
        raise RuntimeError("stop")
    observe_input(model, ids, {FIRST: [1]}, steps=True)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_head_that_does_not_exist(model, ids):
    with pytest.raises((ValueError, IndexError)):
        observe_input(model, ids, {FIRST: [3]})
