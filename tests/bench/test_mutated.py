"""Damaged files end in an answer or in one sentence; python -m bench.mutated tries thousands more."""

import os
import random
import shutil

import pytest
from bench.mutated import attack, read
from bench.mutations import JSON, gzip_tricks, json_deep, json_value, long_field, safetensors_header
from bench.readers import make_all

pytest.importorskip("PIL")
pytest.importorskip("pyarrow")
EACH = 8


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("good")


@pytest.fixture(scope="module")
def readers(home):
    return make_all(home)


def test_good_files_are_read(readers, home, tmp_path):
    for reader in readers:
        reader.read(shutil.copytree(home / reader.name, tmp_path / reader.name))


def test_damaged_files_end_in_a_sentence(readers, home):
    for case in range(EACH * len(readers)):
        outcome = attack(readers, home, case, seed=1)
        assert outcome.kind in ("read", "sentence"), outcome


WORST = {
    "plan": ("plan.json", JSON),
    "table json": ("heads.json", (*JSON, json_deep)),
    "table csv": ("heads.csv", (long_field,)),
    "cut model, hashes right": ("heads.json", JSON),
    "cut model": ("model.safetensors", (safetensors_header,)),
    "trained language": ("config.json", JSON),
    "resumed language": ("log.jsonl", (json_value,)),
    "leave-one-out state": ("state.json", JSON),
    "series: csv": ("table.csv", (long_field,)),
    "images: IDX, packed": ("train-images-idx3-ubyte.gz", (gzip_tricks,)),
}


@pytest.mark.parametrize("name", WORST)
def test_the_worst_kinds_of_damage(readers, home, tmp_path, name):
    file, ways = WORST[name]
    reader = next(one for one in readers if one.name == name)
    for number in range(10):
        chance = random.Random(number)
        folder = shutil.copytree(home / name, tmp_path / str(number))
        path = folder / file
        path.write_bytes(chance.choice(ways)(path.read_bytes(), chance))
        reader.finish(folder)
        kind, said = read(reader, folder)
        assert kind in ("read", "sentence"), said


PIPES = {
    "language: txt": "text.txt", "series: csv": "table.csv", "images: npz": "digits.npz",
    "dna: tsv": "dna.tsv", "dna: FASTA": "a.fa", "speech: zip": "sounds.zip",
    "picturebook: zip": "book.zip", "text": "text.txt", "token ids": "ids.npy", "treebank": "a.conllu",
    "plan": "plan.json", "table csv": "heads.csv", "table parquet": "heads.parquet",
    "leave-one-out state": "state.json", "recovery state": "state.safetensors",
    "trained language": "tokenizer.json", "resumed language": "log.jsonl",
    "cut model": "model.safetensors",
}  # fmt: skip


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names are a matter of Unix")
@pytest.mark.parametrize("name", PIPES)
def test_a_pipe_is_refused_before_it_is_opened(readers, home, tmp_path, name):
    folder = shutil.copytree(home / name, tmp_path / "files")
    (folder / PIPES[name]).unlink()
    os.mkfifo(folder / PIPES[name])
    with pytest.raises(ValueError, match=r"\w"):
        next(one for one in readers if one.name == name).read(folder)
