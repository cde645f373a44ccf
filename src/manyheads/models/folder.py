"""save and load: a cut model in a folder, and back, to the bit."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import NotRequired, TypedDict, get_type_hints

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from manyheads.common.json_files import check_fields, in_one_sentence, read_json
from manyheads.common.out_folder import check_free
from manyheads.common.types import JsonObject
from manyheads.common.version import __version__
from manyheads.common.whole_files import whole_folder, write_whole
from manyheads.models import config, native, transformers_config
from manyheads.models.changes import ATTRIBUTE, Changes, changes_of, reshape, set_tensor
from manyheads.models.model_card import write_card
from manyheads.models.size_limits import no_larger_than, shapes
from manyheads.nn.orthogonal_rows import plain

_FORMAT, _VERSION = "manyheads model", 1
_PLAN, _WEIGHTS, _BUFFERS = "heads.json", "model.safetensors", "buffers.safetensors"
_NAMELESS = 2**24  # numbers of a tensor that was cut and is in the file by another name, if at all


def save(
    model: nn.Module,
    out: str | PathLike[str],
    tokenizer: object = None,
    *,
    card: bool | Mapping[str, object] = False,
) -> None:
    """Write a model, cut or not, to a folder: weights as safetensors, its config, and ``heads.json``.

    The folder is written completely or not at all. After ``import manyheads``, ``from_pretrained`` of
    transformers loads it, too; and without it, if the config of the class can express the new numbers of
    heads, as most can where every layer has the same ("plain" in ``heads.json``).

    Parameters
    ----------
    model: a module; one of transformers or of manyheads can be loaded without a factory.
    out: a folder that does not exist yet, or is empty.
    tokenizer: written beside the model; anything with ``save_pretrained``. Default: ``model.tokenizer``, if
        there is one.
    card: also write a model card, README.md: what was cut, and how to load it; with the measurements of
        `card` (``Card.as_json()``) also the quality before and after.

    See Also
    --------
    load : read the folder back.
    push : upload it to the hub.
    export : other formats.
    prune : makes a smaller model to save.
    open_model : open the folder with its tokenizer.

    References
    ----------
    Wolf et al. 2020, Transformers: state-of-the-art natural language processing (``from_pretrained``).

    Examples
    --------
    >>> import tempfile, torch
    >>> import manyheads as mh
    >>> layer = mh.MultiHeadAttention(6, heads=3)
    >>> x = torch.randn(2, 5, 6)
    >>> smaller = mh.cut(layer, {0: [1]}, x)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(smaller, f"{folder}/small")
    ...     again = load(f"{folder}/small")
    >>> torch.equal(again(x), smaller(x)), again.original_heads
    (True, {'': [0, 2]})
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    folder = Path(out)
    check_free(folder, "out")
    with whole_folder(folder) as unfinished:
        write(
            plain(model),
            unfinished,
            tokenizer if tokenizer is not None else getattr(model, "tokenizer", None),
        )
        if card is not False:  # it may be edited: heads.json does not have its hash
            write_card(unfinished, folder.name, {} if card is True else card)


def write(
    model: nn.Module, folder: Path, tokenizer: object, loads: transformers_config.Loads | None = None
) -> None:
    """Write all files of `save` into an empty folder; ``loads`` is for `describe`."""
    persistent = {name: _on_cpu(tensor) for name, tensor in distinct(model)}
    save_file(persistent, folder / _WEIGHTS, metadata={"format": "pt"})
    write_buffers(model, folder)
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(str(folder))
    describe(model, folder, loads)


