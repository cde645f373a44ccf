"""Audio: sound files of any kind as samples, other sample rates, and log-mel frames."""

from __future__ import annotations

import io
import math
import struct
from fractions import Fraction
from functools import lru_cache
from types import ModuleType

import numpy
import torch
from scipy.signal import resample_poly
from torch import Tensor

from manyheads.common.decompression import File, check_growth, content_of

# Programs that write to a pipe do not know how much will come, and write such a size.
UNKNOWN_SIZE = 0x7FFFF000
LOWEST, HIGHEST = 1_000, 1_000_000  # samples a second: beyond, a file is damaged
RATIO = 10_000  # the largest factor of a resampling; 1 to 1,000,000 Hz all have a ratio within a millionth
WINDOW, HOP = 0.025, 0.01  # seconds
# Powers of ten below the loudest place at which a spectrum ends: silences of nothing at all, which joined
# recordings have between them, are then not much quieter than those of a room.
QUIETEST = 5.0


def read_sound(path: File, rate: int) -> Tensor:
    """A sound file, or one in an archive, at another sample rate, all channels mixed: ``(samples,)``."""
    sound, recorded_rate = decode_sound(content_of(path, "data"), str(path))
    return resample(sound, recorded_rate, rate)


def decode_sound(content: bytes, name: str = "the sound") -> tuple[Tensor, int]:
    """The bytes of a sound file as samples ``(samples,)`` from -1 to 1, its channels mixed, and its rate.

    WAV, FLAC, OGG and everything else that libsndfile reads. A file that is cut off, or no sound, is a
    ValueError.

    Examples
    --------
    >>> sound, rate = decode_sound(encode_wav(torch.tensor([0.0, 0.5, -0.5]), 8000))
    >>> sound, rate
    (tensor([ 0.0000,  0.5000, -0.5000]), 8000)
    """
    soundfile = _soundfile()
    if not content:
        raise ValueError(f"data: {name} is empty; expected a sound file: WAV, FLAC or OGG")
    if content[:4] == b"RIFF":
        _check_wav(content, name)
    try:
        with soundfile.SoundFile(io.BytesIO(content)) as file:
            rate, channels, frames = file.samplerate, file.channels, file.frames
            if not LOWEST <= rate <= HIGHEST:
                raise ValueError(
                    f"data: {name} has {channels} channels at {rate:,} Hz; expected one or more at "
                    f"{LOWEST:,} to {HIGHEST:,} Hz"
                )
            check_growth(4 * channels * frames, len(content), f"data: {name}")
            samples = file.read(dtype="float32", always_2d=True)  # (samples, channels)
    except soundfile.LibsndfileError as error:
        raise ValueError(
            f"data: {name} is not a readable sound file ({error.error_string} It begins "
            f"with {content[:4]!r}); expected WAV, FLAC or OGG"
        ) from None
    if len(samples) < frames:
        raise ValueError(
            f"data: {name} is cut off: {frames:,} samples are announced, but {len(samples):,} are there; get "
            "the file again"
        )
    if not len(samples):
        raise ValueError(f"data: {name} holds no sound; expected at least one sample")
    if not numpy.isfinite(samples).all():
        raise ValueError(f"data: {name} has samples that are not numbers; expected finite ones")
    return torch.from_numpy(samples).mean(1), rate


def _check_wav(content: bytes, name: str) -> None:
    """Raise a ValueError for a WAV file that is cut off: libsndfile reads the rest without a word."""
    position, chunks = 12, set()
    while position + 8 <= len(content):
        kind, size = content[position : position + 4], struct.unpack_from("<I", content, position + 4)[0]
        present = min(size, len(content) - position - 8)
        if kind == b"data" and present < size < UNKNOWN_SIZE:
            raise ValueError(
                f"data: {name} is cut off: {size:,} bytes of sound are announced, but {present:,} are there; "
                "get the file again"
            )
        if present == size or kind == b"data":
            chunks.add(kind)
        position += 8 + size + size % 2
    for kind, part in ((b"fmt ", "format"), (b"data", "sound")):
        if content[8:12] == b"WAVE" and kind not in chunks:
            raise ValueError(f"data: {name} is cut off: it has no {part}; get the file again")


