"""Images and sounds with labels: classes, and texts that are heard."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.common.decompression import open_image
from manyheads.common.intervals import Interval, interval
from manyheads.common.labelled_batch import LabelledBatch
from manyheads.common.types import Keywords, ModelOutput
from manyheads.data.batches import padded
from manyheads.data.labelled import metrics as measured
from manyheads.data.labelled.columns import Customs
from manyheads.data.labelled.language import WrittenTexts
from manyheads.data.labelled.losses import IGNORED, connectionist
from manyheads.data.labelled.task import Example, Part, Reading, Task, stacked
from manyheads.data.labelled.texts import LABELS, Classes
from manyheads.data.readers.audio import decode_sound, read_sound, resample
from manyheads.data.readers.records import Record, is_missing

FILES = ("file", "path", "file_name", "filename", "file_path")
TRANSCRIPTS = ("text", "transcription", "transcript", "sentence", *LABELS)
FRAME = 320  # samples that count as a token, where the model does not say
TOKENS_OF_AN_IMAGE = 256  # where the config does not give the number of patches


def file_of(row: Record, reading: Reading) -> object:
    """The image or sound of a row: bytes, or a path that starts at the folder of its table."""
    cell = row.values[reading.columns.inputs[0]]
    if isinstance(cell, Mapping):
        cell = cell.get("bytes") or cell.get("path")
    if is_missing(cell) or not isinstance(cell, str | bytes):
        raise ValueError(
            f"data: {row.where} of {reading.table.what} has no file in {reading.columns.inputs[0]!r}; "
            "expected a path"
        )
    if isinstance(cell, bytes):
        return cell
    path = (reading.table.folder or Path()) / Path(cell).expanduser()
    if not path.is_file():
        raise ValueError(
            f"data: {row.where} of {reading.table.what} names {cell}, but there is no file {path}"
        )
    return path


def image_tokens(model: nn.Module) -> int:
    """How many tokens an image is, by the patches of the model's config.

    >>> image_tokens(nn.Identity())
    256
    """
    config = getattr(model, "config", None)
    side, patch = (getattr(config, name, None) for name in ("image_size", "patch_size"))
    if isinstance(side, int) and isinstance(patch, int):
        return (side // patch) ** 2 + 1
    return TOKENS_OF_AN_IMAGE


def sound_tokens(model: nn.Module, samples: int) -> int:
    """How many tokens a sound is: by the model's convolutions, or as many as its encoder always reads.

    >>> sound_tokens(nn.Identity(), 3200)
    10
    """
    count: Any = getattr(model, "_get_feat_extract_output_lengths", None)
    always = getattr(getattr(model, "config", None), "max_source_positions", None)
    if isinstance(always, int) and getattr(model, "main_input_name", "") == "input_features":
        return always
    return max(1, int(count(samples)) if callable(count) else samples // FRAME)


class ImageClasses(Classes):
    """Image classification."""

    kind = "image classification"
    unit = "images"
    customs = Customs((("image",), ("img",), ("image_path",), *((name,) for name in FILES)), LABELS)

    def encode(self, records: Sequence[Record]) -> list[Example]:
        """One example for each image; they are opened when they are needed."""
        rows = self.labelled_rows(records)
        size = image_tokens(self.reading.loaded.model)
        return [
            Example({"file": file_of(row, self.reading)}, number, number, size, self.names[number])
            for row, number in zip(rows, self.classes(rows), strict=True)
        ]

    def collate(self, examples: Sequence[Example]) -> Keywords:
        """What the image processor makes of the images, and (batch,) classes."""
        pixels = []
        for example in examples:
            with open_image(example.inputs["file"], "data") as image:
                pixels.append(image.convert("RGB"))
        inputs: Any = self.reading.loaded.processor()(pixels, return_tensors="pt")
        return {**inputs, "labels": torch.tensor([example.target for example in examples])}


class Sounds(Task):
    """What is common to tasks that read sounds."""

    unit = "sounds"

    def rate(self) -> int:
        """How many samples a second the model hears."""
        return int(getattr(self.reading.loaded.extractor(), "sampling_rate", 16_000))

    def samples(self, example: Example) -> Tensor:
        """A sound, (samples,)."""
        file = example.inputs["file"]
        if isinstance(file, bytes):
            return resample(*decode_sound(file), self.rate())
        return read_sound(file, self.rate())

    def sound(self, row: Record, target: object, truth: object, shown: str) -> Example:
        """An example of a sound, which is decoded again when it is needed."""
        example = Example({"file": file_of(row, self.reading)}, target, truth, 1, shown)
        length = len(self.samples(example))
        example.size = sound_tokens(self.reading.loaded.model, length)
        if not self.has_mask and not self.pads:  # only sounds of equal lengths can share a batch
            example.group = (length,)
        return example

    @property
    def pads(self) -> bool:
        """Whether the extractor makes all sounds equally long by itself, as Whisper's does."""
        parameters = inspect.signature(self.reading.loaded.extractor()).parameters
        return "padding" in parameters and parameters["padding"].default == "max_length"

    @property
    def has_mask(self) -> bool:
        """Whether the model sees which samples are padding."""
        return bool(getattr(self.reading.loaded.extractor(), "return_attention_mask", False))

    def features(self, examples: Sequence[Example]) -> dict[str, object]:
        """What the feature extractor makes of the sounds."""
        sounds = [self.samples(example).numpy() for example in examples]
        extract: Any = self.reading.loaded.extractor()
        options: Keywords = {"sampling_rate": self.rate(), "return_tensors": "pt"}
        uneven = len({len(sound) for sound in sounds}) > 1
        features = extract(sounds, **options, **({"padding": True} if uneven and not self.pads else {}))
        return {name: x for name, x in features.items() if name in self._arguments}