def describe(model: nn.Module, folder: Path, loads: transformers_config.Loads | None = None) -> None:
    """Write the config of a model and heads.json into the folder that has its weights.

    loads: whether a config that says the numbers of heads is enough, for models that are too large to try.
    """
    changes = changes_of(model)
    description: dict[str, object] = {
        "format": _FORMAT,
        "version": _VERSION,
        "manyheads": __version__,
        "class": _class_name(model),
        "options": native.describe(model, {site: c["before"] for site, c in changes.counts.items()}),
        "attention": getattr(getattr(model, "config", None), "_attn_implementation", None),
        "original_heads": getattr(model, "original_heads", None) or {},
        "removed": changes.removed(),
        "plain": False,
        "changes": changes.as_json(),
    }
    if transformers_config.is_transformers(model):
        description["plain"] = transformers_config.write_config(model, folder, changes, loads)
    else:
        config.write(model, folder)
    description["files"] = {path.name: _hash(path) for path in sorted(folder.iterdir()) if path.is_file()}
    description["sha256"] = _hash_of(description)
    write_whole(folder / _PLAN, json.dumps(description, indent=1))


def _class_name(model: nn.Module) -> str:
    """The path of its class; for one of ours its public name, whatever module it is in."""
    kind = type(model)
    is_manyheads = kind.__module__.partition(".")[0] == "manyheads"
    return f"{'manyheads' if is_manyheads else kind.__module__}.{kind.__qualname__}"


