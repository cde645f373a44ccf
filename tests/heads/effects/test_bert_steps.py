"""A sentence through BERT: each step follows from the one before, and the last is the model's own."""

import pytest
import torch
from torch.nn import functional as F

from manyheads.heads.effects import bert_steps
from manyheads.heads.effects.bert_steps import copied_attention, sentence_steps, strongest_link, tokenized
from manyheads.models.embedded import load

SENTENCE = "The animal did not cross the street because it was too tired."


@pytest.fixture(scope="module")
def loaded():
    return load()


@pytest.fixture(scope="module")
def steps(loaded):
    return sentence_steps(*loaded, SENTENCE)


def test_every_layer_is_the_models_own(steps):
    assert len(steps.layers) == 6
    for layer in steps.layers:
        assert (
            0 < layer.difference < 5e-5
        )  # ours is computed by other means: exactly 0 would be no comparison
        assert 0 < layer.map_difference < 1e-5
    assert steps.difference < 1e-6


def test_a_wrong_weight_shows(loaded, monkeypatch):
    def broken(block):
        ours = copied_attention(block)
        with torch.no_grad():
            ours.key.weight[:32] = 0.0  # one head looks everywhere alike
        return ours

    monkeypatch.setattr(bert_steps, "copied_attention", broken)
    wrong = sentence_steps(*loaded, SENTENCE)
    assert wrong.layers[0].difference > 1e-2
    assert wrong.layers[0].map_difference > 1e-2


def test_steps_follow_from_each_other(steps, loaded):
    model, _ = loaded
    first = steps.layers[0]
    scores = first.query @ first.key.transpose(1, 2) / 32**0.5
    torch.testing.assert_close(first.weights, scores.softmax(-1))
    torch.testing.assert_close(first.outputs, first.weights @ first.value)
    torch.testing.assert_close(first.joined[:, 32:64], first.outputs[1])
    dense = model.encoder.layer[0].attention.output.dense
    torch.testing.assert_close(first.projected, F.linear(first.joined, dense.weight, dense.bias))
    assert steps.sentence.norm().item() == pytest.approx(1.0, abs=1e-6)


def test_effective_keys_are_the_entropys(steps):
    for layer in steps.layers:
        entropy = -torch.special.xlogy(layer.weights, layer.weights).sum(-1).mean(-1)
        torch.testing.assert_close(layer.effective_keys.float(), entropy.exp(), rtol=1e-4, atol=1e-4)


def test_the_strongest_link(steps):
    link = strongest_link(steps)
    assert abs(link.query - link.key) > 1
    assert {link.query, link.key}.isdisjoint({0, len(steps.tokens) - 1})
    assert steps.layers[link.layer].seen[link.head, link.query, link.key].item() == link.weight
    pronoun, animal = steps.tokens.index("it"), steps.tokens.index("animal")
    assert link.weight >= max(layer.seen[:, pronoun, animal].max().item() for layer in steps.layers)


def test_no_link_between_so_few_words(loaded):
    assert strongest_link(sentence_steps(*loaded, "Hi")) is None


@pytest.mark.parametrize("text", ["", " \n\t "])
def test_nothing_to_read(loaded, text):
    with pytest.raises(ValueError, match="sentence: expected some text, got none"):
        tokenized(loaded[1], text, 512)


def test_unknown_words_are_no_words(loaded):
    steps = sentence_steps(*loaded, "The cat saw ꙮ ꙮ ꙮ.")
    assert steps.tokens.count("[UNK]") == 3
    assert [steps.tokens[i] for i in steps.is_word.nonzero().flatten()] == ["the", "cat", "saw", "."]
    link = strongest_link(steps)
    assert "[UNK]" not in (steps.tokens[link.query], steps.tokens[link.key])
