"""grow: add heads to a model, or split some in two, without changing what it computes."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Literal

from torch import nn

from manyheads.capture.interceptor import module_paths
from manyheads.capture.site import Selection, Site, Unverified
from manyheads.capture.weights import projections, weights
from manyheads.common.types import Batch
from manyheads.models.probe_batch import probe_batch
from manyheads.nn.orthogonal_rows import plain
from manyheads.surgery.arrangement import Arrangement, Copies, groups_of, named_groups
from manyheads.surgery.new_heads import divide, start_anew
from manyheads.surgery.rebuild import observe, rebuild

How = Literal["zero", "split"]
Wanted = Mapping[int | str, int | Iterable[int]] | Mapping[int, int] | Mapping[str, int]


def grow(
    model: nn.Module,
    heads: Wanted,
    batch: Batch | None = None,
    *,
    how: How = "zero",
    seed: int = 0,
    unverified: Unverified = "refuse",
) -> nn.Module:
    """A larger copy of a model, with more heads, that computes the same: the inverse of `cut`.

    Which weights a head has is found by running the model, whatever its class, and the copy is checked as
    that of `cut` is: its outputs equal those of the model (1e-5 in float32), also when it generates with a
    cache, and on a much longer batch. Per-head settings (windows, slopes, tables) are copied from the head
    that precedes the new one.

    Parameters
    ----------
    model: any torch.nn.Module. It is left as it is.
    heads: ``{layer number or site: number of heads to add}``; for ``how="split"`` also ``{layer number or
        site: [heads to split]}``. Where several heads share a key head: whole groups, or the same number for
        every group.
    batch: a small input of the model: a dict (passed by name), a tuple or list (passed in order), or a
        tensor. transformers models need none.
    how: ``"zero"``: new heads that have no effect yet, after the last one (of each group). Their queries,
        keys and values are drawn at random, on the scale of those of the other heads, with biases of zero;
        the columns that read them are zero. ``"split"``: a head becomes two that are side by side and
        together compute what it computed: the same queries and keys, and columns that are half of its own
        plus and minus a random part, so that the two learn different things. Given a number, the heads whose
        columns have the largest norm are split.
    seed: of the random numbers. Random generators of the caller are left alone.
    unverified: ``"allow"`` to grow at unverified sites, too (`Site.verified`); the copy is still checked.

    Returns
    -------
    The copy. In its ``original_heads``, and in the column ``original_head`` of tables, added heads are -1,
    -2, ... It can be trained, copied, saved (`save`), cut and grown again.

    Raises
    ------
    ValueError for sites and heads that do not exist, numbers below 1, groups that would become unequal, and
    for heads whose weights cannot be told apart; RuntimeError when the copy differs from the model, with the
    first module that differs.

    See Also
    --------
    cut: removes heads.
    save: keep the copy.

    References
    ----------
    Chen, Goodfellow, Shlens, "Net2Net: accelerating learning via knowledge transfer" (2016).

    Examples
    --------
    >>> import torch
    >>> layer = nn.MultiheadAttention(6, num_heads=3, batch_first=True)
    >>> x = torch.randn(2, 5, 6)
    >>> larger = grow(layer, {0: 2}, (x, x, x))
    >>> larger.query.weight.shape, larger.original_heads
    (torch.Size([10, 6]), {'': [0, 1, 2, -1, -2]})
    >>> torch.allclose(larger(x, x, x)[0], layer(x, x, x)[0], atol=1e-6)
    True
    >>> grow(layer, {0: [1]}, (x, x, x), how="split").original_heads
    {'': [0, 1, -1, 2]}
    """
    if how not in ("zero", "split"):
        raise ValueError(f"how: got {how!r}; expected 'zero' or 'split'")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"seed: expected a whole number, got {seed!r}")
    counts = _check_heads(heads, how)
    model = plain(model)
    batch = probe_batch(model) if batch is None else batch
    numbers = {key: [0] if isinstance(n, int) else n for key, n in counts.items()}
    chosen = Selection(numbers, module_paths(model).values())
    sites, run_lengths = observe(model, batch, "grow")
    by_site = _resolve_sites(chosen, sites, dict(zip(chosen.heads, counts.values(), strict=True)))
    for name in by_site:
        sites[name].check("grow", unverified)
    norms = (
        _norms(model, batch) if any(isinstance(n, int) for n in by_site.values()) and how == "split" else {}
    )
    copies = {name: _copies(sites[name], n, how, norms.get(name, [])) for name, n in by_site.items()}
    larger = rebuild(model, batch, Arrangement("grow", sites, copied=copies), run_lengths)
    larger.check()  # while new heads are copies, which shows what is set for each
    if how == "zero":
        start_anew(larger, seed)
        larger.check()
    else:
        divide(larger, seed)
    return larger.model


def _check_heads(heads: Wanted, how: How) -> dict[int | str, int | list[int]]:
    """The numbers of heads, or the heads, by layer or site."""
    if not isinstance(heads, Mapping):
        raise TypeError(f"heads: expected {{layer or site: number of heads}}, got {type(heads).__name__}")
    if not heads:
        raise ValueError("heads: got none; expected {layer or site: number of heads to add}")
    counts: dict[int | str, int | list[int]] = {}
    anything: Mapping[int | str, object] = heads  # type: ignore[assignment]  # checked below
    for key, value in anything.items():
        if how == "split" and isinstance(value, Iterable) and not isinstance(value, str):
            counts[key] = list(value)
            if not counts[key]:
                raise ValueError(f"heads[{key!r}]: got no heads to split; expected at least one")
            continue
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            number = None
        if number is None or isinstance(value, bool):
            expected = "a number of heads" + (" or a list of heads" if how == "split" else " to add")
            raise TypeError(f"heads[{key!r}]: expected {expected}, got {value!r}")
        if number < 1:
            raise ValueError(f"heads[{key!r}]: expected at least 1 more head, got {number}")
        counts[key] = number
    return counts


def _resolve_sites(
    chosen: Selection, sites: Mapping[str, Site], counts: Mapping[int | str, int | list[int]]
) -> dict[str, int | list[int]]:
    """The counts or heads, by the name of the site."""
    by_site: dict[str, int | list[int]] = {}
    for name, site in sites.items():
        numbers = chosen.at(site)
        if numbers:
            keys = [key for key in (name, site.layer) if key in counts]
            if len(keys) > 1:
                raise ValueError(f"heads: layer {site.layer} is {name!r}; name it once")
            value = counts[keys[0]]
            by_site[name] = value if isinstance(value, int) else numbers
    chosen.finish(sites.values())
    return by_site


def _copies(site: Site, heads: int | list[int], how: How, norms: list[float]) -> Copies:
    """The heads of a site that are copied, set by set."""
    if isinstance(heads, list):
        return _split(site, heads)
    return _add_copies(site, heads) if how == "zero" else _split(site, _largest(site, heads, norms))


def _add_copies(site: Site, number: int) -> Copies:
    """The heads behind which new ones stand, so that groups stay equal.

    >>> _add_copies(Site("attn", 0, heads=3, kv_heads=(0, 1, 2)), 2)
    (frozenset({2}), frozenset({2}))
    >>> _add_copies(Site("attn", 0, heads=4, kv_heads=(0, 0, 1, 1)), 2)
    (frozenset({2, 3}),)
    >>> _add_copies(Site("attn", 0, heads=6, kv_heads=(0, 0, 0, 1, 1, 1)), 2)
    (frozenset({2}), frozenset({5}))
    >>> _add_copies(Site("attn", 0, heads=6, kv_heads=(0, 0, 0, 1, 1, 1)), 1)
    Traceback (most recent call last):
    ValueError: heads: 'attn' has 2 key heads with 3 heads each, and 1 more head would leave them unequal; \
