"""Durability: killed at any moment, a full disk at any write, two processes in one folder, long watching.

`python -m bench.durability --kills 50` trains, inspects and prunes a small model, kills each verb at random
moments (SIGKILL), goes on or repeats, and compares every byte with a run that nobody disturbed. All of it is
done by forked children on one core, in some minutes.
"""

from __future__ import annotations

import argparse
import errno
import gc
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import manyheads as mh
from bench import harness
from bench.mutated import _resident
from manyheads.cli.inspect import inspect as run_inspect
from manyheads.cli.prune import prune as run_prune
from manyheads.common import whole_files
from manyheads.data.source import Source
from manyheads.data.split import Split
from manyheads.surgery import recover
from manyheads.surgery.prune_options import PruneOptions
from manyheads.tasks.language import Language
from manyheads.training.log import Log
from manyheads.training.train import train

OPTIONS: dict[str, Any] = {
    "steps": 8, "batch_tokens": 64, "evaluate_every": 4, "evaluate_examples": 4, "save_every": 3,
    "watch_every": 5, "ema": 0.9,
}  # fmt: skip
PASSES, ERRORS = 500, 100
recover._KEPT_EVERY = 4  # steps, so that few of them have something to go on from


@dataclass(frozen=True)
class Verb:
    """A verb on a folder, and the files whose bytes must be the same however often it was begun."""

    name: str
    run: Callable[[Path], object]
    files: tuple[str, ...]


def verbs(home: Path) -> list[Verb]:
    """Train, inspect and prune; the last two on a model that the first one made."""
    text = home / "text.txt"
    text.write_text("some words to learn, and some more of them. " * 40)
    lines = home / "lines.txt"
    lines.write_text("some words\nto learn, and some\nof them, too\n" * 7)
    few = home / "few.txt"
    few.write_text("some words\nto learn\n")

    def training(out: Path) -> None:
        train(_task(), str(text), out=out, resume=True, **OPTIONS)

    model = home / "model"
    ended, said = child(lambda: training(model))
    assert ended == "answer", said

    def inspecting(out: Path) -> None:
        run_inspect(Source(model=str(model), text=str(few), batch_tokens=16), Split(), out=out, json=True)

    def pruning(out: Path) -> None:
        if not out.exists():
            source = Source(model=str(model), text=str(lines), batch_tokens=64)
            run_prune(source, PruneOptions(keep=0.5, recover=15), out=out, json=True)

    trained = ("config.json", "model.safetensors", "metrics.json", "log.jsonl", "checkpoints/step-00000008/*")
    return [
        Verb("train", training, (*trained, "tokenizer.json")),
        Verb("inspect", inspecting, ("heads.json", "heads.csv", "report.html")),
        Verb("prune", pruning, ("model.safetensors", "heads.json", "plan.json", "config.json")),
    ]


def _task() -> Language:
    return Language(context=16, d_model=8, heads=2, layers=1, dropout=0.1)


# --- children


def start(work: Callable[[], object], record: Path) -> int:
    """Do some work in a process of its own; what it ended by is in the file ``record``."""
    pid = os.fork()
    if pid:
        return pid
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    try:
        work()
        ended = "answer", ""
    except (ValueError, OSError, ImportError) as error:
        ended = "sentence", str(error)
    except BaseException:
        ended = "traceback", traceback.format_exc()
    record.write_text("\n".join(ended))
    os._exit(0)


