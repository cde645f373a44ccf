"""Small models of every architecture in transformers, from their configs, and inputs for them.

Nothing here knows an architecture by name; what needs help is in `bench.recipes`.
"""

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from bench import recipes

VOCABULARY = 320
GRIDS = ("grid_thw", "grid_hw", "grid_hws")  # how many patches of time, height and width each picture has
LENGTH, BATCH, PADDED = 13, 2, 3
LARGEST = 150_000_000  # parameters
# What to divide, the "widths" of heads or their number ("heads"), and by what: the first that runs is used.
SHRINKS = (("widths", 8), ("heads", 8), ("widths", 4), ("heads", 4), ("widths", 1))

_WIDTH = re.compile(
    r"(hidden_size|intermediate_size|embedding_size|hidden_dim|head_dim|embed_dim|proj_dim|_dims?|_rank|_width|"
    r"_channels|_sizes|projection_size|feature_size|units|embeds_hidden_size|ffn_hidden_size|_hidden_size_\w+|"
    r"hidden_size_\w+|_mlp_dim|embd|n_inner|channel_list|embed_dim_per_stage|mamba_d_head|upsample_groups|"
    r"d_model|d_ff|d_kv|d_inner|d_head|dff|dim|dim_ff|dim_head|dim_feedforward|kv_channels|rotary_dim|mrope_section|"
    r"head_size|word_embed_proj_dim|mask_feature_size|coordinate_size|shape_size|intermediate_size_mlp)$|^dim_bbox"
)
_NOT_WIDTH = re.compile(
    r"(vocab|patch|image|window|kernel|codebook|merge|chunk|block|crop|context|group|pool|spec|"
    r"state_dim|act_dim|query_dim|channel_dim|temporal_dim|neighbor|chunk_size|num_|tdnn|conv_dim)"
)
_HEADS = re.compile(r"(^|_)((num|n)_(\w+_)?heads|heads|num_kv_heads|kv_n_heads|n_head|attention_heads)$")
_OF_HEADS = re.compile(
    r"(head_dim|d_kv|d_head|dim_head|mrope_section|rotary_dim|head_size|kv_channels|mamba_d_head|attention_head_dim)$"
)
_LAYERS = re.compile(
    r"^(num_(hidden_|encoder_|decoder_|spatial_|temporal_|auxiliary_|attention_)?layers|n_layers?|(\w+_)?layers|depth|"
    r"decoder_num_hidden_layers|(\w+_)?num_hidden_layers|memory_(attention|fuser)_num_layers|resampler_depth|"
    r"num_layers_per_stack|num_blocks)$"
)
_DEPTHS = re.compile(
    r"^(depths|num_blocks|blocks_per_stage|stage_num_blocks|layer_depths|num_block_repeats|block_sizes)$"
)
_EXPERTS = re.compile(r"^(num_experts|n_routed_experts|num_local_experts|moe_num_experts|num_moe_experts)$")
_TOKEN = re.compile(r"(_token_id|_token_index|_token|_index|_id)s?$")
_DROPPED = ("stage_names", "id2label", "label2id", "_name_or_path")
_OF_LAYERS = ("out_features", "out_indices")  # name layers that are no more


def config_of(name: str, how: str, divisor: int) -> PretrainedConfig:
    """The config of an architecture, its widths divided by ``divisor``, everything else small."""
    cls = getattr(transformers, CONFIG_MAPPING_NAMES[name])
    values = cls(**recipes.GIVEN.get(name, {})).to_dict()
    shrink(values, how, divisor)
    _merge(values, recipes.CONFIG.get(name, {}))
    return cls.from_dict(values)


def _merge(values: dict[str, Any], recipe: dict[str, Any]) -> None:
    for key, value in recipe.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            _merge(values[key], value)
        else:
            values[key] = value


