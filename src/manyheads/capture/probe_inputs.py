"""The probe: a small batch made of what a model was just called with, other contents for it, and a copy of
the model to try it on, which shares the weights and nothing else.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.common.nested_tensors import tensors_in
from manyheads.common.quantised import replace_quantised
from manyheads.common.types import Arguments
from manyheads.nn.orthogonal_rows import replace_constrained

SAMPLES = 3  # sequences of a probe
LENGTH = 13  # tokens of each, where a model can be given fewer than it was called with
LONGER = (67, 131, 257, 521, 1031, 2053)  # where so few do not show what a model does with many
_COPYING = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__new__")
_LONG = 32  # sequences up to this long are taken whole


@dataclass(frozen=True)
class Inputs:
    """What a module is called with."""

    args: Arguments
    kwargs: Mapping[str, object]

    def tensors(self) -> list[Tensor]:
        """The tensors among them."""
        return list(tensors_in((self.args, dict(self.kwargs))))

    @property
    def sequences(self) -> int:
        """How many sequences there are."""
        return max((x.shape[0] for x in self.tensors() if x.dim() > 1), default=1)

    @property
    def length(self) -> int:
        """The most tokens that tensors (batch, tokens) or (batch, tokens, width) among them have."""
        return max((x.shape[1] for x in self.tensors() if x.dim() in (2, 3) and not x.is_nested), default=0)

    @property
    def stateful(self) -> bool:
        """Whether something among them changes while a model runs, as caches do, so that a forward that has
        begun cannot be repeated.
        """
        return _is_stateful((self.args, dict(self.kwargs)))

    def changed(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """The same with each tensor changed; everything else is copied, so that nothing is written to
        twice."""
        changed: dict[int, Tensor] = {}  # a tensor that is given twice stays one: code may ask `key is query`

        def once(x: Tensor) -> Tensor:
            if id(x) not in changed:
                changed[id(x)] = change(x)
            return changed[id(x)]

        args, kwargs = _changed((self.args, dict(self.kwargs)), once)
        return Inputs(args, kwargs)


def _is_stateful(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_is_stateful, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_is_stateful, value))
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, Tensor | nn.Module | type)
        and not callable(value)
    )


def candidate_batches(called: Inputs, lengths: tuple[int, ...] = (LENGTH,)) -> Iterator[Inputs]:
    """Batches to try on a model, the smallest first: with LONGER lengths, both ends of sequences of which
    some are padded; then a few short sequences, a few whole ones, what it was given."""
    tensors = [x for x in called.tensors() if x.dim() > 1]
    if tensors:
        batch, length = _batch(tensors), _length(tensors)
        if lengths == LONGER and (rows := _padded_rows(tensors, batch, length)):
            yield called.changed(partial(_ends, batch=batch, length=length, rows=rows))
        for short in lengths:
            if length > max(short, _LONG):
                yield called.changed(
                    lambda x, short=short: _sample_sequences(_shorten(x, length, short), batch)  # type: ignore[misc]
                )
        yield called.changed(lambda x: _sample_sequences(x, batch))
    yield called.changed(lambda x: x.detach().clone())


def replaced(
    inputs: Inputs,
    axis: int,
    at: Callable[[int], int] | None = None,
    ids: bool = True,
    embedded: Sequence[Tensor] = (),
    tokens: int = 0,
) -> Inputs | None:
    """The inputs with other contents at one index along an axis of every tensor that has contents; None when
    there is no such tensor. For images and the like the last axes take the place of the second one. ``at``
    says which index, given the size. Without ``ids`` whole numbers stay: they may be sizes, of packed images,
    say.

    What looks like a mask, a vector for each sequence, or a number for each, is replaced only where nothing
    else is: if it is among the ids that are ``embedded``, and if there are up to as many numbers as
    ``tokens``.
    """
    choose_index = at or position
    usual = _replaced(inputs, axis, choose_index, lambda x: _has_contents(x, axis, ids))
    if usual is not None or not ids:
        return usual

    def is_read(x: Tensor) -> bool:
        if x.is_floating_point():
            return x.dim() == 2 and axis == 1 and x.shape[1] <= tokens and not _is_mask(x)
        flat = x.flatten()
        return any(torch.equal(flat, other.flatten()) for other in embedded)

    return _replaced(inputs, axis, choose_index, is_read)


def _has_contents(x: Tensor, axis: int, ids: bool) -> bool:
    return not (
        x.dim() < 2
        or _is_mask(x)
        or x.dtype == torch.bool
        or (x.is_floating_point() and x.dim() == 2 and axis)
        or not (ids or x.is_floating_point())
    )


def _replaced(
    inputs: Inputs, axis: int, choose_index: Callable[[int], int], chosen: Callable[[Tensor], bool]
) -> Inputs | None:
    shown = False

    def change(x: Tensor) -> Tensor:
        nonlocal shown
        if not chosen(x):
            return x.detach().clone()
        if x.dim() == 1:  # one sequence of ids, without an axis of sequences
            changed_copy = x.detach().clone()
            if axis:
                index = choose_index(len(x))
                changed_copy[index] = _other_ids(x[index : index + 1], x)[0]
            shown = shown or not torch.equal(changed_copy, x)
            return changed_copy
        where: list[int | slice] = [slice(None)] * x.dim()
        if axis == 0 or x.dim() < 4:
            where[axis] = choose_index(x.shape[axis])
            if x.shape[axis] < 2:
                return x.detach().clone()
        else:
            where[-1], where[-2] = choose_index(x.shape[-1]), choose_index(x.shape[-2])
        changed_copy = x.detach().clone()
        part = changed_copy[tuple(where)]
        if x.is_floating_point():
            noise = torch.randn(part.shape, generator=torch.Generator().manual_seed(7)).to(part)
            changed_copy[tuple(where)] = part + (x.detach().float().std(correction=0).to(x) + 0.5) * (
                1 + noise.abs()
            )
        elif x.dim() == 3:  # boxes and the like, whose numbers belong together
            changed_copy[tuple(where)] = _other_slice(x, axis, choose_index(x.shape[axis]))
        else:
            changed_copy[tuple(where)] = _other_ids(part, x)
        shown = shown or not torch.equal(changed_copy, x)
        return changed_copy

    changed = inputs.changed(change)
    return changed if shown else None


def telling_position(inputs: Inputs, size: int) -> int:
    """The index of the token to replace: `position`, or one close to it at which more sequences of ids have
    one that can be replaced (`_other_ids`).
    """
    usual, scores = position(size), torch.zeros(size)
    for x in inputs.tensors():
        if x.dim() == 2 and x.shape[1] == size and not (x.is_floating_point() or _is_mask(x)):
            scores += (_other_ids(x, x) != x).sum(0).cpu()
    order = sorted(range(size), key=lambda i: (-float(scores[i]), abs(i - usual)))
    return order[0] if scores[usual] < scores.max() else usual


def position(size: int) -> int:
    """The index that is replaced along an axis: neither the first nor the last, where there are others, nor
    the middle, which stays where it is when the order is reversed; of two the first, which causal attention
    reads.
    """
    return max(min(1, size - 2), (size - 1) * 2 // 5) if size > 2 else 0


def structure_copy(module: nn.Module) -> nn.Module:
    """A copy of a module that shares its parameters: what it does to itself while it runs stays with the
    copy.

    Hooks that users registered stay behind, except torch's own (old weight norms compute weights in them).
    """
    memo: dict[int, object] = {id(parameter): parameter for parameter in module.parameters()}
    memo |= {id(buffer): buffer.detach().clone() for buffer in module.buffers()}
    # heads show in rows of plain weights
    copied = replace_quantised(replace_constrained(_module_copy(module, memo)), module)
    for part in copied.modules():
        for hooks in (part._forward_pre_hooks, part._forward_hooks):
            for key, hook in list(hooks.items()):
                if not _belongs_to_model(hook):
                    del hooks[key]
                    part._forward_hooks_with_kwargs.pop(key, None)
                    part._forward_pre_hooks_with_kwargs.pop(key, None)
                    part._forward_hooks_always_called.pop(key, None)
        part._backward_hooks.clear()
        part._backward_pre_hooks.clear()
    return copied.eval()


def _module_copy(module: nn.Module, memo: dict[int, object]) -> nn.Module:
    """What `copy.deepcopy` gives, sooner: most of what it looks at is the empty mappings of hooks that every
    module has.
    """
    kind = type(module)
    plain = not hasattr(module, "__deepcopy__") and all(  # asked of the module: scripted ones have one each
        getattr(kind, name) is getattr(nn.Module, name) for name in _COPYING
    )
    if id(module) in memo or not plain:
        return copy.deepcopy(module, memo)
    copied = memo[id(module)] = kind.__new__(kind)
    for name, value in module.__getstate__().items():  # without what torch compiled
        if name == "_modules":
            parts = ((key, None if part is None else _module_copy(part, memo)) for key, part in value.items())
            copied.__dict__[name] = type(value)(parts)
        elif type(value) in (dict, OrderedDict) and not value:
            copied.__dict__[name] = type(value)()
        else:
            copied.__dict__[name] = copy.deepcopy(value, memo)
    return copied


def _belongs_to_model(hook: object) -> bool:
    """Whether a hook is a part of what the model computes: torch's weight norms, what a cut model needs."""
    return type(hook).__module__.startswith(("torch.nn.utils", "manyheads.models"))


