"""Heads that change while a model trains: decisions, budgets, any model, bad input, resuming to the bit."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.cut_models import MODELS
from torch import nn

import manyheads as mh
from manyheads.capture.weights import projections
from manyheads.common.errors import FailedChangeError
from manyheads.common.run_batch import run
from manyheads.tasks.language import Language
from manyheads.training import checkpoint
from manyheads.training.log import read
from manyheads.training.train import train

WORDS = 31


def loss_of(model, ids):
    logits = model(ids[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def batches(number, seed=0):
    """Sequences that repeat themselves: there is something to attend to."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(WORDS, (7, 5), generator=generator).repeat(1, 2) for _ in range(number)]


def decoder(heads=5, **options):
    torch.manual_seed(1)
    return mh.Decoder(20, heads=heads, layers=2, vocabulary=WORDS, **options)


def fit(model, dynamic, optimizer, data, run_model=None):
    acts = []
    for ids in data:
        loss = dynamic.loss(model if run_model is None else run_model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        acts += dynamic.step(ids, loss)
    return acts


def changing(model, optimizer=None, loss=loss_of, **options):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    defaults = {"steps": 24, "heads": 0.5, "start": 6, "end": 18, "every": 4}
    return mh.DynamicHeads(model, optimizer, loss, **(defaults | options)), optimizer


def distance_to(model):
    """A loss by which every head of this model is needed, if anything reads it."""
    wanted = copy.deepcopy(model).eval()

    def distance(model, ids):
        with torch.no_grad():
            target = wanted(ids)
        return loss_of(model, ids) + 30 * (model(ids) - target).square().mean()

    return distance


def heads_of(model):
    return [block.attention.heads for block in model.blocks]


def test_the_budget_is_met_and_every_act_says_why():
    model = decoder()
    dynamic, optimizer = changing(model)
    acts = fit(model, dynamic, optimizer, batches(24))
    assert sum(heads_of(model)) == 5
    assert acts == dynamic.acts
    assert {act.kind for act in acts} <= {"cut", "reseed", "split", "add"}
    for act in acts:
        assert act.step in (6, 10, 14, 18)
        assert f"step {act.step}: {act.kind} layer {act.layer} head {act.heads[0]} (" in str(act)
        assert "removing it costs" in act.reason or "every head here matters" in act.reason
    assert dynamic.history[0] == (0, {"blocks.0.attention": 5, "blocks.1.attention": 5})
    assert list(dynamic.history[-1][1].values()) == heads_of(model)
    # counted by hand: the heads of each step, before the act after it
    alive, total = dict(dynamic.history), 0
    for step in range(24):
        now = [heads for at, heads in alive.items() if at <= step][-1]
        total += sum(now.values())
    assert dynamic.head_steps == total


def test_the_heads_that_go_are_those_that_cost_least():
    """Heads that nothing reads go first, whatever their gradients."""
    model = decoder()
    idle = {0: [1, 3], 1: [0, 2]}
    with torch.no_grad():
        for layer, numbers in idle.items():
            for head in numbers:
                model.blocks[layer].attention.output.weight[:, 4 * head : 4 * head + 4] = 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    dynamic, _ = changing(model, optimizer, distance_to(model), heads=6, start=3, end=9, every=3)
    fit(model, dynamic, optimizer, batches(9))
    gone = {0: set(range(5)) - set(model.original_heads["blocks.0.attention"])}
    gone[1] = set(range(5)) - set(model.original_heads["blocks.1.attention"])
    assert gone == {layer: set(numbers) for layer, numbers in idle.items()}
    assert all("costs 0 +- 0" in act.reason for act in dynamic.acts)


def test_prices_are_the_losses_without_the_heads():
    model = decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    dynamic, _ = changing(model, optimizer, heads=9, start=4, end=4)
    before, data = copy.deepcopy(model), batches(4)
    [act] = fit(model, dynamic, optimizer, data)
    with torch.no_grad():
        full = torch.stack([loss_of(before, ids) for ids in data]).double()
        with mh.silence(before, {act.site: list(act.heads)}):
            without = torch.stack([loss_of(before, ids) for ids in data]).double()
    difference = without - full
    mean, error = difference.mean().item(), difference.std().item() / 2
    assert f"removing it costs {mean:.2g} +- {error:.2g}; the loss varies by" in act.reason


def test_twins_begin_anew():
    model = decoder(heads=4)
    attention = model.blocks[0].attention
    with torch.no_grad():
        for linear in (attention.query, attention.key, attention.value):
            linear.weight[5:10] = 1.01 * linear.weight[:5]  # the very same keys would look like a shared head
        attention.output.weight[:, 5:10] = 0.01 * attention.output.weight[:, :5]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    dynamic, _ = changing(model, optimizer, heads=1.0, start=8, end=8)
    acts = fit(model, dynamic, optimizer, batches(8))
    [anew] = [act for act in acts if act.kind == "reseed"]
    assert (anew.layer, anew.heads) == (0, (1,))
    assert "another head says the same (CKA 1.00)" in anew.reason
    rows = attention.query.weight.detach()
    assert (rows[5:10] @ rows[:5].T).abs().max() < 1e-5
    assert attention.output.weight[:, 5:10].abs().max() == 0.0


@pytest.mark.parametrize("kind", ["add", "split"])
def test_saturated_layers_grow_within_the_budget(kind):
    """Losses that do not vary make every head matter; the widths leave room for one more head each."""
    model = decoder(heads=3, d_key=5, d_value=5)
    if kind == "split":
        with torch.no_grad():
            for block in model.blocks:
                block.attention.output.weight[:, :5] *= 8.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    dynamic, _ = changing(model, optimizer, distance_to(model), heads=8, start=4, end=16, every=4)
    data = batches(1)
    before = loss_of(model, data[0])
    for _ in range(16):
        dynamic.step(data[0], 1.0)
    torch.testing.assert_close(loss_of(model, data[0]), before)
    kinds = [act.kind for act in dynamic.acts]
    assert kinds[0] == kind
    assert 6 < sum(heads_of(model)) <= 8
    assert "every head here matters" in dynamic.acts[kinds.index(kind)].reason
    loss_of(model, data[0]).backward()


def outputs_loss(model, batch):
    found = run(model, batch)
    return (found if isinstance(found, torch.Tensor) else found[0]).float().square().mean()


@pytest.mark.parametrize("kind", ["gpt2", "llama", "nn.TransformerEncoder"])
def test_any_model_that_can_be_cut(kind):
    make, batch = MODELS[kind]
    torch.manual_seed(0)
    model = make().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dynamic = mh.DynamicHeads(model, optimizer, outputs_loss, steps=5, heads=0.7, start=2, end=5, every=2)
    for _ in range(5):
        loss = outputs_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dynamic.step(batch, loss)
    counts = [sum(heads.values()) for _, heads in dynamic.history]
    assert counts[-1] <= round(0.7 * counts[0]) < counts[0]
    assert all(act.kind != "none" for act in dynamic.acts)
    sites = projections(model.eval(), batch)
    assert {name: len(site.heads) for name, site in sites.items()} == dynamic.history[-1][1]


def test_a_compiled_model_goes_on():
    torch._dynamo.reset()
    model = decoder()
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    dynamic = mh.DynamicHeads(compiled, optimizer, loss_of, steps=6, heads=6, start=3, end=5, every=2)
    other = decoder()
    others = torch.optim.AdamW(other.parameters(), lr=0.01)
    plain = mh.DynamicHeads(other, others, loss_of, steps=6, heads=6, start=3, end=5, every=2)
    fit(model, dynamic, optimizer, batches(6), compiled)
    fit(other, plain, others, batches(6))
    assert heads_of(model) == heads_of(other) != [5, 5]
    ids = batches(1)[0]
    torch.testing.assert_close(compiled(ids), other(ids))
    torch._dynamo.reset()


def test_the_training_steps_are_those_of_a_run_without_it():
    """Nothing but an act changes the run, and acts leave the caller's random numbers alone."""
    plain, watched = decoder(dropout=0.2), decoder(dropout=0.2)
    dynamic, optimizer = changing(watched, steps=50, start=6, end=50)
    other = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for model, one in ((plain, other), (watched, optimizer)):
        torch.manual_seed(4)
        for ids in batches(5):
            loss = loss_of(model, ids)
            loss.backward()
            one.step()
            one.zero_grad()
            if model is watched:
                dynamic.step(ids, loss)
        torch.rand(3)
    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a, b)


