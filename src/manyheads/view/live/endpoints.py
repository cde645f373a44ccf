"""The questions of the live page, each a function of the model and plain data that gives plain data."""

from __future__ import annotations

import base64
import binascii
import io
import math
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from manyheads.heads.effects.answers import answer, ids_of, translated
from manyheads.heads.maps import maps
from manyheads.heads.model_outputs import Output, difference, read
from manyheads.heads.pooled_maps import Seen
from manyheads.heads.silence import silence
from manyheads.surgery.plan import Plan
from manyheads.surgery.quality import compared, scores
from manyheads.surgery.weight_slices import check_groups
from manyheads.view.document.example import example
from manyheads.view.document.packing import packed
from manyheads.view.live.session import (
    REMEMBERED,
    Asked,
    Input,
    Live,
    batch_of,
    batch_of_picture,
    batch_of_sample,
    output_of,
    reference_of,
)

TOKENS = 512  # of a text that is looked at
CHARACTERS = 100_000
PICTURE_BYTES, PIXELS = 8 * 2**20, 32_000_000
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
QUALITY_TOKENS = 512  # of the small text, on which quality is measured while one clicks

Heads = dict[str, list[int]]


def attend(live: Live, given: Input) -> dict[str, Any]:
    """What the heads attend to in a text or a picture, and what the model says about it."""
    asked = about(live, given)
    return {"example": asked.example, "answer": asked.answer, "cut": asked.cut}


def without(live: Live, given: Input, heads: Heads) -> dict[str, Any]:
    """What the model says with some heads silenced beside what it says with all, and how far apart that is.

    Also what the heads attend to then: those of later layers see another input.
    """
    check(live, heads)
    asked = about(live, given)
    known = None if live.known is None else replace(live.known, embeddings=None)  # they change, too
    with _without(live, heads):
        found, seen = _looked(live, asked.batch)
        after = answer(
            live.model, live.tokenizer, asked.batch, kind=live.kind, sentences=known, result=seen.result
        )
    change = float(difference(asked.output, read(seen.result, live.model))[0])
    found["answer"] = after
    return {
        "before": asked.answer,
        "after": after,
        "change": change if math.isfinite(change) else None,
        "measure": _measure(asked.output),
        "cut": asked.cut,
        "example": found,
    }


def exact(live: Live, given: Input, heads: Heads, site: str, head: int) -> dict[str, Any]:
    """The exact attention of one head to an input of any length, with some heads silenced."""
    check(live, heads)
    _check_there(live, {site: [head]})
    asked = about(live, given)
    with _without(live, heads):
        found = maps(live.model, asked.batch, {site: [head]}, size=None)[site]
    return {"exact": packed(found.weights[0, 0], "uint16")}


def rows(live: Live, given: Input, heads: Heads, query: int) -> dict[str, Any]:
    """The exact attention of one query in every head, {site: (heads, keys)}, with some heads silenced.

    Sites that have no such query are left out.
    """
    check(live, heads)
    asked = about(live, given)
    found = {one.site.name: one.site for one in asked.seen.maps if 0 <= query < one.queries}
    if not found:
        raise ValueError(f"query: there is no query {query} in this input")
    every: Heads = {name: list(range(site.heads)) for name, site in found.items()}
    with _without(live, heads):
        looked = maps(live.model, asked.batch, every, queries=[query], size=None)
    return {"rows": {name: packed(one.weights[0, :, 0], "uint16") for name, one in looked.items()}}


def pipeline(live: Live, given: Input, heads: Heads) -> dict[str, Any]:
    """An input step by step through the first attention, with some heads silenced."""
    check(live, heads)
    asked = about(live, given)
    with _without(live, heads):
        return {"pipeline": _looked(live, asked.batch, pipeline=True)[0]["pipeline"]}


def quality(live: Live, heads: Heads) -> dict[str, Any]:
    """How good the model still is on a small text, without some heads: its ``metric``, as `Compared` has it,
    that of the whole model (``before``) with its standard error over ``sequences``, its ``value`` now with
    the standard error of the change, whether the change is ``within_noise``, and the share of heads ``kept``.
    """
    check(live, heads)
    batches = measured_on(live)
    if live.reference is None:
        live.reference = reference_of(live, batches)
    known = live.reference
    with _without(live, heads):
        others = [output_of(live, batch).output for batch in batches]
    pairs = list(zip(known.outputs, others, batches, strict=True))
    found = compared(
        known.measure,
        torch.cat([scores(known.measure, full, full, batch) for full, _, batch in pairs]),
        torch.cat([scores(known.measure, full, other, batch) for full, other, batch in pairs]),
    )
    return {
        "metric": found.measure,
        "before": found.before.value,
        "before_se": _finite(found.before.se),
        "value": _finite(found.after.value),
        "se": _finite(found.change_se),
        "within_noise": bool(heads) and found.change.within_noise,
        "sequences": found.sequences,
        "kept": 1 - sum(map(len, heads.values())) / live.heads,
    }


