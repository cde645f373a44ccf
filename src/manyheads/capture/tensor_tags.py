"""Following tensors through a forward pass: which axis is which in attention written by hand, and whose
sequence it is.

A model that writes its own softmax computes ``scores = q @ k.T``, turns them into weights, and multiplies
the weights by ``v``, with scaling, masks, casts, dropout and reshapes in between. `Flow` tags the tensors
on that way. A tag says what
each axis is (see `axes`).

It also says from which *streams* (embeddings, inputs) a tensor was made, attention passing on the stream of
its queries only: keys that share no stream with their queries come from another sequence, so that is
cross-attention.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from manyheads.capture.axes import LAST_SWAPS, MOVEDIMS, PERMUTES, SWAPS, Roles, roles_after
from manyheads.common.types import Arguments, Function, Keywords

if TYPE_CHECKING:
    from manyheads.capture.frame import Frame

Merged = tuple[int, int]  # the number of heads in an axis batch * heads, and the size of that axis
NOT_MERGED: Merged = (0, 0)


@dataclass(slots=True)
class Product:
    """A product of two activations that may turn out to be attention scores."""

    query: Tensor  # (..., queries, d_key), axes by `query_roles`
    key: Tensor
    query_roles: Roles
    key_roles: Roles
    streams: int  # of the queries
    key_streams: int
    merged: Merged
    joint: bool = (
        False  # the scores of several sets of keys side by side, which have values of their own each
    )
    self_keys_start: int = -1  # of those, the column at which the queries' own keys begin; -1 when unknown
    origin: tuple[str, str, int] = ("", "", 0)  # the module, the kind of function and the number of axes
    axes: tuple[int, ...] = ()  # for each axis of the queries the axis of the product, -1 for none
    key_axes: tuple[int, ...] = ()
    result: Roles = ()  # of the product's axes
    heads: int = 0  # in a merged axis, where that was proved


@dataclass(slots=True)
class Weights:
    """The result of a softmax that may turn out to be attention."""

    scores: Tensor
    roles: Roles  # of the scores
    product: Product | None
    frames: tuple[Frame, ...]  # the modules that were running
    version: int  # of the scores' memory, when the softmax had read them
    name: str | None = None  # of the site, once they have multiplied values
    part: int = 0  # which of the calls for some heads each
    value: Tensor | None = None  # what they multiplied first, (batch, heads, keys, width)


@dataclass(slots=True)
class Tag:
    """What is known of one tensor."""

    streams: int = 0
    merged: Merged = NOT_MERGED
    roles: Roles | None = None
    product: Product | None = None
    weights: Weights | None = None
    before: int = 0  # columns of the weights dropped from the left
    of: Tensor | None = None  # scores that this is the logsumexp or the log-softmax of
    modified: bool = False  # these are no longer the softmax's weights, moved or cast
    kept: tuple[Tensor, Roles] | None = None  # the weights before some were dropped at random


@dataclass(slots=True)
class Flow:
    """The tags of one forward pass in one thread."""

    constants: frozenset[int]  # ids of parameters and buffers: they belong to no stream
    tracing: bool = True  # follow streams too, not only hand-written attention
    tags: dict[int, tuple[weakref.ref[Tensor], Tag]] = field(default_factory=dict)
    roots: int = 0
    # stream -> token ids, which embedding of the forward it was
    ids: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    embeddings: int = 0  # of this forward so far
    token_embeddings: tuple[int, ...] | None = None  # those of tokens, where that was proved

    def get(self, tensor: object) -> Tag | None:
        entry = self.tags.get(id(tensor))
        return None if entry is None or entry[0]() is not tensor else entry[1]

    def put(self, tensor: Tensor, tag: Tag) -> None:
        key, tags = id(tensor), self.tags
        tags[key] = (weakref.ref(tensor, lambda _: tags.pop(key, None)), tag)

    def is_constant(self, tensor: object) -> bool:
        """Whether it is a parameter or buffer; those that come for one call only (offload, FSDP) are new."""
        return id(tensor) in self.constants or isinstance(tensor, torch.nn.Parameter)

    def root(self) -> int:
        self.roots += 1
        return 1 << (self.roots - 1)

    def streams(self, tensor: Tensor) -> int:
        """The streams a tensor belongs to; one seen for the first time starts a new one. 0 if not tracing."""
        tag = self.get(tensor)
        if tag is not None:
            return tag.streams
        if not self.tracing or self.is_constant(tensor) or not tensor.is_floating_point():
            return 0
        tag = Tag(streams=self.root())
        self.put(tensor, tag)
        return tag.streams

    def embedded(self, ids: Tensor, out: Tensor) -> None:
        """Start a stream with the embeddings ``out`` of token ``ids``."""
        if self.tracing:
            stream = self.root()
            self.ids[stream] = (ids, self.embeddings)
            self.put(out, Tag(streams=stream))
        self.embeddings += 1

    def tokens(self, streams: int, batch: int, length: int) -> Tensor | None:
        """The token ids (batch, length) embedded into these streams: those that change when a token does.
        Where that was not proved, None if there are several.
        """
        proved = self.token_embeddings
        candidates = [
            (number, ids) for stream, (ids, number) in self.ids.items()
            if stream & streams and ids.dim() == 2 and ids.shape[1] == length and ids.shape[0] in (1, batch)
            and (proved is None or number in proved)
        ]  # fmt: skip
        if not candidates:
            return None
        if proved is not None:
            return min(candidates, key=lambda pair: proved.index(pair[0]))[1]
        first = candidates[0][1]
        return first if all(torch.equal(ids, first) for _, ids in candidates[1:]) else None

    def follow(
        self, func: Function, args: Arguments, kwargs: Keywords, result: Tensor | Sequence[object]
    ) -> None:
        """Tag the result of any call by the tags of its arguments."""
        streams, merged, carrier, source = 0, NOT_MERGED, None, None
        for tensor in _tensors(args, kwargs):
            tag = self.get(tensor)
            if tag is None:
                streams |= self.streams(tensor)
                continue
            streams |= tag.streams
            merged = tag.merged if tag.merged[0] else merged
            if tag.roles is not None and carrier is None:
                carrier, source = tag, tensor
        for out in (result,) if isinstance(result, Tensor) else result:
            if not isinstance(out, Tensor) or not (out.is_floating_point() or out.is_complex()):
                continue
            roles = None
            if carrier is not None and source is not None and carrier.roles is not None:
                roles = roles_after(func, args, kwargs, carrier.roles, source, out)
            if roles is not None and carrier is not None and source is not None:
                product = (
                    self._joined(args[0] if args else kwargs["tensors"])
                    if func in _JOINS
                    else carrier.product
                )
                before = carrier.before + (_start(args[1]) if func is Tensor.__getitem__ else 0)
                of = self._softmax_begun(func, args, kwargs, source, out)
                tag = Tag(streams, carrier.merged, roles, product, carrier.weights, before, of)
                if carrier.weights is not None:
                    tag.modified, tag.kept = carrier.modified, carrier.kept
                    if func in _DROPOUTS:
                        if out is source:
                            tag.modified |= _drops_in_place(func, args, kwargs)
                        elif tag.kept is None and not torch.equal(out, source):
                            tag.kept = source, tuple(carrier.roles or ())
                    elif not _moves(func, args):
                        tag.modified, tag.kept = True, None
                self.put(out, tag)
            elif self.tracing and not self.is_constant(out):
                self.put(out, Tag(streams or self.root(), self._merged(args, out, merged)))

    def _softmax_begun(
        self,
        func: Function,
        args: Arguments,
        kwargs: Keywords,
        scores: Tensor,
        out: Tensor,
    ) -> Tensor | None:
        """The scores whose softmax is written as ``exp(scores - logsumexp(scores))``, when the result
        is a step of it.
        """
        if func in _LOGSUMEXPS and out.shape[:-1] == scores.shape[:-1]:
            return scores
        if func in _LOG_SOFTMAXES and (args[1:] or (kwargs.get("dim"),))[0] in (-1, scores.dim() - 1):
            return scores
        if func in _DIFFERENCES and len(args) == 2 and args[0] is scores:
            total = self.get(args[1])
            return scores if total is not None and total.of is scores else None
        return None

    def _joined(self, parts: Sequence[Tensor]) -> Product | None:
        """The product that scores side by side are."""
        products: list[Product] = []
        starts: list[int] = []
        column = 0
        for part in parts:
            tag = self.get(part)
            if tag is not None and tag.product is not None:
                products.append(tag.product)
                if (
                    tag.roles is not None
                    and tag.roles[-2:] == ("q", "k")
                    and part.shape[-2] == part.shape[-1]
                ):
                    starts.append(column)
            column += part.shape[-1]
        if len(products) < 2:
            return products[0] if products else None
        streams = functools.reduce(operator.or_, (product.key_streams for product in products))
        return replace(
            products[0],
            key_streams=streams,
            joint=True,
            self_keys_start=starts[0] if len(starts) == 1 else -1,
        )

    def _merged(self, args: Arguments, out: Tensor, merged: Merged) -> Merged:
        """What is known of an axis batch * heads in ``out``: a reshape may just have made it."""
        before = args[0] if args else None
        if out.dim() >= 3 and isinstance(before, Tensor) and before.numel() == out.numel():
            old, new = before.shape, out.shape
            if len(old) == len(new) + 1 and old[-2:] == new[-2:] and old[-3] * old[-4] == new[-3]:
                return int(old[-3]), int(new[-3])  # (..., batch, heads, length, width)
            if len(old) == len(new) == 3 and old[0] == new[0] and 0 < new[2] < old[2]:
                return int(old[2] // new[2]), int(new[1])  # (length, batch, d_model) to (length, n, width)
        return merged if merged[1] in out.shape else NOT_MERGED


def version_of(tensor: Tensor) -> int:
    """How often a tensor's memory was written to; -1 where torch does not count."""
    return -1 if tensor.is_inference() else int(tensor._version)


