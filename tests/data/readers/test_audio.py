"""WAV files of every kind, other sample rates, log-mel frames: against formulas and other programs' bytes."""

import io
import math
import struct
import wave
import zipfile

import pytest
import torch

from manyheads.data.readers.audio import decode_sound, encode_wav, log_mel, mel_bands, resample
from manyheads.data.readers.recordings import Recording, hold_out, read_recordings

SOUND = torch.tensor([0.0, 0.25, -0.5, 0.75, -1.0, 0.125, 0.5])


def wav(code, bits, data, channels=1, rate=8000, extra=b""):
    form = struct.pack(
        "<HHIIHH", code, channels, rate, rate * channels * bits // 8, channels * bits // 8, bits
    )
    form += extra
    body = b"WAVE" + struct.pack("<4sI", b"fmt ", len(form)) + form
    body += struct.pack("<4sI", b"LIST", 3) + b"abc\0"  # what players write besides, of odd length
    body += struct.pack("<4sI", b"data", len(data)) + data
    return struct.pack("<4sI", b"RIFF", len(body)) + body


def packed(values, bits):
    """Whole numbers as a WAV file has them."""
    if bits == 8:
        return bytes(round(v * 128) + 128 if v < 1 else 255 for v in values)
    return b"".join(
        min(round(v * 2 ** (bits - 1)), 2 ** (bits - 1) - 1).to_bytes(bits // 8, "little", signed=True)
        for v in values
    )


@pytest.mark.parametrize("bits", [8, 16, 24, 32])
def test_whole_numbers_of_all_widths(bits):
    sound, rate = decode_sound(wav(1, bits, packed(SOUND.tolist(), bits), rate=11025))
    assert rate == 11025
    torch.testing.assert_close(sound, SOUND, rtol=0, atol=2 ** (1 - bits))


@pytest.mark.parametrize(("bits", "code"), [(32, "f"), (64, "d")])
def test_floats_and_the_longer_header(bits, code):
    data = struct.pack(f"<7{code}", *SOUND.tolist())
    assert torch.equal(decode_sound(wav(3, bits, data))[0], SOUND)
    guid = bytes.fromhex("000000001000800000aa00389b71")
    longer = struct.pack("<HHIH14s", 22, bits, 4, 3, guid)  # "extensible": the format comes later
    assert torch.equal(decode_sound(wav(0xFFFE, bits, data, extra=longer))[0], SOUND)


def test_channels_are_mixed():
    data = packed([0.5, 0.25, -0.5, 0.0, 0.0, 1.0], 16)
    sound, _ = decode_sound(wav(1, 16, data, channels=2))
    torch.testing.assert_close(sound, torch.tensor([0.375, -0.25, 0.5]), rtol=0, atol=1e-4)


def test_what_is_written_is_what_other_programs_read():
    with wave.open(io.BytesIO(encode_wav(SOUND, 16000))) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (16000, 1, 2)
        frames = file.readframes(99)
    assert torch.equal(decode_sound(wav(1, 16, frames))[0], decode_sound(encode_wav(SOUND, 8000))[0])
    piped = bytearray(encode_wav(SOUND, 8000))
    piped[40:44] = struct.pack("<I", 0xFFFFFFFF)  # a program that did not know how long it would speak
    assert len(decode_sound(bytes(piped))[0]) == 7


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "a.wav is empty"),
        (b"ID3\x03 something else", r"a.wav is not a readable sound file \(.*It begins with b'ID3"),
        (encode_wav(SOUND, 8000)[:-3], "a.wav is cut off: 14 bytes of sound are announced, but 11 are there"),
        (encode_wav(SOUND, 8000)[:40], "a.wav is cut off: it has no sound"),
        (encode_wav(SOUND, 8000)[:20], "a.wav is cut off: it has no format"),
        (encode_wav(SOUND[:0], 8000), "a.wav holds no sound"),
        (wav(99, 8, b"abc"), "a.wav is not a readable sound file"),
        (wav(1, 16, b"ab", rate=0), "a.wav is not a readable sound file"),
        (wav(1, 16, b"ab", rate=999), "a.wav has 1 channels at 999 Hz; expected one or more at 1,000 to"),
        (wav(3, 32, struct.pack("<f", math.nan)), "a.wav has samples that are not numbers"),
    ],
)
def test_bad_files_are_named(content, words):
    with pytest.raises(ValueError, match=words):
        decode_sound(content, "a.wav")


