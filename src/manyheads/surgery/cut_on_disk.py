"""cut_on_disk: remove heads from a model that is too large to open, one tensor at a time."""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatch
from functools import partial
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from manyheads.capture.site import Unverified
from manyheads.common.errors import describe_error
from manyheads.common.interrupts import interruptible, stop_if_interrupted
from manyheads.common.out_folder import check_free
from manyheads.common.progress import Progress, no_progress
from manyheads.common.types import Heads
from manyheads.common.whole_files import whole_folder
from manyheads.models import folder as saved
from manyheads.models.changes import Changes, changes_of, get_tensor, reshape, set_tensor
from manyheads.models.checkpoint import WEIGHTS, Checkpoint, bytes_of, write_tensors
from manyheads.models.no_heads import NoHeads
from manyheads.models.transformers_config import from_pretrained_agrees, note_in_config
from manyheads.surgery.cut import cut_unchecked
from manyheads.surgery.large_model import LargeModel
from manyheads.surgery.plan import Plan
from manyheads.surgery.rebuild import Rebuilt
from manyheads.surgery.region_check import check_regions
from manyheads.surgery.small_twin import Scale, enlarged, source_name, twins
from manyheads.surgery.weight_slices import Slice

# Files beside the weights that come along.
_BESIDE = (
    "tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "*.model",
    "*.tiktoken", "chat_template*", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip


class CutFolder(NamedTuple):
    """A model that was cut on disk.

    out: the folder.
    removed: ``{site: heads}``.
    heads: how many there were.
    bytes_before, bytes_after: of the weights.
    difference: the largest between a module and the silenced one, relative to its largest number.
    """

    out: Path
    removed: dict[str, list[int]]
    heads: int
    bytes_before: int
    bytes_after: int
    difference: float


def cut_on_disk(
    dir: str | PathLike[str],
    heads: Heads,
    out: str | PathLike[str],
    *,
    unverified: Unverified = "refuse",
    progress: Progress = no_progress,
) -> CutFolder:
    """Cut a model of transformers from folder to folder, holding one of its attention modules at a time.

    Which weights belong to a head is found on a small twin, a model of the same class with the same layers
    and heads but narrow ones, with the methods of `cut`, and the twin's copy is checked as `cut` checks it.
    Then each tensor is read, sliced and written. Finally, every attention module that lost heads is read back
    and compared, at full width, with the uncut one whose heads are silenced (1e-5 in float32).

    Parameters
    ----------
    dir: a folder with config.json and safetensors files, one or several.
    heads: as for `cut`: ``{layer number or site: [head numbers]}``, or a `Plan`, which must have been made
        for this model.
    out: the folder for the smaller model; it must not exist yet. It is written completely or not at all.
    unverified: as for `cut`.
    progress: gets ("twin" | "write" | "check", done, total).

    Returns
    -------
    CutFolder: where it is, the heads that were removed, bytes before and after, and the largest difference.

    Raises
    ------
    ValueError for heads that do not exist or cannot be removed (as `cut`), a plan of another
    model, a folder without safetensors, quantised or already cut weights, a disk with too little room, and
    for classes of which no small twin can be made; RuntimeError when a module differs from the silenced one.
    In all these cases nothing is written.

    Examples
    --------
    >>> import tempfile
    >>> import manyheads as mh
    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(hidden_size=24, num_attention_heads=3, num_hidden_layers=2, intermediate_size=5)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     BertModel(config).save_pretrained(f"{folder}/large")
    ...     _ = cut_on_disk(f"{folder}/large", {0: [1]}, f"{folder}/small")
    ...     mh.load(f"{folder}/small").original_heads
    {'encoder.layer.0.attention.self': [0, 2]}

    See Also
    --------
    cut : in memory, for any torch.nn.Module.
    load : opens the folder; after ``import manyheads``, so does from_pretrained.
    plan : which heads to remove.

    References
    ----------
    Michel, Levy, Neubig, "Are sixteen heads really better than one?" (2019).
    """
    source, target = Path(dir).expanduser(), Path(out)
    check_free(target)
    large = LargeModel(source, heads)
    with interruptible():
        progress("twin", 0, None)
        twin, rebuilt, scale = _rebuild_twin(large, dict(heads.items()), unverified)
        try:
            changes, slices = enlarged(changes_of(rebuilt.model), rebuilt.sliced, twin, large.model, scale)
        except ValueError as error:
            raise ValueError(_no_twin(large, error)) from error
        stop_if_interrupted()
        gc.collect()  # what was tried on the twin
        cut = _cut_structure(large, changes, slices, rebuilt)
        layout, readers = _layout(large, cut, changes, slices, _biases(twin, rebuilt))
        _check_room(target, layout)
        with whole_folder(target) as folder:
            write_tensors(folder / WEIGHTS, layout, _read_all(readers, progress))
            saved.write_buffers(cut, folder)
            difference = check_regions(large, cut, Checkpoint(folder), rebuilt, scale, progress)
            for path in source.iterdir():
                if path.is_file() and any(fnmatch(path.name, pattern) for pattern in _BESIDE):
                    shutil.copyfile(path, folder / path.name)
            saved.describe(cut, folder, _as_twin(rebuilt))
    numbers = [entry[1:] for entry in large.checkpoint.entries.values()], layout.values()
    before, after = (sum(bytes_of(*shape_and_dtype) for shape_and_dtype in sizes) for sizes in numbers)
    arrangement = rebuilt.arrangement
    heads_before = sum(site.heads for site in arrangement.sites.values())
    return CutFolder(target, dict(arrangement.removed), heads_before, before, after, difference)


def follow_plan(
    model: str | None,
    plan: Path | None,
    out: Path,
    unverified: Unverified,
    progress: Progress,
    opening: Mapping[str, object] | None = None,
) -> CutFolder:
    """`cut_on_disk` by a plan in a file; options of ``opening`` are refused, as nothing is opened."""
    if model is None or plan is None:
        raise ValueError("MODEL: expected the folder of a model, and --plan")
    for name, value in (opening or {}).items():
        if value is not None:
            raise ValueError(
                f"{name}: got {value!r} with --on-disk, which opens no model: leave it out; weights keep "
                "their dtype"
            )
    return cut_on_disk(model, Plan.load(plan), out, unverified=unverified, progress=progress)


def _no_twin(large: LargeModel, error: Exception) -> str:
    return (
        f"MODEL: what a cut changes in a {type(large.model).__name__} could not be learned from a small twin "
        f"({describe_error(error)}); open it and use cut, or prune without --on-disk"
    )


def _rebuild_twin(
    large: LargeModel, heads: Heads, unverified: Unverified
) -> tuple[torch.nn.Module, Rebuilt, Scale]:
    """A small twin, its checked cut, and how wide its heads are."""
    problem: Exception | None = None
    for twin, scale in twins(type(large.model), large.config):
        try:
            rebuilt = cut_unchecked(twin, heads, unverified=unverified)
            if rebuilt is None:
                raise ValueError("heads: expected at least one head to remove, got none")
            widths = {count["d_key"] for count in changes_of(rebuilt.model).counts.values()} - {None}
            if widths - {scale.small}:
                raise RuntimeError(f"its heads are {sorted(map(str, widths))} wide, not {scale.small}")
            rebuilt.check()
            for region in rebuilt.regions.values():
                del region.calls[1:]  # on longer batches; the first is enough for what follows
        except (ValueError, RuntimeError) as error:
            if str(error).startswith("heads:"):
                raise  # the heads of the large model are the same
            problem = problem or error
        else:
            return twin, rebuilt, scale
    raise ValueError(_no_twin(large, problem or ValueError("none of its widths can be made small")))


def _cut_structure(
    large: LargeModel, changes: Changes, slices: dict[str, Slice], rebuilt: Rebuilt
) -> torch.nn.Module:
    """The cut model without the memory of its weights."""
    uncut, model = large.model, large.structure()
    with torch.device("meta"):
        cut = reshape(model, changes)
    for name, taken in slices.items():
        original = get_tensor(uncut, source_name(uncut, changes, name))
        if original.device.type != "meta":
            set_tensor(cut, name, taken.of(original))
    setattr(cut, "original_heads", rebuilt.model.original_heads)  # noqa: B010
    note_in_config(cut)
    return cut.eval()


def _biases(twin: torch.nn.Module, rebuilt: Rebuilt) -> dict[str, str]:
    """For each module that lost all heads and goes on adding a bias: its name, and where it was."""
    origins: dict[str, str] = {}
    for path, module in rebuilt.model.named_modules():
        if isinstance(module, NoHeads) and module.bias is not None:
            tensors = twin.get_submodule(path).named_parameters(prefix=path)
            bias = module.bias
            matches = [n for n, x in tensors if x.shape == bias.shape and torch.allclose(x, bias, atol=1e-5)]
            if len(matches) != 1:
                raise ValueError(f"heads: cannot remove all heads of {path!r} on disk; leave one")
            origins[f"{path}.bias"] = matches[0]
    return origins


Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]


