"""The Chinese page knows every sentence about roles that Python has, and has one word for one thing."""

import re
from pathlib import Path

import pytest

from manyheads.data.batches import Corpus
from manyheads.heads.roles.role import ROLES

WORDS = Path(__file__).parents[2] / "web" / "src" / "words"


@pytest.fixture(scope="module")
def chinese():
    return (WORDS / "zh-said.ts").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ROLES)
def test_roles_are_told_in_chinese(chinese, name):
    assert f'"{ROLES[name].says}":' in chinese
    assert f'"{ROLES[name].against}":' in chinese


def test_one_word_for_silencing():
    """A reader meets one term, not three."""
    for path in WORDS.glob("zh*.ts"):
        assert not re.search("静音|静默", path.read_text(encoding="utf-8")), path.name


def test_unknown_tokens_are_told_in_chinese(chinese):
    note = Corpus("a text", "tokens", [3], None, unknown=0.125).notes[0]
    assert re.fullmatch(r"([\d.]+%) of the tokens are unknown to the tokenizer: .*", note)
    assert r"([\d.]+%) of the tokens are unknown to the tokenizer: .*" in chinese
