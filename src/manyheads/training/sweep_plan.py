"""The settings of a sweep: which numbers of heads and which widths, and what is held equal between them."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from typing import Any

import torch

from manyheads.common.errors import first_line
from manyheads.common.progress import Progress, no_progress
from manyheads.data.examples import spread
from manyheads.models.config import build
from manyheads.training.options import Options
from manyheads.training.sweep_costs import cache_bytes, flops_per_step
from manyheads.training.task import Data, Task

# The options of a task that a sweep can vary.
VARIED = ("heads", "kv_heads", "d_key", "d_value")
EQUAL = ("parameters", "compute", "nothing")
TOLERANCE = 0.01  # how far parameters or operations may be apart and still count as equal
HASHED = 64  # examples of the data whose content is compared


@dataclass(frozen=True)
class Setting:
    """One setting of a sweep, and what it costs before it runs."""

    options: dict[str, int]  # what is varied: {"heads": 4}
    changes: dict[str, int | None]  # of the task's fields, what is held equal included
    steps: int
    parameters: int
    flops_per_step: float
    cache_bytes: int  # keys and values of a token

    @property
    def name(self) -> str:
        """Such as ``heads=4-d_key=8``: the beginning of the names of its folders."""
        return name_of(self.options)


def name_of(options: Mapping[str, int]) -> str:
    """The name of a setting.

    >>> name_of({"heads": 4, "d_key": 8})
    'heads=4-d_key=8'
    """
    return "-".join(f"{key}={value}" for key, value in options.items())


def check_lists(lists: Mapping[str, int | Sequence[int] | None]) -> dict[str, list[int]]:
    """What is varied, each as a list of different whole numbers from 1 on; what is None is left out.

    >>> check_lists({"heads": (1, 2, 4), "d_key": 8, "d_value": None})
    {'heads': [1, 2, 4], 'd_key': [8]}
    """
    checked: dict[str, list[int]] = {}
    for name, values in lists.items():
        if values is None:
            continue
        listed = [values] if isinstance(values, int) else list(values)
        whole = all(type(value) is int and value >= 1 for value in listed)
        if not listed or not whole or len(set(listed)) < len(listed):
            raise ValueError(
                f"{name}: got {listed}; expected different whole numbers of at least 1, such as 1,2,4,8"
            )
        checked[name] = listed
    return checked


def plan_settings(
    task: Task,
    data: Data,
    lists: Mapping[str, list[int]],
    equal: str,
    options: Options,
    progress: Progress = no_progress,
) -> tuple[list[Setting], list[str]]:
    """The settings of a sweep, and sentences about those that are left out.

    Parameters
    ----------
    task: opened; its own options hold where nothing is varied.
    data: what it opened.
    lists: what is varied, as `check_lists` gives it.
    equal: ``parameters``, ``compute`` or ``nothing``; see `manyheads.sweep`.
    options: those of training.
    progress: called for each setting whose operations are counted.
    """
    if equal not in EQUAL:
        raise ValueError(f"equal: got {equal!r}; expected one of {', '.join(EQUAL)}")
    if missing := [name for name in lists if name not in {field.name for field in fields(task)}]:  # type: ignore[arg-type]
        raise ValueError(f"{missing[0]}: the task {task.name} has no such option; a sweep needs it")
    if equal == "compute" and options.patience:
        raise ValueError(
            f"patience: got {options.patience} with equal='compute', but a run that stops early computes "
            "less; leave it out"
        )
    combinations = [dict(zip(lists, values, strict=True)) for values in product(*lists.values())]
    changes = [_changes(task, chosen, equal) for chosen in combinations]
    reasons = [_impossible(task, change) for change in changes]
    notes = _refuse_or_skip(lists, combinations, reasons)
    settings = []
    possible = [pair for pair, reason in zip(zip(combinations, changes, strict=True), reasons, strict=True)
                if reason is None]  # fmt: skip
    for number, (chosen, change) in enumerate(possible):
        progress("count", number, len(possible))
        settings.append(_counted(task, data, chosen, change, options))
    if equal == "parameters":
        _check_parameters(settings)
    elif equal == "compute":
        whole = _counted(task, data, {}, {}, options)
        settings = [_same_compute(setting, whole) for setting in settings]
    return settings, notes


def with_setting(task: Task, changes: Mapping[str, int | None]) -> Task:
    """A copy of a task with other options, that keeps what the task has learned from the data."""
    changed = copy.copy(task)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


def _changes(task: Any, chosen: Mapping[str, int], equal: str) -> dict[str, int | None]:
    """The options of the task in a setting: d_model / heads is a head's width unless one is named."""
    changes: dict[str, int | None] = dict(chosen)
    if equal == "nothing":  # a head keeps the width that it has in the task as it is
        for name in ("d_key", "d_value"):
            if name not in chosen and getattr(task, name) is None:
                changes[name] = task.d_model // task.heads
    return changes


