"""answer: what a model says about an input, in words: next tokens, a filled mask, a class, a translation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import torch
from torch import Tensor, nn

from manyheads.common.devices import device_of
from manyheads.common.labelled_batch import without_labels
from manyheads.common.types import Batch
from manyheads.heads.importance.losses import causal, classification, fitting, masked, seq2seq
from manyheads.heads.model_outputs import is_span, main_tensor, read
from manyheads.heads.observer import Forward, moved, observed
from manyheads.models.task_head import class_names, task_kind
from manyheads.nn.generate import generate
from manyheads.nn.transformers import Seq2Seq

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOP = 5
LONGEST_ANSWER = 30  # tokens of an answer that is a part of the input
WRITTEN = 48  # tokens of a translation, at most
SAME = 1e-6  # a sentence this near is the input itself
_IDS = ("input_ids", "ids", "x", "source")
_SEEN = {"\n": "⏎", "\r": "⏎", "\t": "⇥"}


Item = list[str | float]  # a text, and its probability or cosine


class Answer(TypedDict):
    """What a model says about an input, as the page shows it; see `answer`."""

    kind: str
    items: list[Item]
    place: NotRequired[int]


@dataclass(frozen=True, eq=False)
class Sentences:
    """Sentences to find the neighbours of an input among: texts, and the same in batches for the model.

    embeddings: (texts, width) as the model gives them, where they were computed before.
    """

    texts: Sequence[str]
    batches: Sequence[Batch]
    embeddings: Tensor | None = None


def kind_of(model: nn.Module, batch: Batch) -> str | None:
    """What a model says about a batch: ``next``, ``mask``, ``class``, ``amount``, ``answer``,
    ``transcript``, ``translation`` or ``neighbours``; None for outputs that cannot be put into words.

    The batch needs two tokens or more: one token alone does not show whether attention is causal.

    Examples
    --------
    >>> from manyheads.nn.transformers import Decoder, Encoder
    >>> kind_of(Decoder(12, heads=3, layers=1, vocabulary=101), torch.randint(101, (1, 5)))
    'next'
    >>> kind_of(Encoder(d_model=12, heads=3, layers=1, vocabulary=101), torch.randint(101, (1, 5)))
    'neighbours'
    """
    device = device_of(model)
    with observed(model) as observer:
        forward = observer.forward(next(iter(moved([batch], device))))
        loss = fitting(forward.result, model, observer.sites)
    if is_span(forward.result):
        return "answer" if ids_of(batch) is not None else None
    value = main_tensor(forward.result)[1]
    if task_kind(model) == "ctc":
        return "transcript" if value.dim() == 3 else None
    if forward.output.amounts:
        return "amount"
    if loss is seq2seq:
        return "translation" if _writes(model) else None
    if loss is causal:
        return "next"
    if loss is masked and value.dim() == 3:
        return "mask" if value.shape[-1] == _vocabulary(model) else "class"
    if loss is classification or "logits" in (forward.result if isinstance(forward.result, Mapping) else ()):
        return "class" if value.dim() == 2 else None
    return "neighbours" if ids_of(batch) is not None else None


def answer(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase | None,
    batch: Batch,
    *,
    kind: str | None = None,
    sentences: Sentences | None = None,
    result: object = None,
    top: int = TOP,
) -> Answer | None:
    """What the model says about the first sequence of a batch: ``{"kind": ..., "items": [[text, number]]}``.

    Under `silence` it is what the model says without those heads.

    Parameters
    ----------
    model: any torch.nn.Module; run in eval mode, without gradients.
    tokenizer: the one that encoded the batch, to turn ids into words; None for images.
    batch: as the model takes it.
    kind: as `kind_of` returns it; without it, the model runs once more to find out.
    sentences: to look for neighbours among.
    result: what the model returned for this batch, of one sequence without padding, if it has run already.
    top: how many items, at most.

    Returns
    -------
    Items, the likeliest first: ``next`` and ``mask`` tokens, ``class`` labels, and parts of the input that
    are the ``answer`` to a question, with probabilities; the ``amount`` of a regression; the nearest
    ``neighbours`` with cosines; one ``translation`` or ``transcript`` with the mean probability of its tokens
    (the geometric one). For ``mask``, ``"place"`` is the position of the token that was filled in: the first
    masked one, or else the last word, which is then masked. None where the output cannot be put into words.

    Examples
    --------
    >>> from manyheads.models import embedded
    >>> model, tokenizer = embedded.load()
    >>> texts = ["Bread is baked in an oven.", "The train left the station.", "A violin has four strings."]
    >>> sentences = Sentences(texts, [tokenizer(texts, padding=True, return_tensors="pt")])
    >>> batch = tokenizer("We took the railway.", return_tensors="pt")
    >>> reply = answer(model, tokenizer, batch, sentences=sentences)
    >>> reply["kind"], reply["items"][0][0]
    ('neighbours', 'The train left the station.')
    """
    device = device_of(model)
    batch = next(iter(moved([batch], device)))
    kind = kind or kind_of(model, batch)
    with torch.no_grad():
        if kind == "translation" and isinstance(batch, Mapping):
            return {"kind": kind, "items": [_translation(model, tokenizer, batch)]}
        with observed(model) as observer:

            def forward_of(inputs: Batch) -> Forward:
                if result is None or inputs is not batch:
                    return observer.forward(inputs)
                return Forward(result, read(result, model), None, {})

            if kind == "next":
                forward = forward_of(batch)
                logits = forward.output.value[0, _last(forward)]
                return {"kind": kind, "items": likeliest(logits, tokenizer, top)}
            if kind == "mask":
                masked_batch, position = hidden(batch, tokenizer)
                if position is None or tokenizer is None:
                    return None
                logits = forward_of(masked_batch).output.value[0, position].clone()
                logits[tokenizer.mask_token_id] = -torch.inf
                return {"kind": kind, "items": likeliest(logits, tokenizer, top), "place": position}
            ids = ids_of(batch)
            if kind == "answer" and ids is not None:
                named = forward_of(batch).output.named
                both = named["start_logits"][0], named["end_logits"][0]
                return {"kind": kind, "items": span_items(*both, ids[0], tokenizer, top)}
            if kind in ("class", "amount", "transcript"):
                logits = main_tensor(forward_of(batch).result)[1][0]
                return {"kind": kind, "items": output_items(kind, model, logits, tokenizer, ids, top=top)}
            if kind == "neighbours" and sentences is not None:
                embedding = forward_of(batch).output.value[:1]
                others = sentences.embeddings
                if others is None:
                    parts = [observer.forward(each).output.value for each in moved(sentences.batches, device)]
                    others = torch.cat(parts)
                return {"kind": kind, "items": nearest(embedding, others, sentences.texts, top)}
    return None


def shown(text: str) -> str:
    """A token's text with visible signs for line breaks, tabs and lone spaces.

    >>> [shown(text) for text in (" cat", " ", "a\\n")]
    [' cat', '␣', 'a⏎']
    """
    for character, sign in _SEEN.items():
        text = text.replace(character, sign)
    return text if text.strip() else "␣" * len(text)


def likeliest(logits: Tensor, tokenizer: PreTrainedTokenizerBase | None, top: int) -> list[Item]:
    """The most probable tokens of logits (vocabulary,)."""
    probabilities, ids = logits.float().softmax(-1).topk(min(top, logits.shape[-1]))
    pairs = zip(ids.tolist(), probabilities.tolist(), strict=True)
    return [[token(tokenizer, number), round(p, 6)] for number, p in pairs]


def token(tokenizer: PreTrainedTokenizerBase | None, number: int) -> str:
    """One token as text; its own name where it is only a part of a character.

    >>> token(None, 7)
    '7'
    """
    if tokenizer is None:
        return str(number)
    text = str(tokenizer.decode([number])) if hasattr(tokenizer, "decode") else ""
    if (not text or "\ufffd" in text) and hasattr(tokenizer, "convert_ids_to_tokens"):
        text = str(tokenizer.convert_ids_to_tokens(number))
    return shown(text) or str(number)


def _last(forward: Forward) -> int:
    """The position of the first sequence's last token."""
    if forward.output.real is None:
        return -1
    real = forward.output.real if forward.real is None else forward.real
    return int(real[0].nonzero()[-1])


