"""The help of every verb and option is there in Chinese, and none of it is cut off."""

import re

import pytest
import rich.columns
import typer
from click.testing import CliRunner
from typer import rich_utils

from manyheads.cli import app
from manyheads.common.help_language import runnable, translated
from manyheads.common.language import table


@pytest.fixture(autouse=True)
def _english_afterwards(monkeypatch):
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name in ("OPTIONS_PANEL_TITLE", "ARGUMENTS_PANEL_TITLE", "COMMANDS_PANEL_TITLE", "Table"):
        monkeypatch.setattr(rich_utils, name, getattr(rich_utils, name))
    monkeypatch.setattr(rich.columns, "Table", rich.columns.Table)


def helps(command):
    """The lines of the help of a command, its options and its verbs, without the commands that they show."""
    for part in (command, *command.params):
        for line in (getattr(part, "help", None) or "").split("\n"):
            if line.strip() and not line.startswith("  manyheads "):
                yield line.strip()
    for verb in getattr(command, "commands", {}).values():
        yield from helps(verb)


def test_every_line_of_help_is_in_chinese():
    lines = set(helps(typer.main.get_command(app)))
    assert len(lines) > 120
    assert lines - set(table("zh", "-help")) == set()


def test_nothing_is_translated_that_is_not_there():
    lines = set(helps(typer.main.get_command(app)))
    assert set(table("zh", "-help")) - lines - {"Show this message and exit."} == set()


@pytest.mark.parametrize(
    ("arguments", "is_chinese"),
    [
        (["prune", "--help", "--language", "zh"], True),
        (["prune", "-h", "--language=zh"], True),
        (["prune", "--help"], False),
        (["prune", "--language", "zh"], False),  # runs; its output is another matter
    ],
)
def test_help_is_in_the_language_that_is_asked_for(arguments, is_chinese):
    assert (runnable(app, arguments) is not app) == is_chinese


def test_the_locale_counts(monkeypatch):
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    assert runnable(app, ["--help"]) is not app
    assert runnable(app, ["--help", "--language", "en"]) is app


def test_chinese_help_is_whole(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    command = runnable(app, ["prune", "--help", "--language", "zh"])
    printed = CliRunner().invoke(command, ["prune", "--help"]).output
    together = re.sub(r"[\s│]", "", printed)
    for name in ("keep", "kv_heads", "protect", "on_disk"):
        option = next(one for one in command.commands["prune"].params if one.name == name)
        assert re.sub(r"\s", "", option.help) in together


def test_commands_in_a_help_stay_as_they_are():
    assert (
        translated("a\n\n  manyheads demo --sentence b", {"a": "甲"}) == "甲\n\n  manyheads demo --sentence b"
    )
