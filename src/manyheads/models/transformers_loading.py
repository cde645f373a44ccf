"""``from_pretrained`` for models whose heads were changed, through transformers' hook for quantizers.

A quantizer may replace modules of a new, empty model before its weights are read. That is what a cut model
needs: its config.json has the record of the changes as ``quantization_config``, and `HeadsQuantizer` reshapes
the empty model by it. Afterwards nothing is left of the quantizer, since nothing is quantized: the model
trains, casts and compiles like any other. The record stays in the config, so that ``save_pretrained`` writes
it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_type_hints

from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from manyheads.common.json_files import check_fields, check_type, in_one_sentence
from manyheads.common.types import JsonObject
from manyheads.models.changes import Changes, reshape
from manyheads.models.transformers_config import METHOD, VERSION, HeadsRecord, base_path, note_in_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@register_quantization_config(METHOD)
class HeadsConfig(QuantizationConfigMixin):
    """The record of changed heads, as transformers passes it on; it checks what the file says."""

    def __init__(self, **record: Any) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]
        self.record: HeadsRecord = record  # type: ignore[assignment]
        version = record.get("version")
        if type(version) is int and version > VERSION:
            raise ValueError(
                f"config.json: a newer manyheads wrote it (version {version}); upgrade manyheads"
            )
        check_type(record, HeadsRecord, "config.json: quantization_config")
        check_fields(record["changes"], get_type_hints(Changes), "config.json: changes")

    def to_dict(self) -> JsonObject:
        """What config.json holds."""
        return dict(self.record)


@register_quantizer(METHOD)
class HeadsQuantizer(HfQuantizer):
    """Gives a new model the heads that its weights have."""

    def __init__(self, quantization_config: HeadsConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self._shapes: dict[str, tuple[int, ...]] = {}

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, **options: object
    ) -> PreTrainedModel:
        record: HeadsRecord = self.quantization_config.record  # type: ignore[attr-defined]
        with in_one_sentence(f"config.json: the changes of its heads do not fit {type(model).__name__}"):
            changes, original_heads = _for_class(record, model)
            reshape(model, changes)
            for path in (*changes.replaced, *changes.emptied):
                # else the class begins the weights of a module that is no more
                setattr(model.get_submodule(path.rpartition(".")[0]), "_is_hf_initialized", True)  # noqa: B010
        setattr(model, "original_heads", original_heads)  # noqa: B010
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        return model

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **options: object
    ) -> PreTrainedModel:
        for name, tensor in model.state_dict().items():  # of quantized models, transformers does not check it
            if tuple(tensor.shape) != self._shapes[name]:
                raise ValueError(
                    f"{model.config.name_or_path}: {name} is {tuple(tensor.shape)}, but config.json says "
                    f"{self._shapes[name]}; get the model again"
                )
        self.remove_quantization_config(model)
        for part in model.modules():
            vars(getattr(part, "config", self)).pop("_is_quantized", None)
        note_in_config(model)
        return model

    def is_serializable(self) -> bool:
        """Whether ``save_pretrained`` may write it."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether it may be trained."""
        return True


def _for_class(record: HeadsRecord, model: PreTrainedModel) -> tuple[Changes, dict[str, list[int]]]:
    """The record for a class that may not be the saved one: with or without a task's head, or half of it."""
    changes, heads = Changes(**record["changes"]), record["original_heads"]
    if type(model).__name__ == record["class"]:
        return changes, heads
    before, here = record["base"], base_path(model)
    moved_paths = {path: _move_path(path, before, here) for path in changes.copied}
    copied = tuple(path for path in moved_paths.values() if path is not None and _has(model, path))

    def move_name(name: str) -> str | None:
        """The name of the same thing in this class; None if it is not there."""
        new = _move_path(name, before, here)
        module = "" if new is None else new.partition("#")[0]
        exists = _has(model, module) or _has(model, module.rpartition(".")[0]) or module.startswith(copied)
        return new if exists else None

    def keep_existing(entries: JsonObject) -> JsonObject:
        return {new: value for name, value in entries.items() if (new := move_name(name)) is not None}

    values: JsonObject = dict(vars(changes))
    for name, entries in values.items():
        if isinstance(entries, dict):
            values[name] = keep_existing(entries)
    values["replaced"] = [new for path in changes.replaced if (new := move_name(path)) is not None]
    values["copied"] = {path: _move_path(source, before, here) for path, source in values["copied"].items()}
    if changes.counts and not values["counts"]:
        raise ValueError(f"it has none of the heads of {record['class']}")
    return Changes(**values), keep_existing(heads)


def _move_path(path: str, before: str, here: str) -> str | None:
    """A path of one class in another, where the base model is elsewhere; None for what is outside of it."""
    if before == here:
        return path
    if before and path != before and not path.startswith(f"{before}."):
        return None
    return ".".join(filter(None, (here, path.removeprefix(before).removeprefix("."))))


def _has(model: PreTrainedModel, path: str) -> bool:
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True
