"""A small world to describe: drawings of coloured shapes, with captions in English and Chinese."""

from __future__ import annotations

import random
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

# Words in English and Chinese.
Word = tuple[str, str]
COLOURS: dict[Word, tuple[int, int, int]] = {
    ("red", "红色"): (220, 40, 40),
    ("green", "绿色"): (40, 170, 70),
    ("blue", "蓝色"): (50, 90, 220),
    ("yellow", "黄色"): (240, 200, 40),
    ("purple", "紫色"): (150, 60, 180),
    ("black", "黑色"): (20, 20, 20),
}
SHAPES: tuple[Word, ...] = (
    ("circle", "圆形"),
    ("square", "正方形"),
    ("triangle", "三角形"),
    ("cross", "十字"),
)
# Where the first thing is, seen from the second. There is no right and no below: a scene would then have two
# correct captions.
BESIDE, ABOVE, BEFORE = RELATIONS = (("to the left of", "左边"), ("above", "上面"), ("in front of", "前面"))
LANGUAGES = ("en", "zh")
FINER = 4  # dots per pixel along each side: antialiasing


class Thing(NamedTuple):
    """A shape in a colour."""

    colour: Word
    shape: Word


class Scene(NamedTuple):
    """One thing beside, above or in front of another."""

    one: Thing
    relation: Word
    other: Thing

    def describe(self) -> dict[str, str]:
        """The caption, by language.

        >>> one, other = Thing(("red", "红色"), SHAPES[0]), Thing(("blue", "蓝色"), SHAPES[3])
        >>> Scene(one, ABOVE, other).describe()
        {'en': 'a red circle above a blue cross', 'zh': '红色圆形在蓝色十字的上面'}
        """
        things = (self.one, self.other)
        one, other = (f"a {thing.colour[0]} {thing.shape[0]}" for thing in things)
        one_zh, other_zh = (f"{thing.colour[1]}{thing.shape[1]}" for thing in things)
        return {"en": f"{one} {self.relation[0]} {other}", "zh": f"{one_zh}在{other_zh}的{self.relation[1]}"}


def scenes(count: int, seed: int = 0) -> list[Scene]:
    """Different scenes of two different things, the same for the same seed.

    >>> len(set(scenes(700)))
    700
    """
    things = [Thing(*pair) for pair in product(COLOURS, SHAPES)]
    all_scenes = [Scene(*parts) for parts in product(things, RELATIONS, things) if _visible(Scene(*parts))]
    if count > len(all_scenes):
        raise ValueError(f"count: expected at most {len(all_scenes)} different scenes, got {count}")
    return random.Random(seed).sample(all_scenes, count)


def _visible(scene: Scene) -> bool:
    if scene.relation == BEFORE:
        return scene.one.colour != scene.other.colour
    return scene.one != scene.other


def draw(scene: Scene, size: int, generator: random.Random) -> Tensor:
    """An image of a scene on white, ``(3, size, size)`` bytes; sizes and positions vary a little.

    >>> draw(scenes(1)[0], 32, random.Random(0)).shape
    torch.Size([3, 32, 32])
    """
    image = torch.full((3, size, size), 255.0)
    for thing, side in ((scene.other, 1), (scene.one, -1)):  # the first is drawn last: it stands in front
        if scene.relation == BEFORE:
            centre = (0.0, 0.0)
            radius = generator.uniform(0.36, 0.42) if side > 0 else generator.uniform(0.12, 0.16)
        else:
            # apart along one axis, anywhere near the middle along the other
            across = generator.uniform(-0.15, 0.15)
            centre = (across, 0.24 * side) if scene.relation == BESIDE else (0.24 * side, across)
            radius = generator.uniform(0.13, 0.2)
        down, right = (0.5 + offset + generator.uniform(-0.03, 0.03) for offset in centre)
        cover = _cover(thing.shape[0], (down, right), radius, size)
        colour = torch.tensor(COLOURS[thing.colour]).view(3, 1, 1)
        image = image * (1 - cover) + colour * cover
    return image.round().to(torch.uint8)


def _cover(shape: str, centre: tuple[float, float], radius: float, size: int) -> Tensor:
    """How much of each pixel a shape covers, ``(size, size)``."""
    grid = (torch.arange(size * FINER) + 0.5) / (size * FINER)
    down, right = (grid[:, None] - centre[0]) / radius, (grid[None] - centre[1]) / radius
    if shape == "circle":
        inside = down.square() + right.square() < 1
    elif shape == "square":
        inside = torch.maximum(down.abs(), right.abs()) < 0.85
    elif shape == "triangle":
        inside = (down < 0.8) & (down > 2 * right.abs() - 1.1)
    else:
        inside = torch.minimum(down.abs(), right.abs()) < 0.3
        inside &= torch.maximum(down.abs(), right.abs()) < 1
    return inside.float().unfold(0, FINER, FINER).unfold(1, FINER, FINER).mean((2, 3))
