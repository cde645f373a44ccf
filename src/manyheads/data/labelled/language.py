"""Texts that are predicted: language models, causal and masked, chats, and models of encoder and decoder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.common.intervals import Interval
from manyheads.common.labelled_batch import LabelledBatch, without_labels
from manyheads.common.types import Keywords, ModelOutput
from manyheads.data.batches import padded
from manyheads.data.labelled import metrics as measured
from manyheads.data.labelled.columns import Customs
from manyheads.data.labelled.losses import IGNORED, token_cross_entropy
from manyheads.data.labelled.task import Example, Part, Task, label_counts, stacked
from manyheads.data.labelled.texts import TEXTS
from manyheads.data.readers.records import Record, is_missing
from manyheads.data.text_lines import pieces

HIDDEN = 0.15  # of the tokens, for masked language models
MORE_TOKENS = 8  # that a generated text may have beyond the longest right one


class PredictedTokens(Task):
    """What is common to tasks that predict tokens: perplexity, and how often the likeliest token is right."""

    measure = "perplexity"

    def aligned(self, result: ModelOutput, batch: Keywords) -> tuple[Tensor, Tensor]:
        """Logits (batch, tokens, vocabulary) and the labels (batch, tokens) that they predict."""
        return result["logits"], batch["labels"]

    def loss(self, result: ModelOutput, batch: Keywords) -> Tensor:
        """Cross-entropy of each predicted token."""
        return token_cross_entropy(*self.aligned(result, batch))

    def scores(self, result: object, batch: LabelledBatch) -> Tensor:
        """The mean cross-entropy of a sequence, weighted by its predicted tokens."""
        return stacked(self.loss(result, batch), label_counts(self.aligned(result, batch)[1]))

    def parts(self, model: nn.Module, result: object, batch: LabelledBatch) -> list[Part]:
        """(sum of cross-entropies, right tokens, tokens)."""
        logits, labels = self.aligned(result, batch)
        count = label_counts(labels)
        right = ((logits.argmax(-1) == labels) & (labels >= 0)).sum(1)
        columns = self.loss(result, batch).double() * count, right, count
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def metrics(self, parts: Sequence[Part]) -> dict[str, Interval]:
        """Perplexity, and the accuracy of tokens."""
        summed, right, count = zip(*(part[:3] for part in parts), strict=True)
        loss = measured.ratio(summed, count)
        mean, low, high = (math.exp(min(end, 700.0)) for end in (loss.mean, loss.low, loss.high))
        return {"perplexity": Interval(mean, low, high, loss.count), "accuracy": measured.ratio(right, count)}


CONVERSATIONS = ("messages", "conversation", "conversations", "chat")


class NextTokens(PredictedTokens):
    """Causal language models: texts; prompts with their completions; or conversations.

    Of a prompt and its completion, and of a conversation, only the last answer is predicted; an instruct
    model reads them in its chat template.
    """

    kind = "causal language modelling"
    customs = Customs(
        (*((name,) for name in CONVERSATIONS), ("prompt",), ("instruction",), *((name,) for name in TEXTS)),
        ("completion", "response", "output", "answer", "chosen"),
        needs_label=False,
    )

    def encode(self, records: Sequence[Record]) -> list[Example]:
        """Texts in pieces that fit, or one example for each conversation."""
        column, label = self.reading.columns.inputs[0], self.reading.columns.label
        is_chat = any(isinstance(row.values[column], list | tuple) for row in records)
        if label is None and not is_chat:
            return self._texts(records)
        rows = self.labelled_rows(records)
        template = getattr(self.tokenizer(), "chat_template", None)
        examples = [self._answered(row, column, bool(template)) for row in rows]
        kept = [example for example in examples if example is not None]
        self.note_left_out(len(rows) - len(kept), len(rows), "have their answer behind the cut and are")
        if not kept:
            raise ValueError(f"data: no answer of {self.reading.table.what} is in what the model can read")
        how = (
            "in the model's chat template"
            if template
            else "as plain text: the tokenizer has no chat template"
        )
        self.notes.append(f"prompts and answers are read {how}; the answers are predicted")
        self.note_cut()
        return kept

    def _texts(self, records: Sequence[Record]) -> list[Example]:
        tokenizer, examples, empty = self.tokenizer(), [], 0
        for row in records:
            text = self.reading.texts(row)[0]
            parts = (
                [ids for ids in pieces(tokenizer, text, self.reading.length) if len(ids) > 1] if text else []
            )
            empty += not parts
            examples += [Example({"input_ids": ids}, ids, None, len(ids)) for ids in parts]
        self.note_left_out(empty, len(records), "have less than two tokens and are")
        if not examples:
            raise ValueError(
                f"data: no text of {self.reading.table.what} has two tokens; expected some words"
            )
        if getattr(tokenizer, "chat_template", None):
            self.notes.append(
                "the texts are read as they are, without the model's chat template; a column of "
                "messages, or of prompts and completions, is read with it"
            )
        return examples

    def _answered(self, row: Record, column: str, template: bool) -> Example | None:
        turns = self._turns(row, column)
        tokenizer: Any = self.tokenizer()
        if template:
            plain = {"tokenize": True, "return_dict": False}
            prompt = list(tokenizer.apply_chat_template(turns[:-1], add_generation_prompt=True, **plain))
            ids = list(tokenizer.apply_chat_template(turns, **plain))
            if ids[: len(prompt)] != prompt:  # a template that writes prompts otherwise before an answer
                ids = prompt + list(tokenizer(turns[-1]["content"], add_special_tokens=False)["input_ids"])
        else:
            prompt = list(
                tokenizer("\n".join(turn["content"] for turn in turns[:-1]), verbose=False)["input_ids"]
            )
            end = tokenizer.eos_token_id
            prompt = prompt[:-1] if prompt and prompt[-1] == end else prompt
            ids = prompt + list(
                tokenizer(turns[-1]["content"], add_special_tokens=False, verbose=False)["input_ids"]
            )
        self._read += 1
        length = self.reading.length
        if length is not None and len(ids) > length:
            self._cut += 1
            ids = ids[:length]
        if len(ids) <= max(1, len(prompt)):
            return None
        start = max(1, len(prompt))
        target = [IGNORED] * start + ids[start:]
        return Example({"input_ids": ids}, target, None, len(ids), turns[-1]["content"])

    def _turns(self, row: Record, column: str) -> list[dict[str, str]]:
        """The turns of a row's conversation, of which the last is the assistant's."""
        value = row.values[column]
        if not isinstance(value, list | tuple):
            answer = self.reading.cell(row).value
            return [
                {"role": "user", "content": "" if is_missing(value) else str(value)},
                {"role": "assistant", "content": str(answer)},
            ]
        turns = [dict(turn) for turn in value if isinstance(turn, Mapping)]
        proper = all(isinstance(turn.get("content"), str) and turn.get("role") for turn in turns)
        while turns and proper and turns[-1]["role"] != "assistant":
            turns.pop()
        if not proper or len(turns) < 2:
            raise ValueError(
                f"data: {row.where} of {self.reading.table.what} has no conversation in {column!r}; "
                "expected turns "
                '{"role": "user", "content": "..."} with an answer from the role assistant'
            )
        return turns

    def collate(self, examples: Sequence[Example]) -> Keywords:
        """Padded ids and (batch, length) labels, -100 for what is not predicted."""
        labels = padded([example.target for example in examples], IGNORED)[0]
        return {**self.padded_inputs(examples), "labels": labels}

    def aligned(self, result: ModelOutput, batch: Keywords) -> tuple[Tensor, Tensor]:
        """Each position predicts the next token."""
        return result["logits"][:, :-1], batch["labels"][:, 1:]


class HiddenTokens(PredictedTokens):
    """Masked language models: 15% of the tokens of each text are hidden, the same every time."""

    kind = "masked language modelling"
    customs = Customs(tuple((name,) for name in TEXTS), needs_label=False)

    def encode(self, records: Sequence[Record]) -> list[Example]:
        """Texts in pieces that fit, with some tokens hidden."""
        tokenizer = self.tokenizer()
        mask = tokenizer.mask_token_id
        if mask is None:
            raise ValueError(
                "data: the tokenizer has no mask token; expected that of a masked language model"
            )
        generator = torch.Generator().manual_seed(0)
        special = set(tokenizer.all_special_ids)
        examples = []
        for row in records:
            text = self.reading.texts(row)[0]
            for ids in pieces(tokenizer, text, self.reading.length) if text else []:
                words = [i for i, token in enumerate(ids) if token not in special]
                if not words:
                    continue
                drawn = torch.rand(len(words), generator=generator)
                hidden = {i for i, x in zip(words, drawn.tolist(), strict=True) if x < HIDDEN}
                hidden = hidden or {words[int(drawn.argmin())]}
                masked = [mask if i in hidden else token for i, token in enumerate(ids)]
                target = [token if i in hidden else IGNORED for i, token in enumerate(ids)]
                examples.append(Example({"input_ids": masked}, target, None, len(ids)))
        if not examples:
            raise ValueError(
                f"data: no text of {self.reading.table.what} has a token to hide; expected some words"
            )
        self.notes.append(
            f"{HIDDEN:.0%} of the tokens are hidden, at least one of each text, drawn with the seed 0"
        )
        return examples

    collate = NextTokens.collate


PAIRS = (
    ("source", "target"),
    ("article", "highlights"),
    ("document", "summary"),
    ("dialogue", "summary"),
    ("text", "summary"),
    ("input", "target"),
    ("input", "output"),
    ("question", "answer"),
)


class WrittenTexts(PredictedTokens):
    """Models of encoder and decoder: a text is written from another one."""

    kind = "sequence to sequence"
    customs = Customs(
        tuple((name,) for name in (*dict.fromkeys(first for first, _ in PAIRS), *TEXTS)),
        (*dict.fromkeys(second for _, second in PAIRS), "translation", "label", "labels"),
    )

    def encode(self, records: Sequence[Record]) -> list[Example]:
        """One example for each row."""
        examples = [self._example(row) for row in self.labelled_rows(records)]
        self.note_cut()
        return examples

    def _example(self, row: Record) -> Example:
        encoded = self.tokens(self.reading.texts(row)[0])
        return self.with_target(self.kept_arguments(encoded), len(encoded["input_ids"]), row)

    def with_target(self, inputs: Keywords, size: int, row: Record) -> Example:
        """An example of these inputs, and of the text that a row has as its label."""
        text = str(self.reading.cell(row).value)
        target = list(self.tokens(text_target=text)["input_ids"])
        # a padded query of a decoder still attends to the encoder, and would count there
        return Example(inputs, target, text, size, text, (size, len(target)))

    def collate(self, examples: Sequence[Example]) -> Keywords:
        """Padded ids, and what the decoder reads and writes."""
        return {**self.padded_inputs(examples), **self.decoder(examples)}

    def decoder(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """What the decoder reads, which is what it writes one token later."""
        labels, real = padded([example.target for example in examples], IGNORED)
        start = torch.full_like(labels[:, :1], self.reading.loaded.start or 0)
        before = torch.cat([start, labels[:, :-1]], 1)
        read = before.masked_fill(before == IGNORED, self.padding)
        batch = {"decoder_input_ids": read, "labels": labels}
        if "decoder_attention_mask" in self._arguments:
            batch["decoder_attention_mask"] = real
        return batch

    def parts(self, model: nn.Module, result: ModelOutput, batch: LabelledBatch) -> list[Part]:
        """(sum of cross-entropies, right tokens, tokens, written text, right text)."""
        written = self.written(model, batch)
        numbers = super().parts(model, result, batch)
        rows = zip(numbers, written, batch.examples, strict=True)
        return [(*part, text, example.truth) for part, text, example in rows]

    def written(self, model: Any, batch: LabelledBatch) -> list[str]:
        """What the model writes, greedily."""
        if not hasattr(model, "generate"):
            raise ValueError("model: it cannot generate a text; expected one of transformers with generate()")
        inputs = {name: x for name, x in without_labels(batch).items() if not name.startswith("decoder_")}
        most = batch["labels"].shape[1] + MORE_TOKENS
        ids = model.generate(**inputs, max_new_tokens=most, num_beams=1, do_sample=False)
        texts = self.tokenizer().batch_decode(ids, skip_special_tokens=True)
        return [str(text).strip() for text in texts]

    def metrics(self, parts: Sequence[Part]) -> dict[str, Interval]:
        """BLEU and chrF of what is written, exact matches, perplexity of the right texts."""
        written, right = ([part[side] for part in parts] for side in (3, 4))
        return {
            "bleu": measured.translation_score(right, written, "BLEU"),
            "chrf": measured.translation_score(right, written, "CHRF"),
            "exact_match": measured.share([a.strip() == b for a, b in zip(right, written, strict=True)]),
            **super().metrics(parts),
        }
