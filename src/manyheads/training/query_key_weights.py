"""The weights that make a head's queries and keys: how large their product is, and how to scale it down."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from manyheads.capture.call import Call
from manyheads.capture.interceptor import Interceptor
from manyheads.capture.proof import ForwardCall
from manyheads.capture.weights import Head, Part
from manyheads.common.nested_tensors import map_tensors
from manyheads.common.preserved_state import evaluating
from manyheads.common.types import Batch
from manyheads.heads.diversity.weight_subspaces import head_projections, matrices

# (W_q' W_k)^(2^SQUARINGS): a singular value a thousandth below the largest then counts for nothing.
SQUARINGS = 12


@dataclass
class SiteWeights:
    """The query and key weights of one site's heads, as parts of parameters of ``module``."""

    module: nn.Module
    batch: Batch  # one short sequence that reaches the site
    inner_name: str  # of the site, seen from the module
    heads: list[Head]
    scale: float


def query_key_weights(forwards: Iterable[ForwardCall], scales: Mapping[str, float]) -> dict[str, SiteWeights]:
    """The weights behind each site that forward passes reached, by one more run of a single sequence.

    ``scales`` are those of the scores by site. The model, its gradients and the random numbers stay as they
    are. What cannot be run again or differentiated is left out.
    """
    sites: dict[str, SiteWeights] = {}
    for forward in forwards:
        try:
            batch = map_tensors(lambda x: x[:1].detach(), as_batch(forward))
            projected_sites = head_projections(forward.module, batch)
        except Exception:  # whatever it is, nothing is known of these weights then
            continue
        for name, projected in projected_sites.items():
            site = _join_name(forward.path, name)
            if site in scales:
                sites[site] = SiteWeights(forward.module, batch, name, projected.heads, scales[site])
    return sites


def as_batch(forward: ForwardCall) -> Batch:
    """What a module was called with, as a batch: positional arguments get their names where both occur."""
    args, kwargs = forward.inputs.args, dict(forward.inputs.kwargs)
    if not kwargs:
        return args
    names = [*inspect.signature(forward.module.forward).parameters]
    return dict(zip(names, args, strict=False)) | kwargs


def spectral_norms(site: SiteWeights) -> Tensor:
    """The largest singular value of scale W_q' W_k of each head, (heads,): without positions and norms, no
    logit of tokens x, y is larger than this times |x| |y|. NaN where the weights are not simple rows.

    >>> from manyheads.capture.weights import projections
    >>> layer = nn.MultiheadAttention(6, num_heads=2, batch_first=True, bias=False)
    >>> x = torch.randn(1, 5, 6)
    >>> heads = projections(layer, (x, x, x))[""].heads
    >>> query, key = layer.in_proj_weight.detach()[:12].view(2, 2, 3, 6)
    >>> plain = torch.linalg.matrix_norm(query.mT @ key, 2)
    >>> torch.allclose(spectral_norms(SiteWeights(layer, x, "", heads, 1.0)), plain)
    True
    """
    query, key = (
        matrices(site.module, [getattr(head, role) for head in site.heads]) for role in ("query", "key")
    )
    simple = [
        q is not None and k is not None and len(q) == len(k) and bool(head.query) and bool(head.key)
        for head, q, k in zip(site.heads, query, key, strict=True)
    ]
    norms = torch.full((len(site.heads),), torch.nan)
    simple_heads = [head for head, is_simple in enumerate(simple) if is_simple]
    if simple_heads and len({(query[h].shape, key[h].shape) for h in simple_heads}) == 1:  # type: ignore[union-attr]
        grams = []
        for side in (query, key):
            stacked = torch.stack([side[h] for h in simple_heads]).float()  # type: ignore[misc]
            grams.append(stacked @ stacked.mT)  # (heads, d_key, d_key)
        norms[simple_heads] = (site.scale * _largest_eigenvalue(grams[0] @ grams[1]).sqrt()).cpu()
    return norms


def _largest_eigenvalue(products: Tensor) -> Tensor:
    """Of products of two positive matrices, (heads, d, d), by squaring them again and again."""
    power = products
    for _ in range(SQUARINGS):
        size = torch.linalg.matrix_norm(power)[:, None, None]
        power = power / size.where(size > 0, 1.0)
        power = power @ power
    trace = power.diagonal(dim1=1, dim2=2).sum(1)
    largest = (products @ power).diagonal(dim1=1, dim2=2).sum(1) / trace
    return largest.where(trace > 0, 0.0).where(products.isfinite().all(-1).all(-1), torch.nan)


