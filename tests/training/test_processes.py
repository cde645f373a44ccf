"""Two processes learn what one learns alone: the same global batches, weighted by tokens."""

import os
import subprocess
import sys

import pytest

from manyheads.tasks.translation import Translation
from manyheads.training.log import read
from manyheads.training.loop import train

OPTIONS = {
    "steps": 4, "batch_tokens": 61, "warmup": 1, "learning_rate": 0.01, "evaluate_every": 4,
    "evaluate_examples": 5, "watch_every": 2, "seed": 3,
}  # fmt: skip

SCRIPT = f"""
import sys
import torch
torch.set_num_threads(1)
from manyheads.tasks.translation import Translation
from manyheads.training.loop import train
task = Translation(d_model=10, heads=5, layers=1, dropout=0.0, vocabulary=280)
train(task, sys.argv[1], out=sys.argv[2], accumulate=2, **{OPTIONS})
"""


def test_two_processes_are_one(tmp_path):
    """Sentences of very different lengths: an average of the processes' averages would be something else."""
    data = tmp_path / "train"
    lines = ["a", "some words", "rather many more words in this sentence", "no", "two of them here"] * 9
    (tmp_path / "train.en").write_text("\n".join(lines))
    (tmp_path / "train.de").write_text("\n".join(line.upper() for line in reversed(lines)))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(script), str(data), str(tmp_path / "two")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    task = Translation(d_model=10, heads=5, layers=1, dropout=0.0, vocabulary=280)
    train(task, str(data), out=tmp_path / "one", **OPTIONS)
    one, two = (read(tmp_path / name / "log.jsonl") for name in ("one", "two"))
    assert len(one) == len(two) == 4
    assert len({line["tokens"] for line in one}) > 1
    for a, b in zip(one, two, strict=True):
        assert a["tokens"] == b["tokens"]
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)
        assert a["gradient_norm"] == pytest.approx(b["gradient_norm"], rel=1e-4)
    assert one[-1]["valid"] == pytest.approx(two[-1]["valid"], abs=1e-4)
