"""diversity_terms: terms of a loss that keep the heads of any model different from each other."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.capture.call import Call, measuring
from manyheads.capture.interceptor import Interceptor
from manyheads.capture.mask_reading import Visible, update_site, visible, without_dead_rows
from manyheads.capture.site import Unverified
from manyheads.capture.weights import ROLES, Part, live_weights
from manyheads.common.devices import for_float64
from manyheads.common.errors import check_choices
from manyheads.common.types import Batch
from manyheads.heads.diversity.collect import seeing
from manyheads.heads.diversity.weight_subspaces import head_projections, matrices
from manyheads.models.probe_batch import probe_batch
from manyheads.nn.head_overlap import overlap, overlap_of_scores, overlap_of_weights
from manyheads.training.orthogonal_heads import unique_parts

TERMS = ("orthogonality", "outputs", "values", "attention")
# Directions in which a head reads less than about the root of this share of its mean hardly count, and
# let no gradient grow without bounds.
WEAKEST = 1e-8


def diversity_terms(
    model: nn.Module,
    *,
    orthogonality: float = 0.0,
    outputs: float = 0.0,
    values: float = 0.0,
    attention: float = 0.0,
    roles: Sequence[str] = ("query", "key"),
    batch: Batch | None = None,
    unverified: Unverified = "refuse",
) -> DiversityTerms:
    """Terms for the loss of any model: how alike its heads are, each from 0 (nothing in common) to 1 (the
    same), with gradients.

    ``with terms: loss = model(**batch).loss``, then ``(loss + terms.loss()).backward()``. Heads are compared
    with the others of their site; a term is the mean over pairs, then over queries or tokens without padding,
    then over sites. Nothing of the size length x length is held.

    Parameters
    ----------
    model: any torch.nn.Module.
    orthogonality: weight of the mean squared cosine of the principal angles between the subspaces that heads
        read (or write), from weights alone: 1 - ``query_orthogonality`` and so on of `diversity`. It needs no
        forward pass.
    outputs: weight of the mean squared cosine between the outputs of heads (weights times values) for a
        token.
    values: the same of what they read, the values of a token; where heads share them, once for each group.
    attention: weight of the mean cosine between the attention weights of heads for a query that sees two keys
        or more, before dropout.
    roles: for ``orthogonality``, some of ``query``, ``key``, ``value`` and ``output``.
    batch: for ``orthogonality``, a small input of the model: a dict (passed by name), a tuple or list (passed
        in order), or a tensor. transformers models need none.
    unverified: ``"allow"`` to use terms at unverified sites, too (`Site.verified`).

    Returns
    -------
    A context to run the model in, which has `loss` (the sum of the terms with their weights), `values` (the
    terms as numbers, without weights, for logs) and `notes` (what was left out). Several runs in one context
    are averaged; each new ``with`` starts afresh.

    Raises
    ------
    ValueError when no weight is above zero, when the model has no trainable heads, at a site that is not
    verified, and in `loss` when a term has nothing to compare, or no gradient.

    See Also
    --------
    orthogonal_heads : orthogonality as a constraint.
    diversity : measure how alike heads are, on held-out data.

    References
    ----------
    Li et al. 2018, Multi-head attention with disagreement regularization.

    Examples
    --------
    >>> import manyheads as mh
    >>> model, ids = mh.Encoder(12, heads=3, layers=2, vocabulary=97), torch.randint(97, (2, 11))
    >>> terms = mh.diversity_terms(model, orthogonality=0.1, attention=0.01, batch=ids)
    >>> with terms:
    ...     loss = model(ids).square().mean()
    >>> (loss + terms.loss()).backward()
    >>> sorted(terms.values), all(0 < value < 1 for value in terms.values.values())
    (['attention', 'orthogonality'], True)
    """
    weights = dict(zip(TERMS, (orthogonality, outputs, values, attention), strict=True))
    check_weights(weights)
    check_choices("roles", roles, ROLES)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "model: it has no trainable heads, since none of its parameters requires a gradient; expected "
            "some that do: call model.requires_grad_()"
        )
    terms = DiversityTerms(model, {name: weight for name, weight in weights.items() if weight}, unverified)
    if orthogonality:
        terms.find_subspaces(roles, probe_batch(model) if batch is None else batch)
    return terms


def check_weights(weights: Mapping[str, float]) -> None:
    """Raise unless these are weights of terms, one of them above zero.

    >>> check_weights({"attention": -1.0})
    Traceback (most recent call last):
    ValueError: attention: expected a number, 0 or more, got -1.0
    """
    for name, weight in weights.items():
        if name not in TERMS:
            raise ValueError(f"diversity: expected some of {', '.join(TERMS)}, got {name!r}")
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise TypeError(f"{name}: expected a number, got {weight!r}")
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"{name}: expected a number, 0 or more, got {weight}")
    if not any(weights.values()):
        raise ValueError(f"diversity: expected a weight above 0 for at least one of {', '.join(TERMS)}")


class DiversityTerms:
    """The terms of one model; see `diversity_terms`.

    Attributes
    ----------
    weights: of the terms, by name.
    notes: sentences about what has no term.
    """

    def __init__(self, model: nn.Module, weights: Mapping[str, float], unverified: Unverified) -> None:
        self.model, self.weights, self.notes = model, dict(weights), list[str]()
        self._unverified: Unverified = unverified
        self._subspaces: list[list[tuple[Part, ...]]] = []
        self._latest: dict[str, Tensor] = {}
        self._observed = [name for name in self.weights if name != "orthogonality"]
        self._interceptor: Interceptor | None = None
        self._sums: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}  # term, site: sum and count
        self._without_gradient: set[str] = set()
        self._lock = threading.Lock()

    @property
    def values(self) -> dict[str, float]:
        """The terms when `loss` was last called, without their weights."""
        return {name: value.item() for name, value in self._latest.items()}

    def __enter__(self) -> DiversityTerms:
        self._sums = {name: {} for name in self._observed}
        self._without_gradient.clear()
        if self._observed:
            self._interceptor = Interceptor(self.model, self._see)
            self._interceptor.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._interceptor is not None:
            self._interceptor.__exit__(*error)

    def loss(self) -> Tensor:
        """The sum of the terms with their weights, a scalar to add to the loss of the runs in the context."""
        for site in () if self._interceptor is None else self._interceptor.sites.by_name.values():
            if site.refuted:  # its calls were dropped
                site.check("diversity_terms", self._unverified)
                self._note(f"{site.name!r} has no terms: {site.reason}")
        terms = {name: self._orthogonality() if name == "orthogonality" else self._mean(name)
                 for name in self.weights}  # fmt: skip
        self._latest = {name: term.detach() for name, term in terms.items()}
        if torch.is_grad_enabled():
            self._check_gradients(terms)
        return torch.stack([self.weights[name] * term for name, term in terms.items()]).sum()

    def find_subspaces(self, roles: Sequence[str], batch: Batch) -> None:
        """Find which weights make which head."""
        for name, projections in head_projections(self.model, batch).items():
            projections.site.check("diversity_terms", self._unverified)
            for role in roles:
                heads = unique_parts(projections, role)
                if any(matrix is None for matrix in matrices(self.model, heads)):
                    self._note(f"orthogonality: the {role} heads of {name!r} are not rows of one weight")
                elif len(heads) < 2:
                    self._note(f"orthogonality: {name!r} has one {role} head")
                elif heads not in self._subspaces and self._rows(heads).requires_grad:
                    self._subspaces.append(heads)
        if not self._subspaces:
            why = f" ({'; '.join(self.notes)})" if self.notes else ""
            raise ValueError(
                f"model: it has no trainable heads to be orthogonal: two or more at a site, whose "
                f"{' or '.join(roles)} weights require a gradient{why}"
            )

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    @torch.enable_grad()
    def _rows(self, heads: Sequence[Sequence[Part]]) -> Tensor:
        return live_weights(self.model, [part for parts in heads for part in parts])

    def _orthogonality(self) -> Tensor:
        means = []
        for heads in self._subspaces:
            rows = self._rows(heads)
            sizes = [sum(len(part.indices) for part in parts) for parts in heads]
            means.append(_off_diagonal_mean(subspace_similarity(list(rows.split(sizes)))))
        return torch.stack([mean.to(means[0]) for mean in means]).mean()

    def _mean(self, name: str) -> Tensor:
        """The mean of a term over sites, from what was seen."""
        sums = self._sums.get(name)
        if not sums:
            why = f" ({'; '.join(self.notes)})" if self.notes else ""
            raise ValueError(
                f"{name}: there was nothing to compare{why}; expected a run of the model inside "
                "`with terms`, with two heads or more at a site"
            )
        device = next(iter(sums.values()))[0].device
        totals = torch.stack([total.to(device) for total, _ in sums.values()])
        counts = torch.stack([count.to(device) for _, count in sums.values()])
        return (totals / counts.clamp(min=1)).sum() / (counts > 0).sum().clamp(min=1)

    def _check_gradients(self, terms: Mapping[str, Tensor]) -> None:
        if self._without_gradient:
            raise ValueError(
                f"diversity_terms: {min(self._without_gradient)!r} ran without gradients, under "
                "torch.no_grad or in a checkpoint with use_reentrant=True, so its terms have none; expected "
                "gradients: pass use_reentrant=False to the checkpoints"
            )
        for name, term in terms.items():
            if not term.requires_grad:
                raise ValueError(
                    f"{name}: no trainable parameter has a part in it; expected heads that learn, or a call "
                    "of terms.loss() under torch.no_grad"
                )

    def _see(self, call: Call) -> None:
        if call.again:
            return
        site = call.site
        site.check("diversity_terms", self._unverified)
        if not torch.is_grad_enabled():
            self._without_gradient.add(site.name)
        # Not in a checkpoint's books: it counts what is saved, and repeats the model's functions only.
        with measuring(call), _saved_as_is():
            with torch.no_grad():
                alive = without_dead_rows(call)
                visibility = visible(alive)
                real = update_site(alive, visibility)  # (batch or 1, queries)
                counted = seeing(alive) if real is None else seeing(alive) & real  # (batch, queries)
            for name in self._observed:
                term = _TERMS[name](call, visibility, counted)
                if isinstance(term, str):
                    self._note(f"{name}: {site.name!r} {term}")
                else:
                    with self._lock:
                        total, count = self._sums[name].get(site.name, (0.0, 0))
                        self._sums[name][site.name] = total + term[0], count + term[1]


def _saved_as_is() -> Any:
    """A context in which what a function saves for its gradient is the tensor itself."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def subspace_similarity(weights: Sequence[Tensor]) -> Tensor:
    """The mean squared cosine of the principal angles between the row spaces of every two weights (width,
    d_model), (heads, heads): 1 - the ``orthogonality`` of `diversity`, with a gradient. Scale does not count.

    >>> x, y, z = torch.eye(3).split(1)
    >>> subspace_similarity([torch.cat([x, y]), torch.cat([2 * x, z]), torch.cat([y, y + x])])[0]
    tensor([1.0000, 0.5000, 1.0000])
    """
    widest = max(len(weight) for weight in weights)
    rows = torch.stack([nn.functional.pad(w, (0, 0, 0, widest - len(w))) for w in weights])
    exact = torch.promote_types(rows.dtype, torch.float32)
    device = rows.device
    rows = rows.to(for_float64(device)).double()
    grams = rows @ rows.mT
    strength = grams.diagonal(dim1=1, dim2=2).sum(1) / widest
    weakest = (WEAKEST * strength).clamp(min=torch.finfo(torch.float64).tiny ** 0.5)
    grams = grams + weakest[:, None, None] * torch.eye(widest, dtype=grams.dtype, device=grams.device)
    basis = torch.linalg.solve_triangular(torch.linalg.cholesky(grams), rows, upper=False)
    basis = basis.to(exact).to(device)  # (heads, width, d_model), orthonormal rows
    ranks = basis.detach().square().sum((1, 2))
    flat = basis.flatten(0, 1)
    cosines = (flat @ flat.T).view(len(weights), widest, len(weights), widest)
    least = torch.minimum(ranks[:, None], ranks).clamp(min=0.5)
    similarity: Tensor = cosines.square().sum((1, 3)) / least
    return similarity