def _layout(
    large: LargeModel,
    cut: torch.nn.Module,
    changes: Changes,
    slices: dict[str, Slice],
    biases: dict[str, str],
) -> tuple[Layout, dict[str, Callable[[], Iterable[Tensor]]]]:
    """What is in the new file, and how to get each tensor."""
    by_tensor = {id(get_tensor(cut, name)): part for name, part in slices.items()}
    layout: Layout = {}
    readers: dict[str, Callable[[], Iterable[Tensor]]] = {}
    for name, tensor in saved.distinct(cut):
        old_name = biases.get(name) or source_name(large.model, changes, name)
        in_file = large.names.get(old_name)
        dtype = tensor.dtype if in_file is None else large.checkpoint.entries[in_file].dtype
        layout[name] = tuple(tensor.shape), dtype
        if in_file is None:  # a buffer that files may leave out
            readers[name] = partial(_return_tensor, tensor)
        else:
            readers[name] = partial(_read_slice, large, in_file, by_tensor.get(id(tensor)))
    return layout, readers


def _return_tensor(tensor: Tensor) -> Iterable[Tensor]:
    return [tensor]


def _read_slice(large: LargeModel, name: str, part: Slice | None) -> Iterable[Tensor]:
    return large.checkpoint.read_parts(name) if part is None else [part.of(large.checkpoint.read(name))]


