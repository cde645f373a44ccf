"""From a MODEL string to a model that runs, with the tokenizer or image processor that makes its input."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from manyheads.common.devices import choose_device
from manyheads.common.errors import describe_error
from manyheads.common.registry import registered
from manyheads.common.types import Batch
from manyheads.models import config as described
from manyheads.models import embedded
from manyheads.models.folder import load as load_folder

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    # Makes the input of a model from a list of images.
    ImageProcessor = Callable[..., Mapping[str, object] | Tensor]

EXPECTED = "a folder with config.json and weights, a hub name (owner/name), or package.module:factory"
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_HUB = re.compile(r"(?!\.)[\w.-]+(/(?!\.)[\w.-]+)?")
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
# Where configs keep how many positions a model has, by different names.
_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length")


@dataclass
class Loaded:
    """A model in eval mode, and what makes its input. Made by `open_model`.

    Attributes
    ----------
    name: the MODEL string.
    model: the module, in eval mode, on its device.
    tokenizer, processor: functions without arguments that give the model's tokenizer and its image
        processor; they raise a ValueError for a model without one (see `if_any`).
    arrange: for models that manyheads trained: from token ids ``(batch, length)`` and their lengths
        ``(batch,)`` to the arguments of the model.
    task, folder: what it was trained for, if manyheads trained it, and the folder of that run.
    extractor: as ``processor``, for sounds: gives the feature extractor.
    """

    name: str
    model: nn.Module
    tokenizer: Callable[[], PreTrainedTokenizerBase]
    processor: Callable[[], ImageProcessor]
    arrange: Callable[[Tensor, Tensor], dict[str, Any]] | None = None
    task: TrainedTask | None = None
    folder: Path | None = None
    extractor: Callable[[], Any] = lambda: _no_extractor("the model")

    @property
    def config(self) -> PretrainedConfig | None:
        """The config of a transformers model; None for models that have none."""
        config: PretrainedConfig | None = getattr(self.model, "config", None)
        return (
            config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
        )

    @property
    def vocabulary(self) -> int | None:
        """The size of the vocabulary; None for a model without an embedding table."""
        if isinstance(size := getattr(self.config, "vocab_size", None), int):
            return size
        tables = [m.num_embeddings for m in self.model.modules() if isinstance(m, nn.Embedding)]
        return max(tables, default=None)

    @property
    def positions(self) -> int | None:
        """The longest sequence the model was made for; None when its config does not say."""
        sizes = [getattr(self.config, name, None) for name in _POSITIONS]
        return next((n for n in sizes if isinstance(n, int) and n > 0), None)

    def longest(self, max_length: int | None = None, tokenizer: object = None) -> int | None:
        """The most tokens of a sequence: ``max_length``, or what the model and its tokenizer can read.

        Tokenizers without a limit give an astronomical number.
        """
        if max_length is None:
            limits = [self.positions, getattr(tokenizer, "model_max_length", None)]
            return min((n for n in limits if n is not None and n < 10**9), default=None)
        if self.positions is not None and max_length > self.positions:
            raise ValueError(
                f"max-length: got {max_length}, and the model has {self.positions} positions; give at most "
                f"{self.positions}"
            )
        return max_length

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

    def arguments(self, ids: Tensor, real: Tensor) -> Batch:
        """A batch for the model from token ids and a mask, 1 where a token is real, both (batch, length).

        By name if the model takes ``input_ids``; the ids alone otherwise.
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


