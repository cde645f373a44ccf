"""``manyheads demo``: one sentence through an embedded model, step by step."""

import os
from pathlib import Path
from typing import Annotated

import manyheads as mh
from manyheads.cli.options import Figure, Out
from manyheads.common.console import loading
from manyheads.common.language import words
from manyheads.view import terminal


def demo(
    sentence: Annotated[
        str | None, "The sentence to send through the model; a built-in one by default."
    ] = None,
    out: Out = Path("out/demo"),
    open: Figure = False,
) -> None:
    """Follow a sentence through the heads of a real model.

    Prints every step with its shape and a few of its numbers: tokens, ids, embedding, positions, each head's
    queries, keys and values, its attention map, concatenation, output projection, sentence embedding. Writes
    a figure of all attention maps. The attention is computed by this package and compared with the model's.
    The model is MiniLM, a sentence encoder of 6 layers with 12 heads each; for a Chinese sentence, and where
    MiniLM is not installed, it is a small one that comes with manyheads and reads Chinese and English.

    [bold]Examples[/bold]

      manyheads demo --sentence "Heads share the work." --open
      manyheads demo --language zh
      manyheads demo --sentence "我是秦始皇"
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    with loading(words("the model")):
        steps = mh.heads.effects.bert_steps.embedded_steps(sentence)
    mh.view.demo_text.present_steps(steps, out / "heads.png")
    if open:
        terminal.presentation.open_file(out / "heads.png")
