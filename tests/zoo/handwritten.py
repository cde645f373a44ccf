"""All hand-written modules of the zoo, by theme: importing the themes puts them into `CASES`."""

from __future__ import annotations

from tests.zoo import axes
from tests.zoo.base import CASES

THEMES = (axes,)

__all__ = ["CASES", "THEMES"]
