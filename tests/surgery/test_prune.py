"""Prune: the whole way in one call and by the command; elimination against its definition; the card."""

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import manyheads as mh
from manyheads.cli import app
from manyheads.heads.fingerprint import fingerprint
from manyheads.heads.table import HeadTable, Row
from manyheads.surgery.pruning_curve import pruning_curve


@pytest.fixture
def model():
    torch.manual_seed(0)
    return mh.Encoder(15, heads=5, layers=2, vocabulary=19).eval()


def texts(seed=1, count=60, length=11):
    return torch.randint(19, (count, length), generator=torch.Generator().manual_seed(seed))


def cosine(model, small, ids):
    with torch.no_grad():
        return nn.functional.cosine_similarity(model(ids).mean(1), small(ids).mean(1)).mean().item()


def test_prune_keeps_the_share_and_leaves_the_model_alone(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    small = mh.prune(model, [texts()], keep=0.5)
    assert sum(len(kept) for kept in small.original_heads.values()) == 5
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    bare = mh.prune(model, [texts()], keep=0.5, refit=False)
    assert cosine(model, bare, texts(2)) < cosine(model, small, texts(2)) <= 1.0


def test_rounds_reach_the_same_share_and_protect_by_the_uncut_models_numbers(model):
    steps = []
    small = mh.prune(
        model,
        [texts()],
        keep=0.4,
        rounds=3,
        protect={0: [0, 4], 1: [4]},
        progress=lambda stage, done, total: steps.append(stage),
    )
    kept = small.original_heads
    assert sum(map(len, kept.values())) == 4
    assert {0, 4} <= set(kept["blocks.0.attention"])
    assert 4 in kept["blocks.1.attention"]
    assert list(dict.fromkeys(steps)) == ["rank", "cut", "refit"]
    assert steps.count("cut") == 6


def test_recovery_comes_last(model):
    done = []
    small = mh.prune(
        model, [texts()], keep=0.5, recover=15, method="fisher", progress=lambda stage, *_: done.append(stage)
    )
    bare = mh.prune(model, [texts()], keep=0.5, method="fisher")
    assert done[-1] == "recover"
    assert done.count("recover") == 15
    assert cosine(model, bare, texts()) < cosine(model, small, texts())


def test_grouped_heads_are_pruned_all_the_way():
    torch.manual_seed(0)
    model = mh.Decoder(18, heads=6, layers=2, vocabulary=19, kv_heads=3).eval()
    small = mh.prune(model, [texts()], keep=0.7)
    sizes = [len(kept) for kept in small.original_heads.values()]
    assert 12 - 3.6 <= 12 - sum(6 - size for size in sizes) < 12
    bare = mh.prune(model, [texts()], keep=0.7, refit=False)
    with torch.no_grad():
        refitted, cut = ((m(texts(2)) - model(texts(2))).square().mean() for m in (small, bare))
    assert refitted < cut


def test_a_plan_is_followed(model):
    made = mh.plan(mh.importance(model, [texts()], "elimination"), keep=0.5, scope="layer")
    small = mh.prune(model, [texts()], using=made, refit=False)
    assert {site: sorted(set(range(5)) - set(made[site])) for site in made} == small.original_heads
    with pytest.raises(ValueError, match="rounds"):
        mh.prune(model, [texts()], using=made, rounds=2)


def test_bad_input_of_prune(model):
    with pytest.raises(ValueError, match="batches"):
        mh.prune(model, [])
    with pytest.raises(ValueError, match="keep: got 2"):
        mh.prune(model, [texts()], keep=2)
    with pytest.raises(ValueError, match="rounds: got 0"):
        mh.prune(model, [texts()], rounds=0)
    with pytest.raises(ValueError, match="method"):
        mh.prune(model, [texts()], method="guess")


class Heads(nn.Module):
    """Heads whose outputs are the input (batch, length, heads * 2), and an output that reads them."""

    def __init__(self, read):
        super().__init__()
        self.read = nn.Parameter(read)

    def forward(self, x):
        value = x.unflatten(-1, (-1, 2)).transpose(1, 2)
        alone = torch.eye(x.shape[1], dtype=torch.bool)
        out = nn.functional.scaled_dot_product_attention(value, value, value, attn_mask=alone)
        return (out.transpose(1, 2).flatten(2) @ self.read).flatten(1)


def test_elimination_knows_which_heads_stand_in_for_each_other():
    """Heads 0 and 1 say the same, loudly; head 2 something else, quietly. One of the twins goes for nothing,
    and then the other matters most.
    """
    generator = torch.Generator().manual_seed(0)
    loud, quiet = torch.randn(2, 5000, 7, 2, generator=generator, dtype=torch.float64)
    x = torch.cat([3 * loud, 3 * loud + 1e-5 * quiet.roll(1), 0.5 * quiet], -1)
    found = mh.importance(Heads(torch.eye(6, dtype=torch.float64)), [x], "elimination")["importance"]
    first, last = min(found[:2]), max(found[:2])
    assert first < 0.05 * found[2]
    assert found[2] < last


def test_elimination_is_the_cost_that_a_refit_leaves():
    """Against the definition: the variance of the removed heads that the others do not explain, through the
    model's output.
    """
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    x = torch.randn(400, 5, 6, generator=generator, dtype=torch.float64) @ mix
    read = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    model = Heads(read)
    found = mh.importance(model, [x], "elimination")["importance"]
    rows = x.flatten(0, 1)
    rows = rows - rows.mean(0)
    costs = []
    for head in range(3):
        r = torch.arange(2 * head, 2 * head + 2)
        k = torch.tensor([i for i in range(6) if i not in r])
        fit = torch.linalg.lstsq(rows[:, k], rows[:, r]).solution
        rest = (rows[:, r] - rows[:, k] @ fit) @ read[r]
        costs.append(rest.square().sum(1).mean().item())
    first = min(range(3), key=costs.__getitem__)
    assert int(found.argmin()) == first
    assert found[first] > 0


def test_the_card_counts_what_is_there():
    torch.manual_seed(0)
    model = mh.Decoder(12, heads=6, layers=2, vocabulary=19, kv_heads=3).eval()
    small = mh.cut(model, {0: [0, 1], 1: [0, 2, 4]}, texts()[:2])
    found = mh.card(model, small, [texts()], sizes=(1, 3), repeats=1)
    assert (found.before.heads, found.after.heads) == (12, 7)
    assert found.measure == "perplexity"
    assert found.before.cache == 2 * 3 * (2 + 2) * 4
    assert found.after.cache == (2 + 3) * (2 + 2) * 4
    assert found.before.parameters - found.after.parameters == 12 * (2 * 2 + 2 * 2 + 4) + 8 + 3 * (2 * 24 + 2)
    with torch.no_grad():
        logits = small(texts())[:, :-1].flatten(0, 1)
        expected = nn.functional.cross_entropy(logits, texts()[:, 1:].flatten()).exp().item()
    assert found.after.quality == pytest.approx(expected, rel=1e-4)
    assert set(found.after.seconds) == {1, 3}
    mine = mh.card(
        model, small, [texts()], metric=lambda m: float(len(list(m.parameters()))), sizes=(), repeats=1
    )
    assert mine.before.quality == mine.after.quality


def test_a_curve_has_a_point_for_every_share(model):
    found = pruning_curve(model, [texts()], [texts(2)], methods=["elimination", "random"], shares=[0.5, 0.8])
    assert list(found.lines) == ["elimination", "elimination, refitted", "random", "random, refitted"]
    assert all([share for share, _, _ in line] == [0.8, 0.5] for line in found.lines.values())
    kept = [next(value for share, value, _ in line if share == 0.5) for line in found.lines.values()]
    assert kept[0] < kept[1]
    assert kept[2] < kept[3]
    assert found.uncut == (1.0, 0.0)
    assert found.sequences == len(texts(2))


def test_the_progress_of_a_curve_ends_at_its_total():
    """Of two heads none can be removed at 0.9, which is skipped."""
    torch.manual_seed(0)
    model, steps = mh.Decoder(8, heads=2, layers=1, vocabulary=17).eval(), []
    batches = [torch.randint(17, (13, 5))]
    pruning_curve(
        model, batches, batches, methods=["random"], shares=[0.9, 0.5], refit=False,
        progress=lambda *step: steps.append(step),
    )  # fmt: skip
    assert steps[-1] == ("curve", 2, 2)


FACTORY = """
import torch
import manyheads as mh

class Letters:
    all_special_ids, pad_token_id = [], 0
    def __call__(self, text):
        return {"input_ids": [ord(letter) % 19 for letter in text]}

def make():
    torch.manual_seed(0)
    return mh.Encoder(15, heads=5, layers=2, vocabulary=19), Letters()

def size(model):
    return float(sum(p.numel() for p in model.parameters()))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "letters_for_pruning.py").write_text(FACTORY)
    words = [f"heads share the work number {i * 37 % 101} of many" for i in range(60)]
    (tmp_path / "text.txt").write_text("\n".join(words))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "letters_for_pruning", raising=False)
    return tmp_path


def command(*options):
    return CliRunner().invoke(app, ["prune", "letters_for_pruning:make", "--text", "text.txt", *options])


def test_the_command_writes_a_model_a_plan_and_a_card(folder):
    found = command("--keep", "0.5", "-o", "small", "--curve", "--metric", "letters_for_pruning:size")
    assert found.exit_code == 0, found.output
    assert "10 heads, 5 kept (50%)" in found.output
    document = json.loads(Path("small/card.json").read_text())
    assert document["measure"] == "size"
    assert document["after"]["quality"] < document["before"]["quality"]
    assert document["before"]["quality_se"] is None
    assert document["curve"]["measure"] == "size"  # also there, by the person's own measure
    assert document["curve"]["uncut"][0] == document["before"]["quality"]
    half = {share: value for share, value, _ in document["curve"]["lines"]["elimination"]}
    assert half[0.5] == document["after"]["quality"]
    assert document["corpus"] == "text.txt"
    assert document["fitted"]["sequences"] == 54
    assert document["held_out"]["sequences"] == document["sequences"] == 6
    assert "Fitted to text.txt (54 sequences" in found.output
    assert Path("small/curve.png").read_bytes().startswith(b"\x89PNG")
    small = mh.load("small")
    assert small.original_heads == document["original_heads"]
    again = command("--plan", "small/plan.json", "--no-refit", "--json", "-o", "again")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["original_heads"] == document["original_heads"]


def test_ctrl_c_in_a_recovery_keeps_the_model_and_the_state(folder, monkeypatch):
    from manyheads.surgery import recover

    real = recover._distance

    def interrupted(*args):
        signal.raise_signal(signal.SIGINT)
        return real(*args)

    monkeypatch.setattr(recover, "_distance", interrupted)
    found = command("--keep", "0.5", "--recover", "4", "-o", "small")
    assert found.exit_code == 130
    assert Path("small/card.json").exists()
    assert Path("small.recovery.safetensors").exists()
    monkeypatch.setattr(recover, "_distance", real)
    found = command("--keep", "0.5", "--recover", "4", "-o", "second")
    assert found.exit_code == 0
    assert not Path("second.recovery.safetensors").exists()


def test_heads_with_a_role_are_protected(folder, model):
    with torch.no_grad(), mh.watch(model) as seen:
        model(texts(count=2))
    rows = [Row(site.name, site.layer, h, h, h, site.kind) for site in seen.sites for h in range(site.heads)]
    words = ["retrieval" if row.layer == 1 else "sink" if row.head == 3 else "" for row in rows]
    table = HeadTable(rows, torch.ones(len(rows)), {}, fingerprint(model), labels={"roles": words})
    table.save("roles.json")
    first = seen.sites[0].name
    for given, kept in (("roles.json, 0.1", [1]), ("roles.json:retrieval,roles.json:sink", [3])):
        out = f"small{kept[0]}"
        found = command("--keep", "0.6", "--protect", given, "--no-refit", "--json", "-o", out)
        assert found.exit_code == 0, found.output
        assert json.loads(found.stdout)["original_heads"] == {first: kept}
    for given, said in (
        ("roles.json:flying", "there is no role 'flying'"),
        ("roles.json:induction", "no head in roles.json has the role induction"),
        ("elsewhere.json", "there is no file elsewhere.json"),
    ):
        assert said in str(command("--keep", "0.6", "--protect", given, "-o", "x").exception)
    replace(table, model="0123").save("roles.json")
    assert "of another model" in str(command("--keep", "0.6", "--protect", "roles.json", "-o", "x").exception)
    assert not Path("x").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "one of --keep, --save, --kv-heads and --plan"),
        (["--keep", "0.5", "--plan", "x.json"], "one of --keep, --save, --kv-heads and --plan"),
        (["--keep", "1.5"], "keep: got 1.5"),
        (["--plan", "x.json"], "there is no file"),
        (["--keep", "0.5", "--limit", "5"], "expected at least 20"),
        (["--keep", "0.5", "-o", "."], "already exists"),
        (["--keep", "0.5", "--protect", "three"], "layer.head"),
        (["--keep", "0.5", "--protect", "7.0"], "never called"),
        (["--keep", "0.5", "--recover", "-1"], "recover: got -1"),
        (["--keep", "0.5", "--metric", "nowhere:at_all"], "metric"),
        (["--keep", "0.5", "--method", "guess"], "method"),
        (
            ["--kv-heads", "1", "--protect", "0.1"],
            "protect: got '0.1' with --kv-heads",
        ),
        (["--kv-heads", "1", "--rounds", "2"], "rounds: got 2 with --kv-heads"),
        (["--plan", "x.json", "--floor", "2"], "floor: got 2 with --plan"),
        (["--save", "cache=0.3", "--uniform"], "uniform: got True with --save"),
        (["--save", "cache=0.5,cache=0.3"], "save: got cache twice"),
    ],
)
def test_bad_input_of_the_command(folder, options, said):
    found = command(*options)
    assert said in str(found.exception)
    assert isinstance(found.exception, ValueError)
    assert sorted(p.name for p in folder.iterdir() if p.suffix != ".pyc" and "__" not in p.name) == [
        "letters_for_pruning.py",
        "text.txt",
    ]


def test_the_command_fits_to_a_sample_and_says_so(folder):
    found = command("--keep", "0.5", "-o", "small", "--sample", "700", "--json")
    assert found.exit_code == 0, found.output
    document = json.loads(found.stdout)
    assert document["fitted"]["tokens"] <= 700 < 54 * 30
    assert document["held_out"]["sequences"] == 6
    count = document["fitted"]["sequences"]
    assert document["notes"] == [
        f"ranked and refitted on a sample: {count} of 54 sequences, {document['fitted']['tokens']} tokens"
    ]
    whole = json.loads(command("--keep", "0.5", "-o", "whole", "--sample", "0", "--json").stdout)
    assert whole["fitted"]["sequences"] == 54
    assert whole["notes"] == []


def test_a_recovery_reads_more_than_the_calibration(model, monkeypatch):
    from manyheads.surgery import prune as module

    read = {}
    monkeypatch.setattr(module, "learn", lambda small, batches, **_: read.update(learn=batches))
    monkeypatch.setattr(module, "fit", lambda small, batches, **_: read.update(fit=batches))
    some, all_texts = [texts(count=13)], [texts(count=13), texts(seed=2, count=17)]
    mh.prune(model, all_texts, 0.5, recover=3, method="fisher", calibration=some)
    assert [len(batch) for batch in read["fit"]] == [13]
    assert [len(batch) for batch in read["learn"]] == [13, 17]
    with pytest.raises(ValueError, match="calibration: expected at least one, got none"):
        mh.prune(model, all_texts, 0.5, calibration=[])