def hidden(batch: Batch, tokenizer: PreTrainedTokenizerBase | None) -> tuple[Batch, int | None]:
    """The batch with a masked token in its first sequence, and its position; None if none can be masked."""
    ids, mask = ids_of(batch), getattr(tokenizer, "mask_token_id", None)
    if ids is None or mask is None:
        return batch, None
    positions = (ids[0] == mask).nonzero()
    if len(positions):
        return batch, int(positions[0])
    special = set(getattr(tokenizer, "all_special_ids", None) or [])
    # the last word, not the full stop after it
    ordinary = [i for i, number in enumerate(ids[0].tolist()) if number not in special]
    words = [i for i in ordinary if any(map(str.isalnum, token(tokenizer, int(ids[0, i]))))] or ordinary
    if not words:
        return batch, None
    changed = ids.clone()
    changed[0, words[-1]] = mask
    if isinstance(batch, Mapping):
        return {name: changed if item is ids else item for name, item in batch.items()}, words[-1]
    items = [changed if item is ids else item for item in batch] if not isinstance(batch, Tensor) else changed
    return items, words[-1]


def output_items(
    kind: str,
    model: nn.Module,
    logits: Tensor,
    tokenizer: PreTrainedTokenizerBase | None,
    ids: Tensor | None,
    positions: Sequence[int] | None = None,
    top: int = TOP,
) -> list[Item]:
    """What logits of one input say: its classes or amounts, the classes of its tokens, or a transcript.

    Logits are (classes,) or (tokens, classes); ``positions`` are the tokens to name, `telling_tokens` by
    default.
    """
    if kind == "transcript":
        return [transcript(model, logits, tokenizer)]
    if logits.dim() == 1:
        return class_items(model, logits, top)
    if ids is None or ids.shape[1] != len(logits):
        return []
    labels = class_names(model)
    positions = telling_tokens(logits, tokenizer, ids, top) if positions is None else positions
    best, chosen = (x.tolist() for x in logits.float().softmax(-1).max(-1))
    names = {i: f"{token(tokenizer, int(ids[0, i]))}: {labels.get(chosen[i], chosen[i])}" for i in positions}
    return [[name, round(best[i], 6)] for i, name in names.items()]


