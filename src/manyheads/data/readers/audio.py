"""Sound: WAV files of any kind as samples, other sample rates, and log-mel frames."""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.common.decompression import content_of

PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
# Programs that write to a pipe do not know how much will come, and say so by such a size.
UNKNOWN_SIZE = 0x7FFFF000
LOWEST, HIGHEST = 1_000, 1_000_000  # samples a second: beyond, a file is damaged, and resampling endless
WINDOW, HOP = 0.025, 0.01  # seconds
TABLE = 4_000_000  # numbers that the interpolation between two rates may take
# Powers of ten below the loudest place at which a spectrum ends: silences of nothing at all, which joined
# recordings have between them, are then not much quieter than those of a room.
QUIETEST = 5.0


def read_sound(path: Any, rate: int) -> Tensor:
    """A WAV file, or one in an archive, at another sample rate, all channels mixed: ``(samples,)``."""
    sound, own = decode_wav(content_of(path, "data"), str(path))
    return resample(sound, own, rate)


def decode_wav(content: bytes, name: str = "the sound") -> tuple[Tensor, int]:
    """The bytes of a WAV file as samples ``(samples,)`` from -1 to 1, its channels mixed, and its rate.

    PCM of 8, 16, 24 and 32 bits, floats of 32 and 64; what is cut off or something else is a ValueError.

    Examples
    --------
    >>> sound, rate = decode_wav(encode_wav(torch.tensor([0.0, 0.5, -0.5]), 8000))
    >>> sound, rate
    (tensor([ 0.0000,  0.5000, -0.5000]), 8000)
    """
    if not content:
        raise ValueError(f"data: {name} is empty; expected a WAV file")
    if content[:4] != b"RIFF" or content[8:12] != b"WAVE":
        raise ValueError(f"data: {name} is no WAV file (it begins with {content[:4]!r})")
    form = data = None
    place = 12
    while place + 8 <= len(content) and data is None:
        kind, size = content[place : place + 4], struct.unpack_from("<I", content, place + 4)[0]
        body = content[place + 8 : place + 8 + size]
        if kind == b"data":
            if len(body) < size < UNKNOWN_SIZE:
                raise ValueError(
                    f"data: {name} is cut off: {size:,} bytes of sound are announced, and {len(body):,} are "
                    "there; get the file again"
                )
            data = body
        elif kind == b"fmt ":
            form = body
        place += 8 + size + size % 2
    if form is None or len(form) < 16 or data is None:
        what = "format" if form is None or len(form) < 16 else "sound"
        raise ValueError(f"data: {name} is cut off: it has no {what}; get the file again")
    code, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", form)
    if code == EXTENSIBLE and len(form) >= 26:
        code = struct.unpack_from("<H", form, 24)[0]
    if (code, bits) not in _DECODERS:
        raise ValueError(
            f"data: {name} has the format {code} with {bits} bits; expected PCM of 8, 16, 24 or 32 bits, or "
            "floats of 32 or 64: convert it, for instance with `ffmpeg -i IN -c:a pcm_s16le OUT.wav`"
        )
    if not channels or not LOWEST <= rate <= HIGHEST:
        raise ValueError(
            f"data: {name} has {channels} channels at {rate:,} Hz; expected one or more at {LOWEST:,} to "
            f"{HIGHEST:,} Hz"
        )
    frame = channels * bits // 8
    raw = bytearray(data[: len(data) - len(data) % frame])
    if not raw:
        raise ValueError(f"data: {name} holds no sound; expected at least one sample")
    sound: Tensor = _DECODERS[code, bits](raw).view(-1, channels).mean(1)
    if not bool(sound.isfinite().all()):
        raise ValueError(f"data: {name} has samples that are no numbers; expected finite ones")
    return sound, rate


def encode_wav(sound: Tensor, rate: int) -> bytes:
    """Samples ``(samples,)`` from -1 to 1 as the bytes of a WAV file of 16 bits."""
    data = (sound * 32768).round().clamp(-32768, 32767).to(torch.int16).numpy().tobytes()
    form = struct.pack("<HHIIHH", PCM, 1, rate, 2 * rate, 2, 16)
    chunks = [
        struct.pack("<4sI", name, len(body)) + body for name, body in ((b"fmt ", form), (b"data", data))
    ]
    return struct.pack("<4sI4s", b"RIFF", 4 + sum(map(len, chunks)), b"WAVE") + b"".join(chunks)


