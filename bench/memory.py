"""Peak memory of one call, in a fresh process of its own.

A process's peak only ever grows, and an allocator keeps what it was given, so nobody's memory can be measured
after somebody else has run. `peak("dropout:module", name="torch")` starts `python -m bench.memory`, which
imports `bench.dropout`, calls `module(name="torch")` to set up, and weighs one call of what that returned.

The number is VmHWM, the kernel's high-water mark of resident memory, reset after the setup where allowed.
getrusage's ru_maxrss would not do: it survives exec, so a child starts with its parent's peak.
"""

import importlib
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch


class Peak(NamedTuple):
    """Bytes before the call (interpreter, torch, inputs, parameters), at the call's peak, and its seconds."""

    before: int
    highest: int
    seconds: float

    @property
    def extra(self) -> int:
        """What the call itself needed."""
        return self.highest - self.before


def peak(target: str, environment: dict[str, str] | None = None, **arguments: object) -> Peak:
    """Peak memory of the call that `bench.<part>:<function>(**arguments)` returns, in a new process."""
    command = [sys.executable, "-m", "bench.memory", target, json.dumps(arguments)]
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        command, cwd=root, env=os.environ | (environment or {}), capture_output=True, text=True
    )
    if done.returncode:  # a process that the kernel killed for memory says nothing itself
        raise RuntimeError(
            f"{' '.join(command[2:])} ended with {done.returncode}: {done.stderr.strip()[-2000:]}"
        )
    return Peak(*json.loads(done.stdout.splitlines()[-1]))


def status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: memory is measured on Linux only")


def _weigh(target: str, arguments: dict[str, object]) -> Peak:
    part, function = target.split(":")
    call = getattr(importlib.import_module(f"bench.{part}"), function)(**arguments)
    x = torch.randn(256, 256, requires_grad=True)
    (x @ x).sum().backward()  # threads and libraries load here, not in the call
    before = status("VmRSS")
    with suppress(OSError):  # where forbidden, a setup that went higher than the call would hide the call
        Path("/proc/self/clear_refs").write_text("5")
    started = time.perf_counter()
    call()
    return Peak(before, status("VmHWM"), time.perf_counter() - started)


if __name__ == "__main__":
    print(json.dumps(_weigh(sys.argv[1], json.loads(sys.argv[2]))))
