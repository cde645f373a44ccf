"""Specs of models of images, sound and series of transformers."""

from __future__ import annotations

from functools import partial

import torch
from tests.zoo.library import Spec, Stack, pixels, text, unmasked, waves
from tests.zoo.library_text import BART, two
from torch import Tensor

VIT = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 31,
        "image_size": 12,
    "patch_size": 4,
}  # fmt: skip
WAVE = {
    "vocab_size": 32, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 31,
    "conv_dim": [16, 16, 16], "conv_stride": [5, 4, 4], "conv_kernel": [10, 4, 4],
        "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 3,
}  # fmt: skip
SWIN = {
    "image_size": 16, "patch_size": 2, "embed_dim": 12, "depths": [1, 1], "num_heads": [2, 4],
        "window_size": 4,
}  # fmt: skip
SPEECH = BART | {
    "input_feat_per_channel": 8, "conv_channels": 16, "num_conv_layers": 1, "conv_kernel_sizes": [3],
    "max_source_positions": 64, "max_target_positions": 64,
}  # fmt: skip
SERIES = {
    "prediction_length": 5, "context_length": 11, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 31, "decoder_ffn_dim": 31,
    "lags_sequence": [1, 2], "num_time_features": 2, "input_size": 1,
}  # fmt: skip


def vit(
    path: str = "encoder.layer.{}.attention", out: str = "output.dense", vague: bool = True
) -> tuple[Stack, ...]:
    return (Stack("attentions", path, f"{path}.{out}", "self", vague=vague),)


def series(batch: int, length: int, padded: bool = True) -> dict[str, Tensor]:
    past = 11 + 2
    return {
        "past_values": torch.randn(batch, past), "past_time_features": torch.randn(batch, past, 2),
        "past_observed_mask": torch.ones(batch, past), "future_values": torch.randn(batch, 5),
        "future_time_features": torch.randn(batch, 5, 2),
    }  # fmt: skip


def patches(batch: int, length: int, padded: bool = True) -> dict[str, Tensor]:
    return {"past_values": torch.randn(batch, 36, 2)}


def returns(batch: int, length: int, padded: bool = True) -> dict[str, Tensor]:
    return {
        "states": torch.randn(batch, 5, 3), "actions": torch.randn(batch, 5, 2),
            "rewards": torch.randn(batch, 5, 1),
        "returns_to_go": torch.randn(batch, 5, 1), "timesteps": torch.arange(5).expand(batch, 5),
        "attention_mask": torch.ones(batch, 5),
    }  # fmt: skip


def spectrum(batch: int, length: int, padded: bool = True) -> dict[str, Tensor]:
    return {"input_values": torch.randn(batch, 24, 16)}


def characters(batch: int, length: int, padded: bool = True) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(32, 120, (batch, 16 if padded else 64))}


def floats(batch: int, length: int, padded: bool = True) -> dict[str, Tensor]:
    return {"inputs": torch.randn(batch, length, 20)}


def ordered(batch: int, length: int, padded: bool = True) -> dict[str, Tensor]:
    """With the numbers by which patches are shuffled."""
    return pixels(batch, length) | {"noise": torch.rand(batch, 9)}


def twelve(batch: int, length: int, padded: bool = True) -> dict[str, Tensor]:
    return unmasked(batch, 12)


def recording(batch: int, length: int, padded: bool = True) -> dict[str, Tensor]:
    ids = torch.randint(5, 99, (batch, 7))
    return {"input_features": torch.randn(batch, 22, 8), "decoder_input_ids": ids}


def numbered(path: str, out: str, *kinds: str) -> tuple[Stack, ...]:
    """Layers one by one, of several kinds."""
    places = [path.format(number) for number in range(len(kinds))]
    return tuple(
        Stack("attentions", place, f"{place}.{out}", kind, True, at=number)
        for number, (place, kind) in enumerate(zip(places, kinds, strict=True))
    )


def layers(field: str, path: str, out: str, kind: str) -> Stack:
    return Stack(field, path, f"{path}.{out}", kind, counts=False)


