"""From what a person writes for MODEL to a model that runs, and what makes its input of texts or pictures."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from manyheads.common.devices import choose_device
from manyheads.common.registry import registered
from manyheads.models import config as described
from manyheads.models import embedded
from manyheads.models.folder import load as load_own

EXPECTED = "a folder with config.json and weights, a hub name (owner/name), or package.module:factory"
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_HUB = re.compile(r"(?!\.)[\w.-]+(/(?!\.)[\w.-]+)?")
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
# Where configs keep how many positions a model has, by different names.
_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length")


@dataclass
class Loaded:
    """A model in eval mode, and how to make its input: a tokenizer for texts, a processor for pictures."""

    name: str
    model: nn.Module
    tokenizer: Callable[[], Any]
    processor: Callable[[], Any]
    # ids and their lengths, (batch, length) and (batch,), to what the model takes; for models of our own
    arrange: Callable[[Tensor, Tensor], dict[str, Any]] | None = None
    task: Any = None  # what it was trained for, if by manyheads, and the folder of that run
    folder: Path | None = None

    @property
    def config(self) -> Any:
        """The config of a transformers model; None for models that have none."""
        config: Any = getattr(self.model, "config", None)
        return config.get_text_config() if hasattr(config, "get_text_config") else config

    @property
    def vocabulary(self) -> int | None:
        """How many token ids the model knows, at most; None when it has no table of them."""
        if isinstance(size := getattr(self.config, "vocab_size", None), int):
            return size
        tables = [m.num_embeddings for m in self.model.modules() if isinstance(m, nn.Embedding)]
        return max(tables, default=None)

    @property
    def positions(self) -> int | None:
        """The longest sequence the model was made for; None when nothing says so."""
        found = [getattr(self.config, name, None) for name in _POSITIONS]
        return next((n for n in found if isinstance(n, int) and n > 0), None)

    @property
    def takes_mask(self) -> bool:
        """Whether padding can be hidden from the model."""
        return "attention_mask" in _parameters(self.model)

    @property
    def takes_names(self) -> bool:
        """Whether the model takes ``input_ids`` by name; others get the ids as their first argument."""
        return "input_ids" in _parameters(self.model)

    @property
    def start(self) -> int | None:
        """The id that a decoder starts from, in a model of encoder and decoder."""
        if not getattr(self.config, "is_encoder_decoder", False):
            return None
        ids = (getattr(self.config, name, None) for name in ("decoder_start_token_id", "pad_token_id"))
        return next((number for number in ids if isinstance(number, int)), 0)

    def arguments(self, ids: Tensor, real: Tensor) -> Any:
        """Token ids and 1 where they are real, both (batch, length), as the model takes them.

        By name where it has names, and the ids alone where it does not.
        """
        if self.arrange is not None:
            return self.arrange(ids, real.sum(1))
        if not self.takes_names:
            return ids
        batch = {"input_ids": ids}
        if self.takes_mask:
            batch["attention_mask"] = real
        if self.start is not None:  # the decoder reads the same text, one token late
            start = torch.full_like(ids[:, :1], self.start)
            batch |= {"decoder_input_ids": torch.cat([start, ids[:, :-1]], 1), "decoder_attention_mask": real}
        return batch


def load(name: str | None = None, *, head: bool = False, device: str | None = None) -> Loaded:
    """The model of that name; without a name the embedded MiniLM.

    Parameters
    ----------
    name: a folder that transformers or manyheads wrote, a name on the hub, or ``package.module:factory``: a
        function that takes nothing and returns a model, or a model and its tokenizer or image processor.
    head: with what the model was trained to say on top (a language model's logits, a classifier's classes),
        where its config names such a class of transformers and its weights are there; else without.
    device: where it runs, such as ``cpu`` or ``cuda:1``; without it, the accelerator if there is one.

    Code that comes with a model is never run; what has to be made at random is the same every time.

    Examples
    --------
    >>> loaded = load()
    >>> loaded.name, loaded.vocabulary, loaded.positions
    ('MiniLM', 30522, 512)
    """
    where = choose_device(device)
    with _repeatable():
        if name is None:
            model, tokenizer = embedded.load()
            loaded = Loaded("MiniLM", model, lambda: tokenizer, lambda: _no_processor("MiniLM"))
        elif _FACTORY.fullmatch(name):
            loaded = _made(name)
        elif _is_own(Path(name).expanduser()):
            loaded = _own(name)
        else:
            loaded = _pretrained(name, head, where)
    loaded.model.to(where).eval()
    return loaded


@contextmanager
def _repeatable() -> Iterator[None]:
    """Weights that a checkpoint lacks, or that a factory draws, are the same in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def _parameters(model: nn.Module) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def _made(name: str) -> Loaded:
    """A person's own model, from a function they name."""
    where, _, factory = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does
    try:
        found: Any = importlib.import_module(where)
    except ImportError as error:
        raise ValueError(
            f"MODEL: {name!r} names the module {where!r}, which cannot be imported from here ({error}); "
            "run the command in the folder that holds it, or install it"
        ) from error
    for part in factory.split("."):
        if not hasattr(found, part):
            known = ", ".join(n for n, v in vars(found).items() if callable(v) and not n.startswith("_"))
            raise ValueError(f"MODEL: {where} has no {factory!r}; it has {known or 'nothing to call'}")
        found = getattr(found, part)
    try:
        result = found if isinstance(found, nn.Module) else found()
    except Exception as error:
        raise ValueError(
            f"MODEL: {name} raised {_said(error)}; expected a function that takes nothing and returns a model"
        ) from error
    model, *others = result if isinstance(result, tuple | list) and result else [result]
    if isinstance(model, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        raise ValueError(
            f"MODEL: {name} returned a traced or scripted model, which shows nothing of what it does; "
            "return the module it was made from"
        )
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"MODEL: {name} returned {type(model).__name__}; expected a torch.nn.Module, or one and its "
            "tokenizer or image processor"
        )
    given = others[0] if others else None
    return Loaded(
        name,
        model,
        lambda: given if given is not None else _no_tokenizer(name),
        lambda: given if given is not None else _no_processor(name),
    )


