"""Every task learns from the data it brings along: here for seconds, by default within two minutes."""

import pytest

from manyheads.tasks import TASKS, find
from manyheads.training.log import read
from manyheads.training.train import train

SMALL = {"d_model": 32, "heads": 4, "layers": 1}
QUICK = {
    "steps": 40, "batch_tokens": 1024, "learning_rate": 0.01, "warmup": 5, "evaluate_every": 40,
    "evaluate_examples": 48, "watch_every": 0,
}  # fmt: skip
# a motif takes longer to find than what most examples show anyway
LONGER = {
    "dna": {"steps": 150, "batch_tokens": 2048, "learning_rate": 0.006, "evaluate_every": 150},
    "speech": {"steps": 80, "evaluate_every": 80},
}


@pytest.mark.parametrize("name", TASKS)
def test_the_embedded_data_are_learned(name, tmp_path, monkeypatch):
    # the last evaluation takes all examples, which is not the point here
    task = find(name)(**SMALL)
    opened = task.open(None)
    opened.valid.sizes = opened.valid.sizes[:48]
    monkeypatch.setattr(task, "open", lambda *_: opened)
    result = train(task, out=tmp_path / "out", **(QUICK | LONGER.get(name, {})))
    losses = [line["loss"] for line in read(tmp_path / "out" / "log.jsonl")]
    assert sum(losses[-5:]) / 5 < 0.75 * losses[0]
    assert result.metrics.get("loss", 0) < 0.85 * losses[0]  # of what is held out; a series has errors only