def plan(live: Live, heads: Heads) -> bytes:
    """The file that ``manyheads prune --plan`` takes, to remove these heads. Raises if they cannot be."""
    check(live, heads)
    heads = {site: sorted(numbers) for site, numbers in heads.items() if numbers}
    if not heads:
        raise ValueError("heads: none is chosen; choose the heads to remove first")
    shared: dict[str, Any] = {}
    for name, site in live.sites.items():
        removed = heads.get(name, [])
        check_groups(site, removed)
        if shared.setdefault(site.path, removed) != removed:
            raise ValueError(
                f"heads: {site.path!r} is called several times, with one set of weights; "
                "choose the same heads in every call"
            )
    sizes = {name: site.heads for name, site in live.sites.items()}
    if sum(map(len, heads.values())) == sum(sizes.values()):
        raise ValueError("heads: these are all heads of the whole model; leave at least one")
    with tempfile.TemporaryDirectory() as folder:
        Plan(heads, sizes, live.fingerprint).save(Path(folder) / "plan.json")
        return (Path(folder) / "plan.json").read_bytes()


def check(live: Live, heads: Mapping[str, list[int]]) -> None:
    """Raise unless these heads can be silenced: the model has them, and what they are was proved."""
    _check_there(live, heads)
    for name, numbers in heads.items():
        site = live.sites[name]
        if numbers and not site.verified:
            raise ValueError(
                f"heads: what the heads of {name!r} are could not be proved ({site.reason}), so that they "
                "are not silenced here; choose others"
            )


def _check_there(live: Live, heads: Mapping[str, list[int]]) -> None:
    """Raise unless the model has all these heads."""
    for site, numbers in heads.items():
        if site not in live.sites:
            raise ValueError(f"heads: the model has no attention at {site[:200]!r}")
        size = live.sites[site].heads
        wrong = [number for number in numbers if not 0 <= number < size]
        if wrong:
            raise ValueError(f"heads: {site!r} has the heads 0 to {size - 1}; there is no head {wrong[0]}")
        if len(set(numbers)) < len(numbers):
            raise ValueError(f"heads: {site!r} names a head twice")


def measured_on(live: Live) -> list[Any]:
    """The part of the small text that quality is measured on."""
    if live.read is None:
        raise ValueError("images: quality needs pictures to be measured on; start again with --images FOLDER")
    chosen, tokens = [], 0
    for batch, planned in zip(live.batches, live.read.plan(), strict=True):
        tokens += sum(live.read.sizes[i] for i in planned)
        chosen.append(batch)
        if tokens >= QUALITY_TOKENS:
            break
    return chosen


def _batch(live: Live, given: Input) -> tuple[Any, dict[str, int] | None]:
    """What the model takes; where a text was too long, how many tokens there were and are looked at."""
    if sum(one is not None for one in given) != 1:
        raise ValueError("expected a text or an image, one of them")
    if given.text is not None:
        if live.tokenizer is None:
            raise ValueError(f"text: {live.loaded.name} reads pictures; drop one on the page")
        batch, total = batch_of(live, given.text, TOKENS)
        seen = ids_of(batch)
        shown = total if seen is None else seen.shape[1]
        return batch, {"tokens": total, "shown": shown} if total > shown else None
    if live.processor is None:
        raise ValueError(f"image: {live.loaded.name} reads texts; type one")
    if given.sample is not None:
        return batch_of_sample(live, given.sample), None
    assert given.image is not None
    return batch_of_picture(live, picture(given.image)), None


def picture(written: str) -> Any:
    """The picture (of Pillow) in base64; raises for what is no picture, or too large a one."""
    from PIL import Image, ImageOps

    try:
        data = base64.b64decode(written, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("image: it is not written in base64") from None
    if len(data) > PICTURE_BYTES:
        raise ValueError(f"image: it has {len(data):,} bytes; expected at most {PICTURE_BYTES:,}")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as found:
            if found.width * found.height > PIXELS:
                raise ValueError(
                    f"image: it has {found.width:,} x {found.height:,} pixels; expected at most {PIXELS:,}"
                )
            return ImageOps.exif_transpose(found).convert("RGB")
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"image: it cannot be read; expected one of {', '.join(FORMATS)}") from error


def about(live: Live, given: Input) -> Asked:
    """What the whole model makes of an input; kept for the inputs asked about last."""
    if (found := live.asked.pop(given, None)) is None:
        batch, cut = _batch(live, given)
        if live.kind == "translation" and "decoder_input_ids" in batch:
            batch = translated(live.model, batch)
        shown, seen = _looked(live, batch)
        said = answer(
            live.model, live.tokenizer, batch, kind=live.kind, sentences=live.known, result=seen.result
        )
        shown["answer"] = said
        found = Asked(batch, cut, said, read(seen.result, live.model), shown, seen)
    live.asked[given] = found
    while len(live.asked) > REMEMBERED:
        live.asked.popitem(last=False)
    return found


def _without(live: Live, heads: Heads) -> AbstractContextManager[None]:
    return silence(live.model, heads) if heads else nullcontext()


def _looked(live: Live, batch: Any, pipeline: bool = False) -> tuple[dict[str, Any], Seen]:
    return example(live.model, batch, tokenizer=live.tokenizer, processor=live.processor, pipeline=pipeline)


def _measure(output: Output) -> str:
    """What `difference` is, as the page names it."""
    return "cosine" if output.real is None else "kl_sequence" if output.whole else "kl"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
