"""``manyheads demo``: one sentence through the embedded MiniLM, step by step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from rich.console import Console

SENTENCE = "The animal did not cross the street because it was too tired."


def demo(
    sentence: Annotated[str, "The sentence to send through the model."] = SENTENCE,
    out: Annotated[Path, "The folder for the figure; created if it does not exist."] = Path("out/demo"),
) -> None:
    """Follow a sentence through the heads of MiniLM, a real sentence encoder of 6 layers with 12 heads each.

    Prints every step with its shape and a few of its numbers: tokens, ids, embedding, positions, each head's
    queries, keys and values, its attention map, concatenation, output projection, sentence embedding. Writes
    a figure of all 72 attention maps. The attention is computed by this package and compared with MiniLM's.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    console, errors = Console(), Console(stderr=True)
    with errors.status("Loading torch and the embedded MiniLM"):
        from manyheads.heads.effects.bert_steps import sentence_steps
        from manyheads.models.embedded import load
        from manyheads.view.demo_text import print_steps
        from manyheads.view.figures.attention_maps import draw

        steps = sentence_steps(*load(), sentence)
    print_steps(steps, console)
    path = out / "heads.png"
    with errors.status("Drawing all maps"):
        draw([layer.seen for layer in steps.layers], steps.tokens, path, steps.text)
    console.print(f"\nAll {sum(len(layer.seen) for layer in steps.layers)} maps: {path}", soft_wrap=True)
