"""Which extra of manyheads brings a package, for errors that say what to install."""

from __future__ import annotations

# As in pyproject.toml; the names are those that are imported.
EXTRAS = {
    "train": ("accelerate", "PIL", "sacrebleu", "soundfile", "tensorboard"),
    "live": ("fastapi", "starlette", "pydantic", "uvicorn"),
    "notebook": ("anywidget", "traitlets"),
    "tables": ("pandas", "pyarrow"),
    "data": ("datasets",),
    "treebank": ("conllu",),
    "export": ("onnx", "onnxscript", "onnxruntime", "gguf"),
    "openvino": ("openvino",),
    "executorch": ("executorch",),
    "sweep": ("optuna",),
    "cluster": ("ray",),
}
_EXTRA_OF = {package: extra for extra, packages in EXTRAS.items() for package in packages}


def missing_extra(error: ImportError) -> str | None:
    """The sentence for a package that an extra brings and that is not installed; None for other errors.

    >>> missing_extra(ModuleNotFoundError("No module named 'accelerate'", name="accelerate.utils"))
    "this needs accelerate, which is not installed: pip install 'manyheads[train]'"
    >>> missing_extra(ModuleNotFoundError("No module named 'heads'", name="heads")) is None
    True
    """
    package = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or package not in _EXTRA_OF:
        return None
    return f"this needs {package}, which is not installed: pip install 'manyheads[{_EXTRA_OF[package]}]'"
