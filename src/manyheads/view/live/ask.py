"""ask: the questions of the live page, each a function of the model and plain data that gives plain data."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import math
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from manyheads.heads.importance.outputs import Output, difference, read
from manyheads.heads.silence import silence
from manyheads.surgery.plan import Plan
from manyheads.surgery.shrink import check_groups
from manyheads.view.answers import answer, ids_of, translated
from manyheads.view.document.example import example
from manyheads.view.live.model import REMEMBERED, Asked, Live, batch_of, batch_of_picture, output_of

TOKENS = 512  # of a text that is looked at
CHARACTERS = 100_000
PICTURE_BYTES, PIXELS = 8 * 2**20, 32_000_000
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
QUALITY_TOKENS = 512  # of the small text, on which quality is measured while one clicks

Heads = dict[str, list[int]]


def attend(live: Live, text: str | None, image: str | None) -> dict[str, Any]:
    """What the heads attend to in a text or a picture, and what the model says about it."""
    asked = about(live, text, image)
    return {"example": asked.example, "answer": asked.answer, "cut": asked.cut}


def without(live: Live, text: str | None, image: str | None, heads: Heads) -> dict[str, Any]:
    """What the model says with some heads silenced beside what it says with all, and how far apart that is.

    Also what the heads attend to then: those of later layers see another input.
    """
    check(live, heads)
    asked = about(live, text, image)
    known = None if live.known is None else replace(live.known, embeddings=None)  # they change, too
    with silence(live.model, heads) if heads else nullcontext():
        after = answer(live.model, live.tokenizer, asked.batch, kind=live.kind, known=known)
        found, seen = example(
            live.model, asked.batch, tokenizer=live.tokenizer, processor=live.processor, pipeline=False
        )
    change = float(difference(asked.output, read(seen.result, live.model))[0])
    found["answer"] = after
    return {
        "before": asked.answer,
        "after": after,
        "change": change if math.isfinite(change) else None,
        "measure": "kl" if asked.output.real is not None else "cosine",
        "cut": asked.cut,
        "example": found,
    }


def quality(live: Live, heads: Heads) -> dict[str, Any]:
    """How good the model still is on a small text, without some heads: its ``metric``, that of the whole
    model (``before``), its ``value`` now, and the share of heads ``kept``.

    Language models that write have a perplexity. What embeds has the mean cosine with the whole model's
    embedding, what chooses among words or classes the share of choices that are the same (``agreement``).
    """
    check(live, heads)
    batches = measured_on(live)
    if not live.references:
        live.references = [output_of(live, batch) for batch in batches]
    with silence(live.model, heads) if heads else nullcontext():
        others = [output_of(live, batch) for batch in batches]
    pairs = list(zip(live.references, others, batches, strict=True))
    kept = 1 - sum(map(len, heads.values())) / live.heads
    if live.kind == "next":
        metric = "perplexity"
        before, value = (
            math.exp(min(700.0, _mean([_next_losses(pair[i], pair[2]) for pair in pairs]))) for i in (0, 1)
        )
    elif live.references[0].real is None:
        metric, before = "cosine", 1.0
        value = 1 - _mean([difference(full, other) for full, other, _ in pairs])
    else:
        metric, before = "agreement", 1.0
        value = _mean([_agreements(full, other) for full, other, _ in pairs])
    return {
        "metric": metric,
        "before": before,
        "value": value if math.isfinite(value) else None,
        "kept": kept,
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


def _batch(live: Live, text: str | None, image: str | None) -> tuple[Any, dict[str, int] | None]:
    """What the model takes; where a text was too long, how many tokens there were and are looked at."""
    if (text is None) == (image is None):
        raise ValueError("expected a text or an image, one of them")
    if text is not None:
        if live.tokenizer is None:
            raise ValueError(f"text: {live.loaded.name} reads pictures; drop one on the page")
        batch, total = batch_of(live, text, TOKENS)
        seen = ids_of(batch)
        shown = total if seen is None else seen.shape[1]
        return batch, {"tokens": total, "shown": shown} if total > shown else None
    assert image is not None
    if live.processor is None:
        raise ValueError(f"image: {live.loaded.name} reads texts; type one")
    return batch_of_picture(live, picture(image)), None


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


def about(live: Live, text: str | None, image: str | None) -> Asked:
    """What the whole model makes of an input; kept for the inputs asked about last."""
    written = f"{text is None} {image if text is None else text}".encode()
    key = hashlib.sha256(written).hexdigest()
    if (found := live.asked.pop(key, None)) is None:
        batch, cut = _batch(live, text, image)
        if live.kind == "translation" and "decoder_input_ids" in batch:
            batch = translated(live.model, batch)
        said = answer(live.model, live.tokenizer, batch, kind=live.kind, known=live.known)
        shown, seen = example(live.model, batch, tokenizer=live.tokenizer, processor=live.processor)
        shown["answer"] = said
        found = Asked(batch, cut, said, read(seen.result, live.model), shown, seen)
    live.asked[key] = found
    while len(live.asked) > REMEMBERED:
        live.asked.popitem(last=False)
    return found


def _mean(parts: list[Tensor]) -> float:
    return float(torch.cat(parts).mean())


def _next_losses(output: Output, batch: Any) -> Tensor:
    """The cross-entropy of each next token in nats, (tokens,)."""
    ids = ids_of(batch)
    assert ids is not None
    assert output.real is not None
    losses = F.cross_entropy(output.value[:, :-1].transpose(1, 2).float(), ids[:, 1:], reduction="none")
    return losses[output.real[:, 1:]].double()


def _agreements(full: Output, other: Output) -> Tensor:
    """Whether each choice is the same, (tokens,)."""
    return (full.value.argmax(-1) == other.value.argmax(-1))[full.real].double()
