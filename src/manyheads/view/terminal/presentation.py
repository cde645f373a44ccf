"""How the verbs that measure heads end: their result on the terminal or as JSON, then its files."""

from __future__ import annotations

import json
import os
import sys
import webbrowser
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.text import Text

from manyheads.common.json_numbers import plain
from manyheads.common.language import words
from manyheads.common.out_folder import writing
from manyheads.common.whole_files import write_whole
from manyheads.heads.table import HeadTable

TEXT_WIDTH = 110  # columns of the summaries that are written to files


class Presentation(Protocol):
    """A result that can be printed, printed as JSON, and written."""

    def document(self) -> dict[str, object]:
        """What ``--json`` prints: plain data and tensors; numbers that are not finite become null."""

    def show(self, console: Console) -> None:
        """Print it for people."""

    def write(self) -> list[str]:
        """Write its files; returns sentences that say what is in which file."""


class MeasuredPresentation(Presentation, Protocol):
    """The result of a verb that measures heads on a corpus, which Ctrl-C may have ended."""

    @property
    def empty(self) -> bool:
        """Whether nothing was measured, so that there is nothing to print or write."""
        return False

    def ending(self, interrupted: bool) -> str | None:
        """The sentence for a measurement that Ctrl-C ended; raises the error that ended one."""


class PatientConsole(Console):
    """Prints to stdout as long as it is read: after `head` has left, nothing, and no error."""

    def on_broken_pipe(self) -> None:
        """Go on without the reader: there are files to write."""
        self.quiet = True
        _print_to_nowhere()


@contextmanager
def despite_broken_pipe() -> Iterator[None]:
    """Print in this context what a reader may not read to its end."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _print_to_nowhere()


def _print_to_nowhere() -> None:
    """Let the rest that is printed vanish, also what Python prints as it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def present(result: Presentation, *, as_json: bool) -> None:
    """Print a result, then write it: what cannot be written is not lost, it is printed as JSON.

    A reader who leaves early, as in ``manyheads inspect | head``, loses nothing that is written to files.
    """
    console = PatientConsole()
    with despite_broken_pipe():
        if as_json:
            print(json.dumps(plain(result.document())), flush=True)
        else:
            result.show(console)
    try:
        sentences = result.write()
    except OSError as error:
        if as_json:
            raise
        print(json.dumps(plain(result.document())), flush=True)
        raise OSError(f"{error}; the table was printed as JSON instead") from error
    if not as_json:
        with despite_broken_pipe():
            console.print()
            for sentence in sentences:
                console.print(Text(sentence), soft_wrap=True)


def open_file(path: Path) -> None:
    """Open a page or a figure with what the user has for it: a browser, or a viewer of images."""
    webbrowser.open(path.resolve().as_uri())


def plain_text(show: Callable[[Console], None], width: int = TEXT_WIDTH) -> str:
    """What a function prints, without colours.

    >>> plain_text(lambda console: console.print("[bold]heads[/bold]"))
    'heads\\n'
    """
    text = StringIO()
    show(Console(file=text, width=width, color_system=None, force_terminal=False))
    return text.getvalue()


def write_results(table: HeadTable, text: str, out: Path, tables: Sequence[str], summary: str) -> list[Path]:
    """Write a table, in the formats that the names of its files end in, and its summary; the files."""
    files = [out / name for name in (*tables, summary)]
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        for file in files[:-1]:
            table.save(file)
        write_whole(files[-1], text)
    return files


def print_notes(notes: Iterable[str], console: Console) -> None:
    """Print what a reader has to know besides the numbers."""
    for note in notes:
        console.print(Text("\n" + words("Note: {note}", note=words(note))), soft_wrap=True)
