"""Picture book: what there is to see in a picture, in several languages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.common.devices import device_of
from manyheads.data.examples import Examples
from manyheads.data.readers import text as texts
from manyheads.data.readers.image import to_pixels
from manyheads.tasks.architecture import Architecture
from manyheads.tasks.image_stems import check
from manyheads.tasks.label_smoothing import IGNORED, cross_entropy
from manyheads.tasks.picturebook import synthetic
from manyheads.tasks.picturebook.captions import Page, drawn, pairs, picture, read_pages
from manyheads.training.options import option
from manyheads.training.task import Data

KINDS = ("cross", "single")
END = "<end>"
HELD_OUT = 10  # one of so many pictures or captions


@dataclass(kw_only=True)
class Picturebook(Architecture):
    """Captions in several languages from pictures, by cross-attention or in a single stream.

    ``data`` is a folder with pictures, or a zip archive of them, and a captions.tsv: a column file, and a
    column for each language, such as en or zh. Without, coloured shapes with captions in English and Chinese.
    With cross, a decoder reads what an encoder made of the patches; with single, patches and words stand in
    one self-attention. The first token says in which language to write.

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
    training: ClassVar[dict[str, Any]] = {
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
    kind: str = option("cross", "How words see the picture: cross (cross-attention) or single (one stream).")
    languages: str | None = option(None, "Columns of captions, by commas; unless given, all like en or zh.")
    held_out: str = option("pictures", "What is measured on: pictures that were never seen, or captions.")
    size: int = option(32, "Height and width that pictures are brought to, in pixels.")
    patch: int = option(8, "Side of the squares that a picture is cut into, in pixels.")
    stem: str = option("convolutions", "How a square becomes a token: convolutions, or patches (linear).")
    vocabulary: int = option(400, "How many different pieces of words there are, for all languages.")
    max_tokens: int = option(48, "Longer captions are left out of training, and cut in predicting.")
    jitter: float = option(0.05, "Pictures are moved and scaled by up to this share in training.")
    label_smoothing: float = option(0.0, "Share of probability that the target leaves to other tokens.")

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        if self.held_out not in ("pictures", "captions"):
            raise ValueError(f"held_out: expected pictures or captions, got {self.held_out!r}")
        check(self.stem, self.patch)
        if self.size < self.patch or self.size % self.patch:
            raise ValueError(f"size: expected a multiple of the patch, {self.patch}, got {self.size}")
        if self.max_tokens < 4:
            raise ValueError(f"max_tokens: expected 4 or more, got {self.max_tokens}")
        for name in ("jitter", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: expected from 0 and below 1, got {getattr(self, name)}")
        self.tokenizer: Any = None

    def open(self, data: str | None, valid: str | None = None) -> Data:
        """Every caption of every picture, to learn from or to be measured on."""
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
            raise ValueError("data: all of it is held out; expected two pictures with captions or more")
        if self.tokenizer is None:
            special = [END, *map(_token, self._languages)]
            said = [page.captions[language] for page, language in train]
            self.tokenizer = texts.pieces(said, self.vocabulary, special)
        learned = [pair for pair in train if len(self._ids(*pair)) <= self.max_tokens + 2]
        if not learned:
            raise ValueError(f"max_tokens: all captions are longer than {self.max_tokens}; give more")
        if long := len(train) - len(learned):
            notes.append(f"{long:,} captions longer than {self.max_tokens} tokens were left out")
        notes.append(f"{len(learned):,} captions, and {len(held_out):,} that are held out")
        return Data(self._examples(learned, changed=True), self._examples(held_out, changed=False), notes)

    def read(self, data: str) -> Examples:
        """All captions, to measure on."""
        return self._examples(pairs(self._pages(data)[0]), changed=False)

    def describe(self) -> dict[str, Any]:
        """A `Describer` or a `Stream`."""
        own = self.max_tokens + 1
        places = max(self._patches, own) if self._cross else self._patches + own
        options = self.of_the_stack(max_length=places)
        options |= {"patch": self.patch, "stem": self.stem}
        options["vocabulary"] = self.tokenizer.get_vocab_size()
        if self._cross:
            options["decoder_layers"] = self.decoder_layers
        return {"class": f"picturebook.{self.kind}", "options": options}

    def collate(self, examples: list[Any]) -> dict[str, Tensor]:
        """Pictures ``(batch, 3, height, width)`` from 0 to 1; ids ``(batch, length)`` with their lengths."""
        pictures, rows = zip(*examples, strict=True)
        return {
            "pictures": torch.stack(pictures),
            "ids": torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True),
            "lengths": torch.tensor([len(row) for row in rows]),
        }

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """Pictures and captions, without the end."""
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
        """Loss and tokens; of every caption its language, what was written, and what stands in the book."""
        loss, count = self._loss(model, batch, 0.0)
        first = batch["ids"][:, 0]
        written = self._texts(self._write(model, batch["pictures"], first))
        wanted = self._texts(batch["ids"][:, 1:])
        languages = [self.tokenizer.id_to_token(number).strip("<>") for number in first.tolist()]
        return loss.item(), int(count), list(zip(languages, written, wanted, strict=True))

    def metrics(self, parts: list[tuple[float, int, list[tuple[str, str, str]]]]) -> dict[str, float]:
        """chrF (sacreBLEU's, of all and by language), the share of captions that are exactly right, loss."""
        rows = [row for part in parts for row in part[2]]
        found = {
            "chrf": _chrf(rows),
            "exact": sum(written == wanted for _, written, wanted in rows) / len(rows),
            "loss": sum(part[0] for part in parts) / sum(part[1] for part in parts),
        }
        for language in sorted({row[0] for row in rows}):
            found[f"chrf_{language}"] = _chrf([row for row in rows if row[0] == language])
        return found

    def predict(self, model: nn.Module, inputs: list[str], *, language: str | None = None) -> list[str]:
        """What there is to see in each of these pictures, in one language or in all."""
        if language is not None and language not in self._languages:
            raise ValueError(f"language: expected one of {', '.join(self._languages)}, got {language!r}")
        wanted = self._languages if language is None else [language]
        device = device_of(model)
        first = torch.tensor([self.tokenizer.token_to_id(_token(name)) for name in wanted], device=device)
        found = []
        for path in inputs:
            seen = _floats(picture(Path(path).expanduser(), self.size)).to(device)
            written = self._texts(self._write(model, seen.expand(len(wanted), -1, -1, -1), first))
            named = (f"{name}: {text}" for name, text in zip(wanted, written, strict=True))
            found.append(written[0] if language is not None else "; ".join(named))
        return found

    def processor(self) -> Any:
        """Pictures (of Pillow) to what the model takes: these and the first language, no words yet."""
        first = self.tokenizer.token_to_id(_token(self._languages[0]))

        def process(pictures: list[Any], **_: Any) -> dict[str, Any]:
            seen = [_floats(to_pixels(each, self.size).expand(3, -1, -1)) for each in pictures]
            ids = torch.full((len(seen), 2), first)
            return self.inputs(self.collate(list(zip(seen, ids, strict=True))))

        return process

    def save(self, folder: Path) -> None:
        """Write the vocabulary as tokenizer.json."""
        names = {"bos_token": _token(self._languages[0]), "eos_token": END}  # what pages let it begin with
        texts.save_tokenizer(self.tokenizer, folder, self.max_tokens, names)

    def restore(self, folder: Path) -> None:
        """Read the vocabulary."""
        self.tokenizer = texts.load_tokenizer(folder)

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
        """Pictures with their captions, and what a person should know about them."""
        if data is None:
            self.languages = self.languages or ",".join(synthetic.LANGUAGES)
            return drawn(self.size, self._languages), []
        pages, languages, empty = read_pages(data, self.size, self._languages)
        self.languages = ",".join(languages)
        return pages, [f"{empty:,} empty captions were left out"] if empty else []

    def _ids(self, page: Page, language: str) -> list[int]:
        """The language, the caption, the end."""
        said = self.tokenizer.encode(page.captions[language], add_special_tokens=False).ids
        first, last = (self.tokenizer.token_to_id(token) for token in (_token(language), END))
        return [first, *said, last]

    def _examples(self, known: Sequence[tuple[Page, str]], changed: bool) -> Examples:
        """Captions with their pictures; these are changed a little to learn from."""
        rows = [self._ids(*pair)[: self.max_tokens + 2] for pair in known]

        def make(index: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
            seen = _floats(known[index][0].picture)
            if changed and self.jitter:
                seen = moved(seen, self.jitter, random)
            return seen, torch.tensor(rows[index])

        return Examples([self._patches + len(row) - 1 for row in rows], make)

    def _loss(self, model: nn.Module, batch: dict[str, Tensor], smoothing: float) -> tuple[Tensor, Tensor]:
        logits = model(**self.inputs(batch))
        ids, lengths = batch["ids"], batch["lengths"] - 1
        real = torch.arange(ids.shape[1] - 1, device=ids.device) < lengths[:, None]
        labels = ids[:, 1:].masked_fill(~real, IGNORED)
        return cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), smoothing), real.sum()

    def _write(self, model: Any, pictures: Tensor, first: Tensor) -> Tensor:
        found: Tensor = model.write(pictures, first, self.tokenizer.token_to_id(END), self.max_tokens)
        return found

    def _texts(self, ids: Tensor) -> list[str]:
        """Ids up to the end as texts."""
        end = self.tokenizer.token_to_id(END)
        rows = [row[: row.index(end)] if end in row else row for row in ids.tolist()]
        found: list[str] = self.tokenizer.decode_batch(rows)
        return found


def moved(picture: Tensor, most: float, random: torch.Generator) -> Tensor:
    """A picture ``(channels, height, width)`` moved and scaled by up to this share, its edges drawn out.

    >>> moved(torch.rand(3, 8, 8), 0.1, torch.Generator().manual_seed(0)).shape
    torch.Size([3, 8, 8])
    """
    scale, down, right = ((2 * torch.rand(3, generator=random) - 1) * most).tolist()
    way = torch.tensor([[1 + scale, 0.0, 2 * right], [0.0, 1 + scale, 2 * down]])
    grid = F.affine_grid(way[None], [1, *picture.shape], align_corners=False)
    return F.grid_sample(picture[None], grid, padding_mode="border", align_corners=False)[0]


def _floats(picture: Tensor) -> Tensor:
    return picture.float() / 255


def _token(language: str) -> str:
    return f"<{language}>"


def _chrf(rows: Sequence[tuple[str, str, str]]) -> float:
    import sacrebleu

    written, wanted = ([row[side] for row in rows] for side in (1, 2))
    return float(sacrebleu.corpus_chrf(written, [wanted]).score)
