"""A loaded model, the small text it is measured on, and what was found out about it so far."""

from __future__ import annotations

import shlex
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from manyheads.capture.site import Site
from manyheads.common.errors import UnreadDataError
from manyheads.data import corpus
from manyheads.data.batches import Corpus, padded
from manyheads.data.text_lines import pieces, read_lines
from manyheads.heads.effects.answers import Answer, Sentences, ids_of, kind_of
from manyheads.heads.model_outputs import Output
from manyheads.heads.observer import Forward, moved, observed
from manyheads.heads.pooled_maps import Seen
from manyheads.heads.table import HeadTable
from manyheads.heads.watch import fingerprint
from manyheads.models.open import Loaded
from manyheads.models.probe_batch import probe_batch
from manyheads.surgery.quality import measure_of

TEXTS, LENGTH, BATCH_TOKENS = 48, 128, 512  # of the small text: texts, tokens of each, tokens at once
PICTURES = 16
NEIGHBOURS, LONGEST_NEIGHBOUR = 12, 120  # sentences among which neighbours are found, and their characters
REMEMBERED = 8  # inputs whose answers are kept
SAMPLES, SAMPLE, LONGEST_SAMPLE = 4, 64, 200  # texts to begin with, and their characters: about, at most
EMBEDDED = "MiniLM"


class Input(NamedTuple):
    """What is asked about, one of them: a text, a picture in base64, or the number of a picture that the
    model is measured on.
    """

    text: str | None = None
    image: str | None = None
    sample: int | None = None


@dataclass(frozen=True, eq=False)
class Asked:
    """An input, and what the whole model makes of it.

    cut: for a text that was too long, how many tokens there were, and how many of them are looked at.
    example: what its heads attend to, for the page.
    """

    batch: Any
    cut: dict[str, int] | None
    answer: Answer | None
    output: Output
    example: dict[str, Any]
    seen: Seen


@dataclass(frozen=True, eq=False)
class Reference:
    """What the whole model gives for the text that quality is measured on, and what quality is there."""

    measure: str
    outputs: list[Output]


@dataclass(eq=False)
class Live:
    """A model that people ask.

    Attributes
    ----------
    loaded: the model.
    tokenizer, processor: what makes its input of a text, or of a picture; the other one is None.
    read: the small text (or pictures) that it is measured on; None where there are no pictures.
    batches: that text.
    sites: where its heads are.
    fingerprint: of the model.
    kind: what it says, as `kind_of` finds it.
    known: sentences for neighbours.
    samples: texts to begin with.
    source: the option and the path of what it is measured on, as a command takes them; empty where it is
        ours, or what training held out.
    tables: what was measured: ``watch``, ``diversity``, ``roles``, and rankings by their method.
    asked: the inputs asked about last, and what the whole model made of them.
    reference: what the whole model gives for the text that quality is measured on.
    """

    loaded: Loaded
    tokenizer: Any
    processor: Any
    read: Corpus | None
    batches: list[Any]
    sites: dict[str, Site]
    fingerprint: str
    kind: str | None
    known: Sentences | None
    samples: list[str]
    source: tuple[str, ...] = ()
    tables: dict[str, HeadTable] = field(default_factory=dict)
    asked: OrderedDict[Input, Asked] = field(default_factory=OrderedDict)
    reference: Reference | None = None

    @property
    def model(self) -> torch.nn.Module:
        """The module."""
        return self.loaded.model

    @property
    def command(self) -> str:
        """What to type to cut what a plan says, in any folder, with the text that the page is about."""
        named = () if self.loaded.name == EMBEDDED else (_absolute(self.loaded.name),)
        return shlex.join(
            ["manyheads", "prune", *named, *self.source, "--plan", "plan.json", "--out", "small"]
        )

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    @property
    def pictures(self) -> int:
        """How many pictures it is measured on."""
        return 0 if self.processor is None or self.read is None else len(self.read.sizes)

    @property
    def heads(self) -> int:
        """How many heads it has."""
        return sum(site.heads for site in self.sites.values())


