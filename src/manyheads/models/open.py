"""From a MODEL string to a model that runs, with the tokenizer or image processor that makes its input."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manyheads.common.errors import describe_error
from manyheads.common.import_names import import_from_here
from manyheads.common.preserved_state import seed_generators
from manyheads.common.registry import registered
from manyheads.models import config as described
from manyheads.models import embedded
from manyheads.models.folder import load as load_folder
from manyheads.models.loaded import (
    Loaded,
    ReadsImages,
    ReadsText,
    no_extractor,
    no_processor,
    no_tokenizer,
    readers_of,
    tokenizer_of,
)
from manyheads.models.placement import Placement, choose_placement
from manyheads.models.pretrained import from_transformers

_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def open_model(
    model: str | None = None,
    *,
    head: bool = False,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    device_map: str | dict[str, Any] | None = None,
    attention: str | None = None,
    revision: str | None = None,
) -> Loaded:
    """Open a model by the string that the command takes for MODEL, with what makes its input.

    Parameters
    ----------
    model: a folder that transformers or manyheads wrote, quantised or not, or that has an adapter (PEFT) and
        names the model below it; a name on the hub, ``owner/name``; a ``.gguf`` file; or
        ``package.module:factory``, a function without arguments that returns a model, or a model and its
        tokenizer or image processor; or ``manyheads/small``, a small model in this package that reads
        Chinese and English. Default: the embedded MiniLM sentence encoder.
    head: with the output layer that the model was trained with (a language model's logits, a classifier's
        classes), if its config names such a class of transformers and the weights are there.
    device: such as ``cpu`` or ``cuda:1``. Default: the accelerator, if there is one.
    dtype: of the weights, such as ``"bfloat16"``; ``"auto"`` for that of the files. Default: float32 on a
        CPU, that of the files elsewhere.
    device_map: instead of ``device``, as transformers takes it: ``"auto"`` spreads a model over all devices
        and the CPU.
    attention: the kernel of transformers, such as ``"sdpa"``, ``"eager"`` or ``"flash_attention_2"``.
    revision: a branch, a tag or a commit of a model on the hub.

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
    placement = choose_placement(device, dtype, device_map, attention, revision)
    with _repeatable():
        if model is None:
            encoder, tokenizer = embedded.load()
            loaded = Loaded("MiniLM", encoder, lambda: tokenizer, lambda: no_processor("MiniLM"))
        elif model == embedded.SMALL:
            small, small_tokenizer = embedded.load_small(head=head)
            loaded = Loaded(model, small, lambda: small_tokenizer, lambda: no_processor(model))
        elif _FACTORY.fullmatch(model):
            loaded = _from_factory(model)
        elif _is_of_manyheads(Path(model).expanduser()):
            loaded = _from_manyheads(model)
        else:
            loaded = from_transformers(model, head, placement)
            _move(loaded.model, placement)
            loaded.model.eval()
            return loaded
    placement.refuse(loaded.name, "device_map", "revision")
    placement.apply(loaded.model, loaded.name)
    loaded.model.eval()
    return loaded


def _move(model: nn.Module, placement: Placement) -> None:
    """Put a model on its device, unless a map or a quantiser has done so."""
    if placement.device_map is None and not getattr(model, "is_quantized", False):
        model.to(placement.device)


@contextmanager
def _repeatable() -> Iterator[None]:
    """Weights that a checkpoint lacks, or that a factory draws, are the same in every process."""
    with torch.random.fork_rng():
        seed_generators(0)
        yield


def _from_factory(name: str) -> Loaded:
    """A model from a function of the user's, ``package.module:factory``."""
    module, _, path = name.partition(":")
    try:
        factory: Any = import_from_here(module)
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
            f"MODEL: {name} returned a traced or scripted model, which hides what it does; "
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
        lambda: reader if reader is not None else no_tokenizer(name),
        lambda: reader if reader is not None else no_processor(name),
        extractor=lambda: reader if reader is not None else no_extractor(name),
    )


def _is_of_manyheads(folder: Path) -> bool:
    """Whether manyheads wrote this folder, by train or by save."""
    return (folder / "heads.json").is_file() or described.read(folder) is not None


def _from_manyheads(name: str) -> Loaded:
    """A model that manyheads trained, or cut; its task, if there is one, makes its input."""
    folder = Path(name).expanduser()
    model = load_folder(folder)
    loaded = Loaded(name, model, lambda: tokenizer_of(name, folder), lambda: no_processor(name))
    if (folder / "preprocessor_config.json").is_file():
        trust = {"trust_remote_code": False, "local_files_only": True}
        loaded.processor, loaded.extractor = readers_of(name, str(folder), trust)
    description = described.read(folder)
    if description is not None and "task" in description:
        task = registered("tasks.restore")(folder)
        loaded.task, loaded.folder = task, folder
        if isinstance(task, ReadsText):
            loaded.arrange = lambda ids, lengths: task.arrange(model, ids, lengths)
        if isinstance(task, ReadsImages):
            loaded.processor = task.processor
    return loaded