def telling_tokens(
    logits: Tensor, tokenizer: PreTrainedTokenizerBase | None, ids: Tensor, top: int = TOP
) -> list[int]:
    """The first tokens whose class is not the most frequent one; the first words where all have the same.

    >>> telling_tokens(torch.tensor([[2.0, 0.0], [0.0, 2.0], [2.0, 0.0]]), None, torch.tensor([[5, 6, 7]]))
    [1]
    """
    chosen = logits.argmax(-1).tolist()
    usual = Counter(chosen).most_common(1)[0][0]
    special = set(getattr(tokenizer, "all_special_ids", None) or [])
    ordinary = [i for i, number in enumerate(ids[0].tolist()) if number not in special]
    return ([i for i, label in enumerate(chosen) if label != usual] or ordinary)[:top]


def transcript(model: nn.Module, logits: Tensor, tokenizer: PreTrainedTokenizerBase | None) -> Item:
    """What logits (frames, letters) of connectionist temporal classification spell, and how sure they are.

    The likeliest letter of each frame counts, repeats are joined and blanks are left out.

    >>> logits = torch.tensor([[0.0, 9.0, 0.0], [0.0, 9.0, 0.0], [9.0, 0.0, 0.0], [0.0, 0.0, 9.0]])
    >>> transcript(nn.Identity(), logits, None)[0]                                     # 0 is no letter
    '1 2'
    """
    blank = int(getattr(getattr(model, "config", None), "pad_token_id", None) or 0)
    best, chosen = logits.float().log_softmax(-1).max(-1)
    letters = [n for n in torch.unique_consecutive(chosen).tolist() if n != blank]
    decode: Any = getattr(tokenizer, "decode", None)
    text = " ".join(map(str, letters))
    if decode is not None:  # repeats were joined where blanks could still be seen
        text = decode(letters, skip_special_tokens=True, group_tokens=False)
    letter_scores = best[chosen != blank] if letters else best
    return [shown(str(text).strip()) or "–", round(math.exp(float(letter_scores.mean())), 6)]