def _off_diagonal_mean(matrix: Tensor) -> Tensor:
    """The mean of the elements (..., n, n) off the diagonal; taken from the sum, it would leave rounding."""
    size = matrix.shape[-1]
    others = ~torch.eye(size, dtype=torch.bool, device=matrix.device)
    return (matrix * others).sum((-2, -1)) / (size * (size - 1))


# What a term adds for one call: a sum over tokens and their number; or why it has nothing to say of it.
Term = tuple[Tensor, Tensor] | str


def _outputs(call: Call, visibility: Visible, counted: Tensor) -> Term:
    if call.partial:
        return "adds up its output in parts"
    return _agreement(call.output.transpose(1, 2)[counted])


def _values(call: Call, visibility: Visible, counted: Tensor) -> Term:
    if call.partial:
        return "reads its values in parts"
    value, start = call.value, call.memory[0]
    if value.shape[1] == call.site.heads:  # perhaps repeated
        kv_heads = call.site.kv_heads
        value = value[:, [kv_heads.index(number) for number in dict.fromkeys(kv_heads)]]
    tokens = value[:, :, start : start + visibility.keys].transpose(1, 2)  # (batch, keys, kv_heads, d_value)
    real = (
        torch.ones(1, 1, dtype=torch.bool)
        if visibility.real is None
        else visibility.real[:, : visibility.keys]
    )
    return _agreement(tokens[real.to(value.device).expand(tokens.shape[:2])])


