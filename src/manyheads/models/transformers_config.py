"""Cut models of transformers: their config, and whether plain from_pretrained can load them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeGuard, TypeVar

import torch
from torch import nn

from manyheads.common.compare_outputs import relative_difference, seeded_evaluation, tolerance
from manyheads.common.json_files import read_json
from manyheads.common.types import JsonObject
from manyheads.common.whole_files import write_whole
from manyheads.models.changes import Changes, record_of
from manyheads.models.probe_batch import probe_batch

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

METHOD, VERSION = "manyheads", 1  # of the record that is in a config as its quantization_config
_CONFIG = "config.json"
T = TypeVar("T")
Loads = Callable[["PreTrainedModel", Path], bool]
_HEADS = re.compile(r"head|kv")
_KEYS = re.compile(r"kv|key|query_group")
_WIDTH = re.compile(r"^(head_dim|d_kv|attention_head_dim|attention_head_size|kv_channels)$")


HeadsRecord = TypedDict(
    "HeadsRecord",
    {
        "quant_method": str,
        "version": int,
        "class": str,
        "base": str,  # path of the model without a task's head
        "original_heads": dict[str, list[int]],
        "changes": JsonObject,
    },
)


def is_transformers(model: nn.Module) -> TypeGuard[PreTrainedModel]:
    """Whether this is a model of transformers that can be built from its config alone."""
    return type(model).__module__.startswith("transformers.") and hasattr(model, "config")


def base_path(model: PreTrainedModel) -> str:
    """Where in a model the one without a task's head is: "bert"; "" if it is that one."""
    name: str = model.base_model_prefix
    return name if name in model._modules else ""


def note_in_config(model: nn.Module) -> None:
    """Write the record of a model's changes into its config, from which ``from_pretrained`` reads it
    (`transformers_loading`). So whatever saves the model and its config saves the record.
    """
    record = record_of(model)
    if record is None or not is_transformers(model):
        return
    values: HeadsRecord = {
        "quant_method": METHOD,
        "version": VERSION,
        "class": type(model).__name__,
        "base": base_path(model),
        **record,
    }
    model.config.quantization_config = values
    for name, value in _changed_by_running(model).items():
        setattr(model.config, name, value)


def _changed_by_running(model: PreTrainedModel) -> dict[str, str]:
    """Words of a config that the modules of a new model hold, and those of this one hold otherwise.

    BigBird replaces its sparse attention for good when it reads a short text, and its config still says that
    it is sparse. A model that is built from the config must have the modules whose heads were changed.
    """
    words = {name: value for name, value in vars(model.config).items() if isinstance(value, str)}
    now = _words_of_modules(model, words)
    changed = {name: word for name, word in now.items() if word is not None and word != words[name]}
    if not changed:
        return {}
    with torch.random.fork_rng(), torch.device("meta"):
        new = _words_of_modules(type(model)(_without_record(model.config)), words)
    return {name: word for name, word in changed.items() if new.get(name) == words[name]}


def _words_of_modules(model: nn.Module, names: Iterable[str]) -> dict[str, str | None]:
    """The word that all modules with an attribute of this name have; None for several, or no word."""
    words: dict[str, set[object]] = {}
    for module in model.modules():
        for name in vars(module).keys() & names:
            value = vars(module)[name]
            words.setdefault(name, set()).add(value if isinstance(value, str) else None)
    return {
        name: str(next(iter(values))) if len(values) == 1 and None not in values else None
        for name, values in words.items()
    }


def build(folder: Path, name: str, attention: str | None) -> nn.Module:
    """A model of transformers from the config in a folder, with weights to be filled in."""
    import transformers

    cls: Any = getattr(transformers, name, None)
    is_model = isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)
    if not is_model:
        raise ValueError(
            f"factory: transformers {transformers.__version__} has no model {name}; give a function that "
            "makes the uncut model, or install the version that the model was saved with"
        )
    values = read_json(folder / _CONFIG, dict[str, object], "config")
    config = cls.config_class.from_dict(values)
    options = {} if attention is None else {"attn_implementation": attention}
    model: nn.Module
    with torch.random.fork_rng():
        try:
            model = cls._from_config(copy.deepcopy(config), dtype=torch.float32, **options)
        except ValueError:  # a part that refuses to be told, though it has it by default
            model = cls._from_config(config, dtype=torch.float32)
    return model


def write_config(model: PreTrainedModel, folder: Path, changes: Changes, loads: Loads | None = None) -> bool:
    """Write config.json, if possible such that from_pretrained loads the folder; returns whether it does.

    loads: what finds out whether it does; by default from_pretrained, and a comparison.
    """
    loads = from_pretrained_agrees if loads is None else loads
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(str(folder))
    note_in_config(model)
    config = _describe_weights(model, copy.deepcopy(model.config))
    for plain in (_uniform(config, changes), _per_layer(config, changes)):
        if plain is not None and _fits(model, plain):
            _dump(plain, folder)
            if loads(model, folder):
                return True
    _dump(config, folder)
    return not changes.counts


