"""The first minute: a greeting, completion, help that wraps, --open, two languages, compare."""

import json
import webbrowser
from pathlib import Path

import numpy
import pytest
from typer.testing import CliRunner

import manyheads as mh
from manyheads.cli import app
from manyheads.common.commands import unwrapped
from manyheads.common.language import choose_language


@pytest.fixture(autouse=True)
def _english(monkeypatch):
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    yield
    choose_language(None)


@pytest.fixture
def factory(tmp_path, monkeypatch):
    """A model by name, and token ids for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    made = "import torch\nfrom manyheads.nn.transformers import Encoder\n"
    for name, seed in (("make", 0), ("other", 3)):
        made += f"def {name}():\n    torch.manual_seed({seed})\n"
        made += "    model = Encoder(d_model=12, heads=3, layers=2, vocabulary=31)\n"
        made += "    return model, lambda text: {'input_ids': [ord(c) % 31 for c in text]}\n"
    (tmp_path / "tiny_first_minute.py").write_text(made)
    numpy.save("ids.npy", numpy.arange(60).reshape(4, 15) % 31)
    (tmp_path / "texts.txt").write_text("\n".join("heads attend to tokens"[n:] for n in range(7)))
    (tmp_path / "numbers.txt").write_text("\n".join("0123456789"[n:] * 2 for n in range(7)))
    return "tiny_first_minute:make"


def invoke(*arguments, **options):
    result = CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False, **options)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_alone_it_greets_with_three_things_to_try():
    greeting = invoke()
    for command in (
        "manyheads demo",
        "manyheads inspect --open",
        "manyheads serve --open",
        "--install-completion",
    ):
        assert command in greeting
    assert "先试试这三个" in invoke(env={"LANG": "zh_CN.UTF-8"})


def test_help_wraps_where_the_terminal_ends():
    lines = invoke("inspect", "--help", env={"COLUMNS": "70"}).splitlines()
    start = next(n for n, line in enumerate(lines) if "Prints a map" in line)
    paragraph = [line.strip() for line in lines[start : start + 4]]
    assert all(len(line) > 50 for line in paragraph)  # no line that ends early
    assert "--install-completion" in invoke("--help")
    assert unwrapped("a\nb\n\n  c\n  d") == "a b\n\n  c\n  d"


def test_open_opens_the_page(factory, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    invoke("inspect", factory, "--tokens", "ids.npy", "--out", "seen", "--open")
    assert [address.rpartition("/")[2] for address in opened] == ["report.html"]
    assert opened[0].startswith("file://")


def test_inspect_in_chinese(factory):
    said = invoke("inspect", factory, "--tokens", "ids.npy", "--out", "seen", "--language", "zh")
    assert "6 个头" in said
    assert "用浏览器打开" in said
    assert "open in a browser" not in said


def test_compare_two_models(factory):
    said = invoke("compare", factory, "tiny_first_minute:other", "--text", "texts.txt", "--out", "moved")
    assert "6 heads are matched by what they do." in said
    written = {path.name for path in Path("moved").iterdir()}
    assert written == {"changes.json", "changes.csv", "compare.txt", "heads.png", "report.html"}
    assert len(mh.HeadTable.load("moved/changes.json")["matched"]) == 6


def test_compare_two_texts_as_json(factory):
    text = invoke(
        "compare", factory, "--text", "texts.txt", "--other-text", "numbers.txt", "--out", "m", "--json"
    )
    document = json.loads(text)
    assert document["corpora"] == ["texts.txt", "numbers.txt"]
    assert document["paired"] is False
    assert len(document["heads"]) == 6
    assert document["without_counterpart"] == [[], []]


def test_compare_needs_something_to_compare(factory):
    with pytest.raises(ValueError, match="expected a second model, --other-revision or --other-text"):
        CliRunner().invoke(app, ["compare", factory, "--text", "texts.txt"], catch_exceptions=False)
