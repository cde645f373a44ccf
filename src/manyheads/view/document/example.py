"""One input of a model as a document has it: its tokens or its image, and the maps of every head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from manyheads.capture.site import Site
from manyheads.common.types import Batch
from manyheads.heads.effects.ablated import Observation, observe_input
from manyheads.heads.effects.followed_attention import HEADS, QUERIES, Step
from manyheads.heads.pooled_maps import THUMBNAIL, Seen, SiteMaps
from manyheads.view.document.contract import Example, Maps, Picture, PipelineStep, Token
from manyheads.view.document.image import picture
from manyheads.view.document.packing import packed, short
from manyheads.view.document.token_text import token_texts, visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST_TITLE = 120
# The number of columns of a matrix that are drawn.
COLUMNS = 24


def example(
    model: nn.Module,
    batch: Batch,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    processor: object = None,
    title: str = "",
    exact: Callable[[Site], Sequence[int]] | None = None,
    thumbnail: int = THUMBNAIL,
    pooled: int = 128,
    pipeline: bool = True,
) -> tuple[Example, Seen]:
    """Run a model once on a batch of one sequence or image, and describe what its heads attend to.

    Parameters
    ----------
    model: any torch.nn.Module, run as it is.
    batch: a dict, a tuple or a tensor; its first sequence is shown.
    tokenizer: for the words; without it tokens are shown as numbers.
    processor: the image processor: how images were normalised.
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
    >>> shown, seen = example(model, batch, tokenizer=tokenizer)
    >>> shown["title"], len(shown["maps"]), shown["maps"][0]["thumbnails"]["shape"]
    ('heads attend.', 6, [12, 5, 5])
    """
    observation = observe_input(model, batch, exact=exact, pooled=pooled, thumbnail=thumbnail, steps=pipeline)
    shown = drawn_example(observation, model, batch, tokenizer=tokenizer, processor=processor, title=title)
    return shown, observation.seen


def drawn_example(
    observation: Observation,
    model: nn.Module,
    batch: Batch,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    processor: object = None,
    title: str = "",
) -> Example:
    """What was observed on a batch, as a document has it; keywords as in `example`."""
    seen = observation.seen
    image = picture(batch, model, seen, processor)
    axes = name_axes(seen.maps)
    tokens: dict[str, list[Token]] = {}
    ids_by_axis = {keys: maps.ids for (_, keys), maps in zip(axes, seen.maps, strict=True) if maps.ids}
    for (queries, keys), maps in zip(axes, seen.maps, strict=True):
        for axis, size in ((queries, maps.queries), (keys, maps.keys)):
            if axis not in tokens:
                ids = ids_by_axis.get(axis)
                tokens[axis] = token_texts(tokenizer, ids) if ids else _numbered(size, image, axis)
    first = next(iter(tokens.values()), [])
    return {
        "kind": "image" if image else "pair" if "source" in tokens else "text",
        "title": visible(title or ("" if image else _title(tokenizer, ids_by_axis, first)), LONGEST_TITLE),
        "tokens": tokens,
        "picture": image,
        "maps": [_site_maps(maps, *axis) for axis, maps in zip(axes, seen.maps, strict=True)],
        "pipeline": _pipeline_steps(observation.steps, first),
        "answer": None,
        "silenced": None,
    }


def name_axes(maps: Sequence[SiteMaps]) -> list[tuple[str, str]]:
    """What the queries and keys of each site are: ``self``, or ``source`` and ``target`` in a model with
    cross-attention; an axis of another length has a name of its own.
    """
    cross = [one for one in maps if one.site.cross]
    sizes: dict[str, int] = {}
    if cross:
        sizes = {"target": cross[0].queries, "source": cross[0].keys}
    else:
        square = [one for one in maps if not one.blocked and one.queries == one.keys]
        sizes = {"self": square[0].keys} if square else {}
    targets = [one.site.path.split(".") for one in cross]
    axes = []
    for one in maps:
        if one.site.cross:
            queries, keys = "target", "source"
        elif cross:
            near = one.site.kind == "causal" or _in_one_layer(one.site.path.split("."), targets)
            order = ("target", "source") if near else ("source", "target")
            fitting = [axis for axis in order if one.keys == sizes[axis] and one.queries == one.keys]
            queries = keys = fitting[0] if fitting else ""
        else:
            queries = keys = "self"
        axes.append(
            (
                _axis_name(queries, one.queries, sizes, one.blocked),
                _axis_name(keys, one.keys, sizes, one.blocked),
            )
        )
    return axes


def _axis_name(axis: str, size: int, sizes: Mapping[str, int], blocked: bool) -> str:
    if blocked:
        return f"{size} positions of a block"
    return axis if sizes.get(axis) == size else f"{size} positions"


def _in_one_layer(path: list[str], others: Sequence[list[str]]) -> bool:
    """Whether a module is in one layer with one of the others: their paths part after a number."""
    for other in others:
        shared = [a for a, b in zip(path, other, strict=False) if a == b]
        if shared == path[: len(shared)] and any(part.isdigit() for part in shared):
            return True
    return False


def _numbered(size: int, image: Picture | None, axis: str) -> list[Token]:
    """Positions without tokens, by their number; patches of an image by row and column."""
    tokens: list[Token] = [{"text": str(i), "shown": str(i), "mark": None} for i in range(size)]
    if image is not None and axis == "self":
        first, columns = image["first"], image["columns"]
        for i in range(size):
            patch = i - first
            name = f"+{i}" if patch < 0 else f"{patch // columns},{patch % columns}"
            tokens[i] = {"text": name, "shown": name, "mark": "special" if patch < 0 else None}
    return tokens


def _title(
    tokenizer: PreTrainedTokenizerBase | None, ids_by_axis: Mapping[str, list[int]], tokens: Sequence[Token]
) -> str:
    ids = next((ids for ids in ids_by_axis.values() if ids), None)
    if ids and tokenizer is not None and hasattr(tokenizer, "decode"):
        try:
            return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()
        except TypeError:
            return str(tokenizer.decode(ids)).strip()
    return " ".join(token["shown"] for token in tokens[:20]) if ids else ""  # a sound has no words


def _site_maps(maps: SiteMaps, queries: str, keys: str) -> Maps:
    peak = maps.thumbnails.amax((1, 2)) if maps.thumbnails.numel() else torch.zeros(maps.site.heads)
    scaled = maps.thumbnails / peak.clamp(min=1e-30)[:, None, None]
    drawn: Maps = {
        "site": maps.site.name,
        "queries": queries,
        "keys": keys,
        "thumbnails": packed(scaled, "uint8"),
        "peak": [round(value, 6) for value in peak.tolist()],
        "exact": {str(head): packed(weights, "uint16") for head, weights in maps.exact.items()},
    }
    if maps.pooled is not None:
        drawn["pooled"] = packed(maps.pooled, "uint8")
        drawn["row_size"], drawn["column_size"] = maps.row_size, maps.column_size
    return drawn


def _pipeline_steps(steps: Sequence[Step] | None, tokens: Sequence[Token]) -> list[PipelineStep] | None:
    """The steps, each with its shape and the values that are drawn; None where there are none.

    >>> import torch
    >>> steps = [Step("ids", torch.tensor([5, 7]), [2], "h.0.attn")]
    >>> [step["values"] for step in _pipeline_steps(steps, [{"text": "a", "shown": "a", "mark": None}])]
    [['a'], [5, 7]]
    """
    if steps is None:
        return None
    length = steps[0].shape[0]
    drawn: list[PipelineStep] = [
        {"step": "tokens", "shape": [length], "values": [token["shown"] for token in tokens[:QUERIES]]}
    ]
    for step in steps:
        if step.name == "ids":
            values = step.values[:QUERIES].tolist()
        else:
            values = short(_drawn_part(step.values, square=step.name in ("scores", "weights")).float())
        drawn.append({"step": step.name, "shape": step.shape, "values": values, "site": step.site})
    return drawn


def _drawn_part(values: Tensor, square: bool) -> Tensor:
    values = values[:HEADS] if values.dim() == 3 else values
    return values[..., :QUERIES, : QUERIES if square else COLUMNS]