add a multiple of 3 (with a key head each), or of 2 (one more for every key head)
    """
    groups = _equal_groups(site)
    if len(groups) > 1 and number % len(groups[0]) == 0:
        return (frozenset(groups[-1]),) * (number // len(groups[0]))
    if number % len(groups):
        _refuse(site, groups, f"{number} more head{'s' * (number > 1)}", "add")
    if len(groups[0]) == 1:
        return (frozenset(groups[0]),) * number
    return _in_every_group(site, [group[-1:] * (number // len(groups)) for group in groups])


def _split(site: Site, heads: list[int]) -> Copies:
    """The heads to split, in sets that keep groups equal.

    >>> _split(Site("attn", 0, heads=4, kv_heads=(0, 0, 1, 1)), [2, 3])
    (frozenset({2, 3}),)
    >>> _split(Site("attn", 0, heads=4, kv_heads=(0, 0, 1, 1)), [1, 2])
    (frozenset({1}), frozenset({2}))
    """
    groups = _equal_groups(site)
    inside = [[head for head in group if head in heads] for group in groups]
    if (len(groups) > 1 or site.heads == 1) and all(len(part) in (0, len(groups[0])) for part in inside):
        return tuple(frozenset(part) for part in inside if part)
    if len({len(part) for part in inside}) > 1:
        _refuse(site, groups, f"splitting {', '.join(map(str, sorted(heads)))}", "split")
    return _in_every_group(site, inside)


def _largest(site: Site, number: int, norms: list[float]) -> list[int]:
    """The heads with the largest norms, in sets that keep groups equal."""
    if number > site.heads:
        raise ValueError(
            f"heads: {site.name!r} has {site.heads} heads, and {number} cannot be split; split at most "
            f"{site.heads} at a time"
        )
    groups = _equal_groups(site)
    size = len(groups[0])
    if len(groups) > 1 and number % size == 0:
        ranked = sorted(groups, key=lambda group: -sum(norms[head] ** 2 for head in group))
        return [head for group in ranked[: number // size] for head in group]
    if number % len(groups):
        _refuse(site, groups, f"splitting {number}", "split")
    each = [sorted(group, key=lambda head: -norms[head])[: number // len(groups)] for group in groups]
    return [head for group in each for head in group]


def _in_every_group(site: Site, heads: list[list[int]]) -> Copies:
    """Sets of heads to copy, the same number from every group; together where groups are interleaved."""
    if list(site.kv_heads) == sorted(site.kv_heads):
        return tuple(frozenset({head}) for group in heads for head in group)
    return tuple(map(frozenset, zip(*heads, strict=True)))


def _equal_groups(site: Site) -> list[list[int]]:
    groups = groups_of(site)
    if len(set(map(len, groups))) > 1:
        raise ValueError(
            f"heads: cannot grow at {site.name!r}: its key heads have different numbers of heads, "
            f"{named_groups(site)}"
        )
    return groups


def _refuse(site: Site, groups: list[list[int]], what: str, verb: str) -> None:
    size, several = len(groups[0]), len(groups)
    raise ValueError(
        f"heads: {site.name!r} has {several} key heads with {size} heads each, and {what} would leave them "
        f"unequal; {verb} a multiple of {size} (with a key head each), or of {several} (one more for every "
        "key head)"
    )


def _norms(model: nn.Module, batch: Batch) -> dict[str, list[float]]:
    """The norm of the columns that read each head, by site."""
    return {
        name: [
            sum(
                float(weights(model, [part]).norm())
                for part in head.output
                if part.parameter in of_site.readers
            )
            for head in of_site.heads
        ]
        for name, of_site in projections(model, batch).items()
    }