def _batch(tensors: list[Tensor]) -> int:
    """The size of the first axis that most tensors share."""
    sizes = [x.shape[0] for x in tensors]
    return max(set(sizes), key=lambda size: (sizes.count(size), -sizes.index(size)))


def _length(tensors: list[Tensor]) -> int:
    """The number of tokens, judging by ids (batch, tokens) or vectors (batch, tokens, width); 0 otherwise."""
    for x in tensors:
        if (x.dim() == 2 and not x.is_floating_point()) or x.dim() == 3:
            return int(x.shape[1])
    return 0


def _sample_sequences(x: Tensor, batch: int) -> Tensor:
    """A few of the sequences; the first one again where there are fewer, with other contents."""
    x = x.detach()
    if x.dim() < 1 or x.shape[0] != batch or batch == SAMPLES:
        return x.clone()
    if batch > SAMPLES:
        return x[:SAMPLES].clone()
    count = SAMPLES - batch
    copies = x[:1].expand(count, *x.shape[1:]).clone()
    if x.is_floating_point() and x.dim() > 1 and not _is_mask(x):
        noise = torch.randn(copies.shape, generator=torch.Generator().manual_seed(3)).to(copies)
        copies = copies + noise * (x.float().std(correction=0).to(copies) + 0.1)
    elif x.dtype != torch.bool and x.dim() > 1 and not _is_mask(x):
        if x.dim() > 2:
            copies = torch.stack([row.roll(step + 1, 0) for step, row in enumerate(copies)])
        else:
            copies = torch.stack([_other_ids(row.roll(step + 1), x) for step, row in enumerate(copies)])
    return torch.cat([x, copies])


