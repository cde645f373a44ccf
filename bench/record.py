"""What a long benchmark has measured so far: kept in a file, so that a run that was stopped goes on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.harness import say


class Record:
    """What was measured, by name, in a file; what is there is not measured again: delete it to begin anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def once(self, name: str, measure: Callable[[], Any]) -> Any:
        """The figure of this name, measured now if it was not before."""
        if name not in self.found:
            self.note(name, measure())
            say(f"{name}: {self.found[name]}")
        return self.found[name]

    def note(self, name: str, figure: Any) -> None:
        """Keep a figure."""
        self.found[name] = figure
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.found, indent=1) + "\n")
