"""--data, --text-column, --label-column and --split on every verb that reads a corpus."""

import json
import random
import sys

import pytest
import transformers as hf
from PIL import Image
from tests.helpers.labelled import bert, tokenizer, vit, write_csv

import manyheads as mh
from manyheads import cli

COLUMNS = ["--text-column", "review", "--label-column", "stars"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny classifier on disk, and 40 rows for it."""
    place = tmp_path_factory.mktemp("labelled")
    model = bert(hf.BertForSequenceClassification, id2label={0: "bad", 1: "fine", 2: "good"})
    model.save_pretrained(place / "model")
    tokenizer().save_pretrained(place / "model")
    letters = random.Random(0)
    texts = [" ".join(letters.choices("abcdefgh", k=letters.randint(2, 9))) for _ in range(40)]
    write_csv(place / "reviews.csv", {"review": texts, "stars": ["bad", "fine", "good", "bad"] * 10})
    return place


@pytest.fixture
def call(monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["manyheads", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as done:
            cli.main()
        printed = capsys.readouterr()
        return done.value.code, printed.out, printed.err

    return call


def test_evaluate_prints_metrics_with_intervals(folder, call):
    code, out, err = call("evaluate", folder / "model", "--data", folder / "reviews.csv", *COLUMNS)
    assert code == 0, err
    assert "sequence classification, 40 rows, inputs from 'review', labels from 'stars'" in out
    assert "95% interval" in out
    code, out, _ = call("evaluate", folder / "model", "--data", folder / "reviews.csv", *COLUMNS, "--json")
    document = json.loads(out)
    loaded = mh.open_model(str(folder / "model"), head=True)
    data = mh.labelled(folder / "reviews.csv", loaded, text="review", label="stars")
    expected = data.evaluate(loaded.model).metrics["accuracy"]
    assert document["metrics"]["accuracy"] == pytest.approx(expected.mean)
    assert document["intervals"]["accuracy"] == pytest.approx([expected.low, expected.high])


def test_importance_takes_the_loss_of_the_labels(folder, call, tmp_path):
    given = ("importance", folder / "model", "--data", folder / "reviews.csv", *COLUMNS, "--out", tmp_path)
    code, out, err = call(*given)
    assert code == 0, err
    assert "gradient: slope of the loss labels" in out
    assert "labels from 'stars'" in err
    loaded = mh.open_model(str(folder / "model"), head=True)
    data = mh.labelled(folder / "reviews.csv", loaded, text="review", label="stars", batch_tokens=1024)
    table = mh.HeadTable.load(tmp_path / "gradient.json")
    assert table["importance"].tolist() == pytest.approx(
        mh.importance(loaded.model, data, "gradient")["importance"].tolist(), rel=1e-4
    )


def test_prune_compares_by_accuracy_and_its_folder_is_evaluated_in_turn(folder, call, tmp_path):
    data = ("--data", folder / "reviews.csv", *COLUMNS)
    code, out, err = call("prune", folder / "model", *data, "--keep", 0.5, "-o", tmp_path / "small", "--json")
    assert code == 0, err
    card = json.loads(out)
    assert card["measure"] == "accuracy"
    assert any("names of classes" in note for note in card["notes"])
    code, out, err = call("evaluate", tmp_path / "small", *data, "--json")
    assert code == 0, err
    assert json.loads(out)["task"] == "sequence classification"


def test_inspect_keeps_the_head_and_its_page_has_labels(folder, call, tmp_path, monkeypatch):
    pages = []
    report = __import__("manyheads.view.inspect", fromlist=["write_report"])
    write = report.write_report
    monkeypatch.setattr(report, "write_report", lambda page, path: (pages.append(page), write(page, path)))
    given = ("--data", folder / "reviews.csv", *COLUMNS, "--limit", 8, "--out", tmp_path)
    code, _, err = call("inspect", folder / "model", *given)
    assert code == 0, err
    examples = pages[0]["examples"]
    assert all(example["label"] in ("bad", "fine", "good") for example in examples)
    assert all(example["answer"]["kind"] == "class" for example in examples)
    assert {name for name, _ in examples[0]["answer"]["items"]} == {"bad", "fine", "good"}
    assert pages[0]["curve"]["quality"] == "accuracy"
    assert {"fisher", "gradient"} <= set(pages[0]["importance"])


@pytest.mark.parametrize("verb", ["roles", "diversity"])
def test_roles_and_diversity_read_the_rows(folder, call, tmp_path, verb):
    given = ("--data", folder / "reviews.csv", *COLUMNS, "--limit", 8, "--out", tmp_path, "--json")
    code, out, err = call(verb, folder / "model", *given)
    assert code == 0, err
    assert len(json.loads(out)["heads"]) == 6


def test_a_model_without_a_head_reads_the_texts_alone(folder, call, tmp_path):
    bert(hf.BertModel).save_pretrained(tmp_path / "body")
    tokenizer().save_pretrained(tmp_path / "body")
    given = ("--data", folder / "reviews.csv", "--text-column", "review", "--out", tmp_path / "out", "--json")
    code, out, err = call("importance", tmp_path / "body", *given)
    assert code == 0, err
    assert "column 'review'" in json.loads(out)["corpus"]
    code, _, err = call("importance", tmp_path / "body", *given, "--label-column", "stars")
    assert code == 2
    assert "has no task head whose labels can be read" in err


def test_a_pruned_image_model_still_reads_images(call, tmp_path):
    for number in range(24):
        where = tmp_path / "pictures" / ("cat", "dog")[number % 2]
        where.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number * 10, 90, 200 - number)).save(where / f"{number}.png")
    vit(id2label={0: "cat", 1: "dog"}).save_pretrained(tmp_path / "model")
    hf.ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(tmp_path / "model")
    data = ("--data", tmp_path / "pictures", "--json")
    code, out, err = call("prune", tmp_path / "model", *data, "--keep", 0.5, "-o", tmp_path / "small")
    assert code == 0, err
    assert json.loads(out)["measure"] == "accuracy"
    code, out, err = call("evaluate", tmp_path / "small", *data)
    assert code == 0, err
    assert json.loads(out)["examples"] == 24


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--data", "none.csv"], "there is no file none.csv"),
        (["--text-column", "review"], "text-column: it is for --data"),
        (["--data", "{reviews}", "--text-column", "body"], "has no column 'body'; it has review, stars"),
        (["--data", "{reviews}", "--text", "{reviews}"], "got --text and --data"),
        (["--data", "{reviews}", "--split", "dev"], "has no column 'split'"),
    ],
)
def test_mistakes_are_one_sentence(folder, call, tmp_path, arguments, sentence):
    arguments = [each.format(reviews=folder / "reviews.csv") for each in arguments]
    code, _, err = call("inspect", folder / "model", *arguments, "--out", tmp_path)
    assert code == 2
    assert sentence in err.replace("\n", " ")


def test_a_classifier_goes_from_a_table_to_a_smaller_onnx_file(folder, call, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    data = ("--data", folder / "reviews.csv", *COLUMNS)
    small = tmp_path / "small"
    code, out, err = call("prune", folder / "model", *data, "--keep", 0.5, "--export", "onnx", "-o", small)
    assert code == 0, err
    assert "As onnx in" in out
    assert "accuracy, 4 held-out sequences" in out
    card = json.loads((small / "card.json").read_text())
    assert card["measure"] == "accuracy"
    assert card["export"]["bytes"]["model.onnx"] == (small / "onnx" / "model.onnx").stat().st_size
    assert "onnx/model.onnx" in (small / "README.md").read_text()
    batch = tokenizer()(["a b c", "d"], padding=True, return_tensors="np")
    session = onnxruntime.InferenceSession(small / "onnx" / "model.onnx")
    logits = session.run(None, {one.name: batch[one.name] for one in session.get_inputs()})[0]
    model = mh.load(small).eval()
    expected = model(**tokenizer()(["a b c", "d"], padding=True, return_tensors="pt")).logits
    assert logits == pytest.approx(expected.detach().numpy(), abs=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--save", "cache=2"), "between 0 and 1"),
        (("--save", "heat=0.5"), "expected cache, parameters, latency"),
        (("--save", "cache=0.5"), "no cache to save"),
        (
            ("--save", "parameters=0.5", "--keep", 0.5),
            "expected one of --keep, --save, --kv-heads and --plan",
        ),
        (("--kv-heads", 2), "which 2 does not divide"),
        (("--kv-heads", 0), "at least 1"),
    ],
)
def test_prune_refuses_what_cannot_be_saved(folder, call, tmp_path, options, words):
    data = ("--data", folder / "reviews.csv", *COLUMNS)
    code, _, err = call("prune", folder / "model", *data, *options, "-o", tmp_path / "small")
    assert (code, words in " ".join(err.split())) == (2, True), err
    assert not (tmp_path / "small").exists()


def test_prune_merges_key_heads(folder, call, tmp_path):
    data = ("--data", folder / "reviews.csv", *COLUMNS)
    small = tmp_path / "small"
    code, out, err = call("prune", folder / "model", *data, "--kv-heads", 1, "-o", small)
    assert code == 0, err
    assert "6 key heads, now 2" in out
    assert "6 key and value heads" in (small / "README.md").read_text()
    card = json.loads((small / "card.json").read_text())
    assert (card["before"]["key_heads"], card["after"]["key_heads"]) == (6, 2)
