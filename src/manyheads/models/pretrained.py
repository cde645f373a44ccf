"""Models of transformers: a folder, a name on the hub, a GGUF file, or an adapter (PEFT)."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from manyheads.common.errors import describe_error, first_line
from manyheads.common.types import Keywords
from manyheads.models.loaded import Loaded, readers_of, tokenizer_of
from manyheads.models.placement import Placement, check_attention, not_installed

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

EXPECTED = (
    "a folder with config.json and weights, a hub name (owner/name), a .gguf file, or package.module:factory"
)
_HUB = re.compile(r"(?!\.)[\w.-]+(/(?!\.)[\w.-]+)?")
_ADAPTER = "adapter_config.json"
# Packages that read quantised weights, by the method that a config names.
_QUANTISERS = {"bitsandbytes": "bitsandbytes", "torchao": "torchao", "gptq": "gptqmodel", "awq": "gptqmodel"}


def from_transformers(name: str, head: bool, placement: Placement) -> Loaded:
    """A transformers model, from a folder, a file or the hub."""
    path = Path(name).expanduser()
    if path.is_file() and path.suffix.lower() != ".gguf":
        raise ValueError(
            f"MODEL: {name} is a file; expected {EXPECTED}. For a traced or pickled model, write a function "
            "that makes the module"
        )
    folder = path.parent if path.is_file() else path
    local = folder.is_dir() and (path.is_file() or path.is_dir())
    if not local and not _HUB.fullmatch(name):
        raise ValueError(f"MODEL: there is no folder {name}; expected {EXPECTED}")
    adapter = path.is_dir() and (folder / _ADAPTER).is_file()
    if path.is_dir() and not adapter and not (folder / "config.json").is_file():
        raise ValueError(f"MODEL: the folder {name} has no config.json; expected {EXPECTED}")
    if local:
        placement.refuse(f"{name}, which is on this machine", "revision")
    for package, reason in (("gguf", path.is_file()), ("peft", adapter)):
        if reason and importlib.util.find_spec(package) is None:
            raise ValueError(f"MODEL: {name} needs the package {package}: pip install {package}")
    if placement.attention is not None:
        check_attention(placement.attention)
    source = str(folder) if local else name
    trust: dict[str, object] = {"trust_remote_code": False, "local_files_only": local}
    trust |= {} if placement.revision is None else {"revision": placement.revision}
    extra: dict[str, object] = {"gguf_file": path.name} if path.is_file() else {}
    with _quiet():
        try:
            model, missing = _open(source, head, trust | extra, placement)
        except Exception as error:
            raise ValueError(_why_not(name, local, error, placement)) from error
    # a missing pooler changes nothing for heads, a missing layer is another model
    lost = sorted(key for key in missing if any(part.isdigit() for part in key.split(".")))
    if lost:
        raise ValueError(
            f"MODEL: {name} is damaged: its weights lack {len(lost)} tensors that its config.json asks for, "
            f"{lost[0]} among them; get the model again"
        )
    readers = readers_of(name, source, trust)
    revision = {} if placement.revision is None else {"revision": placement.revision}
    where = _base_of(folder, model) if adapter else folder if local else None
    return Loaded(
        name, model, lambda: tokenizer_of(name, where, **extra, **revision), readers[0], extractor=readers[1]
    )


def _open(
    source: str, head: bool, trust: Keywords, placement: Placement
) -> tuple[PreTrainedModel, Iterable[str]]:
    """The model, and the names of the weights that its files lack."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    adapter = Path(source, _ADAPTER)
    config = None
    if adapter.is_file():  # the config is that of the model below
        base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
        below = {name: value for name, value in trust.items() if name != "local_files_only"}
        config = AutoConfig.from_pretrained(base, **below)
    else:
        config = AutoConfig.from_pretrained(source, **trust)
    dtype = placement.dtype
    quantised = getattr(config, "quantization_config", None) is not None
    if dtype is None:
        # A half-precision checkpoint is slower on a CPU, and its statistics are computed in float32 anyway.
        dtype = torch.float32 if placement.device.type == "cpu" and not quantised else "auto"
    options = trust | {"output_loading_info": True, "dtype": dtype}
    if placement.attention is not None:
        options["attn_implementation"] = placement.attention
    if placement.device_map is not None:
        options["device_map"] = placement.device_map
    elif quantised and placement.device.type != "cpu":
        options["device_map"] = {"": str(placement.device)}
    with_head: Any = class_with_head(config) if head else None
    if head and with_head is None and "gguf_file" in trust:
        with_head = AutoModelForCausalLM
    kind: Any = with_head or AutoModel
    model, info = kind.from_pretrained(source, **options)
    if with_head is not None and _has_random_head(model, info["missing_keys"]):
        model, info = AutoModel.from_pretrained(source, **options)
    return model, info["missing_keys"]


