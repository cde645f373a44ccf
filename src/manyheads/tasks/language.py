"""Language modelling: predict the next token, or tokens that were masked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.common.devices import device_of
from manyheads.common.preserved_state import evaluating
from manyheads.data.examples import Example, Examples
from manyheads.data.readers import text as texts
from manyheads.models.config import ModelDescription
from manyheads.nn.generate import generate
from manyheads.nn.transformers import Encoder
from manyheads.tasks.architecture import Architecture, LearnedTokenizer
from manyheads.tasks.next_token_loss import IGNORED
from manyheads.training.options import option
from manyheads.training.task import Data

if TYPE_CHECKING:
    from tokenizers import Tokenizer

HIDDEN, UNKNOWN = "<hidden>", "<unknown>"
# The share of tokens to predict, and of these the share that is replaced at random, or left (as in BERT).
CHOSEN, REPLACED, LEFT = 0.15, 0.1, 0.1
HELD_OUT = 0.1
TOPICS: dict[str, str] = {}  # of the language reference
with suppress(ImportError):  # some builds of Python leave them out
    from pydoc_data.topics import topics

    TOPICS |= topics


class MaskedLanguage(nn.Module):
    """An encoder that predicts the token at every position: the model of masked language modelling.

    Examples
    --------
    >>> model = MaskedLanguage(vocabulary=101, d_model=12, heads=3, layers=2)
    >>> model(torch.randint(101, (2, 7))).shape                       # (batch, length, vocabulary)
    torch.Size([2, 7, 101])
    """

    def __init__(self, vocabulary: int, **options: Any) -> None:
        super().__init__()
        self.encoder = Encoder(vocabulary=vocabulary, **options)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Ids ``(batch, length)`` to logits ``(batch, length, vocabulary)``."""
        assert self.encoder.embedding is not None
        return F.linear(self.encoder(ids, lengths=lengths), self.encoder.embedding.weight, self.bias)


