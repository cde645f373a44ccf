"""The loss of tasks that generate text: cross-entropy of every next token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # the label of places without a token


def next_token_loss(logits: Tensor, ids: Tensor, lengths: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats, summed over the tokens after the first, and the number of these tokens.

    Parameters
    ----------
    logits: (batch, length - 1, vocabulary), from the tokens but the last.
    ids: (batch, length).
    lengths: (batch,); tokens at or past it are padding.
    smoothing: the share of probability that the target leaves to all tokens alike (label smoothing).

    Examples
    --------
    >>> logits, ids = torch.zeros(2, 3, 7), torch.randint(7, (2, 4))
    >>> loss, tokens = next_token_loss(logits, ids, torch.tensor([4, 2]), 0.0)
    >>> tokens, (loss / tokens).exp()
    (tensor(4), tensor(7.0000))
    """
    real = torch.arange(ids.shape[1] - 1, device=ids.device) < lengths[:, None] - 1
    labels = ids[:, 1:].masked_fill(~real, IGNORED).flatten()
    flat = logits.flatten(0, 1).float()
    loss = F.cross_entropy(flat, labels, ignore_index=IGNORED, label_smoothing=smoothing, reduction="sum")
    return loss, real.sum()
