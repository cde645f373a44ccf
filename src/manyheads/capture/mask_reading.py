"""What a call's mask says: who may attend to whom in the fewest words, which keys are padding, whether a
query looks ahead, where the queries stand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from manyheads.capture.call import Call
from manyheads.nn.mask import Mask
from manyheads.nn.tiles import HIDDEN

# Entries of a mask compared at once.
PIECE = 2**22


class Visible(NamedTuple):
    """What the mask of a call says.

    real: (batch or 1, keys) False for a key that no query may attend to (padding); None when all are real.
    offset: the position among the keys at which query 0 stands.
    ahead: whether a query may attend to a key after its own; None when one query alone cannot tell.
    keys: how many keys there are up to the last query: a cache that is longer than it is filled has more.
    mask: the mask over those keys, without tensors where causality, a window and lengths say the same.
    aligned: whether that is where the queries stand. Pooled queries, pooled keys, blocks that read their
        neighbours, and keys in another order than the queries have no such place.
    """

    real: Tensor | None
    offset: int
    ahead: bool | None
    keys: int
    mask: Mask
    aligned: bool = True


def without_dead_rows(call: Call) -> Call:
    """Queries whose weights were set to zero after the softmax attend to nothing, whatever their scores."""
    if call.scores is None or call.weights is None:
        return call
    dead = ~call.weights.any(-1, keepdim=True)
    return replace(call, scores=call.scores.masked_fill(dead, -torch.inf)) if bool(dead.any()) else call


def find_unmasked(scores: Tensor) -> Tensor:
    """Which scores, or biases, (..., queries, keys), are not those of a mask.

    A mask's are far below the largest of their query. A query whose largest is far below that of the others
    has nothing but a mask's, whatever a softmax makes of them.

    >>> find_unmasked(torch.tensor([[-7000.0, -7001.0, -1e9], [-1e9, -1e9, -1e9]]))
    tensor([[ True,  True, False],
            [False, False, False]])
    """
    if not scores.numel():
        return scores > -torch.inf
    largest = scores.amax(-1, keepdim=True)
    top = largest.amax(-2, keepdim=True)
    alive = (largest > top - HIDDEN) | (largest.isfinite() & (largest == top))
    return ((scores > largest - HIDDEN) | (scores.isfinite() & (scores == largest))) & alive


def visible(call: Call) -> Visible:
    """Look at who may attend to whom in a call.

    A cache that was made longer than it is filled has hidden keys at its end: queries stand before them.
    Learned keys (`Call.memory`) stand nowhere, and are left out.
    """
    visibility, site = _read_call(call), call.site
    if site.content_masks and (call.logits is None or bool(find_unmasked(call.logits).all())):
        visibility = visibility._replace(real=None)
    keys = call.keys - sum(call.memory)
    if site.key_margins is not None and site.key_margins[1] is None and call.queries < keys:
        return visibility._replace(offset=site.key_margins[0], ahead=True, keys=keys, aligned=False)
    if site.scattered and call.queries < keys:
        return visibility._replace(ahead=None, keys=keys, aligned=False)
    if site.displaced and not site.cross:
        mask = visibility.mask if visibility.keys == keys else call.mask
        return visibility._replace(
            offset=keys - call.queries, ahead=True, keys=keys, mask=mask, aligned=False
        )
    if call.queries == keys or not (call.blocked or visibility.ahead):
        return visibility
    keys, mask = (visibility.keys, visibility.mask) if visibility.keys == keys else (keys, call.mask)
    return Visible(visibility.real, keys - call.queries, True, keys, mask, aligned=False)


def _read_call(call: Call) -> Visible:
    queries, keys, mask = call.queries, call.keys - sum(call.memory), call.mask
    if call.scores is not None:
        left = call.sinks[0] + call.memory[0]
        allowed = find_unmasked(call.scores)
        masked = None if call.logits is None else find_unmasked(call.logits)
        if masked is not None and not bool(masked.all()):
            # what got no weight later on, as by a choice of the largest, is no mask; a query without any is
            # dead
            allowed = masked & allowed.any(-1, keepdim=True)
        return _read_allowed(allowed[..., left : left + keys], queries, keys, Mask())
    if mask.tensors:
        return _read_mask(mask, call.value.shape[0], queries, keys, call.value.device)
    real = None
    if mask.lengths is not None:
        real = torch.arange(keys, device=mask.lengths.device) < mask.lengths[:, None]
    return Visible(real, keys - queries, None if queries == 1 else _looks_ahead(mask), keys, mask)


def update_site(call: Call, visibility: Visible) -> Tensor | None:
    """Let the site of a call know what the call tells of its kind; which queries are no padding.

    (batch or 1, queries) on the device of the call, or None when every query counts.
    """
    site = call.site
    if site.cross is None and call.queries > 1:
        is_proved = (
            site.memory or site.scattered or (site.key_margins is not None and site.key_margins[1] is None)
        )
        site.cross = (
            call.queries != call.keys and bool(visibility.ahead) and not call.blocked and not is_proved
        )
    site.ahead |= bool(visibility.ahead)
    site.causal |= visibility.ahead is False
    site.cached |= call.queries < call.keys and not site.cross and visibility.aligned
    first = visibility.offset if visibility.aligned or site.reordered else call.self_keys_start
    if visibility.real is None or site.cross or first < 0:
        return None
    return visibility.real[:, first : first + call.queries].to(call.output.device)


def _read_mask(mask: Mask, batch: int, queries: int, keys: int, device: torch.device) -> Visible:
    if queries > 1 and all(tensor.dim() < 2 or tensor.shape[-2] == 1 for tensor in mask.tensors):
        of_keys, rest = (
            Mask(lengths=mask.lengths, tensors=mask.tensors),
            replace(mask, lengths=None, tensors=()),
        )
        allowed, adds = _allowed(of_keys, 1, keys, device)
        is_token = allowed.any(2).any(1).expand(-1, keys)
        words = of_keys if adds else in_words(allowed, batch, 1, keys)
        real = None if bool(is_token.all()) else is_token
        return Visible(real, keys - queries, _looks_ahead(rest), keys, words & rest)
    allowed, adds = _allowed(mask, queries, keys, device)
    visibility = _read_allowed(allowed, queries, keys, mask)
    if not adds:
        return visibility._replace(
            mask=in_words(allowed[..., : visibility.keys], batch, queries, visibility.keys)
        )
    tensors = tuple(x[..., : visibility.keys] if x.shape[-1] > 1 else x for x in mask.tensors)
    return visibility._replace(mask=replace(mask, tensors=tensors))


def _allowed(mask: Mask, queries: int, keys: int, device: torch.device) -> tuple[Tensor, bool]:
    """Who may attend to whom, (batch or 1, heads or 1, queries or 1, keys), and whether the mask also adds to
    the scores of those who may.
    """
    allowed, bias = mask.rectangle(range(queries), range(keys), keys - queries, device)
    adds = False
    if bias is not None:
        whole = bias if allowed is None else bias.masked_fill(~allowed, -torch.inf)
        whole = whole.expand(*whole.shape[:-1], keys) if whole.shape[-1] != keys else whole
        allowed = find_unmasked(whole)
        largest = whole.amax(-1, keepdim=True) if keys else whole
        # a query that is hidden from all keys by a number gets its weights all the same: no words say that
        adds = bool(
            (allowed & (whole != 0)).any() | (largest.isfinite() & ~allowed.any(-1, keepdim=True)).any()
        )
    assert allowed is not None  # a mask with tensors says something
    allowed = allowed[(None,) * (4 - allowed.dim())]
    return allowed.expand(-1, -1, -1, keys), adds


def _looks_ahead(mask: Mask) -> bool:
    return not mask.causal and (mask.window is None or mask.window > 1) and mask.chunk != 1


def _read_allowed(allowed: Tensor, queries: int, keys: int, mask: Mask) -> Visible:
    """From ``allowed``, a boolean that broadcasts to (batch, heads, queries, keys)."""
    real = _without_padding(allowed.expand(-1, -1, queries, keys)) if keys else allowed.any(2).any(1)
    offset = keys - queries
    if offset > 0:
        last = allowed[:, :, -1].any(0).any(0).expand(keys).nonzero()
        if last.numel():
            offset = max(0, int(last[-1]) + 1 - queries)
    ahead = None if queries == 1 else bool(allowed.expand(-1, -1, queries, keys).triu(offset + 1).any())
    if ahead:
        offset = keys - queries
    reached = min(keys, offset + queries) if queries <= keys else keys
    return Visible(None if bool(real.all()) else real, offset, ahead, reached, mask)


def _without_padding(allowed: Tensor) -> Tensor:
    """Which keys are no padding (batch or 1, keys), from (batch or 1, heads or 1, queries, keys).

    Padding is what a mask of keys hides from every query. A key that no query reads because of its position,
    as the last one where queries read only what is before them, is a token like others.
    """
    real = allowed.any(2).any(1)
    if bool(real.all()):
        return real
    queries, keys = allowed.shape[2:]
    pairs = allowed.any(0).any(0)  # (queries, keys)
    i, j = torch.arange(queries, device=real.device)[:, None], torch.arange(keys, device=real.device)
    steps = (i - j)[pairs]
    if not steps.numel():
        return real
    lowest, highest = steps.min(), steps.max()
    reached = ((i - j >= lowest) & (i - j <= highest)).any(0)  # (keys,) within reach of some query
    padding = ~real & reached
    beside = torch.zeros_like(padding)
    beside[:, 1:] |= padding[:, :-1]
    beside[:, :-1] |= padding[:, 1:]
    return real | (~reached & ~beside)


def in_words(allowed: Tensor, batch: int, queries: int, keys: int) -> Mask:
    """The mask that allows just what ``allowed`` (batch or 1, heads or 1, queries or 1, keys or 1) does.

    Models pass on causality, windows and padding as one dense tensor, which no kernel can take advantage of.
    What is found is compared with every entry, and holds as tensors what has no other words.

    >>> allowed = torch.ones(3, 3, dtype=torch.bool).tril() & torch.tensor([True, True, False])
    >>> mask = in_words(allowed[None, None], batch=1, queries=3, keys=3)
    >>> mask.causal, mask.lengths
    (True, tensor([2]))
    """
    if allowed.shape[1] > 1:
        return Mask(tensors=(allowed,))
    allowed = allowed.expand(-1, -1, queries, keys)
    unmasked = allowed.any(2)[:, 0]  # (batch or 1, keys)
    for geometry in _geometries(allowed):
        if _says(geometry, unmasked, allowed):
            lengths = unmasked.sum(-1)
            if bool(unmasked.all()):
                return geometry
            if torch.equal(torch.arange(keys, device=unmasked.device) < lengths[:, None], unmasked):
                return replace(geometry, lengths=lengths.expand(batch))
            return replace(geometry, tensors=(unmasked[:, None, None],))
    return Mask(tensors=(allowed,))


def _geometries(allowed: Tensor) -> Iterator[Mask]:
    """Geometries that ``allowed`` (batch, 1, queries, keys) may have, judging by its first and last query."""
    queries, keys = allowed.shape[2:]
    alive = allowed.any(3).any(0)[0].nonzero()
    if queries == 1 or not alive.numel():
        yield Mask()
        return
    rows = int(alive[0]), int(alive[-1])
    first, last = (allowed[:, 0, row].any(0).nonzero() for row in rows)
    ahead, back = int(first[-1]) - rows[0] - (keys - queries), rows[1] + (keys - queries) - int(last[0])
    if ahead > 0:
        yield Mask()
        yield Mask(window=ahead + 1)
    else:
        yield Mask(causal=True)
        yield Mask(causal=True, window=max(0, back) + 1)


def _says(geometry: Mask, unmasked: Tensor, allowed: Tensor) -> bool:
    """Whether ``allowed`` is what the geometry allows of the keys that are shown at all."""
    batch, _, queries, keys = allowed.shape
    rows = max(1, PIECE // max(1, batch * keys))
    for start in range(0, queries, rows):
        block = range(start, min(queries, start + rows))
        geometric = geometry.rectangle(block, range(keys), keys - queries, allowed.device)[0]
        expected = unmasked[:, None] if geometric is None else unmasked[:, None] & geometric
        part = allowed[:, 0, block.start : block.stop]
        if not torch.equal(expected.expand(part.shape), part):
            return False
    return True
