"""Every step's numbers in a file, one JSON object a line; after a crash it goes on where the run does."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any, TypedDict

from manyheads.common.json_files import parse_json, read_bytes
from manyheads.common.whole_files import write_whole


class Log:
    """Lines about steps, appended one by one; those after ``step`` are forgotten first.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "log.jsonl"
    ...     with Log(path, step=0) as log:
    ...         log.add({"step": 1, "loss": 0.5}), log.add({"step": 2, "loss": 0.25})
    ...     with Log(path, step=1):
    ...         [line["loss"] for line in read(path)]
    (None, None)
    [0.5]
    """

    def __init__(self, path: Path, step: int) -> None:
        kept = [line for line in read(path) if line["step"] <= step] if path.exists() else []
        write_whole(path, "".join(f"{json.dumps(line)}\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")

    def add(self, line: dict[str, Any]) -> None:
        """Write one line, at once."""
        self._file.write(f"{json.dumps(line)}\n")
        self._file.flush()

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


class _Line(TypedDict):
    step: int
    loss: float


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a log, without the half of one that a killed run may leave at its end."""
    lines: list[dict[str, Any]] = []
    texts = read_bytes(path, "log").removesuffix(b"\n").split(b"\n")
    for number, text in enumerate(texts, 1):
        try:
            lines.append(dict(parse_json(text, _Line, infinite=True)))
        except ValueError as error:
            if number == len(texts):
                break
            raise ValueError(
                f"{path}: line {number} is damaged ({error}); take the file away to go on with a new one"
            ) from None
    return lines
