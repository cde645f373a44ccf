"""A small causal model with grouped heads, and tokens for it."""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 101


def llama(heads: int = 6, kv_heads: int = 3, layers: int = 2, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=8 * heads, intermediate_size=31, num_attention_heads=heads, vocab_size=VOCABULARY,
        num_key_value_heads=kv_heads, num_hidden_layers=layers, pad_token_id=0, eos_token_id=100,
        initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


def random_ids(batch: int, length: int) -> Tensor:
    return torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(1))