def _agreement(x: Tensor) -> Term:
    """The mean squared cosine between the vectors of heads (tokens, heads, width), summed over tokens."""
    tokens, heads, _ = x.shape
    if heads < 2:
        return "has one head to compare"
    directions = nn.functional.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)
    squares = (directions @ directions.mT).square()
    return _off_diagonal_mean(squares).sum(), torch.tensor(tokens, device=x.device)


def _attention(call: Call, visibility: Visible, counted: Tensor) -> Term:
    if call.output.shape[1] < 2:
        return "has one head to compare"
    if call.signed:
        return "has weights that may be negative, which are no distribution"
    query, key, scores, weights = call.query, call.key, call.scores, call.weights
    is_recomputed = scores is not None and not scores.requires_grad  # computed for that alone
    if is_recomputed and weights is not None and weights.requires_grad:
        overlaps, is_valid = overlap_of_weights(weights)
    elif scores is not None and not (is_recomputed and call.memory != (0, 0)):
        overlaps, is_valid = overlap_of_scores(scores)
    elif query is not None and key is not None:
        has_learned_mask = any(tensor.requires_grad for tensor in call.mask.tensors)
        uses_call_mask = has_learned_mask or call.memory != (0, 0) or visibility.keys < key.shape[2]
        mask = call.mask if uses_call_mask else visibility.mask  # in fewer words, if they say the same
        scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
        overlaps, is_valid = overlap(query, key, mask, scale)
    else:
        return "hides its queries and its scores"
    learns = call.output if query is None else query
    if learns.requires_grad and torch.is_grad_enabled() and not overlaps.requires_grad:
        return "computes its weights in a way that shows no gradient"
    is_valid = is_valid & counted
    return torch.where(is_valid, overlaps, 0.0).sum(), is_valid.sum()


_TERMS = {"outputs": _outputs, "values": _values, "attention": _attention}
