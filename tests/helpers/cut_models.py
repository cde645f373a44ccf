"""Models to cut, with a batch for each, and which heads go."""

from __future__ import annotations

import torch
import transformers as hf
from tests.helpers import models
from tests.helpers.models import sharpen, tokens
from torch import nn

import manyheads as mh
from manyheads.common.run_batch import run

IDS = tokens()["input_ids"]
BOTH = {**tokens(), "decoder_input_ids": IDS[:, :5]}


def tiny(cls, config, **options):
    given = {"vocab_size": models.VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return sharpen(cls(config(**given | options)), scale=0.3)


def qwen3():
    return tiny(
        hf.Qwen3ForCausalLM, hf.Qwen3Config, hidden_size=18, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, head_dim=4, intermediate_size=11,
    )  # fmt: skip


def opt():
    return tiny(
        hf.OPTForCausalLM, hf.OPTConfig, hidden_size=15, num_hidden_layers=2, num_attention_heads=3,
        ffn_dim=11, max_position_embeddings=20, word_embed_proj_dim=15,
    )  # fmt: skip


def distilbert():
    return tiny(hf.DistilBertModel, hf.DistilBertConfig, dim=15, n_layers=2, n_heads=3, hidden_dim=11)


def deberta():
    return tiny(
        hf.DebertaV2Model, hf.DebertaV2Config, hidden_size=15, num_hidden_layers=2, num_attention_heads=3,
        intermediate_size=11, relative_attention=True, pos_att_type=["p2c", "c2p"],
        max_position_embeddings=16,
    )  # fmt: skip


def bart():
    return tiny(
        hf.BartForConditionalGeneration, hf.BartConfig, d_model=15, encoder_layers=1, decoder_layers=2,
        encoder_attention_heads=3, decoder_attention_heads=3, encoder_ffn_dim=11, decoder_ffn_dim=11,
        decoder_start_token_id=2, max_position_embeddings=24,
    )  # fmt: skip


def torch_encoder():
    layer = nn.TransformerEncoderLayer(15, 3, 11, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def decoder():
    return mh.Decoder(
        24, heads=6, kv_heads=3, layers=2, vocabulary=models.VOCABULARY, positions="rotary"
    ).eval()


def alibi():
    return mh.Encoder(15, heads=3, layers=2, vocabulary=models.VOCABULARY, positions="alibi").eval()


def seq2seq():
    return mh.Seq2Seq(15, heads=3, layers=1, vocabulary=models.VOCABULARY).eval()


MODELS = {
    "bert": (models.bert, tokens()),
    "distilbert": (distilbert, tokens()),
    "deberta": (deberta, tokens()),
    "gpt2": (models.gpt2, tokens()),
    "opt": (opt, tokens()),
    "llama": (models.llama, tokens()),
    "qwen3": (qwen3, tokens()),
    "gpt-oss": (models.gpt_oss, tokens()),
    "bloom": (models.bloom, tokens()),
    "t5": (models.t5, BOTH),
    "bart": (bart, BOTH),
    "whisper": (models.whisper, models.whisper_inputs()),
    "vit": (
        models.vit,
        {"pixel_values": torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))},
    ),
    "nn.TransformerEncoder": (
        torch_encoder,
        torch.randn(2, 5, 15, generator=torch.Generator().manual_seed(1)),
    ),
    "Decoder": (decoder, IDS),
    "Encoder": (alibi, IDS),
    "Seq2Seq": (seq2seq, (IDS, IDS[:, :5])),
}


def chosen(model, batch):
    """Other heads at every site: whole groups at even sites, one head of every group at odd ones."""
    with torch.no_grad(), mh.watch(model) as seen:
        run(model, batch)
    heads = {}
    for number, site in enumerate(seen.sites):
        if max(site.kv_heads) == site.heads - 1:
            heads[site.name] = [1] if number % 2 == 0 else [0, 2]
        else:
            heads[site.name] = [2, 3] if number % 2 == 0 else [1, 2, 4]
    return heads
