"""The demo on the terminal: which token is followed, and what is said about unknown ones."""

import io

import torch
from rich.console import Console

from manyheads.heads.effects.bert_steps import embedded_steps, sentence_steps
from manyheads.models.embedded import load
from manyheads.view.demo_text import print_steps
from manyheads.view.figures import attention_maps, fonts


def test_unknown_words_are_named_and_not_followed():
    steps = sentence_steps(*load(), "The cat saw ꙮ ꙮ ꙮ.")
    assert steps.tokens[len(steps.tokens) // 2] == "[UNK]"
    printed = io.StringIO()
    print_steps(steps, Console(file=printed, width=100, color_system=None))
    assert "3 of 7 tokens are [UNK]" in printed.getvalue()
    assert "one token is followed: saw" in printed.getvalue()


def test_chinese_goes_through_the_small_model(tmp_path):
    steps = embedded_steps("我是秦始皇，不是机器人。")
    assert steps.model == "manyheads/small"
    assert steps.causal
    assert steps.tokens[1:6] == list("我是秦始皇")
    assert bool(steps.is_word[1:-1].all())  # nothing is unknown
    assert max(layer.difference for layer in steps.layers) < 1e-4
    assert max(layer.map_difference for layer in steps.layers) < 1e-5
    upper = torch.ones(len(steps.tokens), len(steps.tokens)).triu(1).bool()
    assert float(steps.layers[0].weights[:, upper].abs().max()) == 0.0


def test_a_figure_without_the_font_says_which_to_install(tmp_path, monkeypatch):
    fonts._characters.cache_clear()
    monkeypatch.setattr(fonts, "_installed", dict)
    note = attention_maps.draw([torch.rand(2, 2, 2)], ["我", "秦"], tmp_path / "maps.png", "我秦")
    fonts._characters.cache_clear()
    assert "No font on this machine has 我秦" in note
    assert "fonts-noto-cjk" in note
    assert (tmp_path / "maps.png").stat().st_size > 1000