def open_model(model: str | None = None, *, head: bool = False, device: str | None = None) -> Loaded:
    """Open a model by the string that the command takes for MODEL, with what makes its input.

    Parameters
    ----------
    model: a folder that transformers or manyheads wrote; a name on the hub, ``owner/name``; or
        ``package.module:factory``, a function without arguments that returns a model, or a model and its
        tokenizer or image processor; or ``manyheads/small``, a small model in this package that reads
        Chinese and English. Default: the embedded MiniLM sentence encoder.
    head: with the output layer that the model was trained with (a language model's logits, a classifier's
        classes), if its config names such a class of transformers and the weights are there.
    device: such as ``cpu`` or ``cuda:1``. Default: the accelerator, if there is one.

    Code that comes with a model is never run. Weights that a checkpoint lacks are drawn with a fixed seed.

    Returns
    -------
    Loaded
        ``model``, in eval mode; ``tokenizer()`` and ``processor()`` give the tokenizer and the image
        processor, or raise a ValueError if the model has none.

    Examples
    --------
    >>> import manyheads as mh
    >>> loaded = mh.open_model()
    >>> loaded.name, loaded.vocabulary, loaded.positions
    ('MiniLM', 30522, 512)
    >>> batch = loaded.tokenizer()(["Heads attend."], return_tensors="pt")
    >>> loaded.model(**batch).last_hidden_state.shape                # (batch, length, d_model)
    torch.Size([1, 5, 384])

    See Also
    --------
    load : read a folder that `save` or `train` wrote, without a tokenizer.
    inspect : what every head of the model does.

    References
    ----------
    Wolf et al. 2020, Transformers: state-of-the-art natural language processing.
    Wang et al. 2020, MiniLM: deep self-attention distillation for task-agnostic compression of pre-trained
    transformers (the embedded model).
    """
    target = choose_device(device)
    with _repeatable():
        if model is None:
            encoder, tokenizer = embedded.load()
            loaded = Loaded("MiniLM", encoder, lambda: tokenizer, lambda: _no_processor("MiniLM"))
        elif model == embedded.SMALL:
            small, reads = embedded.load_small(head=head)
            loaded = Loaded(model, small, lambda: reads, lambda: _no_processor(model))
        elif _FACTORY.fullmatch(model):
            loaded = _from_factory(model)
        elif _is_of_manyheads(Path(model).expanduser()):
            loaded = _from_manyheads(model)
        else:
            loaded = _from_transformers(model, head, target)
    loaded.model.to(target).eval()
    return loaded


