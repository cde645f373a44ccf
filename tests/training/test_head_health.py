"""HeadHealth in a hand-written loop: the run is the same to the bit, and what it says of heads is right."""

import copy
import json
import logging
import math

import pytest
import torch
import torch.nn.functional as F

import manyheads as mh
from manyheads.surgery.in_place import become
from manyheads.training.head_health import HeadHealth

IDS = torch.randint(17, (40, 3, 11), generator=torch.Generator().manual_seed(0))


def decoder(**options):
    torch.manual_seed(1)
    return mh.Decoder(15, heads=3, layers=2, vocabulary=17, **{"dropout": 0.1, **options})


def loss_of(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())


def train(model, health=None, steps=7, parts=1, rate=0.01):
    """A hand-written loop; returns its losses and the random state it ends with."""
    torch.manual_seed(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    losses = []
    for step in range(steps):
        if health is not None:
            health.before_step()
        total = 0.0
        for part in range(parts):
            loss = loss_of(model, IDS[(step * parts + part) % len(IDS)]) / parts
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        if health is not None:
            health.after_step(total)
    return losses, torch.get_rng_state()


def same(one, other):
    return all(
        torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"checkpoint": True}, {"kv_heads": 1, "positions": "rotary"}, {"qk_norm": True, "norm": "post"}],
    ids=["plain", "checkpointing", "groups", "norms"],
)
@pytest.mark.parametrize("parts", [1, 3])
def test_the_run_is_the_same_to_the_bit(options, parts):
    plain, watched = decoder(**options), decoder(**options)
    health = HeadHealth(watched, every=2)
    without, with_health = train(plain, parts=parts), train(watched, health, parts=parts)
    assert without[0] == with_health[0]
    assert torch.equal(without[1], with_health[1])
    assert same(plain, watched)
    assert health.history.steps == [2, 4, 6]
    assert not watched._forward_hooks
    assert bool(health.history["gradient_share"].isfinite().all())


def test_mixed_precision_is_the_same_and_measured_in_float32():
    runs = []
    for health in (None, HeadHealth):
        model = decoder(dropout=0.0)
        watching = health(model, every=1) if health else None
        with torch.autocast("cpu", torch.bfloat16):
            runs.append((train(model, watching, steps=3), model, watching))
    assert runs[0][0][0] == runs[1][0][0]
    assert same(runs[0][1], runs[1][1])
    assert bool(runs[1][2].history["largest_logit"].isfinite().all())


def test_the_numbers_are_those_of_a_plain_computation():
    model = decoder(dropout=0.0, positions="learned", max_length=11).double()
    health = HeadHealth(model, every=1)
    kept = {}
    for layer, block in enumerate(model.blocks):
        for name in ("query", "key"):
            block.attention.get_submodule(name).register_forward_hook(
                lambda _, __, out, at=(layer, name), all=kept: all.__setitem__(at, out.detach())
            )
    health.before_step()
    loss = loss_of(model, IDS[0])
    loss.backward()
    kept = dict(kept)  # the first look runs the model again
    health.after_step(loss)
    hidden = torch.ones(11, 11, dtype=torch.bool).triu(1)
    row = 0
    for layer in range(2):
        q, k = (kept[layer, name].unflatten(-1, (3, 5)).transpose(1, 2) for name in ("query", "key"))
        scores = (q @ k.mT / 5**0.5).masked_fill(hidden, -math.inf)
        weights = scores.softmax(-1)
        entropy = -torch.special.xlogy(weights, weights).sum(-1)
        for head in range(3):
            assert health.history["largest_logit"][0, row].item() == pytest.approx(
                scores[:, head].max().item()
            )
            assert health.history["entropy"][0, row].item() == pytest.approx(entropy[:, head].mean().item())
            row += 1
    assert health.table["gradient_share"].sum().item() == pytest.approx(1.0)
    assert health.summary()["heads/largest_logit"] == pytest.approx(
        float(health.history["largest_logit"].max())
    )


def test_steps_without_a_look_leave_the_model_alone():
    model = decoder()
    health = HeadHealth(model, every=3)
    health.before_step()
    assert not model._forward_hooks
    assert health.after_step(torch.tensor(1.0)) == []
    health.before_step(3)
    assert model._forward_hooks
    health.close()  # as when the step is left by an error
    assert not model._forward_hooks


def test_a_step_left_by_an_error_does_not_spoil_the_next():
    model = decoder()
    health = HeadHealth(model, every=1)
    health.before_step()
    with pytest.raises(ValueError, match="ids: expected 0 to 16"):
        model(IDS[0] + 90)
    train(model, health, steps=1)
    assert health.history.steps == [2]
    assert not model._forward_hooks


def exploding(every=5, **options):
    """A model whose attention is driven to extremes by a large rate."""
    model = decoder(dropout=0.0)
    return model, HeadHealth(model, every, **options)


