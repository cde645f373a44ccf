"""Tiny random models of transformers with every kind of task head, their tokenizers, and tables for them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tests.helpers.models import bert_config, gpt2_config, t5_config, vit_config
from tokenizers import Tokenizer, models, pre_tokenizers, processors

SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
LETTERS = list("abcdefghijklmnopqrstuvwxyz")
VOCABULARY = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), ".", ","]


def tokenizer(**options: Any) -> hf.PreTrainedTokenizerFast:
    """Every letter is a token; [CLS] and [SEP] around texts."""
    plain = Tokenizer(models.WordPiece({word: n for n, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    plain.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 1), ("[SEP]", 2)]
    )
    names = {f"{word[1:-1].lower()}_token": word for word in SPECIAL}
    inputs = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    return hf.PreTrainedTokenizerFast(tokenizer_object=plain, **names, **inputs, **options)


def bert(kind: Any, **changes: Any) -> Any:
    sizes = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 7,
        "max_position_embeddings": 48,
    }
    return drawn(kind(bert_config(**sizes | changes)))


def gpt2(kind: Any, **changes: Any) -> Any:
    sizes = {"vocab_size": len(VOCABULARY), "n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 48}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    return drawn(kind(gpt2_config(**sizes | ends | changes)))


def t5() -> Any:
    sizes = {
        "vocab_size": len(VOCABULARY),
        "d_model": 12,
        "d_kv": 5,
        "d_ff": 7,
        "num_layers": 1,
        "num_heads": 3,
    }
    config = t5_config(**sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=2)
    return drawn(hf.T5ForConditionalGeneration(config))


def vit(**changes: Any) -> Any:
    sizes = {
        "hidden_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 7,
        "image_size": 8,
        "patch_size": 4,
    }
    return drawn(hf.ViTForImageClassification(vit_config(**sizes | changes)))


def wav2vec2(kind: Any, **changes: Any) -> Any:
    sizes = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 7,
        "conv_dim": (6, 6),
        "conv_stride": (5, 4),
        "conv_kernel": (10, 8),
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
        "feat_extract_norm": "layer",
        "do_stable_layer_norm": True,
        "classifier_proj_size": 6,
        "pad_token_id": 0,
    }
    return drawn(kind(hf.Wav2Vec2Config(**sizes | changes)))


def drawn(model: Any) -> Any:
    """Random weights large enough that answers differ."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def write_csv(path: Path, columns: dict[str, list[Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path
