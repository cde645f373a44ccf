"""The verbs on a trained model: train, resume, evaluate, predict, and the head tools on its folder."""

import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

import manyheads as mh
from manyheads.cli import app
from manyheads.common.locks import LOCK, locked
from manyheads.data.corpus import text
from manyheads.heads.importance import losses
from manyheads.models.open import open_model
from manyheads.tasks import restore

SIZES = ["--d-model", "12", "--heads", "3", "--layers", "1"]
STEPS = ["--steps", "4", "--batch-tokens", "200", "--evaluate-every", "2", "--evaluate-examples", "3"]


def call(*arguments, stdin=None):
    done = CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model of each task after a few steps on little data."""
    where = tmp_path_factory.mktemp("commands")
    (where / "text.txt").write_text("a few words, and a few more of them.\n" * 20)
    for language in ("en", "de"):
        lines = [f"{language} {'word ' * (n % 5)}{n}" for n in range(41)]
        (where / f"pairs.{language}").write_text("\n".join(lines))
    made = {
        "language": ["--data", where / "text.txt", "--context", 16],
        "translation": ["--data", where / "pairs", "--vocabulary", 270],
        "masked": ["--data", where / "text.txt", "--context", 16, "--masked"],
    }
    for name, options in made.items():
        out = where / name
        task = "language" if name == "masked" else name
        done = call("train", task, *options, *SIZES, *STEPS, "--out", out, "--tracker", "none", "--json")
        told = json.loads(done.stdout)
        assert (told["step"], told["ended"], told["out"]) == (4, "finished", str(out))
    return where


def test_training_again_needs_resume(folders):
    with pytest.raises(ValueError, match="already holds a run"):
        call("train", "language", "--out", folders / "language")
    again = ["train", "language", "--out", folders / "language", "--resume"]
    with pytest.raises(ValueError, match=r"names .*text.txt, which is not in the folder; name it yourself"):
        call(*again)
    again += ["--data", data_of(folders, "language")]
    done = call(*again, "--tracker", "none", "--json")
    assert json.loads(done.stdout)["step"] == 4
    with pytest.raises(ValueError, match=r"heads: .* began with 3, got 4"):
        call(*again, "--heads", 4)
    with pytest.raises(ValueError, match="holds a run of language; expected one of translation"):
        call("train", "translation", "--out", folders / "language", "--resume")


def data_of(folders, name):
    return folders / ("pairs" if name == "translation" else "text.txt")


PRIVATE = "the private words of somebody who trusts a folder\n" * 50


def downloaded(folders, where, data):
    """A folder as somebody else may have made it, who names a file of ours as its data."""
    shutil.copytree(folders / "language", where)
    config = json.loads((where / "config.json").read_text())
    config["training"]["data"] = str(data)
    (where / "config.json").write_text(json.dumps(config))
    return where


@pytest.mark.parametrize("way", ["outside", "dots", "link", "link beside"])
def test_a_folder_cannot_name_a_private_file(folders, tmp_path, way):
    private, where = tmp_path / "private.txt", tmp_path / "model"
    private.write_text(PRIVATE)
    data = {"outside": private, "dots": where / ".." / "private.txt"}.get(way, where / "data" / "text.txt")
    downloaded(folders, where, data)
    (where / "data").mkdir()
    if way == "link":
        (where / "data" / "text.txt").symlink_to(private)
    elif way == "link beside":  # of a folder of texts, the others are read as well
        (where / "data" / "text.txt").write_text("a few words, " * 50)
        (where / "data" / "b.txt").symlink_to(private)
    out = tmp_path / "out"
    for verb in (["inspect", where, "--out", out], ["evaluate", where]):
        with pytest.raises(ValueError, match=r"MODEL: .* names .*, which is not in the folder.*--data"):
            call(*verb)
    assert not any("private words" in file.read_text(errors="replace") for file in out.rglob("*.*"))
    with pytest.raises(ValueError, match=r"data: the run in .*; name it yourself"):
        call("train", "language", "--resume", "--out", where)


def test_serve_says_how_to_name_what_a_folder_was_trained_on(folders):
    with pytest.raises(ValueError, match=r"which is not in the folder") as raised:
        call("serve", folders / "language")
    said = str(raised.value)
    assert said.endswith(
        "it is read only if you name it; give what to measure on: --text FILE, one text per line"
    )
    assert "--data" not in said  # which serve does not have


def test_a_folder_may_bring_its_data_along(folders, tmp_path):
    where = downloaded(folders, tmp_path / "model", tmp_path / "model" / "data.txt")
    (where / "data.txt").write_text("a few words, and a few more of them.\n" * 20)
    assert json.loads(call("evaluate", where, "--json").stdout)["examples"] > 0


def test_what_a_person_names_is_read(folders, tmp_path):
    private = tmp_path / "private.txt"
    private.write_text("a few words, and a few more of them.\n" * 20)
    where = downloaded(folders, tmp_path / "model", private)
    assert json.loads(call("evaluate", where, "--data", private, "--json").stdout)["examples"] > 0


def test_a_second_run_into_the_folder_of_a_running_one_is_refused(folders, tmp_path):
    out = tmp_path / "run"
    unfinished = out / "checkpoints" / ".step-00000002.1-0"
    with locked(out / LOCK, "out: there"):
        unfinished.mkdir(parents=True)
        for resume in ([], ["--resume"]):
            with pytest.raises(ValueError, match=r"out: .*run is in use by process \d+; wait for it"):
                call("train", "language", "--data", data_of(folders, "language"), "--out", out, *resume)
        assert unfinished.exists()


def test_a_task_that_is_none_is_told():
    assert call("train", "painting").exit_code == 2


@pytest.mark.parametrize(("name", "metric"), [("language", "bits_per_byte"), ("translation", "bleu")])
def test_evaluate_says_what_training_said(folders, name, metric):
    data = data_of(folders, name)
    told = json.loads(call("evaluate", folders / name, "--data", data, "--json").stdout)
    kept = json.loads((folders / name / "metrics.json").read_text())
    assert told["metrics"][metric] == pytest.approx(kept[metric], rel=1e-5)
    others = [".txt"] if name == "language" else [".en", ".de"]
    for ending in others:  # the same, and not the file that was learned from: all of it is read
        source = data if name == "language" else data.with_name(f"{data.name}{ending}")
        (folders / f"other{ending}").write_text(source.read_text())
    other = folders / ("other.txt" if name == "language" else "other")
    assert (
        json.loads(call("evaluate", folders / name, "--data", other, "--json").stdout)["examples"]
        > (told["examples"])
    )


def test_predict(folders):
    done = call("predict", folders / "translation", "--json", stdin="en 7\nen word 8\n")
    told = [json.loads(line) for line in done.stdout.splitlines()]
    task, model = restore(folders / "translation"), mh.load(folders / "translation")
    assert [line["input"] for line in told] == ["en 7", "en word 8"]
    assert [line["output"] for line in told] == task.predict(model, ["en 7", "en word 8"])
    told = call("predict", folders / "language", "a few", "--new-tokens", 5, "--temperature", 0, "--json")
    assert json.loads(told.stdout)["output"].startswith("a few")
    with pytest.raises(
        ValueError,
        match="beams: not an option of language; expected one of its own: new_tokens, ",
    ):
        call("predict", folders / "language", "a few", "--beams", 3)
    with pytest.raises(ValueError, match="not a model that manyheads trained"):
        call("predict", folders, "a few")


def test_predict_fills_in(folders):
    told = json.loads(call("predict", folders / "masked", "a <hidden>ew w<hidden>rds", "--json").stdout)
    assert len(told["output"]) == len("a few words")
    assert [told["output"][i] for i in (0, 1, 3, 4)] == ["a", " ", "e", "w"]
    with pytest.raises(ValueError, match="expected <hidden>"):
        call("predict", folders / "masked", "nothing to fill in")


@pytest.mark.parametrize("name", ["language", "translation"])
def test_head_tools_take_the_folder(folders, name):
    loaded = open_model(str(folders / name))
    corpus = text(loaded, limit=5)
    with torch.no_grad(), mh.watch(loaded.model) as seen:
        for _, batch in corpus.batches():
            loaded.model(**batch)
    assert len(seen.table) == (3 if name == "language" else 9)
    if name == "language":
        assert seen.table["tokens"][0] == sum(corpus.sizes)


def test_a_cut_model_keeps_its_task(folders, tmp_path):
    loaded = open_model(str(folders / "translation"))
    corpus = text(loaded, limit=5)
    _, batch = next(corpus.batches())
    small = mh.cut(loaded.model, {"encoder.blocks.0.attention": [1]}, batch)
    mh.save(small, tmp_path / "small", loaded.tokenizer())
    data = data_of(folders, "translation")
    told = json.loads(call("evaluate", tmp_path / "small", "--data", data, "--json").stdout)
    assert told["metrics"]["loss"] > 0
    again = mh.load(tmp_path / "small")
    with torch.no_grad():
        assert torch.equal(again(**batch), small(**batch))


@pytest.mark.parametrize("name", ["language", "translation", "masked"])
def test_the_verbs_on_heads_take_the_folder(folders, tmp_path, name):
    lines = tmp_path / "lines.txt"
    lines.write_text("en word 3\nen word word 17\nsome more of them\n" * 9)
    heads = 9 if name == "translation" else 3
    common = [folders / name, "--text", lines, "--json"]
    for verb in ("inspect", "roles", "importance"):
        told = json.loads(call(verb, *common, "--out", tmp_path / verb).stdout)
        assert told, verb
        written = sorted(path.name for path in (tmp_path / verb).iterdir())
        assert written, verb
    call("prune", *common, "--keep", 0.6, "--out", tmp_path / "small")
    small = mh.load(tmp_path / "small")
    kept = sum(part.heads for part in small.modules() if isinstance(part, mh.MultiHeadAttention))
    assert heads * 0.6 <= kept < heads
    before, after = (
        json.loads(call("evaluate", folder, "--data", data_of(folders, name), "--json").stdout)["metrics"][
            "loss"
        ]
        for folder in (folders / name, tmp_path / "small")
    )
    assert after == pytest.approx(before, rel=0.2)
    text = "a <hidden>ew" if name == "masked" else "a few"
    assert json.loads(call("predict", tmp_path / "small", text, "--json").stdout)["input"] == text


def test_losses_read_our_batches_as_those_of_others():
    torch.manual_seed(0)
    logits, ids, lengths = torch.randn(3, 7, 11), torch.randint(11, (3, 7)), torch.tensor([7, 2, 5])
    real = torch.arange(7) < lengths[:, None]
    ours = losses.causal(logits, {"x": ids, "lengths": lengths})
    assert torch.equal(ours, losses.causal(logits, {"input_ids": ids, "attention_mask": real.long()}))
    assert not torch.equal(ours, losses.causal(logits, {"input_ids": ids}))
    ours = losses.seq2seq(logits, {"source": ids[:, :3], "target": ids, "target_lengths": lengths})
    others = {"input_ids": ids[:, :3], "decoder_input_ids": ids, "decoder_attention_mask": real.long()}
    assert torch.equal(ours, losses.seq2seq(logits, others))


@pytest.mark.parametrize("loss", ["causal", "seq2seq", "masked"])
def test_importance_by_the_loss_of_training(folders, tmp_path, loss):
    lines = tmp_path / "lines.txt"
    lines.write_text("en word 3\nen word word 17\n" * 3)
    name = {"causal": "language", "seq2seq": "translation"}.get(loss, loss)
    options = ["--text", lines, "--method", "gradient", "--loss", loss, "--out", tmp_path / "out"]
    assert call("importance", folders / name, *options).exit_code == 0


VERBS = ["inspect", "roles", "diversity", "importance", "prune", "serve", "evaluate", "predict"]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("device", ["gpu", "meta"])
def test_a_device_that_is_not_there_is_told(verb, device, folders, tmp_path):
    out = {"serve": [], "evaluate": [], "predict": ["a few"]}.get(verb, ["--out", tmp_path / "out"])
    out += ["--keep", 0.5] if verb == "prune" else []
    with pytest.raises(ValueError, match=rf"device: got '{device}'; expected cpu, or"):
        call(verb, folders / "language", *out, "--device", device)


def test_a_device_that_is_there_is_used(folders):
    answers = [
        call("predict", folders / "language", "a few", *how).stdout for how in ((), ("--device", "cpu"))
    ]
    assert answers[0] == answers[1]


def test_heads_are_kept_diverse(folders, tmp_path):
    kept = ["--diversity", "orthogonality=0.1,attention=0.01", "--orthogonal", "key"]
    data = ["--data", data_of(folders, "language"), "--context", 16]
    out = tmp_path / "diverse"
    call("train", "language", *data, *SIZES, *STEPS, *kept, "--out", out, "--tracker", "none", "--json")
    last = json.loads((out / "log.jsonl").read_text().splitlines()[-1])
    assert sorted(last["diversity"]) == ["attention", "orthogonality"]
    with pytest.raises(ValueError, match="diversity: got 'orthogonality'; expected terms with their weights"):
        call("train", "language", *data, "--diversity", "orthogonality", "--out", tmp_path / "none")
    assert not (tmp_path / "none").exists()
    assert "()" not in call("train", "language", "--help").stdout
