"""A model that was opened, and what makes its input: its tokenizer, image processor, feature extractor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from manyheads.common.errors import describe_error
from manyheads.common.types import Batch, Keywords
from manyheads.models.text_config import positions_of, text_config, vocabulary_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    # Makes the input of a model from a list of images.
    ImageProcessor = Callable[..., Mapping[str, object] | Tensor]

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")


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
    arrange: Callable[[Tensor, Tensor], Keywords] | None = None
    task: TrainedTask | None = None
    folder: Path | None = None
    extractor: Callable[[], Any] = lambda: no_extractor("the model")

    @property
    def config(self) -> PretrainedConfig | None:
        """The config of a transformers model; None for models that have none."""
        return text_config(self.model)

    @property
    def vocabulary(self) -> int | None:
        """The size of the vocabulary; None for a model without an embedding table."""
        return vocabulary_of(self.model)

    @property
    def positions(self) -> int | None:
        """The longest sequence the model was made for; None when its config does not say."""
        return positions_of(self.model)

    def longest(self, max_length: int | None = None, tokenizer: object = None) -> int | None:
        """The most tokens of a sequence: ``max_length``, or what the model and its tokenizer can read.

        Tokenizers without a limit give an astronomical number.
        """
        if max_length is None:
            limits = [self.positions, getattr(tokenizer, "model_max_length", None)]
            return min((n for n in limits if n is not None and n < 10**9), default=None)
        if self.positions is not None and max_length > self.positions:
            raise ValueError(
                f"max-length: got {max_length}, but the model has {self.positions} positions; give at most "
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


def _parameters(model: nn.Module) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


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


def tokenizer_of(name: str, folder: Path | None, **options: Any) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder, or on the hub; ``options`` are those of ``from_pretrained``."""
    if (
        folder is not None
        and not options
        and not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES)
    ):
        no_tokenizer(name)
    from transformers import AutoTokenizer

    local = folder is not None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder) if local else name, trust_remote_code=False, local_files_only=local, **options
        )
    except Exception as error:
        no_tokenizer(name, error)
    return tokenizer


def readers_of(
    name: str, source: str, options: Keywords
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
        cache(lambda: quietly(AutoImageProcessor, no_processor)),
        cache(lambda: quietly(AutoFeatureExtractor, no_extractor)),
    )


def no_tokenizer(name: str, error: Exception | None = None) -> NoReturn:
    why = f" ({describe_error(error)})" if error else ""
    raise ValueError(
        f"text: {name} comes without a tokenizer{why}; give --tokens FILE.npy with token ids, "
        "or a factory that returns (model, tokenizer)"
    )


def no_extractor(name: str, error: Exception | None = None) -> NoReturn:
    why = f" ({describe_error(error)})" if error else ""
    raise ValueError(
        f"data: {name} comes without a feature extractor{why}; expected a model that reads sounds, with its "
        "preprocessor_config.json"
    )


def no_processor(name: str, error: Exception | None = None) -> NoReturn:
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

    def inputs(self, batch: dict[str, Tensor]) -> Keywords:
        """The arguments of the model, from a batch."""


@runtime_checkable
class ReadsText(Protocol):
    """A task whose folder has a tokenizer: its model reads texts that people type, too."""

    def arrange(self, model: nn.Module, ids: Tensor, lengths: Tensor) -> Keywords:
        """The arguments of the model, from token ids ``(batch, length)`` and their lengths ``(batch,)``."""


@runtime_checkable
class ReadsImages(Protocol):
    """A task whose model reads image files."""

    def processor(self) -> Callable[..., dict[str, Tensor]]:
        """A function from a list of Pillow's images to the arguments of the model."""