@contextmanager
def _repeatable() -> Iterator[None]:
    """Weights that a checkpoint lacks, or that a factory draws, are the same in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def _parameters(model: nn.Module) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def _from_factory(name: str) -> Loaded:
    """A model from a function of the user's, ``package.module:factory``."""
    module, _, path = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does
    try:
        factory: Any = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"MODEL: {name!r} names the module {module!r}, which cannot be imported from here ({error}); "
            "run the command in the folder that holds it, or install it"
        ) from error
    for part in path.split("."):
        if not hasattr(factory, part):
            names = ", ".join(n for n, v in vars(factory).items() if callable(v) and not n.startswith("_"))
            raise ValueError(f"MODEL: {module} has no {path!r}; it has {names or 'nothing to call'}")
        factory = getattr(factory, part)
    try:
        result = factory if isinstance(factory, nn.Module) else factory()
    except Exception as error:
        raise ValueError(
            f"MODEL: {name} raised {describe_error(error)}; expected a function without arguments that "
            "returns a model"
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
    reader: Any = others[0] if others else None  # a tokenizer or an image processor
    return Loaded(
        name,
        model,
        lambda: reader if reader is not None else _no_tokenizer(name),
        lambda: reader if reader is not None else _no_processor(name),
        extractor=lambda: reader if reader is not None else _no_extractor(name),
    )


def _is_of_manyheads(folder: Path) -> bool:
    """Whether manyheads wrote this folder, by train or by save."""
    return (folder / "heads.json").is_file() or described.read(folder) is not None


def _from_manyheads(name: str) -> Loaded:
    """A model that manyheads trained, or cut; its task, if there is one, makes its input."""
    folder = Path(name).expanduser()
    model = load_folder(folder)
    loaded = Loaded(name, model, lambda: _tokenizer(name, folder), lambda: _no_processor(name))
    if (folder / "preprocessor_config.json").is_file():
        trust = {"trust_remote_code": False, "local_files_only": True}
        loaded.processor, loaded.extractor = _readers(name, str(folder), trust)
    description = described.read(folder)
    if description is not None and "task" in description:
        task = registered("tasks.restore")(folder)
        loaded.task, loaded.folder = task, folder
        if isinstance(task, ReadsText):
            loaded.arrange = lambda ids, lengths: task.arrange(model, ids, lengths)
        if isinstance(task, ReadsImages):
            loaded.processor = task.processor
    return loaded


def _tokenizer(name: str, folder: Path | None) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder, or on the hub."""
    if folder is not None and not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        _no_tokenizer(name)
    from transformers import AutoTokenizer

    local = folder is not None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder) if local else name, trust_remote_code=False, local_files_only=local
        )
    except Exception as error:
        _no_tokenizer(name, error)
    return tokenizer


Reader = TypeVar("Reader")


def if_any(make: Callable[[], Reader]) -> Reader | None:
    """What `Loaded.tokenizer` or `Loaded.processor` makes; None for a model without one.

    >>> if_any(lambda: 7), if_any(lambda: int("seven"))
    (7, None)
    """
    try:
        return make()
    except (ValueError, ImportError):
        return None


def _from_transformers(name: str, head: bool, device: torch.device) -> Loaded:
    """A transformers model, from a folder or the hub."""
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
    from transformers import AutoConfig, AutoModel
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
        trust: dict[str, Any] = {"trust_remote_code": False, "local_files_only": local}
        options = trust | {"output_loading_info": True, "dtype": dtype}
        with_head = _class_with_head(AutoConfig.from_pretrained(source, **trust)) if head else None
        kind: Any = with_head or AutoModel
        model, info = kind.from_pretrained(source, **options)
        if with_head is not None and _has_random_head(model, info["missing_keys"]):
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

    readers = _readers(name, source, trust)
    return Loaded(
        name, model, lambda: _tokenizer(name, folder if local else None), readers[0], extractor=readers[1]
    )


def _readers(
    name: str, source: str, options: dict[str, Any]
) -> tuple[Callable[[], ImageProcessor], Callable[[], Any]]:
    """Functions that give the image processor and the feature extractor beside a model."""
    from transformers import AutoFeatureExtractor, AutoImageProcessor
    from transformers.utils import logging

    def quietly(kind: Any, missing: Callable[[str, Exception], NoReturn]) -> Any:
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()
        try:
            return kind.from_pretrained(source, **options)
        except Exception as error:
            missing(name, error)
        finally:
            logging.set_verbosity(verbosity)

    return (
        cache(lambda: quietly(AutoImageProcessor, _no_processor)),
        cache(lambda: quietly(AutoFeatureExtractor, _no_extractor)),
    )


def _class_with_head(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The class of transformers that a config names for its weights; None when it names none."""
    import transformers

    named = (getattr(transformers, name, None) for name in getattr(config, "architectures", None) or [])
    return next(
        (c for c in named if isinstance(c, type) and issubclass(c, transformers.PreTrainedModel)), None
    )


def _has_random_head(model: PreTrainedModel, missing: Iterable[str]) -> bool:
    """Whether some weight outside the body of a model was not in its files, and so was drawn at random."""
    body = f"{model.base_model_prefix}."
    return model.base_model is not model and any(not key.startswith(body) for key in missing)


def _why_not(name: str, local: bool, error: Exception) -> str:
    """What to tell the user about an error that transformers raised."""
    message = str(error)
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
    if not local:
        if "couldn't connect" in message or "offline" in message.lower():
            return (
                f"MODEL: {name!r} is no folder here, and the hub cannot be reached to look it up; go online, "
                "or give the folder of a model that is on this machine"
            )
        return f"MODEL: {name!r} is neither a folder here nor a model the hub gives ({describe_error(error)})"
    return f"MODEL: the folder {name} is damaged ({describe_error(error)}); expected {EXPECTED}"


def _no_tokenizer(name: str, error: Exception | None = None) -> NoReturn:
    why = f" ({describe_error(error)})" if error else ""
    raise ValueError(
        f"text: {name} comes without a tokenizer{why}; give --tokens FILE.npy with token ids, "
        "or a factory that returns (model, tokenizer)"
    )


def _no_extractor(name: str, error: Exception | None = None) -> NoReturn:
    why = f" ({describe_error(error)})" if error else ""
    raise ValueError(
        f"data: {name} comes without a feature extractor{why}; expected a model that reads sounds, with its "
        "preprocessor_config.json"
    )


def _no_processor(name: str, error: Exception | None = None) -> NoReturn:
    why = f" ({describe_error(error)})" if error else ""
    raise ValueError(
        f"images: {name} comes without an image processor{why}; give a model that reads images, "
        "or a factory that returns (model, processor)"
    )


class TrainedTask(Protocol):
    """The part of `manyheads.training.task.Task` that lower rooms use."""

    @property
    def unit(self) -> str:
        """What is counted: ``tokens``, or examples by their name, as ``images``."""

    def read(self, data: str) -> Any:
        """The examples in some data."""

    def collate(self, examples: list[Any]) -> dict[str, Tensor]:
        """Examples as one batch."""

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """The arguments of the model, from a batch."""


@runtime_checkable
class ReadsText(Protocol):
    """A task whose folder has a tokenizer: its model reads texts that people type, too."""

    def arrange(self, model: nn.Module, ids: Tensor, lengths: Tensor) -> dict[str, Any]:
        """The arguments of the model, from token ids ``(batch, length)`` and their lengths ``(batch,)``."""


@runtime_checkable
class ReadsImages(Protocol):
    """A task whose model reads image files."""

    def processor(self) -> Callable[..., dict[str, Tensor]]:
        """A function from a list of Pillow's images to the arguments of the model."""
