"""The recipes for clusters: they run here as far as that goes without one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

RECIPES = Path(__file__).parents[2] / "recipes"


def stub(folder: Path) -> Path:
    """A command that writes down what it was called with."""
    path = folder / "stub"
    path.write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\n')
    path.chmod(0o755)
    return path


def test_the_array_script_asks_for_its_part(tmp_path):
    environment = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MAX": "20", "MANYHEADS": str(stub(tmp_path))}
    command = [str(RECIPES / "slurm_array.sh"), "inspect", "a model", "--text", "x.txt"]
    subprocess.run(command, env=os.environ | environment, check=True)
    assert (tmp_path / "calls").read_text() == "inspect a model --text x.txt --shard 3/20 --out out/parts\n"
    without = subprocess.run(command, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    assert without.returncode != 0
    assert "start this with sbatch --array" in without.stderr


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_submitit_recipe_runs_each_part_until_it_is_there(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.syspath_prepend(str(RECIPES))
    import slurm_array

    out, calls = tmp_path / "parts", []

    def run(command):
        calls.append(command[3:])
        if "--shard" in command:
            number, _, count = command[command.index("--shard") + 1].partition("/")
            if number != "2" or calls.count(command[3:]) > 1:  # the second part fails the first time
                (out / f"shard-{number}-of-{count}.safetensors").touch()
        return 0

    monkeypatch.setattr(slurm_array, "run", run)
    arguments = [
        "--shards",
        "3",
        "--out",
        str(out),
        "--cluster",
        "debug",
        "--",
        "inspect",
        "m",
        "--limit",
        "7",
    ]
    assert slurm_array.main(arguments) == 0
    parts = [call[call.index("--shard") + 1] for call in calls if "--shard" in call]
    assert parts == ["1/3", "2/3", "3/3", "2/3"]
    assert all(call[:4] == ["inspect", "m", "--limit", "7"] for call in calls[:-1])
    assert calls[-1] == ["merge", str(out), "--out", str(out / "merged")]
    assert slurm_array.shard_command(["roles"], 1, 3, out)[:3] == [sys.executable, "-m", "manyheads"]


def test_the_kubernetes_job_covers_every_part():
    job = yaml.safe_load((RECIPES / "kubernetes_job.yaml").read_text())
    spec = job["spec"]
    assert (job["kind"], spec["completionMode"]) == ("Job", "Indexed")
    (container,) = spec["template"]["spec"]["containers"]
    (script,) = container["args"]
    assert f"/{spec['completions']}" in script
    shown = re.sub(r"^exec manyheads", "echo", script)
    parts = [
        subprocess.run(
            ["/bin/sh", "-c", shown], env={"JOB_COMPLETION_INDEX": str(index)}, capture_output=True, text=True
        ).stdout.split("--shard ")[1].split()[0]
        for index in (0, spec["completions"] - 1)
    ]  # fmt: skip
    assert parts == ["1/20", "20/20"]
