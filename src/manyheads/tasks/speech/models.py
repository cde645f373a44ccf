"""Models of speech: log-mel frames in; a class, a word at every position, or a text out."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.nn.transformers import Encoder, Seq2Seq
from manyheads.tasks.classification import pooled


class Ear(Encoder):
    """An encoder of sounds: a convolution over each token and its neighbours, then the blocks.

    Parameters
    ----------
    width: of a token: joined frames times mel bands.
    options: those of `Encoder`.

    Examples
    --------
    >>> import torch
    >>> ear = Ear(20, d_model=12, heads=3, layers=2)
    >>> ear(torch.randn(2, 7, 20), lengths=torch.tensor([7, 4])).shape       # (batch, length, d_model)
    torch.Size([2, 7, 12])
    """

    def __init__(self, width: int, **options: Any) -> None:
        super().__init__(**options)
        self.listen = nn.Conv1d(width, self.d_model, kernel_size=3, padding=1)

    def enter(self, x: Tensor, offset: int = 0, left: Tensor | None = None) -> Tensor:
        """Sounds ``(batch, length, width)``, zero past their lengths, to what the first block reads."""
        heard = F.gelu(self.listen(x.transpose(1, 2))).transpose(1, 2)
        return super().enter(heard, offset, left)


class Classifier(nn.Module):
    """The class of a sound, from the mean of what an `Ear` gives.

    Examples
    --------
    >>> import torch
    >>> model = Classifier(20, ["no", "yes"], d_model=12, heads=3, layers=2)
    >>> model(torch.randn(2, 7, 20), lengths=torch.tensor([7, 4]))["logits"].shape     # (batch, classes)
    torch.Size([2, 2])
    """

    def __init__(self, width: int, labels: list[str], **options: object) -> None:
        super().__init__()
        self.labels = list(labels)
        self.encoder = Ear(width, **options)
        self.output = nn.Linear(self.encoder.d_model, len(labels))

    def forward(self, frames: Tensor, lengths: Tensor | None = None) -> dict[str, Tensor]:
        """Sounds ``(batch, length, width)`` to ``logits (batch, classes)``."""
        hidden: Tensor = self.encoder(frames, lengths=lengths)
        return {"logits": self.output(pooled(hidden, lengths, "mean"))}


class Speller(nn.Module):
    """The word at every position, or none: the model of connectionist temporal classification.

    Examples
    --------
    >>> import torch
    >>> model = Speller(20, ["<blank>", "no", "yes"], d_model=12, heads=3, layers=2)
    >>> model(torch.randn(2, 7, 20)).shape                                    # (batch, length, words)
    torch.Size([2, 7, 3])
    """

    def __init__(self, width: int, words: list[str], **options: object) -> None:
        super().__init__()
        self.words = list(words)
        self.encoder = Ear(width, **options)
        self.output = nn.Linear(self.encoder.d_model, len(words))

    def forward(self, frames: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Sounds ``(batch, length, width)`` to logits ``(batch, length, words)``."""
        out: Tensor = self.output(self.encoder(frames, lengths=lengths))
        return out


class Transcriber(Seq2Seq):
    """An `Ear` as encoder, and a decoder with cross-attention to it.

    Examples
    --------
    >>> import torch
    >>> words = ["<start>", "<end>", "no", "yes"]
    >>> model = Transcriber(20, words, d_model=12, heads=3, layers=2)
    >>> model(torch.randn(2, 7, 20), torch.randint(4, (2, 5))).shape          # (batch, length, words)
    torch.Size([2, 5, 4])
    """

    def __init__(
        self, width: int, words: list[str], *, decoder_layers: int | None = None, **options: Any
    ) -> None:
        super().__init__(target_vocabulary=len(words), decoder_layers=decoder_layers, **options)
        self.words = list(words)
        self.encoder = Ear(width, **options)
