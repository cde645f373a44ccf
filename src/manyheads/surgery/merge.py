"""merge: fewer key and value heads, each shared by several heads."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Literal

from torch import nn

from manyheads.capture.interceptor import module_paths
from manyheads.capture.site import Selection, Site, Unverified
from manyheads.capture.weights import Projections, projections
from manyheads.common.errors import FailedChangeError
from manyheads.common.labelled_batch import without_labels
from manyheads.common.progress import Progress, no_progress
from manyheads.common.types import Batch
from manyheads.models.changes import changes_of, settle
from manyheads.models.probe_batch import probe_batch
from manyheads.nn.orthogonal_rows import plain
from manyheads.surgery.arrangement import Arrangement, groups_of
from manyheads.surgery.input_moments import input_moments
from manyheads.surgery.layer_fit import fit_layers
from manyheads.surgery.longer_batch import LENGTH, RunLengths, longer
from manyheads.surgery.merged_sites import How, find_freedoms, join_key_heads, key_head_groups, reorder
from manyheads.surgery.prune import first_sequences
from manyheads.surgery.rebuild import Rebuilt, observe, rebuild, replace_torch_attention
from manyheads.surgery.recover import recover as learn
from manyheads.surgery.refit import batches_to_fit
from manyheads.surgery.refit import refit as fit

HOW = ("aligned", "mean", "best")
Grouping = Literal["loss", "neighbours"]


def merge(
    model: nn.Module,
    kv_heads: int | Mapping[int | str, int],
    batches: Iterable[Batch],
    *,
    how: How = "aligned",
    grouping: Grouping = "loss",
    fit_steps: int = 0,
    refit: bool = True,
    recover: int = 0,
    calibration: Iterable[Batch] | None = None,
    unverified: Unverified = "refuse",
    state: str | PathLike[str] | None = None,
    progress: Progress = no_progress,
) -> nn.Module:
    """A copy of a model with fewer key and value heads, which its heads share: multi-head attention becomes
    grouped-query attention, or with one key head multi-query attention. No head is removed.

    Key heads that lose least together form a group. Each group gets one key and one value head, the best
    approximation of low rank to all of them over the inputs that were seen; queries and output projections
    are adjusted so that they read it in place of their own. Where positions are rotary, only rotations and
    scalings of the pairs that they rotate are used, and where something else forbids a change, as a norm over
    keys does, none is: every kind of change is tried on the module first. Then the linear layers that write
    into the residual stream are refitted (`refit`), and the model may train for some steps (`recover`).

    The copy is checked: its outputs, before the refit, equal those of the model in which all key heads of a
    group are the merged one (1e-5 in float32), also with a cache and on a longer batch. Where the class
    cannot have fewer key heads than heads (BERT, GPT-2), a smaller projection computes the merged ones and
    repeats them: the weights are fewer, a cache is not smaller, and ``changes_of(copy).notes`` has a
    sentence about it.

    Parameters
    ----------
    model: any torch.nn.Module; it is left as it is.
    kv_heads: how many key heads every site has afterwards, or ``{layer number or site: how many}``. It must
        divide the present number.
    batches: dicts, tuples or tensors, as the model takes them; plain text, without labels.
    how: ``"aligned"``; ``"mean"`` averages the key heads of a group as they are, and ``"best"`` takes the one
        that is closest to the others: both are there for comparison.
    grouping: ``"loss"``, or ``"neighbours"`` for groups of consecutive key heads.
    fit_steps: how many steps of gradient descent bring the attention of each layer, alone, closer to what it
        gave before; 0 for none.
    refit: whether to refit.
    recover: the number of steps of distillation; 0 for none.
    calibration: batches to merge and refit on, where those are fewer than the recovery reads; all ``batches``
        by default.
    unverified: ``"allow"`` to merge at unverified sites, too (`Site.verified`); the copy is still checked.
    state: a file from which an interrupted recovery resumes; see `recover`.
    progress: called with the stage, "merge", "fit", "refit" or "recover", and how much of it is done.

    Returns
    -------
    The copy. Heads may be in another order, which its ``original_heads`` gives. It can be trained, saved
    (`save`), cut and merged again.

    Raises
    ------
    ValueError for numbers that do not divide the key heads, sites that do not exist, and heads whose keys
    share weights with something that stays; RuntimeError when the copy differs from the merged formula.

    See Also
    --------
    cut: removes heads.
    plan: which heads to remove for a smaller cache.
    refit, recover: make up for what is lost.

    References
    ----------
    Shazeer, "Fast transformer decoding: one write-head is all you need" (2019).
    Ainslie and others, "GQA: training generalized multi-query transformer models" (2023).
    Jin and others, "Align attention heads before merging them: an effective way for converting MHA to GQA"
    (2024).

    Examples
    --------
    >>> import torch
    >>> from manyheads.nn.transformers import Decoder
    >>> _ = torch.manual_seed(0)
    >>> model = Decoder(12, heads=4, layers=2, vocabulary=17).eval()
    >>> small = merge(model, 2, [torch.randint(17, (13, 11))])
    >>> small.blocks[0].attention.kv_heads, small.blocks[0].attention.key.weight.shape
    (2, torch.Size([6, 12]))
    """
    if how not in HOW:
        raise ValueError(f"how: got {how!r}; expected {', '.join(map(repr, HOW))}")
    if grouping not in ("loss", "neighbours"):
        raise ValueError(f"grouping: got {grouping!r}; expected 'loss' or 'neighbours'")
    for name, number in (("fit_steps", fit_steps), ("recover", recover)):
        if number < 0:
            raise ValueError(f"{name}: got {number}; expected a number of steps, 0 for none")
    model = plain(model)
    unlabelled = None if calibration is None else map(without_labels, calibration)
    every, fitted = batches_to_fit(model, map(without_labels, batches), unlabelled, refit)
    example = probe_batch(model) if hasattr(model, "config") else first_sequences(fitted[0])
    sites, run_lengths = observe(model, example, "merge")
    wanted = _wanted(kv_heads, model, sites)
    for name in wanted:
        sites[name].check("merge", unverified)
    progress("merge", 0, 3)
    copied, head_weights = _prepared(model, example, sites, wanted)
    moments = input_moments(copied, fitted, head_weights)
    progress("merge", 1, 3)
    lengthened = longer(copied, example, run_lengths, LENGTH)
    tried = [example] if lengthened is None else [example, lengthened[0]]
    freedoms = find_freedoms(copied, head_weights, wanted, tried)
    groups = key_head_groups(copied, head_weights, moments, wanted, freedoms, grouping)
    if not reorder(copied, example, head_weights, groups):
        groups = key_head_groups(copied, head_weights, moments, wanted, freedoms, "neighbours")
    join_key_heads(copied, head_weights, moments, groups, freedoms, how)
    progress("merge", 2, 3)
    arrangement = Arrangement("merge", sites, merged=_dropped(sites, wanted))
    small = _rebuilt(copied, example, arrangement, run_lengths, head_weights).model
    progress("merge", 3, 3)
    if fit_steps:
        fit_layers(small, model, fitted, head_weights, steps=fit_steps, progress=progress)
    if refit:
        fit(small, fitted, teacher=model, progress=progress)
    if recover:
        learn(small, every, teacher=model, steps=recover, state=state, progress=progress)
    return small


def _wanted(
    kv_heads: int | Mapping[int | str, int], model: nn.Module, sites: Mapping[str, Site]
) -> dict[str, int]:
    """How many key heads each site that changes is to have."""
    numbers: dict[str, int] = {}
    if isinstance(kv_heads, Mapping):
        if not kv_heads:
            raise ValueError("kv_heads: got none; expected {layer or site: number of key heads}")
        chosen = Selection({key: [0] for key in kv_heads}, module_paths(model).values())
        for name, site in sites.items():
            if chosen.at(site):
                key = name if name in kv_heads else site.layer
                numbers[name] = _number(kv_heads[key], f"kv_heads[{key!r}]")
        chosen.finish(sites.values())
    else:
        numbers = dict.fromkeys(sites, _number(kv_heads, "kv_heads"))
    wanted = {}
    for name, number in numbers.items():
        present = len(set(sites[name].kv_heads))
        if number > present or present % number:
            divisors = ", ".join(str(n) for n in range(1, present) if present % n == 0)
            raise ValueError(
                f"kv_heads: {name!r} has {present} key heads, which {number} does not divide; expected "
                f"one of {divisors or present}"
            )
        if number < present:
            wanted[name] = number
    if not wanted:
        raise ValueError("kv_heads: every site already has as few key heads; expected a smaller number")
    return wanted


def _number(value: object, name: str) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = 0
    if isinstance(value, bool) or number < 1:
        raise ValueError(f"{name}: got {value!r}; expected a number of key heads, at least 1")
    return number


def _dropped(sites: Mapping[str, Site], wanted: Mapping[str, int]) -> dict[str, list[int]]:
    """The key heads that go: all but the first of each group."""
    dropped = {}
    for name, number in wanted.items():
        size = len(groups_of(sites[name])) // number
        dropped[name] = [key_head for key_head in range(size * number) if key_head % size]
    return dropped


def _prepared(
    model: nn.Module, example: Batch, sites: Mapping[str, Site], wanted: Mapping[str, int]
) -> tuple[nn.Module, dict[str, Projections]]:
    """A copy in which torch's own attention is ours, and which weights its heads have."""
    changes = changes_of(model)
    arrangement = Arrangement("merge", sites, merged=_dropped(sites, wanted))
    copied, replaced = replace_torch_attention(copy.deepcopy(model), arrangement, changes)
    if replaced:
        settle(copied, changes)
    return copied, projections(copied, example)


def _rebuilt(
    merged: nn.Module,
    example: Batch,
    arrangement: Arrangement,
    run_lengths: RunLengths,
    head_weights: dict[str, Projections],
) -> Rebuilt:
    """The merged model with fewer key heads, checked: by its own numbers of heads, or by repeated outputs."""
    try:
        small = rebuild(merged, example, arrangement, run_lengths, head_weights)
        small.check()
    except FailedChangeError:
        small = rebuild(merged, example, arrangement, run_lengths, head_weights, repeating=True)
        small.check()
    return small