def class_items(model: nn.Module, logits: Tensor, top: int = TOP) -> list[Item]:
    """The likeliest classes of logits (classes,), by name; of a regression, its amounts.

    >>> from manyheads.tasks.dna import SequenceClassifier
    >>> model = SequenceClassifier(["no", "yes"], vocabulary=7, d_model=4, heads=2, layers=1)
    >>> class_items(model, torch.tensor([0.0, 2.0]))
    [['yes', 0.880797], ['no', 0.119203]]
    """
    labels = class_names(model)
    problem = getattr(getattr(model, "config", None), "problem_type", None)
    if len(logits) == 1 or problem == "regression":
        return [[str(labels.get(n, n)), round(x, 6)] for n, x in enumerate(logits.float().tolist()[:top])]
    is_multi_label = problem == "multi_label_classification"
    p = logits.float().sigmoid() if is_multi_label else logits.float().softmax(-1)
    probabilities, classes = p.topk(min(top, len(p)))
    pairs = zip(classes.tolist(), probabilities.tolist(), strict=True)
    return [[str(labels.get(number, number)), round(x, 6)] for number, x in pairs]


def span_items(
    start: Tensor, end: Tensor, ids: Tensor, tokenizer: PreTrainedTokenizerBase | None, top: int = TOP
) -> list[Item]:
    """The likeliest parts of an input of token ids (tokens,) as answers, from where they start and end.

    Answers are in the context: the last tokens of the input between two special ones.

    >>> start, end = torch.tensor([0.0, 9.0, 0.0]), torch.tensor([0.0, 0.0, 9.0])
    >>> text, p = span_items(start, end, torch.tensor([5, 6, 7]), None)[0]
    >>> text, round(p, 3)
    ('6 7', 1.0)
    """
    joint = start.float().softmax(-1).unsqueeze(1) * end.float().softmax(-1).unsqueeze(0)  # (starts, ends)
    special = set(getattr(tokenizer, "all_special_ids", None) or [])
    ordinary = [i for i, number in enumerate(ids.tolist()) if number not in special]
    first_of_context = next((i for i in reversed(ordinary) if i - 1 not in ordinary), 0)
    inside = torch.zeros(len(start), dtype=torch.bool, device=start.device)
    inside[[i for i in ordinary if i >= first_of_context]] = True
    likely = torch.ones_like(joint).triu().tril(LONGEST_ANSWER - 1) * joint * (inside.unsqueeze(1) & inside)
    probabilities, chosen = likely.flatten().topk(min(top, likely.numel()))
    items: list[Item] = []
    for p, number in zip(probabilities.tolist(), chosen.tolist(), strict=True):
        if p == 0:
            break
        first, last = divmod(number, len(start))
        part = ids[first : last + 1].tolist()
        text = tokenizer.decode(part) if tokenizer is not None else " ".join(map(str, part))
        items.append([shown(str(text).strip()), round(p, 6)])
    return items


