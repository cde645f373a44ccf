"""A loaded model, the small text it is measured on, and what was measured so far."""

from __future__ import annotations

import shlex
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from manyheads.capture.site import Site
from manyheads.common.devices import batches_to_device, device_of, to_device
from manyheads.common.errors import UnreadDataError
from manyheads.common.types import Batch, Keywords
from manyheads.data import corpus
from manyheads.data.batches import Corpus, padded
from manyheads.data.text_lines import pieces, read_lines
from manyheads.heads.effects.ablated import forwards
from manyheads.heads.effects.answers import Sentences, ids_of, kind_of
from manyheads.heads.effects.live_model import image_probe, sites_of
from manyheads.heads.effects.neighbours import embeddings
from manyheads.heads.fingerprint import fingerprint
from manyheads.heads.model_outputs import Output
from manyheads.heads.pooled_maps import Seen
from manyheads.heads.table import HeadTable
from manyheads.models.loaded import Loaded
from manyheads.surgery.quality import measure_of
from manyheads.view.document.contract import Answer, Example

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

TEXTS, LENGTH, BATCH_TOKENS = 48, 128, 512  # of the small text: texts, tokens of each, tokens of a batch
IMAGES = 16
NEIGHBOURS, LONGEST_NEIGHBOUR = 12, 120  # sentences among which neighbours are found, and their characters
REMEMBERED = 8  # inputs whose answers are kept
SAMPLES, SAMPLE, LONGEST_SAMPLE = 4, 64, 200  # texts to start with; their characters: about, at most
EMBEDDED = "MiniLM"


class Input(NamedTuple):
    """The input of a request, one of: a text, an image in base64, or the number of an image that the model
    is measured on.
    """

    text: str | None = None
    image: str | None = None
    sample: int | None = None


@dataclass(frozen=True, eq=False)
class InputResult:
    """An input, and what the model with all its heads gives for it.

    tokens: how many tokens the text has; more than are shown where it is too long. 0 for an image.
    example: what the heads attend to, for the page.
    """

    batch: Batch
    tokens: int
    answer: Answer | None
    output: Output
    example: Example
    seen: Seen


@dataclass(frozen=True, eq=False)
class Reference:
    """What the full model gives for the text that quality is measured on, and the measure of quality."""

    measure: str
    outputs: list[Output]


@dataclass(eq=False)
class Live:
    """A model that answers requests.

    Attributes
    ----------
    loaded: the model.
    tokenizer, processor: what turns a text, or an image, into its input; the other one is None.
    read: the small text, or the images, that it is measured on; None where there are no images.
    batches: the same as batches.
    sites: its attention sites, by name.
    fingerprint: of the model.
    kind: the kind of its answers, as `kind_of` gives it.
    neighbours: sentences among which the neighbours of an input are searched.
    samples: texts to start with.
    source: the option and the path of what it is measured on, as the command takes them; empty for the
        built-in text, and for what training held out.
    tables: what was measured: ``watch``, ``diversity``, ``roles``, and rankings by their method.
    results: the latest inputs, and what the model with all its heads gives for them.
    reference: what the model with all its heads gives for the text that quality is measured on.
    """

    loaded: Loaded
    tokenizer: PreTrainedTokenizerBase | None
    processor: Callable[..., object] | None
    read: Corpus | None
    batches: list[Batch]
    sites: dict[str, Site]
    fingerprint: str
    kind: str | None
    neighbours: Sentences | None
    samples: list[str]
    source: tuple[str, ...] = ()
    tables: dict[str, HeadTable] = field(default_factory=dict)
    results: OrderedDict[Input, InputResult] = field(default_factory=OrderedDict)
    reference: Reference | None = None

    @property
    def model(self) -> torch.nn.Module:
        """The module."""
        return self.loaded.model

    @property
    def command(self) -> str:
        """The command that cuts the heads of a plan, in any folder, with the text that the page is about."""
        model = () if self.loaded.name == EMBEDDED else (_absolute(self.loaded.name),)
        return shlex.join(
            ["manyheads", "prune", *model, *self.source, "--plan", "plan.json", "--out", "small"]
        )

    @property
    def images(self) -> int:
        """How many images it is measured on."""
        return 0 if self.processor is None or self.read is None else len(self.read.sizes)

    @property
    def heads(self) -> int:
        """How many heads it has."""
        return sum(site.heads for site in self.sites.values())


