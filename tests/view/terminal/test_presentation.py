"""What verbs print: JSON without NaN, files named, and nothing lost on a full disk."""

from __future__ import annotations

import json
import math
import os
import sys
from typing import Any

import pytest
import torch
from rich.console import Console

from manyheads.view.terminal.presentation import present


class Result:
    """A result whose files can, or cannot, be written."""

    def __init__(self, error: OSError | None = None) -> None:
        self.error = error

    def document(self) -> dict[str, Any]:
        return {"heads": [{"entropy": math.nan}], "matrix": torch.tensor([[1.0, math.inf]])}

    def show(self, console: Console) -> None:
        console.print("a summary")

    def write(self) -> list[str]:
        if self.error is not None:
            raise self.error
        return ["The table: out/heads.json"]


PLAIN = {"heads": [{"entropy": None}], "matrix": [[1.0, None]]}


def test_people_read_a_summary_and_where_the_files_are(capsys: pytest.CaptureFixture[str]) -> None:
    present(Result(), as_json=False)
    assert capsys.readouterr().out == "a summary\n\nThe table: out/heads.json\n"


def test_machines_get_json_alone(capsys: pytest.CaptureFixture[str]) -> None:
    present(Result(), as_json=True)
    assert json.loads(capsys.readouterr().out) == PLAIN


def test_what_cannot_be_written_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="the table was printed as JSON instead"):
        present(Result(OSError("disk full")), as_json=False)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == PLAIN
    with pytest.raises(OSError, match="disk full"):
        present(Result(OSError("disk full")), as_json=True)
    assert json.loads(capsys.readouterr().out) == PLAIN  # once


@pytest.mark.parametrize("as_json", [False, True])
def test_a_reader_who_leaves_costs_no_file(monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    reading, writing = os.pipe()
    os.close(reading)  # as `head` does
    written = []

    class Long(Result):
        def show(self, console: Console) -> None:
            for _ in range(5):
                console.print("a summary " * 1000)

        def write(self) -> list[str]:
            written.append("heads.json")
            return super().write()

    with os.fdopen(writing, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        present(Long(), as_json=as_json)
        print("what is printed at the end", flush=True)
    assert written == ["heads.json"]