def _is_own(folder: Path) -> bool:
    """Whether manyheads wrote this folder, by train or by save."""
    return (folder / "heads.json").is_file() or described.read(folder) is not None


def _own(name: str) -> Loaded:
    """A model that manyheads trained, or cut; what it was trained for says how it reads."""
    folder = Path(name).expanduser()
    model = load_own(folder)

    def tokenizer() -> Any:
        if not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
            return _no_tokenizer(name)
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        except Exception as error:
            return _no_tokenizer(name, error)

    loaded = Loaded(name, model, tokenizer, lambda: _no_processor(name))
    description = described.read(folder)
    if description is not None and "task" in description:
        task = registered("tasks.restore")(folder)
        loaded.task, loaded.folder = task, folder
        if isinstance(task, ReadsText):
            loaded.arrange = lambda ids, lengths: task.arrange(model, ids, lengths)
        if isinstance(task, ReadsPictures):
            loaded.processor = task.processor
    return loaded


def if_any(make: Callable[[], Any]) -> Any:
    """What `Loaded.tokenizer` or `Loaded.processor` makes; None for a model without one.

    >>> if_any(lambda: 7), if_any(lambda: int("seven"))
    (7, None)
    """
    try:
        return make()
    except (ValueError, ImportError):
        return None


def _pretrained(name: str, head: bool, device: torch.device) -> Loaded:
    """A model that transformers knows, from a folder or the hub."""
    folder = Path(name).expanduser()
    if folder.is_file():
        raise ValueError(
            f"MODEL: {name} is a file; expected {EXPECTED}. For a traced or pickled model, write a function "
            "that makes the module"
        )
    local = folder.is_dir()
    if not local and not _HUB.fullmatch(name):
        raise ValueError(f"MODEL: there is no folder {name}; expected {EXPECTED}")
    if local and not (folder / "config.json").is_file():
        raise ValueError(f"MODEL: the folder {name} has no config.json; expected {EXPECTED}")
    from huggingface_hub.utils import logging as hub_logging
    from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoTokenizer
    from transformers.utils import logging

    source = str(folder) if local else name
    # A half-precision checkpoint is slower on a CPU, and its statistics are computed in float32 anyway.
    dtype: Any = torch.float32 if device.type == "cpu" else "auto"
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub_before = hub_logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    hub_logging.set_verbosity_error()
    try:
        where: dict[str, Any] = {"trust_remote_code": False, "local_files_only": local}
        options = where | {"output_loading_info": True, "dtype": dtype}
        whole = _class_with_head(AutoConfig.from_pretrained(source, **where)) if head else None
        model, info = (whole or AutoModel).from_pretrained(source, **options)
        if whole is not None and _made_up_head(model, info["missing_keys"]):
            model, info = AutoModel.from_pretrained(source, **options)
    except Exception as error:
        raise ValueError(_why_not(name, local, error)) from error
    finally:
        logging.set_verbosity(before)
        hub_logging.set_verbosity(hub_before)
        if bars:
            logging.enable_progress_bar()
    lost = sorted(key for key in info["missing_keys"] if any(part.isdigit() for part in key.split(".")))
    if lost:  # a missing pooler changes nothing for heads, a missing layer is another model
        raise ValueError(
            f"MODEL: {name} is damaged: its weights lack {len(lost)} tensors that its config.json asks for, "
            f"{lost[0]} among them; get the model again"
        )

    def tokenizer() -> Any:
        if local and not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
            return _no_tokenizer(name)
        try:
            return AutoTokenizer.from_pretrained(source, trust_remote_code=False, local_files_only=local)
        except Exception as error:
            return _no_tokenizer(name, error)

    def processor() -> Any:
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()
        try:
            return AutoImageProcessor.from_pretrained(source, trust_remote_code=False, local_files_only=local)
        except Exception as error:
            return _no_processor(name, error)
        finally:
            logging.set_verbosity(verbosity)

    return Loaded(name, model, tokenizer, processor)


