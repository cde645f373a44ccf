"""Probe texts that show what heads do: random tokens that come twice, a key planted in a long text."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from manyheads.common.labelled_batch import without_labels
from manyheads.common.types import Batch
from manyheads.heads.roles.attention_rows import Facts
from manyheads.models.text_config import positions_of, text_config, vocabulary_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The number of random tokens in one copy, and of sequences of each. Several lengths: a head that looks back
# by a fixed number of tokens does not pass for one that finds the same token.
COPIES = (23, 37, 53)
SEQUENCES = 4
# Tokens of the text around a planted key; the number of texts; tokens of the key, and of what follows it.
TEXT = 1024
PLANTED = 16
KEY, ANSWER = 3, 8
# Tokens around a key that make a long text.
LONG = 64
_SPECIAL = ("bos", "eos", "pad", "sep", "cls", "mask", "unk", "decoder_start")


@dataclass(frozen=True, eq=False)
class BatchFacts:
    """Facts about the user's batches and the model, to make further batches like them.

    ids: the token ids of each batch (sequences, length) with its padding as -1; empty without tokens.
    like: a batch to copy the form of.
    prefix, suffix: special tokens that every sequence begins and ends with.
    context: the most tokens of a text in which a key is planted.
    """

    ids: list[Tensor]
    like: Batch
    vocabulary: int
    special: Tensor
    prefix: list[int]
    suffix: list[int]
    positions: int | None
    context: int = TEXT

    @property
    def frequencies(self) -> Tensor | None:
        """(vocabulary,) how often each id occurs."""
        if not self.ids:
            return None
        every = torch.cat([ids[ids >= 0].flatten() for ids in self.ids])
        return torch.bincount(every, minlength=self.vocabulary).to(torch.float32)

    @property
    def ordinary(self) -> Tensor:
        """Every id that is not a special token."""
        every = torch.arange(self.vocabulary)
        return every[~torch.isin(every, self.special)]

    @property
    def pads(self) -> bool:
        """Whether padding can be hidden from the model."""
        return isinstance(self.like, Mapping) and "attention_mask" in self.like

    def batch(self, ids: Tensor) -> Batch:
        """Token ids (sequences, length) in the form of the user's batches; -1 is padding."""
        return _like(self.like, ids)


def read_batch_facts(
    model: nn.Module, batches: Sequence[Batch], tokenizer: PreTrainedTokenizerBase | None
) -> BatchFacts:
    """Look at the batches: where their token ids are, and which of those are special."""
    config = text_config(model)
    special = set(getattr(tokenizer, "all_special_ids", None) or [])
    if not special:
        named = (getattr(config, f"{name}_token_id", None) for name in _SPECIAL)
        special = {number for number in named if isinstance(number, int)}
    ids = [token_ids for batch in batches if (token_ids := ids_without_padding(batch)) is not None]
    vocabulary = vocabulary_of(model) or 0
    if ids:
        vocabulary = max(vocabulary, 1 + max(int(x.max()) for x in ids))
    return BatchFacts(
        ids,
        batches[0],
        vocabulary,
        torch.tensor(sorted(special), dtype=torch.long),
        _common(ids, special, first=True),
        _common(ids, special, first=False),
        positions_of(model),
    )


def ids_without_padding(batch: Batch) -> Tensor | None:
    """The token ids (sequences, length) of a batch on the CPU, -1 for padding; None when it holds none.

    >>> mask = torch.tensor([[1, 1, 0]])
    >>> ids_without_padding({"input_ids": torch.tensor([[7, 8, 0]]), "attention_mask": mask})
    tensor([[ 7,  8, -1]])
    >>> ids_without_padding(torch.randn(2, 3, 4))
    """
    mask = None
    if isinstance(batch, Mapping):
        ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    elif isinstance(batch, tuple | list):
        ids = batch[0] if batch else None
    else:
        ids = batch
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or not ids.numel():
        return None
    ids = ids.cpu().long()
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        ids = ids.masked_fill(mask.cpu() == 0, -1)
    return ids


def _common(ids: Iterable[Tensor], special: set[int], first: bool) -> list[int]:
    """The special token that every sequence begins (or ends) with, if there is one."""
    ends = set()
    for batch in ids:
        for row in batch:
            real = row[row >= 0]
            if real.numel():
                ends.add(int(real[0 if first else -1]))
    return sorted(ends) if len(ends) == 1 and ends <= special else []


def _like(batch: Batch, ids: Tensor) -> Batch:
    if isinstance(batch, Tensor):
        return ids.clamp(min=0).to(batch.device)
    if isinstance(batch, tuple | list):
        if any(
            not isinstance(x, Tensor) or x.shape != batch[0].shape or x.is_floating_point() for x in batch
        ):
            raise ValueError("a batch holds more than token ids, and only token ids can be made up")
        masks = [bool((x <= 1).all()) for x in batch]
        parts = zip(masks, batch, strict=True)
        return tuple((ids >= 0).to(x) if mask else ids.clamp(min=0).to(x.device) for mask, x in parts)
    filled = {}
    for name, value in without_labels(batch).items():
        if name.endswith("input_ids"):
            filled[name] = ids.clamp(min=0).to(value.device)
        elif name.endswith("attention_mask"):
            filled[name] = (ids >= 0).to(value)
        elif isinstance(value, Tensor) and name not in ("token_type_ids", "position_ids"):
            raise ValueError(f"the batches hold {name!r}, which cannot be made up")
        elif not isinstance(value, Tensor):
            filled[name] = value
    return filled


