"""Models as graphs: ONNX, torch.export, OpenVINO and ExecuTorch, through the exporters of transformers.

What was written is run on inputs of other sizes and, where it has a cache, token by token from an empty one.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import io
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.common.compare_outputs import relative_difference, seeded_evaluation
from manyheads.common.errors import describe_error
from manyheads.common.types import Keywords
from manyheads.models.transformers_config import is_transformers

TOLERANCE = 1e-4
Run = Callable[[Keywords], dict[str, Tensor]]  # from inputs to outputs, by name
_PAST = "past_key_values"


def write(model: nn.Module, inputs: Keywords, folder: Path, to: str) -> tuple[dict[str, float], list[str]]:
    """Write the files of a graph format and run them.

    Returns
    -------
    Differences from the model by what was run, and notes.
    """
    differences: dict[str, float] = {}
    notes: list[str] = []
    has_cache = _has_cache(model, inputs)
    for module in model.modules() if has_cache else ():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "use_cache"):  # a decoder may have a config of its own
            config.use_cache = False
    run = _write_file(model, inputs, folder / "model", to)
    differences["the same sizes"] = _compare(model, run, inputs, to, "the same sizes")
    for label, other_inputs in _other_sizes(model, inputs):
        try:
            differences[label] = _compare(model, run, other_inputs, to, label)
        except _RefusedError as error:
            notes.append(f"it does not run on {label} ({error})")
    if has_cache and to in ("onnx", "openvino"):
        try:
            differences |= _with_cache(model, inputs, folder / "model_with_cache", to)
        except _RefusedError as error:
            for file in folder.glob("model_with_cache*"):
                file.unlink()
            notes.append(f"only without a cache: {error}")
    elif has_cache:
        notes.append(f"only without a cache, which {to} files do not have")
    return differences, notes


class _RefusedError(ValueError):
    """A format that cannot take or run a model, which may do without."""


def _has_cache(model: nn.Module, inputs: Mapping[str, object]) -> bool:
    """Whether a model returns the keys and values of its past unless it is asked not to."""
    if not is_transformers(model) or "use_cache" not in inspect.signature(model.forward).parameters:
        return False
    with seeded_evaluation(model):
        return getattr(model(**copy.deepcopy(dict(inputs)), use_cache=True), _PAST, None) is not None


def _write_file(model: nn.Module, inputs: dict[str, object], path: Path, to: str) -> Run:
    """Write one file, and return what runs it."""
    try:
        with _silent(), torch.no_grad():
            return _WRITERS[to](model, copy.deepcopy(inputs), path)
    except Exception as error:
        path_of = {id(module): name for name, module in model.named_modules()}
        frames = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        paths = [path_of[id(part)] for part in frames if isinstance(part, nn.Module) and id(part) in path_of]
        at = f" at {paths[-1]}" if paths and paths[-1] else ""
        raise _RefusedError(
            f"to: {to} cannot take {type(model).__name__}{at} ({describe_error(error, 300)})"
        ) from error


@contextmanager
def _silent() -> Iterator[None]:
    """Exporters report to the terminal; what matters is in their errors."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _expected(model: nn.Module, inputs: Mapping[str, object]) -> dict[str, Tensor]:
    with seeded_evaluation(model):
        return _leaves(model(**copy.deepcopy(dict(inputs))))


def _leaves(output: object) -> dict[str, Tensor]:
    """The tensors of an output by the names that the exporters give them."""
    return dict(_exporters().utils.get_leaf_tensors(output))


def _exporters() -> Any:
    importlib.import_module("transformers.exporters.utils")
    return importlib.import_module("transformers.exporters")


def _compare(model: nn.Module, run: Run, inputs: dict[str, object], to: str, label: str) -> float:
    """The difference of the outputs. Raises if it does not run, or the difference is too large."""
    expected = _expected(model, inputs)
    try:
        with _silent():
            outputs = run(copy.deepcopy(inputs))
    except Exception as error:
        raise _RefusedError(describe_error(error, 300)) from error
    return _check_close(expected, outputs, to, label)


def _check_close(expected: dict[str, Tensor], outputs: dict[str, Tensor], to: str, label: str) -> float:
    if not outputs or not set(outputs) <= set(expected):
        raise ValueError(f"to: {to} has the outputs {sorted(outputs)}; expected {sorted(expected)}")
    worst = 0.0
    for name, tensor in outputs.items():
        error = relative_difference([expected[name].double()], [tensor.double()])
        if not error <= TOLERANCE:
            raise ValueError(
                f"to: {to} computes other numbers: on {label}, {name} differs by {error:.1e}; expected at "
                f"most {TOLERANCE:.0e}. Nothing was written"
            )
        worst = max(worst, error)
    return worst


