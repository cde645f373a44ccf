"""A text in parts: the parts add up to what one process computes, and nothing else is merged."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
import torch
from tests.helpers.models import VOCABULARY, llama

import manyheads as mh
from manyheads.common import processes
from manyheads.common.interrupts import Interrupted, interruptible
from manyheads.data.batches import Corpus, padded
from manyheads.heads import measurements
from manyheads.heads.measurements import Diversity, Importance, Inspect, Roles, Share, split
from manyheads.heads.measurements.shard import Shard
from manyheads.models.loaded import Loaded

SIZES = [13, 7, 11, 5, 17, 13, 3, 19, 7, 11, 2, 23]


def a_text(seed: int = 0, batch_tokens: int = 40) -> Corpus:
    """Sequences of random ids, some of them padded."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, VOCABULARY, (size,), generator=generator).tolist() for size in SIZES]

    def make(indices):
        ids, mask = padded([rows[i] for i in indices])
        return {"input_ids": ids, "attention_mask": mask}

    groups = {"rare": [5, 7, 11], "special": [3]}
    return Corpus("ids", "tokens", SIZES, make, batch_tokens, groups=groups)


@pytest.fixture(scope="module")
def loaded():
    return Loaded("a llama", llama(), lambda: None, lambda: None)


@pytest.fixture(scope="module")
def shards(loaded):
    """Two parts of a text."""
    return [measurements.measure_part(Inspect(), loaded, a_text(), Share(number, 2)) for number in range(2)]


def same(one: mh.HeadTable, two: mh.HeadTable, within: float) -> None:
    assert one.columns == two.columns
    assert one.model == two.model
    for name in one.columns:
        if isinstance(one[name], list):
            assert one[name] == two[name], name
        else:
            torch.testing.assert_close(one[name], two[name], atol=within, rtol=within, equal_nan=True)
    assert list(one.matrices) == list(two.matrices)
    for name, matrix in one.matrices.items():
        torch.testing.assert_close(matrix, two.matrices[name], atol=within, rtol=within, equal_nan=True)


METHODS = ["fisher", "elimination", "gradient", "leave-one-out", "relevance", "confidence", "output-norm"]
VERBS = {
    "inspect": Inspect(),
    "roles": Roles(least=7, reads_text=False),
    "importance": Importance(METHODS, seed=3),
    "diversity": Diversity(rows=11),
}


def computed(verb, model, text):
    """The tables of one process, by the public functions."""
    batches = [batch for _, batch in text.batches()]
    if verb == "importance":
        return {name: mh.importance(model, batches, name, seed=3) for name in METHODS}
    if verb == "inspect":
        return {verb: mh.inspect(model, batches, tokens=text.groups)}
    return {
        verb: mh.roles(model, batches, least=7) if verb == "roles" else mh.diversity(model, batches, rows=11)
    }


@pytest.mark.parametrize("verb", VERBS)
def test_parts_add_up_to_the_whole(verb, loaded, tmp_path):
    """Also through files, and in another order than they were measured in."""
    text = a_text()
    assert len(text.plan()) == 5
    whole = computed(verb, loaded.model, text)
    for number in (2, 0, 1):
        measurements.measure_part(VERBS[verb], loaded, text, Share(number, 3)).save(tmp_path)
    merged = mh.merge_shards([tmp_path])
    assert list(merged) == list(whole)
    for name, table in whole.items():
        same(table, merged[name], within=1e-6 if verb == "diversity" else 1e-9)


def test_parts_of_different_sizes_make_up_a_text(loaded, shards):
    """The second half as two quarters."""
    text = a_text()
    quarters = [measurements.measure_part(Inspect(), loaded, text, Share(number, 4)) for number in (1, 3)]
    halves, mixed = (measurements.merged_shard(each) for each in (shards, [shards[0], *quarters]))
    assert mixed.numbers == halves.numbers == [0, 1, 2, 3, 4]
    torch.testing.assert_close(mixed.state["table"]["tokens"], halves.state["table"]["tokens"])