def begin(
    loaded: Loaded,
    text: str | None = None,
    images: str | None = None,
    data: str | None = None,
    columns: Mapping[str, str | None] | None = None,
) -> Live:
    """Prepare a model to answer requests.

    Parameters
    ----------
    loaded: with its output layer, as ``open_model(name, head=True)`` gives it.
    text: a text file whose first lines are the small text; without it, a built-in text.
    images: a folder of images, for models that read images.
    data: instead of these, rows with labels for a model with a task head, as for `labelled`: quality is then
        that of the task.
    columns: ``text_column``, ``label_column`` and ``split`` of these rows, as for `corpus.choose`.

    Examples
    --------
    >>> from manyheads.models.open import open_model
    >>> live = begin(open_model(head=True))
    >>> live.kind, live.heads, live.tokenizer is not None
    ('neighbours', 72, True)
    """
    if text == "-":
        raise ValueError(
            "text: got standard input, which can be read only once; expected a file: save the text"
        )
    named: Keywords = {name: value for name, value in (columns or {}).items() if value is not None}
    tokenizer, processor = _reader(loaded, images if data is None or loaded.vocabulary is not None else data)
    if processor is not None and text is not None:
        raise ValueError(f"text: {loaded.name} reads images, not texts; give --images FOLDER instead")
    read = None
    limit = TEXTS if processor is None else IMAGES
    if data is not None or named:
        read = corpus.choose(
            loaded, text, images, None, None, limit, BATCH_TOKENS, data, labels=True, **named
        )
    elif loaded.task is not None and text is None and images is None:
        try:
            read = corpus.examples(loaded, limit=limit, batch_tokens=BATCH_TOKENS)
        except UnreadDataError as error:
            measured = "--text FILE, one text per line" if processor is None else "--images FOLDER"
            raise ValueError(f"{error.why}; give what to measure on: {measured}") from error
    elif processor is None:
        length = min(LENGTH, loaded.positions or LENGTH)
        read = corpus.text(loaded, text, max_length=length, limit=TEXTS, batch_tokens=BATCH_TOKENS)
    elif images is not None:
        read = corpus.images(loaded, images, limit=IMAGES, batch_tokens=BATCH_TOKENS)
    device = device_of(loaded.model)
    batches = list(batches_to_device((batch for _, batch in read.batches()), device)) if read else []
    first = batches[0] if batches else image_probe(loaded)
    sites = sites_of(loaded.model, first)
    kind = kind_of(loaded.model, first)
    neighbours: Sentences | None = None
    samples: list[str] = []
    if tokenizer is not None:
        of_data = data is not None or (loaded.task is not None and text is None)
        held_out = _decoded(tokenizer, batches) if of_data else None
        samples = _samples(text, mask_of(tokenizer) if kind == "mask" else "", held_out)
        if kind == "neighbours":
            neighbours = _neighbours(loaded, tokenizer, text)
    return Live(
        loaded,
        tokenizer,
        processor,
        read,
        batches,
        sites,
        fingerprint(loaded.model),
        kind,
        neighbours,
        samples,
        _source(text, images, data, named),
    )


def batch_of_text(live: Live, text: str, length: int) -> tuple[Batch, int]:
    """A text as a batch of one sequence of at most ``length`` tokens, and how many tokens the text has."""
    if not text.strip():
        raise ValueError("text: it is empty; type something")
    if live.tokenizer is None:
        raise ValueError("text: this model has no tokenizer; expected images")
    parts = pieces(live.tokenizer, text, min(length, live.loaded.positions or length))
    if not parts:
        raise ValueError("text: the tokenizer gives no token for it; type some words")
    ids = torch.tensor([parts[0]])
    vocabulary = live.loaded.vocabulary
    if vocabulary is not None and int(ids.max()) >= vocabulary:
        raise ValueError(
            f"text: the tokenizer gives the id {int(ids.max())}, expected ids below {vocabulary}, the size "
            "of the model's vocabulary; type other words"
        )
    return _on_device(live, live.loaded.arguments(ids, torch.ones_like(ids))), sum(map(len, parts))


def batch_of_image(live: Live, image: Image) -> Batch:
    """An image of Pillow as a batch of one."""
    assert live.processor is not None
    try:
        batch = live.processor([image], return_tensors="pt")
    except TypeError:
        batch = live.processor([image])
    return _on_device(live, cast(Batch, dict(batch) if isinstance(batch, Mapping) else batch))


