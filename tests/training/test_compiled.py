"""Runs of a compiled model: the same losses, and an ordinary model at the end. No compiler is needed here."""

from functools import partial

import pytest
import torch

from manyheads.tasks.language import Language
from manyheads.training.log import read
from manyheads.training.options import Options
from manyheads.training.train import train

SMALL = {"d_model": 10, "heads": 5, "layers": 2, "context": 13, "dropout": 0.0}
QUICK = {
    "batch_tokens": 130, "evaluate_every": 4, "evaluate_examples": 7, "save_every": 3, "watch_every": 5,
    "warmup": 2, "learning_rate": 0.01, "steps": 7,
}  # fmt: skip


@pytest.fixture
def calls(monkeypatch):
    """How often a graph with parameters of the model was run, forward."""
    counted = []

    def backend(graph, inputs):
        def counting(*values):
            counted.append(len(values))
            return graph.forward(*values)

        return counting

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    yield counted
    torch._dynamo.reset()


def test_a_compiled_run_has_the_losses_of_one_that_is_not(text, tmp_path, calls):
    train(Language(**SMALL), text, out=tmp_path / "plain", **QUICK)
    assert not calls
    looks = []
    watch = [lambda report: looks.append(report.heads)]
    out = tmp_path / "compiled"
    result = train(Language(**SMALL), text, out=out, compile=True, callbacks=watch, **QUICK)
    probe, steps = calls[0], calls[1:]
    assert probe == 1
    assert len(steps) >= QUICK["steps"] - 1  # the step that is looked at may run uncompiled
    plain, compiled = (read(tmp_path / name / "log.jsonl") for name in ("plain", "compiled"))
    assert [line["loss"] for line in compiled] == pytest.approx([line["loss"] for line in plain], rel=1e-4)
    assert [line.get("valid") for line in compiled][3] == pytest.approx(plain[3]["valid"], rel=1e-4)
    before = len(calls)
    result.model(torch.zeros(1, 5, dtype=torch.long))
    assert len(calls) == before  # an ordinary model again
    assert [len(table) if table else 0 for table in looks] == [0, 0, 0, 0, 10, 0, 0]  # heads were looked at


def test_without_a_compiler_nothing_begins(text, tmp_path, monkeypatch):
    def backend(graph, inputs):
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    with pytest.raises(ValueError, match=r"compile: torch cannot compile for cpu here .*C\+\+ compiler"):
        train(Language(**SMALL), text, out=tmp_path / "out", compile=True, **QUICK)
    monkeypatch.undo()
    train(Language(**SMALL), text, out=tmp_path / "out", **QUICK)  # the folder is free


def test_terms_that_read_attention_need_a_model_that_is_not_compiled():
    Options(compile=True, diversity="orthogonality=0.1")
    with pytest.raises(ValueError, match="compile: got it with --diversity attention"):
        Options(compile=True, diversity="attention=0.1")
