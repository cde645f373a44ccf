"""Which tokens separate: punctuation, line breaks and special tokens."""

from __future__ import annotations

import unicodedata
from typing import Any

import torch
from torch import Tensor

from manyheads.heads.roles.probes import Given


def separators(given: Given, tokenizer: Any) -> Tensor | None:
    """The ids in the batches that are special tokens or nothing but punctuation; None if nobody knows."""
    if tokenizer is None or not hasattr(tokenizer, "decode") or not given.ids:
        return None
    used = torch.cat([ids.flatten() for ids in given.ids]).unique().tolist()
    special = set(given.special.tolist())
    chosen = [
        number for number in used if number >= 0 and (number in special or _stops(tokenizer.decode([number])))
    ]
    return torch.tensor(chosen, dtype=torch.long)


def _stops(text: str) -> bool:
    """Whether a text is punctuation or a line break.

    >>> [_stops(text) for text in (" ,", "\\n", "a.", " ", "##")]
    [True, True, False, False, True]
    """
    written = text.strip()
    return "\n" in text if not written else all(unicodedata.category(mark)[0] == "P" for mark in written)
