"""The options that every task has: how its transformer is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from manyheads.training.options import option


@dataclass(kw_only=True)
class Architecture:
    """What all transformers have in common. Tasks are subclasses with options of their own.

    Examples
    --------
    >>> Architecture(d_model=12, heads=3, layers=2).of_the_stack(max_length=None)["heads"]
    3
    """

    unit: ClassVar[str] = "tokens"

    d_model: int = option(128, "Width of a token.")
    heads: int = option(4, "Attention heads of a layer.")
    kv_heads: int | None = option(None, "Heads of keys and values, shared by groups; as many unless given.")
    d_key: int | None = option(None, "Width of a head's queries and keys; d_model / heads unless given.")
    d_value: int | None = option(None, "Width of a head's values; d_model / heads unless given.")
    layers: int = option(4, "Number of layers (of the encoder and of the decoder, where there are both).")
    d_hidden: int | None = option(None, "Width of the feed-forward network; 4 d_model unless given.")
    norm: str = option("pre", "Norms before each part or after it: pre or post.")
    positions: str = option("rotary", "sinusoidal, learned, rotary, alibi or none.")
    kernel: str = option("auto", "How attention is computed: auto, fused, tiled or reference.")
    window: int | None = option(None, "Attend to this many tokens nearby only.")
    dropout: float = option(0.0, "Share dropped of what every part adds.")
    checkpointing: bool = option(False, "Compute activations again instead of keeping them: less memory.")

    def has_test(self, data: str) -> bool:
        """Whether data of the task has a part for testing, which `read` reads."""
        return False

    def of_the_stack(self, max_length: int | None) -> dict[str, Any]:
        """The options of an `Encoder`, `Decoder` or `Seq2Seq`; ``max_length`` is for learned positions."""
        options = {
            "d_model": self.d_model,
            "heads": self.heads,
            "layers": self.layers,
            "d_hidden": self.d_hidden,
            "norm": self.norm,
            "positions": self.positions,
            "dropout": self.dropout,
            "checkpoint": self.checkpointing,
            "kv_heads": self.kv_heads,
            "d_key": self.d_key,
            "d_value": self.d_value,
            "kernel": self.kernel,
            "window": self.window,
        }
        if self.positions == "learned":
            options["max_length"] = max_length
        return options
