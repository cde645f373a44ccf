"""A verb as a command: the options of a source, Ctrl-C, the exit code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from manyheads.common.commands import command, listed_names
from manyheads.common.interrupts import Interrupted
from manyheads.data.source import Source

seen: list[tuple[Source, int]] = []


def verb(source: Source, rows: int = 3) -> str | None:
    """A verb that reads a corpus."""
    seen.append((source, rows))
    if source.model == "early":
        raise Interrupted
    return "Stopped after 3 of 5 batches." if source.model == "late" else None


def call(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(command(verb, {"batch_tokens": 2048}))
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stderr


def test_a_source_is_the_options_of_a_corpus() -> None:
    assert call("model", "--text", "a.txt", "--max-length", "7", "--rows", "5") == (0, "")
    assert seen[-1] == (Source(model="model", text="a.txt", max_length=7, batch_tokens=2048), 5)
    assert call("--batch-tokens", "16")[0] == 0
    assert seen[-1] == (Source(batch_tokens=16), 3)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("early", "Stopped before there was a result; nothing was written.\n"),
        ("late", "Stopped after 3 of 5 batches.\n"),
    ],
)
def test_ctrl_c_is_a_sentence_and_130(model: str, sentence: str) -> None:
    assert call(model) == (130, sentence)


def test_only_the_first_process_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert call("late") == (130, "")


@dataclass(frozen=True)
class Share:
    keep: Annotated[float, "The share of heads that stays."] = 0.5
    refit: Annotated[bool, "Fit what is left."] = True

    def __post_init__(self) -> None:
        if not 0 < self.keep < 1:
            raise ValueError(f"keep: got {self.keep}")


shares: list[tuple[Source, Share, str]] = []


def share(source: Source, how: Share, word: Annotated[str, "A word."] = "none") -> None:
    """A verb with two dataclasses of options."""
    shares.append((source, how, word))


def test_a_dataclass_is_an_option_for_each_field() -> None:
    app = typer.Typer()
    app.command()(command(share))
    runner = CliRunner()
    assert runner.invoke(app, ["model", "--keep", "0.25", "--no-refit", "--word", "heads"]).exit_code == 0
    assert shares == [(Source(model="model"), Share(0.25, refit=False), "heads")]
    assert runner.invoke(app, []).exit_code == 0
    assert shares[-1] == (Source(), Share(), "none")
    assert "The share of heads that stays." in runner.invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    with pytest.raises(ValueError, match="keep: got 2"):
        runner.invoke(app, ["--keep", "2"], catch_exceptions=False)
    assert len(shares) == 2


def test_names_of_a_list() -> None:
    assert listed_names(None) is None
    assert listed_names("induction, retrieval") == ["induction", "retrieval"]
