"""What the head tools read of a trained model without being told: what its training held out."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import manyheads as mh
from manyheads.cli import app
from manyheads.data.corpus import choose, examples
from manyheads.models.loaded import if_any
from manyheads.models.open import open_model
from manyheads.tasks import TASKS, find, held_out, restore
from manyheads.training.train import train

SIZES = {"d_model": 12, "heads": 3, "layers": 1}
QUICK = {"steps": 3, "batch_tokens": 700, "evaluate_every": 3, "evaluate_examples": 4, "watch_every": 0}
OWN = ("images", "series", "dna")


def call(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder for each task, trained for a moment on what it brings along."""
    where = tmp_path_factory.mktemp("runs")
    for name in OWN:
        train(find(name)(**SIZES), out=where / name, **QUICK)
    return where


@pytest.mark.parametrize("name", TASKS)
def test_the_model_runs_on_what_inputs_makes_of_a_batch(name, monkeypatch):
    task = find(name)(**SIZES)
    data = task.open(None)
    from manyheads.models.config import build

    model = build(task.describe()).eval()
    batch = task.collate(data.valid.take(range(3), 0))
    given = {}
    monkeypatch.setattr(type(model), "forward", _noting(type(model).forward, given))
    with torch.no_grad():
        model(**task.inputs(batch))
        assert given
        task.loss(model, batch)  # the loss asks the model in the same way
    assert "labels" not in task.inputs(batch)


def _noting(forward, given):
    def noted(self, *args, **kwargs):
        if given:
            for name, item in given["kwargs"].items():
                assert item is kwargs[name] or torch.equal(item, kwargs[name])
        given["kwargs"] = kwargs
        return forward(self, *args, **kwargs)

    return noted


@pytest.mark.parametrize("name", OWN)
def test_without_anything_said_held_out_examples_are_read(folders, name):
    loaded = open_model(str(folders / name))
    task = restore(folders / name)
    held = held_out(folders / name, task)
    read = choose(loaded, None, None, None, None, None, 4096)
    assert read.unit == find(name).unit
    assert read.what == f"{len(read.sizes):,} of {len(held):,} held-out examples"
    assert 1 < len(read.sizes) <= len(held)
    assert sum(read.sizes) <= 32768
    few = choose(loaded, None, None, None, None, 5, 4096)
    assert len(few.sizes) == 5
    with torch.no_grad(), mh.watch(loaded.model) as seen:
        for _, batch in few.batches():
            loaded.model(**batch)
    assert seen.table["tokens"][0] == sum(few.sizes)


def test_the_first_examples_are_a_sample_of_all_classes(folders):
    loaded = open_model(str(folders / "images"))
    read = examples(loaded, labels=True)
    labels = torch.cat([batch["labels"] for _, batch in read.batches()])
    assert len(labels) == 179
    assert len(set(read.make(range(12))["labels"].tolist())) > 4


def test_tokens_of_a_task_have_groups(folders):
    read = examples(open_model(str(folders / "dna")))
    assert set(read.groups) == {"frequent", "rare"}
    assert all(0 < share < 0.5 for share in read.shares.values())


def test_what_cannot_be_read_is_told(folders, tmp_path):
    loaded = open_model(str(folders / "images"))
    with pytest.raises(ValueError, match="reads examples as long as its task makes them"):
        choose(loaded, None, None, None, 7, None, 4096)
    with pytest.raises(ValueError, match="got --text and --data"):
        choose(loaded, "a", None, None, None, None, 4096, "b")
    with pytest.raises(ValueError, match="there is no nowhere"):
        choose(loaded, None, None, None, None, None, 4096, "nowhere")
    with pytest.raises(ValueError, match="is neither a file here nor a dataset that can be read"):
        choose(open_model(), None, None, None, None, None, 4096, "nowhere")
    path = tmp_path / "t.tsv"
    path.write_text("a\tACGT\nb\tGGG\n" * 10)
    train(find("dna")(**SIZES), str(path), out=tmp_path / "run", **QUICK)
    path.unlink()
    with pytest.raises(ValueError, match=r"names .*t.tsv as its data, which is not in the folder"):
        choose(open_model(str(tmp_path / "run")), None, None, None, None, None, 4096)


