"""The command line of sweeps."""

import json
from dataclasses import fields

import pytest
from typer.testing import CliRunner

pytest.importorskip("optuna")

from manyheads.cli import app
from manyheads.tasks.options import RunOptions

QUICK = ["--steps", "3", "--batch-tokens", "120", "--evaluate-every", "3", "--evaluate-examples", "2"]
SMALL = ["--d-model", "12", "--layers", "1", "--context", "11", "--watch-every", "0"]


def call(*arguments):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def test_a_sweep_prints_its_answer_and_the_same_command_goes_on(tmp_path):
    (tmp_path / "text.txt").write_text("a few words, and a few more of them.\n" * 20)
    out = tmp_path / "sweep"
    command = ["sweep", "language", "--data", tmp_path / "text.txt", "--out", out, *SMALL, *QUICK]
    told = json.loads(call(*command, "--heads", "2", "--seeds", "4,7", "--json").stdout)
    assert [row["setting"] for row in told["settings"]] == ["heads=2"]
    assert [each["seed"] for each in told["runs"]] == [4, 7]
    assert (out / "heads=2-seed=7" / "model.safetensors").exists()
    shown = call(*command, "--heads", "2,3", "--seeds", "4,7").stdout
    assert "language: loss by number of heads, equal parameters" in shown
    assert "heads" in shown
    assert str(out / "answer.txt") in shown.replace("\n", "")
    evaluated = call("evaluate", out / "heads=3-seed=4", "--data", tmp_path / "text.txt", "--json")
    assert json.loads(evaluated.stdout)["metrics"]["loss"] > 0
    diverging = ["--learning-rate", "1e30", "--clip", "0", "--warmup", "0", "--decay", "none"]
    with pytest.raises(ValueError, match=r"No run has finished.*heads=2-seed=0 \(the loss became"):
        call(*command[:-4], "--heads", 2, "--seeds", 1, *diverging, "--out", tmp_path / "diverged")
    with pytest.raises(ValueError, match="heads: got '2,x'; expected whole numbers, as in 1,2,4"):
        call(*command, "--heads", "2,x")


def test_help_has_the_lists_and_the_options_of_the_task():
    shown = call("sweep", "series", "--help").stdout
    for flag in ("--heads", "--kv-heads", "--seeds", "--equal", "--sampler", "--horizon", "--learning-rate"):
        assert flag in shown, flag
    for flag in ("--seed ", "--resume", "--tracker"):
        assert flag not in shown, flag
    assert {"resume", "tracker"} <= {field.name for field in fields(RunOptions)}
    assert "manyheads sweep language --heads 1,2,4,8 --seeds 3" in call("sweep", "--help").stdout
    assert call("sweep", "painting").exit_code == 2