def test_growing_logits_raise_an_alarm_in_words_once(caplog):
    model, health = exploding()
    with caplog.at_level(logging.WARNING, "manyheads.health"):
        for step in range(12):
            health.before_step((step + 1) * 5)
            loss = loss_of(model, IDS[0])
            loss.backward()
            with torch.no_grad():
                for part in (model.blocks[1].attention.query, model.blocks[1].attention.key):
                    part.weight.mul_(1.5)
            health.after_step(loss)
    alarms = [alarm for alarm in health.alarms if alarm.metric == "largest_logit"]
    assert len(alarms) == 1
    alarm = alarms[0]
    assert alarm.layer == 1
    assert alarm.site == "blocks.1.attention"
    assert alarm.value >= 30
    assert alarm.trend.doubling == pytest.approx(5 * math.log(2) / math.log(2.25), rel=0.1)
    assert alarm.message.startswith(
        f"layer 1 head {alarm.head}: largest logit {alarm.value:.0f} and doubling"
    )
    assert "expect divergence; try qk_norm or a lower rate" in caplog.text
    trend = health.trends("spectral_norm")[3]
    assert trend.doubling == pytest.approx(5 * math.log(2) / math.log(2.25), rel=1e-3)


def test_the_state_goes_on_where_another_stopped():
    model, health = exploding(every=2)
    train(model, health, steps=6)
    state = json.loads(json.dumps(health.state_dict()))
    twin, raised = copy.deepcopy(model), []
    other = HeadHealth(twin, 2, on_alarm=raised.append)
    other.load_state_dict(state)
    assert other.history.steps == [2, 4, 6]
    assert torch.equal(other.history["entropy"], health.history["entropy"])
    train(model, health, steps=4)
    train(twin, other, steps=4)
    assert other.history.steps == [2, 4, 6, 8, 10]
    assert other.state_dict() == health.state_dict()


def test_the_history_is_a_table_also_when_heads_are_cut_meanwhile():
    model = decoder(dropout=0.0)
    health = HeadHealth(model, every=1)
    train(model, health, steps=2)
    health.model = mh.cut(model, {0: [1]}, IDS[0])
    train(health.model, health, steps=1)
    frame = health.history.to_pandas()
    assert len(frame) == 6 + 6 + 5
    assert health.history["entropy"].shape == (3, 5)
    assert list(frame.columns[:5]) == ["step", "site", "layer", "head", "entropy"]


def test_clipping_keeps_a_run_below_the_clip():
    model = decoder(dropout=0.0)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.query.weight.mul_(9)
            block.attention.key.weight.mul_(9)
    health = HeadHealth(model, every=10, clip=5.0, clip_every=1)
    train(model, health, steps=1, rate=0.0)
    assert {act.site for act in health.clipped} == {"blocks.0.attention", "blocks.1.attention"}
    model.eval()
    again = HeadHealth(model, every=1)
    train(model, again, steps=1, rate=0.0)
    assert float(again.history["largest_logit"][0, :3].max()) <= 5.0 + 1e-4
    train(model, health, steps=20)
    assert len({act.step for act in health.clipped}) >= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every: expected a number of steps, 1 or more, got 0"),
        ({"clip": -1.0}, "clip: expected a largest logit above 0, or None, got -1.0"),
        ({"clip": 5.0, "clip_every": 0}, "clip_every: expected a number of steps, 1 or more, got 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        HeadHealth(decoder(), **options)


def test_a_model_without_attention_and_one_that_is_sharded_are_refused():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3))
    health = HeadHealth(model, every=1)
    health.before_step()
    model(torch.randn(2, 3)).sum().backward()
    with pytest.raises(ValueError, match="no attention was seen in the model"):
        health.after_step()

    class DTensor(torch.Tensor):
        pass

    model[0].weight = torch.nn.Parameter(torch.randn(3, 3).as_subclass(DTensor))
    with pytest.raises(ValueError, match=r"0\.weight is sharded over processes"):
        HeadHealth(model)


def test_looks_follow_heads_that_are_cut_in_place():
    torch.manual_seed(0)
    model = mh.Decoder(12, heads=3, layers=2, vocabulary=31)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    health = mh.HeadHealth(model, every=1)
    ids = torch.randint(31, (3, 7))
    for _ in range(2):
        health.before_step()
        model(ids).square().mean().backward()
        health.after_step()
        if len(health.history) == 1:
            become(model, mh.cut(model, {0: [1]}, ids), optimizer)
    assert [len(look.rows) for look in health.history.looks] == [6, 5]
    logits = health.history["largest_logit"]  # (looks, heads), for the heads that are left
    assert torch.equal(logits[0, :2], health.history.looks[0].values["largest_logit"][[0, 2]])
    assert health.history.looks[1].values["spectral_norm"].isfinite().all()