@pytest.mark.parametrize(
    ("old", "new"), [(16000, 8000), (8000, 16000), (44100, 8000), (11025, 16000), (8001, 7919)]
)
def test_a_tone_stays_a_tone_at_another_rate(old, new):
    for frequency in (0.0, 331.0, 2503.0):
        time = torch.arange(old // 4, dtype=torch.float64) / old
        sound = resample((2 * math.pi * frequency * time).cos().float(), old, new)
        assert len(sound) == math.ceil(len(time) * new / old)
        wanted = (2 * math.pi * frequency * torch.arange(len(sound), dtype=torch.float64) / new).cos()
        edge = len(sound) // 8
        assert (sound - wanted)[edge:-edge].abs().max() < 0.01


def test_what_the_lower_rate_cannot_carry_is_gone():
    time = torch.arange(11025) / 44100
    high = resample((2 * math.pi * 5003 * time).sin(), 44100, 8000)
    assert high[100:-100].abs().max() < 0.01


def test_bands_are_those_of_the_ear():
    """A tone is loudest in the band whose middle is nearest, by the formula."""
    rate, mels = 8000, 31
    top = 2595 * math.log10(1 + rate / 2 / 700)
    middles = [700 * (10 ** (top * (n + 1) / (mels + 1) / 2595) - 1) for n in range(mels)]
    for frequency in (503.0, 1009.0, 2003.0, 3001.0):
        sound = (2 * math.pi * frequency * torch.arange(rate // 2) / rate).sin()
        energy = (
            mel_bands(rate, 256, mels) @ torch.fft.rfft(sound[:256] * torch.hann_window(256)).abs().square()
        )
        assert int(energy.argmax()) == min(range(mels), key=lambda n: abs(middles[n] - frequency))


def test_frames_do_not_depend_on_loudness():
    torch.manual_seed(0)
    sound = torch.randn(4001)
    frames = log_mel(sound, 8000, 23)
    assert frames.shape == (51, 23)
    torch.testing.assert_close(log_mel(sound * 0.01, 8000, 23), frames, rtol=1e-3, atol=1e-3)
    assert frames.square().mean() == pytest.approx(1.0, rel=1e-4)
    assert frames.mean() == pytest.approx(0.0, abs=1e-4)
    assert bool(log_mel(torch.zeros(5), 8000, 23).isfinite().all())  # silence, shorter than a window


def write(folder, names, rate=8000, samples=800):
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_wav(0.01 * (number + 1) * torch.ones(samples), rate))
    return folder


def about(recordings):
    return [(one.label, one.speaker, one.take) for one in recordings]


def test_folders_archives_and_names(tmp_path):
    names = ["one_ann_0.wav", "deep/two_bob_10.WAV", "three.wav", "__MACOSX/one_ann_0.wav"]
    write(tmp_path / "data", names, rate=16000, samples=1601)
    found, notes = read_recordings(str(tmp_path / "data"), 8000, "{label}_{speaker}_{take}", 9.0)
    assert about(found) == [("two", "bob", "10"), ("one", "ann", "0")]
    assert notes == ["1 recordings with other names than {label}_{speaker}_{take} were left out"]
    assert len(found[0].samples) == 801
    assert found[0].sound.abs().max() == pytest.approx(1.0)  # loudness is taken away
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        for name in names:
            archive.write(tmp_path / "data" / name, name)
    again, _ = read_recordings(str(tmp_path / "data.zip"), 8000, "{label}_{speaker}_{take}", 9.0)
    assert about(again) == about(found)
    assert torch.equal(again[0].samples, found[0].samples)
    by_folder, _ = read_recordings(str(tmp_path / "data"), 8000, "{label}/{take}", 9.0)
    assert about(by_folder) == [("deep", "", "two_bob_10")]


def test_tables(tmp_path):
    write(tmp_path, ["a.wav", "b.wav", "c.wav"], samples=1600)
    (tmp_path / "labels.tsv").write_text(
        "file\tlabel\tspeaker\nb.wav\tone two\tann\na.wav\t\tann\nc.wav\tthree\tbob\n"
    )
    found, notes = read_recordings(str(tmp_path), 8000, "{label}", 9.0)
    assert about(found) == [("one two", "ann", ""), ("three", "bob", "")]
    assert notes == ["1 recordings without a label were left out"]
    (tmp_path / "labels.tsv").rename(tmp_path / "other.tsv")
    assert about(read_recordings(str(tmp_path / "other.tsv"), 8000, "{label}", 9.0)[0]) == about(found)
    with pytest.raises(ValueError, match=r"no recording of at most 0.1 seconds"):
        read_recordings(str(tmp_path), 8000, "{label}", 0.1)


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ("name\tlabel\n", "labels.tsv has no column 'file' in its first line; it has name, label"),
        ("file\tlabel\na.wav\n", "line 2 of .*labels.tsv has 1 columns; expected 2"),
        (
            "file\tlabel\nb.wav\tone\n",
            "line 2 of .*labels.tsv names 'b.wav', which is not a sound file there",
        ),
        ("file\tlabel\na.wav\t\n", "labels.tsv has no row with a label"),
    ],
)
def test_bad_tables_are_named(tmp_path, labels, words):
    write(tmp_path, ["a.wav"])
    (tmp_path / "labels.tsv").write_text(labels)
    with pytest.raises(ValueError, match=words):
        read_recordings(str(tmp_path), 8000, "{label}", 9.0)