def _other_sizes(model: nn.Module, inputs: dict[str, object]) -> Iterator[tuple[str, dict[str, object]]]:
    """Inputs with one sequence more, and longer ones, where the model takes them."""
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "a larger batch": lambda x: torch.cat([x, x[:1]]),
        "longer sequences": lambda x: torch.cat([x, x[:, : x.shape[1] // 2]], 1) if x.dim() > 1 else x,
    }
    for label, change in changes.items():
        try:
            other = {name: change(x) if isinstance(x, Tensor) else x for name, x in inputs.items()}
            _expected(model, other)
        except Exception:  # a size that the model does not take either
            continue
        yield label, other


def _with_cache(model: Any, inputs: Keywords, path: Path, to: str) -> dict[str, float]:
    """Write a file that takes and returns the keys and values of the past, and run it token by token."""
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor) or getattr(model.config, "is_encoder_decoder", False):
        raise _RefusedError("a cache is written for models that read token ids and continue them")
    ids = torch.cat([ids, ids], 1)[:, :8]
    with torch.no_grad():
        past = getattr(model(input_ids=ids[:, :5], use_cache=True), _PAST)
    sample = {
        "input_ids": ids[:, 5:8].clone(),
        "attention_mask": torch.ones_like(ids[:, :8]),
        _PAST: past,
        "use_cache": True,
    }
    run = _write_file(model, sample, path, to)
    expected = _expected(model, {"input_ids": ids, "use_cache": True})
    past_tensors = {name: x[:, :, :0] for name, x in expected.items() if name.startswith(f"{_PAST}.")}
    position, steps = 0, [ids.shape[1] - 4, 2, 1, 1]
    pieces = []
    for step in steps:
        values = {
            "input_ids": ids[:, position : position + step],
            "attention_mask": torch.ones_like(ids[:, : position + step]),
        }
        try:
            with _silent():
                outputs = run(values | past_tensors)
        except Exception as error:
            raise _RefusedError(f"{to} does not run on a cache ({describe_error(error, 300)})") from error
        past_tensors = {name: tensor for name, tensor in outputs.items() if name in past_tensors}
        pieces.append({name: tensor for name, tensor in outputs.items() if name not in past_tensors})
        position += step
    joined_outputs = {name: torch.cat([piece[name] for piece in pieces], 1) for name in pieces[0]}
    return {"token by token": _check_close(expected, joined_outputs | past_tensors, to, "tokens one by one")}


def _onnx(model: nn.Module, inputs: Keywords, path: Path) -> Run:
    import onnxruntime

    file = path.with_suffix(".onnx")
    exporters = _exporters()
    exporters.OnnxExporter().export(model, inputs, exporters.OnnxConfig(dynamic=True, output_path=str(file)))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    outputs = [output.name.removeprefix("output.") for output in session.get_outputs()]

    def run(values: Keywords) -> dict[str, Tensor]:
        arguments = {x.name: values[x.name.removeprefix("input.")].numpy() for x in session.get_inputs()}
        return dict(zip(outputs, map(torch.from_numpy, session.run(None, arguments)), strict=True))

    return run


def _torch(model: nn.Module, inputs: Keywords, path: Path) -> Run:
    exporters = _exporters()
    file = path.with_suffix(".pt2")
    exported = exporters.DynamoExporter().export(model, inputs, exporters.DynamoConfig(dynamic=True))
    torch.export.save(exported, file)
    program = torch.export.load(file).module()

    def run(values: Keywords) -> dict[str, Tensor]:
        return _leaves(program(**values))

    return run


def _openvino(model: nn.Module, inputs: Keywords, path: Path) -> Run:
    import openvino

    exporters = _exporters()
    file = path.with_suffix(".xml")
    config = exporters.OpenVINOConfig(
        dynamic=True, output_path=str(file), compress_to_fp16=False, stateful=False
    )
    exporters.OpenVINOExporter().export(model, inputs, config)
    compiled = openvino.Core().compile_model(str(file), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def run(values: Keywords) -> dict[str, Tensor]:
        names = [port.any_name for port in compiled.inputs]
        got = compiled({name: values[name.removeprefix("input.")].numpy() for name in names})
        return {
            port.any_name.removeprefix("output."): torch.from_numpy(got[port].copy())
            for port in compiled.outputs
        }

    return run


def _executorch(model: nn.Module, inputs: Keywords, path: Path) -> Run:
    from executorch.runtime import Runtime

    exporters = _exporters()
    file = path.with_suffix(".pte")
    config = exporters.ExecutorchConfig(backend="xnnpack", dynamic=True)
    program = exporters.ExecutorchExporter().export(model, inputs, config)
    file.write_bytes(program.buffer)
    names = list(_expected(model, inputs))
    method = Runtime.get().load_program(file).load_method("forward")

    def run(values: Keywords) -> dict[str, Tensor]:
        return dict(zip(names, method.execute(list(values.values())), strict=True))

    return run


_WRITERS: dict[str, Callable[[nn.Module, Keywords, Path], Run]] = {
    "onnx": _onnx, "torch-export": _torch, "openvino": _openvino, "executorch": _executorch,
}  # fmt: skip
