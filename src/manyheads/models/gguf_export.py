"""GGUF."""

from pathlib import Path
from typing import Any
from torch import nn


def write(
    model: nn.Module, inputs: dict[str, Any], folder: Path, tokenizer: Any
) -> tuple[dict[str, float], list[str]]:
    raise NotImplementedError
