"""Translation: an encoder reads a sentence, a decoder writes it in another language."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from manyheads.capture.thread_marks import unwatched
from manyheads.common.devices import device_of
from manyheads.data.examples import Example, Examples
from manyheads.data.labelled.metrics import sacrebleu_package
from manyheads.data.readers import text as texts
from manyheads.data.readers.parallel_text import Pairs, has_part, read_pairs
from manyheads.models.config import ModelDescription
from manyheads.nn.generate import generate
from manyheads.tasks.architecture import Architecture, LearnedTokenizer
from manyheads.tasks.next_token_loss import next_token_loss
from manyheads.training.options import option
from manyheads.training.task import Data

START, END = "<start>", "<end>"
EMBEDDED = "numbers_and_dates.tsv"
HELD_OUT = 300  # pairs of the embedded data


@dataclass(kw_only=True)
class Translation(LearnedTokenizer, Architecture):
    """Sentences from one language to another, by a `Seq2Seq` with one vocabulary for both.

    ``data`` is the prefix of two parallel files, a folder with train and val files, a table, or a dataset of
    the hub: see `read_pairs`. Default: numbers, dates and times, from English to German.

    Examples
    --------
    >>> task = Translation(d_model=12, heads=3, layers=1, vocabulary=300)
    >>> data = task.open(None)
    >>> batch = task.collate(data.train.take([0, 1]))
    >>> sorted(batch)
    ['source', 'source_lengths', 'target', 'target_lengths']
    """

    name: ClassVar[str] = "translation"
    metric: ClassVar[str] = "bleu"
    higher_is_better: ClassVar[bool] = True
    training: ClassVar[Mapping[str, float | str]] = {
        "steps": 400,
        "batch_tokens": 1536,
        "learning_rate": 2e-3,
        "evaluate_every": 100,
        "evaluate_examples": 200,
    }

    layers: int = option(2, "Number of layers of the encoder, and of the decoder.")
    decoder_layers: int | None = option(None, "Number of layers of the decoder, if not that of the encoder.")
    positions: str = option("sinusoidal", "sinusoidal, learned, rotary, alibi or none.")
    dropout: float = option(0.1, "Share dropped of what every part adds.")
    source: str = option("en", "The language to translate from: the suffix of its file, or its column.")
    target: str = option("de", "The language to translate to.")
    vocabulary: int = option(600, "Number of tokens (byte-pair encoding), for both languages.")
    max_tokens: int = option(128, "Longer sentences are left out of training, and truncated in prediction.")
    label_smoothing: float = option(0.1, "Share of probability that the target leaves to other tokens.")
    beams: int = option(1, "Beam width in evaluation.")

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing: expected 0 or more and below 1, got {self.label_smoothing}")
        if self.max_tokens < 4:
            raise ValueError(f"max_tokens: expected 4 or more, got {self.max_tokens}")

    def open(self, data: str | None, valid: str | None = None) -> Data:
        """The pairs to train on and those to validate on."""
        notes = []
        if data is None:
            with resources.as_file(resources.files("manyheads").joinpath("data", "files", EMBEDDED)) as path:
                pairs, _ = read_pairs(str(path), self.source, self.target)
            held_out, pairs = pairs[-HELD_OUT:], pairs[:-HELD_OUT]
        else:
            pairs, empty = read_pairs(data, self.source, self.target)
            notes += [f"{empty:,} pairs with an empty side were left out"] if empty else []
            if valid is not None or has_part(data, self.source, "valid"):
                held_out, _ = read_pairs(valid or data, self.source, self.target, "valid")
            else:
                if len(pairs) < 2:
                    raise ValueError(
                        f"data: {data} has {len(pairs)} pair; expected 2 or more, since some are held out, "
                        "or held-out pairs in a file of their own (valid)"
                    )
                held_out_count = min(1000, max(len(pairs) // 20, 1))
                step = len(pairs) // held_out_count
                held_out = pairs[::step][:held_out_count]
                pairs = [
                    pair
                    for number, pair in enumerate(pairs)
                    if number % step or number // step >= held_out_count
                ]
        if self._tokenizer is None:
            sentences = (sentence for pair in pairs for sentence in pair)
            self._tokenizer = texts.train_bpe(sentences, self.vocabulary, [START, END])
        train, long = self._examples(pairs, self.max_tokens)
        notes += [f"{long:,} pairs longer than {self.max_tokens} tokens were left out"] if long else []
        return Data(train, self._examples(held_out, None)[0], notes)

    def read(self, data: str) -> Examples:
        """All pairs; of a folder, its test files."""
        pairs, _ = read_pairs(data, self.source, self.target, "test")
        return self._examples(pairs, None)[0]

    def has_test(self, data: str) -> bool:
        """Whether a folder has test files."""
        return has_part(data, self.source, "test")

    def describe(self) -> ModelDescription:
        """A `Seq2Seq` whose source, target and output share one embedding."""
        options = self.of_the_stack(max_length=self.max_tokens + 1)
        options |= {"vocabulary": self.tokenizer.get_vocab_size(), "decoder_layers": self.decoder_layers}
        return {"class": "translation.seq2seq", "options": options}

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """Ids ``(batch, length)`` of both sides with their lengths."""
        batch: dict[str, Tensor] = {}
        for side, rows in zip(("source", "target"), zip(*examples, strict=True), strict=True):
            lengths = torch.tensor([len(row) for row in rows])
            batch[side] = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
            batch[f"{side}_lengths"] = lengths
        return batch

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Cross-entropy of the target in nats, summed over its tokens; smoothed in training."""
        return self._loss(model, batch, self.label_smoothing)

    def measure(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[float, int, list[tuple[str, str]]]:
        """Loss and tokens, and every translation beside its reference."""
        loss, count = self._loss(model, batch, 0.0)
        written = self._translate(model, batch["source"], batch["source_lengths"], self.beams)
        references = self.decode_up_to(END, batch["target"][:, 1:])
        return loss.item(), int(count), list(zip(written, references, strict=True))

    def metrics(self, parts: list[tuple[float, int, list[tuple[str, str]]]]) -> dict[str, float]:
        """sacreBLEU (cased, detokenised), the share of sentences that are exactly right, loss per token."""
        sacrebleu = sacrebleu_package()

        written, references = zip(*(pair for part in parts for pair in part[2]), strict=True)
        return {
            "bleu": sacrebleu.corpus_bleu(list(written), [list(references)]).score,
            "exact": sum(map(str.__eq__, written, references)) / len(written),
            "loss": sum(part[0] for part in parts) / sum(part[1] for part in parts),
        }

    def predict(self, model: nn.Module, inputs: list[str], *, beams: int = 4) -> list[str]:
        """Translate each text."""
        device = device_of(model)
        rows = [self._ids(text)[: self.max_tokens] for text in inputs]
        lengths = torch.tensor([len(row) for row in rows], device=device)
        source = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
        return self._translate(model, source, lengths, beams)

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The source, and the target without its last token."""
        target, lengths = batch["target"][:, :-1], batch["target_lengths"] - 1
        return {**batch, "target": target, "target_lengths": lengths}

    def arrange(self, model: nn.Module, ids: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        """The texts as source; the target is the model's own translation of them."""
        start, end = (self.id_of(token) for token in (START, END))
        device = device_of(model)
        ids, lengths = ids.to(device), lengths.to(device)
        with unwatched():
            written = self._write(model, ids, lengths, beams=1)
        target = torch.cat([torch.full_like(written[:, :1], start), written], 1)
        ended = (written == end).int()
        counts = torch.where(ended.any(1), ended.argmax(1), written.shape[1]) + 1  # without the end itself
        target = target[:, : int(counts.max())]
        return {"source": ids, "target": target, "source_lengths": lengths, "target_lengths": counts}

    def save(self, folder: Path) -> None:
        """Write the vocabulary as tokenizer.json."""
        names = {"bos_token": START, "eos_token": END}
        texts.save_tokenizer(self.tokenizer, folder, self.max_tokens, names, ends_with=END)

    def _loss(self, model: nn.Module, batch: dict[str, Tensor], smoothing: float) -> tuple[Tensor, Tensor]:
        logits = model(**self.inputs(batch))
        return next_token_loss(logits, batch["target"], batch["target_lengths"], smoothing)

    def _translate(self, model: nn.Module, source: Tensor, lengths: Tensor, beams: int) -> list[str]:
        return self.decode_up_to(END, self._write(model, source, lengths, beams))

    def _write(self, model: nn.Module, source: Tensor, lengths: Tensor, beams: int) -> Tensor:
        """The ids of translations, ``(batch, length)``, filled up with the end."""
        return generate(
            model,  # type: ignore[arg-type]
            source,
            lengths=lengths,
            start=self.id_of(START),
            end=self.id_of(END),
            new_tokens=min(2 * int(lengths.max()) + 8, self.max_tokens),
            beams=beams,
        )

    def _ids(self, text: str) -> Tensor:
        end = self.id_of(END)
        return torch.tensor([*self.tokenizer.encode(text, add_special_tokens=False).ids, end])

    def _examples(self, pairs: Pairs, longest: int | None) -> tuple[Examples, int]:
        """Both sides as ids, and the number of pairs left out as too long; without a limit, all truncated."""
        start, end = (self.id_of(token) for token in (START, END))
        sides = [self.tokenizer.encode_batch_fast(list(side), add_special_tokens=False)
                 for side in zip(*pairs, strict=True)]  # fmt: skip
        encoded = [([*a.ids, end], [start, *b.ids, end]) for a, b in zip(*sides, strict=True)]
        if longest is None:
            positions = self.max_tokens + 2 if self.positions == "learned" else None  # there are no more
            fitting = [(a[: self.max_tokens], b[:positions]) for a, b in encoded]
        else:
            fitting = [(a, b) for a, b in encoded if max(len(a), len(b) - 1) <= longest]
            if not fitting:
                raise ValueError(f"max_tokens: all pairs are longer than {longest} tokens; give more")
        sizes = [max(len(a), len(b) - 1) for a, b in fitting]
        dropped = len(encoded) - len(fitting)
        return Examples(sizes, lambda i, _: tuple(map(torch.tensor, fitting[i]))), dropped