def nearest(embedding: Tensor, others: Tensor, texts: Sequence[str], top: int) -> list[Item]:
    """The sentences of the highest cosine with the input, without the input itself."""
    cosines = nn.functional.cosine_similarity(embedding.double(), others.double())
    order = [i for i in cosines.argsort(descending=True).tolist() if cosines[i] < 1 - SAME]
    return [[texts[i], round(float(cosines[i]), 6)] for i in order[:top]]


def translated(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A batch for an encoder-decoder of transformers whose decoder reads what the model itself writes.

    >>> from transformers import T5Config, T5ForConditionalGeneration
    >>> sizes = {"vocab_size": 31, "d_model": 12, "d_kv": 5, "d_ff": 11, "num_layers": 1, "num_heads": 3}
    >>> config = T5Config(decoder_start_token_id=0, **sizes)
    >>> batch = {"input_ids": torch.ones(1, 5, dtype=torch.long)}
    >>> sorted(translated(T5ForConditionalGeneration(config).eval(), batch))
    ['decoder_input_ids', 'input_ids']
    """
    inputs = without_labels(batch)
    encoder_inputs = {name: item for name, item in inputs.items() if not name.startswith("decoder_")}
    with torch.no_grad():
        return encoder_inputs | {"decoder_input_ids": _generated(model, batch).sequences[:, :-1]}


def _translation(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase | None, batch: Mapping[str, Tensor]
) -> Item:
    """What an encoder-decoder writes, greedily, and the mean probability of its tokens."""
    if isinstance(model, Seq2Seq):
        ids, p = _written_by_seq2seq(model, tokenizer, batch)
    else:
        generated = _generated(model, batch)
        ids = generated.sequences[0, -len(generated.logits) :]
        steps = torch.stack([logits[0] for logits in generated.logits]).float().log_softmax(-1)
        p = steps.gather(1, ids[:, None]).mean()
    text = tokenizer.decode(ids.tolist(), skip_special_tokens=True) if tokenizer is not None else ids.tolist()
    return [str(text).strip(), round(math.exp(float(p)), 6)]


def _generated(model: Any, batch: Mapping[str, Tensor]) -> Any:
    return model.generate(
        **{name: batch[name][:1] for name in ("input_ids", "attention_mask") if name in batch},
        max_new_tokens=WRITTEN,
        num_beams=1,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )


def _written_by_seq2seq(model: Seq2Seq, tokenizer: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The ids that our own `Seq2Seq` writes, and their mean log probability."""
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    source = batch["source"][:1]
    lengths = batch["source_lengths"][:1] if "source_lengths" in batch else None
    room = model.decoder.max_length or WRITTEN
    ids = generate(model, source, lengths=lengths, start=start, end=end, new_tokens=min(WRITTEN, room))
    target = torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], 1)
    logits = model(source, target, source_lengths=lengths).float().log_softmax(-1)
    return ids[0], logits.gather(2, ids[..., None]).mean()


def _writes(model: nn.Module) -> bool:
    """Whether a model can generate a text from another one."""
    can = getattr(model, "can_generate", None)
    return isinstance(model, Seq2Seq) or (callable(can) and bool(can()))


def ids_of(batch: Batch) -> Tensor | None:
    """The token ids of a batch, (batch, length); None for images."""
    if isinstance(batch, Mapping):
        items = [batch[name] for name in _IDS if name in batch]
    else:
        items = list(batch) if isinstance(batch, tuple | list) else [batch]
    matrices = [x for x in items if isinstance(x, Tensor) and x.dim() == 2 and not x.is_floating_point()]
    return matrices[0] if matrices else None


def _vocabulary(model: nn.Module) -> int:
    """The size of the model's vocabulary."""
    config: object = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if isinstance(size := getattr(config, "vocab_size", None), int):
        return size
    return max((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=0)
