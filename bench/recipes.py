"""Help for architectures whose small configs or inputs `bench.coverage_build` does not get right by itself."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

# What the config's constructor must be given for its defaults to be of one piece.
GIVEN: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 7, "context_length": 14},
    "informer": {"prediction_length": 7, "context_length": 14},
    "time_series_transformer": {"prediction_length": 7, "context_length": 14},
}

_EXPERTS = {"num_experts_per_tok": 2}
_MROPE = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "mrope_section": [8, 12, 12],
    "partial_rotary_factor": 0.5,
}

# Values that replace those of the small config.
CONFIG: dict[str, dict[str, Any]] = {
    "aya_vision": {"vision_config": {"num_attention_heads": 4}},
    "bamba": {"attn_layer_indices": [1]},
    "dbrx": {"attn_config": {"rope_theta": 1e4}},
    "deepseek_v2": _EXPERTS,
    "dots1": {"n_routed_experts": 8},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "glm46v": {"text_config": {"rope_parameters": _MROPE}},
    "glm4v": {"text_config": {"rope_parameters": _MROPE}},
    "glm4v_moe": {"text_config": {"rope_parameters": _MROPE}},
    "glm4v_moe_text": {"rope_parameters": _MROPE},
    "glm4v_text": {"rope_parameters": _MROPE},
    "glmga": {"text_config": {"rope_parameters": _MROPE}},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
}

# Inputs to try.
INPUTS: dict[str, Callable[[nn.Module], Iterator[dict[str, Any]]]] = {}

# Softmaxes inside modules named attention that are no attention of queries to keys: nothing for heads to be seen in.
NO_QUERIES_AND_KEYS = {
    "DeformableAttention": "weights of a few points sampled for each query, from the query alone",
    "ConvBertSelfAttention": "kernels of a convolution",
    "GroupViTAssignAttention": "each patch chooses a group: the softmax is over the groups, not the keys",
    "MobileViTV2LinearSelfAttention": "one context score for each position, no queries",
}
