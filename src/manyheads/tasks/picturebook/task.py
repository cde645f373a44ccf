"""Picture book: image captions in several languages."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.common.devices import device_of
from manyheads.data.examples import Example, Examples
from manyheads.data.labelled.metrics import sacrebleu_package
from manyheads.data.readers import text as texts
from manyheads.data.readers.image import to_pixels
from manyheads.models.config import ModelDescription
from manyheads.tasks.architecture import Architecture, LearnedTokenizer
from manyheads.tasks.image_stems import check_stem
from manyheads.tasks.next_token_loss import next_token_loss
from manyheads.tasks.picturebook import synthetic
from manyheads.tasks.picturebook.captions import Page, colour_image, drawn, pairs, read_pages
from manyheads.training.options import option
from manyheads.training.task import Data

if TYPE_CHECKING:
    from PIL.Image import Image

KINDS = ("cross", "single")
END = "<end>"
HELD_OUT = 10  # one image or caption in ten


@dataclass(kw_only=True)
class Picturebook(LearnedTokenizer, Architecture):
    """Image captions in several languages, by cross-attention or in a single stream.

    ``data`` is a folder with images, or a zip archive of them, and a captions.tsv: a column file, and a
    column for each language, such as en or zh. Default: coloured shapes, in English and Chinese. With cross,
    a decoder attends to the patches that an encoder has read; with single, patches and words share one
    self-attention. The first token names the language of the caption.

    Examples
    --------
    >>> task = Picturebook(kind="single", d_model=12, heads=3, layers=2)
    >>> data = task.open(None)
    >>> batch = task.collate(data.train.take([0, 1]))
    >>> batch["pictures"].shape                                       # (batch, 3, height, width)
    torch.Size([2, 3, 32, 32])
    """

    name: ClassVar[str] = "picturebook"
    metric: ClassVar[str] = "chrf"
    higher_is_better: ClassVar[bool] = True
    unit: ClassVar[str] = "captions"
    training: ClassVar[Mapping[str, float | str]] = {
        "steps": 1500,
        "batch_tokens": 1024,
        "learning_rate": 1e-3,
        "evaluate_every": 250,
        "evaluate_examples": 60,
    }

    d_model: int = option(96, "Width of a token.")
    layers: int = option(3, "Number of layers, of the encoder where there is one.")
    decoder_layers: int = option(1, "Number of layers of the decoder (cross).")
    positions: str = option("learned", "sinusoidal, learned, rotary, alibi or none.")
    kind: str = option("cross", "How words see the image: cross (cross-attention) or single (one stream).")
    languages: str | None = option(None, "Columns of captions, with commas; by default all like en or zh.")
    held_out: str = option("pictures", "What is held out: pictures (with all their captions), or captions.")
    size: int = option(32, "Height and width that images are scaled to, in pixels.")
    patch: int = option(8, "Side of a patch, in pixels.")
    stem: str = option("convolutions", "How a patch becomes a token: convolutions, or patches (linear).")
    vocabulary: int = option(400, "Number of tokens (byte-pair encoding), for all languages.")
    max_tokens: int = option(48, "Longer captions are left out of training, and truncated in prediction.")
    jitter: float = option(0.05, "Augmentation: images are shifted and scaled by up to this share.")
    label_smoothing: float = option(0.0, "Share of probability that the target leaves to other tokens.")

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        if self.held_out not in ("pictures", "captions"):
            raise ValueError(f"held_out: expected pictures or captions, got {self.held_out!r}")
        check_stem(self.stem, self.patch)
        if self.size < self.patch or self.size % self.patch:
            raise ValueError(f"size: expected a multiple of the patch, {self.patch}, got {self.size}")
        if self.max_tokens < 4:
            raise ValueError(f"max_tokens: expected 4 or more, got {self.max_tokens}")
        for name in ("jitter", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 0 or more and below 1, got {getattr(self, name)}")

    def open(self, data: str | None, valid: str | None = None) -> Data:
        """Every caption of every image, to train on or to validate on."""
        pages, notes = self._pages(data)
        if valid is not None:
            train, held_out = pairs(pages), pairs(self._pages(valid)[0])
        else:
            by_picture = self.held_out == "pictures"
            units: list[Any] = pages if by_picture else pairs(pages)
            random.Random(0).shuffle(units)
            few = max(len(units) // HELD_OUT, 1)
            train, held_out = (pairs(part) if by_picture else part for part in (units[few:], units[:few]))
        if not train:
            raise ValueError("data: all of it is held out; expected two images with captions or more")
        if self._tokenizer is None:
            special = [END, *map(_token, self._languages)]
            captions = [page.captions[language] for page, language in train]
            self._tokenizer = texts.train_bpe(captions, self.vocabulary, special)
        learned = [pair for pair in train if len(self._ids(*pair)) <= self.max_tokens + 2]
        if not learned:
            raise ValueError(f"max_tokens: all captions are longer than {self.max_tokens}; give more")
        if long := len(train) - len(learned):
            notes.append(f"{long:,} captions longer than {self.max_tokens} tokens were left out")
        notes.append(f"{len(learned):,} captions, and {len(held_out):,} that are held out")
        return Data(self._examples(learned, augmented=True), self._examples(held_out, augmented=False), notes)

    def read(self, data: str) -> Examples:
        """All captions."""
        return self._examples(pairs(self._pages(data)[0]), augmented=False)

    def describe(self) -> ModelDescription:
        """A `Describer` or a `Stream`."""
        words = self.max_tokens + 1
        longest = max(self._patches, words) if self._cross else self._patches + words
        options = self.of_the_stack(max_length=longest)
        options |= {"patch": self.patch, "stem": self.stem}
        options["vocabulary"] = self.tokenizer.get_vocab_size()
        if self._cross:
            options["decoder_layers"] = self.decoder_layers
        return {"class": f"picturebook.{self.kind}", "options": options}

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """Images ``(batch, 3, height, width)`` from 0 to 1; ids ``(batch, length)`` with their lengths."""
        pictures, rows = zip(*examples, strict=True)
        return {
            "pictures": torch.stack(pictures),
            "ids": torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True),
            "lengths": torch.tensor([len(row) for row in rows]),
        }

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Images, and captions without their last token."""
        pictures, ids, lengths = batch["pictures"], batch["ids"][:, :-1], batch["lengths"] - 1
        if self._cross:
            return {"source": pictures, "target": ids, "target_lengths": lengths}
        return {"pictures": pictures, "ids": ids, "lengths": lengths}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Cross-entropy of the captions in nats, summed over their tokens; smoothed in training."""
        return self._loss(model, batch, self.label_smoothing)

    def measure(
        self, model: nn.Module, batch: dict[str, Tensor]
    ) -> tuple[float, int, list[tuple[str, str, str]]]:
        """Loss and tokens; of every caption its language, what was generated, and the reference."""
        loss, count = self._loss(model, batch, 0.0)
        first = batch["ids"][:, 0]
        written = self.decode_up_to(END, self._write(model, batch["pictures"], first))
        references = self.decode_up_to(END, batch["ids"][:, 1:])
        languages = [str(self.tokenizer.id_to_token(number)).strip("<>") for number in first.tolist()]
        return loss.item(), int(count), list(zip(languages, written, references, strict=True))

    def metrics(self, parts: list[tuple[float, int, list[tuple[str, str, str]]]]) -> dict[str, float]:
        """chrF (sacreBLEU's, of all and by language), the share of captions that are exactly right, loss."""
        rows = [row for part in parts for row in part[2]]
        metrics = {
            "chrf": _chrf(rows),
            "exact": sum(written == reference for _, written, reference in rows) / len(rows),
            "loss": sum(part[0] for part in parts) / sum(part[1] for part in parts),
        }
        for language in sorted({row[0] for row in rows}):
            metrics[f"chrf_{language}"] = _chrf([row for row in rows if row[0] == language])
        return metrics

    def predict(
        self, model: nn.Module, inputs: list[str], *, caption_language: str | None = None
    ) -> list[str]:
        """The caption of each of these image files, in one language or in all."""
        if caption_language is not None and caption_language not in self._languages:
            raise ValueError(
                f"caption_language: expected one of {', '.join(self._languages)}, got {caption_language!r}"
            )
        languages = self._languages if caption_language is None else [caption_language]
        device = device_of(model)
        first = torch.tensor([self.id_of(_token(name)) for name in languages], device=device)
        captions = []
        for path in inputs:
            image = _floats(colour_image(Path(path).expanduser(), self.size)).to(device)
            ids = self._write(model, image.expand(len(languages), -1, -1, -1), first)
            written = self.decode_up_to(END, ids)
            named = (f"{name}: {text}" for name, text in zip(languages, written, strict=True))
            captions.append(written[0] if caption_language is not None else "; ".join(named))
        return captions

    def processor(self) -> Callable[..., dict[str, Tensor]]:
        """A function from Pillow's images to the arguments of the model, before the first word."""
        first = self.id_of(_token(self._languages[0]))

        def process(images: Sequence[Image], **_: object) -> dict[str, Tensor]:
            pixels = [_floats(to_pixels(image, self.size).expand(3, -1, -1)) for image in images]
            ids = torch.full((len(pixels), 2), first)
            return self.inputs(self.collate(list(zip(pixels, ids, strict=True))))

        return process

    def save(self, folder: Path) -> None:
        """Write the vocabulary as tokenizer.json."""
        names = {"bos_token": _token(self._languages[0]), "eos_token": END}  # pages begin with it
        texts.save_tokenizer(self.tokenizer, folder, self.max_tokens, names)

    @property
    def _cross(self) -> bool:
        return self.kind == "cross"

    @property
    def _patches(self) -> int:
        return (self.size // self.patch) ** 2

    @property
    def _languages(self) -> list[str]:
        return [name.strip() for name in self.languages.split(",")] if self.languages else []

    def _pages(self, data: str | None) -> tuple[list[Page], list[str]]:
        """Images with their captions, and notes about them."""
        if data is None:
            self.languages = self.languages or ",".join(synthetic.LANGUAGES)
            return drawn(self.size, self._languages), []
        pages, languages, empty = read_pages(data, self.size, self._languages)
        self.languages = ",".join(languages)
        return pages, [f"{empty:,} empty captions were left out"] if empty else []

    def _ids(self, page: Page, language: str) -> list[int]:
        """The language, the caption, the end."""
        ids = self.tokenizer.encode(page.captions[language], add_special_tokens=False).ids
        return [self.id_of(_token(language)), *ids, self.id_of(END)]

    def _examples(self, captions: Sequence[tuple[Page, str]], augmented: bool) -> Examples:
        """Captions with their images; these are shifted and scaled a little to learn from."""
        rows = [self._ids(*pair)[: self.max_tokens + 2] for pair in captions]

        def make(index: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
            image = _floats(captions[index][0].picture)
            if augmented and self.jitter:
                image = jittered(image, self.jitter, random)
            return image, torch.tensor(rows[index])

        return Examples([self._patches + len(row) - 1 for row in rows], make)

    def _loss(self, model: nn.Module, batch: dict[str, Tensor], smoothing: float) -> tuple[Tensor, Tensor]:
        return next_token_loss(model(**self.inputs(batch)), batch["ids"], batch["lengths"], smoothing)

    def _write(self, model: nn.Module, pictures: Tensor, first: Tensor) -> Tensor:
        ids: Tensor = model.write(pictures, first, self.id_of(END), self.max_tokens)  # type: ignore[operator]
        return ids


def jittered(image: Tensor, most: float, random: torch.Generator) -> Tensor:
    """An image ``(channels, height, width)`` shifted and scaled by up to this share, its border repeated.

    >>> jittered(torch.rand(3, 8, 8), 0.1, torch.Generator().manual_seed(0)).shape
    torch.Size([3, 8, 8])
    """
    scale, down, right = ((2 * torch.rand(3, generator=random) - 1) * most).tolist()
    transform = torch.tensor([[1 + scale, 0.0, 2 * right], [0.0, 1 + scale, 2 * down]])
    grid = F.affine_grid(transform[None], [1, *image.shape], align_corners=False)
    return F.grid_sample(image[None], grid, padding_mode="border", align_corners=False)[0]


def _floats(pixels: Tensor) -> Tensor:
    return pixels.float() / 255


def _token(language: str) -> str:
    return f"<{language}>"


def _chrf(rows: Sequence[tuple[str, str, str]]) -> float:
    sacrebleu = sacrebleu_package()

    written, references = ([row[side] for row in rows] for side in (1, 2))
    return float(sacrebleu.corpus_chrf(written, [references]).score)
