"""Image classification, by a transformer that reads patches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.common.devices import device_of
from manyheads.common.preserved_state import evaluating
from manyheads.data.examples import Example, Examples
from manyheads.data.readers.image import Labelled, patches, read_image, read_set, to_pixels
from manyheads.models.config import ModelDescription
from manyheads.nn.transformers import Encoder
from manyheads.tasks.classification import TESTING, Classification, first_of, parts_of, pooled, split_indices
from manyheads.tasks.image_stems import check_stem, make_stem
from manyheads.training.options import option
from manyheads.training.run_folder import read_config
from manyheads.training.task import Data

if TYPE_CHECKING:
    from PIL.Image import Image


class ImageClassifier(nn.Module):
    """Patches of an image through an encoder, and the class from the class token or from the mean.

    Parameters
    ----------
    labels: names of the classes.
    channels, height, width: of images.
    patch: side of a patch, in pixels.
    mean, spread: mean and standard deviation of each channel in the training images.
    stem: how a patch becomes a token: "patches", one linear layer; or "convolutions", one for each halving of
        the image, which also see the pixels around the patch.
    pooling: "first" or "mean".
    options: of `Encoder`.

    Examples
    --------
    >>> sizes = {"d_model": 12, "heads": 3, "layers": 1, "positions": "none"}
    >>> model = ImageClassifier(["a", "b"], 1, 8, 8, 2, mean=[0.5], spread=[0.5], **sizes)
    >>> model(torch.rand(3, 1, 8, 8))["logits"].shape                       # (batch, classes)
    torch.Size([3, 2])
    """

    def __init__(
        self,
        labels: Sequence[str],
        channels: int,
        height: int,
        width: int,
        patch: int,
        *,
        mean: Sequence[float],
        spread: Sequence[float],
        stem: str = "patches",
        pooling: str = "first",
        d_model: int,
        **options: Any,
    ) -> None:
        super().__init__()
        self.labels, self.patch, self.pooling = list(labels), patch, pooling
        self.mean: Tensor
        self.spread: Tensor
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("spread", torch.tensor(spread).view(-1, 1, 1), persistent=False)
        self.stem = make_stem(stem, channels, d_model, patch)
        self.first = nn.Parameter(0.02 * torch.randn(1, 1, d_model)) if pooling == "first" else None
        self.encoder = Encoder(d_model, **options)
        self.output = nn.Linear(d_model, len(self.labels))

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        """Images ``(batch, channels, height, width)``, from 0 to 1, to ``logits`` (batch, classes)."""
        x = self.stem((pixels - self.mean) / self.spread)
        if self.first is not None:
            x = torch.cat([self.first.expand(len(x), -1, -1), x], 1)
        return {"logits": self.output(pooled(self.encoder(x), None, self.pooling))}


@dataclass(kw_only=True)
class Images(Classification):
    """Image classification.

    ``data`` is a folder with a folder of images for each class, or with such folders for train, val and test;
    a folder of IDX files, the format of MNIST; or an .npz file with x_train, y_train, x_test and y_test.
    Default: the handwritten digits that come with scikit-learn. If there is no validation part, every tenth
    image is held out; evaluate --data reads the test part.

    Examples
    --------
    >>> task = Images(d_model=12, heads=3, layers=1)
    >>> data = task.open(None)
    >>> task.collate(data.train.take([0, 1]))["pixels"].shape               # (batch, channels, height, width)
    torch.Size([2, 1, 8, 8])
    """

    name: ClassVar[str] = "images"
    unit: ClassVar[str] = "images"
    training: ClassVar[Mapping[str, float | str]] = {
        "steps": 800,
        "batch_tokens": 1024,
        "learning_rate": 2e-3,
        "warmup": 50,
        "weight_decay": 0.05,
        "evaluate_every": 100,
        "evaluate_examples": 0,
    }

    d_model: int = option(64, "Width of a token.")
    positions: str = option("learned", "sinusoidal, learned, rotary, alibi or none.")
    layers: int = option(3, "Number of layers.")
    patch: int = option(2, "Side of a patch, in pixels.")
    stem: str = option("convolutions", "How a patch becomes a token: convolutions, or patches (linear).")
    size: int | None = option(None, "Height and width that the images of folders are scaled to.")
    shift: int = option(1, "Augmentation: pixels by which images are shifted at random.")
    flip: bool = option(False, "Augmentation: mirror every other image: for photographs, not for letters.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_stem(self.stem, self.patch)
        if self.shift < 0 or (self.size is not None and self.size < 1):
            raise ValueError("size: expected 1 or more, and shift: 0 or more")
        self.shape: list[int] = []  # channels, height, width
        self.scale: tuple[list[float], list[float]] = ([], [])  # mean and spread of each channel

    def open(self, data: str | None, valid: str | None = None) -> Data:
        """The images to train on and those to validate on."""
        (pixels, names), held_out = parts_of(self._part, data, valid, digits)
        if held_out is None:
            learned, held = split_indices(len(pixels))
            held_out = pixels[held], [names[i] for i in held]
            pixels, names = pixels[learned], [names[i] for i in learned]
        numbers = self.numbers(names, learn=True)
        if not self.shape:
            self.shape = list(pixels.shape[1:])
            patches(torch.empty(1, *self.shape), self.patch)  # raises if they do not fit
            each = pixels.transpose(0, 1).flatten(1).float() / 255
            self.scale = each.mean(1).tolist(), each.std(1).clamp(min=1e-3).tolist()
        notes = [f"{len(pixels):,} images to train on, {len(held_out[0]):,} held out"]
        return Data(self._examples(pixels, numbers, True), self._held_out(*held_out), notes)

    def read(self, data: str) -> Examples:
        """The test part; all of data without parts."""
        return self._held_out(*first_of(self._part, data, TESTING))

    def has_test(self, data: str) -> bool:
        """Whether the data has a folder, a file or arrays called test."""
        return self._part(data, "test") is not None

    def describe(self) -> ModelDescription:
        """A `ImageClassifier`."""
        channels, height, width = self.shape
        options = self.of_the_stack(max_length=self._tokens()) | {
            "labels": self.labels,
            "channels": channels,
            "height": height,
            "width": width,
            "patch": self.patch,
            "mean": self.scale[0],
            "spread": self.scale[1],
            "stem": self.stem,
            "pooling": self.pooling,
        }
        return {"class": "images.class", "options": options}

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """Pixels ``(batch, channels, height, width)`` from 0 to 1, and labels (batch,)."""
        pixels, labels = zip(*examples, strict=True)
        return {"pixels": torch.stack(pixels).float() / 255, "labels": torch.stack(labels)}

    def predict(self, model: nn.Module, inputs: list[str]) -> list[str]:
        """The class of each image file."""
        pixels = torch.stack([self._fit_channels(read_image(path, self._size())) for path in inputs])
        with evaluating(model), torch.no_grad():
            logits = model((pixels.float() / 255).to(device_of(model)))["logits"]
        return [self.labels[number] for number in logits.argmax(-1).tolist()]

    def processor(self) -> Callable[..., dict[str, Tensor]]:
        """A function from Pillow's images to the arguments of the model."""

        def process(images: Sequence[Image], **_: object) -> dict[str, Tensor]:
            pixels = torch.stack([self._fit_channels(to_pixels(image, self._size())) for image in images])
            return {"pixels": pixels.float() / 255}

        return process

    def restore(self, folder: Path) -> None:
        """Read classes and sizes from the description of the model."""
        super().restore(folder)
        options = read_config(folder)["options"]
        self.shape = [options[name] for name in ("channels", "height", "width")]
        self.scale = options["mean"], options["spread"]

    def _part(self, data: str, part: str) -> Labelled | None:
        return read_set(data, part, self.size)

    def _held_out(self, pixels: Tensor, names: list[str]) -> Examples:
        if list(pixels.shape[2:]) != self.shape[1:]:
            (here, there), (height, width) = pixels.shape[2:], self.shape[1:]
            raise ValueError(
                f"data: images of {here} x {there} pixels, and the model reads {height} x {width}; "
                "expected the same size"
            )
        return self._examples(pixels, self.numbers(names), False)

    def _examples(self, pixels: Tensor, numbers: Tensor, learning: bool) -> Examples:
        shift, (height, width) = self.shift if learning else 0, self.shape[1:]

        def make(index: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
            image = self._fit_channels(pixels[index])
            if shift:
                down, right = torch.randint(2 * shift + 1, (2,), generator=random).tolist()
                image = F.pad(image, (shift,) * 4)[:, down : down + height, right : right + width]
            if learning and self.flip and int(torch.randint(2, (), generator=random)):
                image = image.flip(2)
            return image, numbers[index]

        return Examples([self._tokens()] * len(pixels), make)

    def _fit_channels(self, pixels: Tensor) -> Tensor:
        """One image with as many channels as the model reads."""
        channels = self.shape[0]
        if channels == len(pixels):
            return pixels
        if channels == 3:
            return pixels.expand(3, -1, -1)
        weights = torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)  # luma (ITU-R BT.601)
        return (pixels * weights).sum(0, keepdim=True).round().to(torch.uint8)

    def _size(self) -> tuple[int, int]:
        return self.shape[1], self.shape[2]

    def _tokens(self) -> int:
        _, height, width = self.shape
        return (height // self.patch) * (width // self.patch) + (self.pooling == "first")


def digits() -> tuple[Tensor, list[str]]:
    """1,797 handwritten digits of 8 x 8 pixels, of scikit-learn (from the UCI repository).

    >>> pixels, names = digits()
    >>> pixels.shape, len(set(names))
    (torch.Size([1797, 1, 8, 8]), 10)
    """
    from sklearn.datasets import load_digits

    dataset = load_digits()
    pixels = (torch.as_tensor(dataset.images) * (255 / 16)).round().to(torch.uint8)
    return pixels.unsqueeze(1), [str(number) for number in dataset.target.tolist()]
