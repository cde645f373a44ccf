"""The demo on the terminal: which token is followed, and what is said about unknown ones."""

import io

from rich.console import Console

from manyheads.heads.effects.bert_steps import sentence_steps
from manyheads.models.embedded import load
from manyheads.view.demo_text import print_steps


def test_unknown_words_are_named_and_not_followed():
    steps = sentence_steps(*load(), "The cat saw ꙮ ꙮ ꙮ.")
    assert steps.tokens[len(steps.tokens) // 2] == "[UNK]"
    printed = io.StringIO()
    print_steps(steps, Console(file=printed, width=100, color_system=None))
    assert "3 of 7 tokens are [UNK]" in printed.getvalue()
    assert "one token is followed: saw" in printed.getvalue()