def begin(loaded: Loaded, text: str | None = None, images: str | None = None) -> Live:
    """Make a model ready to be asked.

    Parameters
    ----------
    loaded: with what it was trained to say on top, as ``open_model(name, head=True)`` gives it.
    text: a file of which the first texts are the small text; without it, a text of our own.
    images: a folder of pictures, for models that read pictures.

    Examples
    --------
    >>> from manyheads.models.open import open_model
    >>> live = begin(open_model(head=True))
    >>> live.kind, live.heads, live.tokenizer is not None
    ('neighbours', 72, True)
    """
    if text == "-":
        raise ValueError("text: the page reads it several times; expected a file: save the text")
    tokenizer, processor = _reader(loaded, images)
    if processor is not None and text is not None:
        raise ValueError(f"text: {loaded.name} reads pictures; give --images FOLDER instead")
    read = None
    if loaded.task is not None and text is None and images is None:
        limit = TEXTS if processor is None else PICTURES
        try:
            read = corpus.examples(loaded, limit=limit, batch_tokens=BATCH_TOKENS)
        except UnreadDataError as error:
            measured = "--text FILE, one text a line" if processor is None else "--images FOLDER"
            raise ValueError(f"{error.why}; give what to measure on: {measured}") from error
    elif processor is None:
        length = min(LENGTH, loaded.positions or LENGTH)
        read = corpus.text(loaded, text, max_length=length, limit=TEXTS, batch_tokens=BATCH_TOKENS)
    elif images is not None:
        read = corpus.images(loaded, images, limit=PICTURES, batch_tokens=BATCH_TOKENS)
    batches = list(moved((batch for _, batch in read.batches()), _device(loaded))) if read else []
    first = batches[0] if batches else _probe(loaded)
    with observed(loaded.model) as observer:
        observer.forward(first)
        sites = {site.name: site for site in observer.sites}
    kind = kind_of(loaded.model, first)
    held = _written(tokenizer, batches) if loaded.task is not None and text is None else None
    known = _known(loaded, tokenizer, text) if kind == "neighbours" and tokenizer is not None else None
    samples = [] if tokenizer is None else _samples(text, mask_of(tokenizer) if kind == "mask" else "", held)
    return Live(
        loaded,
        tokenizer,
        processor,
        read,
        batches,
        sites,
        fingerprint(loaded.model),
        kind,
        known,
        samples,
        _source(text, images),
    )


def batch_of(live: Live, text: str, length: int) -> tuple[Any, int]:
    """A text as a batch of one sequence that is at most so many tokens long, and how many there were."""
    if not text.strip():
        raise ValueError("text: there is nothing in it; type something")
    parts = pieces(live.tokenizer, text, min(length, live.loaded.positions or length))
    if not parts:
        raise ValueError("text: the model's tokenizer finds nothing in it; type some words")
    ids = torch.tensor([parts[0]])
    known = live.loaded.vocabulary
    if known is not None and int(ids.max()) >= known:
        raise ValueError(f"text: the tokenizer gives the id {int(ids.max())}, which the model does not know")
    return _on(live, live.loaded.arguments(ids, torch.ones_like(ids))), sum(map(len, parts))


def batch_of_picture(live: Live, picture: Any) -> Any:
    """A picture (of Pillow) as a batch of one."""
    try:
        made = live.processor([picture], return_tensors="pt")
    except TypeError:
        made = live.processor([picture])
    return _on(live, dict(made) if isinstance(made, Mapping) else made)


def batch_of_sample(live: Live, number: int) -> Any:
    """One of the pictures that the model is measured on, as a batch of one."""
    if not 0 <= number < live.pictures:
        raise ValueError(f"sample: there is no picture {number}; expected one of {live.pictures}")
    assert live.read is not None
    return _on(live, live.read.make([number]))