@dataclass(kw_only=True)
class Language(LearnedTokenizer, Architecture):
    """A language model on bytes, characters or byte pairs.

    ``data`` is a text file, a folder of them, or a dataset of the hub with a column ``text``. Default: the
    documents that come with Python's standard library. The last tenth is held out unless ``valid`` is set.

    Examples
    --------
    >>> task = Language(context=16, d_model=12, heads=3, layers=2)
    >>> data = task.open(None)
    >>> batch = task.collate(data.train.take([0, 1]))
    >>> batch["ids"].shape                                            # (batch, context)
    torch.Size([2, 16])
    """

    name: ClassVar[str] = "language"
    metric: ClassVar[str] = "loss"
    higher_is_better: ClassVar[bool] = False
    training: ClassVar[Mapping[str, float | str]] = {
        "steps": 400,
        "batch_tokens": 2048,
        "learning_rate": 2e-3,
        "beta2": 0.99,
        "weight_decay": 0.1,
        "evaluate_examples": 128,
    }

    masked: bool = option(False, "Masked language modelling: predict hidden tokens from both sides.")
    tokens: str = option("characters", "What a token is: bytes, characters or pieces (byte-pair encoding).")
    vocabulary: int = option(2000, "Number of pieces (byte-pair encoding).")
    context: int = option(128, "Length of the context in tokens.")

    def __post_init__(self) -> None:
        if self.tokens not in ("bytes", "characters", "pieces"):
            raise ValueError(f"tokens: expected bytes, characters or pieces, got {self.tokens!r}")
        if self.context < 2:
            raise ValueError(f"context: expected 2 or more, got {self.context}")

    def open(self, data: str | None, valid: str | None = None) -> Data:
        """The text in windows of ``context`` tokens."""
        documents = standard_library() if data is None else texts.read_documents(data)
        text = "\n".join(documents)
        cut = len(text) if valid is not None else int(len(text) * (1 - HELD_OUT))
        if self._tokenizer is None:
            self._tokenizer = self._learn(text[:cut])
        held_out = text[cut:] if valid is None else "\n".join(texts.read_documents(valid))
        notes = [f"{len(text):,} characters, {len(held_out):,} of them held out"] if valid is None else []
        return Data(self.windows(text[:cut], jitter=True), self.windows(held_out, jitter=False), notes)

    def read(self, data: str) -> Examples:
        """All of a text, in windows one after the other."""
        return self.windows("\n".join(texts.read_documents(data)), jitter=False)

    def describe(self) -> ModelDescription:
        """A `Decoder`, or a `MaskedLanguage`."""
        kind = "language.masked" if self.masked else "language.next"
        options = self.of_the_stack(max_length=self.context)
        return {"class": kind, "options": options | {"vocabulary": self.tokenizer.get_vocab_size()}}

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """Ids and labels, ``(batch, context)`` each; the label is `IGNORED` where nothing is predicted."""
        lengths = [len(row) for row, _ in examples]
        ids = torch.zeros(len(examples), max(lengths), dtype=torch.int64)
        labels = torch.full((len(examples), max(lengths)), IGNORED)
        for number, (row, targets) in enumerate(examples):
            ids[number, : len(row)], labels[number, : len(targets)] = row, targets
        batch = {"ids": ids, "labels": labels}
        if min(lengths) < max(lengths):
            batch["lengths"] = torch.tensor(lengths)
        return batch

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Cross-entropy in nats, summed over the tokens to predict."""
        logits = model(**self.inputs(batch))
        labels = batch["labels"].flatten()
        summed = F.cross_entropy(logits.flatten(0, 1).float(), labels, ignore_index=IGNORED, reduction="sum")
        return summed, (labels != IGNORED).sum()

    def measure(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[float, int, int]:
        """Loss, number of tokens, and number of bytes of these tokens."""
        summed, count = self.loss(model, batch)
        labels = batch["labels"][batch["labels"] != IGNORED]
        return summed.item(), int(count), int(self._bytes()[labels.cpu()].sum())

    def metrics(self, parts: list[tuple[float, int, int]]) -> dict[str, float]:
        """Loss per token in nats, perplexity, and (causal models) bits per byte, for any vocabulary."""
        loss, count, size = (sum(column) for column in zip(*parts, strict=True))
        metrics = {"loss": loss / count, "perplexity": math.exp(min(loss / count, 700.0))}
        if not self.masked:
            metrics["bits_per_byte"] = loss / math.log(2) / size
        return metrics

    def predict(
        self,
        model: nn.Module,
        inputs: list[str],
        *,
        new_tokens: int = 200,
        temperature: float | None = 0.8,
        seed: int = 0,
    ) -> list[str]:
        """Continue each text; with a masked model, fill in every ``<hidden>``. Temperature 0 is greedy."""
        device = device_of(model)
        random = torch.Generator(device).manual_seed(seed)
        out = []
        for text in inputs:
            ids = torch.tensor([self.tokenizer.encode(text or "\n").ids], device=device)
            if self.masked:
                out.append(self._fill(model, text, ids))
                continue
            text_ids = ids
            while (remaining := ids.shape[1] + new_tokens - text_ids.shape[1]) > 0:
                # the model reads `context` tokens: when they are full, it continues from the second half
                prompt = text_ids[:, -(self.context // 2) :]
                room = min(remaining, self.context - prompt.shape[1] + 1)
                new_ids = generate(
                    model,  # type: ignore[arg-type]
                    prompt,
                    new_tokens=max(room, 1),
                    temperature=temperature or None,
                    generator=random if temperature else None,
                )
                text_ids = torch.cat([text_ids, new_ids], 1)
            out.append(text + self.tokenizer.decode(text_ids[0, ids.shape[1] :].tolist()))
        return out

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The ids, without the labels."""
        ids = {"ids" if self.masked else "x": batch["ids"]}
        return ids | ({"lengths": batch["lengths"]} if "lengths" in batch else {})

    def arrange(self, model: nn.Module, ids: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        """Texts as they are."""
        return self.inputs({"ids": ids, "lengths": lengths})

    def save(self, folder: Path) -> None:
        """Write the vocabulary as tokenizer.json."""
        names = {"unk_token": UNKNOWN, "mask_token": HIDDEN}
        texts.save_tokenizer(self.tokenizer, folder, self.context, names)

    def _learn(self, text: str) -> Tokenizer:
        special = [HIDDEN, UNKNOWN]
        if self.tokens == "characters":
            return texts.character_tokenizer([text], special)
        return texts.train_bpe(texts.lines_of(text), self.vocabulary, special, merge=self.tokens == "pieces")

    def windows(self, text: str, jitter: bool) -> Examples:
        """Windows of ``context`` tokens; with ``jitter``, each begins at a random position near its own."""
        encoded = self.tokenizer.encode_batch_fast(list(texts.lines_of(text)), add_special_tokens=False)
        ids = torch.tensor([number for line in encoded for number in line.ids])
        ahead = 0 if self.masked else 1
        if len(ids) < 2:
            raise ValueError(f"data: {len(ids)} tokens of text are too few; expected {self.context} or more")
        length = min(self.context, len(ids) - ahead)
        starts = (
            range(0, len(ids) - ahead, length)
            if not jitter
            else range(0, len(ids) - ahead - length + 1, length)
        )

        def make(index: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
            start = starts[index]
            if jitter:
                start += int(torch.randint(length, (1,), generator=random))
                start = min(start, len(ids) - ahead - length)
            if self.masked:
                return self._hide(ids[start : start + length], random)
            window = ids[start : start + length + 1]
            return window[:-1], window[1:]

        return Examples([min(length, len(ids) - ahead - start) for start in starts], make)

    def _hide(self, ids: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Ids with some of them masked, and these as labels; at least one."""
        is_target = torch.rand(len(ids), generator=random) < CHOSEN
        is_target[int(torch.randint(len(ids), (1,), generator=random))] = True
        draw = torch.rand(len(ids), generator=random)
        hidden = torch.where(draw < 1 - REPLACED - LEFT, self.id_of(HIDDEN), ids)
        random_ids = torch.randint(self.tokenizer.get_vocab_size(), (len(ids),), generator=random)
        hidden = torch.where(draw >= 1 - REPLACED, random_ids, hidden)
        return torch.where(is_target, hidden, ids), torch.where(is_target, ids, IGNORED)

    def _fill(self, model: nn.Module, text: str, ids: Tensor) -> str:
        mask = self.id_of(HIDDEN)
        if not bool((ids == mask).any()):
            raise ValueError(f"text: expected {HIDDEN} where the model is to fill in, got {text!r}")
        with evaluating(model), torch.no_grad():
            logits = model(ids)
        logits[..., mask] = -torch.inf
        filled = torch.where(ids == mask, logits.argmax(-1), ids)
        return str(self.tokenizer.decode(filled[0].tolist()))

    def _bytes(self) -> Tensor:
        """The number of bytes of each token, (vocabulary,)."""
        vocabulary = self.tokenizer.get_vocab()
        sizes = torch.zeros(len(vocabulary), dtype=torch.int64)
        for token, number in vocabulary.items():
            sizes[number] = len(token.encode()) if self.tokens == "characters" else len(token)
        return sizes


def standard_library() -> list[str]:
    """The topics of the language reference that come with Python; our own text if they are not installed."""
    if not TOPICS:
        return [resources.files("manyheads").joinpath("data/files/text.txt").read_text(encoding="utf-8")]
    return [TOPICS[name] for name in sorted(TOPICS)]
