"""The language of the terminal: chosen or from the locale; every sentence has its Chinese."""

import ast
import re
import string
from pathlib import Path

import pytest
import transformers as hf
from tests.helpers.labelled import bert, tokenizer, write_csv

import manyheads as mh
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
    tables = table("zh") | table("zh", "-notes")
    differing = {english for english, chinese in tables.items() if fields(english) != fields(chinese)}
    assert differing - {UNKNOWN} == set()  # whose reason is translated with it


UNKNOWN = "{share} of the tokens are unknown to the tokenizer: {why}"


@pytest.mark.parametrize(
    ("english", "chinese"),
    [
        ("too few (92 of 100 queries)", "实例太少（92，至少需要 100 个查询）"),
        (
            "a.csv: sequence classification, 40 rows, texts from 'q' and 'c', labels from 'answers'",
            "a.csv：序列分类，40 行，文本来自 'q' 和 'c'，标签来自 'answers'",
        ),
        (
            "KL(full || silenced), nats a token, the rest refitted",
            "KL(完整 || 消融)，奈特/词元，其余部分重新拟合",
        ),
        ("46,505 characters, 1 of them held out", "46,505 个字符，其中 1 个留出"),
        ("2, 8 and 16 heads are the best and not distinguishable", "2, 8 和 16 个头 最好，彼此无法区分"),
        ("heads and tokens", "heads and tokens"),  # only numbers of them
        ("a sentence that is in no table", "a sentence that is in no table"),
    ],
)
def test_a_sentence_with_its_values_in_it_is_recognised(english, chinese):
    assert words(english) == english
    choose_language("zh")
    assert words(english) == chinese


def test_what_labelled_data_say_is_in_chinese(tmp_path):
    choose_language("zh")
    file = write_csv(tmp_path / "r.csv", {"text": ["a b", "c", "d"], "label": ["bad", "good", None]})
    model = bert(hf.BertForSequenceClassification, id2label={0: "bad", 1: "good"})
    data = mh.labelled(file, model, tokenizer())
    sentences = [words(sentence) for sentence in (data.reading, *data.notes)]
    assert len(sentences) > 2
    for sentence in sentences:
        assert not re.search("[A-Za-z]{6,}", sentence.replace(str(file), "")), sentence


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
