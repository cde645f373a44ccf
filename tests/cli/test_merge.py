"""The command on parts of a text: --shard, merge, --ray."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.models import llama

import manyheads as mh
from manyheads import cli
from manyheads.data.source import Source
from manyheads.heads.measurements import Importance, Inspect
from manyheads.heads.measurements.ray_cluster import Cluster, measured_on_ray


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a model and some ids, to stand in."""
    monkeypatch.chdir(tmp_path)
    llama().save_pretrained(tmp_path / "model")
    numpy.save(tmp_path / "ids.npy", numpy.random.default_rng(0).integers(3, 97, (61, 13)))
    return tmp_path


def command(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["manyheads", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    streams = capsys.readouterr()
    assert "Traceback" not in streams.err
    return ended.value.code or 0, streams.out, streams.err


SOURCE = ("model", "--tokens", "ids.npy", "--batch-tokens", "40")  # 3 sequences in a batch, 21 batches


def test_shards_and_merge(here, monkeypatch, capsys):
    run = partial(command, monkeypatch, capsys)
    for part in ("1/3", "3/3"):
        code, shown, _ = run("inspect", *SOURCE, "--shard", part, "--out", "parts")
        assert code == 0
        assert f"shard {part}, 7 of 21 batches" in shown
    code, _, error = run("merge", "parts")
    assert code == 2
    assert error.strip() == (
        "manyheads: merge: 7 of 21 batches are in none of the 2 shards: run --shard 2/3; expected all of "
        "them: nothing was merged"
    )
    assert not Path("out").exists()
    code, shown, _ = run("inspect", *SOURCE, "--shard", "2/3", "--out", "parts", "--json")
    assert (code, json.loads(shown)["batches"]) == (0, list(range(1, 21, 3)))
    assert run("inspect", *SOURCE, "--out", "whole", "--no-page")[0] == 0
    code, shown, _ = run("merge", "parts", "--out", "merged")
    assert code == 0
    assert "model on ids.npy: 793 tokens" in shown
    merged, whole = (mh.HeadTable.load(f"{name}/heads.json") for name in ("merged", "whole"))
    for column in ("tokens", "entropy", "entropy_se", "distance"):
        torch.testing.assert_close(merged[column], whole[column], rtol=1e-9, atol=1e-9)


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def test_processes_share_elimination_and_refit(here):
    """torchrun with two processes: one folder, with the weights of one process."""
    arguments = ["-m", "manyheads", "prune", *SOURCE, "--keep", "0.5", "--json"]
    weights, shown = {}, {}
    for name, launcher in (("one", []), ("two", TORCHRUN)):
        done = subprocess.run(
            [sys.executable, *launcher, *arguments, "--out", name],
            env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        shown[name] = json.loads(done.stdout)  # one of them speaks
        weights[name] = load_file(f"{name}/model.safetensors")
    assert shown["one"]["original_heads"] == shown["two"]["original_heads"]
    before = load_file("model/model.safetensors")
    changed = [name for name, x in weights["one"].items() if x.shape != before[name].shape]
    assert any("o_proj" in name for name in changed)
    for name, expected in weights["one"].items():
        torch.testing.assert_close(weights["two"][name], expected, rtol=1e-5, atol=1e-6)


def test_processes_meet_again_and_again(tmp_path):
    """Each meeting is a new one: none reads what another left behind."""
    script = tmp_path / "meetings.py"
    script.write_text(MEETINGS)
    done = subprocess.run(
        [sys.executable, *TORCHRUN, str(script)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("met") == 2


MEETINGS = """
import torch
from manyheads.common.processes import added_up, gathered, rank
for number in range(30):
    assert gathered((number, rank())) == [(number, 0), (number, 1)]
    assert added_up(torch.ones(3) * number).tolist() == [2.0 * number] * 3
print("met")
"""


def test_several_processes_do_not_recover(here, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, error = command(monkeypatch, capsys, "prune", *SOURCE, "--keep", "0.5", "--recover", "3")
    assert code == 2
    assert "torchrun: several processes share ranking and refit only" in error


def test_what_cannot_be_split(here, monkeypatch, capsys):
    run = partial(command, monkeypatch, capsys)
    for arguments, sentence in (
        (["importance", *SOURCE, "--method", "gates", "--shard", "1/2"], "gates needs the whole text"),
        (["inspect", *SOURCE, "--shard", "4/3"], "shard: got '4/3'; expected one of several, such as 3/20"),
        (["inspect", *SOURCE, "--shard", "1/3", "--ray", "local"], "got --shard and --ray; expected one way"),
        (["inspect", *SOURCE, "--workers", "2"], "workers: it is for --ray"),
        (["inspect", *SOURCE, "--ray", "nowhere"], "ray: got 'nowhere'; expected local, auto, or the"),
        (["inspect", *SOURCE, "--ray", f"127.0.0.1:{_free_port()}"], "ray: nothing answers at 127.0.0.1:"),
    ):  # fmt: skip
        code, shown, error = run(*arguments)
        assert (code, shown) == (2, ""), error
        assert sentence in " ".join(error.split())
        assert error.count("\n") == 1


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _workers() -> list[int]:
    """The processes below this one that measure a part now."""
    parents, busy = {}, []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            status = (entry / "stat").read_text().rpartition(")")[2].split()
            title = (entry / "cmdline").read_bytes()
        except (OSError, IndexError):
            continue
        parents[int(entry.name)] = int(status[1])
        if title.startswith(b"ray::ShardWorker.measure"):
            busy.append(int(entry.name))

    def below(process: int) -> bool:
        return process == os.getpid() or (process in parents and below(parents[process]))

    return [process for process in busy if below(process)]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds workers in /proc")
def test_a_killed_worker_of_ray_costs_nothing(here, monkeypatch):
    """20 parts; one worker is killed in the middle: the table is that of one process, no part is twice."""
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # polite workers (15) wait for minutes beside other tests
    source = Source(model=str(here / "model"), tokens=str(here / "ids.npy"), batch_tokens=40)
    loaded, corpus = source.open()
    expected = Inspect().whole(loaded, corpus, lambda *_: None)
    killed, finished = [], []

    def progress(stage, done, total):
        finished.append((done, total))
        if done >= 7 and not killed and (workers := _workers()):
            os.kill(workers[0], signal.SIGKILL)
            killed.append(workers[0])

    cluster = Cluster("local", workers=2, shards=20)
    result = measured_on_ray(Inspect(), loaded, corpus, source.open, cluster, here, progress)
    assert killed
    assert finished[-1] == (20, 20)
    assert [done for done, _ in finished] == list(range(21))
    assert result.table["tokens"].tolist() == [793.0] * 12
    assert result.units == 793
    for column in expected.table.columns:
        one, other = expected.table[column], result.table[column]
        if isinstance(one, list):
            assert one == other
        else:
            torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert not list(here.glob("shard-*"))


def test_what_ray_measured_before_an_error_is_kept(here, monkeypatch):
    """The next call measures the other parts only. The cluster is played here."""
    source = Source(model=str(here / "model"), tokens=str(here / "ids.npy"), batch_tokens=40)
    loaded, corpus = source.open()
    ray = PlayedRay(loses={2: 1, 5: 9})
    monkeypatch.setitem(sys.modules, "ray", ray)
    cluster = Cluster("local", workers=1, shards=7)
    measurement = Importance(["output-norm"])
    arguments = measurement, loaded, corpus, source.open, cluster, here
    with pytest.raises(ValueError, match="ray: shard 6/7 lost 3 workers"):
        measured_on_ray(*arguments)
    kept = sorted(path.name for path in here.glob("shard-*"))
    assert kept == [f"shard-{number}-of-7.safetensors" for number in (1, 2, 3, 4, 5, 7)]
    ray.measured.clear()
    ray.loses.clear()
    result = measured_on_ray(*arguments)
    assert ray.measured == [5]
    assert not list(here.glob("shard-*"))
    expected = measurement.whole(loaded, corpus, lambda *_: None)
    torch.testing.assert_close(
        result.tables["output-norm"]["importance"], expected.tables["output-norm"]["importance"]
    )


class PlayedRay:
    """Ray with one worker in this process, which dies as often as it is told to when it measures a part."""

    class exceptions:  # noqa: N801
        class RayError(Exception): ...

        class RayTaskError(RayError): ...

    def __init__(self, loses):
        self.loses, self.measured = loses, []

    def init(self, **where): ...

    def shutdown(self): ...

    def kill(self, worker): ...

    def cluster_resources(self):
        return {"CPU": 1.0}

    def remote(self, **resources):
        return lambda kind: Remote(self, kind)

    def wait(self, parts, num_returns, timeout):
        return parts[:1], parts[1:]

    def get(self, part):
        worker, share = part
        if self.loses.get(share.number, 0) > 0:
            self.loses[share.number] -= 1
            raise self.exceptions.RayError("the worker died")
        self.measured.append(share.number)
        return worker.measure(share)


class Remote:
    """A class whose objects answer later."""

    def __init__(self, ray, kind):
        self.ray, self.kind = ray, kind

    def remote(self, *arguments):
        worker = self.kind(*arguments)

        class Later:
            class measure:  # noqa: N801
                @staticmethod
                def remote(share):
                    return worker, share

        return Later