def encode_wav(sound: Tensor, rate: int) -> bytes:
    """Samples ``(samples,)`` from -1 to 1 as the bytes of a WAV file of 16 bits."""
    samples = (sound * 32768).round().clamp(-32768, 32767).to(torch.int16).numpy()
    file = io.BytesIO()
    _soundfile().write(file, samples, rate, format="WAV", subtype="PCM_16")
    return file.getvalue()


def _soundfile() -> ModuleType:
    try:
        import soundfile
    except ImportError:
        raise ImportError("sound files need soundfile: pip install 'manyheads[train]'") from None
    module: ModuleType = soundfile
    return module


def resample(sound: Tensor, old: int, new: int) -> Tensor:
    """Samples ``(samples,)`` at another rate; frequencies that the lower of both rates cannot carry are cut.

    Examples
    --------
    >>> time = torch.arange(4410) / 44100
    >>> at_8000 = resample((2 * torch.pi * 440 * time).sin(), 44100, 8000)
    >>> at_8000.shape
    torch.Size([800])
    >>> expected = (2 * torch.pi * 440 * torch.arange(800) / 8000).sin()
    >>> bool((at_8000 - expected)[50:-50].abs().max() < 0.01)
    True
    """
    if old == new:
        return sound
    small, large = Fraction(min(old, new), max(old, new)).limit_denominator(RATIO).as_integer_ratio()
    up, down = (small, large) if new < old else (large, small)
    return torch.from_numpy(resample_poly(sound.numpy(), up, down))


def log_mel(sound: Tensor, rate: int, mels: int = 40) -> Tensor:
    """Log-mel frames: the log energy of ``mels`` bands every 10 ms, ``(frames, mels)``, standardised.

    Windows of 25 ms, bands on the mel scale. The loudness of a recording does not matter.

    Examples
    --------
    >>> frames = log_mel(torch.randn(8000), rate=8000)
    >>> frames.shape                                                   # a second: (frames, mels)
    torch.Size([101, 40])
    >>> bool(frames.mean().abs() < 1e-4)
    True
    """
    width, hop = round(WINDOW * rate), round(HOP * rate)
    size = 2 ** math.ceil(math.log2(width))
    spectrum = torch.stft(sound, size, hop, width, _window(width), pad_mode="constant", return_complex=True)
    energy = mel_bands(rate, size, mels) @ torch.view_as_real(spectrum).square().sum(-1)  # (mels, frames)
    logs = energy.clamp(min=1e-12).log10()
    logs = logs.clamp(min=float(logs.max()) - QUIETEST).T
    logs = logs - logs.mean()
    return logs / logs.square().mean().sqrt().clamp(min=1e-3)


@lru_cache(maxsize=8)
def _window(width: int) -> Tensor:
    return torch.hann_window(width)


@lru_cache(maxsize=8)
def mel_bands(rate: int, size: int, mels: int) -> Tensor:
    """Triangular filters over the frequencies of a spectrum, ``(mels, size / 2 + 1)``, even on the mel scale.

    >>> bands = mel_bands(8000, 256, 20)
    >>> bands.shape, bool((bands.sum(1) > 0).all())
    (torch.Size([20, 129]), True)
    """
    top = 2595 * math.log10(1 + rate / 2 / 700)
    edges = 700 * (10 ** (torch.linspace(0, top, mels + 2, dtype=torch.float64) / 2595) - 1)
    frequency = torch.linspace(0, rate / 2, size // 2 + 1, dtype=torch.float64)
    # a band is at least as wide as the spectrum's steps, or the lowest would have no frequency in it
    narrowest = rate / size
    low = (edges[1:-1] - edges[:-2]).clamp(min=narrowest)[:, None]
    high = (edges[2:] - edges[1:-1]).clamp(min=narrowest)[:, None]
    distance = frequency - edges[1:-1, None]
    return torch.where(distance < 0, 1 + distance / low, 1 - distance / high).clamp(min=0).float()
