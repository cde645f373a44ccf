"""What a person reads beside the results, on stderr: sentences, and what is being loaded."""

from __future__ import annotations

from rich.console import Console
from rich.status import Status

from manyheads.common.language import words
from manyheads.common.processes import rank


def say(sentence: str) -> None:
    """Print for people, once, whatever the number of processes."""
    Console(stderr=True, quiet=rank() > 0).print(sentence, soft_wrap=True, markup=False, highlight=False)


def loading(what: str | None) -> Status:
    """What a person sees while this model, or the embedded one, or a package is loaded."""
    return Console(stderr=True).status(words("Loading {what}", what=what or words("the embedded MiniLM")))
