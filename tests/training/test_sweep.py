"""Sweeps: what is run, in what order, by whom, and what is refused."""

import importlib
import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import manyheads as mh
from manyheads.tasks.language import Language

pytest.importorskip("optuna")

from manyheads.training import checkpoint
from manyheads.training.options import Options
from manyheads.training.sweep import sweep
from manyheads.training.sweep_costs import flops_per_step
from manyheads.training.sweep_plan import Setting, plan_settings
from manyheads.training.sweep_storage import JOURNAL, Runs

SMALL = {"context": 11, "d_model": 12, "layers": 1}
QUICK = {"steps": 4, "batch_tokens": 120, "evaluate_every": 2, "evaluate_examples": 3, "save_every": 2,
         "watch_every": 0}  # fmt: skip


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("a few words, and a few more of them.\n" * 20)
    return str(path)


def run(text, out, task=None, heads=(1, 2, 3), seeds=2, **options):
    return sweep(task or Language(**SMALL), text, out=out, heads=heads, seeds=seeds, **(QUICK | options))


def values(result):
    return {(each.setting, each.seed): each.value for each in result.outcomes}


def test_every_setting_is_trained_with_every_seed(text, tmp_path):
    out, stages = tmp_path / "sweep", []
    result = run(text, out, progress=lambda *told: stages.append(told))
    assert (result.ended, result.left) == ("finished", 0)
    assert [row["heads"] for row in result.table] == [1, 2, 3]
    assert {row["seeds"] for row in result.table} == {2}
    assert len({row["parameters"] for row in result.table}) == 1
    assert all(row["flops"] > 0 and row["seconds_per_step_min"] > 0 for row in result.table)
    assert ("sweep", 6, 6) in stages
    alone = mh.train(Language(heads=3, **SMALL), text, out=tmp_path / "alone", seed=1, **QUICK)
    assert values(result)["heads=3", 1] == alone.metrics["loss"]
    assert mh.evaluate(out / "heads=3-seed=1", text).metrics["loss"] == pytest.approx(alone.metrics["loss"])
    document = json.loads((out / "table.json").read_text())
    assert document["answer"] == result.answer
    assert result.best in [{"heads": 1}, {"heads": 2}, {"heads": 3}]


def test_all_settings_have_one_seed_before_any_has_two(text, tmp_path):
    out = tmp_path / "sweep"
    run(text, out)
    begun = sorted(out.glob("heads=*"), key=lambda path: (path / "metrics.json").stat().st_mtime_ns)
    assert [path.name for path in begun] == [f"heads={h}-seed={s}" for s in (0, 1) for h in (1, 2, 3)]


def test_ctrl_c_keeps_everything_and_the_same_call_goes_on(text, tmp_path):
    steps = []

    def press(report):
        steps.append(report.step)
        if len(steps) == 6:  # in the second run
            signal.raise_signal(signal.SIGINT)

    stopped = run(text, tmp_path / "sweep", callbacks=[press])
    assert stopped.ended == "interrupted"
    assert (len(stopped.outcomes), stopped.left) == (1, 5)
    assert stopped.answer.endswith("5 runs are not done yet.")
    result = run(text, tmp_path / "sweep", callbacks=[lambda report: steps.append(report.step)])
    assert result.ended == "finished"
    assert len(steps) == 6 * QUICK["steps"]  # no step was made twice
    assert values(result) == values(run(text, tmp_path / "whole"))
    assert run(text, tmp_path / "sweep", callbacks=[pytest.fail]).left == 0


WORKER = """
import json, os, signal, sys
from manyheads.training.sweep import sweep
from manyheads.tasks.language import Language
text, out, log, kill, small, quick = json.loads(sys.argv[1])
seen = []
def note(report):
    seen.append(report.step)
    with open(log, "a") as file:
        file.write("x")
    if len(seen) == kill:
        os.kill(os.getpid(), signal.SIGKILL)
result = sweep(Language(**small), text, out=out, heads=(1, 2, 3), seeds=2, callbacks=[note], **quick)
print(result.ended)
"""


