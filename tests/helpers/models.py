"""Small random models of many architectures, and a plain oracle to hold watch to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

VOCABULARY, CACHE_VOCABULARY = 97, 101
LENGTH = 7


def tokens(seed: int = 0, batch: int = 3, length: int = LENGTH) -> dict[str, Tensor]:
    """Ids and a mask with padding on the right, except for the first sequence."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, VOCABULARY, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, length - 2 * row :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def sharpen(model: nn.Module, seed: int = 0, scale: float = 0.6) -> nn.Module:
    """Weights so large that attention is far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return model.eval()


# The common configs: small and of prime sizes where a test says nothing else.
SIZES = {"hidden_size": 15, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 11}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def bert_config(**changes: Any) -> hf.BertConfig:
    return hf.BertConfig(**{"vocab_size": VOCABULARY} | SIZES | changes)


def llama_config(**changes: Any) -> hf.LlamaConfig:
    sizes = SIZES | {"hidden_size": 18, "num_attention_heads": 6}
    return hf.LlamaConfig(**{"vocab_size": VOCABULARY} | sizes | changes)


def gpt2_config(**changes: Any) -> hf.GPT2Config:
    sizes = {"vocab_size": VOCABULARY, "n_embd": 15, "n_layer": 2, "n_head": 3}
    return hf.GPT2Config(**sizes | changes)


def t5_config(**changes: Any) -> hf.T5Config:
    sizes = {"vocab_size": VOCABULARY, "d_model": 10, "d_kv": 5, "d_ff": 11, "num_layers": 2, "num_heads": 3}
    return hf.T5Config(**sizes | changes)


def vit_config(**changes: Any) -> hf.ViTConfig:
    return hf.ViTConfig(**SIZES | {"image_size": 6, "patch_size": 3} | changes)


def llama(**changes: Any) -> nn.Module:
    config = llama_config(**{"head_dim": 4, "num_key_value_heads": 3} | ENDS | changes)
    return sharpen(hf.LlamaForCausalLM(config), scale=0.3)


def cached_llama(heads: int = 6, kv_heads: int = 3, layers: int = 2, seed: int = 0) -> nn.Module:
    """In float64, with heads that attend far from evenly, for tests of caches."""
    torch.manual_seed(seed)
    config = llama_config(
        hidden_size=8 * heads, intermediate_size=31, num_attention_heads=heads, vocab_size=CACHE_VOCABULARY,
        num_key_value_heads=kv_heads, num_hidden_layers=layers, pad_token_id=0, eos_token_id=100,
        initializer_range=0.3,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config).double().eval()


def random_ids(batch: int, length: int) -> Tensor:
    """Tokens for `cached_llama`."""
    return torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(1))


def bert(**changes: Any) -> nn.Module:
    return sharpen(hf.BertModel(bert_config(**{"max_position_embeddings": 16, "pad_token_id": 0} | changes)))


def gpt2(**changes: Any) -> nn.Module:
    return sharpen(hf.GPT2LMHeadModel(gpt2_config(**{"n_positions": 16} | ENDS | changes)))


def t5(**changes: Any) -> nn.Module:
    ends = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    return sharpen(hf.T5ForConditionalGeneration(t5_config(**ends | changes)), scale=0.4)


def albert() -> nn.Module:
    config = hf.AlbertConfig(
        vocab_size=VOCABULARY,
        embedding_size=7,
        hidden_size=15,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=11,
        max_position_embeddings=16,
    )
    return sharpen(hf.AlbertModel(config))


def gpt_oss() -> nn.Module:
    config = hf.GptOssConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=6,
        head_dim=4,
        num_key_value_heads=3,
        intermediate_size=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = sharpen(hf.GptOssModel(config), scale=0.3)
    for layer in model.layers:
        nn.init.normal_(layer.self_attn.sinks)
    return model


def gemma2() -> nn.Module:
    config = hf.Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=18,
        num_hidden_layers=2,
        num_attention_heads=6,
        head_dim=4,
        num_key_value_heads=3,
        intermediate_size=11,
        sliding_window=3,
        attn_logit_softcapping=2.0,
        query_pre_attn_scalar=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    config._attn_implementation = "eager"
    return sharpen(hf.Gemma2Model(config), scale=0.3)


def bloom() -> nn.Module:
    config = hf.BloomConfig(
        vocab_size=VOCABULARY,
        hidden_size=15,
        n_layer=2,
        n_head=3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return sharpen(hf.BloomModel(config), scale=0.4)


def whisper() -> nn.Module:
    config = hf.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=18,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=3,
        decoder_attention_heads=3,
        encoder_ffn_dim=11,
        decoder_ffn_dim=11,
        num_mel_bins=8,
        max_source_positions=5,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return sharpen(hf.WhisperModel(config))


def vit() -> nn.Module:
    return sharpen(hf.ViTModel(vit_config()))


def whisper_inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "input_features": torch.randn(3, 8, 10, generator=generator),
        "decoder_input_ids": tokens()["input_ids"][:, :5],  # as long as the encoder's output
    }


class NanoAttention(nn.Module):
    """Causal attention as people write it by hand: one packed projection, matmul, softmax, matmul."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.n_head, self.attn_dropout = heads, nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.n_head, -1).transpose(1, 2)
            for part in self.c_attn(x).split(width, 2)
        )
        att = (q @ k.transpose(-2, -1)) * (q.shape[-1] ** -0.5)
        att = att.masked_fill(torch.ones(length, length).tril()[None, None] == 0, float("-inf"))
        att = self.attn_dropout(nn.functional.softmax(att, dim=-1))
        return self.c_proj((att @ v).transpose(1, 2).contiguous().view(batch, length, width))


