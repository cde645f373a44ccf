"""The loop on a task of a few numbers: what it computes, and that nothing but seed and step decide it."""

import io
import json
import math
import signal
import threading
from itertools import pairwise

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from manyheads.data.examples import Order
from manyheads.models.config import build
from manyheads.tasks.language import Language
from manyheads.training import checkpoint, head_alarms
from manyheads.training.log import read
from manyheads.training.options import Options, rate
from manyheads.training.report import scalars
from manyheads.training.train import train
from manyheads.view.terminal.training import training_bar

SMALL = {"d_model": 10, "heads": 5, "layers": 2, "context": 13}
QUICK = {
    "batch_tokens": 130, "evaluate_every": 4, "evaluate_examples": 7, "save_every": 3, "watch_every": 5,
    "warmup": 2, "learning_rate": 0.01, "steps": 11,
}  # fmt: skip


class KilledError(Exception):
    pass


def run(text, out, *, kill_after=None, task=None, resume=False, **options):
    def kill(report):
        if report.step == kill_after:
            raise KilledError

    task = task or Language(dropout=0.1, **SMALL)
    return train(task, text, out=out, resume=resume, callbacks=[kill], **(QUICK | options))


def files(out):
    """All that must be the same however often a run was interrupted."""
    last = checkpoint.list_checkpoints(out / "checkpoints")[0]
    tensors = {f"{file.stem}/{name}": value for file in last.glob("*.safetensors")
               for name, value in load_file(file).items()}  # fmt: skip
    tensors |= load_file(out / "model.safetensors")
    return read(out / "log.jsonl"), json.loads((out / "metrics.json").read_text()), tensors


def same(one, other):
    assert one[:2] == other[:2]
    assert one[2].keys() == other[2].keys()
    for name, value in one[2].items():
        assert torch.equal(value, other[2][name]), name


def test_a_run_learns(text, tmp_path):
    result = run(text, tmp_path / "out", steps=60, evaluate_every=20, watch_every=0)
    losses = [line["loss"] for line in read(tmp_path / "out" / "log.jsonl")]
    assert len(losses) == 60
    assert losses[0] == pytest.approx(math.log(21), abs=0.6)
    assert sum(losses[-5:]) / 5 < 0.75 * losses[0]
    assert result.ended == "finished"
    assert result.metrics["loss"] < 0.75 * losses[0]


@pytest.mark.parametrize(
    "options",
    [{}, {"ema": 0.8, "accumulate": 2}, {"precision": "bf16"}],
    ids=["plain", "averaged", "bf16"],
)
def test_killed_runs_go_on_to_the_bit(text, tmp_path, options):
    whole = run(text, tmp_path / "whole", **options)
    broken = tmp_path / "broken"
    with pytest.raises(KilledError):
        run(text, broken, kill_after=2, **options)  # before the first checkpoint
    with pytest.raises(KilledError):
        run(text, broken, kill_after=8, resume=True, **options)  # after the second, and an evaluation later
    again = run(text, broken, resume=True, **options)
    same(files(tmp_path / "whole"), files(broken))
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_watching_and_random_numbers_of_others_change_nothing(text, tmp_path):
    run(text, tmp_path / "watched", watch_every=1)
    torch.manual_seed(77)
    before = torch.get_rng_state()
    run(text, tmp_path / "alone", watch_every=0)
    assert torch.equal(torch.get_rng_state(), before)
    same(files(tmp_path / "watched"), files(tmp_path / "alone"))


