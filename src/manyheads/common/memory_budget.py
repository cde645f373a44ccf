"""How many bytes a verb may take: what the user allows, or half of what is free."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import torch

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}


def memory_budget(memory: str | int | None = None, device: torch.device | None = None) -> int:
    """Bytes from an option such as ``"2GB"``, ``"800 MiB"`` or a number; half of what is free by default.

    >>> memory_budget("1.5 GB"), memory_budget("2KiB"), memory_budget(77)
    (1500000000, 2048, 77)
    >>> memory_budget("much")
    Traceback (most recent call last):
    ValueError: memory: got 'much'; expected a number of bytes, such as 2GB, 800MB or 4GiB
    """
    if memory is None:
        return free_bytes(device) // 2
    if isinstance(memory, int):
        size = memory
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", memory.lower())
        size = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if size < 1:
        raise ValueError(f"memory: got {memory!r}; expected a number of bytes, such as 2GB, 800MB or 4GiB")
    return size


def free_bytes(device: torch.device | None = None) -> int:
    """The bytes that are free on a device; on the CPU those that this process may still take.

    >>> free_bytes() > 0
    True
    """
    if device is not None and device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    sizes = [_machine_bytes(), *_container_bytes()]
    return max(1, min(size for size in sizes if size is not None))


def _machine_bytes() -> int:
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # elsewhere what is free is not known without another package: a quarter of what there is
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


def _container_bytes() -> list[int | None]:
    """What the control group of a container leaves, if there is one."""
    group = Path("/sys/fs/cgroup")
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):
            return [int((group / limit_file).read_text()) - int((group / usage_file).read_text())]
    return []


def in_units(size: float) -> str:
    """Bytes for people.

    >>> in_units(2_340_000_000), in_units(56_000), in_units(7)
    ('2.3 GB', '56 kB', '7 B')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.2g} {unit}" if size < 10 * factor else f"{size / factor:.0f} {unit}"
    return f"{size:.0f} B"