def repeated(batch_facts: BatchFacts) -> Iterator[tuple[Batch, Facts]]:
    """Batches of random tokens, all different, that come twice; the same ones every time."""
    generator = torch.Generator().manual_seed(0)
    ordinary, before = batch_facts.ordinary, len(batch_facts.prefix)
    room = min(len(ordinary), ((batch_facts.positions or 10**9) - before - len(batch_facts.suffix)) // 2)
    if room < 4:
        raise ValueError(f"{max(room, 0)} different random tokens fit twice; 4 are needed")
    for length in sorted({min(length, room) for length in COPIES}):
        copies = torch.stack(
            [ordinary[torch.randperm(len(ordinary), generator=generator)[:length]] for _ in range(SEQUENCES)]
        )
        ids = _add_special_tokens(batch_facts, torch.cat([copies, copies], 1))
        second = before + length
        same = torch.full_like(ids, -1)
        same[:, second : second + length] = torch.arange(before, second)
        after = torch.full_like(ids, -1)
        after[:, second : second + length - 1] = torch.arange(before + 1, second)
        facts = Facts(
            special=batch_facts.special,
            targets={"duplicate": same, "induction": after},
            copy=range(before, second),
            begin=second,
        )
        yield batch_facts.batch(ids), facts


def planted(batch_facts: BatchFacts) -> Iterator[tuple[Batch, Facts]]:
    """A long text with random tokens planted in it, the first of which come again at its end."""
    generator = torch.Generator().manual_seed(1)
    text = torch.cat([ids.flatten() for ids in batch_facts.ids])
    text = text[(text >= 0) & ~torch.isin(text, batch_facts.special)]
    extra = 2 * (KEY + ANSWER) - 1 + len(batch_facts.prefix) + len(batch_facts.suffix)
    length = min(len(text), batch_facts.context - extra, (batch_facts.positions or 10**9) - extra)
    if length < LONG:
        raise ValueError(f"only {max(length, 0)} tokens of text fit around a key, and {LONG} are needed")
    unused = batch_facts.ordinary[~torch.isin(batch_facts.ordinary, text.unique())]
    if len(unused) < KEY + ANSWER:
        raise ValueError(
            f"the text leaves {len(unused)} tokens of the vocabulary unused, and a key needs {KEY + ANSWER}"
        )
    for number in range(PLANTED):
        start = int(torch.randint(len(text) - length + 1, (1,), generator=generator))
        context = text[start : start + length]
        secret = unused[torch.randperm(len(unused), generator=generator)[: KEY + ANSWER]]
        depth = (2 * number + 1) * length // (2 * PLANTED)
        ids = _add_special_tokens(
            batch_facts, torch.cat([context[:depth], secret, context[depth:], secret[:-1]]).unsqueeze(0)
        )
        target = torch.full_like(ids, -1)
        second_key = (
            len(batch_facts.prefix) + length + 2 * KEY + ANSWER - 1
        )  # the last token of the key, the second time
        answer = len(batch_facts.prefix) + depth + KEY
        target[0, second_key : second_key + ANSWER] = torch.arange(answer, answer + ANSWER)
        yield (
            batch_facts.batch(ids),
            Facts(special=batch_facts.special, targets={"retrieval": target}, begin=second_key),
        )


def _add_special_tokens(batch_facts: BatchFacts, ids: Tensor) -> Tensor:
    """Ids (sequences, length) between the special tokens that sequences begin and end with."""
    ends = (
        torch.tensor(part, dtype=torch.long).expand(len(ids), -1)
        for part in (batch_facts.prefix, batch_facts.suffix)
    )
    before, behind = ends
    return torch.cat([before, ids, behind], 1)


def separators(batch_facts: BatchFacts, tokenizer: PreTrainedTokenizerBase | None) -> Tensor | None:
    """The ids in the batches that are special tokens or nothing but punctuation; None without a tokenizer."""
    if tokenizer is None or not hasattr(tokenizer, "decode") or not batch_facts.ids:
        return None
    used_ids = torch.cat([ids.flatten() for ids in batch_facts.ids]).unique().tolist()
    special = set(batch_facts.special.tolist())
    chosen = [
        number
        for number in used_ids
        if number >= 0 and (number in special or _stops(str(tokenizer.decode([number]))))
    ]
    return torch.tensor(chosen, dtype=torch.long)


def _stops(text: str) -> bool:
    """Whether a text is punctuation or a line break.

    >>> [_stops(text) for text in (" ,", "\\n", "a.", " ", "##")]
    [True, True, False, False, True]
    """
    written = text.strip()
    return "\n" in text if not written else all(unicodedata.category(mark)[0] == "P" for mark in written)
