"""Runs with terms and constraints: what they do to the heads, the log, checkpoints and the kept weights."""

import pytest
import torch
from safetensors.torch import load_file

import manyheads as mh
from manyheads.tasks.language import Language
from manyheads.training import checkpoint
from manyheads.training.log import read
from manyheads.training.options import Options
from manyheads.training.train import train

SMALL = {"d_model": 10, "heads": 5, "layers": 2, "context": 13}
QUICK = {
    "batch_tokens": 130, "evaluate_every": 4, "evaluate_examples": 7, "save_every": 3, "watch_every": 5,
    "warmup": 2, "learning_rate": 0.01, "steps": 9,
}  # fmt: skip


class KilledError(Exception):
    pass


def run(text, out, *, kill_after=None, resume=False, task=None, **options):
    def kill(report):
        if report.step == kill_after:
            raise KilledError

    task = task or Language(dropout=0.1, **SMALL)
    return train(task, text, out=out, resume=resume, callbacks=[kill], **(QUICK | options))


def similarity(model):
    """The mean similarity of what the heads' queries read."""
    ids = torch.zeros(1, 13, dtype=torch.long)
    terms = mh.diversity_terms(model, orthogonality=1.0, roles=["query"], batch=ids)
    terms.loss()
    return terms.values["orthogonality"]


DIVERSE = [
    {"diversity": "orthogonality=0.1,attention=0.5,outputs=0.1,values=0.1"},
    {"orthogonal": "query,key", "ema": 0.8, "accumulate": 2},
    {"orthogonal": "query", "diversity": "attention=0.1", "precision": "bf16"},
]


@pytest.mark.parametrize("options", DIVERSE, ids=["terms", "constraint, averaged", "both, bf16"])
def test_killed_runs_go_on_to_the_bit(text, tmp_path, options):
    whole = run(text, tmp_path / "whole", **options)
    broken = tmp_path / "broken"
    with pytest.raises(KilledError):
        run(text, broken, kill_after=5, **options)  # after the first checkpoint
    again = run(text, broken, resume=True, **options)
    assert read(tmp_path / "whole" / "log.jsonl") == read(broken / "log.jsonl")
    last = [checkpoint.list_checkpoints(out / "checkpoints")[0] for out in (tmp_path / "whole", broken)]
    for file in sorted(last[0].glob("*.safetensors")):
        one, other = load_file(file), load_file(last[1] / file.name)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_term_is_logged_and_falls(text, tmp_path):
    options = {"diversity": "orthogonality=3", "steps": 40, "watch_every": 0, "evaluate_every": 40}
    result = run(text, tmp_path / "out", **options)
    logged = [line["diversity"]["orthogonality"] for line in read(tmp_path / "out" / "log.jsonl")]
    assert logged[-1] < 0.6 * logged[0]
    plain = run(text, tmp_path / "plain", **(options | {"diversity": ""}))
    assert similarity(result.model) < similarity(plain.model)
    assert "diversity" not in read(tmp_path / "plain" / "log.jsonl")[0]
    assert logged[0] > 0


def test_the_kept_weights_of_a_constrained_run_are_plain_and_orthogonal(text, tmp_path):
    result = run(text, tmp_path / "out", orthogonal="query,key,value,output", ema=0.5)
    plain = run(text, tmp_path / "plain")
    names = sorted(load_file(tmp_path / "plain" / "model.safetensors"))
    assert sorted(load_file(tmp_path / "out" / "model.safetensors")) == names
    loaded = mh.load(tmp_path / "out")
    for model in (result.model, loaded):
        assert similarity(model) < 1e-9
        assert [name for name, _ in model.named_parameters()] == [n for n, _ in loaded.named_parameters()]
    assert similarity(plain.model) > 0.01
    ids = torch.randint(5, (2, 11))
    assert torch.equal(result.model.eval()(ids), loaded(ids))


@pytest.mark.parametrize("options", [{"diversity": "orthogonality=2,outputs=1"}, {"orthogonal": "query"}])
def test_the_parts_of_a_batch_make_the_same_update(text, tmp_path, options):
    task = Language(**SMALL)
    run(text, tmp_path / "one", task=task, **options)
    run(text, tmp_path / "three", task=task, accumulate=3, **options)
    for a, b in zip(*(read(tmp_path / name / "log.jsonl") for name in ("one", "three")), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)
        assert a["gradient_norm"] == pytest.approx(b["gradient_norm"], rel=1e-2)
        assert a.get("diversity", {}) == pytest.approx(b.get("diversity", {}), abs=1e-3)


def test_resuming_checks_the_options(text, tmp_path):
    with pytest.raises(KilledError):
        run(text, tmp_path / "out", kill_after=3, diversity="attention=0.1")
    with pytest.raises(ValueError, match=r"diversity: the run in .* began with 'attention=0.1', got ''"):
        run(text, tmp_path / "out", resume=True)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "diversity",
            "orthogonality",
            "diversity: got 'orthogonality'; expected terms with their weights, as",
        ),
        ("diversity", "angles=1", "diversity: expected some of orthogonality, outputs, .*, got 'angles'"),
        ("diversity", "outputs=-1", "outputs: expected a number, 0 or more, got -1.0"),
        ("diversity", "outputs=1,outputs=2", "got outputs twice"),
        ("diversity", "outputs=0", "expected a weight above 0"),
        ("orthogonal", "query,keys", "orthogonal: expected some of query, key, value, output, got 'keys'"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(name, value, message):
    with pytest.raises(ValueError, match=message):
        Options(**{name: value})


def test_heads_too_wide_to_be_orthogonal_are_refused(text, tmp_path):
    task = Language(**SMALL | {"heads": 5, "d_key": 3})
    with pytest.raises(ValueError, match="5 heads of 3 need 15 dimensions, and there are 10"):
        run(text, tmp_path / "out", task=task, orthogonal="query")
    run(text, tmp_path / "out", steps=1)  # the folder is free: no run had begun


def test_a_constraint_does_not_go_with_heads_that_change():
    with pytest.raises(ValueError, match="orthogonal: query and dynamic were given; expected one of them"):
        Options(orthogonal="query", dynamic=True)


def test_terms_follow_heads_that_change(text, tmp_path):
    """The term reads the rows of the heads that are left."""
    options = {"diversity": "orthogonality=0.1,outputs=0.1", "dynamic": True, "final_heads": 0.6}
    result = run(text, tmp_path / "out", steps=40, save_every=40, evaluate_every=40, **options)
    assert result.dynamic.head_steps < 40 * 10
    lines = read(tmp_path / "out" / "log.jsonl")
    assert all(0 <= line["diversity"]["orthogonality"] <= 1 for line in lines)
