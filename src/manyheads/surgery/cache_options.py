"""How a cache is planned: the options of ``manyheads cache``, with their help. This module loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """How `plan_cache` plans. The text beside each type is the help of its option."""

    budget: Annotated[float, "The share of key/value heads that keep everything, 0 to 1."] = 0.5
    first: Annotated[int, "How many of the first tokens a head that forgets keeps."] = 4
    window: Annotated[int, "How many of the last tokens a head that forgets keeps."] = 256
    length: Annotated[int, "Read the text in pieces of this many tokens."] = 2048
    texts: Annotated[int, "How many pieces to read: half to find the heads, half for the curve."] = 8
    protected: Annotated[float, "Protect heads that cost more nats than this for a copied token."] = 0.02
