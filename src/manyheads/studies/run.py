"""study: run a claim, part by part; what was measured is kept, and a run that was ended goes on."""

from __future__ import annotations

import hashlib
import inspect as source_code
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import cast

import torch

from manyheads.common.interrupts import Interrupted, interruptible
from manyheads.common.json_files import in_one_sentence
from manyheads.common.out_folder import writing
from manyheads.common.preserved_state import untouched
from manyheads.common.progress import Progress, no_progress
from manyheads.studies import find
from manyheads.studies.result import Result, read_result
from manyheads.studies.study import Part, Row, Size, with_settings

RECORDS = Path(__file__).parent / "records"  # full results that come with the package
RESULT = "result.json"


def study(
    name: str,
    size: Size = "quick",
    *,
    seeds: int | None = None,
    data: str | None = None,
    settings: Mapping[str, str] | None = None,
    out: str | PathLike[str] | None = None,
    progress: Progress = no_progress,
) -> Result:
    """Run the study of a claim about multi-head attention.

    Parameters
    ----------
    name: one of `manyheads.studies.NAMES`, such as ``"several_heads"``.
    size: "quick" takes at most 90 seconds on two cores, with embedded data; "full" takes minutes to an hour;
        "tiny" is for tests.
    seeds: how many repetitions. Default: that of the size.
    data: what to run it on, where the study takes data. Default: embedded data.
    settings: other settings of the study, as strings: ``{"heads": "1,2,4"}``.
    out: a folder. What was measured is kept there, part by part, and an interrupted run continues.
    progress: called after every part.

    Ctrl-C ends the run after the current part; the result is then not ``complete``.

    Returns
    -------
    The rows that were measured. The study's ``verdict`` and ``figure`` take it.

    Examples
    --------
    >>> import manyheads as mh
    >>> result = mh.study("splitting_is_free", "tiny")
    >>> result.complete, sorted(result.rows[0])[:3]
    (True, ['heads', 'multiply_adds', 'output_deviation'])

    See Also
    --------
    train : what most studies do.

    References
    ----------
    Vaswani and others 2017, Attention is all you need.
    """
    module = find(name)
    if size not in module.SIZES:
        raise ValueError(f"size: expected one of {', '.join(module.SIZES)}, got {size!r}")
    chosen = with_settings(module.SIZES[size], settings or {})
    changed = {key: value for key, value in (("seeds", seeds), ("data", data)) if value is not None}
    chosen = replace(chosen, **changed)
    result = Result(name, size, asdict(chosen), code=_digest(cast(ModuleType, module)), machine=_machine())
    folder = None if out is None else Path(out)
    if folder is not None:
        _continue(result, folder / RESULT)
    parts = module.parts(chosen)
    done = [part for part in parts if _has(result, part)]
    left = [part for part in parts if part not in done]
    with interruptible() as interrupted, untouched():
        torch.set_flush_denormal(True)
        progress(name, len(done), len(parts))
        for part in left:
            if interrupted():
                break
            begin = time.perf_counter()
            rows = part.measure()
            result.rows += [part.key | row for row in (rows if isinstance(rows, list) else [rows])]
            result.seconds += time.perf_counter() - begin
            done.append(part)
            result.complete = len(done) == len(parts)
            if folder is not None:
                with writing(folder):
                    folder.mkdir(parents=True, exist_ok=True)
                    result.save(folder / RESULT)
            progress(name, len(done), len(parts))
    if not result.rows:
        raise Interrupted
    return result


def recorded(name: str) -> Result | None:
    """The result of the full study that comes with the package, if there is one."""
    path = RECORDS / f"{name}.json"
    return read_result(path) if path.exists() else None


def _continue(result: Result, path: Path) -> None:
    """Take over the rows of a file, if they were measured by the same code with the same settings."""
    if not path.exists():
        return
    before = read_result(path)
    wanted = result.document()
    same = ("study", "size", "settings", "code")
    if all(before.document()[name] == wanted[name] for name in same):  # type: ignore[literal-required]
        result.rows, result.seconds, result.complete = before.rows, before.seconds, before.complete
        if result.complete:
            with in_one_sentence(f"{path}: damaged, or not what study wrote; remove it"):
                find(result.study).verdict(result)


def _has(result: Result, part: Part) -> bool:
    return any(_matches(row, part.key) for row in result.rows)


def _matches(row: Row, key: Row) -> bool:
    return all(name in row and row[name] == value for name, value in key.items())


def _digest(module: ModuleType) -> str:
    return hashlib.sha256(source_code.getsource(module).encode()).hexdigest()[:16]


def _machine() -> str:
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{_processor()}, {torch.get_num_threads()} threads, {versions}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
