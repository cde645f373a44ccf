"""Everything in manyheads that reads files: small good ones for each reader, and the call that reads them."""

from __future__ import annotations

import gzip
import json
import shutil
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image

import manyheads as mh
from manyheads import tasks
from manyheads.cli.train import train as run_training
from manyheads.data import corpus
from manyheads.data.batches import Corpus
from manyheads.data.readers.audio import encode_wav
from manyheads.heads.inspect import count, table_or_error
from manyheads.heads.roles import treebank
from manyheads.models import folder as saved_models
from manyheads.models import open as models
from manyheads.training.evaluation import evaluate
from manyheads.training.train import train
from manyheads.view.document import document
from manyheads.view.terminal.summary import summary_text

SIZES = {"d_model": 12, "heads": 3, "layers": 1}
QUICK: dict[str, Any] = {
    "steps": 2, "batch_tokens": 300, "evaluate_every": 2, "evaluate_examples": 2, "watch_every": 0,
    "save_every": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Reader:
    """What reads a folder of good files, of which one is damaged at a time.

    name: of the kind of file.
    files: which are damaged, as patterns.
    read: reads and uses all of them; what is wrong is a sentence.
    finish: called after the damage, as by somebody who wants it to go unnoticed.
    """

    name: str
    files: tuple[str, ...]
    read: Callable[[Path], object]
    finish: Callable[[Path], None] = lambda folder: None


def make_all(home: Path) -> list[Reader]:
    """Write the good files of every reader, each under ``home / name``."""
    return [*_documents(home), *_folders(home), *_runs(home), *_data(home), *_corpora(home)]


# --- plans, tables, states


def _documents(home: Path) -> list[Reader]:
    model = mh.Encoder(**SIZES, vocabulary=17).eval()
    ids = torch.randint(17, (3, 7), generator=torch.Generator().manual_seed(0))
    table = mh.roles(model, [ids], least=2)
    ranking = mh.importance(model, [ids], "output-norm")
    readers = []
    for suffix in ("json", "csv", "parquet"):
        folder = _new(home / f"table {suffix}")
        table.save(folder / f"heads.{suffix}")
        readers.append(Reader(folder.name, ("*",), lambda f, s=suffix: _use_table(f / f"heads.{s}")))
    folder = _new(home / "table with matrices")
    mh.diversity(model, [ids]).save(folder / "heads.json")
    readers.append(Reader(folder.name, ("*",), lambda f: _use_table(f / "heads.json")))
    folder = _new(home / "plan")
    mh.plan(ranking, keep=0.5).save(folder / "plan.json")
    readers.append(Reader("plan", ("*",), lambda f: _use_plan(model, f / "plan.json")))
    folder = _new(home / "leave-one-out state")
    mh.importance(model, [ids], "leave-one-out", state=folder / "state.json")
    readers.append(
        Reader(
            folder.name,
            ("*",),
            lambda f: mh.importance(model, [ids], "leave-one-out", state=f / "state.json"),
        )
    )
    folder = _new(home / "recovery state")
    small = mh.cut(model, {0: [1]}, ids)
    kept = {name: value.clone() for name, value in small.state_dict().items()}
    mh.recover(small, [ids], teacher=model, steps=2, state=folder / "state.safetensors")

    def recover(folder: Path) -> None:
        small.load_state_dict(kept)
        mh.recover(small, [ids], teacher=model, steps=2, state=folder / "state.safetensors")

    readers.append(Reader(folder.name, ("*",), recover))
    return readers


def _use_table(path: Path) -> None:
    table = mh.HeadTable.load(path)
    table.merge(table)
    list(table)
    summary_text(table)
    document(table)
    table.save(path.with_name("again.json"))


def _use_plan(model: torch.nn.Module, path: Path) -> None:
    plan = mh.Plan.load(path)
    repr((plan, plan.keep, plan.removed))
    plan.check(model)


# --- folders of models


def _folders(home: Path) -> list[Reader]:
    import transformers

    torch.manual_seed(0)
    ids = torch.randint(17, (3, 7))
    encoder = mh.Encoder(**SIZES, vocabulary=17).eval()
    mh.save(mh.cut(encoder, {0: [1]}, ids), home / "cut model")
    config = transformers.GPT2Config(vocab_size=17, n_positions=32, n_embd=12, n_layer=2, n_head=3)
    gpt2 = transformers.GPT2LMHeadModel(config).eval()
    mh.save(mh.cut(gpt2, {0: [1], 1: [0]}, {"input_ids": ids}), home / "cut GPT-2")
    mh.save(mh.cut(gpt2, {0: [0, 1, 2]}, {"input_ids": ids}), home / "cut GPT-2, no heads")
    gpt2.save_pretrained(home / "model of others")
    readers = [
        Reader(
            "model of others", ("*",), lambda f: _inspect(models.open_model(str(f)).model, {"input_ids": ids})
        )
    ]
    for name in ("cut model", "cut GPT-2", "cut GPT-2, no heads"):
        read = (lambda f: _inspect(mh.load(f), ids)) if name == "cut model" else _read_gpt2
        readers.append(Reader(name, ("*",), read))
        shutil.copytree(home / name, home / f"{name}, hashes right")
        readers.append(Reader(f"{name}, hashes right", ("*",), read, _right_hashes))
    return readers


def _read_gpt2(folder: Path) -> None:
    _inspect(mh.load(folder), {"input_ids": torch.arange(14).view(2, 7)})


def _inspect(model: torch.nn.Module, batch: Any) -> None:
    table_or_error(count(model, [(1, batch)]))


def _right_hashes(folder: Path) -> None:
    """Make heads.json agree with the files, as the person would who changed them on purpose."""
    path = folder / "heads.json"
    if not path.is_file():
        return
    try:
        said = json.loads(path.read_bytes())
        said["files"] = {
            name: saved_models._hash(folder / name) if (folder / name).is_file() else ""
            for name in said["files"]
        }
        said.pop("sha256", None)
        said["sha256"] = saved_models._hash_of(said)
        path.write_bytes(json.dumps(said).encode("utf-8", "surrogatepass"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OSError):
        return


# --- runs of every task


def _runs(home: Path) -> list[Reader]:
    readers = []
    data = _task_data(_new(home / "data of runs"))
    for name, (options, where, inputs) in data.items():
        folder = home / f"trained {name}"
        task: Any = tasks.find(name)(**SIZES, **options)
        train(task, str(where), out=folder, **QUICK)
        shutil.rmtree(folder / "checkpoints")

        def use(folder: Path, where: Path = where, inputs: list[str] = inputs) -> None:
            loaded = models.open_model(str(folder))
            read = corpus.examples(loaded, str(where), limit=2)
            _inspect(loaded.model, next(read.batches())[1])
            task, model = tasks.load(folder)
            evaluate(task, model, tasks.read_data(folder, task, str(where)), [0])
            task.predict(model, inputs)

        readers.append(Reader(folder.name, ("*",), use))
        folder = home / f"resumed {name}"
        train(tasks.find(name)(**SIZES, **options), str(where), out=folder, **QUICK)  # type: ignore[call-arg]

        def resume(folder: Path, name: str = name, where: Path = where) -> None:
            more = {"resume": True, "tracker": "none", "json": True}
            run_training(name, {"steps": 2}, data=str(where), valid=None, out=folder, **more)

        readers.append(Reader(folder.name, ("*.json", "*.jsonl", "*.safetensors", "checkpoints/*/*"), resume))
    return readers


# --- data of every task


def _task_data(home: Path) -> dict[str, tuple[dict[str, Any], Path, list[str]]]:
    """For each task its options, data, and an input to predict from."""
    (home / "text.txt").write_text("a few words, and a few more of them.\n" * 20)
    (home / "pairs.tsv").write_text("".join(f"one {n}\teins {n}\n" for n in range(40)))
    (home / "table.csv").write_text(
        "date,a,b\n" + "".join(f"{n},{n % 7},{n * n % 11}\n" for n in range(1, 201))
    )
    (home / "dna.tsv").write_text("".join(f"{'ab'[n % 2]}\t{'ACGT' * (n % 3 + 1)}\n" for n in range(30)))
    numpy.savez(home / "digits.npz", images=_pixels(), labels=numpy.arange(20) % 2)
    _recordings(_new(home / "sounds"))
    _book(_new(home / "book"))
    Image.fromarray(_pixels()[0]).save(home / "picture.png")
    small = {"context": 16}
    return {
        "language": (small, home / "text.txt", []),
        "translation": ({"vocabulary": 270, "max_tokens": 16}, home / "pairs.tsv", ["one 3"]),
        "series": (
            {"context": 16, "horizon": 3, "patch": 4, "stride": 4},
            home / "table.csv",
            [str(home / "table.csv")],
        ),
        "dna": ({}, home / "dna.tsv", ["ACGT"]),
        "images": ({"patch": 4}, home / "digits.npz", [str(home / "picture.png")]),
        "speech": ({}, home / "sounds", [str(home / "sounds" / "yes_ann_0.wav")]),
        "picturebook": (
            {"size": 8, "patch": 4, "vocabulary": 300, "max_tokens": 8},
            home / "book",
            [str(home / "picture.png")],
        ),
    }


def _pixels() -> Any:
    return (numpy.arange(20 * 8 * 8).reshape(20, 8, 8) * 7 % 256).astype(numpy.uint8)


def _recordings(folder: Path) -> None:
    for n in range(12):
        sound = (torch.arange(800) * (0.1 + 0.1 * (n % 2))).sin() * 0.5
        (folder / f"{('yes', 'no')[n % 2]}_{('ann', 'bob')[n // 6]}_{n}.wav").write_bytes(
            encode_wav(sound, 8000)
        )


def _book(folder: Path) -> None:
    rows = ["file\ten\tzh"]
    for n, pixels in enumerate(_pixels()):
        Image.fromarray(pixels).convert("RGB").save(folder / f"{n}.png")
        rows.append(f"{n}.png\ta picture {n}\t图 {n}")
    (folder / "captions.tsv").write_text("\n".join(rows) + "\n")


def _data(home: Path) -> list[Reader]:
    good = _task_data(_new(home / "good data"))
    readers = []

    def add(name: str, task: str, fill: Callable[[Path], str], *, only: str = "*", **options: Any) -> None:
        folder = _new(home / f"{task}: {name}")
        data = fill(folder)

        def read(folder: Path) -> None:
            made: Any = tasks.find(task)(**(SIZES | good[task][0] | options))
            opened = made.open(str(folder / data) if data else str(folder))
            for part in (opened.train, opened.valid):
                made.collate(part.take(range(min(2, len(part))), 0))
            made.describe()

        readers.append(Reader(folder.name, (only,), read))

    source = home / "good data"
    copies = {
        "language": "text.txt", "translation": "pairs.tsv", "series": "table.csv", "dna": "dna.tsv",
        "images": "digits.npz",
    }  # fmt: skip
    for task, file in copies.items():
        add(Path(file).suffix[1:], task, lambda f, file=file: shutil.copy(source / file, f / file).name)
    add("two files", "translation", _two_files)
    add("FASTA", "dna", _fasta, only="*.fa")
    add("FASTA, packed", "dna", _fasta, only="*.gz")
    add("IDX", "images", lambda f: _idx(f, False))
    add("IDX, packed", "images", lambda f: _idx(f, True))
    add("folder", "images", _class_folders, only="*/*")
    add("WAV", "speech", lambda f: shutil.copytree(source / "sounds", f, dirs_exist_ok=True) and "")
    add("zip", "speech", lambda f: _zipped(source / "sounds", f / "sounds.zip"))
    add("labels", "speech", lambda f: _labelled(source / "sounds", f), only="*.tsv")
    add("captions", "picturebook", lambda f: shutil.copytree(source / "book", f, dirs_exist_ok=True) and "",
        only="*.tsv")  # fmt: skip
    add("pictures", "picturebook", lambda f: shutil.copytree(source / "book", f, dirs_exist_ok=True) and "",
        only="*.png")  # fmt: skip
    add("zip", "picturebook", lambda f: _zipped(source / "book", f / "book.zip"))
    return readers


def _two_files(folder: Path) -> str:
    for language in ("en", "de"):
        (folder / f"train.{language}").write_text("".join(f"{language} {n}\n" for n in range(40)))
    return "train"


def _fasta(folder: Path) -> str:
    for name in ("a", "b"):
        (folder / f"{name}.fa").write_text("".join(f">{n}\n{'ACGTN' * 4}\n" for n in range(12)))
    (folder / "c.fa.gz").write_bytes(gzip.compress(b">x\nACGT\n" * 12, mtime=0))
    return ""


def _idx(folder: Path, packed: bool) -> str:
    pixels = _pixels()
    images = struct.pack(">4B3I", 0, 0, 8, 3, *pixels.shape) + pixels.tobytes()
    labels = struct.pack(">4BI", 0, 0, 8, 1, len(pixels)) + bytes(n % 2 for n in range(len(pixels)))
    for name, content in (("train-images-idx3-ubyte", images), ("train-labels-idx1-ubyte", labels)):
        path = folder / (f"{name}.gz" if packed else name)
        path.write_bytes(gzip.compress(content, mtime=0) if packed else content)
    return ""


def _class_folders(folder: Path) -> str:
    formats = ("png", "jpg", "gif", "bmp", "tif", "ppm", "webp")
    for n, pixels in enumerate(_pixels()[:14]):
        _new(folder / "ab"[n % 2])
        Image.fromarray(pixels).convert("RGB").save(folder / "ab"[n % 2] / f"{n}.{formats[n % len(formats)]}")
    return ""


def _zipped(source: Path, archive: Path) -> str:
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for file in sorted(source.iterdir()):
            packed.write(file, file.name)
    return archive.name


def _labelled(source: Path, folder: Path) -> str:
    shutil.copytree(source, folder, dirs_exist_ok=True)
    rows = [f"{file.name}\t{file.name.split('_')[0]}" for file in sorted(source.glob("*.wav"))]
    (folder / "labels.tsv").write_text("\n".join(["file\tlabel", *rows]) + "\n")
    return ""


# --- what people show to models of others


def _corpora(home: Path) -> list[Reader]:
    model = mh.Encoder(**SIZES, vocabulary=300).eval()
    pictures = models.Loaded("model", model, lambda: _words, lambda: _averages)
    readers = []

    def add(name: str, file: str, content: bytes, read: Callable[[Path], Corpus]) -> None:
        folder = _new(home / name)
        (folder / file).write_bytes(content)
        readers.append(Reader(name, ("*",), lambda f: _inspect(model, next(read(f / file).batches())[1])))

    add(
        "text",
        "text.txt",
        b"a few words\nand a few more\n" * 5,
        lambda f: corpus.text(pictures, str(f), limit=3, max_length=64),
    )
    path = home / "ids.npy"
    numpy.save(path, numpy.arange(60).reshape(5, 12))
    add("token ids", "ids.npy", path.read_bytes(), lambda f: corpus.tokens(pictures, str(f)))
    path = home / "picture.png"
    Image.fromarray(_pixels()[0]).save(path)
    add("pictures", "a.png", path.read_bytes(), lambda f: corpus.images(pictures, str(f.parent)))
    folder = _new(home / "treebank")
    rows = [
        "1\tHeads\thead\tNOUN\t_\tNumber=Plur\t2\tnsubj\t_\t_",
        "2\tlook\tlook\tVERB\t_\t_\t0\troot\t_\tSpaceAfter=No",
    ]
    (folder / "a.conllu").write_text("\n\n".join(["# text = Heads look\n" + "\n".join(rows)] * 4) + "\n")
    readers.append(Reader("treebank", ("*",), lambda f: treebank.read(f / "a.conllu")))
    return readers


def _words(text: str) -> dict[str, list[int]]:
    return {"input_ids": [ord(letter) % 300 for letter in text]}


def _averages(seen: list[Any]) -> torch.Tensor:
    return torch.tensor([[sum(picture.getpixel((0, 0))) % 300] * 3 for picture in seen])


def _new(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
