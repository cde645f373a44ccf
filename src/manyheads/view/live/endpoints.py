"""The requests of the live page: each is a function of the model and plain data that gives plain data."""

from __future__ import annotations

import base64
import binascii
import io
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from manyheads.common.json_numbers import plain
from manyheads.common.labelled_batch import LabelledBatch
from manyheads.common.types import Batch
from manyheads.heads.effects.ablated import (
    Observation,
    exact_maps,
    forwards,
    observe_answer,
    observe_input,
)
from manyheads.heads.effects.answers import ids_of
from manyheads.heads.effects.translations import with_decoder_ids
from manyheads.heads.model_outputs import Output, output_distance, read_output
from manyheads.surgery.arrangement import check_groups
from manyheads.surgery.plan import Plan
from manyheads.surgery.quality import compared, scores
from manyheads.view.document.contract import Answer, Example
from manyheads.view.document.example import drawn_example
from manyheads.view.document.examples import LABEL_TEXT
from manyheads.view.document.packing import packed
from manyheads.view.document.token_text import visible
from manyheads.view.live.contract import (
    Ablation,
    Attended,
    ExactMap,
    Pipeline,
    Quality,
    QueryRows,
    Shortened,
    SiteHeads,
)
from manyheads.view.live.session import (
    REMEMBERED,
    Input,
    InputResult,
    Live,
    batch_of_image,
    batch_of_sample,
    batch_of_text,
    reference_of,
    required_corpus,
)

if TYPE_CHECKING:
    from PIL.Image import Image

TOKENS = 512  # of a text that are shown
IMAGE_BYTES, PIXELS = 8 * 2**20, 32_000_000
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
QUALITY_TOKENS = 512  # of the small text, on which quality is measured while one clicks


def attend(live: Live, request: Input) -> Attended:
    """What the heads attend to in a text or an image, and what the model answers."""
    result = input_result(live, request)
    return {"example": result.example, "answer": result.answer, "cut": _shortened(result)}


def ablate(live: Live, request: Input, heads: SiteHeads) -> Ablation:
    """What the model answers with some heads silenced and with all, and how far apart the outputs are.

    The example has the maps of the silenced model: heads of later layers read another input.
    """
    check(live, heads)
    full = input_result(live, request)
    # the embeddings of the neighbours change, too
    neighbours = None if live.neighbours is None else replace(live.neighbours, embeddings=None)
    observation, after = observe_answer(
        live.model, full.batch, heads, tokenizer=live.tokenizer, kind=live.kind, sentences=neighbours
    )
    change = float(output_distance(full.output, read_output(observation.seen.result, live.model))[0])
    example = _drawn(live, full.batch, observation)
    example["answer"] = cast("Answer | None", after)
    return {
        "before": full.answer,
        "after": example["answer"],
        "change": plain(change),
        "measure": _measure(full.output),
        "cut": _shortened(full),
        "example": example,
    }


def exact(live: Live, request: Input, heads: SiteHeads, site: str, head: int) -> ExactMap:
    """The exact attention of one head to an input of any length, with some heads silenced."""
    check(live, heads)
    _check_exist(live, {site: [head]})
    weights = exact_maps(live.model, input_result(live, request).batch, {site: [head]}, heads)
    return {"exact": packed(weights[site][0], "uint16")}


def rows(live: Live, request: Input, heads: SiteHeads, query: int) -> QueryRows:
    """The exact attention of one query in every head, {site: (heads, keys)}, with some heads silenced.

    Sites without this query are left out.
    """
    check(live, heads)
    result = input_result(live, request)
    every = {
        maps.site.name: list(range(maps.site.heads)) for maps in result.seen.maps if 0 <= query < maps.queries
    }
    if not every:
        raise ValueError(f"query: there is no query {query} in this input; expected one of its tokens")
    weights = exact_maps(live.model, result.batch, every, heads, queries=[query])
    return {"rows": {name: packed(of_site[:, 0], "uint16") for name, of_site in weights.items()}}


def pipeline(live: Live, request: Input, heads: SiteHeads, site: str | None = None) -> Pipeline:
    """An input step by step through the first attention, or that of a site, with some heads silenced."""
    check(live, heads)
    if site is not None:
        _check_exist(live, {site: []})
    batch = input_result(live, request).batch
    observation = observe_input(live.model, batch, heads, steps=True, site=site)
    return {"pipeline": _drawn(live, batch, observation)["pipeline"]}


def quality(live: Live, heads: SiteHeads) -> Quality:
    """How good the model is on a small text without some heads: its ``metric``, as in `Compared`, the
    ``value`` now with the standard error of the change, and that of the full model, ``before``.
    """
    check(live, heads)
    batches = quality_batches(live)
    if live.reference is None:
        live.reference = reference_of(live, batches)
    measure = live.reference.measure
    ablated = [result.output for result in forwards(live.model, batches, heads)]
    pairs = list(zip(live.reference.outputs, ablated, batches, strict=True))
    comparison = compared(
        measure,
        torch.cat([scores(measure, full, full, batch) for full, _, batch in pairs]),
        torch.cat([scores(measure, full, other, batch) for full, other, batch in pairs]),
    )
    return {
        "metric": comparison.measure,
        "before": comparison.before.value,
        "before_se": plain(comparison.before.se),
        "value": plain(comparison.after.value),
        "se": plain(comparison.change_se),
        "within_noise": bool(heads) and comparison.change.within_noise,
        "sequences": comparison.sequences,
        "kept": 1 - sum(map(len, heads.values())) / live.heads,
    }