class LogitClip:
    """Scales the query and key weights of heads whose logits are too large, and nothing that others read.

    Raises a ValueError at once for a model where scaling those rows does not scale a head's logits alone: one
    that normalises queries and keys, caps its scores, or shares the rows.

    Examples
    --------
    >>> from manyheads.capture.weights import projections
    >>> layer = nn.MultiheadAttention(6, num_heads=2, batch_first=True)
    >>> x, before = torch.randn(1, 5, 6), layer.in_proj_weight.detach().clone()
    >>> heads = projections(layer, (x, x, x))[""].heads
    >>> clip = LogitClip({"attn": SiteWeights(layer, (x, x, x), "", heads, 1.0)})
    >>> clip.scale("attn", 1, 0.25)
    >>> (layer.in_proj_weight / before)[[0, 3, 9, 12], 0]  # head 0, head 1's query, its key, head 0's value
    tensor([1.0000, 0.5000, 0.5000, 1.0000], grad_fn=...)
    """

    def __init__(self, sites: Mapping[str, SiteWeights]) -> None:
        self.sites = sites
        readers: dict[tuple[int, int], set[tuple[str, int, str]]] = {}
        for site, weights in sites.items():
            for number, head in enumerate(weights.heads):
                for role in ("query", "key", "value"):
                    for row in _rows(weights.module, _parts(head, role)):
                        readers.setdefault(row, set()).add((site, number, role))
        self._scales_keys: dict[tuple[str, int], bool] = {}
        for site, weights in sites.items():
            for number, head in enumerate(weights.heads):
                query = _rows(weights.module, _parts(head, "query"))
                others = {reader for row in query for reader in readers[row]} - {(site, number, "query")}
                if not query or others:
                    why = (
                        f"the rows of its queries serve {min(others)}, too"
                        if others
                        else "its queries have no rows of weights of their own"
                    )
                    raise ValueError(_refusal(site, number, why))
                key = _rows(weights.module, _parts(head, "key"))
                alone = bool(key) and all(readers[row] == {(site, number, "key")} for row in key)
                self._scales_keys[site, number] = alone
        for site in sites:
            self._check(site)

    @torch.no_grad()
    def scale(self, site: str, head: int, factor: float) -> None:
        """Multiply a head's logits by a factor: the root of it goes to its queries and to its keys; where
        other heads or values read those keys, all of it goes to the queries.
        """
        weights = self.sites[site]
        for parameter, axis, rows, row_factor in self._changes(
            site, [head], lambda scales_keys: factor ** (0.5 if scales_keys else 1.0)
        ):
            tensor = weights.module.get_parameter(parameter)
            index = torch.tensor(rows, device=tensor.device)
            tensor.index_copy_(axis, index, tensor.index_select(axis, index) * row_factor)

    def _changes(
        self, site: str, heads: Sequence[int], factor: Callable[[bool], float]
    ) -> list[tuple[str, int, tuple[int, ...], float]]:
        """Which rows of which parameters to multiply by what; ``factor`` gets whether keys are scaled."""
        changes = []
        for number in heads:
            scales_keys = self._scales_keys[site, number]
            for role in ("query", "key") if scales_keys else ("query",):
                parts = _parts(self.sites[site].heads[number], role)
                changes += [(*part, factor(scales_keys)) for part in parts]
        return changes

    def _check(self, site: str) -> None:
        """Run a sequence with the weights scaled, and see whether each head's logits are."""
        weights = self.sites[site]
        numbers = range(len(weights.heads))
        logits = _observe_logits(weights, {})
        parameters = dict(weights.module.named_parameters())
        scaled_parameters: dict[str, Tensor] = {}
        for parameter, axis, rows, factor in self._changes(site, numbers, lambda scales_keys: 0.5):
            tensor = scaled_parameters.get(parameter, parameters[parameter]).detach()
            index = torch.tensor(rows, device=tensor.device)
            scaled_parameters[parameter] = tensor.index_copy(
                axis, index, tensor.index_select(axis, index) * factor
            )
        scaled_logits = _observe_logits(weights, scaled_parameters)
        for number in numbers:
            expected = 0.25 if self._scales_keys[site, number] else 0.5
            before, after = logits[:, number] * expected, scaled_logits[:, number]
            if not torch.allclose(after, before, rtol=1e-2, atol=1e-3 * float(before.abs().max()) + 1e-9):
                why = "its logits do not follow: queries or keys are normalised, or scores capped or biased"
                raise ValueError(_refusal(site, number, why))


def _observe_logits(weights: SiteWeights, parameters: dict[str, Tensor]) -> Tensor:
    """The products of queries and keys, or the scores where those are hidden, (1, heads, queries, keys)."""
    logits: list[Tensor] = []

    def see(call: Call) -> None:
        if call.site.name == weights.inner_name and not logits:
            if call.scores is not None:
                logits.append(call.scores.masked_fill(call.scores < -1e4, 0.0))  # what is hidden stays hidden
            elif call.query is not None and call.key is not None:
                key = call.key.repeat_interleave(call.query.shape[1] // call.key.shape[1], 1)
                logits.append(call.query @ key.mT)

    batch = weights.batch
    args, kwargs = (
        ((), dict(batch))
        if isinstance(batch, Mapping)
        else (tuple(batch), {})
        if isinstance(batch, tuple | list)
        else ((batch,), {})
    )
    with evaluating(weights.module), torch.no_grad(), Interceptor(weights.module, see):
        functional_call(weights.module, parameters, args, kwargs)
    if not logits:
        raise ValueError(f"clip: {weights.inner_name} makes no attention call in eval mode; leave clip out")
    return logits[0].detach().float()


def _parts(head: Head, role: str) -> tuple[Part, ...]:
    """The weights and biases of a role."""
    return (*getattr(head, role), *head.biases.get(role, ()))


def _rows(module: nn.Module, parts: Iterable[Part]) -> list[tuple[int, int]]:
    """Each row by the parameter it is in and its number."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return [(id(tensors[part.parameter]), row) for part in parts for row in part.indices]


def _refusal(site: str, head: int, why: str) -> str:
    return (
        f"clip: {site} head {head} cannot be clipped by scaling its query and key weights, since {why}; "
        "leave clip out"
    )


def _join_name(path: str, name: str) -> str:
    """The name of a site, seen from the model that has a module at ``path``."""
    return f"{path}.{name}" if path and name and not name.startswith("#") else path + name