def test_what_is_not_there_or_damaged(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere is not there; expected a folder"):
        read_recordings(str(tmp_path / "nowhere"), 8000, "{label}", 9.0)
    with pytest.raises(ValueError, match="holds no sound; expected WAV, FLAC or OGG files"):
        read_recordings(str(tmp_path), 8000, "{label}", 9.0)
    write(tmp_path, ["one_ann.wav"])
    with pytest.raises(
        ValueError, match=r"no sound file .* is named like {label}_{speaker}_{take} \(there is one_ann.wav"
    ):
        read_recordings(str(tmp_path), 8000, "{label}_{speaker}_{take}", 9.0)
    for names in ("{speaker}", "{label}_{label}", "{label}_{age}"):
        with pytest.raises(ValueError, match=r"names: expected {label}"):
            read_recordings(str(tmp_path), 8000, names, 9.0)
    (tmp_path / "one_ann.wav").write_bytes(b"RIFF")
    with pytest.raises(ValueError, match=r"one_ann.wav is not a readable sound file"):
        read_recordings(str(tmp_path), 8000, "{label}_{speaker}", 9.0)


def test_takes_and_speakers_are_held_out():
    takes = [
        Recording.of(torch.ones(2), label, who, str(n))
        for label in "ab"
        for who in ("x", "y")
        for n in range(23)
    ]
    train, valid = hold_out(takes, "takes")
    assert about(valid) == [(label, who, take) for label in "ab" for who in "xy" for take in "01"]
    assert len(train) + len(valid) == len(takes)
    train, valid = hold_out(takes, "y")
    assert {one.speaker for one in train} == {"x"}
    assert len(valid) == 46
    assert len(hold_out(takes[:7], "takes")[1]) == 1  # nobody has ten takes
    with pytest.raises(ValueError, match=r"one of at least two speakers \(x, y\), got 'z'"):
        hold_out(takes, "z")
    with pytest.raises(ValueError, match="1 recordings are too few"):
        hold_out(takes[:1], "takes")


@pytest.mark.parametrize(("suffix", "near"), [("FLAC", 2**-15), ("OGG", 0.1)])
def test_compressed_sounds(suffix, near, tmp_path):
    soundfile = pytest.importorskip("soundfile")
    sound = 0.5 * (2 * math.pi * 440 * torch.arange(16000) / 16000).sin()
    path = tmp_path / f"one_ann_0.{suffix.lower()}"
    soundfile.write(path, sound.numpy(), 16000, format=suffix)
    decoded, rate = decode_sound(path.read_bytes())
    assert (rate, len(decoded)) == (16000, 16000)
    torch.testing.assert_close(decoded, sound, rtol=0, atol=near)
    assert about(read_recordings(str(tmp_path), 8000, "{label}_{speaker}_{take}", 9.0)[0]) == [
        ("one", "ann", "0")
    ]
    half = path.read_bytes()[: path.stat().st_size // 2]
    with pytest.raises(ValueError, match=r"a.flac is (cut off|not a readable sound file)"):
        decode_sound(half, "a.flac")


def test_a_few_bytes_that_claim_hours_are_not_unpacked():
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    soundfile.write(file, torch.zeros(2**22, 8).numpy(), 8000, format="FLAC")
    silence = bytearray(file.getvalue())
    silence[21:26] = (silence[21] & 0xF0 | 0x0F).to_bytes(1, "big") + b"\xff\xff\xff\xff"  # 2^36 - 1 samples
    with pytest.raises(ValueError, match="would unpack to"):
        decode_sound(bytes(silence), "a.flac")
