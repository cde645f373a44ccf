"""Speech: strings of held-out takes, the three losses against formulas, decoding, and what goes wrong."""

import itertools
import json
import math
import stat

import pytest
import torch

import manyheads as mh
from manyheads.data.labelled.metrics import edits
from manyheads.data.readers.audio import encode_wav, log_mel
from manyheads.data.readers.recordings import Recording
from manyheads.models.config import build
from manyheads.tasks import find, load, restore
from manyheads.tasks.speech import synthetic, word_strings
from manyheads.tasks.speech import task as speech
from manyheads.tasks.speech.task import KINDS, Speech
from manyheads.tasks.speech.word_strings import decode_greedily
from manyheads.training.train import train

SMALL = {"d_model": 12, "heads": 3, "layers": 1, "decoder_layers": 1, "dropout": 0.0, "mels": 11}
RATE = 8000


def tone(key, length=0.07):
    """A pure tone for each key, whose length is exact."""
    time = torch.arange(int(length * RATE)) / RATE
    return (2 * math.pi * (400 + 300 * int(key)) * time).sin()


@pytest.fixture
def takes(monkeypatch):
    """Three words by two speakers, ten takes each, in place of the embedded telephones."""
    made = [
        Recording.of(tone(key), key, who, str(n))
        for key in "123"
        for who in ("ann", "bob")
        for n in range(10)
    ]
    monkeypatch.setattr(speech, "tones", lambda rate: made)
    return made


def opened(**options):
    task = Speech(**(SMALL | options))
    return task, task.open(None)


def test_strings_are_joined_from_one_speakers_takes_of_the_same_split(takes, monkeypatch):
    _task, data = opened(kind="ctc", shortest=2, longest=4)
    joined = []
    monkeypatch.setattr(
        speech,
        "join_recordings",
        lambda those, *rest: (joined.append(those), word_strings.join_recordings(those, *rest))[1],
    )
    for epoch in (0, 1):
        data.train.take(range(len(data.train)), 0, epoch)
    data.valid.take(range(len(data.valid)), 0)
    learned, measured = joined[: 2 * len(data.train)], joined[2 * len(data.train) :]
    assert (len(data.train), len(data.valid)) == (54, 6)
    assert {one.take for string in measured for one in string} == {"0"}
    assert {one.take for string in learned for one in string} == set("123456789")
    assert {len(string) for string in measured} == {2, 3, 4}
    assert {len(string) for string in learned} == {1, 2, 3, 4}
    assert all(len({one.speaker for one in string}) == 1 for string in joined)
    assert [id(x) for s in learned[:54] for x in s] != [id(x) for s in learned[54:] for x in s]


def test_a_speaker_is_held_out(takes):
    _task, data = opened(held_out="bob")
    assert (len(data.train), len(data.valid)) == (30, 30)
    with pytest.raises(ValueError, match=r"one of at least two speakers .*, got 'eve'"):
        opened(held_out="eve")


def test_measured_strings_are_the_same_whoever_asks(takes):
    _, data = opened(kind="ctc", speed=0.0)
    one, other = data.valid.take([3], 0)[0], data.valid.take([3], 7, 1)[0]
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])
    first, second = (data.train.take([3], 0, epoch)[0] for epoch in (0, 1))
    assert first[0].shape != second[0].shape or not torch.equal(first[0], second[0])


