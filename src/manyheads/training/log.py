"""The numbers of every step in a file, one JSON object per line; a resumed run continues it."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import NotRequired, TypedDict

from manyheads.common.json_files import parse_json, read_bytes
from manyheads.common.whole_files import write_whole


class Line(TypedDict):
    """One step in the log."""

    step: int
    loss: float
    rate: NotRequired[float]
    gradient_norm: NotRequired[float]
    tokens: NotRequired[int]
    valid: NotRequired[dict[str, float]]
    best: NotRequired[bool]
    diversity: NotRequired[dict[str, float]]
    alarms: NotRequired[list[str]]
    acts: NotRequired[list[str]]


class Log:
    """Lines about steps, appended one by one; those after ``step`` are removed first.

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
        earlier = [line for line in read(path) if line["step"] <= step] if path.exists() else []
        write_whole(path, "".join(f"{json.dumps(line)}\n" for line in earlier))
        self._file = path.open("a", encoding="utf-8")

    def add(self, line: Line) -> None:
        """Write one line, at once."""
        self._file.write(f"{json.dumps(line)}\n")
        self._file.flush()

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def read(path: Path) -> list[Line]:
    """The lines of a log, without the unfinished one that a killed run may leave at its end."""
    lines: list[Line] = []
    texts = read_bytes(path, "log").removesuffix(b"\n").split(b"\n")
    for number, text in enumerate(texts, 1):
        try:
            lines.append(parse_json(text, Line, infinite=True))
        except ValueError as error:
            if number == len(texts):
                break
            raise ValueError(
                f"{path}: line {number} is damaged ({error}); remove the file to continue with a new one"
            ) from None
    return lines
