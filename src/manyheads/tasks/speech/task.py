"""Speech: what is said in a recording: one of several words, or a string of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.common.devices import device_of
from manyheads.common.preserved_state import evaluating
from manyheads.data.examples import Examples
from manyheads.data.readers import text
from manyheads.data.readers.audio import HOP, log_mel, read_sound
from manyheads.data.readers.recordings import Recording, hold_out, read_recordings
from manyheads.nn.generate import generate
from manyheads.tasks.architecture import Architecture
from manyheads.tasks.label_smoothing import IGNORED, cross_entropy
from manyheads.tasks.speech.synthetic import ESPEAK, spoken, tones
from manyheads.tasks.speech.word_strings import changed, edits, hidden, joined, spelled
from manyheads.training.options import option
from manyheads.training.run_folder import read_config
from manyheads.training.task import Data

KINDS = ("class", "ctc", "decoder")
BLANK, START, END = "<blank>", "<start>", "<end>"
SPECIAL: dict[str, list[str]] = {"class": [], "ctc": [BLANK], "decoder": [START, END]}
_NAMED = {"class": "labels", "ctc": "words", "decoder": "words"}  # what the models call what they may say
GAP = 0.1  # seconds of silence between two words of a string, at most
FASTEST = 10  # words a second


@dataclass(kw_only=True)
class Speech(Architecture):
    """Words from recordings: one of several (class), or strings of them (by ctc, or by a decoder).

    ``data`` is a folder or a zip archive of WAV files of any sample rate, with a labels.tsv (columns file,
    label, perhaps speaker and take) or with names like ``{label}_{speaker}_{take}``; or espeak-ng, which then
    says ten digits in ten voices. Without, the keys of six telephones. Strings are joined from recordings of
    one speaker, those that are measured from held-out ones.

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
    training: ClassVar[dict[str, Any]] = {
        "steps": 400,
        "batch_tokens": 1024,
        "learning_rate": 2e-3,
        "evaluate_every": 100,
        "evaluate_examples": 0,
    }

    d_model: int = option(96, "Width of a token.")
    layers: int = option(3, "Number of layers of the encoder.")
    decoder_layers: int = option(2, "Number of layers of the decoder, if there is one.")
    dropout: float = option(0.1, "Share dropped of what every part adds.")
    kind: str = option("class", "What is written: class (one label), or strings of words by ctc or decoder.")
    held_out: str = option("takes", "What is measured on: takes (a tenth of them), or a speaker's name.")
    names: str = option("{label}_{speaker}_{take}", "How files are called, where there is no labels.tsv.")
    shortest: int = option(3, "Recordings that a string is joined from, at least, where it is measured on.")
    longest: int = option(7, "Recordings that a string is joined from, at most; 1 for none joined.")
    rate: int = option(8000, "Samples a second that the model hears; recordings are resampled.")
    mels: int = option(40, "Bands of the spectrum.")
    join: int = option(3, "Frames, one every 10 ms, that make a token.")
    max_seconds: float = option(20.0, "Longer recordings are left out, longer strings cut.")
    speed: float | None = option(
        None, "Played faster or slower by up to this share in training; unless given, 0.1, and tones 0."
    )
    shift: float = option(0.1, "They begin and end with up to so many seconds of silence in training.")
    masks: float = option(
        0.15, "Twice up to this share of the bands, and of the time, is hidden in training."
    )
    label_smoothing: float = option(0.1, "Share of probability left to other words (class and decoder).")
    beams: int = option(1, "Hypotheses that a decoder keeps in what is measured.")

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
        """Recordings, or strings of them, to learn from and to be measured on."""
        recordings, notes = self._recordings(data)
        if self.speed is None:  # a telephone's key is its pitch: a tenth faster, and it is another key
            self.speed = 0.0 if data is None else 0.1
        if valid is None:
            train, held_out = hold_out(recordings, self.held_out)
            notes.append(f"{len(train):,} recordings, and {len(held_out):,} that are held out")
        else:
            train, (held_out, others) = recordings, self._recordings(valid)
            notes += others
        if self.words is None:
            self.words = self._vocabulary([*train, *held_out])
        return Data(self._examples(train, changing=True), self._examples(held_out, changing=False), notes)

    def read(self, data: str) -> Examples:
        """All recordings, to measure on."""
        return self._examples(self._recordings(data)[0], changing=False)

    def describe(self) -> dict[str, Any]:
        """A `Classifier`, a `Speller` or a `Transcriber`."""
        slowest = 1 - (self.speed or 0)
        seconds = self.max_seconds / slowest + 2 * self.shift  # and between two silences
        options = self.of_the_stack(max_length=ceil(seconds / HOP / self.join) + 1)
        options |= {"width": self.join * self.mels, _NAMED[self.kind]: self.words}
        if self.kind == "decoder":
            options["decoder_layers"] = self.decoder_layers
        return {"class": f"speech.{self.kind}", "options": options}

    def collate(self, examples: list[Any]) -> dict[str, Tensor]:
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

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """The sounds; for a decoder also the words, without the end."""
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
        """In nats, summed over words: cross-entropy, or that of all ways to spell the string (ctc)."""
        return self._loss(model, batch, self.label_smoothing)

    def measure(
        self, model: nn.Module, batch: dict[str, Tensor]
    ) -> tuple[float, int, list[tuple[list[str], list[str]]]]:
        """Loss and words, and what was written beside what was said."""
        loss, count = self._loss(model, batch, 0.0)
        written = self._write(model, batch["frames"], batch["lengths"], self.beams)
        if self.kind == "class":
            wanted = [self._words([label]) for label in batch["labels"].tolist()]
        else:
            counts = batch["word_lengths"].tolist()
            wanted = [self._words(row[:n].tolist()) for row, n in zip(batch["words"], counts, strict=True)]
        return loss.item(), int(count), list(zip(written, wanted, strict=True))

    def metrics(self, parts: list[tuple[float, int, list[tuple[list[str], list[str]]]]]) -> dict[str, float]:
        """Word error rate: words replaced, missing and added, by those that were said; what is all right."""
        pairs = [pair for part in parts for pair in part[2]]
        errors = sum(edits(written, wanted) for written, wanted in pairs)
        exact = sum(written == wanted for written, wanted in pairs) / len(pairs)
        return {
            "word_error": errors / sum(len(wanted) for _, wanted in pairs),
            ("accuracy" if self.kind == "class" else "exact"): exact,
            "loss": sum(part[0] for part in parts) / sum(part[1] for part in parts),
        }

    def predict(self, model: nn.Module, inputs: list[str], *, beams: int | None = None) -> list[str]:
        """What is said in each of these WAV files."""
        if beams is not None and self.kind != "decoder":
            raise ValueError(f"beams: {self.kind} has none; leave the option out")
        device = device_of(model)
        found = []
        for path in inputs:
            sound = read_sound(Path(path).expanduser(), self.rate)
            frames = self._tokens(log_mel(sound, self.rate, self.mels))[None].to(device)
            lengths = torch.tensor([frames.shape[1]], device=device)
            with evaluating(model), torch.no_grad():
                found.append(" ".join(self._write(model, frames, lengths, beams or self.beams)[0]))
        return found

    def save(self, folder: Path) -> None:
        """Write a decoder's words as a tokenizer.json, so that pages show words; the model has them, too."""
        if self.kind == "decoder":
            names = {"bos_token": START, "eos_token": END}
            text.save_tokenizer(_tokenizer(self._known), folder, self.longest + 2, names)

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
    def _known(self) -> list[str]:
        if self.words is None:
            raise ValueError("words: not known yet; open some data, or restore a trained model, first")
        return self.words

    def _vocabulary(self, recordings: Sequence[Recording]) -> list[str]:
        said = sorted({word for one in recordings for word in self._said(one)})
        if len(said) < 2 and self.kind == "class":
            raise ValueError(f"data: all recordings have the label {said[0]!r}; expected two labels or more")
        if special := [word for word in said if word in (BLANK, START, END)]:
            raise ValueError(f"data: {special[0]!r} is a label, which means something else here; rename it")
        return [*SPECIAL[self.kind], *said]

    def _said(self, recording: Recording) -> list[str]:
        return [recording.label] if self.kind == "class" else recording.label.split()

    def _ids(self, recordings: Sequence[Recording]) -> Tensor:
        words = [word for one in recordings for word in self._said(one)]
        if unknown := [word for word in words if word not in self._known]:
            raise ValueError(f"data: {unknown[0]!r} is said, which was not there in training")
        if self.kind == "decoder":
            words = [START, *words, END]
        return torch.tensor([self._known.index(word) for word in words])

    def _examples(self, recordings: list[Recording], changing: bool) -> Examples:
        """Every recording, as the first of a string where there are strings; changed to learn from."""
        of_speaker: dict[str, list[Recording]] = {}
        for one in recordings:
            of_speaker.setdefault(one.speaker, []).append(one)
        for one in recordings:
            self._ids([one])  # says now what would be found out in the middle of training
        longest = int(self.max_seconds * self.rate)
        gap = round(GAP * self.rate)
        # strings to learn from may be shorter: where words begin is found sooner in those of one or two
        fewest = 1 if changing else self.shortest
        most = 1 if self.kind == "class" else self.longest
        counts = [fewest + i % (most - fewest + 1) if most > 1 else 1 for i in range(len(recordings))]

        def string(index: int, random: torch.Generator) -> list[Recording]:
            known = of_speaker[recordings[index].speaker]
            chosen = torch.randint(len(known), (counts[index] - 1,), generator=random).tolist()
            return [recordings[index], *(known[i] for i in chosen)]

        def make(index: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
            if not changing:
                random = torch.Generator().manual_seed(index)  # the same strings whoever asks
            taken = string(index, random)
            sound, kept = joined(taken, gap, longest, random)
            if changing:
                sound = changed(sound, self.speed or 0, round(self.shift * self.rate), random)
            frames = log_mel(sound, self.rate, self.mels)
            if changing:
                frames = hidden(frames, self.masks, random)
            return self._tokens(frames), self._ids(taken[:kept])

        mean = sum(len(one.samples) for one in recordings) / len(recordings) + gap / 2
        samples = [len(one.samples) + (n - 1) * mean for one, n in zip(recordings, counts, strict=True)]
        return Examples([self._length(ceil(size)) for size in samples], make)

    def _tokens(self, frames: Tensor) -> Tensor:
        """Log-mel frames, ``join`` of them a token: ``(length, width)``."""
        return F.pad(frames, (0, 0, 0, -len(frames) % self.join)).reshape(-1, self.join * self.mels)

    def _length(self, samples: int) -> int:
        return ceil((samples // round(HOP * self.rate) + 1) / self.join)

    def _loss(self, model: nn.Module, batch: dict[str, Tensor], smoothing: float) -> tuple[Tensor, Tensor]:
        found = model(**self.inputs(batch))
        if self.kind == "class":
            labels = batch["labels"]
            return cross_entropy(found["logits"].float(), labels, smoothing), torch.tensor(len(labels))
        words, counts = batch["words"], batch["word_lengths"]
        if self.kind == "ctc":
            chances = found.float().log_softmax(-1).transpose(0, 1)
            lengths, blank = batch["lengths"], self._known.index(BLANK)
            # a string that is too short for its words, at many words a second, has no way to be spelled
            summed = F.ctc_loss(chances, words, lengths, counts, blank, reduction="sum", zero_infinity=True)
            return summed, counts.sum()
        real = torch.arange(words.shape[1] - 1, device=words.device) < counts[:, None] - 1
        wanted = words[:, 1:].masked_fill(~real, IGNORED)
        return cross_entropy(found.flatten(0, 1).float(), wanted.flatten(), smoothing), real.sum()

    def _write(self, model: nn.Module, frames: Tensor, lengths: Tensor, beams: int) -> list[list[str]]:
        """What a model hears, in words."""
        if self.kind == "decoder":
            # nobody says more words than there is time for
            most = [ceil(length * self.join * HOP * FASTEST) + 1 for length in lengths.tolist()]
            written = generate(
                model,  # type: ignore[arg-type]
                frames,
                lengths=lengths,
                start=self._known.index(START),
                end=self._known.index(END),
                new_tokens=max(most),
                beams=beams,
            )
            return [self._words(row[:end]) for row, end in zip(written.tolist(), most, strict=True)]
        found = model(frames, lengths=lengths)
        if self.kind == "class":
            return [self._words([number]) for number in found["logits"].argmax(-1).tolist()]
        blank = self._known.index(BLANK)
        rows = (row[:n].tolist() for row, n in zip(found.argmax(-1), lengths.tolist(), strict=True))
        return [self._words(spelled(row, blank)) for row in rows]

    def _words(self, ids: Sequence[int]) -> list[str]:
        """Ids up to the end as words, without those that are none."""
        words = [self._known[number] for number in ids]
        if END in words:
            words = words[: words.index(END)]
        return [word for word in words if word not in (START, BLANK)]


def _tokenizer(words: Sequence[str]) -> Any:
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, START))
    tokenizer.add_special_tokens([START, END])
    return tokenizer
