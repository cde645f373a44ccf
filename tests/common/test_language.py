"""The language of the terminal: chosen or from the locale; every sentence has its Chinese."""

import ast
import string
from pathlib import Path

import pytest

from manyheads.common import language
from manyheads.common.language import choose_language, current_language, table, words

SOURCE = Path(language.__file__).parents[1]


@pytest.fixture(autouse=True)
def _no_choice(monkeypatch):
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    yield
    choose_language(None)


def fields(sentence):
    return {name for _, name, _, _ in string.Formatter().parse(sentence) if name}


def sentences():
    """What the source passes to `words`, with the file it stands in."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "words":
                first = node.args[0]
                parts = [first.body, first.orelse] if isinstance(first, ast.IfExp) else [first]
                for part in parts:
                    if isinstance(part, ast.Constant):
                        yield part.value, path.name


def test_every_sentence_is_in_chinese():
    known = table("zh")
    missing = [(sentence, file) for sentence, file in sentences() if sentence not in known]
    assert missing == []
    assert len(dict(sentences())) > 150


def test_values_are_the_same_in_both():
    differing = {english for english, chinese in table("zh").items() if fields(english) != fields(chinese)}
    assert differing == set()


def test_the_locale_counts_unless_one_is_chosen(monkeypatch):
    assert current_language() == "en"
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    assert current_language() == "zh"
    assert words("layer {layer}", layer=3) == "第 3 层"
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")  # goes before LANG
    assert words("layer {layer}", layer=3) == "layer 3"
    choose_language("zh")
    assert words("layer {layer}", layer=3) == "第 3 层"


def test_what_is_not_a_language():
    with pytest.raises(ValueError, match="language: got 'fr'; expected one of en, zh"):
        choose_language("fr")


def test_braces_of_a_value_are_kept():
    assert words("Note: {note}", note="{x} {") == "Note: {x} {"
