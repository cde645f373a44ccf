"""All models of the zoo by name: hand-written ones, and those of libraries."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tests.zoo import library_other, library_peers, library_text, library_timm
from tests.zoo.case import Case
from tests.zoo.handwritten import CASES as HANDWRITTEN
from tests.zoo.library import make, title

LIBRARY: dict[str, Callable[[], Case]] = {
    title(spec): partial(make, spec) for spec in (*library_text.SPECS, *library_other.SPECS)
}
LIBRARY |= library_peers.CASES | library_timm.CASES

__all__ = ["HANDWRITTEN", "LIBRARY"]