def test_state_goes_through_json():
    model = decoder()
    dynamic, optimizer = changing(model)
    data = batches(24)
    fit(model, dynamic, optimizer, data[:12])
    state = json.loads(json.dumps(dynamic.state_dict()))
    twin = copy.deepcopy(model)
    theirs = torch.optim.AdamW(twin.parameters(), lr=0.01)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again, _ = changing(twin, theirs)
    again.load_state_dict(state)
    again._batches.extend(data[9:12])
    fit(model, dynamic, optimizer, data[12:])
    fit(twin, again, theirs, data[12:])
    assert again.acts == dynamic.acts
    assert again.history == dynamic.history
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


def test_bad_input_is_refused_before_anything_changes():
    model = decoder()
    before = copy.deepcopy(model.state_dict())
    ids = batches(1)[0]
    stranger = torch.optim.SGD(decoder().parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"optimizer: it holds none of the model's trainable parameters"):
        changing(model, stranger)
    partly = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"optimizer: it holds \d+ of \d+ of the model's trainable"):
        changing(model, partly)
    for heads, message in (
        (1, r"heads: 1 cannot be met: each of the 2 attention modules keeps at least one"),
        (0.1, r"heads: 0.1 of 10 heads is 1, which cannot be met.*expected from 2 to 10 heads"),
        (11, r"heads: 11 is more than the widths allow.*expected from 2 to 10 heads"),
    ):
        dynamic, _ = changing(model, heads=heads)
        with pytest.raises(ValueError, match=message):
            dynamic.step(ids, 1.0)
    for options, message in (
        ({"heads": 0}, "heads: expected a number of heads"),
        ({"heads": True}, "heads: expected a number of heads"),
        ({"start": 9, "end": 5}, "start, end: expected steps in order"),
        ({"end": 99}, "start, end: expected steps in order up to 24"),
        ({"every": 0}, "every: expected 1 or more, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            changing(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="got it wrapped in DataParallel"):
        mh.DynamicHeads(nn.DataParallel(model), optimizer, loss_of, steps=9)
    many = mh.DynamicHeads(model, optimizer, lambda model, ids: model(ids), steps=9)
    with pytest.raises(
        ValueError, match=r"loss: expected a function \(model, batch\) that returns one number"
    ):
        many.step(ids, 1.0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Normed(nn.Module):
    """Attention with one norm over the queries of all heads: none of them can be cut."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(WORDS, 12), nn.LayerNorm(12)
        self.query, self.key, self.value, self.output = (nn.Linear(12, 12) for _ in range(4))
        self.head = nn.Linear(12, WORDS)

    def forward(self, ids):
        x = self.embedding(ids)
        q, k, v = self.norm(self.query(x)), self.key(x), self.value(x)
        q, k, v = (part.unflatten(-1, (3, 4)).transpose(1, 2) for part in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(x + self.output(out))


def test_models_whose_heads_cannot_be_cut_are_named():
    torch.manual_seed(0)
    model = Normed()
    dynamic, _ = changing(model)
    with pytest.raises(ValueError, match=r"model: none of its heads can be cut; at '': .*norm"):
        dynamic.step(batches(1)[0], 1.0)
    plain = nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS))
    dynamic, _ = changing(plain)
    with pytest.raises(ValueError, match="model: no attention was seen in it"):
        dynamic.step(batches(1)[0], 1.0)


def test_a_change_that_fails_is_logged_and_changes_nothing(monkeypatch):
    from manyheads.training import dynamic_heads

    def broken(*_):
        raise FailedChangeError("the copy differs\nin many places")

    monkeypatch.setattr(dynamic_heads, "cut", broken)
    model = decoder()
    dynamic, optimizer = changing(model)
    acts = fit(model, dynamic, optimizer, batches(7))
    assert [str(act) for act in acts] == ["step 6: nothing changed: the copy differs"]
    assert heads_of(model) == [5, 5]


# Our loop.

SMALL = {"d_model": 20, "heads": 5, "layers": 2, "context": 13}
QUICK = {
    "batch_tokens": 130, "evaluate_every": 5, "evaluate_examples": 7, "save_every": 3, "watch_every": 5,
    "warmup": 2, "learning_rate": 0.01, "steps": 15, "dynamic": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("dynamic") / "text.txt"
    path.write_text("".join(f"{n} and {n + 1} are {2 * n + 1}.\n" for n in range(97)), encoding="utf-8")
    return str(path)


class KilledError(Exception):
    pass


def run_loop(text, out, *, kill_after=None, resume=False, **options):
    def kill(report):
        if report.step == kill_after:
            raise KilledError

    task = Language(dropout=0.1, **SMALL)
    return train(task, text, out=out, resume=resume, callbacks=[kill], **(QUICK | options))


def files(out):
    last = checkpoint.list_checkpoints(out / "checkpoints")[0]
    tensors = {f"{file.stem}/{name}": value for file in last.glob("*.safetensors")
               for name, value in load_file(file).items()}  # fmt: skip
    tensors |= load_file(out / "model.safetensors")
    state = json.loads((last / "state.json").read_text())
    return read(out / "log.jsonl"), json.loads((out / "metrics.json").read_text()), state, tensors


@pytest.mark.parametrize(
    "options",
    [{}, {"ema": 0.8, "accumulate": 2, "final_heads": 0.2}, {"precision": "bf16"}],
    ids=["plain", "averaged", "bf16"],
)
def test_killed_runs_go_on_to_the_bit(text, tmp_path, options):
    """Checkpoints are kept after steps 3 and 6, acts follow steps 5 and 7: there are losses in between."""
    options |= {"steps": 22}
    whole = run_loop(text, tmp_path / "whole", **options)
    changed = [line["step"] for line in read(tmp_path / "whole" / "log.jsonl") if "acts" in line]
    assert min(changed) < 6 < max(changed)
    broken = tmp_path / "broken"
    for step in (4, 8):
        with pytest.raises(KilledError):
            run_loop(text, broken, kill_after=step, resume=True, **options)
    again = run_loop(text, broken, resume=True, **options)
    one, other = files(tmp_path / "whole"), files(broken)
    assert one[:3] == other[:3]
    assert one[3].keys() == other[3].keys()
    for name, value in one[3].items():
        assert torch.equal(value, other[3][name]), name
    assert again.dynamic.acts == whole.dynamic.acts
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_what_comes_out_is_an_ordinary_smaller_model(text, tmp_path):
    result = run_loop(text, tmp_path / "out", final_heads=0.4)
    model = mh.load(tmp_path / "out")
    assert sum(heads_of(model)) == 4
    assert model.original_heads == result.model.original_heads
    for a, b in zip(model.parameters(), result.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert mh.evaluate(tmp_path / "out", data=text).metrics == pytest.approx(result.metrics)
    assert mh.predict(tmp_path / "out", ["1 and 2"], new_tokens=3)[0].startswith("1 and 2")
    ids = torch.randint(5, (2, 9))
    smaller = mh.cut(model, {"blocks.0.attention": [0]}, ids) if heads_of(model)[0] > 1 else model
    mh.save(smaller, tmp_path / "smaller")
    assert torch.equal(mh.load(tmp_path / "smaller")(ids), smaller(ids))
    assert list(mh.importance(model, [ids])["original_head"]) == [
        head for _, heads in sorted(model.original_heads.items()) for head in heads
    ]


def test_best_weights_of_another_shape_than_the_last_ones(text, tmp_path):
    """The best evaluation is the first, before any head was cut."""

    class Worse(Language):
        count = 0

        def metrics(self, parts):
            Worse.count += 1
            return {"loss": float(Worse.count)}

    out = tmp_path / "out"
    options = QUICK | {"evaluate_every": 1}
    result = train(Worse(dropout=0.1, **SMALL), text, out=out, **options)
    assert (result.best_step, heads_of(result.model)) == (1, [5, 5])
    assert sum(result.dynamic.history[-1][1].values()) == 5
    assert heads_of(mh.load(out)) == [5, 5]


def test_damaged_records_are_refused_in_a_sentence(text, tmp_path):
    out = tmp_path / "out"
    run_loop(text, out)
    last = checkpoint.list_checkpoints(out / "checkpoints")[0] / "state.json"
    state = json.loads(last.read_text())
    name = next(iter(state["changes"]["changes"]["shapes"]))
    state["changes"]["changes"]["shapes"][name] = [10**9, 10**9]
    last.write_text(json.dumps(state))
    with pytest.raises(ValueError, match="damaged; remove it to continue from the one before"):
        run_loop(text, out, resume=True)
    from manyheads.models.changes import record_of

    model = mh.load(out)
    record = record_of(model)
    record["changes"]["shapes"][name] = [10**9, 10**9]
    content = checkpoint.model_bytes(checkpoint.weights(model), record)
    (out / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="damaged, its changes do not fit"):
        mh.load(out)


def test_slopes_and_groups_follow(text, tmp_path):
    task = Language(dropout=0.0, positions="alibi", kv_heads=2, **(SMALL | {"d_model": 24, "heads": 4}))
    result = train(task, text, out=tmp_path / "out", **QUICK)
    assert sum(heads_of(result.model)) <= 4
    train(task, text, out=tmp_path / "out", resume=True, **QUICK)
    assert heads_of(mh.load(tmp_path / "out")) == heads_of(result.model)


PROCESS = """
import json, sys
import torch
from torch import nn
import torch.distributed as dist
import manyheads as mh

rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/meeting", rank=rank, world_size=2)
torch.manual_seed(1)
model = mh.Decoder(20, heads=5, layers=2, vocabulary=31)
def loss_of(model, ids):
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
dynamic = mh.DynamicHeads(model, optimizer, loss_of, steps=14, heads=0.5, start=4, end=12, every=4)
wrapped = nn.parallel.DistributedDataParallel(model)
generator = torch.Generator().manual_seed(rank)  # other batches in each process
for _ in range(14):
    ids = torch.randint(31, (5, 5), generator=generator).repeat(1, 2)
    loss = loss_of(wrapped, ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dynamic.step(ids, loss):
        wrapped = nn.parallel.DistributedDataParallel(model)
total = sum(p.double().sum().item() for p in model.parameters())
with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
    json.dump([[str(act) for act in dynamic.acts], total, model.original_heads], file)
dist.destroy_process_group()
"""


def test_two_processes_take_the_same_decisions(tmp_path):
    (tmp_path / "process.py").write_text(PROCESS)
    command = [sys.executable, str(tmp_path / "process.py"), str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    problems = [process.communicate()[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], problems
    one, two = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert one == two
    assert len(one[0]) >= 3