def worker(text, out, log, kill, **options):
    arguments = json.dumps([text, str(out), str(log), kill, SMALL, QUICK | options])
    command = [sys.executable, "-c", WORKER, arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_killed_worker_is_followed_by_another_that_goes_on_at_its_checkpoint(text, tmp_path):
    log, steps = tmp_path / "log", []
    killed = worker(text, tmp_path / "sweep", log, kill=7)  # after step 3 of the second run
    _, errors = killed.communicate()
    assert killed.returncode == -signal.SIGKILL, errors
    left = tmp_path / "sweep" / "heads=2-seed=0"
    assert checkpoint.list_checkpoints(left / "checkpoints")[0].name == "step-00000002"
    result = run(text, tmp_path / "sweep", callbacks=[lambda report: steps.append(report.step)])
    assert steps[:2] == [3, 4]
    assert len(steps) + len(log.read_text()) == 6 * QUICK["steps"] + 1
    # another process may have another number of threads, and round differently
    assert values(result) == pytest.approx(values(run(text, tmp_path / "whole")), rel=1e-5)


def test_two_workers_share_the_runs(text, tmp_path):
    log, steps = tmp_path / "log", []
    other = worker(text, tmp_path / "sweep", log, kill=0, steps=12)
    result = run(text, tmp_path / "sweep", callbacks=[lambda report: steps.append(report.step)], steps=12)
    told, errors = other.communicate()
    assert other.returncode == 0, errors
    assert len(steps) + (len(log.read_text()) if log.exists() else 0) == 6 * 12
    last = run(text, tmp_path / "sweep", callbacks=[pytest.fail], steps=12)
    assert (len(last.outcomes), last.left) == (6, 0)
    assert {result.ended, told.strip()} <= {"finished", "elsewhere"}


def claims(out, sampler="grid", trials=0):
    settings = [Setting({"heads": h}, {"heads": h}, 4, 100, 1e6, 8) for h in (1, 2)]
    return Runs(out, None, {"task": "language"}, settings, [0, 1], higher_is_better=True, sampler=sampler,
                trials=trials)  # fmt: skip


def test_a_run_is_held_by_one_worker_and_taken_up_when_it_lets_go(tmp_path):
    one, two = claims(tmp_path / "sweep"), claims(tmp_path / "sweep")
    with one.claim() as first, two.claim() as second:
        assert (first.name, second.name) == ("heads=1-seed=0", "heads=2-seed=0")
        two.finish(second, 2.0, {})
        with two.claim() as third:
            assert third.name == "heads=1-seed=1"
            two.fail(third, "out of memory")
        assert one.unfinished() == (1, 1)
    with two.claim() as again:
        assert (again.name, again.number) == (first.name, first.number)
        two.finish(again, 1.0, {})
    with one.claim() as last:
        assert last.name == "heads=2-seed=1"
        one.finish(last, 3.0, {"steps": 4})
    with one.claim() as nothing:
        assert nothing is None
    assert [(each.setting, each.seed, each.value) for each in two.outcomes()] == [
        ("heads=1", 0, 1.0), ("heads=1", 1, None), ("heads=2", 0, 2.0), ("heads=2", 1, 3.0),
    ]  # fmt: skip


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_sampler_proposes_runs_and_none_twice(tmp_path, sampler):
    names = []
    for _ in range(3):  # each time a worker that begins anew
        runs = claims(tmp_path / "sweep", sampler, trials=3)
        with runs.claim() as claim:
            if claim is not None:
                names.append(claim.name)
                runs.finish(claim, float(len(names)), {})
    assert len(set(names)) == len(names) == 3
    with claims(tmp_path / "sweep", sampler, trials=3).claim() as claim:
        assert claim is None


def test_a_journal_that_lost_power_in_the_last_line_is_read(tmp_path):
    out = tmp_path / "sweep"
    with claims(out).claim():
        pass
    whole = (out / JOURNAL).read_bytes()
    (out / JOURNAL).write_bytes(whole + b'{"op_code": 5, "wor')
    with claims(out).claim() as claim:
        assert claim.name == "heads=1-seed=0"
    assert (out / JOURNAL).read_bytes().startswith(whole)


def test_more_seeds_and_heads_later_run_only_what_is_missing(text, tmp_path):
    out, steps = tmp_path / "sweep", []
    before = run(text, out, heads=(1, 2))
    after = run(text, out, heads=(1, 3), seeds=3, callbacks=[lambda report: steps.append(report.step)])
    assert len(steps) == 4 * QUICK["steps"]
    assert values(before)["heads=1", 1] == values(after)["heads=1", 1]
    assert [row["heads"] for row in after.table] == [1, 3]


def test_a_database_serves_workers_that_share_no_folder(text, tmp_path):
    url = f"sqlite:///{tmp_path / 'sweep.db'}"
    first = run(text, tmp_path / "here" / "sweep", storage=url, seeds=1)
    second = run(text, tmp_path / "there" / "sweep", storage=url, seeds=2)
    assert not (tmp_path / "there" / "sweep" / "heads=1-seed=0").exists()
    assert values(second).items() > values(first).items()
    with pytest.raises(
        ValueError, match=r"layers: the sweep in sqlite:.* began with 1, got 2; give the same"
    ):
        run(text, tmp_path / "third" / "sweep", task=Language(**SMALL | {"layers": 2}), storage=url)
    with pytest.raises(ValueError, match=r"storage: nonsense://x cannot be opened"):
        run(text, tmp_path / "fourth", storage="nonsense://x")


@dataclass(kw_only=True)
class Failing(Language):
    """A task that diverges with 2 heads, and needs more memory than there is with 3."""

    metric: ClassVar[str] = "loss"

    def loss(self, model, batch):
        summed, count = super().loss(model, batch)
        if self.heads == 3 and self.counted:
            raise torch.OutOfMemoryError("no memory for 3 heads")
        return summed * (math.nan if self.heads == 2 else 1.0), count

    counted = False


def test_a_run_that_fails_is_named_and_the_others_go_on(text, tmp_path, monkeypatch):
    def count(*told):
        if told[0] == "sweep":
            monkeypatch.setattr(Failing, "counted", True)

    result = run(text, tmp_path / "sweep", task=Failing(**SMALL), progress=count)
    assert [row["failed"] for row in result.table] == [0, 2, 2]
    assert "4 runs failed: heads=2-seed=0 (the loss became nan at step 1;" in result.answer
    assert "heads=3-seed=1 (no memory for 3 heads)" in result.answer
    assert result.best == {"heads": 1}


def test_equal_compute_gives_wider_heads_fewer_steps(text):
    task = Language(**SMALL | {"heads": 2})
    data, options = task.open(text), Options(**QUICK | {"steps": 300})
    lists = {"heads": [2, 4], "d_key": [4, 24], "d_value": [6]}
    settings, notes = plan_settings(task, data, lists, "compute", options)
    assert [each.name for each in settings] == [
        f"heads={h}-d_key={d}-d_value=6" for h in (2, 4) for d in (4, 24)
    ]
    assert not notes
    steps = {each.options["d_key"]: each.steps for each in settings if each.options["heads"] == 2}
    assert steps[24] < steps[4]
    budget = 300 * flops_per_step(task, data, options)
    assert all(each.steps * each.flops_per_step == pytest.approx(budget, rel=0.01) for each in settings)
    assert settings[1].parameters > settings[0].parameters


def test_equal_nothing_keeps_the_width_of_a_head(text, tmp_path):
    result = run(
        text, tmp_path / "n", Language(**SMALL | {"heads": 3}), heads=(1, 5), seeds=1, equal="nothing"
    )
    one, five = result.table
    assert five["cache_bytes_per_token"] == 5 * one["cache_bytes_per_token"] == 5 * 2 * 4 * 4
    assert five["parameters"] > one["parameters"]


BAD = [
    ({"heads": (1, 24)}, r"heads: 24 cannot be built, nothing was run; .*24 heads are more than d_model 12"),
    ({"heads": (1, 5)}, r"heads: 5 cannot be built, .*heads=5 \(heads: 5 heads do not divide d_model 12"),
    ({"heads": (12,)}, r"d_key 1: rotary positions turn pairs of channels"),
    ({"heads": (3,), "kv_heads": (2,)}, r"kv_heads=2 \(kv_heads: 2 key heads do not divide 3 heads\)"),
    ({"heads": (1, 1)}, r"heads: got \[1, 1\]; expected different whole numbers of at least 1"),
    ({"heads": ()}, r"heads: got \[\]; expected different whole numbers"),
    ({"heads": (0, 2)}, r"heads: got \[0, 2\]; expected"),
    (
        {"d_key": (4, 8)},
        r"equal: heads=3-d_key=8 has .* parameters and heads=1-d_key=4 .* more than 1% apart",
    ),
    ({"seeds": 0}, r"seeds: got 0; expected a number of at least 1"),
    ({"seeds": (1, 1)}, r"seeds: got \(1, 1\)"),
    ({"equal": "time"}, r"equal: got 'time'; expected one of parameters, compute, nothing"),
    ({"equal": "compute", "d_key": (5,)}, r"steps: 4 steps are too few for equal='compute'"),
    ({"equal": "compute", "patience": 2}, r"patience: got 2 with equal='compute'"),
    ({"sampler": "tpe"}, r"trials: got None with sampler='tpe'; expected a number of runs"),
    ({"trials": 3}, r"trials: got 3 with sampler='grid'"),
    ({"sampler": "annealing"}, r"sampler: got 'annealing'; expected one of grid, tpe, random"),
    ({"learning_rate": -1.0}, r"learning_rate: expected a number, 0 or more"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=lambda value: str(value)[:40])
def test_bad_input_is_refused_before_anything_runs(text, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        run(text, tmp_path / "sweep", **options)
    assert not (tmp_path / "sweep").exists()


def test_seed_is_no_option_of_a_sweep(text, tmp_path):
    with pytest.raises(TypeError, match="seed: got 3; a sweep takes seeds"):
        run(text, tmp_path / "sweep", seed=3)


def test_combinations_that_do_not_exist_are_left_out_and_named(text, tmp_path):
    result = run(text, tmp_path / "s", heads=(1, 2), kv_heads=(1, 2), equal="nothing", seeds=1)
    assert [row["setting"] for row in result.table] == [
        "heads=1-kv_heads=1", "heads=2-kv_heads=1", "heads=2-kv_heads=2",
    ]  # fmt: skip
    assert any("1 impossible combinations are left out: heads=1-kv_heads=2" in note for note in result.notes)


@pytest.mark.parametrize("content", ["", "few"])
def test_data_that_makes_no_batch_is_refused(tmp_path, content):
    (tmp_path / "empty.txt").write_text(content)
    with pytest.raises(ValueError, match=r"data|text"):
        run(str(tmp_path / "empty.txt"), tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()


def test_data_without_an_example_to_validate_on_is_refused(text, tmp_path, monkeypatch):
    opened = Language.open

    def without(self, data, valid=None):
        read = opened(self, data, valid)
        read.valid.sizes = []
        return read

    monkeypatch.setattr(Language, "open", without)
    with pytest.raises(ValueError, match="data: there is no example to validate on; expected at least one"):
        run(text, tmp_path / "sweep")


def test_another_sweep_is_refused_with_what_differs(text, tmp_path):
    out = tmp_path / "sweep"
    run(text, out, heads=(1,), seeds=1)
    for change, message in (
        ({"task": Language(**SMALL | {"layers": 2})}, r"layers: the sweep in .* began with 1, got 2"),
        ({"steps": 5}, r"steps: the sweep in .* began with 4, got 5; give the same, or another out"),
        ({"equal": "nothing"}, r"equal: the sweep in .* began with 'parameters', got 'nothing'"),
    ):
        with pytest.raises(ValueError, match=message):
            run(text, out, **change)
    Path(text).write_text(Path(text).read_text().replace("few", "lot"))  # of the same size
    with pytest.raises(ValueError, match=r"data: the sweep in .* began with other data"):
        run(text, out)
    before = (out / JOURNAL).read_bytes()
    (out / JOURNAL).write_text("no journal\n")
    Path(text).write_text(Path(text).read_text().replace("lot", "few"))
    with pytest.raises(
        ValueError, match=r"storage: .*sweep.journal cannot be opened, or is not a storage of Optuna"
    ):
        run(text, out)
    (out / JOURNAL).write_bytes(before)
    assert run(text, out, heads=(1,), seeds=1).ended == "finished"


def test_a_folder_of_something_else_is_left_alone(text, tmp_path):
    out = tmp_path / "letters"
    out.mkdir()
    (out / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match=r"out: .*letters holds something else \(letter.txt\); expected"):
        run(text, out)
    assert os.listdir(out) == ["letter.txt"]


def test_several_processes_of_one_run_are_refused(text, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="start the same command several times instead, without torchrun"):
        run(text, tmp_path / "sweep")


def test_without_optuna_it_says_what_to_install(monkeypatch):
    for name in ("sweep", "sweep_result", "sweep_storage"):
        monkeypatch.delitem(sys.modules, f"manyheads.training.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"sweeps need optuna: pip install 'manyheads\[sweep\]'"):
        importlib.import_module("manyheads.training.sweep")
