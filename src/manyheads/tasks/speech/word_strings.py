"""Strings of words: joined from recordings, augmented, decoded, and compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.data.readers.recordings import Recording


def join_recordings(
    recordings: Sequence[Recording], gap: int, longest: int, random: torch.Generator
) -> tuple[Tensor, int]:
    """Recordings one after the other ``(samples,)``, and how many of them there was room for.

    Parameters
    ----------
    recordings: one or more; the first is always there.
    gap: samples of silence between two, at most.
    longest: samples that all may have together.
    random: for the lengths of the silences.

    Examples
    --------
    >>> takes = [Recording.of(torch.ones(5), "one"), Recording.of(torch.ones(3), "two")]
    >>> join_recordings(takes, 0, 99, torch.Generator())[0].shape
    torch.Size([8])
    >>> join_recordings(takes, 0, 7, torch.Generator())[1]
    1
    """
    parts, length = [recordings[0].sound], len(recordings[0].samples)
    for one in recordings[1:]:
        silence = int(torch.randint(gap + 1, (1,), generator=random))
        length += silence + len(one.samples)
        if length > longest:
            break
        parts += [torch.zeros(silence), one.sound]
    return torch.cat(parts), (len(parts) + 1) // 2


def change_speed(sound: Tensor, speed: float, silence: int, random: torch.Generator) -> Tensor:
    """A sound played faster or slower, between two silences.

    Parameters
    ----------
    sound: (samples,).
    speed: by how much faster or slower, at most: 0.1 for a tenth.
    silence: samples before, and after, at most.
    random: for how much of each.

    Examples
    --------
    >>> change_speed(torch.ones(100), 0.0, 7, torch.Generator().manual_seed(0)).shape[0] in range(100, 115)
    True
    """
    faster, before, after = torch.rand(3, generator=random).tolist()
    length = max(round(len(sound) / (1 + speed * (2 * faster - 1))), 1)
    played = F.interpolate(sound[None, None], length, mode="linear", align_corners=False)[0, 0]
    return F.pad(played, (round(before * silence), round(after * silence)))


def mask_frames(frames: Tensor, share: float, random: torch.Generator) -> Tensor:
    """Frames ``(length, bands)`` with two stretches of time and two of bands set to zero.

    Parameters
    ----------
    frames: of mean zero.
    share: of the length, and of the bands, that one stretch has at most.
    random: for which.

    References
    ----------
    Park et al. 2019, SpecAugment: a simple data augmentation method for automatic speech recognition.

    Examples
    --------
    >>> frames = mask_frames(torch.ones(20, 10), 0.5, torch.Generator().manual_seed(1))
    >>> bool((frames == 0).all(0).any()), bool((frames == 0).all(1).any()), frames.sum() > 0
    (True, True, tensor(True))
    """
    frames = frames.clone()
    for axis in (0, 1, 0, 1):
        size = frames.shape[axis]
        length, start = torch.rand(2, generator=random).tolist()
        count = round(length * share * size)
        frames.narrow(axis, int(start * (size - count)), count).zero_()
    return frames


def decode_greedily(tokens: Sequence[int], blank: int) -> list[int]:
    """The greedy decoding of connectionist temporal classification: repeats count once, blanks not at all.

    >>> decode_greedily([0, 3, 3, 0, 3, 5, 5, 0], blank=0)
    [3, 3, 5]
    """
    return [one for one, last in zip(tokens, [blank, *tokens], strict=False) if one not in (last, blank)]
