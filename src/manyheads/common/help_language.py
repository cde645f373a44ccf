"""The help of the command in the language of the user: every verb and option, looked up by its English."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import typer
from rich import columns
from rich.table import Table
from typer import rich_utils

from manyheads.common.language import Language, current_language, table

_PANELS = {"OPTIONS_PANEL_TITLE": "选项", "ARGUMENTS_PANEL_TITLE": "参数", "COMMANDS_PANEL_TITLE": "命令"}


class _FoldingTable(Table):
    """A table whose cells break anywhere: Chinese has no spaces, and what does not fit would be cut off."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        """As in rich."""
        super().add_row(*cells, **options)
        for column in self.columns:
            column.overflow = "fold"


def runnable(app: typer.Typer, arguments: Sequence[str] | None = None) -> Any:
    """The app to run: with its help in Chinese if help is what a reader of Chinese asks for."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not {"-h", "--help"} & set(arguments) or _read_language(arguments) != "zh":
        return app
    for name, title in _PANELS.items():
        setattr(rich_utils, name, title)
    for module in (rich_utils, columns):  # helps are columns inside of a table
        setattr(module, Table.__name__, _FoldingTable)
    command = typer.main.get_command(app)
    _translate(command, table("zh", "-help"))
    return command


def translated(text: str, chinese: dict[str, str]) -> str:
    """A help in Chinese, paragraph by paragraph; commands stay as they are.

    >>> translated("A head.\\n\\n  manyheads demo\\n      try", {"A head.": "一个头。", "try": "试试"})
    '一个头。\\n\\n  manyheads demo\\n      试试'
    """
    return re.sub(r"(?m)^( *)(\S.*)$", lambda line: line[1] + chinese.get(line[2], line[2]), text)


def _read_language(arguments: Sequence[str]) -> Language:
    """The language of --language among arguments that are not parsed yet, else that of the locale."""
    option = re.search(r"(?:^|\0)--language[=\0](en|zh)(?:\0|$)", "\0".join(arguments))
    return current_language() if option is None else "zh" if option[1] == "zh" else "en"


def _translate(command: Any, chinese: dict[str, str]) -> None:
    for part in (command, *command.params):
        if getattr(part, "help", None):
            part.help = translated(part.help, chinese)
    for verb in getattr(command, "commands", {}).values():
        _translate(verb, chinese)
