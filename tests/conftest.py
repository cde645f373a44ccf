"""Settings that every test needs, before torch is loaded."""

import os

# Some sandboxes announce AMX and forbid it: a bfloat16 matrix product would then end the whole test run.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# No test may reach a model hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

torch.set_num_threads(1)  # tests run side by side, one process a core