class Nano(nn.Module):
    """Two of those with residuals, on embedded tokens."""

    def __init__(self, attention: Callable[[int, int], nn.Module] = NanoAttention) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 15)
        self.h = nn.ModuleList(attention(15, 3) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.h:
            x = x + layer(x)
        return x


def oracle(
    weights: Tensor, counted: Tensor, offset: int | None = None, hidden: float = 0.0
) -> dict[str, Tensor]:
    """Mean of each metric for each head, from materialised weights (batch, heads, queries, keys) in float64.

    ``counted`` is (batch, queries). Weights at or below ``hidden`` are keys that may not be attended to.
    """
    p = weights.double()
    _batch, _heads, queries, keys = p.shape
    offset = keys - queries if offset is None else offset
    i, j = torch.arange(queries)[:, None] + offset, torch.arange(keys)
    visible = (p > hidden).sum(-1)
    entropy = -torch.special.xlogy(p, p).sum(-1)
    mean = (p * j).sum(-1, keepdim=True)
    place = {
        name: (p * (j == i + step)).sum(-1) for name, step in (("self", 0), ("previous", -1), ("next", 1))
    }
    found = place | {
        "entropy": entropy,
        "first": p[..., 0],
        "confidence": p.amax(-1),
        "effective_keys": 1 / (p**2).sum(-1),
        "distance": (p * (i - j).abs()).sum(-1),
        "distance_spread": (p * (j - mean) ** 2).sum(-1).sqrt(),
        "local": (p * ((i - j).abs() <= 8)).sum(-1),
    }
    out = {name: _mean(value, counted) for name, value in found.items()}
    choice = counted[:, None] & (visible > 1)
    normalised = entropy / visible.clamp(min=2).double().log()
    out["entropy_normalised"] = torch.where(choice, normalised, 0.0).sum((0, 2)) / choice.sum((0, 2))
    return out


def _mean(value: Tensor, counted: Tensor) -> Tensor:
    return torch.where(counted[:, None], value, 0.0).sum((0, 2)) / counted.sum()


def eager(model: nn.Module, batch: dict[str, Tensor], name: str = "attentions") -> tuple[Tensor, ...]:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(**batch, output_attentions=True)[name]
