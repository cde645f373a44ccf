"""inspect: whole batches only, kept on Ctrl-C and errors, the same from one process and from many."""

import errno
import json
import os
import signal
import subprocess
import sys

import numpy
import pytest
import torch
import transformers as hf
from torch import distributed, nn

import manyheads as mh
from manyheads import cli
from manyheads.common import out_folder
from manyheads.heads import inspect as inspection
from manyheads.heads.inspect import Counted, merge_processes
from manyheads.models import open as models
from manyheads.view.inspect import inspect
from manyheads.view.terminal import inspect as terminal_inspect

FILES = ["heads.csv", "heads.json", "report.html", "summary.txt"]


def llama():
    """A tiny decoder with grouped heads, attention far from even."""
    config = hf.LlamaConfig(
        vocab_size=97,
        hidden_size=18,
        num_hidden_layers=3,
        num_attention_heads=6,
        head_dim=4,
        num_key_value_heads=3,
        intermediate_size=11,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = hf.LlamaModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4) if parameter.dim() > 1 else None
    return model


def no_attention():
    return nn.Sequential(nn.Embedding(97, 5), nn.Linear(5, 3))


def batches(number=3):
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(3, 97, (2, 5 + n), generator=generator)} for n in range(number)]


def same(a, b, within=0.0):
    assert a.rows == b.rows
    assert a.columns == b.columns
    for column in a.columns[6:]:
        torch.testing.assert_close(a[column], b[column], rtol=within, atol=within, equal_nan=True)


def files(folder):
    return sorted(path.name for path in folder.rglob("*"))


def test_it_is_what_watch_sees(tmp_path):
    model = llama().train()
    table = inspect(model, batches(), tokens={"special": range(9)}, out=tmp_path / "new")
    assert model.training
    with torch.no_grad(), mh.watch(model.eval(), "full", tokens={"special": range(9)}) as seen:
        for batch in batches():
            model(**batch)
    same(table, seen.table)
    same(mh.HeadTable.load(tmp_path / "new" / "heads.json"), table)
    assert files(tmp_path / "new") == FILES
    assert "causal layers.*.self_attn: 3 layers, 18 heads" in (tmp_path / "new" / "summary.txt").read_text()


def test_the_core_statistics_alone(tmp_path):
    table = inspect(llama(), batches(), statistics="core", out=tmp_path / "new")
    assert "entropy" in table.columns
    assert "confidence" not in table.columns
    same(mh.HeadTable.load(tmp_path / "new" / "heads.json"), table)
    assert files(tmp_path / "new") == FILES
    with pytest.raises(ValueError, match="statistics: expected 'core', 'logits' or 'full', got 'all'"):
        inspect(llama(), batches(), statistics="all")


def test_batches_as_tensors_tuples_and_dicts():
    model = llama()
    ids = [batch["input_ids"] for batch in batches()]
    same(inspect(model, ids), inspect(model, batches()))
    same(inspect(model, [(x, torch.ones_like(x)) for x in ids]), inspect(model, batches()))


def interrupt_at(model, call, times=1):
    """Press Ctrl-C while the model is in its middle layer, at the n-th batch."""
    calls = []

    def hook(*_):
        calls.append(None)
        if len(calls) == call:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    model.layers[1].mlp.register_forward_hook(hook)
    return model


