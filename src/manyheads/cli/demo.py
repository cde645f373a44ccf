"""``manyheads demo``: one sentence through the embedded MiniLM, step by step."""

import os
from pathlib import Path
from typing import Annotated

import manyheads as mh
from manyheads.cli.options import loading

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
    with loading("the embedded MiniLM"):
        steps = mh.heads.effects.bert_steps.embedded_steps(sentence)
    mh.view.demo_text.present_steps(steps, out / "heads.png")