@pytest.mark.parametrize("name", OWN)
def test_the_verbs_on_heads_take_the_folder_alone(folders, tmp_path, name):
    for verb in ("inspect", "roles", "importance"):
        done = call(verb, folders / name, "--limit", 30, "--json", "--out", tmp_path / verb)
        assert len(json.loads(done.stdout.splitlines()[-1]).get("heads", [0, 1, 2])) == 3, verb
    assert (tmp_path / "inspect" / "report.html").is_file()
    call("prune", folders / name, "--limit", 40, "--keep", 0.6, "--json", "--out", tmp_path / "small")
    card = json.loads((tmp_path / "small" / "card.json").read_text())
    assert (card["measure"] == "accuracy") == (name in ("images", "dna"))
    small = mh.load(tmp_path / "small")
    assert small.encoder.blocks[0].attention.heads == 2
    told = [json.loads(call("evaluate", f, "--json").stdout) for f in (folders / name, tmp_path / "small")]
    assert told[0]["examples"] == told[1]["examples"]
    assert told[0]["metrics"].keys() == told[1]["metrics"].keys()
    assert told[0]["metrics"] != told[1]["metrics"]


def test_classifiers_are_judged_by_their_labels(folders, tmp_path):
    for name in ("images", "dna"):
        done = call("importance", folders / name, "--method", "leave-one-out", "--loss", "classification",
                    "--limit", 12, "--json", "--out", tmp_path / name)  # fmt: skip
        assert done.exit_code == 0


@pytest.mark.parametrize("name", OWN)
def test_the_page_shows_what_the_task_reads(folders, name):
    from manyheads.view.document import document, of_corpus

    loaded = open_model(str(folders / name))
    read = examples(loaded, limit=9)
    with torch.no_grad(), mh.watch(loaded.model) as seen:
        for _, batch in read.batches():
            loaded.model(**batch)
    readers = {"tokenizer": if_any(loaded.tokenizer), "processor": if_any(loaded.processor)}
    made = document(seen.table, loaded.model, of_corpus(read, loaded.model), **readers)
    assert not [note for note in made["header"]["notes"] if "left out" in note]
    first = made["examples"][0]
    assert first["silenced"]["change"]
    assert first["kind"] == ("image" if name == "images" else "text")
    if name == "images":
        shown = first["picture"]
        assert (shown["rows"], shown["columns"], shown["first"]) == (4, 4, 0)
    if name == "dna":
        assert {token["shown"] for token in first["tokens"]["self"]} <= set("ACGT")
    if name == "series":
        assert first["answer"] is None
    else:
        assert first["answer"]["kind"] == "class"
        assert {label for label, _ in first["answer"]["items"]} <= set(loaded.model.labels)


def test_the_live_page_begins_with_held_out_examples(folders):
    from manyheads.view.live.session import begin

    pictures, sequences = (begin(open_model(str(folders / name), head=True)) for name in ("images", "dna"))
    assert (pictures.kind, pictures.images) == ("class", 16)
    assert (sequences.kind, sequences.images) == ("class", 0)
    assert set("".join(sequences.samples)) == set("ACGT")
    with pytest.raises(ValueError, match="series reads neither texts nor images"):
        begin(open_model(str(folders / "series"), head=True))


def test_predict_draws_along_a_sequence(folders, tmp_path):
    picture = tmp_path / "heads.png"
    done = call("predict", folders / "dna", "ACGTTGACA", "--draw", picture, "--json")
    assert json.loads(done.stdout)["input"] == "ACGTTGACA"
    assert picture.is_file()
    with pytest.raises(ValueError, match=r"draw: .*series reads no sequences of bases"):
        call(
            "predict",
            folders / "series",
            Path(mh.__file__).parent / "data" / "files" / "sunspots.csv",
            "--draw",
            picture,
        )