def test_sizes_are_the_tokens_that_the_model_sees(takes):
    _task, data = opened(join=5)
    frames, _ = data.valid.take([0], 0)[0]
    assert frames.shape == (data.valid.sizes[0], 55)
    assert data.valid.sizes[0] == math.ceil((560 // 80 + 1) / 5)
    _, data = opened(kind="ctc", join=5)
    found = [len(frames) for frames, _ in data.valid.take(range(6), 0)]
    assert sum(found) == pytest.approx(sum(data.valid.sizes), rel=0.25)


def test_augmentation_hides_moves_and_plays_faster(takes):
    task, data = opened(masks=0.0, speed=0.0, shift=0.0)
    still, _ = data.train.take([0], 0)[0]
    assert torch.equal(still, task._tokens(log_mel(takes[1].sound, RATE, 11)))
    _, data = opened(masks=0.4, speed=0.0, shift=0.0)
    hidden = [data.train.take([0], 0, n)[0][0].view(-1, 11) for n in range(20)]
    assert all(x.shape == hidden[0].shape for x in hidden)
    bands = [int((x == 0).all(0).sum()) for x in hidden]
    times = [int((x == 0).all(1).sum()) - int((hidden[0] == 0).all(1).min()) for x in hidden]
    assert 0 < max(bands) <= 8
    assert max(times) > 0
    _, data = opened(masks=0.0, speed=0.5, shift=0.0)
    lengths = [len(data.train.take([0], 0, n)[0][0]) for n in range(20)]
    assert min(lengths) < len(still) < max(lengths)
    _, data = opened(masks=0.0, speed=0.0, shift=0.5)
    assert max(len(data.train.take([0], 0, n)[0][0]) for n in range(20)) > 2 * len(still)


def test_recordings_are_played_faster_and_slower_but_tones_are_their_pitch(takes, tmp_path):
    for n, take in enumerate(takes):
        (tmp_path / f"{take.label}_{take.speaker}_{n}.wav").write_bytes(encode_wav(take.sound, RATE))
    assert opened()[0].speed == 0.0
    assert opened(speed=0.3)[0].speed == 0.3
    task = Speech(**SMALL)
    task.open(str(tmp_path))
    assert task.speed == 0.1


def ways(string, length, blank=0):
    """Every way to spell a string in so many places."""
    known = sorted({blank, *string})
    return [
        places
        for places in itertools.product(known, repeat=length)
        if decode_greedily(places, blank) == string
    ]


def test_ctc_sums_all_ways_to_spell():
    task = Speech(kind="ctc", **SMALL)
    task.words = ["<blank>", "a", "b"]
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 3, dtype=torch.float64)
    batch = {
        "frames": torch.zeros(2, 5, 33),
        "lengths": torch.tensor([5, 4]),
        "words": torch.tensor([[1, 1], [2, 0]]),
        "word_lengths": torch.tensor([2, 1]),
    }
    loss, count = task.loss(lambda frames, lengths: logits, batch)
    chances = logits.log_softmax(-1)
    wanted = 0.0
    for row, (string, length) in enumerate((([1, 1], 5), ([2], 4))):
        each = [sum(chances[row, n, s].item() for n, s in enumerate(way)) for way in ways(string, length)]
        wanted -= math.log(sum(map(math.exp, each)))
    assert count == 3
    assert loss.item() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("kind", ["class", "decoder"])
def test_losses_are_those_of_the_formula(takes, kind):
    task, data = opened(kind=kind, label_smoothing=0.2)
    torch.manual_seed(0)
    model = build(task.describe()).double()
    examples = [(frames.double(), words) for frames, words in data.valid.take(range(5), 0)]
    loss, count = task.loss(model, task.collate(examples))
    total = tokens = 0
    for frames, words in examples:
        if kind == "class":
            rows, labels = model(frames[None])["logits"], words
        else:
            rows, labels = model(frames[None], words[None, :-1])[0], words[1:]
        for row, label in zip(rows.log_softmax(-1), labels.tolist(), strict=True):
            total -= 0.8 * row[label].item() + 0.2 * row.mean().item()
            tokens += 1
    assert count == tokens
    assert loss.item() == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_hearing_in_a_batch_is_hearing_alone(takes, kind, positions):
    torch.manual_seed(0)
    task, data = opened(kind=kind, positions=positions, label_smoothing=0.0)
    model = build(task.describe()).eval()
    examples = [(torch.cat([f] * n), w) for n, (f, w) in enumerate(data.valid.take(range(3), 0), 1)]
    together = task.measure(model, task.collate(examples))
    alone = [task.measure(model, task.collate([one])) for one in examples]
    assert together[2] == [pair for part in alone for pair in part[2]]
    assert together[0] == pytest.approx(sum(part[0] for part in alone), rel=1e-4)


def test_word_errors_are_counted_by_hand():
    task = Speech(kind="ctc")
    pairs = [(["1", "2", "3"], ["1", "2", "3"]), (["1", "3", "4", "4"], ["1", "2", "3", "4"]), ([], ["5"])]
    found = task.metrics([(2.0, 4, pairs[:2]), (1.0, 4, pairs[2:])])
    assert found == {"word_error": 3 / 8, "exact": 1 / 3, "loss": 3 / 8}
    assert edits("kitten", "sitting") == 3
    assert edits([], "abc") == edits("abc", []) == 3
    accuracy = Speech().metrics([(0.0, 3, [(["1"], ["1"]), (["1"], ["2"]), (["3"], ["3"])])])
    assert accuracy["accuracy"] == pytest.approx(2 / 3)


def test_spelling():
    assert decode_greedily([0, 0, 2, 2, 0, 2, 1, 1], 0) == [2, 2, 1]
    assert decode_greedily([1], 0) == [1]
    assert decode_greedily([], 0) == []


def test_long_strings_are_cut_to_what_there_is_time_for(takes):
    task, data = opened(kind="ctc", shortest=5, longest=5, max_seconds=0.3, positions="learned", speed=0.0)
    for frames, words in data.valid.take(range(6), 0):
        assert 1 <= len(words) < 5
        assert len(frames) <= task.describe()["options"]["max_length"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_folder_hears_again(takes, tmp_path, kind):
    options = {"steps": 2, "batch_tokens": 200, "evaluate_examples": 2, "watch_every": 0}
    result = train(Speech(kind=kind, **SMALL), out=tmp_path / "run", **options)
    assert {"word_error", "loss"} <= set(result.metrics)
    assert ("accuracy" in result.metrics) == (kind == "class")
    (tmp_path / "a.wav").write_bytes(encode_wav(torch.cat([tone(1), tone(2)]), RATE))
    task, model = load(tmp_path / "run")
    assert task.words == model.labels if kind == "class" else task.words == model.words
    said = task.predict(model, [str(tmp_path / "a.wav")])
    again = restore(tmp_path / "run")
    assert said == again.predict(mh.load(tmp_path / "run"), [str(tmp_path / "a.wav")])
    assert kind != "class" or said[0] in "123"
    if kind != "decoder":
        with pytest.raises(ValueError, match=r"beams: .* has none"):
            task.predict(model, [str(tmp_path / "a.wav")], beams=2)
    with pytest.raises(ValueError, match=r"there is no file .*b.wav"):
        task.predict(model, [str(tmp_path / "b.wav")])


def test_labels_that_were_not_there_in_training(takes, tmp_path):
    task, _ = opened()
    (tmp_path / "9_ann_0.wav").write_bytes(encode_wav(tone(9), RATE))
    with pytest.raises(ValueError, match="'9' is spoken, but not in any training recording"):
        task.read(str(tmp_path))
    (tmp_path / "9_ann_0.wav").rename(tmp_path / "2_ann_0.wav")
    assert len(task.read(str(tmp_path))) == 1
    (tmp_path / "2_ann_1.wav").write_bytes(encode_wav(tone(2), RATE))
    with pytest.raises(ValueError, match="all recordings have the label '2'"):
        Speech(**SMALL).open(str(tmp_path))


def test_labels_of_several_words(tmp_path):
    for n in range(3):
        (tmp_path / f"{n}.wav").write_bytes(encode_wav(tone(n), RATE))
    (tmp_path / "labels.tsv").write_text("file\tlabel\n0.wav\tturn left\n1.wav\tturn right\n2.wav\tstop\n")
    task = Speech(kind="ctc", longest=1, **SMALL)
    data = task.open(str(tmp_path))
    assert task.words == ["<blank>", "left", "right", "stop", "turn"]
    assert [task._words(words.tolist()) for _, words in data.train.take([0, 1])] == [
        ["turn", "right"],
        ["stop"],
    ]
    task = Speech(**SMALL)
    task.open(str(tmp_path))
    assert task.words == ["stop", "turn left", "turn right"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "song"}, "kind: expected one of class, ctc, decoder, got 'song'"),
        ({"mels": 0}, "mels: expected 1 or more"),
        ({"rate": 10}, "rate: expected 1000"),
        ({"shortest": 5, "longest": 4}, "longest: expected 5"),
        ({"masks": 0.7}, "masks: expected from 0 to 0.5"),
        ({"speed": -0.1}, "speed: expected from 0"),
    ],
)
def test_options_are_checked(options, words):
    with pytest.raises(ValueError, match=words):
        find("speech")(**options)


