"""the verbs, from the command to the answer: processor time and memory beside a plain pass.

Each verb runs as a person runs it, `python -m manyheads VERB --text FILE`, in a process of its own and with
one thread; the plain pass is a process that opens the same model, reads the same file and runs
`model(**batch)` without gradients. Processor time and peak memory are those that the kernel accounts to the
process; start-up, loading and tokenising are included on both sides.

    MANYHEADS_DATA=/data MANYHEADS_CELLS=minilm:100000,smollm2:20000 python -m bench verbs --out bench/results

MANYHEADS_DATA is a folder with language/tinyshakespeare.txt, translation/*.en and treebank/*.conllu, of which
texts are made, repeated where they are fewer than asked for; without it a built-in sample text is repeated:
to try, not to quote. MANYHEADS_CELLS says which models read how many tokens, MANYHEADS_VERBS which verbs run,
MANYHEADS_PAGE=0 leaves out the page of SmolLM2. What was measured is kept in results/verbs.json; delete it,
or a part of it, to measure again.
"""

from __future__ import annotations

import os
import pty
import random
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness import GIB, _processor, table, targets
from bench.models import minilm, smollm2
from bench.record import Record
from manyheads.data.text_lines import read_lines

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).parent / "results" / "verbs.json"
KEPT = Path("out/verbs")  # texts and the folder of SmolLM2
CELLS = "minilm:100000,minilm:1000000,smollm2:20000,smollm2:100000"
# Times the plain pass at most, from 100,000 tokens on; peak memory at most MEMORY times the plain pass's, and
# half a gigabyte.
WANTED = {"inspect": 1.6, "roles": 1.5, "importance": 3.0, "diversity": 2.0, "prune": 5.0}
MEMORY, MORE, LONG = 1.3, 0.5, 100_000
PEAKS = {"inspect": 1.1, "roles": 1.5, "importance": 1.5, "diversity": 1.5}  # times the plain pass's, at most
OPTIONS = {"importance": ["--method", "fisher"], "prune": ["--keep", "0.5"]}
PASSAGE = 1400  # characters of a text for a language model
FIRST_OUTPUT, PAGE_SECONDS, PAGE_MB = 2.0, 60.0, 5.0
PAGE_TOKENS = 1024

PLAIN = """
import sys, torch
import manyheads as mh
from manyheads.data import corpus
loaded = mh.open_model(sys.argv[1] or None, head=True)
read = corpus.choose(loaded, sys.argv[2], None, None, None, None, 4096)
with torch.no_grad():
    for _, batch in read.batches():
        loaded.model(**batch)
"""


def run(quick: bool) -> str:
    """Measure what the record does not have yet, and write the tables of all it has."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) if quick else KEPT
        record = Record(Path(folder) / "record.json" if quick else RECORD)
        cells = "minilm:2000" if quick else os.environ.get("MANYHEADS_CELLS", CELLS)
        verbs = os.environ.get("MANYHEADS_VERBS", ",".join(WANTED)).split(",")
        for cell in filter(None, cells.split(",")):
            name, _, tokens = cell.partition(":")
            _measure(record, name, int(tokens), [*verbs][: 2 if quick else None], kept)
        if not quick and os.environ.get("MANYHEADS_PAGE", "1") == "1":
            _measure_page(record, kept)
        for verb in ["inspect"] if quick else WANTED:
            record.once(f"first output of {verb}", lambda verb=verb: first_output(verb))
        return report(record.found)


def _measure(record: Record, name: str, tokens: int, verbs: Sequence[str], kept: Path) -> None:
    key = f"{name}, {tokens:,} tokens"
    if all(f"{key}: {verb}" in record.found for verb in ("plain", *verbs)):
        return
    model, text = _model(name, kept), _text(name, tokens, kept)
    plain = [sys.executable, "-c", PLAIN, model, str(text)]
    record.once(f"{key}: plain", lambda: cost(plain))
    for verb in verbs:
        record.once(f"{key}: {verb}", lambda verb=verb: cost_of_verb(verb, model, text))


def cost_of_verb(verb: str, model: str, text: Path, *more: str) -> dict[str, Any]:
    """What a verb costs, with the size of its page where it writes one."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        spent = cost(command(verb, model, "--text", str(text), *more, "--out", str(out)))
        page = out / "report.html"
        return spent | ({"page MB": page.stat().st_size / 1e6} if page.exists() else {})


