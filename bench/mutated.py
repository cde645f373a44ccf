"""Damaged files: every reader gets thousands, and must end in an answer or in one sentence.

`python -m bench.mutated --count 10000 --seed 0` damages small good files of every kind that manyheads reads,
one at a time, and reads them in another process: no traceback, at most 10 seconds, at most 1 GB.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import random
import shutil
import tempfile
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from bench import harness
from bench.mutations import mutate
from bench.readers import Reader, make_all

SECONDS = 10.0  # of computing
WAIT = 60.0  # until a process that says nothing is ended
MEMORY = 1_000_000_000  # bytes on top of what the process had


@dataclass
class Outcome:
    """What became of one damaged file."""

    case: int
    reader: str
    way: str
    kind: str  # read, sentence, traceback, hang, memory or crash
    said: str = ""
    seconds: float = 0.0
    memory: int = 0


def attack(readers: list[Reader], home: Path, case: int, seed: int) -> Outcome:
    """Damage one file of one reader, and read it."""
    chance = random.Random(f"{seed}-{case}")
    reader = readers[case % len(readers)]
    with tempfile.TemporaryDirectory(prefix="mutated-") as name:
        folder = Path(name) / "files"
        shutil.copytree(home / reader.name, folder)
        files = sorted({file for pattern in reader.files for file in folder.glob(pattern) if file.is_file()})
        file = chance.choice(files)
        way = f"{file.relative_to(folder)}: {mutate(file, chance)}"
        reader.finish(folder)
        _forget_peak()
        before, started = _resident("VmRSS"), time.process_time()
        kind, said = read(reader, folder)
        seconds, memory = time.process_time() - started, _resident("VmHWM") - before
    if kind in ("read", "sentence") and seconds > SECONDS:
        kind = "hang"
    if kind in ("read", "sentence") and memory > MEMORY:
        kind = "memory"
    return Outcome(case, reader.name, way, kind, said, seconds, memory)


def read(reader: Reader, folder: Path) -> tuple[str, str]:
    """Whether a reader gave an answer, or a sentence, or something else; and what it said."""
    quiet = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            warnings.simplefilter("ignore")
            reader.read(folder)
    except (ValueError, OSError, ImportError) as error:
        if type(error) is ValueError or isinstance(error, OSError | ImportError):
            return "sentence", str(error)
        return "traceback", traceback.format_exc()
    except BaseException:
        return "traceback", traceback.format_exc()
    return "read", ""


def _forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _resident(name: str) -> int:
    """Bytes of memory that the process has (VmRSS) or had at most (VmHWM); 0 where Linux is not."""
    with contextlib.suppress(OSError), open("/proc/self/status") as lines:
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)
    return 0


def attacks(readers: list[Reader], home: Path, cases: range, seed: int) -> Iterator[Outcome]:
    """The outcomes of many cases, in processes that may hang or crash."""
    context = multiprocessing.get_context("fork")
    todo = list(cases)
    while todo:
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(readers, home, todo, seed, there))
        process.start()
        there.close()
        while todo:
            lost = ""
            try:
                if here.poll(WAIT):
                    yield here.recv()
                    todo.pop(0)
                    continue
                lost = "hang"
            except EOFError:
                lost = "crash"
            case = todo.pop(0)
            yield Outcome(case, readers[case % len(readers)].name, f"case {case}", lost)
            break
        process.kill()
        process.join()
        here.close()


def _serve(readers: list[Reader], home: Path, cases: list[int], seed: int, pipe: Connection) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # libraries in other languages write there by themselves
    for case in cases:
        pipe.send(attack(readers, home, case, seed))


def report(outcomes: list[Outcome]) -> str:
    """A table of kinds of files and what became of them."""
    kinds = ("read", "sentence", "traceback", "hang", "memory", "crash")
    by_reader: dict[str, Counter[str]] = defaultdict(Counter)
    most: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for one in outcomes:
        by_reader[one.reader][one.kind] += 1
        seconds, memory = most[one.reader]
        most[one.reader] = max(seconds, one.seconds), max(memory, one.memory)
    rows = [
        [name, *(counts[kind] for kind in kinds), f"{most[name][0]:.1f}", f"{most[name][1] / 1e6:.0f}"]
        for name, counts in sorted(by_reader.items())
    ]
    total = Counter(one.kind for one in outcomes)
    slowest, largest = max(s for s, _ in most.values()), max(m for _, m in most.values())
    rows.append(["all", *(total[kind] for kind in kinds), f"{slowest:.1f}", f"{largest / 1e6:.0f}"])
    table = harness.table(["files", *kinds, "seconds, at most", "MB, at most"], rows)
    bad = len(outcomes) - total["read"] - total["sentence"]
    goal = harness.targets(
        ("damaged files", len(outcomes), ">=", 10_000), ("without an answer", bad, "<=", 0)
    )
    return f"{table}\n\n{goal}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.mutated", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="how many files to damage")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="readers whose names begin so")
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write DIR/mutated.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="good-") as name:
        home = Path(name)
        readers = [reader for reader in make_all(home) if reader.name.startswith(options.only)]
        for reader in readers:  # good files are read
            reader.read(Path(shutil.copytree(home / reader.name, home / "tried" / reader.name)))
        cases = range(options.first, options.first + options.count)
        outcomes = []
        for one in attacks(readers, home, cases, options.seed):
            outcomes.append(one)
            if one.kind not in ("read", "sentence"):
                harness.say(f"case {one.case} of {one.reader} ({one.way}): {one.kind} {one.said[-1500:]}")
    command = f"python -m bench.mutated --count {options.count} --seed {options.seed}"
    text = (
        f"## mutated: {(__doc__ or '').splitlines()[0]}\n\n{report(outcomes)}\n\n{harness.machine(command)}\n"
    )
    print(text)
    if options.out is not None:
        (options.out / "mutated.md").write_text(text)


if __name__ == "__main__":
    main()