def _describe_weights(model: PreTrainedModel, config: PretrainedConfig) -> PretrainedConfig:
    config.architectures = [type(model).__name__]
    config.dtype = str(model.dtype).removeprefix("torch.")
    return config


def _dump(config: PretrainedConfig, folder: Path) -> None:
    write_whole(folder / _CONFIG, config.to_json_string(use_diff=True))


def _uniform(config: PretrainedConfig, changes: Changes) -> PretrainedConfig | None:
    """The config with the new numbers of heads, if all layers changed alike; None if not."""
    if not changes.counts or changes.copied or changes.inputs or changes.replaced:
        return None
    new_counts: tuple[dict[int, set[int]], dict[int, set[int]]] = {}, {}  # heads, key heads
    widths = set()
    for count in changes.counts.values():
        for numbers, before, after in zip(new_counts, count["before"], count["after"], strict=True):
            numbers.setdefault(before, set()).add(after)
        widths.add(count["d_key"])
    if any(len(after) > 1 or 0 in after for numbers in new_counts for after in numbers.values()):
        return None
    uniform = _without_record(config)
    for part in parts_of(uniform):
        for name, value in list(vars(part).items()):
            numbers = _numbers(name, *new_counts)
            if type(value) is int and _HEADS.search(name) and not _WIDTH.search(name) and value in numbers:
                setattr(part, name, next(iter(numbers[value])))
            elif _WIDTH.search(name) and len(widths) == 1 and widths != {None}:
                setattr(part, name, next(iter(widths)))
    return uniform


def _per_layer(config: PretrainedConfig, changes: Changes) -> PretrainedConfig | None:
    """The config with other numbers of heads in each layer; None if that cannot say what changed.

    Few classes read ``per_layer_config``, and some only a part of it: whether this one does is for the caller
    to find out.
    """
    if not changes.counts or changes.copied or changes.inputs or changes.replaced or changes.emptied:
        return None
    new = _without_record(config)
    text: Any = new.get_text_config()
    layers: dict[int, dict[str, object]] = {}
    try:
        for number, values in text.to_dict().get("per_layer_config", {}).items():
            layers[int(number)] = values
        for site, count in changes.counts.items():
            (number,) = re.findall(r"(?<=\.)\d+(?=\.|$)", f".{site}")
            pairs = [{before: after} for before, after in zip(count["before"], count["after"], strict=True)]
            for name, value in vars(text.per_layer_config[int(number)]).items():
                new_counts = _numbers(name, *pairs)
                if (
                    type(value) is int
                    and _HEADS.search(name)
                    and not _WIDTH.search(name)
                    and value in new_counts
                ):
                    layers.setdefault(int(number), {})[name] = new_counts[value]
        text.per_layer_config = layers
    except Exception:  # no layers that the config numbers, or an older transformers
        return None
    return new


def _numbers(name: str, heads: dict[int, T], key_heads: dict[int, T]) -> dict[int, T]:
    """What numbers of heads became, for an attribute of this name: where key heads were as many as heads and
    are not any more, its name says which of them it counts.
    """
    return heads | key_heads if _KEYS.search(name) else key_heads | heads


def _without_record(config: PretrainedConfig) -> PretrainedConfig:
    new = copy.deepcopy(config)
    noted = getattr(new, "quantization_config", None)
    if isinstance(noted, dict) and noted.get("quant_method") == METHOD:
        del new.quantization_config
    return new


def parts_of(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from parts_of(value)


def _fits(model: PreTrainedModel, config: PretrainedConfig) -> bool:
    """Whether a model of this config has tensors of the same shapes."""
    try:
        with torch.device("meta"):
            empty = type(model)._from_config(copy.deepcopy(config))
    except Exception:  # a number of heads that this class does not take
        return False
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    return {name: tensor.shape for name, tensor in empty.state_dict().items()} == shapes


def from_pretrained_agrees(model: PreTrainedModel, folder: Path) -> bool:
    """Whether from_pretrained loads the same model."""
    import transformers

    logging: Any = transformers.utils.logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        reloaded: Any = type(model).from_pretrained(
            str(folder), local_files_only=True, attn_implementation=model.config._attn_implementation
        )
        batch = probe_batch(model)
        with seeded_evaluation(model), seeded_evaluation(reloaded):
            error = relative_difference(model(**batch), reloaded.to(model.device)(**batch))
    except Exception:  # it needs heads.json, then
        return False
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
    return error <= tolerance(model)
