"""Projections that repeat their outputs (`Repeat`): made when key heads merge, kept when heads change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from torch import nn

from manyheads.capture.weights import Projections
from manyheads.common.errors import FailedChangeError
from manyheads.models.changes import Changes, set_value
from manyheads.models.repeated_outputs import Repeat, repeat_of
from manyheads.surgery.arrangement import Arrangement, arranged
from manyheads.surgery.weight_slices import Slice


def repeat_outputs(
    model: nn.Module,
    copied: nn.Module,
    by_site: Mapping[str, Projections],
    arrangement: Arrangement,
    sliced: Mapping[str, Slice],
    changes: Changes,
) -> None:
    """Let the projections whose key heads were merged give what they gave before, each to every head.

    model: the model that was copied, in which merged key heads are equal.
    """
    for path, names in _modules_of(copied, by_site).items():
        weight = f"{path}.weight" if path else "weight"
        taken = sliced.get(weight)
        if taken is None:
            continue
        module = copied.get_submodule(path)
        if not (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"):
            raise FailedChangeError(
                f"merge: {path} is a {type(module).__name__}, whose outputs cannot be repeated for several "
                "heads; expected a linear layer"
            )
        if not isinstance(module, nn.Linear):
            set_value(module, ["nf"], len(taken.indices))
            changes.attributes.setdefault(path, {})["nf"] = len(taken.indices)
        twins, users = _twins(weight, names, by_site, arrangement), _users(weight, names, by_site, taken.size)
        now = {index: position for position, index in enumerate(taken.indices)}
        indices = [now[twins.get(index, index)] for index in range(taken.size)]
        before = repeat_of(model.get_submodule(path))
        if before is not None:  # of a merge before this one
            users = [set(heads) for heads in before.heads]
            indices = [indices[index] for index in before.indices]
        _attach(copied, path, Repeat(indices, [sorted(heads) for heads in users]), changes)
    sentence = (
        "its class computes a key for every head, so that merged keys are repeated: fewer weights, and a "
        "cache as large as before"
    )
    if sentence not in changes.notes:
        changes.notes.append(sentence)


def follow_heads(
    copied: nn.Module,
    by_site: Mapping[str, Projections],
    arrangement: Arrangement,
    sliced: Mapping[str, Slice],
    changes: Changes,
) -> None:
    """Let outputs that are repeated be those of the present heads."""
    for path, names in _modules_of(copied, by_site).items():
        hook = repeat_of(copied.get_submodule(path))
        name = next(filter(arrangement.changes, names), None)
        if hook is None or name is None:
            continue
        if arrangement.merged.get(name):
            raise FailedChangeError(f"merge: {path} repeats the keys of its heads, and has no number of them")
        removed, copies = arrangement.removed.get(name, ()), arrangement.copied.get(name, ())
        positions = arranged([set(heads) for heads in hook.heads], removed, copies)
        taken = sliced.get(f"{path}.weight" if path else "weight")
        size = 1 + max(hook.indices)
        rows = [[index] for index in range(size)] if taken is None else taken.positions(range(size))
        numbers: dict[int, list[int]] = {}
        for new, old in enumerate(arrangement.heads(name)):
            numbers.setdefault(old, []).append(new)
        times: Counter[int] = Counter()
        indices, users = [], []
        for position in positions:
            time = times[position]
            times[position] += 1
            choices = rows[hook.indices[position]]
            indices.append(choices[min(time, len(choices) - 1)])
            heads = [numbers[head] for head in hook.heads[position] if head in numbers]
            users.append(sorted(each[min(time, len(each) - 1)] for each in heads))
        _attach(copied, path, Repeat(indices, users), changes)


def _attach(model: nn.Module, path: str, hook: Repeat, changes: Changes) -> None:
    hook.attach(model.get_submodule(path))
    changes.repeated[path] = hook.options()


def _modules_of(model: nn.Module, by_site: Mapping[str, Projections]) -> dict[str, list[str]]:
    """The modules that make keys and values, with the sites that they make them for."""
    modules: dict[str, list[str]] = {}
    for name, projections in by_site.items():
        for head in projections.heads:
            for part in (*head.key, *head.value):
                path = part.parameter.rpartition(".")[0]
                if name not in modules.setdefault(path, []):
                    modules[path].append(name)
    existing = {path for path, _ in model.named_modules()}
    return {path: names for path, names in modules.items() if path in existing}


def _twins(
    weight: str, names: list[str], by_site: Mapping[str, Projections], arrangement: Arrangement
) -> dict[int, int]:
    """For each entry that goes, the one that stays in its stead: that of the key head it merges with."""
    twins: dict[int, int] = {}
    for name in names:
        site, gone = by_site[name].site, set(arrangement.merged.get(name, ()))
        entries = {kv: dict(_entries(weight, by_site[name], kv)) for kv in sorted(set(site.kv_heads))}
        stays = 0
        for key_head, by_role in entries.items():
            if key_head not in gone:
                stays = key_head
                continue
            for role, indices in by_role.items():
                twins |= dict(zip(indices, entries[stays][role], strict=True))
    return twins


def _entries(weight: str, projections: Projections, key_head: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The entries of a parameter that make the keys and the values of a key head."""
    head = projections.heads[projections.site.kv_heads.index(key_head)]
    for role in ("key", "value"):
        indices = [
            index for part in getattr(head, role) if part.parameter == weight for index in part.indices
        ]
        if indices:
            yield role, tuple(indices)


def _users(weight: str, names: list[str], by_site: Mapping[str, Projections], size: int) -> list[set[int]]:
    """The heads that use each entry of a parameter."""
    users: list[set[int]] = [set() for _ in range(size)]
    for name in names:
        for number, head in enumerate(by_site[name].heads):
            for part in (*head.query, *head.key, *head.value):
                for index in part.indices if part.parameter == weight else ():
                    users[index].add(number)
    return users
