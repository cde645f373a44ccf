"""Documents are checked at the door, cells are no formulas, files are whole, folders are locked."""

import csv
import errno
import gzip
import json
import os
import signal
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from typing import Literal, NotRequired, TypedDict

import pytest
import torch

import manyheads as mh
from manyheads.common import decompression, interrupts, whole_files
from manyheads.common.csv_cells import from_cell, to_cell
from manyheads.common.json_files import check_type, parse_json, read_json, regular_file
from manyheads.common.locks import LOCK, locked
from manyheads.common.whole_files import tidy, whole_folder, write_whole
from manyheads.data.readers.audio import decode_sound, encode_wav
from manyheads.heads.table import HeadTable, Row
from manyheads.models.size_limits import no_larger_than


class Inner(TypedDict):
    kind: Literal["self", "cross"]
    sizes: NotRequired[list[int]]


@dataclass
class Options:
    heads: int = 1
    rate: float | None = None


class Outer(TypedDict):
    name: str
    parts: dict[str, Inner]
    pair: tuple[int, str]
    options: Options


GOOD = {
    "name": "a",
    "parts": {"x": {"kind": "self", "sizes": [1]}},
    "pair": [1, "b"],
    "options": {"rate": None},
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.pop("name"), "name is missing; expected a text"),
        (lambda d: d.update(name=3), "name is 3; expected a text"),
        (
            lambda d: d["parts"]["x"].update(kind="both"),
            r"parts.x.kind is the text 'both'; expected 'self' or",
        ),
        (
            lambda d: d["parts"]["x"].update(sizes=[1, True]),
            r"sizes\[1\] is true or false; expected a whole number",
        ),
        (lambda d: d["parts"]["x"].update(sizes=[2**63]), "expected one that fits 64 bits"),
        (lambda d: d["parts"].update(x=[]), "parts.x is a list; expected an object"),
        (lambda d: d.update(pair=[1]), "pair is a list; expected a list of 2"),
        (lambda d: d["options"].update(rate="fast"), "options.rate is the text 'fast'; expected a number"),
        (
            lambda d: d["options"].update(rate=10**400),
            "is a number of many digits; expected a smaller number",
        ),
    ],
)
def test_a_wrong_type_is_said_with_its_place(change, said):
    check_type(GOOD, Outer)
    changed = json.loads(json.dumps(GOOD))
    change(changed)
    with pytest.raises(ValueError, match=said):
        check_type(changed, Outer)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "nested deeper"),
        ("[" * 40 + "]" * 40, "nested deeper"),
        ('{"a": 1, "a": 2}', "a appears twice"),
        ("[NaN]", "NaN is not a number"),
        ("[1e999]", "1e999 is not a number"),
        ('["\\ud800"]', "half of a character"),
        ("{", "not JSON"),
        (b"\xff\xfe\xff", "not JSON"),
        ("[" + "9" * 5000 + "]", "digits"),
    ],
)
def test_json_that_is_none(text, said):
    with pytest.raises(ValueError, match=said) as found:
        parse_json(text, list[float])
    assert type(found.value) is ValueError


def test_a_file_must_be_a_file(tmp_path):
    for path, said in (
        (tmp_path, "is a folder"),
        (tmp_path / "none", "there is no file"),
        ("/dev/zero", "device"),
    ):
        with pytest.raises(ValueError, match=said):
            regular_file(path, "plan")
    large = tmp_path / "large.json"
    large.write_text(f"[{' ' * 100}]")
    with pytest.raises(ValueError, match="has 102 bytes; expected at most 50"):
        read_json(large, list[int], "plan", largest=50)


# --- cells


@pytest.mark.parametrize(
    "text", ["=1+1", "+1", "-x", "@SUM(A1)", "\tx", "\rx", "'=1", "''-", "x", "", "'", "-0.5"]
)
def test_cells_are_text_and_come_back(text):
    cell = to_cell(text)
    assert from_cell(cell) == text
    assert cell[:1] not in ("=", "+", "-", "@", "\t", "\r")


