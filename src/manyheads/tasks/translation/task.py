"""Translation: an encoder reads a sentence, a decoder writes it in another language."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from manyheads.common.devices import device_of
from manyheads.data.examples import Examples
from manyheads.data.readers import text as texts
from manyheads.data.readers.parallel_text import Pairs, has_part, read_pairs
from manyheads.nn.generate import generate
from manyheads.tasks.architecture import Architecture
from manyheads.tasks.label_smoothing import IGNORED, cross_entropy
from manyheads.tasks.translation.synthetic import pairs as numbers
from manyheads.training.options import option
from manyheads.training.task import Data

START, END = "<start>", "<end>"
EMBEDDED = 6000  # pairs, the last 300 of which are held out
HELD_OUT = 300


@dataclass(kw_only=True)
class Translation(Architecture):
    """Sentences from one language to another, by a `Seq2Seq` with one vocabulary for both.

    ``data`` is a prefix of two parallel files, a folder with train and val files, a table, or a data set of
    the hub: see `read_pairs`. Without, numbers, dates and times, English to German.

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
    training: ClassVar[dict[str, Any]] = {
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
    source: str = option("en", "The language to translate from: how its file ends, or its column.")
    target: str = option("de", "The language to translate to.")
    vocabulary: int = option(600, "How many different pieces of words there are, for both languages.")
    max_tokens: int = option(128, "Longer sentences are left out of training, and cut in predicting.")
    label_smoothing: float = option(0.1, "Share of probability that the target leaves to other tokens.")
    beams: int = option(1, "Hypotheses kept while translating what is measured.")

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing: expected from 0 and below 1, got {self.label_smoothing}")
        if self.max_tokens < 4:
            raise ValueError(f"max_tokens: expected 4 or more, got {self.max_tokens}")
        self.tokenizer: Any = None

    def open(self, data: str | None, valid: str | None = None) -> Data:
        """The pairs to learn from and those to be measured on."""
        notes = []
        if data is None:
            pairs = numbers(EMBEDDED)
            held_out, pairs = pairs[-HELD_OUT:], pairs[:-HELD_OUT]
        else:
            pairs, empty = read_pairs(data, self.source, self.target)
            notes += [f"{empty:,} pairs with an empty side were left out"] if empty else []
            if valid is not None or has_part(data, self.source, "valid"):
                held_out, _ = read_pairs(valid or data, self.source, self.target, "valid")
            else:
                few = min(1000, max(len(pairs) // 20, 1))
                every = len(pairs) // few
                held_out = pairs[::every][:few]
                pairs = [
                    pair for number, pair in enumerate(pairs) if number % every or number // every >= few
                ]
        if self.tokenizer is None:
            both = (sentence for pair in pairs for sentence in pair)
            self.tokenizer = texts.pieces(both, self.vocabulary, [START, END])
        train, long = self._examples(pairs, self.max_tokens)
        notes += [f"{long:,} pairs longer than {self.max_tokens} tokens were left out"] if long else []
        return Data(train, self._examples(held_out, None)[0], notes)

    def read(self, data: str) -> Examples:
        """All pairs, to measure on; of a folder, its test files."""
        pairs, _ = read_pairs(data, self.source, self.target, "test")
        return self._examples(pairs, None)[0]

    def has_test(self, data: str) -> bool:
        """Whether a folder has test files."""
        return has_part(data, self.source, "test")

    def describe(self) -> dict[str, Any]:
        """A `Seq2Seq` whose source, target and output share one embedding."""
        options = self.of_the_stack(max_length=self.max_tokens + 1)
        options |= {"vocabulary": self.tokenizer.get_vocab_size(), "decoder_layers": self.decoder_layers}
        return {"class": "translation.seq2seq", "options": options}

    def collate(self, examples: list[Any]) -> dict[str, Any]:
        """Ids ``(batch, length)`` of both sides with their lengths, and the sentences themselves if known."""
        batch: dict[str, Any] = {}
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
        wanted = self._texts(batch["target"][:, 1:])
        return loss.item(), int(count), list(zip(written, wanted, strict=True))

    def metrics(self, parts: list[tuple[float, int, list[tuple[str, str]]]]) -> dict[str, float]:
        """sacreBLEU (cased, detokenised), the share of sentences that are exactly right, loss a token."""
        import sacrebleu

        written, wanted = zip(*(pair for part in parts for pair in part[2]), strict=True)
        return {
            "bleu": sacrebleu.corpus_bleu(list(written), [list(wanted)]).score,
            "exact": sum(map(str.__eq__, written, wanted)) / len(written),
            "loss": sum(part[0] for part in parts) / sum(part[1] for part in parts),
        }

    def predict(self, model: nn.Module, inputs: list[str], *, beams: int = 4) -> list[str]:
        """Translate each text."""
        device = device_of(model)
        rows = [self._ids(text)[: self.max_tokens] for text in inputs]
        lengths = torch.tensor([len(row) for row in rows], device=device)
        source = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
        return self._translate(model, source, lengths, beams)

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """The source, and of the target what is read while it is written: all but its end."""
        target, lengths = batch["target"][:, :-1], batch["target_lengths"] - 1
        return {**batch, "target": target, "target_lengths": lengths}

    def arrange(self, model: nn.Module, ids: Tensor, lengths: Tensor) -> dict[str, Any]:
        """The texts as source; the target is what the model itself makes of them."""
        start, end = (self.tokenizer.token_to_id(token) for token in (START, END))
        device = device_of(model)
        ids, lengths = ids.to(device), lengths.to(device)
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

    def restore(self, folder: Path) -> None:
        """Read the vocabulary."""
        self.tokenizer = texts.load_tokenizer(folder)

    def _loss(self, model: nn.Module, batch: dict[str, Tensor], smoothing: float) -> tuple[Tensor, Tensor]:
        target, lengths = batch["target"], batch["target_lengths"] - 1
        logits = model(**self.inputs(batch))
        real = torch.arange(target.shape[1] - 1, device=target.device) < lengths[:, None]
        labels = target[:, 1:].masked_fill(~real, IGNORED)
        summed = cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), smoothing)
        return summed, real.sum()

    def _translate(self, model: nn.Module, source: Tensor, lengths: Tensor, beams: int) -> list[str]:
        return self._texts(self._write(model, source, lengths, beams))

    def _write(self, model: nn.Module, source: Tensor, lengths: Tensor, beams: int) -> Tensor:
        """The ids of translations, ``(batch, length)``, filled up with the end."""
        return generate(
            model,  # type: ignore[arg-type]
            source,
            lengths=lengths,
            start=self.tokenizer.token_to_id(START),
            end=self.tokenizer.token_to_id(END),
            new_tokens=min(2 * int(lengths.max()) + 8, self.max_tokens),
            beams=beams,
        )

    def _texts(self, ids: Tensor) -> list[str]:
        """Ids up to the end as texts."""
        end = self.tokenizer.token_to_id(END)
        rows = [row[: row.index(end)] if end in row else row for row in ids.tolist()]
        found: list[str] = self.tokenizer.decode_batch(rows)
        return found

    def _ids(self, text: str) -> Tensor:
        end = self.tokenizer.token_to_id(END)
        return torch.tensor([*self.tokenizer.encode(text, add_special_tokens=False).ids, end])

    def _examples(self, pairs: Pairs, longest: int | None) -> tuple[Examples, int]:
        """Both sides as ids, and how many pairs were too long; where all must be kept, they are cut."""
        start, end = (self.tokenizer.token_to_id(token) for token in (START, END))
        sides = [self.tokenizer.encode_batch_fast(list(side), add_special_tokens=False)
                 for side in zip(*pairs, strict=True)]  # fmt: skip
        encoded = [([*a.ids, end], [start, *b.ids, end]) for a, b in zip(*sides, strict=True)]
        if longest is None:
            places = self.max_tokens + 2 if self.positions == "learned" else None  # there are no more
            kept = [(a[: self.max_tokens], b[:places]) for a, b in encoded]
        else:
            kept = [(a, b) for a, b in encoded if max(len(a), len(b) - 1) <= longest]
            if not kept:
                raise ValueError(f"max_tokens: all pairs are longer than {longest} tokens; give more")
        sizes = [max(len(a), len(b) - 1) for a, b in kept]
        return Examples(sizes, lambda i, _: tuple(map(torch.tensor, kept[i]))), len(encoded) - len(kept)