SPECS = (
    Spec("DeiT", VIT, vit("layers.{}.attention", "o_proj"), pixels, longer=False),
    Spec("Beit", VIT | {"use_relative_position_bias": True}, vit("layers.{}.attention", "o_proj"), pixels,
        longer=False),
    Spec("Data2VecVision", VIT, vit(), pixels, longer=False),
    Spec("Dinov2", VIT | {"mlp_ratio": 2}, vit("encoder.layer.{}.attention", "o_proj"), pixels,
        longer=False),
    Spec("ViTMSN", VIT, vit("layers.{}.attention", "o_proj"), pixels, longer=False),
    Spec("ViTMAE", VIT | {"mask_ratio": 0.0}, vit("layers.{}.attention", "o_proj"), ordered, longer=False),
    Spec("SiglipVision", VIT | {"vision_use_head": False}, vit("encoder.layers.{}.self_attn", "out_proj"),
        pixels, longer=False),
    Spec("CLIPVision", VIT, vit("encoder.layers.{}.self_attn", "out_proj"), pixels, longer=False),
    Spec("CLIPText", {"vocab_size": 99, "hidden_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 31, "max_position_embeddings": 128},
        (Stack("attentions", "encoder.layers.{}.self_attn", "encoder.layers.{}.self_attn.out_proj",
        "causal"),), text),
    Spec("Yolos", VIT | {"image_size": [12, 12], "num_detection_tokens": 3}, vit(), pixels, longer=False),
    Spec("IJepa", VIT, vit("layers.{}.attention", "o_proj"), pixels, longer=False),
    Spec("AST", {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 31, "patch_size": 4, "frequency_stride": 4, "time_stride": 4,
        "max_length": 24, "num_mel_bins": 16}, vit("layers.{}.attention", "o_proj"), spectrum, longer=False),
    Spec("Pvt", {"image_size": 32, "hidden_sizes": [12, 24], "depths": [1, 1], "num_encoder_blocks": 2,
        "num_attention_heads": [2, 4], "sequence_reduction_ratios": [2, 1], "patch_sizes": [4, 2],
        "strides": [4, 2], "mlp_ratios": [2, 2]}, (
        Stack("attentions", "encoder.block.0.0.attention", "encoder.block.0.0.attention.output.dense",
            "self/cross", True),
        Stack("attentions", "encoder.block.1.0.attention", "encoder.block.1.0.attention.output.dense",
            "self", True, at=1),
    ), partial(pixels, size=32), longer=False),
    Spec("PoolFormer", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_encoder_blocks": 2,
        "patch_sizes": [7, 3], "strides": [4, 2], "padding": [2, 1], "mlp_ratio": 2.0}, (), partial(pixels,
        size=32), missed="encoder.block.0.0"),
    Spec("Wav2Vec2", WAVE, vit("encoder.layers.{}.attention", "out_proj", False), waves, longer=False),
    Spec("Hubert", WAVE, vit("encoder.layers.{}.attention", "out_proj", False), waves, longer=False),
    Spec("UniSpeech", WAVE, vit("encoder.layers.{}.attention", "out_proj", False), waves, longer=False),
    Spec("SEW", WAVE | {"squeeze_factor": 2}, vit("encoder.layers.{}.attention", "out_proj", False), waves,
        longer=False),
    Spec("Data2VecAudio", WAVE | {"conv_pos_kernel_size": 3}, vit("encoder.layers.{}.attention",
        "out_proj", False), waves, longer=False),
    Spec("PatchTST", {"num_input_channels": 2, "context_length": 36, "patch_length": 4, "patch_stride": 4,
        "num_hidden_layers": 2, "d_model": 24, "num_attention_heads": 4, "ffn_dim": 31,
        "do_mask_input": False, "use_cls_token": False}, vit("encoder.layers.{}.self_attn", "out_proj",
        False), patches, longer=False),
    Spec("TimeSeriesTransformer", SERIES, (
        layers("encoder_attentions", "encoder.layers.{}.self_attn", "out_proj", "self"),
        layers("decoder_attentions", "decoder.layers.{}.self_attn", "out_proj", "causal"),
        # both sides are made of the same past values, so that they are one stream or two
        layers("cross_attentions", "decoder.layers.{}.encoder_attn", "out_proj", "cross/self"),
    ), series, longer=False),
    Spec("Autoformer", SERIES | {"moving_average": 3, "label_length": 4}, (), series,
        missed="encoder.layers.0.self_attn"),
    Spec("DecisionTransformer", {"state_dim": 3, "act_dim": 2, "hidden_size": 24, "n_layer": 2,
        "n_head": 4, "max_ep_len": 64}, (Stack("attentions", "encoder.h.{}.attn",
        "encoder.h.{}.attn.c_proj", "causal", counts=False),), returns, longer=False),
    Spec("Canine", {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 31, "max_position_embeddings": 128, "num_hash_functions": 4,
        "num_hash_buckets": 40, "local_transformer_stride": 16}, (
        Stack("attentions", "initial_char_encoder.layer.{}.attention",
            "initial_char_encoder.layer.{}.attention.output.dense", "self", True),
        Stack("attentions", "encoder.layer.{}.attention", "encoder.layer.{}.attention.output.dense",
            "self", True, at=1),
        Stack("attentions", "final_char_encoder.layer.{}.attention",
            "final_char_encoder.layer.{}.attention.output.dense", "self", True, at=3),
    ), characters, longer=False, single=True),
    Spec("Perceiver", {"num_latents": 5, "d_latents": 24, "d_model": 20, "num_self_attends_per_block": 2,
        "num_self_attention_heads": 4, "num_cross_attention_heads": 4, "vocab_size": 99,
        "max_position_embeddings": 128}, (
        Stack("attentions", "encoder.self_attends.{}.attention",
            "encoder.self_attends.{}.attention.output.dense", "self", True),
        Stack("cross_attentions", "encoder.cross_attention.attention",
            "encoder.cross_attention.attention.output.dense", "cross"),
    ), floats, longer=False),
    Spec("Swin", SWIN, numbered("encoder.layers.{}.blocks.0.attention", "o_proj", "self", "self"),
        partial(pixels, size=16), longer=False),
    Spec("Swinv2", SWIN, numbered("encoder.layers.{}.blocks.0.attention", "output.dense", "self", "self"),
        partial(pixels, size=16), longer=False),
    Spec("Segformer", {"hidden_sizes": [12, 24], "depths": [1, 1], "num_encoder_blocks": 2,
        "num_attention_heads": [2, 4], "sr_ratios": [2, 1], "patch_sizes": [7, 3], "strides": [4, 2],
        "mlp_ratios": [2, 2]}, numbered("stages.{}.blocks.0.attention", "o_proj", "self/cross", "self"),
        partial(pixels, size=32), longer=False),
    Spec("Funnel", {"vocab_size": 99, "block_sizes": [1, 1], "d_model": 24, "n_head": 4, "d_head": 6,
        "d_inner": 31, "num_decoder_layers": 1}, (
        *numbered("encoder.blocks.{}.0.attention", "post_proj", "self", "self/cross"),
        Stack("attentions", "decoder.layers.0.attention", "decoder.layers.0.attention.post_proj", "self",
            at=2),
    ), twelve, longer=False),
    Spec("Speech2Text", SPEECH, two(), recording, longer=False),
    Spec("Informer", SERIES | {"distil": False, "attention_type": "full"}, (
        layers("encoder_attentions", "encoder.layers.{}.self_attn", "out_proj", "self"),
        layers("cross_attentions", "decoder.layers.{}.encoder_attn", "out_proj", "cross/self"),
        layers("decoder_attentions", "decoder.layers.{}.self_attn", "out_proj", "causal"),
    ), series, longer=False),
    Spec("Mamba", {"vocab_size": 99, "hidden_size": 24, "num_hidden_layers": 2, "state_size": 4}, (),
        unmasked,
        missed="layers.0.mixer"),
    Spec("Rwkv", {"vocab_size": 99, "hidden_size": 24, "num_hidden_layers": 2, "attention_hidden_size": 24,
        "intermediate_size": 31}, (), unmasked, missed="blocks.0.attention"),
)  # fmt: skip