def test_a_table_with_formulas_for_names_comes_back(tmp_path):
    rows = [Row("=cmd|' /C calc'!A0", 0, 0, 0, 0, "self"), Row("-1", 1, 0, 0, 0, "self")]
    sums = {"=entropy": torch.tensor([[2.0, 2.0], [-3.0, -1.0], [5.0, 1.0]])}
    table = HeadTable(rows, torch.ones(2), sums, model="@model", labels={"+roles": ["-none", "\t"]})
    table.save(tmp_path / "heads.csv")
    again = HeadTable.load(tmp_path / "heads.csv")
    assert (again.rows, again.model, again.labels) == (table.rows, table.model, table.labels)
    assert torch.equal(again["=entropy"], table["=entropy"])
    with (tmp_path / "heads.csv").open(newline="") as file:
        names, *cells = csv.reader(file)
    assert not [name for name in names if name[0] in "=+-@"]
    for row in cells:
        for name, cell in zip(names, row, strict=True):
            assert cell[:1] not in ("=", "+", "-", "@", "\t", "\r") or name in ("'=entropy", "'=entropy_sum")
    assert float(dict(zip(names, cells[0], strict=True))["'=entropy"]) == -1.5  # numbers stay numbers


# --- whole files and locks


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    write_whole(path, "before")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("replace", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(whole_files.os, name, full)
            with pytest.raises(OSError, match=r"No space left on device: '.*/a.txt'"):
                write_whole(path, "after")
            with pytest.raises(OSError, match="No space left"), whole_folder(tmp_path / "folder") as folder:
                (folder / "b.txt").write_text("b")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_what_killed_processes_left_is_removed(tmp_path):
    for name in (".a.txt.12-0", ".small.7-1", "..small.7-1.7-2", ".hidden", ".other.7-1"):
        (tmp_path / name).touch()
    tidy(tmp_path, "small")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.txt.12-0", ".hidden", ".other.7-1"]
    tidy(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".hidden"]


def test_a_lock_of_a_killed_process_is_free(tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from manyheads.common.locks import locked\n"
        "with locked(Path(sys.argv[1]), 'out: it'):\n    print('held', flush=True); time.sleep(600)"
    )
    path = tmp_path / "new" / LOCK
    process = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    with (
        pytest.raises(ValueError, match=f"out: it is in use by process {process.pid}"),
        locked(path, "out: it"),
    ):
        pass
    process.kill()
    process.wait()
    process.stdout.close()
    with locked(path, "out: it"):
        pass
    assert not path.exists()


# --- things that claim more than they hold


def test_archives_that_would_grow_are_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(decompression, "FLOOR", 10_000)
    with pytest.raises(ValueError, match="would unpack to"):
        decompression.decompressed(gzip.compress(bytes(1_000_000)), "data: a.gz")
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.wav", bytes(1_000_000))
    with pytest.raises(ValueError, match="would unpack to"):
        decompression.content_of(zipfile.Path(decompression.open_archive(path, "data"), "a.wav"), "data")
    with pytest.raises(ValueError, match="would unpack to"):
        decompression.check_archive(path.read_bytes(), "data: a.zip")


@pytest.mark.parametrize("rate", [1, 999, 2_000_000, 2**32 - 1])
def test_a_rate_that_nobody_records_at_is_refused(rate):
    wav = bytearray(encode_wav(torch.zeros(100), 8000))
    wav[24:28] = rate.to_bytes(4, "little")
    with pytest.raises(
        ValueError, match=r"expected one or more at 1,000 to 1,000,000 Hz|is not a readable sound file"
    ):
        decode_sound(bytes(wav))


@pytest.mark.parametrize("change", [{"layers": 10**9}, {"vocabulary": 2 * 10**7}])
def test_a_config_cannot_ask_for_more_than_its_weights(tmp_path, change):
    model = mh.Encoder(8, heads=2, layers=1, vocabulary=11)
    mh.save(model, tmp_path / "model")
    options = {"d_model": 8, "heads": 2, "layers": 1, "vocabulary": 11} | change
    with (
        pytest.raises(ValueError, match="much larger than its weights"),
        no_larger_than(tmp_path / "model" / "model.safetensors"),
    ):
        mh.Encoder(**options)


# --- Ctrl-C


def test_the_second_ctrl_c_does_what_the_first_did_before():
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(1))
    try:
        with interrupts.interruptible() as outer:
            with interrupts.interruptible() as inner:
                signal.raise_signal(signal.SIGINT)
                assert (inner(), outer(), pressed) == (True, True, [])
                with pytest.raises(interrupts.Interrupted):
                    interrupts.stop_if_interrupted()
            signal.raise_signal(signal.SIGINT)
            assert pressed == [1]
        assert not interrupts.interrupted()
        interrupts.stop_if_interrupted()
    finally:
        signal.signal(signal.SIGINT, before)


