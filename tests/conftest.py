"""Settings that every test needs, before torch is loaded."""

import os
import signal
from collections.abc import Iterator

# Some sandboxes announce AMX and forbid it: a bfloat16 matrix product would then end the whole test run.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# No test may reach a model hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

torch.set_num_threads(1)  # tests run side by side, one process a core


@pytest.fixture(autouse=True)
def _ctrl_c() -> Iterator[None]:
    """The command takes Ctrl-C for itself, for good; after a test it is pytest's again."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)
