"""A small batch that a transformers model can run, made from what its class and config say."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from manyheads.common.devices import device_of
from manyheads.common.errors import describe_error
from manyheads.common.preserved_state import evaluating
from manyheads.common.types import Batch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LENGTH, _BATCH, _PADDED = 11, 2, 3
_SPECIAL = re.compile(r"(_token_id|_token_index|_token|_index|_id)s?$")


def probe_batch(model: nn.Module) -> dict[str, Tensor]:
    """Inputs by name that the model runs on, with padding if it takes a mask.

    Raises
    ------
    ValueError for models that are not of transformers, or take what cannot be guessed: give a batch.

    Examples
    --------
    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(hidden_size=6, num_attention_heads=2, num_hidden_layers=1, intermediate_size=5)
    >>> {name: tuple(value.shape) for name, value in probe_batch(BertModel(config)).items()}
    {'input_ids': (2, 11), 'attention_mask': (2, 11)}
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        raise ValueError(
            f"batch: {type(model).__name__} is not a transformers model, so its input cannot be guessed; "
            "give a small batch: a dict, a tuple, or a tensor"
        )
    device = device_of(model)
    dtype = next((x.dtype for x in model.parameters() if x.is_floating_point()), torch.float32)
    problem = ""
    with evaluating(model):
        for candidate in _candidates(model, config):
            inputs = {name: _to(value, device, dtype) for name, value in candidate.items()}
            try:
                with torch.no_grad():
                    model(**inputs)
            except Exception as error:  # whatever it is, the model does not take this
                problem = problem or describe_error(error)
            else:
                return inputs
    raise ValueError(
        f"batch: could not guess the input of {type(model).__name__} ({problem or 'no input fits'}); "
        "give a small batch"
    )


def variations(model: nn.Module, batch: Batch) -> Iterator[dict[str, object]]:
    """The batch with other inputs that a model takes: without its masks, and with masks, positions and token
    types that it leaves out. Only those that the model runs on.

    Examples
    --------
    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(hidden_size=6, num_attention_heads=2, num_hidden_layers=1, intermediate_size=5)
    >>> model = BertModel(config)
    >>> [sorted(inputs) for inputs in variations(model, probe_batch(model))]
    [['input_ids'], ['attention_mask', 'input_ids', 'position_ids', 'token_type_ids']]
    """
    if not isinstance(batch, Mapping):
        return
    accepted = inspect.signature(model.forward).parameters
    masks = [name for name in batch if "mask" in name and accepted.get(name, _NEEDED).default is None]
    if masks:
        without = {name: value for name, value in batch.items() if name not in masks}
        if _runs(model, without):
            yield without
    extended = dict(batch)
    for name, make in _OPTIONAL.items():
        of = "decoder_input_ids" if name.startswith("decoder_") else "input_ids"
        ids = batch.get(of)
        if name in batch or name not in accepted or not isinstance(ids, Tensor) or ids.dim() != 2:
            continue
        if _runs(model, extended | {name: make(ids)}):
            extended |= {name: make(ids)}
    if len(extended) > len(batch):
        yield extended


def _runs(model: nn.Module, batch: Mapping[str, object]) -> bool:
    try:
        with evaluating(model):
            model(**batch)
    except Exception:  # whatever it is, the model does not take this
        return False
    return True


def _to(value: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return value.to(device, dtype if value.is_floating_point() else None)


def _candidates(model: nn.Module, config: PretrainedConfig) -> Iterator[dict[str, Tensor]]:
    accepted = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", None)
    for name in dict.fromkeys([main, *_MAKERS]):
        if name not in accepted or name not in _MAKERS:
            continue
        for inputs in _MAKERS[name](config):
            full = {key: value for key, value in inputs.items() if key in accepted}
            if "input_ids" in full and "attention_mask" in accepted:
                full["attention_mask"] = _padding(full["input_ids"])
            for key, make in _COMPANIONS.items():
                if key in accepted and key not in full:
                    full[key] = make(config)
            yield full
            yield {key: value for key, value in inputs.items() if key in accepted}


def _find(config: PretrainedConfig, *names: str, default: Any = None) -> Any:
    """The first of these that a config or one of its parts has."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    for value in vars(config).values():
        if hasattr(value, "to_dict"):
            inner = _find(value, *names)
            if inner is not None:
                return inner
    return default


def _ids(config: PretrainedConfig, length: int = _LENGTH) -> Tensor:
    """Token ids (batch, length) that are not special."""
    special = set(_specials(config.to_dict()))
    size = int(_find(config, "vocab_size", default=100))
    plain = [i for i in range(min(4, size - 1), min(size, 5000)) if i not in special]
    chosen = torch.randint(len(plain), (_BATCH, length), generator=torch.Generator().manual_seed(5))
    return torch.tensor(plain)[chosen]


def _specials(values: dict[str, object]) -> Iterator[int]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _specials(value)
        elif type(value) is int and _SPECIAL.search(str(name)):
            yield value


def _padding(ids: Tensor) -> Tensor:
    mask = torch.ones_like(ids)
    mask[1:, max(ids.shape[1] - _PADDED, 1) :] = 0
    return mask


def _counted(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1], device=ids.device).expand_as(ids).contiguous()


def _kinds(ids: Tensor) -> Tensor:
    return (_counted(ids) > ids.shape[1] // 2).long()


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(11))


def _text(config: PretrainedConfig) -> Iterator[dict[str, Tensor]]:
    yield {"input_ids": _ids(config)}


def _pixels(config: PretrainedConfig) -> Iterator[dict[str, Tensor]]:
    channels = _find(config, "num_channels", "in_channels", default=3)
    size = _find(config, "image_size", "input_size", default=224)
    high, wide = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    frames = _find(config, "num_frames")
    if frames:
        yield {"pixel_values": _noise(1, frames, channels, high, wide)}
    yield {"pixel_values": _noise(_BATCH, channels, high, wide)}


def _sound(config: PretrainedConfig) -> Iterator[dict[str, Tensor]]:
    yield {"input_values": _noise(_BATCH, 4000)}
    bins = _find(config, "num_mel_bins", "feature_size", "input_feat_per_channel", default=80)
    positions = _find(config, "max_source_positions", default=48)
    for length in (2 * positions, positions, 96):
        for shape in ((_BATCH, bins, length), (_BATCH, length, bins)):
            yield {"input_features": _noise(*shape), "input_values": _noise(*shape)}


_NEEDED = inspect.Parameter("needed", inspect.Parameter.POSITIONAL_OR_KEYWORD)
_OPTIONAL: dict[str, Callable[[Tensor], Tensor]] = {
    "attention_mask": _padding, "decoder_attention_mask": _padding, "position_ids": _counted,
    "token_type_ids": _kinds,
}  # fmt: skip
_COMPANIONS: dict[str, Callable[[PretrainedConfig], Tensor]] = {
    "decoder_input_ids": lambda config: _ids(config, 5)
}
_MAKERS: dict[str, Callable[[PretrainedConfig], Iterator[dict[str, Tensor]]]] = {
    "input_ids": _text,
    "pixel_values": _pixels,
    "input_features": _sound,
    "input_values": _sound,
}