def command(verb: str, model: str, *options: str) -> list[str]:
    """A verb as a person types it."""
    return [
        sys.executable,
        "-m",
        "manyheads",
        verb,
        *([model] if model else []),
        *OPTIONS.get(verb, []),
        *options,
    ]


def cost(arguments: Sequence[str]) -> dict[str, Any]:
    """Seconds of the processor and bytes at the peak of a process, from the kernel's books."""
    started = time.perf_counter()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            arguments, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=errors
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        if process.returncode:
            raise RuntimeError(f"{arguments[:6]} ended with {process.returncode}: {errors.read()[-2000:]!r}")
    return {
        "processor": round(usage.ru_utime + usage.ru_stime, 2),
        "wall": round(time.perf_counter() - started, 2),
        "peak": usage.ru_maxrss * 1024,
        "commit": commit(),
    }


def commit() -> str:
    """The commit that is measured."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or "no commit"


def environment() -> dict[str, str]:
    """One thread, and the package of this repository."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}


def first_output(verb: str) -> dict[str, float]:
    """Seconds until a verb shows something on a terminal: that pass, and those that the processor works."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = command(verb, "", "--limit", "30", "--out", str(Path(folder) / "out"))
        ours, theirs = pty.openpty()
        started = time.perf_counter()
        process = subprocess.Popen(
            arguments, cwd=ROOT, env=environment(), stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        select.select([ours], [], [], 120)
        passed = time.perf_counter() - started
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        worked = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
        process.kill()
        process.wait()
        os.close(ours)
    return {"processor": worked, "wall": round(passed, 2)}


def _measure_page(record: Record, kept: Path) -> None:
    """The page of SmolLM2 with a text of 1024 tokens: the time of inspect with it, and without it."""
    if {"page: with", "page: without"} <= record.found.keys():
        return
    model, tokenizer = _model("smollm2", kept), smollm2()[1]
    ids = tokenizer(" ".join(_speeches()), verbose=False)["input_ids"]
    lengths = [PAGE_TOKENS, *([12, 24, 48, 96] * 5)]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    text = kept / "page.txt"
    pieces = [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    text.write_text("".join(f"{' '.join(tokenizer.decode(piece).split())}\n" for piece in pieces))
    record.once("page: without", lambda: cost_of_verb("inspect", model, text, "--no-page"))
    record.once("page: with", lambda: cost_of_verb("inspect", model, text))


def _model(name: str, kept: Path) -> str:
    """What the command takes for MODEL; SmolLM2 is unpacked into a folder once, as a person would have it."""
    if name == "minilm":
        return ""
    folder = (kept / "smollm2").resolve()
    if not folder.exists():
        model, tokenizer = smollm2()
        config = model.config
        del config.quantization_config
        plain = type(model)(config)
        plain.load_state_dict(model.state_dict())
        unfinished = folder.with_name("smollm2.part")
        shutil.rmtree(unfinished, ignore_errors=True)
        plain.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.rename(folder)
    return str(folder)


def _speeches() -> list[str]:
    """Paragraphs of English, in order."""
    data = os.environ.get("MANYHEADS_DATA")
    if data is None:
        return list(read_lines(None, None))
    paragraphs = (Path(data) / "language/tinyshakespeare.txt").read_text(encoding="utf-8").split("\n\n")
    return [" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip()]


def _sentences() -> list[str]:
    """Speeches, captions and sentences, mixed."""
    texts, data = _speeches(), os.environ.get("MANYHEADS_DATA")
    if data is not None:
        for path in sorted(Path(data, "translation").glob("*.en")):
            texts += [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        for path in sorted(Path(data, "treebank").glob("*.conllu")):
            lines = path.read_text(encoding="utf-8").splitlines()
            texts += [line.removeprefix("# text = ") for line in lines if line.startswith("# text = ")]
    random.Random(0).shuffle(texts)
    return texts


def _passages() -> list[str]:
    """Speeches that follow each other, put together to longer texts, mixed."""
    texts, current = [], ""
    for speech in _speeches():
        current = f"{current} {speech}".strip()
        if len(current) > PASSAGE:
            texts.append(current)
            current = ""
    random.Random(0).shuffle(texts)
    return texts or [current]


def _text(name: str, tokens: int, kept: Path) -> Path:
    """A file with so many tokens: short texts for the sentence encoder, passages for the language model."""
    path = (kept / f"{name}-{tokens}.txt").resolve()
    if not path.exists():
        texts, tokenizer = (_sentences(), minilm()[1]) if name == "minilm" else (_passages(), smollm2()[1])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{text}\n" for text in _enough(texts, tokenizer, tokens)), encoding="utf-8")
    return path


def _enough(texts: Sequence[str], tokenizer: Any, tokens: int) -> Iterator[str]:
    left, number = tokens, 0
    while left > 0:
        text = texts[number % len(texts)]
        left -= len(tokenizer(text, verbose=False)["input_ids"])
        number += 1
        yield text


def report(found: Mapping[str, Any]) -> str:
    """The tables, and which targets are reached."""
    rows, goals = [], []
    keys = dict.fromkeys(name.rpartition(": ")[0] for name in found if " tokens: " in name)
    for key in keys:
        plain = found.get(f"{key}: plain")
        if plain is None:
            continue
        rows.append([key, "plain pass", f"{plain['processor']:.0f}", "1", f"{plain['peak'] / GIB:.2f}", ""])
        long = int(key.split()[1].replace(",", "")) >= LONG
        for verb, most in WANTED.items():
            if (spent := found.get(f"{key}: {verb}")) is None:
                continue
            ratio = spent["processor"] / plain["processor"]
            allowed = MEMORY * plain["peak"] / GIB + MORE
            memory = f"{spent['peak'] / GIB:.2f}"
            rows.append([key, verb, f"{spent['processor']:.0f}", f"{ratio:.2f}", memory, f"{allowed:.2f}"])
            if long:
                goals.append((f"{verb}, {key}: times the plain pass", ratio, "<=", most))
            goals.append((f"{verb}, {key}: peak, GiB", spent["peak"] / GIB, "<=", round(allowed, 3)))
            if verb in PEAKS:
                peak = spent["peak"] / plain["peak"]
                goals.append((f"{verb}, {key}: peak, times the plain pass's", peak, "<=", PEAKS[verb]))
    if {"page: with", "page: without"} <= found.keys():
        spent = found["page: with"]["processor"] - found["page: without"]["processor"]
        goals.append(("page of SmolLM2, s of one thread", spent, "<=", PAGE_SECONDS))
        goals.append(("page of SmolLM2, MB", found["page: with"]["page MB"], "<=", PAGE_MB))
    for verb in WANTED:
        if (first := found.get(f"first output of {verb}")) is not None:
            goals.append(
                (f"first output of {verb}, s of the processor", first["processor"], "<=", FIRST_OUTPUT)
            )
    header = ["model and text", "verb", "processor, s", "times plain", "peak, GiB", "allowed, GiB"]
    commits = dict.fromkeys(spent["commit"] for spent in found.values() if "commit" in spent)
    machine = (
        f"{_processor()}, one thread, on a machine that others use: seconds of the processor, not those that "
        f"passed. Commit {', '.join(commits)}."
    )
    return f"{machine}\n\n{table(header, rows)}\n\n{targets(*goals)}"