def batch_of_sample(live: Live, number: int) -> Batch:
    """One of the images that the model is measured on, as a batch of one."""
    if not 0 <= number < live.images:
        raise ValueError(f"sample: there is no image {number}; expected a number below {live.images}")
    assert live.read is not None
    return _on_device(live, live.read.make([number]))


def required_corpus(live: Live) -> Corpus:
    """What the model is measured on; a ValueError where there are no images to measure on."""
    if live.read is None:
        raise ValueError(
            "images: the model reads images, and there are none to measure on; start again with "
            "--images FOLDER"
        )
    return live.read


def reference_of(live: Live, batches: Sequence[Batch]) -> Reference:
    """What the model with all its heads gives for some batches."""
    results = forwards(live.model, batches)
    measure = measure_of(results[0].result, live.model, live.sites.values(), batches[0])
    return Reference(measure, [result.output for result in results])


def _source(
    text: str | None, images: str | None, data: str | None, columns: Mapping[str, str]
) -> tuple[str, ...]:
    named = [part for name, value in columns.items() for part in (f"--{name.replace('_', '-')}", value)]
    for option, path in (("--text", text), ("--images", images), ("--data", data)):
        if path is not None:
            return option, _absolute(path), *named
    return ()


def _absolute(name: str) -> str:
    """The absolute path of a file or folder; other names, such as that of a model on the hub, as they are."""
    return str(Path(name).resolve()) if Path(name).exists() else name


def _on_device(live: Live, batch: Batch) -> Batch:
    return to_device(batch, device_of(live.model))


def _reader(
    loaded: Loaded, images: str | None
) -> tuple[PreTrainedTokenizerBase | None, Callable[..., object] | None]:
    """The tokenizer or the image processor of a model; the other one is None."""
    why = ""
    if images is None and loaded.vocabulary is not None:  # what a factory gives may be a processor
        try:
            return loaded.tokenizer(), None
        except ValueError as error:
            why = str(error)
    try:
        return None, loaded.processor()
    except ValueError:
        if loaded.task is not None and loaded.arrange is None:
            raise ValueError(
                f"MODEL: {loaded.name} reads neither texts nor images, so nothing can be typed or dropped on "
                "the page; manyheads inspect shows its heads"
            ) from None
        if images is not None or not why:
            raise
        raise ValueError(why) from None


def mask_of(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """The text of the mask token, where the model fills in; "" where there is none."""
    return str(getattr(tokenizer, "mask_token", None) or "")


def _decoded(tokenizer: PreTrainedTokenizerBase, batches: Sequence[Batch]) -> list[str]:
    """The texts of batches."""
    rows = [row for batch in batches if (ids := ids_of(batch)) is not None for row in ids.tolist()]
    texts = (str(tokenizer.decode(row, skip_special_tokens=True)) for row in rows[:TEXTS])
    return [" ".join(text.split()) for text in texts if text.strip()]


def _samples(text: str | None, mask: str, held_out: Sequence[str] | None) -> list[str]:
    """A few texts of moderate length to start with; for a masked language model, with a mask."""
    lines = [line[:LONGEST_SAMPLE] for line in (held_out or read_lines(text, TEXTS))]
    chosen = sorted(dict.fromkeys(lines), key=lambda line: abs(len(line) - SAMPLE))[:SAMPLES]
    if not mask:
        return chosen
    words = [line.split() for line in chosen]
    return [" ".join([*some[: len(some) // 2], mask, *some[len(some) // 2 + 1 :]]) for some in words]


def _neighbours(loaded: Loaded, tokenizer: PreTrainedTokenizerBase, text: str | None) -> Sentences:
    """Short sentences of the small text; in one batch where the model takes a padding mask."""
    lines = [line[:LONGEST_NEIGHBOUR] for line in read_lines(text, TEXTS)]
    lines = sorted(dict.fromkeys(lines), key=len)[:NEIGHBOURS]
    length = min(LENGTH, loaded.positions or LENGTH)
    rows = [pieces(tokenizer, line, length)[0] for line in lines]
    together = loaded.arrange is not None or loaded.takes_mask
    padding = getattr(tokenizer, "pad_token_id", None)
    batches = []
    for part in [rows] if together else [[row] for row in rows]:
        batches.append(loaded.arguments(*padded(part, padding if isinstance(padding, int) else 0)))
    batches = list(batches_to_device(batches, device_of(loaded.model)))
    return Sentences(lines, batches, embeddings(loaded.model, batches))
