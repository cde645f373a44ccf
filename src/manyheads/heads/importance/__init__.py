"""Which heads matter: several methods, most with standard errors.

A method is a function that takes a `Request` and returns a HeadTable with the column ``importance``. To add
one, write the function in a new file and add it to `METHODS`; CONTRIBUTING.md shows how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from manyheads.capture.site import Unverified
from manyheads.common import plugins
from manyheads.common.labelled_batch import LabelledBatch
from manyheads.common.lazy_names import submodules
from manyheads.common.progress import Progress, no_progress
from manyheads.common.registry import registered
from manyheads.common.types import Batch
from manyheads.data.labelled import Labelled
from manyheads.heads.importance.baselines import confidence, output_norm, random
from manyheads.heads.importance.gradients import fisher, gradient
from manyheads.heads.importance.hard_concrete import learned_gates
from manyheads.heads.importance.leave_one_out import leave_one_out, mean_ablation
from manyheads.heads.importance.losses import Loss, find_loss
from manyheads.heads.importance.rankings import Agreement, agreement
from manyheads.heads.importance.relevance import relevance
from manyheads.heads.importance.request import Request
from manyheads.heads.table import HeadTable

if TYPE_CHECKING:
    from manyheads.heads.importance import method_comparison as method_comparison
else:
    __getattr__ = submodules(__name__)

__all__ = ["METHODS", "WITH_LOSS", "Agreement", "agreement", "importance"]


def _elimination(request: Request) -> HeadTable:
    table: HeadTable = registered("importance.elimination")(request)  # surgery is a room above this one
    return table


METHODS: dict[str, Callable[[Request], HeadTable]] = {
    "fisher": fisher,
    "elimination": _elimination,
    "gradient": gradient,
    "leave-one-out": leave_one_out,
    "mean-ablation": mean_ablation,
    "confidence": confidence,
    "output-norm": output_norm,
    "relevance": relevance,
    "gates": learned_gates,
    "random": random,
}


def add_plugins() -> None:
    """Add the methods of other packages to `METHODS`; those of a name that is taken are left out."""
    for name, method in plugins.load("manyheads.importance").items():
        METHODS.setdefault(name, method)


WITH_LOSS = ("gradient", "leave-one-out", "mean-ablation", "gates")


def importance(
    model: nn.Module,
    batches: Iterable[Batch],
    method: str = "fisher",
    loss: str | Loss | None = None,
    *,
    gates: int | None = None,
    seed: int = 0,
    state: str | PathLike[str] | None = None,
    unverified: Unverified = "refuse",
    memory: str | int | None = None,
    progress: Progress = no_progress,
) -> HeadTable:
    """How much each head of a model matters: a table with the column ``importance`` and its standard error.

    Parameters
    ----------
    model: any torch.nn.Module. It runs in eval mode and is left unchanged.
    batches: dicts (passed by name), tuples (passed in order) or tensors.
    method: ``fisher`` predicts what silencing a head would change, for all heads from one backward pass, and
        needs no labels; ``elimination`` is what a head costs when heads are removed one after the other and
        those that stay are refitted, also without labels; ``leave-one-out`` silences one head after the
        other, exact and slow, and ``mean-ablation`` replaces it by its mean output instead of zeros;
        ``gradient`` is the slope of a loss with respect to each head's gate; ``gates`` learns which
        heads to keep; ``relevance`` follows the output back to the heads; ``confidence`` and ``output-norm``
        look at the heads alone; ``random`` is the control.
    loss: a name (``causal``, ``masked``, ``classification``, ``seq2seq``, ``embedding``, ``labels``) or a
        function of what the model returned and the batch, which gives a number or one for each sequence. For
        ``gradient``, ``leave-one-out``, ``mean-ablation`` and ``gates``; without it they take the task's
        for batches of `labelled`; else ``gradient`` takes the one that fits the model, and the
        others look at what changes in the output.
    gates: how many heads ``gates`` keeps; half of them by default.
    seed: of all random numbers.
    state: a file in which ``leave-one-out`` keeps its results, to resume from after an interruption.
    unverified: ``"allow"`` lets ``leave-one-out``, ``mean-ablation`` and ``gates`` silence heads at
        unverified sites (`Site.verified`), too. The other methods only measure such heads; the column
        ``verified`` marks them.
    memory: what the sums of ``elimination`` may take, in bytes or as ``"2GB"``; half of what is free by
        default. With less than all of them need, the batches are read several times.
    progress: called with the method and how many batches (for ``gates``, repetitions) are done.

    Returns
    -------
    A HeadTable. ``fisher`` and ``leave-one-out`` without a loss have the same unit: nats per token for logits
    of tokens, nats per sequence for logits of whole sequences, 1 - cosine for embeddings. Standard errors are
    over sequences where every number belongs to one, else over batches; over repetitions for ``gates``;
    ``elimination``, which finds one order from all batches together, has none (nan).

    See Also
    --------
    agreement: whether two rankings agree.
    labelled: batches with labels, and the loss of their task.
    plan: from a ranking to the heads to remove.
    prune.

    References
    ----------
    Michel, Levy, Neubig, "Are sixteen heads really better than one?" (2019).
    Voita, Talbot, Moiseev, Sennrich, Titov, "Analyzing multi-head self-attention" (2019).
    Kwon, Kim, Mahoney, Hassoun, Keutzer, Gholami, "A fast post-training pruning framework for
    transformers" (2022).
    Hassibi, Stork, "Second order derivatives for network pruning: optimal brain surgeon" (1992).
    Louizos, Welling, Kingma, "Learning sparse neural networks through L0 regularization" (2018).
    Ali and others, "XAI for transformers: better explanations through conservative propagation" (2022).

    Examples
    --------
    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True)
    >>> model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    >>> batches = [torch.randn(2, 5, 8), torch.randn(3, 7, 8)]
    >>> importance(model, batches)
    HeadTable(6 heads at 3 sites, 31 tokens: importance)
    """
    add_plugins()
    if method not in METHODS:
        raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
    if loss is not None and method not in WITH_LOSS:
        raise ValueError(f"loss: {method} takes none; expected one only with {', '.join(WITH_LOSS)}")
    if gates is not None and method != "gates":
        raise ValueError(f"gates: {method} ranks all heads; expected a number only with method='gates'")
    if loss is None and method in WITH_LOSS and _has_labels(batches):
        loss = "labels"
    where = None if state is None else Path(state)
    request = Request(model, batches, find_loss(loss), seed, gates, where, unverified, memory, progress)
    return METHODS[method](request)


def _has_labels(batches: Iterable[Batch]) -> bool:
    """Whether these are batches of `labelled`: all of them at once, or some in a list."""
    if isinstance(batches, list | tuple):
        return bool(batches) and isinstance(batches[0], LabelledBatch)
    return isinstance(batches, Labelled)