def child(work: Callable[[], object]) -> tuple[str, str]:
    """Do some work in a process of its own, to its end: answer, sentence or traceback, and what it said."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "ended"
        os.waitpid(start(work, record), 0)
        ended, _, said = record.read_text().partition("\n")
    return ended, said


def content(verb: Verb, out: Path) -> dict[str, bytes]:
    """The bytes of the files that must be the same."""
    paths = sorted(path for pattern in verb.files for path in out.glob(pattern))
    return {str(path.relative_to(out)): path.read_bytes() for path in paths}


def left_over(out: Path) -> list[str]:
    """Hidden files in and beside a folder: what was not finished, or not unlocked."""
    beside = [path.name for path in out.parent.iterdir() if path.name.lstrip(".").startswith(f"{out.name}.")]
    inside = [str(path.relative_to(out)) for path in out.rglob(".*")] if out.exists() else []
    return beside + inside


# --- killed


def killed(verb: Verb, home: Path, kills: int, chance: random.Random) -> list[object]:
    """Kill a verb at random moments, each time in a new folder; go on; count the folders that are equal."""
    whole = home / f"{verb.name} whole"
    started = time.monotonic()
    ended, said = child(lambda: verb.run(whole))
    duration = time.monotonic() - started
    assert ended == "answer", said
    harness.say(f"{verb.name}: {duration:.1f} s alone")
    wanted = content(verb, whole)
    equal = hit = tidy = 0
    for number in range(kills):
        out = home / f"{verb.name} {number}"
        hit += _kill(verb, out, home, chance.random() * duration)
        ended, said = child(lambda out=out: verb.run(out))
        same = ended == "answer" and content(verb, out) == wanted
        equal += same
        tidy += not left_over(out)
        if not same:
            harness.say(f"{verb.name} {number}: {ended} {said[-1000:]}")
        shutil.rmtree(out, ignore_errors=True)
    return [verb.name, kills, hit, equal, tidy, f"{duration:.1f}"]


def _kill(verb: Verb, out: Path, home: Path, delay: float) -> bool:
    """Kill a verb after a while, or sooner in a fresh folder, where it was faster; whether it was running."""
    for _ in range(10):
        pid = start(lambda: verb.run(out), home / "killed")
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
        if os.WIFSIGNALED(os.waitpid(pid, 0)[1]):
            return True
        shutil.rmtree(out)
        delay *= 0.7
    return False


# --- full disks


def full_disks(verb: Verb, home: Path) -> list[object]:
    """Let every write of a verb fail once, as on a full disk; make room, and go on."""
    writes = _writes(verb, home / f"{verb.name} counted")
    harness.say(f"{verb.name}: {writes} writes")
    wanted = content(verb, home / f"{verb.name} whole")
    told = equal = 0
    for number in range(writes):
        out = home / f"{verb.name} full {number}"
        ended, said = child(lambda out=out, number=number: _failing(verb, out, number))
        good = ended == "sentence" and os.strerror(errno.ENOSPC) in said
        told += good
        if not good:
            harness.say(f"{verb.name}, write {number} of {writes}: {ended} {said[-1500:]}")
        ended, said = child(lambda out=out: verb.run(out))
        same = ended == "answer" and content(verb, out) == wanted
        equal += same
        if not same:
            harness.say(f"{verb.name}, after write {number} of {writes}: {ended} {said[-1500:]}")
        shutil.rmtree(out, ignore_errors=True)
    return [verb.name, writes, told, equal]


def _writes(verb: Verb, out: Path) -> int:
    """How often a verb writes."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "writes"
        child(lambda: record.write_text(str(_failing(verb, out, None))))
        return int(record.read_text())


def _failing(verb: Verb, out: Path, number: int | None) -> int:
    """Run a verb whose n-th write fails; how many writes there were."""
    done = 0

    def full(function: Callable[..., Any]) -> Callable[..., Any]:
        def write(*arguments: Any) -> Any:
            nonlocal done
            done += 1
            if done - 1 == number:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*arguments)

        return write

    whole_files.os.replace = full(os.replace)  # type: ignore[attr-defined]
    Log.add = full(Log.add)  # type: ignore[method-assign]
    verb.run(out)
    return done


# --- two processes


def together(verb: Verb, home: Path) -> list[object]:
    """Begin a verb in the folder of one that runs: it is refused, and the first one ends as if alone."""
    out = home / f"{verb.name} together"
    first = start(lambda: verb.run(out), home / "first")
    _wait_for_lock(verb, out)
    os.kill(first, signal.SIGSTOP)  # until the second one has had its answer
    refused, said = child(lambda: verb.run(out))
    os.kill(first, signal.SIGCONT)
    os.waitpid(first, 0)
    alike = content(verb, out) == content(verb, home / f"{verb.name} whole")
    stale = home / f"{verb.name} stale"
    pid = start(lambda: verb.run(stale), home / "stale")
    _wait_for_lock(verb, stale)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    again, _ = child(lambda: verb.run(stale))
    return [
        verb.name,
        _yes(refused == "sentence" and "is in use by " in said),
        _yes(alike),
        _yes(again == "answer"),
    ]