def _read_all(
    readers: dict[str, Callable[[], Iterable[Tensor]]], progress: Progress
) -> Iterator[tuple[str, Iterable[Tensor]]]:
    for number, (name, read) in enumerate(readers.items()):
        progress("write", number, len(readers))
        stop_if_interrupted()
        yield name, read()
    progress("write", len(readers), len(readers))


def _check_room(target: Path, layout: Layout) -> None:
    """Raise unless the disk has room for the new file, before anything is written."""
    needed = sum(bytes_of(shape, dtype) for shape, dtype in layout.values())
    folder = target.absolute().parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"out: the smaller model takes {needed / 1e9:.1f} GB, and {folder} has {free / 1e9:.1f} GB left; "
            "make room, or give a folder on another disk"
        )


def _as_twin(rebuilt: Rebuilt) -> Callable[[object, Path], bool]:
    """Whether from_pretrained loads a config that says the new numbers of heads: as it does for the twin."""
    answers: list[bool] = []

    def record_answer(model: object, folder: Path) -> bool:
        answers.append(from_pretrained_agrees(model, folder))  # type: ignore[arg-type]
        return answers[-1]

    with tempfile.TemporaryDirectory() as folder:
        saved.write(rebuilt.model, Path(folder), None, record_answer)
    return lambda model, folder: answers.pop(0) if answers else False