def shrink(values: dict[str, Any], how: str, divisor: int, taken: list[int] | None = None) -> None:
    """Make a config's values small, in place, sub-configs included; equal widths stay equal."""
    taken = taken if taken is not None else [VOCABULARY]
    stages = {len(v) for k, v in values.items() if _DEPTHS.search(str(k)) and _whole_numbers(v)}
    old_layers = {v for k, v in values.items() if type(v) is int and _LAYERS.search(str(k))} - stages
    new_layers = _layer_count(values)
    for name in _DROPPED + (_OF_LAYERS if old_layers else ()):
        values.pop(name, None)
    if "head_dim" in values and values["head_dim"] is None and values.get("num_attention_heads"):
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    for name, value in list(values.items()):
        if not isinstance(name, str):
            continue
        if isinstance(value, dict):
            if name == "rope_parameters" or name.startswith("rope"):
                _shrink_rope(value, divisor if how == "widths" else 1)
            elif value and all(str(key).isdigit() for key in value):  # by layer
                values[name] = {key: item for key, item in value.items() if int(key) < new_layers}
            else:
                shrink(value, how, divisor, taken)
        elif isinstance(value, bool) or value is None or isinstance(value, str | float):
            continue
        elif _TOKEN.search(name) and type(value) is int and value >= VOCABULARY:
            taken[0] -= 1
            values[name] = taken[0]
        elif name.endswith("vocab_size") and type(value) is int:
            values[name] = min(value, VOCABULARY)
        elif _EXPERTS.search(name) and type(value) is int:
            values[name] = min(value, 8)
        elif name in (
            "num_experts_per_tok",
            "moe_topk",
            "moe_k",
            "moe_top_k",
            "num_experts_per_token",
            "top_k",
        ):
            values[name] = min(value, 2) if type(value) is int else value
        elif name in ("n_group", "num_expert_group"):
            values[name] = min(value, 2)
        elif name == "topk_group":
            values[name] = 1
        elif name == "num_kv_shared_layers":
            values[name] = 0
        elif _LAYERS.search(name) and type(value) is int:
            values[name] = value if value in stages else min(value, new_layers)
        elif name == "max_source_positions":
            values[name] = min(value, 96)
        elif _DEPTHS.search(name) and _whole_numbers(value):
            values[name] = [min(v, 2) for v in value]
        elif isinstance(value, list | tuple) and len(value) in old_layers and len(value) > new_layers:
            values[name] = list(value)[:new_layers]
        elif name in ("sliding_window", "sliding_window_size", "local_attention") and type(value) is int:
            values[name] = min(value, 8)
        elif name == "image_size" and _largest(value) > 256:
            values[name] = 224 if type(value) is int else [224] * len(value)
        elif how == "heads" and _HEADS.search(name):
            values[name] = _fewer(value, divisor)
        elif _is_width(name) and not (how == "heads" and _OF_HEADS.search(name)):
            values[name] = _divided(value, divisor)


def _layer_count(values: dict[str, Any]) -> int:
    """Two layers, or as many as it takes to see each kind of layer."""
    kinds = values.get("layer_types") or values.get("layers_block_type") or []
    if not kinds or not isinstance(kinds, list | tuple):
        return 2
    return max(2, max(list(kinds).index(kind) for kind in set(kinds)) + 1)