def _wait_for_lock(verb: Verb, out: Path) -> None:
    """Until a verb holds its lock and has written its number there, which it does at once, but not in one
    step: a process that is stopped in between is "another process" to others, or holds nothing yet.
    """
    lock = out / ".lock" if verb.name != "prune" else out.with_name(f".{out.name}.lock")
    while not (lock.exists() and lock.stat().st_size):
        time.sleep(0.001)


# --- long watching


def watching() -> list[list[object]]:
    """Many passes, and many exceptions inside the model: memory, objects and hooks before and after."""
    torch.manual_seed(0)
    model = mh.Encoder(16, heads=4, layers=2, vocabulary=17).eval()
    ids = torch.randint(17, (2, 13))

    def passes() -> None:
        with torch.no_grad(), mh.watch(model, "full"):
            model(ids)

    def errors() -> None:
        def fail(*_: object) -> None:
            raise RuntimeError("inside the model")

        hook = model.blocks[1].feed_forward.register_forward_hook(fail)  # type: ignore[union-attr]
        with suppress(RuntimeError), torch.no_grad(), mh.watch(model, "full"):
            model(ids)
        hook.remove()

    rows = []
    for name, work, times in (("watched passes", passes, PASSES), ("exceptions inside", errors, ERRORS)):
        for _ in range(20):
            work()
        before = _state(model)
        for _ in range(times):
            work()
        after = _state(model)
        rows.append(
            [name, times, f"{(after[0] - before[0]) / 1e6:.1f}", after[1] - before[1], after[2] - before[2]]
        )
    return rows


def _state(model: torch.nn.Module) -> tuple[int, int, int]:
    """Bytes of memory, objects that Python knows, and hooks: the model's, everybody's, and modes."""
    gc.collect()
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    hooks += len(torch.nn.modules.module._global_forward_hooks)
    hooks += len(torch.nn.modules.module._global_forward_pre_hooks)
    hooks += torch.overrides._len_torch_function_stack()
    return _resident("VmRSS"), len(gc.get_objects()), hooks


def _yes(truth: bool) -> str:
    return "yes" if truth else "NO"


def run(kills: int, seed: int) -> str:
    """All parts, as Markdown."""
    chance = random.Random(seed)
    parts = []
    with tempfile.TemporaryDirectory(prefix="durability-") as name:
        home = Path(name)
        every = verbs(home)
        shares = (kills - 2 * (kills // 4), kills // 4, kills // 4)  # training is what writes most
        rows = [killed(verb, home, share, chance) for verb, share in zip(every, shares, strict=True)]
        header = ["killed (SIGKILL), then gone on", "times", "while it ran", "bit-equal", "tidy", "alone, s"]
        parts.append(harness.table(header, rows))
        harness.say("full disks")
        header = ["full disk, then room, then gone on", "writes", "told in a sentence", "bit-equal"]
        parts.append(harness.table(header, [full_disks(verb, home) for verb in every]))
        header = ["two processes in one folder", "second refused", "first undisturbed", "free after SIGKILL"]
        parts.append(harness.table(header, [together(verb, home) for verb in every]))
    header = ["again and again", "times", "memory, MB more", "objects more", "hooks more"]
    parts.append(harness.table(header, watching()))
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.durability", description=__doc__)
    parser.add_argument(
        "--kills", type=int, default=50, help="half of them of train, the others of inspect and prune"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="also write the report here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = run(options.kills, options.seed)
    machine = harness.machine(f"python -m bench.durability --kills {options.kills} --seed {options.seed}")
    text = f"## durability: {(__doc__ or '').splitlines()[0]}\n\n{report}\n\n{machine}\n"
    print(text)
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
