"""Checkpoints stay whole: killed processes, full disks, damaged files, weights that share a place."""

import signal
import subprocess
import sys

import pytest
import torch
from torch import nn

from manyheads.common.whole_files import tidy, write_whole
from manyheads.nn.transformers import Seq2Seq
from manyheads.training import checkpoint
from manyheads.training.log import Log, read
from manyheads.training.weight_average import Average

resource = pytest.importorskip("resource", reason="limits on the size of files are a matter of Unix")


STATE = {"best": None, "best_step": 0, "worse": 0, "data": [], "scaler": None}


def tensors(value):
    return {"model": {"weight": torch.full((1009,), float(value))}}


@pytest.fixture
def nearly_full():
    """Files may have 2000 bytes: writing more fails as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_the_last_two_are_kept(tmp_path):
    for step in (1, 5, 12):
        checkpoint.save(tmp_path, tensors(step), STATE | {"best": step / 2} | {"step": step})
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["step-00000012", "step-00000005"]
    state, kept = checkpoint.load(checkpoint.list_checkpoints(tmp_path)[0])
    assert (state["step"], state["best"]) == (12, 6.0)
    assert torch.equal(kept["model"]["weight"], tensors(12)["model"]["weight"])


def test_a_full_disk_leaves_the_last_good_one(tmp_path, nearly_full):
    checkpoint.save(tmp_path, tensors(1), STATE | {"step": 1})
    nearly_full()
    with pytest.raises(OSError, match="File too large"):
        checkpoint.save(tmp_path, tensors(2), STATE | {"step": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert checkpoint.load(tmp_path / "step-00000001")[1]["model"]["weight"][0] == 1


def test_a_full_disk_leaves_the_file_that_was_there(tmp_path, nearly_full):
    path = tmp_path / "model.safetensors"
    write_whole(path, b"good")
    nearly_full()
    with pytest.raises(OSError, match="File too large"):
        write_whole(path, b"x" * 5000)
    assert path.read_bytes() == b"good"
    assert list(tmp_path.iterdir()) == [path]


def test_what_killed_processes_left_is_tidied(tmp_path):
    checkpoint.save(tmp_path, tensors(1), STATE | {"step": 1})
    left = tmp_path / ".step-00000002.123-0"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    assert checkpoint.list_checkpoints(tmp_path) == [tmp_path / "step-00000001"]
    tidy(tmp_path)
    assert not left.exists()


@pytest.mark.parametrize("file", ["state.json", "model.safetensors"])
def test_damage_is_named(tmp_path, file):
    path = checkpoint.save(tmp_path, tensors(1), STATE | {"step": 3})
    (path / file).write_bytes((path / file).read_bytes()[:-7])
    with pytest.raises(ValueError, match=r"step-00000003: damaged.* remove it"):
        checkpoint.load(path)


def test_shared_weights_are_kept_once_and_stay_shared():
    model = Seq2Seq(6, heads=2, layers=1, vocabulary=11)
    values = checkpoint.weights(model)
    assert sum("embedding" in name for name in values) == 1
    other = Seq2Seq(6, heads=2, layers=1, vocabulary=11)
    checkpoint.set_weights(values, other)
    assert other.decoder.embedding is other.encoder.embedding
    ids = torch.randint(11, (2, 5))
    assert torch.equal(model(ids, ids), other(ids, ids))


def test_weights_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"'bias' is in the model or in the file"):
        checkpoint.set_weights({"weight": torch.ones(3, 2)}, nn.Linear(2, 3))
    with pytest.raises(ValueError, match=r"'weight' has the shape \(2, 3\) in the file"):
        checkpoint.set_weights({"weight": torch.ones(2, 3), "bias": torch.ones(3)}, nn.Linear(2, 3))


def test_the_average_is_that_of_the_formula():
    torch.manual_seed(0)
    model = nn.Linear(2, 3).double()
    average = Average(model, decay=0.6)
    expected = model.weight.detach().clone()
    for step in range(9):
        with torch.no_grad():
            model.weight.add_(torch.randn(3, 2))
        average.update(step)
        decay = min(0.6, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model.weight.detach()
    torch.testing.assert_close(average.values["weight"], expected, rtol=1e-12, atol=1e-12)
    before = model.weight.detach().clone()
    with average.in_place():
        torch.testing.assert_close(model.weight.detach(), expected)
    assert torch.equal(model.weight, before)


def test_half_a_line_in_the_log_is_forgotten(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25}\n{"step": 3, "lo')
    with Log(path, step=1) as log:
        log.add({"step": 2, "loss": 0.125})
    assert read(path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.125}]


SCRIPT = """
import os, random, signal, sys, time, traceback
import torch
torch.set_num_threads(1)
from manyheads.tasks.language import Language
from manyheads.training.train import train

text, killed, whole = sys.argv[1:]

def learn(out):
    task = Language(d_model=6, heads=2, layers=1, context=11, dropout=0.1)
    train(task, text, out=out, resume=True, steps=29, batch_tokens=55, evaluate_every=2, save_every=1,
          evaluate_examples=1, watch_every=0, ema=0.9)

def learn_and_die(number):
    left, real = [number], os.fsync
    def fsync(handle):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        real(handle)
    os.fsync = fsync
    learn(killed)

def child(function, *arguments):
    pid = os.fork()
    if not pid:
        try:
            function(*arguments)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid

def end(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

for number in range(1, 14):  # at the first file it writes, at the second, in the middle of a checkpoint...
    assert end(child(learn_and_die, number)) == -signal.SIGKILL, number
for _ in range(5):  # and whenever
    pid = child(learn, killed)
    time.sleep(random.uniform(0, 0.5))
    os.kill(pid, signal.SIGKILL)
    end(pid)
assert [end(child(learn, out)) for out in (killed, whole)] == [0, 0]
"""


def test_kill_9_at_any_moment(tmp_path):
    """A run that is killed again and again, while it writes and while it computes, ends as if it had not."""
    text = tmp_path / "text.txt"
    text.write_text("some words to learn, and some more. " * 20)
    folders = [tmp_path / "killed", tmp_path / "whole"]
    done = subprocess.run([sys.executable, "-c", SCRIPT, text, *folders], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    one, other = (checkpoint.load(checkpoint.list_checkpoints(out / "checkpoints")[0]) for out in folders)
    assert one[0] == other[0]
    assert one[0]["step"] == 29
    one_log, other_log = (read(out / "log.jsonl") for out in folders)
    assert one_log == other_log
    assert len(one_log) == 29
    for file, values in one[1].items():
        for name, value in values.items():
            assert torch.equal(value, other[1][file][name]), name
    for name in ("model.safetensors", "metrics.json", "config.json"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
    left = [path.name for path in folders[0].rglob(".*")]
    assert left == []