def _base_of(folder: Path, model: Any) -> Path | None:
    """Where the tokenizer of an adapted model is: beside the adapter, or with the model below."""
    if any(folder.glob("tokenizer*")):
        return folder
    base = Path(str(getattr(model.config, "_name_or_path", "")))
    return base if base.is_dir() else None


@contextmanager
def _quiet() -> Iterator[None]:
    """A context in which transformers prints nothing."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub_before = hub_logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    hub_logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        hub_logging.set_verbosity(hub_before)
        if bars:
            logging.enable_progress_bar()


def class_with_head(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The class of transformers that a config names for its weights; None when it names none."""
    import transformers

    classes = (getattr(transformers, name, None) for name in getattr(config, "architectures", None) or [])
    return next(
        (c for c in classes if isinstance(c, type) and issubclass(c, transformers.PreTrainedModel)), None
    )


def _has_random_head(model: PreTrainedModel, missing: Iterable[str]) -> bool:
    """Whether some weight outside the body of a model was not in its files, and so was drawn at random."""
    body = f"{model.base_model_prefix}."
    return model.base_model is not model and any(not key.startswith(body) for key in missing)


def _why_not(name: str, local: bool, error: Exception, placement: Placement) -> str:
    """What to tell the user about an error that transformers raised."""
    message = str(error)
    if placement.attention is not None and re.search(r"attention|attn|kernel", message, re.IGNORECASE):
        return not_installed(placement.attention, error)
    if placement.revision is not None and re.search(
        r"revision|git identifier|git ref", f"{type(error).__name__} {message}", re.IGNORECASE
    ):
        return (
            f"revision: {name} has no {placement.revision!r} ({first_line(error)}); expected a branch, a tag "
            "or a commit of the model"
        )
    if "trust_remote_code" in message or "custom code" in message:
        return (
            f"MODEL: {name} needs code that comes with the model, which is not run here; read that code, "
            "write a function that loads the model, and give package.module:function"
        )
    if "does not recognize this architecture" in message:
        import transformers

        kind = re.search(r"model type `([^`]*)`", message)
        return (
            f"MODEL: {name} is of the type {kind[1] if kind else 'unknown'}, which transformers "
            f"{transformers.__version__} does not know; update transformers, or give package.module:factory"
        )
    if isinstance(error, ImportError):
        named = next((p for word, p in _QUANTISERS.items() if word in message.lower()), None)
        advice = f"pip install {named}" if named else "install it"
        return f"MODEL: {name} needs a package that is not installed ({first_line(error)}); {advice}"
    if not local:
        if "couldn't connect" in message or "offline" in message.lower():
            return (
                f"MODEL: {name!r} is not a folder here, and the hub cannot be reached to look it up; go "
                "online, or give the folder of a model that is on this machine"
            )
        return f"MODEL: {name!r} is neither a folder here nor a model the hub gives ({describe_error(error)})"
    return f"MODEL: the folder {name} is damaged ({describe_error(error)}); expected {EXPECTED}"
