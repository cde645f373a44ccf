"""Sounds that need no recordings: the tones of telephone keys, and words that espeak-ng says."""

from __future__ import annotations

import math
import shutil
import subprocess

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.data.readers.audio import decode_sound, resample
from manyheads.data.readers.recordings import Recording

ESPEAK = "espeak-ng"
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# The keys of a telephone stand in rows and columns; each sounds as the tones of its row and its column.
ROWS, COLUMNS = (697.0, 770.0, 852.0, 941.0), (1209.0, 1336.0, 1477.0)
KEYS = {str(row * 3 + column + 1): (row, column) for row in range(3) for column in range(3)} | {"0": (3, 1)}
TELEPHONES, TAKES = 6, 20
VARIANTS = ("m1", "m2", "m3", "m4", "m5", "m7", "f1", "f2", "f3", "f4")
ESPEAK_TAKES = 10


def tones(rate: int, seed: int = 0) -> list[Recording]:
    """Keys of six telephones, twenty takes each: pairs of tones that are off, uneven, short and noisy.

    Examples
    --------
    >>> takes = tones(8000)
    >>> len(takes), takes[0].label, takes[0].speaker
    (1200, '1', 'telephone-0')
    """
    random = torch.Generator().manual_seed(seed)
    recordings = []
    for number in range(TELEPHONES):
        detuned = 1 + _between(-0.015, 0.015, random)
        hum = _between(0.0, 0.2, random)
        for key, (row, column) in KEYS.items():
            for take in range(TAKES):
                pair = (ROWS[row] * detuned, COLUMNS[column] * detuned)
                sound = _press(pair, hum, rate, random)
                recordings.append(Recording.of(sound, key, f"telephone-{number}", str(take)))
    return recordings


def _press(pair: tuple[float, float], hum: float, rate: int, random: torch.Generator) -> Tensor:
    """Two tones for 100 to 250 ms, one up to 4 dB louder, in noise from 5 to 25 dB below them."""
    time = torch.arange(int(rate * _between(0.1, 0.25, random))) / rate
    twist = 10 ** (_between(-4.0, 4.0, random) / 20)
    sound = torch.zeros(len(time))
    for frequency, loudness in zip((*pair, 50.0), (1.0, twist, hum), strict=True):
        sound += loudness * (2 * math.pi * (frequency * time + _between(0, 1, random))).sin()
    sound *= (time / 0.005).clamp(max=1) * ((time[-1] - time) / 0.005).clamp(max=1)  # no clicks
    around = len(time) // 4
    sound = F.pad(sound, (around, around))
    strength: float = ((1 + twist**2) / 2) ** 0.5 * 10 ** (-_between(5.0, 25.0, random) / 20)
    return sound + strength * torch.randn(len(sound), generator=random)


def spoken(rate: int, words: tuple[str, ...] = WORDS, seed: int = 0) -> list[Recording]:
    """Words that espeak-ng says, by ten voices at different speeds and pitches; it must be installed."""
    program = shutil.which(ESPEAK)
    if program is None:
        raise ValueError(f"data: {ESPEAK} is not installed; `apt install {ESPEAK}`, or give recordings")
    random = torch.Generator().manual_seed(seed)
    recordings = []
    for word in words:
        for variant in VARIANTS:
            for take in range(ESPEAK_TAKES):
                speed, pitch = int(_between(110, 210, random)), int(_between(20, 80, random))
                options = ["-v", f"en+{variant}", "-s", str(speed), "-p", str(pitch), "--stdout", word]
                done = subprocess.run([program, *options], capture_output=True, check=False)
                if done.returncode or not done.stdout:
                    lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no sound came"]
                    raise ValueError(f"data: {ESPEAK} failed on {word!r} ({lines[0][:200]})")
                sound, spoken_rate = decode_sound(done.stdout, ESPEAK)
                recordings.append(Recording.of(resample(sound, spoken_rate, rate), word, variant, str(take)))
    return recordings


def _between(low: float, high: float, random: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand(1, generator=random))