def test_what_is_no_whole_is_not_merged(shards):
    first, second = shards
    for wrong, message in (
        ([first], r"2 of 5 batches are in none of the 1 shards: run --shard 2/2"),
        ([first, first, second], r"shard 1/2 and shard 1/2 overlap in 3 of 5 batches"),
        ([first, replace(second, fingerprint="7")], r"different models \(a llama \w{16}, a llama 7\)"),
        ([first, replace(second, text="7")], "of different texts, or of one that was cut into batches"),
        ([first, replace(second, total=7)], "of different texts"),
        ([first, replace(second, verb="roles")], "are of inspect and roles"),
        ([replace(first, options={"rows": 7}), replace(second, options={"rows": 11})], r"rows \(7 and 11\)"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            measurements.merged_shard(wrong)


def test_another_model_or_text_is_noticed(loaded, shards):
    """One weight, one token."""
    other = llama()
    with torch.no_grad():
        other.model.layers[1].self_attn.q_proj.weight[0, 0] += 1
    replaced = Loaded("a llama", other, lambda: None, lambda: None)
    part = measurements.measure_part(Inspect(), replaced, a_text(), Share(1, 2))
    with pytest.raises(ValueError, match="different models"):
        measurements.merged_shard([shards[0], part])
    text = a_text()
    make = text.make

    def changed(indices):
        batch = make(indices)
        batch["input_ids"][batch["input_ids"] == int(make([0])["input_ids"][0, 0])] = 2
        return batch

    part = measurements.measure_part(Inspect(), loaded, replace(text, make=changed), Share(1, 2))
    with pytest.raises(ValueError, match="different texts"):
        measurements.merged_shard([shards[0], part])


def test_files_that_are_no_shards(tmp_path, shards):
    with pytest.raises(ValueError, match=r"merge: there is no .*none; expected files"):
        mh.merge_shards([tmp_path / "none"])
    with pytest.raises(ValueError, match="holds no shard"):
        mh.merge_shards([tmp_path])
    with pytest.raises(TypeError, match="expected a list of files"):
        mh.merge_shards(str(tmp_path))
    file = shards[0].save(tmp_path)
    assert file.name == "shard-1-of-2.safetensors"
    assert Shard.load(file).numbers == shards[0].numbers
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(ValueError, match="is damaged, or not a file that manyheads wrote"):
        mh.merge_shards([file])


def test_what_cannot_be_split_says_so(loaded):
    for method in ("mean-ablation", "gates", "random"):
        with pytest.raises(ValueError, match=f"method: {method} needs the whole text in one process"):
            measurements.measure_part(Importance([method]), loaded, a_text(), Share(0, 2))
    with pytest.raises(ValueError, match="shard: got 1/7, and the text is read in 5 batches"):
        measurements.measure_part(Inspect(), loaded, a_text(), Share(0, 7))
    for wrong in ("3", "0/2", "3/2", "1/0", "-1/2", "a/b", "1/2/3"):
        with pytest.raises(ValueError, match=f"shard: got '{wrong}'; expected one of several, such as 3/20"):
            Share.read(wrong)


@pytest.mark.parametrize("verb", VERBS)
def test_an_interrupted_part_is_no_part(verb, loaded):
    with interruptible():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted):
            measurements.measure_part(VERBS[verb], loaded, a_text(), Share(0, 2))


def test_processes_share_a_text(loaded, monkeypatch):
    """The other process of torchrun is played here; only the first has the result."""
    measurement = Diversity(["attention", "outputs"], rows=7)
    text, parts = a_text(), []
    for number in range(2):
        parts.append(measurements.measure_part(measurement, loaded, text, Share(number, 2)))
    expected = mh.diversity(
        loaded.model, [batch for _, batch in text.batches()], measures=["attention", "outputs"], rows=7
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(split, "gathered", lambda part: [part, parts[1]])
    result = measurements.measured(measurement, loaded, text)
    same(result.table, expected, within=1e-6)
    assert (result.read, result.total) == (5, 5)
    monkeypatch.setattr(split, "gathered", lambda part: [part, "no room"])
    with pytest.raises(ValueError, match="no room"):
        measurements.measured(measurement, loaded, text)
    monkeypatch.setenv("RANK", "1")
    assert processes.rank() == 1
    monkeypatch.setattr(split, "gathered", lambda part: [parts[0], part])
    assert measurements.measured(measurement, loaded, text) is None


def test_random_directions_belong_to_their_batch(loaded):
    """fisher on a part of the batches takes the directions that it takes on all of them."""
    ranked = []
    for seed, numbers in ((3, [1, 3]), (3, [1, 3]), (5, [1, 3]), (3, [0, 2])):
        batches = a_text().numbered((1, 2))
        assert list(batches.numbers) == [1, 3]
        batches.numbers = numbers
        ranked.append(mh.importance(loaded.model, batches, seed=seed)["importance"])
    torch.testing.assert_close(ranked[0], ranked[1])
    assert not ranked[0].allclose(ranked[2])
    assert not ranked[0].allclose(ranked[3])


def test_the_fingerprint_is_of_the_text_and_its_batches():
    prints = [a_text().fingerprint, a_text(batch_tokens=20).fingerprint, a_text(seed=1).fingerprint]
    regrouped = a_text()
    regrouped.groups = {"rare": [7]}
    prints.append(regrouped.fingerprint)
    assert len(set(prints)) == 4
    assert a_text().fingerprint == prints[0]