def plan(live: Live, heads: SiteHeads) -> bytes:
    """The file that ``manyheads prune --plan`` takes, to remove these heads. Raises if they cannot be."""
    check(live, heads)
    heads = {site: sorted(numbers) for site, numbers in heads.items() if numbers}
    if not heads:
        raise ValueError("heads: none is chosen; choose the heads to remove first")
    by_module: dict[str, list[int]] = {}
    for name, site in live.sites.items():
        removed = heads.get(name, [])
        check_groups(site, removed)
        if by_module.setdefault(site.path, removed) != removed:
            raise ValueError(
                f"heads: {site.path!r} is called several times, with one set of weights; "
                "choose the same heads in every call"
            )
    sizes = {name: site.heads for name, site in live.sites.items()}
    if sum(map(len, heads.values())) == sum(sizes.values()):
        raise ValueError("heads: these are all heads of the model; leave at least one")
    with tempfile.TemporaryDirectory() as folder:
        Plan(heads, sizes, live.fingerprint).save(Path(folder) / "plan.json")
        return (Path(folder) / "plan.json").read_bytes()


def check(live: Live, heads: Mapping[str, list[int]]) -> None:
    """Raise unless these heads can be silenced: the model has them, and their sites are verified."""
    _check_exist(live, heads)
    for name, numbers in heads.items():
        site = live.sites[name]
        if numbers and not site.verified:
            raise ValueError(
                f"heads: the heads of {name!r} are not verified ({site.reason}), so they are not silenced "
                "here; choose others"
            )


def _check_exist(live: Live, heads: Mapping[str, list[int]]) -> None:
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


def quality_batches(live: Live) -> list[Batch]:
    """The part of the small text that quality is measured on."""
    read = required_corpus(live)
    batches: list[Batch] = []
    tokens = 0
    for batch, planned in zip(live.batches, read.plan(), strict=True):
        tokens += sum(read.sizes[i] for i in planned)
        batches.append(batch)
        if tokens >= QUALITY_TOKENS:
            break
    return batches


def _batch(live: Live, request: Input) -> tuple[Batch, int]:
    """What the model takes, and how many tokens a text has, of which it takes the first."""
    if sum(one is not None for one in request) != 1:
        raise ValueError("expected either a text or an image")
    if request.text is not None:
        if live.tokenizer is None:
            raise ValueError(f"text: {live.loaded.name} reads images; drop one on the page")
        return batch_of_text(live, request.text, TOKENS)
    if live.processor is None:
        raise ValueError(f"image: {live.loaded.name} reads texts; type one")
    if request.sample is not None:
        return batch_of_sample(live, request.sample), 0
    assert request.image is not None
    return batch_of_image(live, decoded_image(request.image)), 0


def decoded_image(data: str) -> Image:
    """The image in base64; raises for what is no image, or too large."""
    from PIL import Image, ImageOps

    try:
        file = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("image: expected base64; encode it") from None
    if len(file) > IMAGE_BYTES:
        raise ValueError(
            f"image: it has {len(file):,} bytes; expected at most {IMAGE_BYTES:,}: give a smaller one"
        )
    try:
        with Image.open(io.BytesIO(file), formats=FORMATS) as image:
            if image.width * image.height > PIXELS:
                raise ValueError(
                    f"image: it has {image.width:,} x {image.height:,} pixels; expected at most {PIXELS:,}"
                )
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"image: it cannot be read; expected one of {', '.join(FORMATS)}") from error


def input_result(live: Live, request: Input) -> InputResult:
    """What the model with all its heads gives for an input; remembered for the latest inputs."""
    if (result := live.results.pop(request, None)) is None:
        batch, tokens = _batch(live, request)
        if live.kind == "translation" and isinstance(batch, Mapping) and "decoder_input_ids" in batch:
            batch = with_decoder_ids(live.model, batch)
        observation, answer = observe_answer(
            live.model, batch, tokenizer=live.tokenizer, kind=live.kind, sentences=live.neighbours
        )
        example = _drawn(live, batch, observation)
        example["answer"] = cast("Answer | None", answer)
        output = read_output(observation.seen.result, live.model)
        result = InputResult(batch, tokens, example["answer"], output, example, observation.seen)
    live.results[request] = result
    while len(live.results) > REMEMBERED:
        live.results.popitem(last=False)
    return result


def _shortened(result: InputResult) -> Shortened | None:
    ids = ids_of(result.batch)
    shown = result.tokens if ids is None else ids.shape[1]
    return {"tokens": result.tokens, "shown": shown} if result.tokens > shown else None


def _drawn(live: Live, batch: Batch, observation: Observation) -> Example:
    example = drawn_example(
        observation, live.model, batch, tokenizer=live.tokenizer, processor=live.processor
    )
    if isinstance(batch, LabelledBatch) and batch.examples[0].shown:
        example["label"] = visible(batch.examples[0].shown, LABEL_TEXT)
    return example


def _measure(output: Output) -> str:
    """The name of what `difference` measures, for the page."""
    if output.amounts:
        return "square"
    return "cosine" if output.real is None else "kl_sequence" if output.whole else "kl"