def _integers(raw: bytearray, bits: int) -> Tensor:
    if bits == 8:  # the only one without a sign
        return (torch.frombuffer(raw, dtype=torch.uint8).float() - 128) / 128
    if bits == 24:
        low, middle, high = torch.frombuffer(raw, dtype=torch.uint8).view(-1, 3).int().unbind(1)
        whole: Tensor = (high << 24 | middle << 16 | low << 8) >> 8
        return whole.float() / 2**23
    kind = torch.int16 if bits == 16 else torch.int32
    return (torch.frombuffer(raw, dtype=kind).double() / (1 << (bits - 1))).float()


_DECODERS: dict[tuple[int, int], Any] = {
    **{(PCM, bits): lambda raw, bits=bits: _integers(raw, bits) for bits in (8, 16, 24, 32)},
    (FLOAT, 32): lambda raw: torch.frombuffer(raw, dtype=torch.float32).clone(),
    (FLOAT, 64): lambda raw: torch.frombuffer(raw, dtype=torch.float64).float(),
}


def resample(sound: Tensor, old: int, new: int) -> Tensor:
    """Samples ``(samples,)`` at another rate; what the lower of both rates cannot carry is left out.

    Examples
    --------
    >>> time = torch.arange(4410) / 44100
    >>> at_8000 = resample((2 * torch.pi * 440 * time).sin(), 44100, 8000)
    >>> at_8000.shape
    torch.Size([800])
    >>> wanted = (2 * torch.pi * 440 * torch.arange(800) / 8000).sin()
    >>> bool((at_8000 - wanted)[50:-50].abs().max() < 0.01)
    True
    """
    if old == new:
        return sound
    # exact for all rates in use; a ratio of larger numbers than the table has room for is off by a millionth
    most = math.isqrt(TABLE * new // old)
    step, phases = Fraction(old, new).limit_denominator(most).as_integer_ratio()
    kernel, before = _sinc(step, phases)
    length = math.ceil(len(sound) * new / old)
    blocks = math.ceil(length / phases)
    missing = max((blocks - 1) * step + kernel.shape[-1] - before - len(sound), 0)
    padded = F.pad(sound, (before, missing))[None, None]
    return F.conv1d(padded, kernel, stride=step)[0].T.flatten()[:length]  # (phases, blocks) one by one


@lru_cache(maxsize=16)
def _sinc(step: int, phases: int, zeros: int = 12) -> tuple[Tensor, int]:
    """Windowed sines to interpolate with, ``(phases, 1, taps)``, and how many taps stand before a place."""
    cut = 0.95 * min(1.0, phases / step)  # of what the old rate carries
    before = math.ceil(zeros / cut)
    taps = torch.arange(-before, before + step + 1, dtype=torch.float64)
    place = taps - torch.arange(phases, dtype=torch.float64)[:, None] * step / phases
    window = torch.cos(place * cut / zeros * math.pi / 2).square() * (place.abs() * cut < zeros)
    kernel = cut * torch.sinc(place * cut) * window
    return kernel.float().unsqueeze(1), before


def log_mel(sound: Tensor, rate: int, mels: int = 40) -> Tensor:
    """The loudness of ``mels`` bands every 10 ms, ``(frames, mels)``, in units of its own spread.

    Windows of 25 ms; bands as the ear spaces them; the logarithm of the energy, from which the mean of all
    is taken: how loud a recording is does not matter.

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
    """Triangles over the frequencies of a spectrum, ``(mels, size / 2 + 1)``, evenly spaced to the ear.

    >>> bands = mel_bands(8000, 256, 20)
    >>> bands.shape, bool((bands.sum(1) > 0).all())
    (torch.Size([20, 129]), True)
    """
    top = 2595 * math.log10(1 + rate / 2 / 700)
    edges = 700 * (10 ** (torch.linspace(0, top, mels + 2, dtype=torch.float64) / 2595) - 1)
    place = torch.linspace(0, rate / 2, size // 2 + 1, dtype=torch.float64)
    # a band is at least as wide as the spectrum's own steps, or the lowest would hear nothing
    least = rate / size
    low = (edges[1:-1] - edges[:-2]).clamp(min=least)[:, None]
    high = (edges[2:] - edges[1:-1]).clamp(min=least)[:, None]
    away = place - edges[1:-1, None]
    return torch.where(away < 0, 1 + away / low, 1 - away / high).clamp(min=0).float()