def distinct(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What the model's class says is its state, each tensor once."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def write_buffers(model: nn.Module, folder: Path) -> None:
    """Write the floating buffers beside the state, if there are any."""
    state = {id(tensor) for _, tensor in distinct(model)}
    others = {
        name: _on_cpu(buffer)
        for name, buffer in model.named_buffers()
        if id(buffer) not in state and buffer.is_floating_point()
    }
    if others:
        save_file(others, folder / _BUFFERS)


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().clone()


def load(dir: str | PathLike[str], factory: Callable[[], nn.Module] | None = None) -> nn.Module:
    """The model that `save` or `train` wrote, in eval mode; equal to the bit.

    Nothing in the folder is executed or unpickled.

    Parameters
    ----------
    dir: the folder.
    factory: a function without arguments that builds the uncut model, with any weights. Not needed for
        classes of transformers and manyheads.

    Raises
    ------
    ValueError if `save` did not write the folder, it is damaged or incomplete, a newer manyheads wrote it, or
    its weights are not those of the model.

    See Also
    --------
    save : write the folder; its example reads it back.
    open_model : open a model of any kind, with its tokenizer.

    References
    ----------
    Wolf et al. 2020, Transformers: state-of-the-art natural language processing (``from_pretrained``).

    Examples
    --------
    >>> import tempfile
    >>> import manyheads as mh
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     mh.save(mh.MultiHeadAttention(6, heads=3), f"{folder}/attention")
    ...     mh.load(f"{folder}/attention").heads
    3
    """
    folder = Path(dir)
    trained = config.read(folder)
    if trained is not None and not (folder / _PLAN).is_file():
        return config.load(folder, trained)
    description = _read(folder)
    model = _uncut_model(folder, description, factory)
    with in_one_sentence(f"{folder}: heads.json does not fit {type(model).__name__}"):
        changes = Changes(**description["changes"])
        _check_shapes(folder, changes)
        model = reshape(model, changes)
    _fill(model, folder, description)
    if changes.counts:
        setattr(model, ATTRIBUTE, changes)
    if description["original_heads"]:
        setattr(model, "original_heads", description["original_heads"])  # noqa: B010
    transformers_config.note_in_config(model)
    return model.eval()


_Description = TypedDict(
    "_Description",
    {
        "class": str,
        "options": JsonObject | None,
        "attention": str | None,
        "original_heads": dict[str, list[int]],
        "changes": JsonObject,
        "files": dict[str, str],
        "sha256": NotRequired[str],
    },
)


def _read(folder: Path) -> _Description:
    """heads.json, checked against itself and against the files it names."""
    path = folder / _PLAN
    if not path.is_file():
        raise ValueError(
            f"dir: {folder} has no {_PLAN}: it is not a folder that manyheads.save wrote, or an incomplete "
            "one"
        )
    description = read_json(path, _Description, "heads.json", format=_FORMAT, version=_VERSION)
    if description.pop("sha256", None) != _hash_of(description):
        raise ValueError(f"{path}: damaged, or changed since it was written")
    check_fields(description["changes"], get_type_hints(Changes), f"{path}: changes")
    counts = description["changes"].get("counts", {})
    for site, heads in description["original_heads"].items():
        if len(set(heads)) < len(heads) or site not in counts or counts[site]["after"][:1] != [len(heads)]:
            raise ValueError(f"{path}: damaged, it does not say which heads of {site[:60]!r} are left")
    for name, digest in (description["files"] | {_WEIGHTS: description["files"].get(_WEIGHTS, "")}).items():
        file = folder / name
        if Path(name).name != name or not file.is_file():
            raise ValueError(f"{folder}: {name} is missing; the folder is incomplete, get the model again")
        if _hash(file) != digest:
            raise ValueError(f"{file}: damaged, or changed since it was written; get the model again")
    return description


def _uncut_model(
    folder: Path, description: _Description, factory: Callable[[], nn.Module] | None
) -> nn.Module:
    """The uncut model, with any weights."""
    kind = description["class"]
    if factory is not None:
        model = factory()
        if not isinstance(model, nn.Module):
            raise TypeError(f"factory: expected it to return a torch.nn.Module, got {type(model).__name__}")
        return model
    package, _, name = kind.rpartition(".")
    with in_one_sentence(f"{folder}: no {name} can be built from it"), no_larger_than(folder / _WEIGHTS):
        trained = config.read(folder)
        if trained is not None:
            return config.build(trained)
        if package == "manyheads" and description["options"] is not None:
            return native.build(name, description["options"])
        if package.startswith("transformers."):
            return transformers_config.build(folder, name, description["attention"])
    raise ValueError(
        f"factory: {folder} holds a {kind}, which is not a class of transformers or manyheads; give a "
        "function that makes the uncut model"
    )


def _check_shapes(folder: Path, changes: Changes) -> None:
    """Check that the shapes of cut tensors are those of the tensors in the file."""
    stored = shapes(folder / _WEIGHTS)
    if (folder / _BUFFERS).is_file():
        stored |= shapes(folder / _BUFFERS)
    for name, shape in changes.shapes.items():
        if name in stored and stored[name] != tuple(shape):
            raise ValueError(
                f"{folder}: heads.json says that {name} is {tuple(shape)}, but it is {stored[name]}; get the "
                "model again"
            )
        if name not in stored and math.prod(shape) > _NAMELESS:
            raise ValueError(f"{folder}: heads.json says that {name} is {tuple(shape)}, but it is missing")


def _fill(model: nn.Module, folder: Path, description: _Description) -> None:
    """Put the tensors of the files into the model; they must be exactly those that it needs."""
    try:
        persistent = load_file(folder / _WEIGHTS)
        others = load_file(folder / _BUFFERS) if _BUFFERS in description["files"] else {}
    except SafetensorError as error:
        raise ValueError(f"{folder}: its weights cannot be read ({error})") from error
    targets = {**dict(model.named_buffers()), **model.state_dict(keep_vars=True)}
    for name, tensor in (persistent | others).items():
        if name not in targets:
            raise ValueError(f"{folder}: its weights hold {name}, which {type(model).__name__} does not have")
        if targets[name].shape != tensor.shape:
            raise ValueError(
                f"{folder}: {name} is {tuple(tensor.shape)}, but {type(model).__name__} needs "
                f"{tuple(targets[name].shape)}; is the factory's model the one that was cut?"
            )
        if targets[name].is_floating_point() != tensor.is_floating_point():
            raise ValueError(f"{folder}: {name} is {tensor.dtype}, but {targets[name].dtype} is needed")
    filled_ids = {id(targets[name]) for name in persistent | others}
    lost = [name for name, tensor in model.state_dict(keep_vars=True).items() if id(tensor) not in filled_ids]
    if lost:
        raise ValueError(f"{folder}: its weights lack {len(lost)} tensors, {lost[0]} among them")
    for name, tensor in (persistent | others).items():
        set_tensor(model, name, tensor)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_of(description: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()