def _shorten(x: Tensor, length: int, short: int) -> Tensor:
    """The first ``short`` of ``length`` tokens, or the last ones, where the first are padding."""
    for axis in range(1, x.dim()):
        if x.shape[axis] == length:
            is_left_padded = axis == 1 and _is_mask(x) and not bool(x[:, :short].any(1).all())
            x = x.narrow(axis, length - short if is_left_padded else 0, short)
    return x


def _padded_rows(tensors: list[Tensor], batch: int, length: int) -> list[int]:
    """A few sequences, the one with the most and the one with the least padding among them; none where
    nothing is padded, or where the sequences are short anyway.

    The first tokens of sequences show no padding that stands behind them, nor do the longest sequences, and
    many models take another code path where there is any.
    """
    masks = (x for x in tensors if x.shape == (batch, length) and _is_mask(x))
    mask = next((x for x in masks if not bool((x != 0).all()) and bool((x != 0).any(1).all())), None)
    if mask is None or length <= _LONG or batch < SAMPLES:
        return []
    order: list[int] = (mask != 0).sum(1).argsort(stable=True).tolist()
    return [order[-1], order[0], order[batch // 2]]


def _ends(x: Tensor, batch: int, length: int, rows: list[int]) -> Tensor:
    """Some sequences, and of these the first and the last tokens: LENGTH of them."""
    columns = torch.arange(LENGTH, device=x.device)
    columns[LENGTH // 2 :] += length - LENGTH
    for axis in range(1, x.dim()):
        if x.shape[axis] == length:
            x = x.index_select(axis, columns)
    return (x[rows] if x.dim() and x.shape[0] == batch else x).detach().clone()


def _is_mask(x: Tensor) -> bool:
    """Whether a tensor says yes or no, as masks do: by 0 and 1, or by 0 and something far below."""
    if x.dtype == torch.bool:
        return True
    if x.is_floating_point() and x.dim() == 3 and bool((x == x.flatten()[:1]).all()):
        return False  # vectors that are all alike
    return bool(((x == 0) | (x == 1)).all()) or (
        x.is_floating_point() and bool(((x == 0) | (x < -1e3)).all())
    )


def _other_slice(x: Tensor, axis: int, index: int) -> Tensor:
    """What stands at another index along an axis and differs from what stands at ``index``, if anything
    does.
    """
    current = x.select(axis, index)
    others = (x.select(axis, (index + step) % x.shape[axis]) for step in range(1, x.shape[axis]))
    return next((other for other in others if not torch.equal(other, current)), current)


def _other_ids(ids: Tensor, among: Tensor) -> Tensor:
    """Ids that differ from these, out of those that the batch holds. What stands at the ends of sequences, as
    padding and other marks do, is neither replaced nor used.
    """
    ends = torch.cat([among[..., 0].flatten(), among[..., -1].flatten()]).unique()
    values = among.unique()
    inner = values[~torch.isin(values, ends)]
    if len(inner) < 2:
        inner, ends = values, ends[:0]
    if len(inner) < 2:  # all alike: 0 and 1 are ids, too
        return torch.where(ids == 0, 1, 0).to(ids)
    positions = torch.searchsorted(inner, ids.contiguous()).clamp(max=len(inner) - 1)
    others = inner[(positions + 1 + len(inner) // 3) % len(inner)]
    return torch.where(torch.isin(ids, ends), ids, others)


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        items = {key: _changed(item, change) for key, item in value.items()}
        return items if type(value) is dict else _rebuilt(value, items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_changed(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_changed(item, change) for item in value)
    return copy.deepcopy(value)


def _rebuilt(value: Mapping[object, object], items: dict[object, object]) -> object:
    try:
        return type(value)(items)  # type: ignore[call-arg]
    except TypeError:
        return items
