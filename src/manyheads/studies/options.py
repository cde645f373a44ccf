"""How claims are run: the options of ``manyheads study``, with their help. This module loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class StudyOptions:
    """How to run a claim. The text beside each type is the help of its option.

    >>> StudyOptions(set=["heads=1,2"]).settings
    {'heads': '1,2'}
    """

    full: Annotated[bool, "Run at full size: minutes to an hour instead of 90 seconds."] = False
    seeds: Annotated[int | None, "Repetitions; those of the size by default."] = None
    data: Annotated[str | None, "Data to run it on; embedded data by default."] = None
    set: Annotated[list[str] | None, "A setting, as in: heads=1,2,4"] = None

    @property
    def settings(self) -> dict[str, str]:
        """The settings by name."""
        pairs = [text.partition("=") for text in self.set or ()]
        for name, equals, _ in pairs:
            if not equals:
                raise ValueError(f"set: {name!r} has no value; expected NAME=VALUE, as in heads=1,2,4")
        return {name: value for name, _, value in pairs}
