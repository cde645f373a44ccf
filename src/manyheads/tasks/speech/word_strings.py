"""Strings of words: joined from recordings, changed a little to learn from, spelled, and compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.data.readers.recordings import Recording


def joined(
    recordings: Sequence[Recording], gap: int, longest: int, random: torch.Generator
) -> tuple[Tensor, int]:
    """Recordings one after the other ``(samples,)``, and how many of them there was room for.

    Parameters
    ----------
    recordings: at least one, which is there in any case.
    gap: samples of silence between two, at most.
    longest: samples that all may have together.
    random: says how long the silences are.

    Examples
    --------
    >>> takes = [Recording.of(torch.ones(5), "one"), Recording.of(torch.ones(3), "two")]
    >>> joined(takes, 0, 99, torch.Generator())[0].shape, joined(takes, 0, 7, torch.Generator())[1]
    (torch.Size([8]), 1)
    """
    parts, length = [recordings[0].sound], len(recordings[0].samples)
    for one in recordings[1:]:
        silence = int(torch.randint(gap + 1, (1,), generator=random))
        length += silence + len(one.samples)
        if length > longest:
            break
        parts += [torch.zeros(silence), one.sound]
    return torch.cat(parts), (len(parts) + 1) // 2


def changed(sound: Tensor, speed: float, silence: int, random: torch.Generator) -> Tensor:
    """A sound as it might have been: faster or slower, higher or lower with that, between two silences.

    Parameters
    ----------
    sound: (samples,).
    speed: by how much faster or slower, at most: 0.1 for a tenth.
    silence: samples before, and after, at most.
    random: says how much of each.

    Examples
    --------
    >>> changed(torch.ones(100), 0.0, 7, torch.Generator().manual_seed(0)).shape[0] in range(100, 115)
    True
    """
    faster, before, after = torch.rand(3, generator=random).tolist()
    length = max(round(len(sound) / (1 + speed * (2 * faster - 1))), 1)
    played = F.interpolate(sound[None, None], length, mode="linear", align_corners=False)[0, 0]
    return F.pad(played, (round(before * silence), round(after * silence)))


def hidden(frames: Tensor, share: float, random: torch.Generator) -> Tensor:
    """Frames ``(length, bands)`` of which two stretches of time and two of bands are zero.

    Parameters
    ----------
    frames: of mean zero, so that what is hidden says nothing.
    share: of the length, and of the bands, that one stretch has at most.
    random: says which.

    References
    ----------
    Park et al. 2019, SpecAugment: a simple data augmentation method for automatic speech recognition.

    Examples
    --------
    >>> found = hidden(torch.ones(20, 10), 0.5, torch.Generator().manual_seed(1))
    >>> bool((found == 0).all(0).any()), bool((found == 0).all(1).any()), found.sum() > 0
    (True, True, tensor(True))
    """
    frames = frames.clone()
    for axis in (0, 1, 0, 1):
        size = frames.shape[axis]
        length, start = torch.rand(2, generator=random).tolist()
        count = round(length * share * size)
        frames.narrow(axis, int(start * (size - count)), count).zero_()
    return frames


def spelled(places: Sequence[int], blank: int) -> list[int]:
    """What stands at every place, as a string: what stands there twice counts once, blanks not at all.

    >>> spelled([0, 3, 3, 0, 3, 5, 5, 0], blank=0)
    [3, 3, 5]
    """
    return [one for one, last in zip(places, [blank, *places], strict=False) if one not in (last, blank)]


def edits(written: Sequence[str], wanted: Sequence[str]) -> int:
    """The fewest words to replace, remove or add that make one string the other.

    >>> edits("a b d e".split(), "a c d".split())
    2
    """
    row = list(range(len(wanted) + 1))
    for i, one in enumerate(written, 1):
        above, row = row, [i]
        for j, other in enumerate(wanted, 1):
            row.append(min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (one != other)))
    return row[-1]
