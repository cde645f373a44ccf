"""The command: teaches, is quick to answer, and tells a person's mistakes in one sentence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import manyheads
from manyheads import cli

STEPS = (
    "Tokens and ids", "Embedding", "Positions", "Layer norm", "Queries, keys, values", "Attention maps",
    "Concatenation", "Output projection", "The sentence embedding", "cats", "12 x 6 x 32",
)  # fmt: skip


def run(*arguments, script=None):
    command = [sys.executable, "-m", "manyheads"] if script is None else [sys.executable, "-c", script]
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, env=os.environ | {"COLUMNS": "100"}
    )


def test_help_teaches():
    done = run("--help")
    assert done.returncode == 0
    for words in ("attention heads of any transformer", "Examples", "manyheads demo --sentence", "--version"):
        assert words in done.stdout


def test_version():
    assert run("--version").stdout == f"manyheads {manyheads.__version__}\n"


def test_help_loads_nothing_heavy():
    script = """
import sys
from manyheads import cli
try:
    cli.main()
except SystemExit as done:
    assert done.code == 0
heavy = {"torch", "transformers", "matplotlib", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""
    done = run("demo", "--help", script=script)
    assert done.returncode == 0, done.stderr
    assert "sentence encoder" in done.stdout


def test_a_mistake_in_options_is_told_before_anything_heavy_loads():
    script = """
import sys
from manyheads import cli
try:
    cli.main()
except SystemExit as done:
    assert done.code == 2
assert "torch" not in sys.modules
"""
    done = run("prune", "--keep", "2", script=script)
    assert done.returncode == 0, done.stderr
    assert done.stderr == (
        "manyheads: keep: got 2.0; expected the share of heads that stays, between 0 and 1\n"
    )


def test_demo_tells_the_whole_way_and_says_where_the_picture_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["manyheads", "demo", "--sentence", "Cats watch birds.", "--out", str(tmp_path)]
    )
    with pytest.raises(SystemExit) as done:
        cli.main()
    assert done.value.code == 0
    told = capsys.readouterr().out
    for words in STEPS:
        assert words in told
    assert str(tmp_path / "heads.png") in told.replace("\n", "")
    assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["heads.png"]


def mistake(monkeypatch, capsys, *arguments):
    """The exit code and what stood on stderr."""
    monkeypatch.setattr(sys, "argv", ["manyheads", *arguments])
    with pytest.raises(SystemExit) as done:
        cli.main()
    streams = capsys.readouterr()
    assert "Traceback" not in streams.err
    return done.value.code, streams.err


def test_a_mistake_is_one_sentence(tmp_path, monkeypatch, capsys):
    code, said = mistake(monkeypatch, capsys, "demo", "--sentence", "  ", "--out", str(tmp_path))
    assert (code, said) == (2, "manyheads: sentence: expected some text, got none\n")
    assert not list(tmp_path.iterdir())


def test_a_sentence_too_long_for_the_model(monkeypatch, capsys):
    code, said = mistake(monkeypatch, capsys, "demo", "--sentence", "heads " * 511)
    assert code == 2
    assert said == (
        "manyheads: sentence: it has 513 tokens, the model reads at most 512; give a shorter one\n"
    )


def test_a_folder_that_cannot_be_made(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("in the way")
    code, said = mistake(
        monkeypatch, capsys, "demo", "--sentence", "Hi", "--out", str(tmp_path / "file" / "pictures")
    )
    assert code == 2
    assert said.startswith("manyheads: ")
    assert "file" in said
    assert said.count("\n") == 1


def test_an_unknown_verb(monkeypatch, capsys):
    code, said = mistake(monkeypatch, capsys, "inspekt")
    assert code == 2
    assert "No such command" in said


def test_an_interruption_leaves_quietly(monkeypatch, capsys):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("manyheads.models.embedded.load", interrupted)
    code, said = mistake(monkeypatch, capsys, "demo")
    assert code == 130
    assert said.strip() in ("", "Loading the embedded MiniLM")


def test_nothing_is_written_without_out(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["manyheads", "demo", "--sentence", "Hi", "--out", "here"])
    with pytest.raises(SystemExit):
        cli.main()
    assert {path.relative_to(tmp_path) for path in tmp_path.rglob("*")} == {
        Path("here"),
        Path("here/heads.png"),
    }


def test_temperature_is_told_in_the_words_of_the_field() -> None:
    said = " ".join(CliRunner().invoke(cli.app, ["predict", "--help"], env={"COLUMNS": "200"}).output.split())
    assert "below 1 sharpens the distribution (more conservative)" in said


def test_the_command_is_thin() -> None:
    """Verbs parse, call the library and print; what grows here belongs into a room below."""
    files = Path(cli.__file__).parent.glob("*.py")
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) < 900