def test_telephones_are_telephones():
    """Each take has the tones of its key: the loudest of each group in its own spectrum, nearly always."""
    found = synthetic.tones(RATE)
    assert len({(one.label, one.speaker, one.take) for one in found}) == 1200
    right, detuned = 0, torch.linspace(0.985, 1.015, 7)
    for one in found[::7]:
        time = torch.arange(len(one.samples)) / RATE
        place = []
        for group in (synthetic.ROWS, synthetic.COLUMNS):
            waves = torch.exp(-2j * math.pi * torch.tensor(group)[:, None, None] * detuned[:, None] * time)
            place.append(int((waves * one.sound).sum(-1).abs().amax(-1).argmax()))
        right += tuple(place) == synthetic.KEYS[one.label]
    assert right / len(found[::7]) > 0.95
    assert torch.equal(synthetic.tones(RATE)[50].samples, found[50].samples)


def test_espeak_speaks_when_it_is_there(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="espeak-ng is not installed; `apt install espeak-ng`"):
        Speech(**SMALL).open("espeak-ng")
    (tmp_path / "sound.wav").write_bytes(encode_wav(tone(1), 16000))
    program = tmp_path / "espeak-ng"
    told = tmp_path / "told"
    program.write_text(f'#!/bin/sh\necho "$@" >> {told}\n/bin/cat {tmp_path}/sound.wav\n')
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setattr(synthetic, "VARIANTS", ("m1", "f1"))
    monkeypatch.setattr(synthetic, "ESPEAK_TAKES", 2)
    found = synthetic.spoken(RATE)
    assert len(found) == 40
    assert len(found[0].samples) == 280
    assert {one.label for one in found} == set(synthetic.WORDS)
    lines = told.read_text().splitlines()
    assert lines[0].startswith("-v en+m1 -s ")
    assert lines[0].endswith("--stdout zero")
    program.write_text("#!/bin/sh\necho no voice >&2\nexit 1\n")
    with pytest.raises(ValueError, match=r"espeak-ng failed on 'zero' \(no voice\)"):
        synthetic.spoken(RATE)


def test_head_tools_take_what_the_model_hears(takes, tmp_path):
    options = {"steps": 1, "batch_tokens": 200, "evaluate_examples": 2, "watch_every": 0}
    train(Speech(kind="decoder", **SMALL), out=tmp_path / "run", **options)
    task, model = load(tmp_path / "run")
    batch = task.inputs(task.collate(task.open(None).valid.take(range(4), 0)))
    with torch.no_grad(), mh.watch(model) as seen:
        model(**batch)
    assert sorted({row.kind for row in seen.table.rows}) == ["causal", "cross", "self"]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["options"]["words"] == task.words
