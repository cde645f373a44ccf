"""One input of a model as a document has it: its tokens or its picture, and the maps of every head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from manyheads.capture.call import Call
from manyheads.capture.site import Site
from manyheads.heads.pooled_maps import THUMBNAIL, Seen, SiteMaps, see
from manyheads.view.document.packing import packed
from manyheads.view.document.picture import picture
from manyheads.view.document.pipeline import Follower
from manyheads.view.document.token_text import token_texts, visible

TITLE = 120


def example(
    model: nn.Module,
    batch: Any,
    *,
    tokenizer: Any = None,
    processor: Any = None,
    title: str = "",
    exact: Callable[[Site], Sequence[int]] | None = None,
    thumbnail: int = THUMBNAIL,
    pooled: int = 128,
    pipeline: bool = True,
) -> tuple[dict[str, Any], Seen]:
    """Run a model once on a batch of one sequence or picture, and describe what its heads attend to.

    Parameters
    ----------
    model: any torch.nn.Module, run as it is.
    batch: a dict, a tuple or a tensor; the first sequence of it is shown.
    tokenizer: for the words; without it tokens are shown as numbers.
    processor: of pictures: how they were normalised.
    title: a name for it; made of the tokens without it.
    exact: which heads of a site to keep exactly where maps are long, as in `see`.
    thumbnail, pooled: sizes, as in `see`.
    pipeline: whether to follow the input step by step through the first attention.

    Returns
    -------
    The example, and what was seen: what the model returned is in it.

    Examples
    --------
    >>> from manyheads.models.embedded import load
    >>> model, tokenizer = load()
    >>> batch = dict(tokenizer(["Heads attend."], return_tensors="pt"))
    >>> found, seen = example(model, batch, tokenizer=tokenizer)
    >>> found["title"], len(found["maps"]), found["maps"][0]["thumbnails"]["shape"]
    ('heads attend.', 6, [12, 5, 5])
    """
    follower = Follower(model) if pipeline else None
    with follower if follower is not None else _Nothing() as also:
        seen = see(model, batch, exact=exact, pooled=pooled, thumbnail=thumbnail, also=also)
    shown = picture(batch, model, seen, processor)
    axes = name_axes(seen.maps)
    tokens: dict[str, list[dict[str, Any]]] = {}
    known = {keys: maps.ids for (_, keys), maps in zip(axes, seen.maps, strict=True) if maps.ids}
    for (queries, keys), maps in zip(axes, seen.maps, strict=True):
        for axis, size in ((queries, maps.queries), (keys, maps.keys)):
            if axis not in tokens:
                ids = known.get(axis)
                tokens[axis] = token_texts(tokenizer, ids) if ids else _places(size, shown, axis)
    first = next(iter(tokens.values()), [])
    return {
        "kind": "image" if shown else "pair" if "source" in tokens else "text",
        "title": visible(title or ("" if shown else _title(tokenizer, known, first)), TITLE),
        "tokens": tokens,
        "picture": shown,
        "maps": [_maps(maps, *axis) for axis, maps in zip(axes, seen.maps, strict=True)],
        "pipeline": follower.steps(first) if follower is not None else None,
        "answer": None,
        "silenced": None,
    }, seen


class _Nothing:
    def __enter__(self) -> Callable[[Call], None]:
        return lambda call: None

    def __exit__(self, *error: object) -> None:
        pass


def name_axes(maps: Sequence[SiteMaps]) -> list[tuple[str, str]]:
    """What the queries and keys of each site are: ``self``, or ``source`` and ``target`` in a model with
    cross-attention; places of another number than those have an axis of their own.
    """
    cross = [one for one in maps if one.site.cross]
    sizes: dict[str, int] = {}
    if cross:
        sizes = {"target": cross[0].queries, "source": cross[0].keys}
    else:
        whole = [one for one in maps if not one.blocked and one.queries == one.keys]
        sizes = {"self": whole[0].keys} if whole else {}
    targets = [one.site.path.split(".") for one in cross]
    found = []
    for one in maps:
        if one.site.cross:
            queries, keys = "target", "source"
        elif cross:
            near = one.site.kind == "causal" or _beside(one.site.path.split("."), targets)
            order = ("target", "source") if near else ("source", "target")
            fitting = [axis for axis in order if one.keys == sizes[axis] and one.queries == one.keys]
            queries = keys = fitting[0] if fitting else ""
        else:
            queries = keys = "self"
        found.append(
            (_own(queries, one.queries, sizes, one.blocked), _own(keys, one.keys, sizes, one.blocked))
        )
    return found


def _own(axis: str, size: int, sizes: dict[str, int], blocked: bool) -> str:
    if blocked:
        return f"{size} places of a block"
    return axis if sizes.get(axis) == size else f"{size} places"


def _beside(path: list[str], others: Sequence[list[str]]) -> bool:
    """Whether a module stands in one layer with one of the others: their paths part after a number."""
    for other in others:
        shared = [a for a, b in zip(path, other, strict=False) if a == b]
        if shared == path[: len(shared)] and any(part.isdigit() for part in shared):
            return True
    return False


def _places(size: int, shown: dict[str, Any] | None, axis: str) -> list[dict[str, Any]]:
    """Keys that are no tokens, by their number; patches of a picture by row and column."""
    found = [{"text": str(i), "shown": str(i), "mark": None} for i in range(size)]
    if shown is not None and axis == "self":
        first, columns = shown["first"], shown["columns"]
        for i in range(size):
            place = i - first
            name = f"+{i}" if place < 0 else f"{place // columns},{place % columns}"
            found[i] = {"text": name, "shown": name, "mark": "special" if place < 0 else None}
    return found


def _title(tokenizer: Any, known: dict[str, list[int]], tokens: list[dict[str, Any]]) -> str:
    ids = next((ids for ids in known.values() if ids), None)
    if ids and hasattr(tokenizer, "decode"):
        try:
            return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()
        except TypeError:
            return str(tokenizer.decode(ids)).strip()
    return " ".join(token["shown"] for token in tokens[:20])


def _maps(maps: SiteMaps, queries: str, keys: str) -> dict[str, Any]:
    peak = maps.thumbnails.amax((1, 2)) if maps.thumbnails.numel() else torch.zeros(maps.site.heads)
    scaled = maps.thumbnails / peak.clamp(min=1e-30)[:, None, None]
    found: dict[str, Any] = {
        "site": maps.site.name,
        "queries": queries,
        "keys": keys,
        "thumbnails": packed(scaled, "uint8"),
        "peak": [round(value, 6) for value in peak.tolist()],
        "exact": {str(head): packed(weights, "uint16") for head, weights in maps.exact.items()},
    }
    if maps.pooled is not None:
        found["pooled"] = packed(maps.pooled, "uint8")
        found["row_size"], found["column_size"] = maps.row_size, maps.column_size
    return found