# Every verb in a child of one process, which loads torch once; Ctrl-C comes in the model's second pass.
PRESSED = """
import json, os, signal, sys
from manyheads import cli
from manyheads.models import open as models
from manyheads.tasks import trained
from manyheads.training import loop

times = 1

def press(module, *_):
    module.calls = getattr(module, "calls", 0) + 1
    if module.calls == 2:
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)

def pressing(real):
    def made(*given, **options):
        result = real(*given, **options)
        model = result[1] if isinstance(result, tuple) else getattr(result, "model", result)
        model.register_forward_hook(press)
        return result
    return made

models.open_model, trained.load, loop.build = map(pressing, (models.open_model, trained.load, loop.build))
results = {}
for verb, arguments in json.loads(sys.argv[1]).items():
    for times in (1, 2):
        name = f"{verb}-{times}"
        pid = os.fork()
        if pid == 0:
            told = os.open(f"{name}.txt", os.O_CREAT | os.O_WRONLY)
            os.dup2(told, 1)
            os.dup2(told, 2)
            out = [] if verb == "evaluate" else ["--out", f"{name}/out"]
            sys.argv = ["manyheads", verb, *arguments, *out]
            code = 0
            try:
                cli.main()
            except SystemExit as end:
                code = end.code
            sys.stdout.flush()
            os._exit(code)
        results[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    from manyheads.tasks.language import Language

    home = tmp_path_factory.mktemp("ctrl-c")
    (home / "text.txt").write_text("some words to learn, and some more of them.\n" * 30)
    task = Language(context=16, d_model=8, heads=2, layers=1)
    quick = {"steps": 2, "batch_tokens": 64, "evaluate_every": 2, "evaluate_examples": 2, "watch_every": 0}
    mh.train(task, str(home / "text.txt"), out=home / "model", **quick)
    return home


VERBS = {
    "inspect": ["model", "--text", "text.txt", "--batch-tokens", "64"],
    "roles": ["model", "--text", "text.txt", "--batch-tokens", "64"],
    "diversity": ["model", "--text", "text.txt", "--batch-tokens", "64"],
    "importance": ["model", "--text", "text.txt", "--batch-tokens", "64", "--method", "leave-one-out"],
    "prune": ["model", "--text", "text.txt", "--batch-tokens", "64", "--keep", "0.5"],
    "evaluate": ["model", "--data", "text.txt", "--batch-tokens", "16"],
    "train": ["language", "--data", "text.txt", "--context", "16", "--d-model", "8", "--heads", "2",
              "--layers", "1", "--batch-tokens", "64", "--tracker", "none"],
}  # fmt: skip


@pytest.fixture(scope="module")
def ended(run_folder):
    done = subprocess.run(
        [sys.executable, "-c", PRESSED, json.dumps(VERBS)],
        cwd=run_folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("verb", VERBS)
def test_ctrl_c_is_130_without_a_traceback(run_folder, ended, verb, times):
    name = f"{verb}-{times}"
    said = (run_folder / f"{name}.txt").read_text()
    assert ended[name] == 130, said
    assert "Traceback" not in said
    assert ("Stopped" in said) == (times == 1), said  # the second one leaves at once
    left = [path.name for path in (run_folder / name).rglob(".*") if not path.name.endswith(LOCK)]
    assert left == []
