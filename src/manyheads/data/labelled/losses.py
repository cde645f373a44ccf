"""The losses of tasks, one number for each sequence."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

IGNORED = -100  # in labels, as transformers has it


def token_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy over the labelled tokens of each sequence, (batch,); zero for one without any.

    Parameters
    ----------
    logits: (batch, tokens, classes).
    labels: (batch, tokens); -100 for what is not labelled.

    >>> import torch
    >>> token_cross_entropy(torch.zeros(2, 3, 7), torch.tensor([[-100, 4, 1], [-100, -100, -100]]))
    tensor([1.9459, 0.0000])
    """
    losses = F.cross_entropy(logits.transpose(1, 2), labels.long(), ignore_index=IGNORED, reduction="none")
    return losses.sum(1) / (labels != IGNORED).sum(1).clamp(min=1)


def squared_error(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean square of the errors of each sequence, (batch,).

    >>> import torch
    >>> squared_error(torch.tensor([[1.0], [4.0]]), torch.tensor([3.0, 4.0]))
    tensor([4., 0.])
    """
    return (logits.flatten(1) - labels.reshape(len(logits), -1).to(logits)).pow(2).mean(1)


def several_classes(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean binary cross-entropy over the classes of each sequence, (batch,); several may be right.

    >>> import torch
    >>> several_classes(torch.zeros(2, 3), torch.tensor([[1, 0, 1], [0, 0, 0]]))
    tensor([0.6931, 0.6931])
    """
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits), reduction="none").mean(1)


def span_cross_entropy(start: Tensor, end: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """The mean cross-entropy of where an answer starts and of where it ends, (batch,).

    Parameters
    ----------
    start, end: logits (batch, tokens).
    starts, ends: positions (batch,).

    >>> import torch
    >>> span_cross_entropy(torch.zeros(1, 7), torch.zeros(1, 7), torch.tensor([2]), torch.tensor([3]))
    tensor([1.9459])
    """
    losses = (F.cross_entropy(start, starts, reduction="none"), F.cross_entropy(end, ends, reduction="none"))
    return (losses[0] + losses[1]) / 2


def connectionist(logits: Tensor, frames: Tensor, labels: Tensor, blank: int) -> Tensor:
    """The CTC loss of each sequence by the number of its labels, (batch,).

    Parameters
    ----------
    logits: (batch, frames, vocabulary).
    frames: how many of the frames are real, (batch,).
    labels: (batch, longest), -100 after the end of each.
    blank: the id that stands for no label.

    >>> import torch
    >>> logits = torch.zeros(1, 3, 2)                                 # three frames, a and blank: 8 paths
    >>> connectionist(logits, torch.tensor([3]), torch.tensor([[0]]), blank=1).exp()   # 6 of them say "a"
    tensor([1.3333])
    """
    lengths = (labels != IGNORED).sum(1)
    log_p = logits.float().log_softmax(-1).transpose(0, 1)
    targets = labels.clamp(min=0)
    nll = F.ctc_loss(log_p, targets, frames, lengths, blank=blank, reduction="none", zero_infinity=False)
    return nll / lengths.clamp(min=1)
