"""Speech recognition: one of several words, or a string of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.common.devices import device_of
from manyheads.common.preserved_state import evaluating
from manyheads.data.examples import Example, Examples
from manyheads.data.labelled.metrics import edits
from manyheads.data.readers import text
from manyheads.data.readers.audio import HOP, log_mel, read_sound
from manyheads.data.readers.recordings import Recording, hold_out, read_recordings
from manyheads.models.config import ModelDescription
from manyheads.nn.generate import generate
from manyheads.tasks.architecture import Architecture
from manyheads.tasks.next_token_loss import next_token_loss
from manyheads.tasks.speech.synthetic import ESPEAK, spoken, tones
from manyheads.tasks.speech.word_strings import change_speed, decode_greedily, join_recordings, mask_frames
from manyheads.training.options import option
from manyheads.training.run_folder import read_config
from manyheads.training.task import Data

if TYPE_CHECKING:
    from tokenizers import Tokenizer

KINDS = ("class", "ctc", "decoder")
BLANK, START, END = "<blank>", "<start>", "<end>"
SPECIAL: dict[str, list[str]] = {"class": [], "ctc": [BLANK], "decoder": [START, END]}
_NAMED = {
    "class": "labels",
    "ctc": "words",
    "decoder": "words",
}  # options of the models
GAP = 0.1  # seconds of silence between two words of a string, at most
FASTEST = 10  # words a second


@dataclass(kw_only=True)
class Speech(Architecture):
    """Speech recognition: one of several words (class), or strings of them (by ctc, or by a decoder).

    ``data`` is a folder or a zip archive of sound files (WAV, FLAC, OGG) of any sample rate, with a
    labels.tsv (columns file, label, perhaps speaker and take) or with names like
    ``{label}_{speaker}_{take}``; or espeak-ng, which then says ten digits in ten voices. Default: the keys of
    six telephones. Strings are joined from recordings of one speaker; those to validate on, from held-out
    ones.

    Examples
    --------
    >>> task = Speech(kind="ctc", d_model=12, heads=3, layers=2)
    >>> data = task.open(None)
    >>> batch = task.collate(data.train.take([0, 1]))
    >>> batch["frames"].shape[2], batch["words"].shape[0]            # (batch, length, 3 frames of 40 bands)
    (120, 2)
    """

    name: ClassVar[str] = "speech"
    metric: ClassVar[str] = "word_error"
    higher_is_better: ClassVar[bool] = False
    unit: ClassVar[str] = "recordings"
    training: ClassVar[Mapping[str, float | str]] = {
        "steps": 400,
        "batch_tokens": 1024,
        "learning_rate": 2e-3,
        "evaluate_every": 100,
        "evaluate_examples": 0,
    }

    d_model: int = option(96, "Width of a token.")
    layers: int = option(3, "Number of layers of the encoder.")
    decoder_layers: int = option(2, "Number of layers of the decoder, if there is one.")
    dropout: float = option(0.1, "Dropout on the output of every sublayer.")
    kind: str = option("class", "What is predicted: class (one label), or strings by ctc or decoder.")
    held_out: str = option("takes", "What is held out: takes (a tenth of them), or a speaker's name.")
    names: str = option("{label}_{speaker}_{take}", "Pattern of file names, if there is no labels.tsv.")
    shortest: int = option(3, "Recordings that a string is joined from, at least, in validation.")
    longest: int = option(7, "Recordings that a string is joined from, at most; 1 for none joined.")
    rate: int = option(8000, "Sample rate that recordings are resampled to.")
    mels: int = option(40, "Mel bands of the spectrum.")
    join: int = option(3, "Frames, one every 10 ms, per token.")
    max_seconds: float = option(20.0, "Longer recordings are left out, longer strings truncated.")
    speed: float | None = option(
        None, "Augmentation: played faster or slower by up to this share; by default 0.1, and 0 for tones."
    )
    shift: float = option(0.1, "Augmentation: up to this many seconds of silence before and after.")
    masks: float = option(
        0.15, "SpecAugment: two stretches of up to this share of the bands, and of the time, are masked."
    )
    label_smoothing: float = option(0.1, "Share of probability left to other words (class and decoder).")
    beams: int = option(1, "Beam width of a decoder in evaluation.")

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        for name in ("rate", "mels", "join", "shortest"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        if self.rate < 1000:
            raise ValueError(f"rate: expected 1000 samples a second or more, got {self.rate}")
        if self.longest == 1:
            self.shortest = 1
        if self.longest < self.shortest:
            raise ValueError(f"longest: expected {self.shortest} (shortest) or more, got {self.longest}")
        for name, most in (("speed", 0.9), ("masks", 0.5), ("label_smoothing", 0.99)):
            if not 0 <= (getattr(self, name) or 0) <= most:
                raise ValueError(f"{name}: expected from 0 to {most}, got {getattr(self, name)}")
        self.words: list[str] | None = None

    def open(self, data: str | None, valid: str | None = None) -> Data:
        """Recordings, or strings of them, to train on and to validate on."""
        recordings, notes = self._recordings(data)
        if self.speed is None:  # the pitch of a tone is its key: a tenth faster, and it is another key
            self.speed = 0.0 if data is None else 0.1
        if valid is None:
            train, held_out = hold_out(recordings, self.held_out)
            notes.append(f"{len(train):,} recordings, and {len(held_out):,} that are held out")
        else:
            train, (held_out, others) = recordings, self._recordings(valid)
            notes += others
        if self.words is None:
            self.words = self._learn([*train, *held_out])
        return Data(self._examples(train, augmented=True), self._examples(held_out, augmented=False), notes)

    def read(self, data: str) -> Examples:
        """All recordings."""
        return self._examples(self._recordings(data)[0], augmented=False)

    def describe(self) -> ModelDescription:
        """A `Classifier`, a `Speller` or a `Transcriber`."""
        slowest = 1 - (self.speed or 0)
        seconds = self.max_seconds / slowest + 2 * self.shift  # and between two silences
        options = self.of_the_stack(max_length=ceil(seconds / HOP / self.join) + 1)
        options |= {"width": self.join * self.mels, _NAMED[self.kind]: self.words}
        if self.kind == "decoder":
            options["decoder_layers"] = self.decoder_layers
        return {"class": f"speech.{self.kind}", "options": options}

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """Frames ``(batch, length, width)`` and words ``(batch, words)`` with their lengths; or classes."""
        frames, words = zip(*examples, strict=True)
        batch = {
            "frames": torch.nn.utils.rnn.pad_sequence(list(frames), batch_first=True),
            "lengths": torch.tensor([len(sound) for sound in frames]),
        }
        if self.kind == "class":
            return batch | {"labels": torch.cat(words)}
        counts = torch.tensor([len(row) for row in words])
        return batch | {
            "words": torch.nn.utils.rnn.pad_sequence(list(words), batch_first=True),
            "word_lengths": counts,
        }

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The frames; for a decoder also the words, without the last."""
        sounds = {"frames": batch["frames"], "lengths": batch["lengths"]}
        if self.kind != "decoder":
            return sounds
        return {
            "source": batch["frames"],
            "target": batch["words"][:, :-1],
            "source_lengths": batch["lengths"],
            "target_lengths": batch["word_lengths"] - 1,
        }

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """In nats, summed over words: cross-entropy, or connectionist temporal classification (ctc)."""
        return self._loss(model, batch, self.label_smoothing)

    def measure(
        self, model: nn.Module, batch: dict[str, Tensor]
    ) -> tuple[float, int, list[tuple[list[str], list[str]]]]:
        """Loss and number of words; predicted and spoken words of every recording."""
        loss, count = self._loss(model, batch, 0.0)
        written = self._write(model, batch["frames"], batch["lengths"], self.beams)
        if self.kind == "class":
            spoken = [self._words([label]) for label in batch["labels"].tolist()]
        else:
            counts = batch["word_lengths"].tolist()
            spoken = [self._words(row[:n].tolist()) for row, n in zip(batch["words"], counts, strict=True)]
        return loss.item(), int(count), list(zip(written, spoken, strict=True))

    def metrics(self, parts: list[tuple[float, int, list[tuple[list[str], list[str]]]]]) -> dict[str, float]:
        """Word error rate (substitutions, deletions and insertions per spoken word), accuracy, loss."""
        pairs = [pair for part in parts for pair in part[2]]
        errors = sum(edits(written, spoken) for written, spoken in pairs)
        exact = sum(written == spoken for written, spoken in pairs) / len(pairs)
        return {
            "word_error": errors / sum(len(spoken) for _, spoken in pairs),
            ("accuracy" if self.kind == "class" else "exact"): exact,
            "loss": sum(part[0] for part in parts) / sum(part[1] for part in parts),
        }

    def predict(self, model: nn.Module, inputs: list[str], *, beams: int | None = None) -> list[str]:
        """The words in each of these sound files."""
        if beams is not None and self.kind != "decoder":
            raise ValueError(f"beams: {self.kind} has none; leave the option out")
        device = device_of(model)
        outputs = []
        for path in inputs:
            sound = read_sound(Path(path).expanduser(), self.rate)
            frames = self._tokens(log_mel(sound, self.rate, self.mels))[None].to(device)
            lengths = torch.tensor([frames.shape[1]], device=device)
            with evaluating(model), torch.no_grad():
                outputs.append(" ".join(self._write(model, frames, lengths, beams or self.beams)[0]))
        return outputs

    def save(self, folder: Path) -> None:
        """Write a decoder's words as a tokenizer.json, so that pages show words."""
        if self.kind == "decoder":
            names = {"bos_token": START, "eos_token": END}
            text.save_tokenizer(_tokenizer(self.vocabulary), folder, self.longest + 2, names)

    def restore(self, folder: Path) -> None:
        """Read the words from the model's options."""
        self.words = list(read_config(folder)["options"][_NAMED[self.kind]])

    def _recordings(self, data: str | None) -> tuple[list[Recording], list[str]]:
        if data is None:
            return tones(self.rate), []
        if data == ESPEAK and not Path(data).exists():
            return spoken(self.rate), []
        return read_recordings(data, self.rate, self.names, self.max_seconds)

    @property
    def vocabulary(self) -> list[str]:
        """The words that the model may say, special ones first."""
        if self.words is None:
            raise ValueError("words: not known yet; open some data, or restore a trained model, first")
        return self.words

    def _learn(self, recordings: Sequence[Recording]) -> list[str]:
        words = sorted({word for one in recordings for word in self._spoken(one)})
        if len(words) < 2 and self.kind == "class":
            raise ValueError(f"data: all recordings have the label {words[0]!r}; expected two labels or more")
        if special := [word for word in words if word in (BLANK, START, END)]:
            raise ValueError(f"data: {special[0]!r} is a label, but has another meaning here; rename it")
        return [*SPECIAL[self.kind], *words]

    def _spoken(self, recording: Recording) -> list[str]:
        return [recording.label] if self.kind == "class" else recording.label.split()

    def _ids(self, recordings: Sequence[Recording]) -> Tensor:
        words = [word for one in recordings for word in self._spoken(one)]
        if unknown := [word for word in words if word not in self.vocabulary]:
            raise ValueError(f"data: {unknown[0]!r} is spoken, but not in any training recording")
        if self.kind == "decoder":
            words = [START, *words, END]
        return torch.tensor([self.vocabulary.index(word) for word in words])

    def _examples(self, recordings: list[Recording], augmented: bool) -> Examples:
        """Every recording, as the first of a string where there are strings; augmented in training."""
        of_speaker: dict[str, list[Recording]] = {}
        for one in recordings:
            of_speaker.setdefault(one.speaker, []).append(one)
        for one in recordings:
            self._ids([one])  # raises now, not in the middle of training
        longest = int(self.max_seconds * self.rate)
        gap = round(GAP * self.rate)
        # strings to learn from may be shorter: where words begin is learned sooner from those of one or two
        fewest = 1 if augmented else self.shortest
        most = 1 if self.kind == "class" else self.longest
        counts = [fewest + i % (most - fewest + 1) if most > 1 else 1 for i in range(len(recordings))]

        def string(index: int, random: torch.Generator) -> list[Recording]:
            others = of_speaker[recordings[index].speaker]
            chosen = torch.randint(len(others), (counts[index] - 1,), generator=random).tolist()
            return [recordings[index], *(others[i] for i in chosen)]

        def make(index: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
            if not augmented:
                random = torch.Generator().manual_seed(index)  # always the same strings
            taken = string(index, random)
            sound, count = join_recordings(taken, gap, longest, random)
            if augmented:
                sound = change_speed(sound, self.speed or 0, round(self.shift * self.rate), random)
            frames = log_mel(sound, self.rate, self.mels)
            if augmented:
                frames = mask_frames(frames, self.masks, random)
            return self._tokens(frames), self._ids(taken[:count])

        mean = sum(len(one.samples) for one in recordings) / len(recordings) + gap / 2
        samples = [len(one.samples) + (n - 1) * mean for one, n in zip(recordings, counts, strict=True)]
        return Examples([self._length(ceil(size)) for size in samples], make)

    def _tokens(self, frames: Tensor) -> Tensor:
        """Log-mel frames, ``join`` of them a token: ``(length, width)``."""
        return F.pad(frames, (0, 0, 0, -len(frames) % self.join)).reshape(-1, self.join * self.mels)

    def _length(self, samples: int) -> int:
        return ceil((samples // round(HOP * self.rate) + 1) / self.join)

    def _loss(self, model: nn.Module, batch: dict[str, Tensor], smoothing: float) -> tuple[Tensor, Tensor]:
        outputs = model(**self.inputs(batch))
        if self.kind == "class":
            labels, logits = batch["labels"], outputs["logits"].float()
            loss = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
            return loss, torch.tensor(len(labels))
        words, counts = batch["words"], batch["word_lengths"]
        if self.kind == "ctc":
            log_probabilities = outputs.float().log_softmax(-1).transpose(0, 1)
            lengths, blank = batch["lengths"], self.vocabulary.index(BLANK)
            # a recording with fewer tokens than words has no alignment, and an infinite loss
            loss = F.ctc_loss(
                log_probabilities, words, lengths, counts, blank, reduction="sum", zero_infinity=True
            )
            return loss, counts.sum()
        return next_token_loss(outputs, words, counts, smoothing)

    def _write(self, model: nn.Module, frames: Tensor, lengths: Tensor, beams: int) -> list[list[str]]:
        """The predicted words of each recording."""
        if self.kind == "decoder":
            # a recording has time for this many words
            most = [ceil(length * self.join * HOP * FASTEST) + 1 for length in lengths.tolist()]
            written = generate(
                model,  # type: ignore[arg-type]
                frames,
                lengths=lengths,
                start=self.vocabulary.index(START),
                end=self.vocabulary.index(END),
                new_tokens=max(most),
                beams=beams,
            )
            return [self._words(row[:end]) for row, end in zip(written.tolist(), most, strict=True)]
        outputs = model(frames, lengths=lengths)
        if self.kind == "class":
            return [self._words([number]) for number in outputs["logits"].argmax(-1).tolist()]
        blank = self.vocabulary.index(BLANK)
        rows = (row[:n].tolist() for row, n in zip(outputs.argmax(-1), lengths.tolist(), strict=True))
        return [self._words(decode_greedily(row, blank)) for row in rows]

    def _words(self, ids: Sequence[int]) -> list[str]:
        """Ids up to the end as words, without special tokens."""
        words = [self.vocabulary[number] for number in ids]
        if END in words:
            words = words[: words.index(END)]
        return [word for word in words if word not in (START, BLANK)]


def _tokenizer(words: Sequence[str]) -> Tokenizer:
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, START))
    tokenizer.add_special_tokens([START, END])
    return tokenizer
