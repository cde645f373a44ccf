"""The bar: a line for each stage, on a terminal, and nothing elsewhere."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from manyheads.view.progress_bar import progress_bar


def drawn(*, terminal: bool = True, **options: object) -> str:
    file = StringIO()
    console = Console(file=file, force_terminal=terminal, width=120, color_system=None)
    with progress_bar(console=console, **options) as progress:  # type: ignore[arg-type]
        progress("rank", 1, 4)
        progress("text", 500, 1000)
        progress("batches", 3, None)  # of a generator: nobody knows how many there are
    return file.getvalue()


def test_each_stage_has_a_line() -> None:
    text = drawn()
    for words in ("Ranking", " 25%", "text", " 50%", "batches"):
        assert words in text
    assert "/s" not in text


def test_what_is_counted_has_a_speed() -> None:
    assert " tokens/s" in drawn(unit="tokens")


def test_a_word_says_what_is_done_with_each_stage() -> None:
    assert "Reading text" in drawn(doing="Reading")


def test_nothing_is_drawn_elsewhere() -> None:
    assert drawn(terminal=False).strip() == ""
    assert drawn(hidden=True).strip() == ""
