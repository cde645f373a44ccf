"""What ``manyheads`` says without a verb: what it is, and three things to try."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from manyheads.common.language import words
from manyheads.common.version import __version__


def print_greeting() -> None:
    """Print what the command is for, three commands to try, and where the others are."""
    console = Console()
    console.print(Text(f"manyheads {__version__}", "bold"))
    console.print(Text(words("See, measure and cut the attention heads of any transformer.")))
    console.print(Text("\n" + words("Three things to try:") + "\n"))
    for command, what in (
        ("manyheads demo", words("follow a sentence through a real model, head by head")),
        ("manyheads inspect --open", words("what every head of a model does, as a page in your browser")),
        ("manyheads serve --open", words("type a text, silence heads, and see what changes")),
    ):
        console.print(Text("  ").append(f"{command:<26}", "bold cyan").append(what), soft_wrap=True)
    console.print(Text("\n" + words("All commands: manyheads --help; completion in your shell:")), end=" ")
    console.print(Text("manyheads --install-completion"))
