"""A model of transformers in a folder that is not opened: its structure, and where its weights are."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from manyheads.common.errors import describe_error
from manyheads.common.types import Heads
from manyheads.models.checkpoint import Checkpoint
from manyheads.models.pretrained import class_with_head
from manyheads.surgery.plan import Plan
from manyheads.surgery.small_twin import structure

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class LargeModel:
    """A model that is not opened.

    model: its modules, with parameters that have no memory.
    config: of transformers.
    checkpoint: its tensors, in files.
    names: the name in the files for every tensor of the model that is there.

    heads: as for `cut`. A plan decides for which class of the folder (with or without the head of a task) it
        was made, and is checked.
    """

    def __init__(self, folder: Path, heads: Heads) -> None:
        self.config = _config(folder)
        self.checkpoint = Checkpoint(folder)
        entries = self.checkpoint.entries.values()
        largest = max(entries, key=lambda entry: math.prod(entry.shape), default=None)
        if largest is None:
            raise ValueError(f"MODEL: the safetensors files of {folder} are empty; get the model again")
        self._dtype = largest.dtype
        fingerprints, problem = [], ""
        for cls in _classes(self.config):
            self._class = cls
            self.model = self.structure()
            self.names = self._named()
            missing = [name for name, _ in self.model.named_parameters() if name not in self.names]
            if missing:
                problem = problem or f"its weights lack {len(missing)} tensors, {missing[0]} among them"
                continue
            self._check_shapes(folder)
            if not isinstance(heads, Plan):
                return
            fingerprints += [self.fingerprint(dtype) for dtype in (None, torch.float32)]
            if heads.model in fingerprints:
                return
        if fingerprints and isinstance(heads, Plan):
            raise ValueError(
                f"plan: it was made for the model {heads.model or 'unknown'}, and {folder} is "
                f"{fingerprints[0]}: other shapes or weights; rank the heads of this model and plan again"
            )
        raise ValueError(
            f"MODEL: the files of {folder} do not name their tensors as {type(self.model).__name__} does "
            f"({problem}); open it and use cut"
        )

    def structure(self) -> PreTrainedModel:
        """The modules once more."""
        return structure(self._class, self.config, self._dtype)

    def _named(self) -> dict[str, str]:
        """The name in the files of each tensor; tied ones have one in common."""
        prefix = self.model.base_model_prefix
        by_tensor: dict[int, str] = {}
        state = self.model.state_dict(keep_vars=True)
        for name, tensor in state.items():
            for candidate in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
                if candidate in self.checkpoint.entries:
                    by_tensor.setdefault(id(tensor), candidate)
        return {name: by_tensor[id(tensor)] for name, tensor in state.items() if id(tensor) in by_tensor}

    def _check_shapes(self, folder: Path) -> None:
        for name, tensor in self.model.state_dict().items():
            if name in self.names and self.checkpoint.entries[self.names[name]].shape != tuple(tensor.shape):
                raise ValueError(
                    f"MODEL: {self.names[name]} in {folder} is "
                    f"{self.checkpoint.entries[self.names[name]].shape}, and its config.json asks for "
                    f"{tuple(tensor.shape)}; get the model again"
                )

    def fingerprint(self, dtype: torch.dtype | None) -> str:
        """That of the open model (`fingerprint`), from the files, if its weights have this dtype; None
        for that of the files.
        """
        digest = hashlib.sha256()
        for name, parameter in self.model.named_parameters():
            shape, held = tuple(parameter.shape), self.checkpoint.entries[self.names[name]].dtype
            digest.update(f"{name} {shape} {held if dtype is None else dtype}".encode())
            if parameter.numel():
                corners = [[step * (size - 1) // 2 for size in shape] for step in (0, 1, 2)]
                digest.update(str(self.checkpoint.numbers(self.names[name], corners)).encode())
        return digest.hexdigest()[:16]


def _config(folder: Path) -> PretrainedConfig:
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ValueError(f"MODEL: {folder} has no config.json; expected a folder that transformers wrote")
    if (folder / "heads.json").is_file():
        raise ValueError(
            f"MODEL: {folder} was already cut; remove all heads at once from the uncut model, or use cut"
        )
    try:
        config: Any = AutoConfig.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise ValueError(f"MODEL: the folder {folder} is damaged ({describe_error(error)})") from error
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"MODEL: the weights of {folder} are quantised, and packed numbers cannot be taken apart; cut "
            "the model before it is quantised"
        )
    return config  # type: ignore[no-any-return]


def _classes(config: PretrainedConfig) -> list[type[PreTrainedModel]]:
    """The class that a config names, and the one without the head of a task."""
    from transformers import MODEL_MAPPING

    base: object = MODEL_MAPPING.get(type(config), None)
    named = [class_with_head(config), *(base if isinstance(base, tuple) else [base])]
    return list(dict.fromkeys(cls for cls in named if cls is not None))
