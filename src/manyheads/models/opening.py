"""How a model is opened: the options that commands share."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

_DEVICE = "Where the model runs: cpu, cuda:1, mps ...; the accelerator, if any, by default."
Format = Literal["onnx", "torch-export", "gguf", "openvino", "executorch"]  # that `export` writes
Device = Annotated[str | None, _DEVICE]  # for a command without the other options of `Opening`


@dataclass(frozen=True)
class Opening:
    """How a model is opened, as `open_model` takes it. The text beside each type is the help of its option.

    >>> Opening(dtype="bfloat16").how["dtype"]
    'bfloat16'
    """

    device: Annotated[str | None, _DEVICE, "Model"] = None
    dtype: Annotated[
        str | None,
        "Data type of the weights: float32, bfloat16, float16, float64, or auto for those of the files; "
        "float32 on a CPU by default.",
        "Model",
    ] = None
    device_map: Annotated[
        str | None, "Spread the model: auto, balanced, sequential, or JSON from modules to devices.", "Model"
    ] = None
    attention: Annotated[
        str | None,
        "The attention kernel: sdpa, eager, flash_attention_2 ...; the model's by default.",
        "Model",
    ] = None
    revision: Annotated[str | None, "A branch, tag or commit of a model on the hub.", "Model"] = None

    @property
    def how(self) -> dict[str, Any]:
        """The arguments of `open_model`."""
        return {field.name: getattr(self, field.name) for field in fields(Opening)}