def test_an_interruption_finishes_the_batch_and_keeps_what_was_counted(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    table = inspect(interrupt_at(llama(), 2), batches(4), out=tmp_path)
    assert signal.getsignal(signal.SIGINT) is before
    same(table, inspect(llama(), batches(2)))
    same(mh.HeadTable.load(tmp_path / "heads.json"), table)


def test_an_interruption_before_anything_was_counted(tmp_path):
    def pressed():
        signal.raise_signal(signal.SIGINT)
        yield from batches()

    with pytest.raises(KeyboardInterrupt):
        inspect(llama(), pressed(), out=tmp_path)
    assert files(tmp_path) == []


def test_an_interruption_does_not_disturb_the_writing(tmp_path, monkeypatch):
    def impatient(*arguments, save=mh.HeadTable.save):
        signal.raise_signal(signal.SIGINT)
        return save(*arguments)

    monkeypatch.setattr(mh.HeadTable, "save", impatient)
    with pytest.raises(KeyboardInterrupt):  # the second of the two tables is the second Ctrl-C
        inspect(llama(), batches(), out=tmp_path)
    assert files(tmp_path) == ["heads.json"]
    same(mh.HeadTable.load(tmp_path / "heads.json"), inspect(llama(), batches()))


def test_a_second_interruption_leaves_at_once_and_writes_nothing(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        inspect(interrupt_at(llama(), 3, times=2), batches(), out=tmp_path)
    assert files(tmp_path) == []
    assert signal.getsignal(signal.SIGINT) is before


def test_two_processes_do_not_share_a_folder(tmp_path):
    with out_folder.prepared(tmp_path), pytest.raises(ValueError, match=r"out: .* is in use by process \d+"):
        inspect(llama(), batches(), out=tmp_path)
    inspect(llama(), batches(), out=tmp_path)
    assert files(tmp_path) == FILES


def test_an_error_keeps_what_was_counted_before_it(tmp_path):
    broken = [*batches(2), {"input_ids": torch.full((1, 3), 97)}]
    with pytest.raises(ValueError, match=r"failed on a batch of input_ids \(1, 3\) \(IndexError: "):
        inspect(llama(), broken, out=tmp_path)
    same(mh.HeadTable.load(tmp_path / "heads.json"), inspect(llama(), batches(2)))


def test_a_model_without_attention():
    with pytest.raises(
        ValueError, match=r"MODEL: no attention was seen in the model; expected a transformer"
    ):
        inspect(no_attention(), [torch.ones(2, 3, dtype=torch.long)])


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_traced_model():
    traced = torch.jit.trace(nn.Linear(2, 3), torch.ones(1, 2))
    with pytest.raises(TypeError, match=r"traced or scripted .* pass the module it was made from"):
        inspect(traced, [torch.ones(1, 2)])


def test_no_batches():
    with pytest.raises(ValueError, match="batches: expected at least one, got none"):
        inspect(llama(), [])


def full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch):
    inspect(llama(), batches(1), out=tmp_path)
    kept = {name: (tmp_path / name).read_bytes() for name in FILES}
    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(
        OSError, match=r"writing under .* failed \(No space left on device\); make room or give"
    ):
        inspect(llama(), batches(), out=tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == kept


def test_a_folder_that_cannot_be_made_is_known_before_the_work(tmp_path):
    (tmp_path / "file").write_text("in the way")
    model = interrupt_at(llama(), 1, AssertionError("it ran"))
    with pytest.raises(OSError, match=r"out: .* cannot be written \(.*\); give another folder"):
        inspect(model, batches(), out=tmp_path / "file" / "out")


def as_process(monkeypatch, parts):
    """Play one process among several, whose counts are given."""
    monkeypatch.setenv("WORLD_SIZE", str(len(parts)))
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: len(parts))

    def gather(found, own):
        found[:] = [own, *parts[1:]]

    monkeypatch.setattr(distributed, "all_gather_object", gather)
    return merge_processes(parts[0])


def test_what_processes_count_adds_up(monkeypatch):
    one, two = (inspect(llama(), part) for part in (batches()[:1], batches()[1:]))
    parts = [Counted(one, 10, 1.0), Counted(two, 26, 3.0, stopped=True), Counted(missed={"x": "y"})]
    whole = as_process(monkeypatch, parts)
    assert (whole.units, whole.seconds, whole.stopped, whole.error) == (36, 3.0, True, None)
    assert whole.missed == {"x": "y"}
    same(whole.table, one.merge(two))


def test_an_error_of_another_process_is_known_to_all(monkeypatch):
    table = inspect(llama(), batches())
    whole = as_process(monkeypatch, [Counted(table, 36), Counted(error=ValueError("no room"))])
    with pytest.raises(ValueError, match="no room"):
        inspection.table_or_error(whole)


def test_processes_with_different_models(monkeypatch):
    other = llama()
    nn.init.zeros_(other.layers[0].self_attn.q_proj.weight)
    tables = [inspect(model, batches()) for model in (llama(), other)]
    with pytest.raises(ValueError, match=r"the processes made different models.* fixed seed"):
        as_process(monkeypatch, [Counted(table) for table in tables])


# The command


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a module of models and some ids, to stand in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "tiny_models", raising=False)
    source = "\n\n".join(map(source_of, (llama, no_attention)))
    (tmp_path / "tiny_models.py").write_text(
        f"import torch\nimport transformers as hf\nfrom torch import nn\n{source}"
    )
    numpy.save(tmp_path / "ids.npy", numpy.random.default_rng(0).integers(3, 97, (11, 13)))
    return tmp_path


