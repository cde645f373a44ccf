"""One colour scale for attention everywhere: by the square root of the weight, so that small ones show."""

from __future__ import annotations

from rich.console import Console

# From no attention to all of it; each step is lighter than the one before, also for colour-blind readers.
RAMP = ((22, 20, 48), (74, 40, 120), (160, 56, 122), (230, 100, 82), (250, 176, 92), (252, 246, 190))


def has_colours(console: Console) -> bool:
    """Whether the console shows colours: not on plain terminals, in files, or where NO_COLOR is set.

    >>> has_colours(Console(color_system="truecolor", no_color=True))
    False
    """
    return console.color_system is not None and not console.no_color


def colour(weight: float) -> tuple[int, int, int]:
    """Red, green and blue of an attention weight from 0 to 1.

    >>> colour(0.0), colour(1.0)
    ((22, 20, 48), (252, 246, 190))
    """
    position = min(max(weight, 0.0), 1.0) ** 0.5 * (len(RAMP) - 1)
    low = min(int(position), len(RAMP) - 2)
    share = position - low
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(RAMP[low], RAMP[low + 1], strict=True))
    return red, green, blue
