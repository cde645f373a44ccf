"""study for people: the list of claims, one claim with its page, or the gallery of all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from manyheads.common.language import words
from manyheads.common.out_folder import prepared, writing
from manyheads.common.whole_files import write_whole
from manyheads.studies import NAMES, find
from manyheads.studies.result import Result
from manyheads.studies.run import study
from manyheads.studies.study import Language, Size
from manyheads.view.gallery import page
from manyheads.view.progress_bar import progress_bar
from manyheads.view.terminal.presentation import present
from manyheads.view.terminal.study import StudyPresentation, listed, print_list

ENDED = "Stopped: what was measured is kept in {out}; the same command continues."


@dataclass(frozen=True)
class Request:
    """What to run studies with."""

    size: Size
    seeds: int | None
    data: str | None
    settings: dict[str, str]


def request(full: bool, seeds: int | None, data: str | None, settings: Sequence[str] | None) -> Request:
    """The options of the command.

    >>> request(False, None, None, ["heads=1,2"]).settings
    {'heads': '1,2'}
    """
    pairs = [text.partition("=") for text in settings or ()]
    for name, equals, _ in pairs:
        if not equals:
            raise ValueError(f"set: {name!r} has no value; expected NAME=VALUE, as in heads=1,2,4")
    return Request("full" if full else "quick", seeds, data, {name: value for name, _, value in pairs})


def show_list(out: Path, language: Language, *, as_json: bool) -> None:
    """Print all claims with their last verdicts."""
    claims = listed(out, language)
    if as_json:
        print(json.dumps(claims, ensure_ascii=False))
    else:
        print_list(claims, language, Console())


def run_one(name: str, how: Request, out: Path, language: Language, *, as_json: bool) -> str | None:
    """Run a claim, print it and write its files."""
    find(name)  # raises before a folder is created
    with prepared(out):
        result = _run(name, how, out)
        present(StudyPresentation(result, language, out), as_json=as_json)
    return None if result.complete else words(ENDED, out=out)


def run_all(how: Request, out: Path, language: Language, *, as_json: bool) -> str | None:
    """Run all claims, and write one page about those that are complete."""
    with prepared(out):
        results = []
        for name in NAMES:
            result = _run(name, how, out / name)
            if not result.complete:
                return words(ENDED, out=out)
            results.append(result)
            if not as_json:
                judgement = find(name).verdict(result)
                Console().print(f"{name}: {judgement.verdict}. {judgement.because[language]}", soft_wrap=True)
        with writing(out):
            write_whole(out / "index.html", page(results, language))
    if as_json:
        verdicts = {
            name: find(name).verdict(result).verdict for name, result in zip(NAMES, results, strict=True)
        }
        print(json.dumps({"out": str(out), "verdicts": verdicts}))
    else:
        Console().print(words("The page: {file}", file=out / "index.html"), soft_wrap=True)
    return None


def _run(name: str, how: Request, out: Path) -> Result:
    with progress_bar(words("Running")) as progress:
        options = {"seeds": how.seeds, "data": how.data, "settings": how.settings}
        return study(name, how.size, out=out, progress=progress, **options)  # type: ignore[arg-type]