def _class_with_head(config: Any) -> Any:
    """The class of transformers that a config says its weights are of; None when it says none of them."""
    import transformers

    named = (getattr(transformers, name, None) for name in getattr(config, "architectures", None) or [])
    return next(
        (c for c in named if isinstance(c, type) and issubclass(c, transformers.PreTrainedModel)), None
    )


def _made_up_head(model: Any, missing: Iterable[str]) -> bool:
    """Whether some weight outside the body of a model was not in its files, and so was drawn at random."""
    body = f"{model.base_model_prefix}."
    return model.base_model is not model and any(not key.startswith(body) for key in missing)


def _why_not(name: str, local: bool, error: Exception) -> str:
    """The sentence for a person behind what transformers raised."""
    said = str(error)
    if "trust_remote_code" in said or "custom code" in said:
        return (
            f"MODEL: {name} needs code that comes with the model, which is not run here; look at that code, "
            "write a function that loads the model, and give package.module:function"
        )
    if "does not recognize this architecture" in said:
        import transformers

        kind = re.search(r"model type `([^`]*)`", said)
        return (
            f"MODEL: {name} is of the type {kind[1] if kind else 'unknown'}, which transformers "
            f"{transformers.__version__} does not know; update transformers, or give package.module:factory"
        )
    if not local:
        if "couldn't connect" in said or "offline" in said.lower():
            return (
                f"MODEL: {name!r} is no folder here, and the hub cannot be reached to look it up; go online, "
                "or give the folder of a model that is on this machine"
            )
        return f"MODEL: {name!r} is neither a folder here nor a model the hub gives ({_said(error)})"
    return f"MODEL: the folder {name} is damaged ({_said(error)}); expected {EXPECTED}"


def _said(error: BaseException) -> str:
    """An error of others in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _no_tokenizer(name: str, error: Exception | None = None) -> Any:
    why = f" ({_said(error)})" if error else ""
    raise ValueError(
        f"text: {name} comes without a tokenizer{why}; give --tokens FILE.npy with token ids, "
        "or a factory that returns (model, tokenizer)"
    )


def _no_processor(name: str, error: Exception | None = None) -> Any:
    why = f" ({_said(error)})" if error else ""
    raise ValueError(
        f"images: {name} comes without an image processor{why}; give a model that reads pictures, "
        "or a factory that returns (model, processor)"
    )


@runtime_checkable
class ReadsText(Protocol):
    """A task whose folder has a tokenizer, so that people can also give its model texts of their own."""

    def arrange(self, model: nn.Module, ids: Tensor, lengths: Tensor) -> dict[str, Any]:
        """Texts as ids ``(batch, length)``, with their lengths, to what the model takes."""


@runtime_checkable
class ReadsPictures(Protocol):
    """A task that makes its input of pictures, so that people can also give its model some of their own."""

    def processor(self) -> Any:
        """A function of pictures (a list, of Pillow) that returns what the model takes, by name."""