def _impossible(task: Any, changes: Mapping[str, int | None]) -> str | None:
    """Why there is no model of this setting; None if there is one."""
    heads, width = changes.get("heads", task.heads), changes.get("d_key", task.d_key)
    if width is None and heads > task.d_model:
        return f"{heads} heads are more than d_model {task.d_model} has channels"
    if task.positions == "rotary" and (width or task.d_model // heads) < 2:
        return "d_key 1: rotary positions turn pairs of channels, so a head needs two"
    try:
        replace(task, **changes)  # its options are checked
        with torch.device("meta"):
            build(with_setting(task, changes).describe())
    except (ValueError, TypeError) as error:
        # `build` says which model, and the reason in brackets
        return first_line(error.__cause__ or error)
    return None


def _refuse_or_skip(
    lists: Mapping[str, list[int]], combinations: Sequence[Mapping[str, int]], reasons: Sequence[str | None]
) -> list[str]:
    """Sentences about impossible combinations; a ValueError where a value that was asked for has no other."""
    impossible = [
        f"{name_of(chosen)} ({reason})"
        for chosen, reason in zip(combinations, reasons, strict=True)
        if reason is not None
    ]
    for name, values in lists.items():
        for value in values:
            its = [
                reason for chosen, reason in zip(combinations, reasons, strict=True) if chosen[name] == value
            ]
            if None not in its:
                raise ValueError(
                    f"{name}: {value} cannot be built, nothing was run; impossible: {'; '.join(impossible)}; "
                    "leave it out, or choose other widths"
                )
    return [f"{len(impossible)} impossible combinations are left out: {'; '.join(impossible)}"] * bool(
        impossible
    )


def _counted(
    task: Task, data: Data, chosen: dict[str, int], changes: dict[str, int | None], options: Options
) -> Setting:
    changed = with_setting(task, changes)
    with torch.device("meta"):
        model = build(changed.describe())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    operations = flops_per_step(changed, data, options)
    return Setting(chosen, changes, options.steps, parameters, operations, cache_bytes(model))


def _check_parameters(settings: Sequence[Setting]) -> None:
    least, most = (extreme(settings, key=lambda setting: setting.parameters) for extreme in (min, max))
    if most.parameters > (1 + TOLERANCE) * least.parameters:
        raise ValueError(
            f"equal: {most.name} has {most.parameters:,} parameters and {least.name} {least.parameters:,}, "
            f"which is more than {TOLERANCE:.0%} apart; expected heads x d_key to stay the same: leave "
            "d_key, d_value and kv_heads out, or compare with equal='compute' or equal='nothing'"
        )


def _same_compute(setting: Setting, whole: Setting) -> Setting:
    """A setting with as many steps as take the operations of the task as it is."""
    budget = whole.steps * whole.flops_per_step
    steps = max(round(budget / setting.flops_per_step), 1)
    off = abs(steps * setting.flops_per_step / budget - 1)
    if off > TOLERANCE:
        raise ValueError(
            f"steps: {whole.steps} steps are too few for equal='compute': {setting.name} needs "
            f"{budget / setting.flops_per_step:.2f} steps, and {steps} are {off:.1%} off; expected at most "
            f"{TOLERANCE:.0%}: give more steps"
        )
    return replace(setting, steps=steps)


def definition(task: Task, data: Data, options: Options, equal: str) -> dict[str, object]:
    """What makes two sweeps the same: task, data, training and what is held equal, flat, as JSON has it."""
    described: dict[str, object] = asdict(task)  # type: ignore[call-overload]
    training = {key: value for key, value in asdict(options).items() if key != "seed"}
    return {"task": task.name, "data": digest(data), "equal": equal, **described, **training}


def digest(data: Data) -> str:
    """A hash of the sizes of all examples, and of the content of some."""
    hashed = hashlib.sha256()
    for examples in (data.train, data.valid):
        hashed.update(examples.digest().encode())
        for example in examples.take(spread(len(examples), HASHED), 0):
            for tensor in example:
                hashed.update(tensor.contiguous().cpu().numpy().tobytes())
    return hashed.hexdigest()[:16]