def memory_of(tensor: Tensor) -> int:
    """Where the memory of a tensor is; its own number where it has none (meta tensors, wrappers)."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (RuntimeError, NotImplementedError):
        return id(tensor)


def _moves(func: Function, args: Arguments) -> bool:
    """Whether a function moves, views or casts numbers and does nothing else to them."""
    if func is Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return all(part is None or part is Ellipsis or isinstance(part, slice | int) for part in index)
    return func in _MOVES


def _drops_in_place(func: Function, args: Arguments, kwargs: Keywords) -> bool:
    """Whether a dropout overwrites the weights it drops."""
    named = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
    in_place = func is torch.dropout_ or bool(named.get("inplace"))
    return in_place and bool(named.get("training", True)) and named.get("p", 0.5) > 0


_MOVES = SWAPS | PERMUTES | LAST_SWAPS | MOVEDIMS | {
    torch.reshape, Tensor.reshape, Tensor.view, Tensor.view_as, Tensor.reshape_as, torch.flatten,
    Tensor.flatten, torch.unflatten, Tensor.unflatten, torch.squeeze, Tensor.squeeze, torch.unsqueeze,
    Tensor.unsqueeze, Tensor.contiguous, torch.clone, Tensor.clone, torch.detach, Tensor.detach,
    Tensor.expand, Tensor.expand_as, Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.half,
    Tensor.bfloat16, Tensor.double, Tensor.cpu, Tensor.cuda, torch.narrow, Tensor.narrow,
    torch.ops.aten.view.default, torch.ops.aten.clone.default,
}  # fmt: skip
_LOGSUMEXPS = {torch.logsumexp, Tensor.logsumexp, torch.special.logsumexp}
_LOG_SOFTMAXES = {F.log_softmax, torch.log_softmax, Tensor.log_softmax, torch.special.log_softmax}
_DIFFERENCES = {torch.sub, Tensor.sub, Tensor.__sub__, torch.subtract, Tensor.subtract}
_JOINS = {torch.cat, torch.concat, torch.concatenate}
_DROPOUTS = {F.dropout, torch.dropout, torch.dropout_, F.alpha_dropout, torch.native_dropout}


def _tensors(args: Arguments, kwargs: Keywords) -> Iterator[Tensor]:
    for value in args:
        if isinstance(value, Tensor):
            yield value
        elif type(value) in (list, tuple):
            yield from (item for item in value if isinstance(item, Tensor))
    for value in kwargs.values():
        if isinstance(value, Tensor):
            yield value


def _start(index: object) -> int:
    """Where the slice of the last axis begins in ``x[..., 1:]``."""
    last = index[-1] if isinstance(index, tuple) and index else None
    return (
        int(last.start) if isinstance(last, slice) and isinstance(last.start, int) and last.start > 0 else 0
    )
