"""Positions: values computed by hand, relative positions, cached steps, bad input."""

import math

import pytest
import torch

from manyheads.nn.positions import LearnedPositions, Rotary, SinusoidalPositions, sinusoidal


def test_sinusoidal_is_the_papers_formula():
    table = sinusoidal(torch.arange(11, dtype=torch.float64), 6)
    for p in range(11):
        for c in range(3):
            angle = p / 10000 ** (2 * c / 6)
            assert table[p, 2 * c].item() == pytest.approx(math.sin(angle), abs=1e-12)
            assert table[p, 2 * c + 1].item() == pytest.approx(math.cos(angle), abs=1e-12)


def test_sinusoidal_of_odd_width_drops_the_last_cosine():
    full = sinusoidal(5, 7)
    assert full.shape == (5, 7)
    torch.testing.assert_close(full[:, 6], (torch.arange(5) / 10000 ** (6 / 7)).sin())


def test_sinusoidal_takes_positions_of_any_shape():
    table = sinusoidal(13, 6)
    places = torch.tensor([[2, 3, 5], [7, 11, 12]])
    torch.testing.assert_close(sinusoidal(places, 6), table[places])


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_is_a_turn_of_each_pair_as_a_complex_number(interleaved):
    x = torch.randn(2, 3, 7, 10, dtype=torch.float64)
    frequency = 10000 ** (-torch.arange(5, dtype=torch.float64) * 2 / 10)
    angle = (torch.arange(7, dtype=torch.float64) + 4)[:, None] * frequency
    turn = torch.polar(torch.ones_like(angle), angle)
    if interleaved:
        expected = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (5, 2))) * turn).flatten(-2)
    else:
        turned = torch.complex(x[..., :5], x[..., 5:]) * turn
        expected = torch.cat([turned.real, turned.imag], dim=-1)
    torch.testing.assert_close(Rotary(10, interleaved=interleaved)(x, offset=4), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_scores_depend_on_the_distance_only(interleaved):
    q, k = torch.randn(2, 1, 1, 7, 6, dtype=torch.float64)
    rotary = Rotary(6, interleaved=interleaved)
    scores = [rotary(q, offset=o) @ rotary(k, offset=o).mT for o in (0, 29)]
    torch.testing.assert_close(*scores, atol=1e-12, rtol=0)
    assert not torch.allclose(scores[0], q @ k.mT, atol=1e-3)


def test_rotary_leaves_channels_past_its_width_alone():
    x = torch.randn(2, 3, 5, 11)
    turned = Rotary(4)(x)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert torch.equal(turned[..., :4], Rotary(4)(x[..., :4]))


def test_rotary_angles_stay_exact_in_bfloat16():
    x = torch.randn(1, 1, 3, 4).bfloat16()
    far = Rotary(4)(x, offset=4001)
    assert far.dtype == torch.bfloat16
    torch.testing.assert_close(far.float(), Rotary(4)(x.float(), offset=4001), atol=0.05, rtol=0)


def test_rotary_has_nothing_to_save():
    assert Rotary(4).state_dict() == {}


@pytest.mark.parametrize("make", [lambda: SinusoidalPositions(6), lambda: LearnedPositions(17, 6)])
def test_positions_added_in_steps_or_after_left_padding_are_the_same(make):
    add = make()
    x = torch.randn(2, 7, 6)
    whole = add(x)
    assert not torch.equal(whole, x)
    torch.testing.assert_close(add(x[:, 5:], offset=5), whole[:, 5:])
    left = torch.tensor([0, 3])
    padded = add(torch.cat([x[:1], x[1:].roll(3, dims=1)]), left=left)
    torch.testing.assert_close(padded[0], whole[0])
    torch.testing.assert_close(padded[1, 3:], whole[1, :4])
    torch.testing.assert_close(add(x[1:, :1], offset=7, left=left[1:]), add(x[1:, :1], offset=4))


def test_learned_positions_are_trained():
    add = LearnedPositions(5, 3)
    add(torch.zeros(2, 4, 3)).sum().backward()
    assert torch.equal(add.weight.grad[:, 0], torch.tensor([2.0, 2, 2, 2, 0]))


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"width: expected an even number .* got 5"):
        Rotary(5)
    with pytest.raises(ValueError, match="base: expected a positive number, got 0"):
        Rotary(4, base=0)
    with pytest.raises(ValueError, match=r"x: expected at least the 4 channels .* got 3"):
        Rotary(4)(torch.zeros(1, 1, 2, 3))
    with pytest.raises(ValueError, match="max_length: expected at least 1, got 0"):
        LearnedPositions(0, 4)
    with pytest.raises(ValueError, match=r"length: expected at most the 11 learned positions .* got 12"):
        LearnedPositions(11, 4)(torch.zeros(1, 5, 4), offset=7)
