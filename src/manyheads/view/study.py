"""study for people: the list of claims, one claim with its page, or the gallery of all."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from manyheads.common.interrupts import interruptible
from manyheads.common.language import current_language, words
from manyheads.common.out_folder import prepared, writing
from manyheads.common.whole_files import write_whole
from manyheads.studies import NAMES, find
from manyheads.studies.options import StudyOptions
from manyheads.studies.result import Result
from manyheads.studies.run import study
from manyheads.studies.study import Language, Size
from manyheads.view.gallery import page
from manyheads.view.progress_bar import progress_bar
from manyheads.view.terminal.presentation import present
from manyheads.view.terminal.study import StudyPresentation, listed, print_list

ENDED = "Stopped: what was measured is kept in {out}; the same command continues."


def run(name: str | None, how: StudyOptions, out: Path, *, every: bool, as_json: bool) -> str | None:
    """List all claims, or run the one of that name, or every one; the sentence after Ctrl-C."""
    language = current_language()
    with interruptible():
        if every:
            return run_all(how, out, language, as_json=as_json)
        if name is not None:
            return run_one(name, how, out / name, language, as_json=as_json)
        show_list(out, language, as_json=as_json)
        return None


def show_list(out: Path, language: Language, *, as_json: bool) -> None:
    """Print all claims with their last verdicts."""
    claims = listed(out, language)
    if as_json:
        print(json.dumps(claims, ensure_ascii=False))
    else:
        print_list(claims, language, Console())


def run_one(name: str, how: StudyOptions, out: Path, language: Language, *, as_json: bool) -> str | None:
    """Run a claim, print it and write its files."""
    find(name)  # raises before a folder is created
    with prepared(out):
        result = _run(name, how, out)
        present(StudyPresentation(result, language, out), as_json=as_json)
    return None if result.complete else words(ENDED, out=out)


def run_all(how: StudyOptions, out: Path, language: Language, *, as_json: bool) -> str | None:
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


def _run(name: str, how: StudyOptions, out: Path) -> Result:
    with progress_bar(words("Running")) as progress:
        size: Size = "full" if how.full else "quick"
        return study(
            name, size, seeds=how.seeds, data=how.data, settings=how.settings, out=out, progress=progress
        )