def output_of(live: Live, batch: Any) -> Forward:
    """What the model gives for a batch."""
    with observed(live.model) as observer:
        return observer.forward(batch)


def reference_of(live: Live, batches: Sequence[Any]) -> Reference:
    """What the whole model gives for some batches."""
    found = [output_of(live, batch) for batch in batches]
    measure = measure_of(found[0].result, live.model, live.sites.values(), batches[0])
    return Reference(measure, [one.output for one in found])


def _source(text: str | None, images: str | None) -> tuple[str, ...]:
    for option, path in (("--text", text), ("--images", images)):
        if path is not None:
            return option, _absolute(path)
    return ()


def _absolute(name: str) -> str:
    """A path from the root; what is no path, such as the name of a model, as it is."""
    return str(Path(name).resolve()) if Path(name).exists() else name


def _on(live: Live, batch: Any) -> Any:
    return next(iter(moved([batch], live.device)))


def _device(loaded: Loaded) -> torch.device:
    return next((p.device for p in loaded.model.parameters()), torch.device("cpu"))


def _reader(loaded: Loaded, images: str | None) -> tuple[Any, Any]:
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
                f"MODEL: {loaded.name} reads neither texts nor pictures, so nothing can be typed or dropped "
                "on the page; manyheads inspect shows its heads"
            ) from None
        if images is not None or not why:
            raise
        raise ValueError(why) from None


def _probe(loaded: Loaded) -> Any:
    """Something that a model of pictures runs on, where nobody gave any."""
    try:
        return probe_batch(loaded.model)
    except ValueError as error:
        raise ValueError(
            f"images: {loaded.name} reads pictures, and what it takes could not be guessed ({error}); "
            "give --images FOLDER"
        ) from error


def mask_of(tokenizer: Any) -> str:
    """What a person writes where the model is to fill in; "" where there is no such thing."""
    return str(getattr(tokenizer, "mask_token", None) or "")


def _written(tokenizer: Any, batches: Sequence[Any]) -> list[str]:
    """What stands in batches, as texts."""
    found = [row for batch in batches if (ids := ids_of(batch)) is not None for row in ids.tolist()]
    written = (str(tokenizer.decode(row, skip_special_tokens=True)) for row in found[:TEXTS])
    return [" ".join(one.split()) for one in written if one.strip()]


def _samples(text: str | None, mask: str, held: Sequence[str] | None) -> list[str]:
    """A few texts to begin with, some of moderate length; for a model that fills in, with a gap."""
    lines = [line[:LONGEST_SAMPLE] for line in (held or read_lines(text, TEXTS))]
    chosen = sorted(dict.fromkeys(lines), key=lambda line: abs(len(line) - SAMPLE))[:SAMPLES]
    if not mask:
        return chosen
    words = [line.split() for line in chosen]
    return [" ".join([*some[: len(some) // 2], mask, *some[len(some) // 2 + 1 :]]) for some in words]


def _known(loaded: Loaded, tokenizer: Any, text: str | None) -> Sentences:
    """Short sentences of the small text; all at once where the model can be told what is padding."""
    lines = [line[:LONGEST_NEIGHBOUR] for line in read_lines(text, TEXTS)]
    lines = sorted(dict.fromkeys(lines), key=len)[:NEIGHBOURS]
    length = min(LENGTH, loaded.positions or LENGTH)
    rows = [pieces(tokenizer, line, length)[0] for line in lines]
    together = loaded.arrange is not None or loaded.takes_mask
    padding = getattr(tokenizer, "pad_token_id", None)
    batches = []
    for part in [rows] if together else [[row] for row in rows]:
        batches.append(loaded.arguments(*padded(part, padding if isinstance(padding, int) else 0)))
    batches = list(moved(batches, _device(loaded)))
    with observed(loaded.model) as observer:
        embeddings = torch.cat([observer.forward(batch).output.value for batch in batches])
    return Sentences(lines, batches, embeddings)
