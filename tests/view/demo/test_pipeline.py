"""The way of a sentence: each step follows from the one before and ends where the model itself ends."""

import io

import pytest
import torch
from rich.console import Console
from torch.nn import functional as F

from manyheads.models.embedded import load
from manyheads.view.demo.pipeline import carry, pipeline, read, strongest_link
from manyheads.view.demo.terminal import tell

SENTENCE = "The animal did not cross the street because it was too tired."


@pytest.fixture(scope="module")
def loaded():
    return load()


@pytest.fixture(scope="module")
def way(loaded):
    return pipeline(*loaded, SENTENCE)


def test_every_layer_is_the_models_own(way):
    assert len(way.layers) == 6
    for layer in way.layers:
        assert (
            0 < layer.difference < 5e-5
        )  # ours is computed by other means: exactly 0 would be no comparison
        assert 0 < layer.map_difference < 1e-5
    assert way.difference < 1e-6


def test_a_wrong_weight_shows(loaded, monkeypatch):
    def broken(block):
        ours = carry(block)
        with torch.no_grad():
            ours.key.weight[:32] = 0.0  # one head looks everywhere alike
        return ours

    monkeypatch.setattr("manyheads.view.demo.pipeline.carry", broken)
    wrong = pipeline(*loaded, SENTENCE)
    assert wrong.layers[0].difference > 1e-2
    assert wrong.layers[0].map_difference > 1e-2


def test_steps_follow_from_each_other(way, loaded):
    model, _ = loaded
    first = way.layers[0]
    scores = first.query @ first.key.transpose(1, 2) / 32**0.5
    torch.testing.assert_close(first.weights, scores.softmax(-1))
    torch.testing.assert_close(first.outputs, first.weights @ first.value)
    torch.testing.assert_close(first.joined[:, 32:64], first.outputs[1])
    dense = model.encoder.layer[0].attention.output.dense
    torch.testing.assert_close(first.projected, F.linear(first.joined, dense.weight, dense.bias))
    assert way.sentence.norm().item() == pytest.approx(1.0, abs=1e-6)


def test_effective_keys_are_the_entropys(way):
    for layer in way.layers:
        entropy = -torch.special.xlogy(layer.weights, layer.weights).sum(-1).mean(-1)
        torch.testing.assert_close(layer.effective_keys.float(), entropy.exp(), rtol=1e-4, atol=1e-4)


def test_the_strongest_link(way):
    link = strongest_link(way)
    assert abs(link.query - link.key) > 1
    assert {link.query, link.key}.isdisjoint({0, len(way.tokens) - 1})
    assert way.layers[link.layer].seen[link.head, link.query, link.key].item() == link.weight
    pronoun, animal = way.tokens.index("it"), way.tokens.index("animal")
    assert link.weight >= max(layer.seen[:, pronoun, animal].max().item() for layer in way.layers)


def test_no_link_between_so_few_words(loaded):
    assert strongest_link(pipeline(*loaded, "Hi")) is None


@pytest.mark.parametrize("text", ["", " \n\t "])
def test_nothing_to_read(loaded, text):
    with pytest.raises(ValueError, match="sentence: expected some text, got none"):
        read(loaded[1], text, 512)


def test_unknown_words_are_told_and_not_followed(loaded):
    way = pipeline(*loaded, "The cat saw ꙮ ꙮ ꙮ.")
    assert way.tokens.count("[UNK]") == 3
    assert way.tokens[len(way.tokens) // 2] == "[UNK]"
    told = io.StringIO()
    tell(way, Console(file=told, width=100, color_system=None))
    assert "3 of 7 tokens are [UNK]" in told.getvalue()
    assert "one token is followed: saw" in told.getvalue()
    link = strongest_link(way)
    assert "[UNK]" not in (way.tokens[link.query], way.tokens[link.key])
