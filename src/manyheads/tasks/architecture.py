"""What tasks have in common: how their transformer is built, and the tokenizer that some learn."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tokenizers import Tokenizer
from torch import Tensor

from manyheads.common.types import Keywords
from manyheads.data.readers import text
from manyheads.training.options import option


@dataclass(kw_only=True)
class Architecture:
    """The options that all tasks have in common. A task is a subclass with more options.

    Examples
    --------
    >>> Architecture(d_model=12, heads=3, layers=2).of_the_stack(max_length=None)["heads"]
    3
    """

    unit: ClassVar[str] = "tokens"

    d_model: int = option(128, "Width of a token.")
    heads: int = option(4, "Attention heads of a layer.")
    kv_heads: int | None = option(None, "Key and value heads (grouped-query attention); all by default.")
    d_key: int | None = option(None, "Width of a head's queries and keys; d_model / heads by default.")
    d_value: int | None = option(None, "Width of a head's values; d_model / heads by default.")
    layers: int = option(4, "Number of layers (of the encoder and of the decoder, where there are both).")
    d_hidden: int | None = option(None, "Width of the feed-forward network; 4 d_model by default.")
    norm: str = option("pre", "Layer norm before each sublayer or after it: pre or post.")
    positions: str = option("rotary", "sinusoidal, learned, rotary, alibi or none.")
    kernel: str = option("auto", "Attention kernel: auto, fused, tiled or reference.")
    window: int | None = option(None, "Attend only to tokens less than this far away.")
    dropout: float = option(0.0, "Dropout on the output of every sublayer.")
    checkpointing: bool = option(False, "Activation checkpointing: less memory, more time.")

    def has_test(self, data: str) -> bool:
        """Whether some data has a test part, which `read` reads."""
        return False

    def of_the_stack(self, max_length: int | None) -> Keywords:
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


class LearnedTokenizer:
    """A task whose `open` learns a tokenizer from the data; the folder of the run keeps it."""

    _tokenizer: Tokenizer | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """What `open` learned, or `restore` read."""
        if self._tokenizer is None:
            raise ValueError("tokenizer: there is none yet; open data, or restore a trained model, first")
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer) -> None:
        """Take one that was learned before: `open` then learns none."""
        self._tokenizer = tokenizer

    def restore(self, folder: Path) -> None:
        """Read the tokenizer from the folder of a run."""
        self.tokenizer = text.load_tokenizer(folder)

    def id_of(self, token: str) -> int:
        """The id of a special token."""
        number = self.tokenizer.token_to_id(token)
        if number is None:
            raise ValueError(f"tokenizer: it has no token {token!r}; expected one that this task learned")
        return number

    def decode_up_to(self, end: str, ids: Tensor) -> list[str]:
        """Ids ``(batch, length)`` as texts, each up to the token ``end``."""
        last = self.id_of(end)
        rows = [row[: row.index(last)] if last in row else row for row in ids.tolist()]
        texts: list[str] = self.tokenizer.decode_batch(rows)
        return texts