def source_of(function):
    import inspect as python

    return python.getsource(function)


def command(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["manyheads", "inspect", *arguments])
    with pytest.raises(SystemExit) as done:
        cli.main()
    streams = capsys.readouterr()
    assert "Traceback" not in streams.err
    return done.value.code, streams.out, streams.err


def test_the_command_tells_and_says_where(here, monkeypatch, capsys):
    code, told, _ = command(monkeypatch, capsys, "tiny_models:llama", "--tokens", "ids.npy", "--out", "found")
    assert code == 0
    assert "tiny_models:llama on ids.npy: 143 tokens" in told
    assert "causal layers.*.self_attn: 3 layers, 18 heads" in told
    assert "found/heads.csv" in told
    assert files(here / "found") == FILES
    assert (here / "found" / "summary.txt").read_text().splitlines()[:9] == told.splitlines()[:9]
    table = mh.HeadTable.load("found/heads.json")
    assert table["tokens"].tolist() == [143.0] * 18
    assert {"rare", "frequent"} <= set(table.columns)


def test_the_command_for_machines(here, monkeypatch, capsys):
    code, told, _ = command(
        monkeypatch,
        capsys,
        "tiny_models:llama",
        "--tokens",
        "ids.npy",
        "--json",
        "--limit",
        "5",
        "--max-length",
        "7",
    )
    found = json.loads(told)
    assert code == 0
    assert (found["tokens"], found["stopped"], len(found["heads"])) == (65, False, 18)
    table = mh.HeadTable.load(f"{found['out']}/heads.json")
    assert found["heads"][4]["entropy"] == table["entropy"][4].item()
    assert found["fingerprint"] == table.model


def test_the_command_with_no_model_reads_our_own_text(here, monkeypatch, capsys):
    code, told, _ = command(monkeypatch, capsys, "--limit", "9")
    assert code == 0
    assert "MiniLM on built-in sample text" in told
    assert "attend to the previous token" in told
    assert files(here / "out" / "inspect") == FILES


def test_the_command_without_a_page(here, monkeypatch, capsys):
    found = ["tiny_models:llama", "--tokens", "ids.npy", "--out", "found"]
    code, told, said = command(monkeypatch, capsys, *found, "--no-page")
    assert code == 0
    assert "report.html" not in told
    assert "page" not in said
    assert files(here / "found") == [name for name in FILES if name != "report.html"]
    monkeypatch.setattr(terminal_inspect, "LONG", 0.0)
    _, told, said = command(monkeypatch, capsys, *found)
    assert "report.html" in told
    assert "Measuring for the page: about " in said
    assert "--no-page leaves it out." in said


def test_the_command_interrupted(here, monkeypatch, capsys):
    monkeypatch.setattr(
        models,
        "open_model",
        lambda name, opened=models.open_model, **options: interrupted(opened(name, **options)),
    )

    def interrupted(loaded):
        interrupt_at(loaded.model, 2)
        return loaded

    code, _, said = command(
        monkeypatch,
        capsys,
        "tiny_models:llama",
        "--tokens",
        "ids.npy",
        "--out",
        "found",
        "--batch-tokens",
        "26",
    )
    assert code == 130
    assert "Stopped after 52 of 143 tokens; they are kept." in said
    assert mh.HeadTable.load("found/heads.json")["tokens"][0] == 52