def test_alarms_are_reported_logged_and_remembered_when_a_run_goes_on(text, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(head_alarms, "EXTREME", 0.1)  # every head is alarming, once
    reports = []
    train(Language(**SMALL), text, out=tmp_path / "whole", callbacks=[reports.append], **QUICK)
    (raised,) = [report for report in reports if report.alarms]
    assert raised.step == 5
    assert [alarm.metric for alarm in raised.alarms] == ["largest_logit"] * 2
    assert caplog.text.count("expect divergence") == 2
    assert scalars(raised)["heads/alarms"] == 2
    broken = tmp_path / "broken"
    with pytest.raises(KilledError):
        run(text, broken, kill_after=8, task=Language(**SMALL))
    run(text, broken, task=Language(**SMALL), resume=True)
    same(files(tmp_path / "whole"), files(broken))
    alarms = {line["step"]: line.get("alarms") for line in read(broken / "log.jsonl")}
    assert [step for step, words in alarms.items() if words] == [5]
    assert alarms[5][0].startswith("layer 0 head ")


def test_the_terminal_prints_alarms(text, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(head_alarms, "EXTREME", 0.1)
    shown = io.StringIO()
    with training_bar("language", console=Console(file=shown, width=200)) as bar:
        train(Language(**SMALL), text, out=tmp_path / "out", callbacks=[bar], **QUICK)
    assert shown.getvalue().count("expect divergence") == 2
    assert not caplog.text


def test_the_parts_of_a_batch_make_the_same_update(text, tmp_path):
    task = Language(**SMALL)
    run(text, tmp_path / "one", task=task)
    run(text, tmp_path / "three", task=task, accumulate=3)
    one, three = (read(tmp_path / name / "log.jsonl") for name in ("one", "three"))
    assert [line["tokens"] for line in one] == [line["tokens"] for line in three]
    for a, b in zip(one, three, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
        assert a["gradient_norm"] == pytest.approx(b["gradient_norm"], rel=1e-4)


def test_the_first_update_is_that_of_adamw(text, tmp_path):
    """One step against torch's own AdamW on the mean loss, with clipping, made by hand."""
    task = Language(**SMALL)
    options = QUICK | {"steps": 1, "warmup": 0, "clip": 0.25, "weight_decay": 0.5, "watch_every": 0}
    train(task, text, out=tmp_path / "out", **options)
    chosen = Options(**options)
    data = task.open(text)
    from manyheads.data.examples import seed_of

    with torch.random.fork_rng([]):
        torch.manual_seed(seed_of(0))
        model = build(task.describe())
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=chosen.learning_rate, betas=(0.9, 0.98), weight_decay=0.5)
    examples = data.train.take(Order(data.train.sizes, 130, 0).batch(0), 0, 0)
    loss, count = task.loss(model, task.collate(examples))
    (loss / count).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    line = read(tmp_path / "out" / "log.jsonl")[0]
    assert line["loss"] == pytest.approx((loss / count).item(), rel=1e-6)
    assert line["gradient_norm"] == pytest.approx(norm.item(), rel=1e-5)
    kept = load_file(checkpoint.list_checkpoints(tmp_path / "out" / "checkpoints")[0] / "model.safetensors")
    for name, value in checkpoint.weights(model).items():
        torch.testing.assert_close(kept[name], value, rtol=1e-4, atol=2e-5)


def test_mixed_precision_computes_in_bfloat16_and_learns_in_float32(text, tmp_path):
    options = {"steps": 60, "evaluate_every": 20, "watch_every": 20}
    task = Language(**SMALL)
    for precision in ("no", "bf16"):
        run(text, tmp_path / precision, task=task, precision=precision, **options)
    exact, mixed = ([line["loss"] for line in read(tmp_path / name / "log.jsonl")] for name in ("no", "bf16"))
    assert mixed[0] != exact[0]
    assert mixed[0] == pytest.approx(exact[0], rel=0.01)
    assert sum(mixed[-5:]) == pytest.approx(sum(exact[-5:]), rel=0.05)
    kept = load_file(tmp_path / "bf16" / "model.safetensors")
    assert {value.dtype for value in kept.values()} == {torch.float32}


def test_a_full_disk_ends_the_run_with_the_last_good_checkpoint(text, tmp_path, monkeypatch):
    out = tmp_path / "out"
    real = checkpoint.to_bytes

    def full(values, **metadata):
        if (out / "checkpoints" / "step-00000006").exists():
            raise OSError(28, "No space left on device")
        return real(values, **metadata)

    monkeypatch.setattr(checkpoint, "to_bytes", full)
    with pytest.raises(OSError, match=r"No space left on device\); the last good checkpoint is kept"):
        run(text, out)
    assert [path.name for path in checkpoint.list_checkpoints(out / "checkpoints")] == [
        "step-00000006",
        "step-00000003",
    ]
    monkeypatch.undo()
    run(text, out, resume=True)
    run(text, tmp_path / "whole")
    same(files(out), files(tmp_path / "whole"))


def test_ctrl_c_keeps_a_checkpoint(text, tmp_path):
    def press(report):
        if report.step == 4:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    out = tmp_path / "out"
    result = train(Language(dropout=0.1, **SMALL), text, out=out, callbacks=[press], **QUICK)
    assert (result.ended, result.step) == ("interrupted", 5)
    assert signal.getsignal(signal.SIGINT) is before
    assert checkpoint.list_checkpoints(out / "checkpoints")[0].name == "step-00000005"
    run(text, out, resume=True)
    run(text, tmp_path / "whole")
    same(files(out), files(tmp_path / "whole"))


def test_a_second_ctrl_c_ends_at_once(text, tmp_path):
    def press(report):
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(Language(**SMALL), text, out=tmp_path / "out", callbacks=[press, press], **QUICK)


def test_training_in_a_thread_needs_no_signals(text, tmp_path):
    found = []
    thread = threading.Thread(target=lambda: found.append(run(text, tmp_path / "out", steps=1)))
    thread.start()
    thread.join()
    assert found[0].ended == "finished"


class Scripted(Language):
    """A task whose metric says what the test wants."""

    script = (3.0, 1.0, 2.0, 1.0, 2.0, 9.0)

    def metrics(self, parts):
        Scripted.calls += 1
        return {"loss": self.script[min(Scripted.calls, 5)]}


def test_the_best_weights_are_kept_and_patience_ends(text, tmp_path):
    Scripted.calls = -1
    options = {"steps": 40, "decay": "none", "evaluate_every": 2, "patience": 3}
    out = tmp_path / "out"
    result = run(text, out, task=Scripted(**SMALL), **options)
    assert (result.ended, result.step, result.best_step) == ("early", 10, 4)
    run(text, tmp_path / "four", task=Language(**SMALL), steps=4, decay="none")
    best = load_file(tmp_path / "four" / "model.safetensors")
    for name, value in load_file(out / "model.safetensors").items():
        assert torch.equal(value, best[name]), name
    assert run(text, out, task=Scripted(**SMALL), resume=True, **options).step == 10


def test_a_folder_with_a_run_is_not_overwritten(text, tmp_path):
    run(text, tmp_path / "out", steps=1)
    with pytest.raises(ValueError, match=r"out: .* already holds a run"):
        run(text, tmp_path / "out", steps=1)


def test_resume_refuses_other_options_and_other_data(text, tmp_path):
    out = tmp_path / "out"
    run(text, out, steps=3)
    with pytest.raises(ValueError, match=r"steps: .* began with 3, got 5"):
        run(text, out, resume=True, steps=5)
    with pytest.raises(ValueError, match=r"heads: .* began with 5, got 2"):
        run(text, out, resume=True, steps=3, task=Language(dropout=0.1, **(SMALL | {"heads": 2})))
    with open(text, "a") as file:
        file.write("more\n" * 20)
    with pytest.raises(ValueError, match="data: not what the run"):
        run(text, out, resume=True, steps=3)


def test_a_loss_that_is_no_number_ends_the_run(text, tmp_path):
    with pytest.raises(ValueError, match="the loss became nan at step"):
        run(text, tmp_path / "out", learning_rate=1e30, clip=0.0, warmup=0, decay="none")
    assert checkpoint.list_checkpoints(tmp_path / "out" / "checkpoints") == []


def test_unknown_options_are_refused(text, tmp_path):
    with pytest.raises(TypeError, match="stepz: not an option of training"):
        run(text, tmp_path / "out", stepz=3)
    with pytest.raises(ValueError, match="decay: expected one of"):
        run(text, tmp_path / "out", decay="exponential")
    assert not (tmp_path / "out").exists()


def test_rates_rise_and_fall():
    options = Options(steps=100, warmup=10, learning_rate=2.0)
    rates = [rate(step, options) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * n for n in range(1, 11)])
    assert rates[10] == 2.0
    assert rates[55] == pytest.approx(1.0)
    assert all(a > b for a, b in pairwise(rates[10:]))
    assert rates[-1] < 0.001


def test_trackers_draw_every_head(text, tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = tmp_path / "out"
    train(Language(**SMALL), text, out=out, trackers=["tensorboard"], **QUICK)
    events = event_accumulator.EventAccumulator(str(out / "language"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"train/loss", "valid/bits_per_byte", "heads/dead", "train/tokens_per_second"} <= tags
    for name in ("entropy", "redundancy", "gradient_norm"):
        drawn = [tag for tag in tags if tag.startswith(f"heads/{name}/")]
        assert len(drawn) == 10
    assert [event.step for event in events.Scalars("heads/entropy/blocks.1.attention.3")] == [5, 10]
