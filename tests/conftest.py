"""Settings that every test needs, before torch is loaded."""

import os
import random
import signal
from collections.abc import Iterator

# Some sandboxes announce AMX and forbid it: a bfloat16 matrix product would then end the whole test run.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# No test may reach a model hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

pytest.register_assert_rewrite("tests.helpers")

if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)  # tests run side by side, one process a core


# A module that makes a device of torch's for good: only a process of its own may import it.
collect_ignore = ["helpers/pretend_device.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="files, and the tests in them, in any order")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Three workers for two cores: one that waits for a browser or another process leaves a core idle."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + (cores + 1) // 2


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = config.getoption("--shuffle")
    return None if seed is None else f"order: --shuffle {seed}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--shuffle")
    if seed is None:
        return
    order = random.Random(seed)
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    for tests in files.values():
        order.shuffle(tests)
    shuffled = list(files.values())
    order.shuffle(shuffled)
    items[:] = [item for tests in shuffled for item in tests]


@pytest.fixture(autouse=True)
def _ctrl_c() -> Iterator[None]:
    """The command takes Ctrl-C for itself, for good; after a test it is pytest's again. What a shell runs in
    the background ignores Ctrl-C: not here, and not in processes that a test starts.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)
