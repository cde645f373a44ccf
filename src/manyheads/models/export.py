"""export: a model, cut or not, in a format that runs without manyheads, and without torch."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from manyheads.common.out_folder import check_free
from manyheads.common.version import __version__
from manyheads.common.whole_files import whole_folder, write_whole
from manyheads.models import gguf_export, graph_export
from manyheads.models.loaded import Loaded, if_any
from manyheads.models.open import open_model
from manyheads.models.opening import Format
from manyheads.models.probe_batch import probe_batch
from manyheads.nn.orthogonal_rows import plain

FORMATS: tuple[Format, ...] = get_args(Format)
_EXTRAS: dict[Format, str] = {
    "onnx": "export", "gguf": "export", "openvino": "openvino", "executorch": "executorch",
}  # fmt: skip
_PACKAGES: dict[Format, tuple[str, ...]] = {
    "onnx": ("onnx", "onnxscript", "onnxruntime"), "gguf": ("gguf",), "openvino": ("openvino",),
    "executorch": ("executorch",),
}  # fmt: skip
_EXPORTERS: dict[Format, str] = {"torch-export": "dynamo"}  # transformers' names that are not ours


@dataclass(frozen=True)
class Exported:
    """What `export` wrote.

    out: the folder.
    target: the format.
    files: names of the files of the model in it.
    differences: ``{what was run: largest difference from the model}``, relative to the largest output.
    notes: sentences about what the files do not do.
    """

    out: Path
    target: str
    files: list[str]
    differences: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def export(
    model: nn.Module | Loaded | str | PathLike[str],
    *,
    to: Format,
    out: str | PathLike[str],
    batch: Mapping[str, Tensor] | None = None,
    **opening: Any,
) -> Exported:
    """Write a model in another format, run what was written, and compare it with the model.

    The folder is written completely, with outputs that agree to 1e-4, or not at all. Weights are written as
    float32.

    Parameters
    ----------
    model: a module; what `open_model` opens: a folder, or a name on the hub; or what it returned.
    to: ``"onnx"`` (onnxruntime), ``"torch-export"`` (`torch.export.load`), ``"gguf"`` (llama.cpp; models with
        the layers of Llama), ``"openvino"``, or ``"executorch"``.
    out: a folder that does not exist yet, or is empty. A model with a key/value cache is written twice for
        ONNX and OpenVINO, without and with the cache.
    batch: arguments of the model by name. Default: made from the config of a transformers model.
    opening: ``device``, ``dtype``, ``device_map``, ``attention`` and ``revision`` of a model that is opened,
        as for `open_model`; on the CPU by default.

    Raises
    ------
    ImportError if the packages that the format needs are not installed; ValueError if the
    format cannot take the model, or gives other outputs. The message names the module.

    See Also
    --------
    save : the model as a folder that `load` and ``from_pretrained`` read.
    push : that folder on the hub.

    References
    ----------
    Bai, Lu, Zhang et al. 2019, ONNX: open neural network exchange.
    Gerganov et al. 2023, GGUF (the file format of llama.cpp).

    Examples
    --------
    >>> import tempfile, torch
    >>> import manyheads as mh
    >>> layer = mh.cut(mh.MultiHeadAttention(6, heads=3), {0: [1]}, torch.randn(2, 5, 6))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     batch = {"query": torch.randn(2, 5, 6)}
    ...     done = mh.export(layer, to="torch-export", out=f"{folder}/out", batch=batch)
    ...     program = torch.export.load(f"{folder}/out/model.pt2")
    >>> done.files, program.module()(query=torch.randn(3, 7, 6)).shape
    (['model.pt2'], torch.Size([3, 7, 6]))
    """
    if to not in FORMATS:
        raise ValueError(f"to: got {to!r}; expected one of {', '.join(FORMATS)}")
    check_installed(to)
    out = Path(out)
    check_free(out)
    tokenizer: Any = getattr(model, "tokenizer", None)
    if not isinstance(model, nn.Module):
        loaded = model if isinstance(model, Loaded) else _open(model, opening)
        model, tokenizer = loaded.model, if_any(loaded.tokenizer) or if_any(loaded.processor)
    network = _prepare_model(model)
    sample = probe_batch(network) if batch is None else batch
    inputs = {name: x.cpu().contiguous() if isinstance(x, Tensor) else x for name, x in sample.items()}
    with whole_folder(out) as folder:
        if to == "gguf":
            differences, notes = gguf_export.write(network, inputs, folder, tokenizer)
        else:
            differences, notes = graph_export.write(network, inputs, folder, to)
            if hasattr(tokenizer, "save_pretrained"):
                tokenizer.save_pretrained(str(folder))
        files = sorted(path.name for path in folder.iterdir() if path.name.startswith("model"))
        result = Exported(out, to, files, differences, notes)
        record = {"format": "manyheads export", "manyheads": __version__, "class": type(network).__name__}
        record |= {name: value for name, value in asdict(result).items() if name != "out"}
        write_whole(folder / "export.json", json.dumps(record, indent=1))
    return result


def _open(model: str | PathLike[str], opening: Mapping[str, Any]) -> Loaded:
    anywhere = opening.get("device") is None and opening.get("device_map") is None
    return open_model(str(model), head=True, **{**opening, **({"device": "cpu"} if anywhere else {})})


def check_installed(to: Format) -> None:
    """Raise an ImportError that names the extra, unless everything that a format needs is installed."""
    missing = [name for name in _PACKAGES.get(to, ()) if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"{to} needs {', '.join(missing)}: pip install 'manyheads[{_EXTRAS[to]}]'")
    exporter = f"transformers.exporters.exporter_{_EXPORTERS.get(to, to)}"
    if to != "gguf" and importlib.util.find_spec(exporter) is None:
        raise ImportError(f"{to} needs a newer transformers: pip install -U transformers")


def _prepare_model(model: nn.Module) -> nn.Module:
    """A copy to export: float32 on the CPU, in eval mode, without gradients."""
    ready = copy.deepcopy(plain(model)).cpu()
    if {x.dtype for x in ready.parameters() if x.is_floating_point()} - {torch.float32}:
        ready = ready.float()  # which transformers refuses where weights are quantized
    return ready.eval().requires_grad_(False)
