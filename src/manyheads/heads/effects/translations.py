"""What encoder-decoders write: translations, and the ids that their decoder reads while it writes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from manyheads.common.labelled_batch import without_labels
from manyheads.heads.effects.answer_items import Item
from manyheads.nn.generate import generate
from manyheads.nn.transformers import Seq2Seq

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST = 48  # tokens of a translation, at most


def can_write(model: nn.Module) -> bool:
    """Whether a model can generate a text from another one."""
    can = getattr(model, "can_generate", None)
    return isinstance(model, Seq2Seq) or (callable(can) and bool(can()))


def translation(
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


def with_decoder_ids(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A batch for an encoder-decoder of transformers whose decoder reads what the model itself writes.

    >>> from transformers import T5Config, T5ForConditionalGeneration
    >>> sizes = {"vocab_size": 31, "d_model": 12, "d_kv": 5, "d_ff": 11, "num_layers": 1, "num_heads": 3}
    >>> config = T5Config(decoder_start_token_id=0, **sizes)
    >>> batch = {"input_ids": torch.ones(1, 5, dtype=torch.long)}
    >>> sorted(with_decoder_ids(T5ForConditionalGeneration(config).eval(), batch))
    ['decoder_input_ids', 'input_ids']
    """
    inputs = without_labels(batch)
    encoder_inputs = {name: item for name, item in inputs.items() if not name.startswith("decoder_")}
    with torch.no_grad():
        return encoder_inputs | {"decoder_input_ids": _generated(model, batch).sequences[:, :-1]}


def _generated(model: Any, batch: Mapping[str, Tensor]) -> Any:
    return model.generate(
        **{name: batch[name][:1] for name in ("input_ids", "attention_mask") if name in batch},
        max_new_tokens=LONGEST,
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
    room = model.decoder.max_length or LONGEST
    ids = generate(model, source, lengths=lengths, start=start, end=end, new_tokens=min(LONGEST, room))
    target = torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], 1)
    logits = model(source, target, source_lengths=lengths).float().log_softmax(-1)
    return ids[0], logits.gather(2, ids[..., None]).mean()
