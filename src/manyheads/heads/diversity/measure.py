"""diversity: which heads of a model are alike, which differ, and how they work together."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from manyheads.capture.weights import Projections
from manyheads.common.devices import batches_to_device, device_of, in_float64
from manyheads.common.errors import check_choices, first_line, lacks_gradient
from manyheads.common.numbered_batches import generator_of, numbered
from manyheads.common.preserved_state import evaluating
from manyheads.common.progress import Progress, count_of, no_progress
from manyheads.common.types import Batch
from manyheads.heads.diversity.accumulators import Sums
from manyheads.heads.diversity.collect import CallRecord, Collector
from manyheads.heads.diversity.result import ComparedHeads, compared, table_of_pairs
from manyheads.heads.diversity.weight_subspaces import head_projections
from manyheads.heads.importance.request import Loss
from manyheads.heads.model_outputs import directions, read_output
from manyheads.heads.table import HeadTable

MEASURES = ("attention", "outputs", "subspaces", "contributions", "gradients")


def diversity(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    measures: Sequence[str] = MEASURES,
    rows: int = 128,
    across: bool = True,
    loss: Loss | None = None,
    seed: int = 0,
    progress: Progress = no_progress,
) -> HeadTable:
    """Which heads are alike, which differ, which add to each other and which cancel: every pair of heads.

    Heads are compared where they saw the same queries and keys: within a layer and across the layers of a
    stack, not an encoder's with a decoder's. Other pairs are NaN.

    Parameters
    ----------
    model: any torch.nn.Module; run in eval mode and left as it was.
    batches: dicts (passed by name), tuples (passed in order) or tensors; one pass.
    measures: which families of measures to take, of
        ``attention``: ``js``, the Jensen-Shannon distance between the rows of attention (0 the same, 1
        nothing in common), with ``js_se``; ``js_divergence``, its square; ``overlap``, the chance that both
        heads look at the same key, with ``overlap_se``;
        ``outputs``: ``cka``, linear CKA of the heads' outputs (1 the same up to rotation);
        ``subspaces``: ``query_angle``, ``key_angle``, ``value_angle``, the mean principal angle in degrees
        between what heads read, and ``query_orthogonality`` and so on, its mean squared sine; from weights;
        ``contributions``: ``contribution_cosine``, between what heads add to the residual stream after the
        output projection, negative for heads that cancel each other;
        ``gradients``: ``gradient_cosine``, over tokens, between the gradients of the heads' gates: heads
        that the loss, or else the model's output, wants more or less of on the same tokens.
    rows: how many queries of each batch are sampled for ``attention``.
    across: whether outputs are compared across layers, too: for a deep model most of the work.
    loss: ``loss(what the model returned, batch)`` for ``gradients``; without one, random directions of the
        model's output take its place, so that heads with the same effect on it are alike.
    seed: of all random numbers.
    progress: called with how many batches are compared.

    Returns
    -------
    A `HeadTable` with `matrices` by the names above, in the order of its rows, and with the columns ``twin``
    (the head with the nearest attention), ``twin_distance`` with its standard error, ``cluster`` (groups of
    heads with similar attention) and its ``silhouette``, ``x`` and ``y`` (a map of all heads); ``rank`` and
    ``rank_99`` of a layer's outputs together. `layers` sums it up.

    See Also
    --------
    importance: which heads matter.
    roles: what each head does.

    References
    ----------
    Lin, "Divergence measures based on the Shannon entropy" (1991).
    Kornblith, Norouzi, Lee, Hinton, "Similarity of neural network representations revisited" (2019).
    Cordonnier, Loukas, Jaggi, "Multi-head attention: collaborate instead of concatenate" (2020).

    Examples
    --------
    >>> layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True)
    >>> model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    >>> table = diversity(model, [torch.randn(2, 5, 8), torch.randn(1, 7, 8)])
    >>> table.matrices["js"].shape, table["twin"][0] in {"0.1", "1.0", "1.1", "2.0", "2.1"}
    (torch.Size([6, 6]), True)
    """
    return table_of_pairs(compare_pairs(model, batches, measures, rows, across, loss, seed, progress))


def compare_pairs(
    model: nn.Module,
    batches: Iterable[Batch],
    measures: Sequence[str],
    rows: int,
    across: bool = True,
    loss: Loss | None = None,
    seed: int = 0,
    progress: Progress = no_progress,
) -> ComparedHeads:
    """Every pair of heads on some batches: sums, which `table` finishes, alone or merged with others."""
    _check(measures, rows)
    sums = Sums(across)
    projections: dict[str, Projections] = {}
    gradients = "gradients" in measures
    collector = Collector(
        model,
        rows=rows if "attention" in measures else 0,
        outputs=bool({"outputs", "contributions"} & set(measures)),
        gates=gradients,
        seed=seed,
    )
    with evaluating(model):
        every = numbered(batches, batches_to_device(batches, device_of(model)))
        for number, (position, batch) in enumerate(every, 1):
            with collector:
                seen, result = collector.run(batch, position)
            if not seen:
                raise ValueError(
                    "model: no attention was seen in it; expected a transformer whose attention is made of "
                    "torch functions"
                )
            if number == 1 and {"subspaces", "contributions"} & set(measures):
                projections = _probe(model, batch)
            if gradients and collector.gates:
                generator = generator_of(seed, position)
                collector.gates = _gradients(model, seen, result, batch, collector.padding, loss, generator)
            del result
            sums.add(seen)
            progress("diversity", number, count_of(batches))
    return compared(model, collector.sites, sums, projections, measures)


def _check(measures: Sequence[str], rows: int) -> None:
    check_choices("measures", measures, MEASURES)
    if isinstance(rows, bool) or not isinstance(rows, int):
        raise TypeError(f"rows: expected a whole number, got {rows!r}")
    if rows < 2:
        raise ValueError(f"rows: expected at least 2, for a standard error, got {rows}")


def _probe(model: nn.Module, batch: Batch) -> dict[str, Projections]:
    try:
        return head_projections(model, batch)
    except Exception as error:  # whatever a strange model does under a probe, the other measures stand
        warnings.warn(
            f"diversity: which weights belong to which head could not be found ({first_line(error)}); "
            "subspaces and contributions are left out",
            stacklevel=3,
        )
        return {}


def _gradients(
    model: nn.Module,
    seen: list[CallRecord],
    result: object,
    batch: Batch,
    padding: Tensor | None,
    loss: Loss | None,
    generator: torch.Generator,
) -> bool:
    """Take the gradients of the gates of one batch; whether there were any."""
    weights = None
    if loss is None:
        output = read_output(result, model, padding)
        value, weights = output.value, next(directions(output, generator))
    else:
        value = loss(result, batch)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            got = type(value).__name__
            raise ValueError(f"loss: expected a floating tensor from loss(output, batch), got {got}")
        value = value.sum()
    if not value.requires_grad:
        what = "the model's output" if loss is None else "the loss"
        warnings.warn(
            f"diversity: {what} has no gradient (a forward under torch.no_grad, or quantised weights?); "
            "gradients are left out",
            stacklevel=3,
        )
        return False
    gates = {one: one.gate for one in seen if one.gate is not None}
    try:
        gradients = torch.autograd.grad(value, list(gates.values()), weights, allow_unused=True)
    except RuntimeError as error:
        if not lacks_gradient(error):
            raise
        warnings.warn(
            f"diversity: a kernel of the model has no gradient ({first_line(error)}); gradients are left out",
            stacklevel=3,
        )
        return False
    for one, gradient in zip(gates, gradients, strict=True):
        if gradient is not None:
            one.gradient = in_float64(gradient.transpose(1, 2).flatten(0, 1)[one.places])
    return True
