"""cut: remove heads from a model for good."""

from __future__ import annotations

import copy

from torch import nn

from manyheads.capture.interceptor import module_paths
from manyheads.capture.site import Selection, Unverified
from manyheads.common.types import Batch, Heads
from manyheads.models.probe_batch import probe_batch
from manyheads.nn.orthogonal_rows import plain
from manyheads.surgery.arrangement import Arrangement, check_groups
from manyheads.surgery.plan import Plan
from manyheads.surgery.rebuild import Rebuilt, observe, rebuild
from manyheads.surgery.weight_origins import note_origins


def cut(
    model: nn.Module, heads: Heads, batch: Batch | None = None, *, unverified: Unverified = "refuse"
) -> nn.Module:
    """A smaller copy of a model, without these heads: rows and columns of its projections are gone.

    Which weights belong to a head is found by running the model, whatever its class. The copy is checked: its
    outputs equal those of the model with these heads silenced (1e-5 in float32), also when it generates with
    a cache, and on a much longer batch. No number in the model changes unless it must, and per-head settings
    (windows, slopes) follow their heads.

    Parameters
    ----------
    model: any torch.nn.Module. It is left as it is.
    heads: ``{layer number or site: [head numbers]}``, or a `Plan`: the heads to remove. Where several heads
        share a key head: whole groups, or the same number from every group.
    batch: a small input of the model: a dict (passed by name), a tuple or list (passed in order), or a
        tensor. transformers models need none.
    unverified: ``"allow"`` to cut heads at unverified sites, too (`Site.verified`); the copy is still checked
        against the silenced model.

    Returns
    -------
    The copy. Its ``original_heads`` lists, for each site that lost heads, which heads of the uncut model it
    still has. It can be trained, copied, saved (`save`) and cut again.

    Raises
    ------
    ValueError for heads that do not exist, for all heads of the model, for groups left unequal, for heads
    that share weights with heads that stay or do more than attend, and for numbers and settings whose meaning
    no batch shows; RuntimeError when the copy differs from the silenced model, with the first module that
    differs.

    See Also
    --------
    plan: which heads to remove.
    grow: the inverse.
    refit, recover: make up for them.
    prune: all of it.
    save: keep the copy.

    References
    ----------
    Michel, Levy, Neubig, "Are sixteen heads really better than one?" (2019).
    Ainslie and others, "GQA: training generalized multi-query transformer models" (2023).

    Examples
    --------
    >>> layer = nn.MultiheadAttention(6, num_heads=3, batch_first=True)
    >>> import torch
    >>> x = torch.randn(2, 5, 6)
    >>> smaller = cut(layer, {0: [1]}, (x, x, x))
    >>> smaller.query.weight.shape, smaller.output.weight.shape, smaller.original_heads
    (torch.Size([4, 6]), torch.Size([6, 4]), {'': [0, 2]})
    """
    if isinstance(heads, Plan):
        heads.check(model)
    model = plain(model)
    smaller = cut_unchecked(model, heads, batch, unverified=unverified)
    if smaller is None:
        copied = copy.deepcopy(model)
        note_origins(model, copied, {}, {}, {})
        return copied
    smaller.check()
    return smaller.model


def cut_unchecked(
    model: nn.Module, heads: Heads, batch: Batch | None = None, *, unverified: Unverified = "refuse"
) -> Rebuilt | None:
    """The copy that `cut` returns once it is checked (`Rebuilt.check`), and what became of which weights;
    None if no head is named.

    >>> import torch
    >>> layer = nn.MultiheadAttention(6, num_heads=3, batch_first=True)
    >>> smaller = cut_unchecked(layer, {0: [1]}, (torch.randn(2, 5, 6),) * 3)
    >>> smaller.sliced["query.weight"].indices
    [0, 1, 4, 5]
    """
    batch = probe_batch(model) if batch is None else batch
    chosen = Selection(heads, module_paths(model).values())
    sites, run_lengths = observe(model, batch, "cut")
    removed = {name: sorted(numbers) for name, site in sites.items() if (numbers := chosen.at(site))}
    chosen.finish(sites.values())
    for name, numbers in removed.items():
        sites[name].check("cut", unverified)
        check_groups(sites[name], numbers)
    if all(len(removed.get(name, ())) == site.heads for name, site in sites.items()):
        raise ValueError("heads: these are all heads of the whole model; leave at least one")
    if not removed:
        return None
    return rebuild(model, batch, Arrangement("cut", sites, removed=removed), run_lengths)
