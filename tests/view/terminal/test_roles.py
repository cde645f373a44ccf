"""Roles on the terminal: what was not judged, and notes about the text."""

from __future__ import annotations

from pathlib import Path

import torch

from manyheads.data.batches import Corpus
from manyheads.heads.table import HeadTable, Row
from manyheads.view.terminal.roles import RolesPresentation


def test_notes_about_the_text_are_printed(tmp_path: Path) -> None:
    labels = {"roles": [""], "not_judged": ["separator: no tokenizer"]}
    table = HeadTable([Row("attn", 0, 0, 0, 0, "self")], torch.ones(1), {}, labels=labels)
    corpus = Corpus("a text", "tokens", [7], None, unknown=0.03)
    RolesPresentation(table, "a model", corpus, tmp_path).write()
    text = (tmp_path / "roles.txt").read_text()
    assert "No head has a role that can be claimed." in text
    assert "Note: 3.0% of the tokens are unknown" in text
    assert "Not judged:\n  separator: no tokenizer" in text