def test_the_command_on_a_full_disk_loses_nothing(here, monkeypatch, capsys):
    monkeypatch.setattr(os, "replace", full_disk)
    code, told, said = command(
        monkeypatch, capsys, "tiny_models:llama", "--tokens", "ids.npy", "--out", "found"
    )
    assert code == 2
    assert said.startswith("manyheads: out: writing under found failed (No space left on device); make room")
    assert files(here / "found") == []
    assert len(json.loads(told.splitlines()[-1])["heads"]) == 18


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["./nowhere"], "MODEL: there is no folder ./nowhere; expected a folder with config.json"),
        (["tiny_models:no_attention", "--tokens", "ids.npy"], "MODEL: no attention was seen in the model;"),
        (["tiny_models:llama"], "text: tiny_models:llama comes without a tokenizer; give --tokens"),
        (["tiny_models:llama", "--images", "."], "images: . holds no images;"),
        (["tiny_models:llama", "--tokens", "none.npy"], "tokens: there is no file none.npy"),
        (["tiny_models:llama", "--tokens", "ids.npy", "--max-length", "33"], "max-length: got 33, but the"),
        (["tiny_models:llama", "--tokens", "ids.npy", "--limit", "0"], "limit: got 0; expected 1 or more"),
        (["--tokens", "a", "--text", "b"], "got --text and --tokens; expected one of"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_and_leaves_nothing(here, monkeypatch, capsys, arguments, words):
    code, told, said = command(monkeypatch, capsys, *arguments, "--out", "found")
    assert code == 2
    assert said.startswith(f"manyheads: {words}")
    assert said.count("\n") == 1
    assert told == ""
    assert not (here / "found").exists() or files(here / "found") == []


def test_a_disk_that_is_really_full_keeps_the_table_on_the_terminal(here):
    """Files may not grow beyond a few bytes: one sentence, the numbers as JSON, nothing half-written."""
    limit = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64)); "
    start = limit + "sys.argv[0] = 'manyheads'; runpy.run_module('manyheads', run_name='__main__')"
    arguments = ["inspect", "tiny_models:llama", "--tokens", "ids.npy", "--out", "found"]
    found = subprocess.run([sys.executable, "-B", "-c", start, *arguments], capture_output=True, text=True)
    assert found.returncode == 2
    said = found.stderr.splitlines()[-1]
    assert said.startswith(
        "manyheads: out: writing under found failed (File too large); make room or give another"
    )
    assert "Traceback" not in found.stderr
    assert files(here / "found") == []
    assert len(json.loads(found.stdout.splitlines()[-1])["heads"]) == 18


def test_two_processes_count_what_one_does(here):
    arguments = [
        "-m",
        "manyheads",
        "inspect",
        "tiny_models:llama",
        "--tokens",
        "ids.npy",
        "--batch-tokens",
        "26",
    ]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    told = {}
    for name, launcher in (("one", []), ("two", torchrun)):
        found = subprocess.run(
            [sys.executable, *launcher, *arguments, "--out", name],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert found.returncode == 0, found.stderr
        told[name] = found.stdout
    assert told["two"].count("143 tokens") == 1  # only one of them speaks
    one, two = (mh.HeadTable.load(f"{name}/heads.json") for name in ("one", "two"))
    assert one["tokens"].tolist() == [143.0] * 18
    same(one, two, within=1e-6)


def test_unknown_words_are_told_everywhere(tmp_path, monkeypatch, capsys):
    """On the terminal, in the summary and for machines."""
    (tmp_path / "strange.txt").write_text("The cat saw ꙮ.\nIt ran to ꙮ and ꙮ.\n")
    monkeypatch.chdir(tmp_path)
    code, told, _ = command(monkeypatch, capsys, "--text", "strange.txt", "--out", "found")
    assert code == 0
    assert "Note: 18.8% of the tokens are unknown to the tokenizer" in " ".join(told.split())
    assert "up to 4,096 tokens at once, 9 in the longest sequence" in told
    assert "are unknown to the tokenizer" in " ".join((tmp_path / "found/summary.txt").read_text().split())
    _, told, _ = command(monkeypatch, capsys, "--text", "strange.txt", "--out", "found", "--json")
    assert json.loads(told)["unknown"] == pytest.approx(3 / 16)
