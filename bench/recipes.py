"""Help for architectures whose configs or inputs `bench.coverage_build` does not get right by itself."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

# What the config's constructor must be given for its defaults to be of one piece.
GIVEN: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 7, "context_length": 14, "num_time_features": 2},
    "informer": {"prediction_length": 7, "context_length": 14, "num_time_features": 2},
    "time_series_transformer": {"prediction_length": 7, "context_length": 14, "num_time_features": 2},
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
    "chameleon": {"vocabulary_map": {"<image>": 300}},
    "emu3": {"vocabulary_map": {"<image>": 300}},
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
    "vjepa2": {"crop_size": 64, "frames_per_clip": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
}


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(11))


def _ids(*shape: int) -> Tensor:
    return torch.randint(5, 200, shape, generator=torch.Generator().manual_seed(5))


def _series(model: nn.Module) -> Iterator[dict[str, Any]]:
    past = model.config.context_length + max(model.config.lags_sequence)
    yield {
        "past_values": _noise(2, past),
        "past_time_features": _noise(2, past, 2),
        "past_observed_mask": torch.ones(2, past),
        "future_values": _noise(2, 7),
        "future_time_features": _noise(2, 7, 2),
    }


def _episodes(model: nn.Module) -> Iterator[dict[str, Any]]:
    yield {
        "states": _noise(2, 5, model.config.state_dim),
        "actions": _noise(2, 5, model.config.act_dim),
        "rewards": _noise(2, 5, 1),
        "returns_to_go": _noise(2, 5, 1),
        "timesteps": torch.arange(5).repeat(2, 1),
        "attention_mask": torch.ones(2, 5),
    }


def _queries(model: nn.Module) -> Iterator[dict[str, Any]]:
    config = model.config
    memory = _noise(2, 11, config.encoder_hidden_size)
    yield {"query_embeds": _noise(2, 7, config.hidden_size), "encoder_hidden_states": memory}


def _regions(model: nn.Module) -> Iterator[dict[str, Any]]:
    width, place = model.config.visual_feat_dim, model.config.visual_pos_dim
    yield {
        "input_ids": _ids(2, 13),
        "visual_feats": _noise(2, 7, width),
        "visual_pos": _noise(2, 7, place).sigmoid(),
    }


def _pairs(model: nn.Module) -> Iterator[dict[str, Any]]:
    for channels in (3, 1):
        yield {"pixel_values": _noise(1, 2, channels, 96, 128).sigmoid()}


# Inputs to try.
INPUTS: dict[str, Callable[[nn.Module], Iterator[dict[str, Any]]]] = {
    "autoformer": _series,
    "blip_2_qformer": _queries,
    "decision_transformer": _episodes,
    "efficientloftr": _pairs,
    "informer": _series,
    "lightglue": _pairs,
    "lxmert": _regions,
    "superglue": _pairs,
    "time_series_transformer": _series,
}

# Softmaxes in modules named attention that are no attention of queries to keys: by class, what they are.
# (Those of a linear map of one sequence, `bench.coverage_spy` knows by itself.)
NO_QUERIES_AND_KEYS = {
    "SplitAttn": "the softmax is over branches of channels",
    "GroupViTAssignAttention": "each patch chooses a group: the softmax is over the groups, not the keys",
}
