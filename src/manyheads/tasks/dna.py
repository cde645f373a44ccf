"""DNA: the class of a sequence, by a transformer that reads bases or words of a few bases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from manyheads import tasks
from manyheads.common.devices import device_of, to_device
from manyheads.common.preserved_state import evaluating
from manyheads.data.examples import Example, Examples
from manyheads.data.readers import text
from manyheads.data.readers.fasta import BASES, Labelled, clean_sequence, read_sequences
from manyheads.heads.along_sequence import Along, along
from manyheads.models.config import ModelDescription
from manyheads.nn.transformers import Encoder
from manyheads.tasks.classification import TESTING, Classification, first_of, parts_of, pooled, split_indices
from manyheads.training.options import option
from manyheads.training.task import Data

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CLASS, UNKNOWN = "<class>", "<unknown>"
LONGEST_WORD = 6
# The embedded data: number and length of sequences; motifs, where they begin, how much later, mutation rate.
EMBEDDED, LENGTH = 4000, 60
MOTIFS, JITTER, CHANGED = {"TTGACA": 10, "TATAAT": 33}, 4, 0.05


class SequenceClassifier(nn.Module):
    """Tokens through an encoder, and the class from the first of them or from their mean.

    Parameters
    ----------
    labels: names of the classes.
    vocabulary: number of tokens.
    pooling: "first" or "mean".
    options: of `Encoder`.

    Examples
    --------
    >>> model = SequenceClassifier(["a", "b"], vocabulary=7, d_model=12, heads=3, layers=1)
    >>> model(torch.randint(7, (2, 5)), lengths=torch.tensor([5, 3]))["logits"].shape
    torch.Size([2, 2])
    """

    def __init__(
        self, labels: Sequence[str], vocabulary: int, *, pooling: str = "first", **options: Any
    ) -> None:
        super().__init__()
        self.labels, self.pooling = list(labels), pooling
        self.encoder = Encoder(vocabulary=vocabulary, **options)
        self.output = nn.Linear(self.encoder.d_model, len(self.labels))

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> dict[str, Tensor]:
        """Ids ``(batch, length)`` to ``logits`` (batch, classes)."""
        x = self.encoder(ids, lengths=lengths)
        return {"logits": self.output(pooled(x, lengths, self.pooling))}


@dataclass(kw_only=True)
class DNA(Classification):
    """Classification of DNA sequences.

    ``data`` is a folder of FASTA files named by class, such files separated by commas, or a table (.tsv) of
    class and sequence; folders may have parts for train, val and test. Default: random sequences with the two
    motifs of bacterial promoters in them: none, one, the other, or both. If there is no validation part,
    every tenth sequence is held out.

    Examples
    --------
    >>> task = DNA(d_model=12, heads=3, layers=1)
    >>> data = task.open(None)
    >>> task.collate(data.train.take([0, 1]))["ids"].shape                  # (batch, length)
    torch.Size([2, 60])
    """

    name: ClassVar[str] = "dna"
    training: ClassVar[Mapping[str, float | str]] = {
        "steps": 600,
        "batch_tokens": 1952,
        "learning_rate": 3e-3,
        "warmup": 50,
        "evaluate_every": 100,
        "evaluate_examples": 0,
    }

    d_model: int = option(64, "Width of a token.")
    layers: int = option(2, "Number of layers.")
    positions: str = option("learned", "sinusoidal, learned, rotary, alibi or none.")
    dropout: float = option(0.1, "Dropout on the output of every sublayer.")
    word: int = option(1, "Bases per token: 1 for bases, 3 for codon-like words, up to 6.")
    max_tokens: int = option(512, "Longer sequences are truncated.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.word <= LONGEST_WORD:
            raise ValueError(f"word: expected 1 to {LONGEST_WORD} bases, got {self.word}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens: expected 1 or more, got {self.max_tokens}")
        self.tokenizer = word_tokenizer(self.word)
        self.vocabulary = self.tokenizer.get_vocab()

    def open(self, data: str | None, valid: str | None = None) -> Data:
        """The sequences to train on and those to validate on."""
        (pairs, empty), held_out = parts_of(read_sequences, data, valid, lambda: (planted(EMBEDDED), 0))
        if held_out is None:
            learned, held = split_indices(len(pairs))
            held_out = [pairs[i] for i in held], 0
            pairs = [pairs[i] for i in learned]
        empty += held_out[1]
        long = sum(len(sequence) > self.word * self.max_tokens for _, sequence in [*pairs, *held_out[0]])
        notes = [f"{len(pairs):,} sequences to train on, {len(held_out[0]):,} held out"]
        notes += [f"{empty:,} records without a class or a sequence were left out"] if empty else []
        notes += [f"{long:,} sequences longer than {self.max_tokens} tokens were truncated"] if long else []
        self.numbers([name for name, _ in pairs], learn=True)
        return Data(self._examples(pairs), self._examples(held_out[0]), notes)

    def read(self, data: str) -> Examples:
        """The test part; all of data without parts."""
        labelled: Labelled = first_of(read_sequences, data, TESTING)
        return self._examples(labelled[0])

    def has_test(self, data: str) -> bool:
        """Whether the data has a folder or a table called test."""
        return read_sequences(data, "test") is not None

    def describe(self) -> ModelDescription:
        """A `SequenceClassifier`."""
        options = self.of_the_stack(max_length=self.max_tokens + 1) | {
            "labels": self.labels,
            "vocabulary": len(self.vocabulary),
            "pooling": self.pooling,
        }
        return {"class": "dna.class", "options": options}

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """Ids ``(batch, length)``, their lengths and labels (batch,)."""
        rows, labels = zip(*examples, strict=True)
        return self._padded(list(rows)) | {"labels": torch.stack(labels)}

    def predict(self, model: nn.Module, inputs: list[str]) -> list[str]:
        """The class of each sequence."""
        rows = [self._row(sequence) for sequence in inputs]
        device = device_of(model)
        batch = to_device(self._padded(rows), device)
        with evaluating(model), torch.no_grad():
            logits = model(**batch)["logits"]
        return [self.labels[number] for number in logits.argmax(-1).tolist()]

    def one(self, sequence: str) -> tuple[dict[str, Tensor], list[str]]:
        """The arguments of the model for one sequence, and its tokens as people read them."""
        row = self._row(sequence)
        named = {number: token for token, number in self.vocabulary.items()} | {self.vocabulary[UNKNOWN]: "?"}
        return {"ids": row[None]}, [named[number] for number in row.tolist()]

    def arrange(self, model: nn.Module, ids: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        """Sequences as they are: the tokenizer puts the class token before them."""
        return {"ids": ids, "lengths": lengths}

    def save(self, folder: Path) -> None:
        """Write the tokens as tokenizer.json, for sequences that people type."""
        first = CLASS if self.pooling == "first" else None
        names = {"unk_token": UNKNOWN, "cls_token": CLASS}
        text.save_tokenizer(self.tokenizer, folder, self.max_tokens + 1, names, begins_with=first)

    def _examples(self, pairs: list[tuple[str, str]]) -> Examples:
        labels = self.numbers([name for name, _ in pairs])
        rows = [self._ids(sequence) for _, sequence in pairs]
        return Examples([len(row) for row in rows], lambda index, _: (rows[index], labels[index]))

    def _row(self, sequence: str) -> Tensor:
        return self._ids(clean_sequence(sequence.strip(), repr(sequence[:40])))

    def _ids(self, sequence: str) -> Tensor:
        starts = range(0, min(len(sequence), self.word * self.max_tokens), self.word)
        unknown = self.vocabulary[UNKNOWN]
        ids = [self.vocabulary.get(sequence[start : start + self.word], unknown) for start in starts]
        if not ids:
            raise ValueError("sequence: expected at least one base, got none")
        return torch.tensor([self.vocabulary[CLASS], *ids] if self.pooling == "first" else ids)

    def _padded(self, rows: list[Tensor]) -> dict[str, Tensor]:
        lengths = torch.tensor([len(row) for row in rows])
        batch = {"ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)}
        return batch if bool((lengths == lengths[0]).all()) else batch | {"lengths": lengths}


def attention_panels(
    folder: str | Path, sequences: Sequence[str], classes: Sequence[str], device: str | None = None
) -> tuple[str, list[tuple[str, Along, list[str]]]]:
    """Where each head of a trained model looks along each sequence, for ``manyheads predict --draw``.

    A title, and for each sequence its class and beginning, the attention along it, and its tokens.
    """
    task, model = tasks.load(folder, device)
    if not isinstance(task, DNA):
        raise ValueError(f"draw: {task.name} reads no sequences of bases; leave the option out")
    by_first = task.pooling == "first"
    panels = []
    for sequence, label in zip(sequences, classes, strict=True):
        batch, letters = task.one(sequence)
        with evaluating(model):
            attention = along(model, [to_device(batch, device_of(model))], query=0 if by_first else None)
        panels.append((f"{label}: {sequence[:100]}", attention, letters))
    return f"{folder}: where {'the class token looks' if by_first else 'all tokens look on average'}", panels


def word_tokenizer(length: int) -> Tokenizer:
    """A tokenizer of DNA: words of ``length`` bases, and a shorter one at the end.

    >>> tokenizer = word_tokenizer(3)
    >>> tokenizer.encode("acgttNAC").tokens, tokenizer.get_vocab_size()
    (['ACG', '<unknown>', 'AC'], 86)
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    bases = ["".join(word) for size in range(1, length + 1) for word in product(BASES, repeat=size)]
    vocabulary = {token: number for number, token in enumerate([CLASS, UNKNOWN, *bases])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    capitals = [normalizers.Replace(letter, letter.upper()) for letter in BASES.lower()]
    rna = [normalizers.Replace(letter, "T") for letter in "uU"]
    tokenizer.normalizer = normalizers.Sequence([*capitals, *rna])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"\S{{1,{length}}}"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([CLASS, UNKNOWN])
    return tokenizer


def planted(number: int, length: int = LENGTH) -> list[tuple[str, str]]:
    """Random sequences with planted motifs, the same every time: ``(class, sequence)``.

    The motifs are the two of bacterial promoters, each near its usual position: it begins up to three bases
    later, and one in twenty of its bases is another one. The class names the motifs that are there.

    >>> planted(3)[2][0], len(planted(3)[2][1])
    ('none', 60)
    """
    random = torch.Generator().manual_seed(0)
    pairs = []
    for _ in range(number):
        letters = [BASES[i] for i in torch.randint(4, (length,), generator=random).tolist()]
        there = [motif for motif in MOTIFS if int(torch.randint(2, (), generator=random))]
        for motif in there:
            start = MOTIFS[motif] + int(torch.randint(JITTER, (), generator=random))
            unchanged = (torch.rand(len(motif), generator=random) >= CHANGED).tolist()
            for position, (base, stays) in enumerate(zip(motif, unchanged, strict=True), start):
                letters[position] = base if stays else letters[position]
        pairs.append((" ".join(there) or "none", "".join(letters)))
    return pairs
