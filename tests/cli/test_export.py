"""manyheads export and manyheads push: what a person reads, JSON for machines, mistakes in one sentence."""

from __future__ import annotations

import json
import sys
from typing import get_args, get_type_hints

import huggingface_hub
import pytest
from tests.helpers import models
from tests.helpers.models import tokens

import manyheads as mh
from manyheads import cli
from manyheads.cli.export import export
from manyheads.models.export import FORMATS


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    mh.save(mh.cut(models.llama(), {0: [2, 3]}, tokens()), tmp_path / "small")
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["manyheads", *arguments])
        with pytest.raises(SystemExit) as done:
            cli.main()
        return done.value.code, capsys.readouterr()

    return run


def test_export_says_what_it_wrote(command, tmp_path):
    code, printed = command("export", "small", "--to", "gguf", "--out", "new")
    assert code == 0
    assert "Compared on the formula of llama.cpp: largest difference" in printed.out
    assert "The model is in new (gguf): model.gguf" in printed.out
    assert (tmp_path / "new" / "model.gguf").is_file()
    code, printed = command("export", "small", "--to", "gguf", "-o", "other", "--json")
    assert code == 0
    assert json.loads(printed.out)["files"] == ["model.gguf"]


def test_mistakes_are_one_sentence(command, tmp_path, monkeypatch):
    code, printed = command("export", "nowhere/at/all", "--to", "gguf", "--out", "new")
    assert code == 2
    assert printed.err.count("\n") == 1
    code, printed = command("export", "small", "--to", "gguf", "--out", "small")
    assert code == 2
    assert "out: small already exists" in printed.err

    def refuse(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", refuse)
    code, printed = command("push", "small", "owner/name")
    assert code == 2
    assert printed.err.startswith(
        "manyheads: repo: owner/name was not pushed (OSError: no network); its model"
    )
    assert (tmp_path / "small" / "README.md").is_file()


def test_the_command_takes_every_target():
    hint = get_type_hints(export, include_extras=True)["to"]
    assert get_args(get_args(hint)[0]) == FORMATS