def _shrink_rope(rope: dict[str, Any], divisor: int) -> None:
    for name, value in rope.items():
        if isinstance(value, dict):
            _shrink_rope(value, divisor)
        elif name == "mrope_section" and value:
            rope[name] = [v // divisor for v in value]


def _is_width(name: str) -> bool:
    return bool(_WIDTH.search(name)) and not _NOT_WIDTH.search(name)


def _divided(value: Any, divisor: int) -> Any:
    if type(value) is int:
        return value // divisor if value >= 4 * divisor and value % divisor == 0 else value
    if _whole_numbers(value):
        return [_divided(v, divisor) for v in value]
    return value


def _fewer(value: Any, divisor: int) -> Any:
    if type(value) is int:
        return max(1, value // divisor)
    return [max(1, v // divisor) for v in value] if _whole_numbers(value) else value


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(type(v) is int for v in value)


def _largest(value: Any) -> int:
    return max(value) if _whole_numbers(value) else value if type(value) is int else 0


def model_class(name: str) -> type[nn.Module]:
    """The class that transformers maps this entry to (the first, where it maps to several)."""
    names = MODEL_MAPPING_NAMES[name]
    return getattr(transformers, names if isinstance(names, str) else names[0])


def build(name: str, how: str, divisor: int, gain: float = 1.0) -> nn.Module:
    """A model with random weights; as large as ``gain`` says, or as initialised if it is 0."""
    config = config_of(name, how, divisor)
    cls = model_class(name)
    with torch.device("meta"):
        try:
            count = sum(parameter.numel() for parameter in cls._from_config(config).parameters())
        except (RuntimeError, NotImplementedError):  # needs real numbers to be built
            count = 0
    if count > LARGEST:
        raise ValueError(f"{count / 1e6:.0f} million parameters at widths / {divisor}")
    config = config_of(name, how, divisor)
    torch.manual_seed(3)
    model = cls._from_config(config).eval().float()
    return wake(model, gain) if gain else model


def wake(model: nn.Module, gain: float = 1.0) -> nn.Module:
    """Give a model weights large enough for attention that is far from uniform."""
    with torch.no_grad():
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                _wake(parameter, isinstance(module, nn.Embedding), gain)
    return model


def _wake(parameter: Tensor, embedding: bool, gain: float) -> None:
    if embedding:
        parameter.normal_(0.0, 1.0)
    elif parameter.dim() >= 2:
        parameter.normal_(0.0, gain * parameter[0].numel() ** -0.5)
    elif parameter.numel() and not float(parameter.abs().max()) < 1e3:  # left as memory came
        parameter.fill_(0.5)


def to_eager(model: nn.Module) -> Callable[[], None]:
    """Have a transformers model materialise its weights, and return them. Returns the way back."""
    configs = {
        id(module.config): module.config
        for module in model.modules()
        if isinstance(getattr(module, "config", None), PretrainedConfig)
    }  # each once, the outer ones first: what is set in them is set in the inner ones, too
    before = [(config, config._attn_implementation) for config in configs.values()]
    with contextlib.suppress(ValueError, AttributeError):
        model.config.output_attentions = True
    _implementation(model, "eager")

    def back() -> None:
        model.config.output_attentions = False
        for config, name in before:
            config._attn_implementation = name

    return back


def _implementation(model: nn.Module, name: str) -> None:
    try:
        model.set_attn_implementation(name)
    except (ValueError, AttributeError, KeyError):
        for module in model.modules():
            config = getattr(module, "config", None)
            if isinstance(config, PretrainedConfig):
                config._attn_implementation = name


def inputs(name: str, model: nn.Module) -> Iterator[dict[str, Any]]:
    """Inputs to try, the likeliest first."""
    if name in recipes.INPUTS:
        yield from recipes.INPUTS[name](model)
        return
    accepted = inspect.signature(model.forward).parameters
    config = model.config
    if any(name in accepted for name in GRIDS):
        for flat in _grid(config):
            yield {k: v for k, v in flat.items() if k in accepted}
    mains = [n for n in (getattr(model, "main_input_name", None), *_MAKERS) if n in accepted]
    for main in dict.fromkeys(mains):
        for given in _MAKERS.get(main, _nothing)(config):
            given = {k: v for k, v in given.items() if k in accepted}
            full = dict(given)
            if "input_ids" in given and "attention_mask" in accepted:
                full["attention_mask"] = padding(*given["input_ids"].shape[:2])
            for key, make in _EXTRAS.items():
                if key in accepted and key not in full:
                    full[key] = make(config)
            if main == "input_ids" and "pixel_values" in accepted:
                for picture in _pixels(config):  # a model of text and pictures that takes them side by side
                    yield full | {k: v for k, v in picture.items() if k in accepted}
            elif main == "input_ids" and "input_features" in accepted:
                for sound in _features(config):
                    yield (
                        full | {"input_features": sound["input_features"]}
                        if "input_features" in sound
                        else full
                    )
            yield full
            if full != given:
                yield given


def boxes(config: Any) -> Tensor:
    """Boxes (batch, length, 4) on a page: left, top, right, bottom."""
    corners = torch.randint(100, (BATCH, LENGTH, 2), generator=torch.Generator().manual_seed(5))
    return torch.cat([corners, corners + 20], -1)


def _nothing(config: Any) -> Iterator[dict[str, Any]]:
    yield from ()


def ids(config: Any, length: int = LENGTH) -> Tensor:
    """Token ids (batch, length) that are nobody's special token."""
    special = set(_specials(config.to_dict()))
    size = min(find(config, "vocab_size", default=VOCABULARY), VOCABULARY)
    plain = [i for i in range(min(4, size - 1), size) if i not in special]
    chosen = torch.randint(len(plain), (BATCH, length), generator=torch.Generator().manual_seed(5))
    return torch.tensor(plain)[chosen]


def _specials(values: dict[str, Any]) -> Iterator[int]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _specials(value)
        elif type(value) is int and _TOKEN.search(str(name)):
            yield value


def padding(batch: int, length: int) -> Tensor:
    """An attention mask whose second row ends in padding."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[1:, length - PADDED :] = 0
    return mask


def find(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these attributes in a config or, failing that, in its sub-configs."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            found = find(value, *names)
            if found is not None:
                return found
    return default


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(11))


def _text(config: Any) -> Iterator[dict[str, Any]]:
    yield {"input_ids": ids(config)}


def _pixels(config: Any) -> Iterator[dict[str, Any]]:
    channels = find(config, "num_channels", "in_channels", "in_chans", default=3)
    channels = channels if type(channels) is int else 3
    size = find(config, "image_size", "img_size", "input_size", "crop_size", default=224)
    high, wide = (size, size) if type(size) is int else tuple(size)[-2:]
    frames = find(config, "num_frames", "frames_per_clip")
    if frames:
        yield {"pixel_values": noise(1, frames, channels, high, wide)}
        yield {"pixel_values_videos": noise(1, frames, channels, high, wide)}
    yield {"pixel_values": noise(BATCH, channels, high, wide)}
    yield {"pixel_values": noise(BATCH, channels, 224, 224)}
    yield {"pixel_values": noise(BATCH, 3, high, wide)}
    yield {"pixel_values": noise(1, 8, channels, high, wide)}
    patch = find(config, "patch_size", default=16)
    if type(patch) is int:
        flat = channels * patch * patch
        merge = find(config, "spatial_merge_size", default=1)
        high, wide = 4 * merge, 6 * merge
        yield {
            "pixel_values": noise(BATCH, high * wide, flat),
            "pixel_attention_mask": torch.ones(BATCH, high * wide, dtype=torch.long),
            "spatial_shapes": torch.tensor([[high, wide]] * BATCH),
            "image_grid_thw": torch.tensor([[1, high, wide]] * BATCH),
        }


def _grid(config: Any) -> Iterator[dict[str, Any]]:
    """Flattened patches with the grid they were taken from."""
    patch, merge = find(config, "patch_size", default=14), find(config, "spatial_merge_size", default=2)
    channels = find(config, "in_channels", "in_chans", "num_channels", default=3)
    merge = merge if type(merge) is int else 2
    high, wide = 4 * merge, 6 * merge
    for frames in (find(config, "temporal_patch_size", default=1), 1):
        flat = noise(2 * high * wide, channels * frames * patch * patch)
        grid = torch.tensor([[1, high, wide]] * 2)
        for name in ("hidden_states", "pixel_values"):
            for key in GRIDS:
                yield {name: flat, key: grid if key.endswith("thw") else grid[:, 1:]}


def _features(config: Any) -> Iterator[dict[str, Any]]:
    own = find(config, "num_mel_bins", "n_mels", "feature_size", "input_dim", "feature_projection_input_dim",
               "input_feat_size", "input_feat_per_channel", "input_channels", "n_mel_bins",
               "input_size")  # fmt: skip
    positions = find(config, "max_source_positions", "max_length", default=100)
    for bins in dict.fromkeys([own or 80, 80, 128, 160, 320, 560]):
        for length in (2 * positions, positions, 96, 256) if positions <= 1500 else (96, 256):
            for shape in ((BATCH, bins, length), (BATCH, length, bins)):
                for name in ("input_features", "input_values"):
                    sound = {name: noise(*shape)}
                    yield sound | {key: torch.ones(BATCH, length, dtype=torch.long) for key in _SOUND_MASKS}
                    yield sound


def _waves(config: Any) -> Iterator[dict[str, Any]]:
    for shape in ((BATCH, 8000), (BATCH, 1, 8000), (BATCH, 1, 24000)):
        yield {"input_values": noise(*shape)}


def _values(config: Any) -> Iterator[dict[str, Any]]:
    yield from _waves(config)
    yield from _features(config)


def _embeddings(config: Any) -> Iterator[dict[str, Any]]:
    width = find(config, "hidden_size", "d_model", default=64)
    yield {"inputs_embeds": noise(BATCH, LENGTH, width)}


def _past_values(config: Any) -> Iterator[dict[str, Any]]:
    length = find(config, "context_length", default=32)
    channels = find(config, "num_input_channels", default=1)
    yield {"past_values": noise(BATCH, length, channels)}
    yield {"past_values": noise(BATCH, length)}


_SOUND_MASKS = ("attention_mask", "input_features_mask", "feature_attention_mask", "padding_mask")
_EXTRAS: dict[str, Callable[[Any], Tensor]] = {
    "decoder_input_ids": lambda config: ids(config, LENGTH - 4),
    "qformer_input_ids": ids,
    "bbox": boxes,
}
_MAKERS = {
    "input_ids": _text,
    "pixel_values": _pixels,
    "pixel_values_videos": _pixels,
    "hidden_states": _grid,
    "input_features": _features,
    "input_values": _values,
    "past_values": _past_values,
    "inputs_embeds": _embeddings,
}