class SoundClasses(Sounds, Classes):
    """Audio classification."""

    kind = "audio classification"
    customs = Customs((("audio",), ("speech",), ("sound",), *((name,) for name in FILES)), LABELS)

    def encode(self, records: Sequence[Record]) -> list[Example]:
        """One example for each sound."""
        rows = self.labelled_rows(records)
        return [
            self.sound(row, number, number, self.names[number])
            for row, number in zip(rows, self.classes(rows), strict=True)
        ]

    def collate(self, examples: Sequence[Example]) -> Keywords:
        """Features and (batch,) classes."""
        return {**self.features(examples), "labels": torch.tensor([example.target for example in examples])}


class HeardLetters(Sounds):
    """Speech recognition by connectionist temporal classification (CTC)."""

    kind = "speech recognition (CTC)"
    measure = "word error rate"
    customs = Customs(SoundClasses.customs.inputs, TRANSCRIPTS)

    def encode(self, records: Sequence[Record]) -> list[Example]:
        """One example for each sound with a transcript."""
        tokenizer = self.tokenizer()
        examples, letters, unknown = [], 0, 0
        rows = self.labelled_rows(records)
        for row in rows:
            text = str(self.reading.cell(row).value).strip()
            ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
            letters, unknown = letters + len(ids), unknown + ids.count(tokenizer.unk_token_id)
            examples.append(self.sound(row, ids, text, text))
        if unknown:
            self.notes.append(
                f"{unknown / letters:.1%} of the letters of the transcripts are unknown to the tokenizer: "
                "compare their case and their signs with its vocabulary"
            )
        return examples

    @property
    def blank(self) -> int:
        """The id that stands for no letter."""
        return int(getattr(self.config, "pad_token_id", None) or 0)

    def collate(self, examples: Sequence[Example]) -> Keywords:
        """Features and (batch, longest) letters."""
        labels = padded([example.target for example in examples], IGNORED)[0]
        return {**self.features(examples), "labels": labels}

    def frames(self, logits: Tensor, batch: Any) -> Tensor:
        """How many frames of each sound are real, (batch,)."""
        count: Any = getattr(self.reading.loaded.model, "_get_feat_extract_output_lengths", None)
        mask = batch.get("attention_mask")
        if mask is None or count is None:
            return torch.full((len(logits),), logits.shape[1], device=logits.device)
        frames: Tensor = count(mask.sum(1)).long()
        return frames.clamp(max=logits.shape[1])

    def loss(self, result: ModelOutput, batch: Keywords) -> Tensor:
        """The CTC loss by letter."""
        logits = result["logits"]
        return connectionist(logits, self.frames(logits, batch), batch["labels"], self.blank)

    def heard(self, result: ModelOutput, batch: LabelledBatch) -> list[str]:
        """What the model hears: the likeliest letter of each frame, repeats joined, blanks left out."""
        logits = result["logits"]
        texts = []
        for best, frames in zip(logits.argmax(-1), self.frames(logits, batch).tolist(), strict=True):
            letters = torch.unique_consecutive(best[:frames])
            ids = letters[letters != self.blank].tolist()
            decode: Any = self.tokenizer().decode
            texts.append(str(decode(ids, skip_special_tokens=True, group_tokens=False)).strip())
        return texts

    def scores(self, result: object, batch: LabelledBatch) -> Tensor:
        """The word error rate of each sound, weighted by its words."""
        pairs = [(example.truth.split(), text.split()) for example, text in self._heard(result, batch)]
        words = torch.tensor([len(truth) for truth, _ in pairs])
        wrong = torch.tensor([measured.edits(truth, text) for truth, text in pairs])
        return stacked(wrong / words.clamp(min=1), words)

    def _heard(self, result: ModelOutput, batch: LabelledBatch) -> list[tuple[Example, str]]:
        return list(zip(batch.examples, self.heard(result, batch), strict=True))

    def parts(self, model: nn.Module, result: object, batch: LabelledBatch) -> list[Part]:
        """(transcript, what was heard, loss)."""
        losses = self.loss(result, batch).tolist()
        pairs = zip(self._heard(result, batch), losses, strict=True)
        return [(example.truth, text, loss) for (example, text), loss in pairs]

    def metrics(self, parts: Sequence[Part]) -> dict[str, Interval]:
        """Word and character error rates, loss."""
        truths, texts, losses = zip(*parts, strict=True)
        return {
            "word_error_rate": measured.error_rate(truths, texts, words=True),
            "character_error_rate": measured.error_rate(truths, texts, words=False),
            "loss": interval(losses),
        }


class HeardTexts(Sounds, WrittenTexts):
    """Speech recognition by a model of encoder and decoder."""

    kind = "speech recognition"
    customs = HeardLetters.customs

    def _example(self, row: Record) -> Example:
        sound = self.sound(row, None, None, "")
        example = self.with_target(sound.inputs, sound.size, row)
        example.group = (*sound.group, len(example.target))
        return example

    def collate(self, examples: Sequence[Example]) -> Keywords:
        """Features, and what the decoder reads and writes."""
        return {**self.features(examples), **self.decoder(examples)}

    def metrics(self, parts: Sequence[Part]) -> dict[str, Interval]:
        """Word and character error rates, perplexity of the transcripts."""
        written, right = ([part[side] for part in parts] for side in (3, 4))
        return {
            "word_error_rate": measured.error_rate(right, written, words=True),
            "character_error_rate": measured.error_rate(right, written, words=False),
            **super(WrittenTexts, self).metrics(parts),
        }
