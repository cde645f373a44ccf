"""Pictures from files: every format against what was written, and what is wrong with others."""

import gzip
import struct

import numpy
import pytest
import torch
from PIL import Image

from manyheads.data.readers.image import patches, read_image, read_set, to_pixels


def idx(path, array, compressed=False):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    raw = header + array.astype(numpy.uint8).tobytes()
    path.write_bytes(gzip.compress(raw) if compressed else raw)


@pytest.fixture
def mnist(tmp_path):
    random = numpy.random.default_rng(0)
    arrays = {}
    for part, number in (("train", 7), ("t10k", 3)):
        arrays[part] = random.integers(256, size=(number, 5, 3)), random.integers(10, size=number)
        idx(tmp_path / f"{part}-images-idx3-ubyte.gz", arrays[part][0], compressed=True)
        idx(tmp_path / f"{part}-labels-idx1-ubyte", arrays[part][1])
    return tmp_path, arrays


@pytest.mark.parametrize("suffix", ["png", "bmp", "tif"])
def test_a_picture_is_read_as_it_was_written(tmp_path, suffix):
    pixels = numpy.random.default_rng(1).integers(256, size=(5, 7, 3), dtype=numpy.uint8)
    Image.fromarray(pixels).save(tmp_path / f"p.{suffix}")
    assert torch.equal(read_image(tmp_path / f"p.{suffix}"), torch.as_tensor(pixels).permute(2, 0, 1))
    Image.fromarray(pixels[..., 0]).save(tmp_path / f"grey.{suffix}")
    assert torch.equal(read_image(tmp_path / f"grey.{suffix}"), torch.as_tensor(pixels[None, ..., 0]))


def test_pictures_of_other_kinds(tmp_path):
    clear = Image.new("RGBA", (3, 2), (255, 0, 0, 0))  # what cannot be seen is white, not red
    assert to_pixels(clear).unique().tolist() == [255]
    deep = Image.fromarray(numpy.full((2, 3), 65535, dtype=numpy.uint16))
    assert to_pixels(deep).tolist() == [[[255] * 3] * 2]
    assert to_pixels(Image.new("P", (3, 2))).shape == (3, 2, 3)
    wide = Image.new("RGB", (20, 10), "blue")
    wide.paste("red", (0, 0, 5, 10))
    assert to_pixels(wide, 10)[0].unique().tolist() == [0]  # the middle is kept, the red edge cut off
    turned = Image.new("L", (3, 2))
    exif = turned.getexif()
    exif[0x0112] = 6  # lies on its side
    turned.save(tmp_path / "turned.png", exif=exif)
    assert read_image(tmp_path / "turned.png").shape == (1, 3, 2)


def test_a_picture_that_cannot_be_read_is_named(tmp_path):
    whole = tmp_path / "whole.png"
    Image.fromarray(numpy.random.default_rng(2).integers(256, size=(64, 64), dtype=numpy.uint8)).save(whole)
    (tmp_path / "cut.png").write_bytes(whole.read_bytes()[:2000])
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "empty.png").write_bytes(b"")
    for name in ("cut", "text", "empty", "none"):
        with pytest.raises(ValueError, match=rf"data: .*{name}\.png"):
            read_image(tmp_path / f"{name}.png")


def test_patches_are_squares_row_by_row():
    pixels = torch.randn(2, 3, 6, 10)
    cut = patches(pixels, 2)
    assert cut.shape == (2, 15, 12)
    assert torch.equal(cut[1, 7], pixels[1, :, 2:4, 4:6].flatten())  # the second row, the third column
    with pytest.raises(ValueError, match="6 x 10 pixels cannot be cut into patches of 4"):
        patches(pixels, 4)


def test_idx_files(mnist):
    folder, arrays = mnist
    for part, name in (("train", "train"), ("test", "t10k")):
        pixels, labels = read_set(str(folder), part)
        assert torch.equal(pixels[:, 0], torch.as_tensor(arrays[name][0]).to(torch.uint8))
        assert labels == [str(number) for number in arrays[name][1]]
    assert read_set(str(folder), "valid") is None
    assert read_set(str(folder), "all") is None
    alone = read_set(str(folder / "train-images-idx3-ubyte.gz"), "all")
    assert len(alone[1]) == 7


def test_idx_files_that_are_wrong(mnist):
    folder, arrays = mnist
    path = folder / "train-labels-idx1-ubyte"
    idx(path, arrays["train"][1][:5])
    with pytest.raises(ValueError, match=r"7 images and .* 5 labels"):
        read_set(str(folder), "train")
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match="idx1-ubyte has 3 bytes after its header, which says 5"):
        read_set(str(folder), "train")
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="is not an IDX file of bytes with 1 axes"):
        read_set(str(folder), "train")
    path.unlink()
    with pytest.raises(ValueError, match=r"has no train-labels-idx1-ubyte\.gz beside it"):
        read_set(str(folder), "train")
    images = folder / "train-images-idx3-ubyte.gz"
    idx(path, arrays["train"][1])
    images.write_bytes(images.read_bytes()[:40])
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\.gz is damaged"):
        read_set(str(folder), "train")


@pytest.mark.parametrize("layout", ["first", "last", "none", "fractions"])
def test_npz_files(tmp_path, layout):
    random = numpy.random.default_rng(3)
    pixels = random.integers(256, size=(4, 3, 5, 7), dtype=numpy.uint8)
    stored = {"first": pixels, "last": pixels.transpose(0, 2, 3, 1), "none": pixels[:, 0],
              "fractions": pixels / 255}[layout]  # fmt: skip
    numpy.savez(tmp_path / "d.npz", x_train=stored, y_train=numpy.array([[3], [1], [1], [0]]))
    found, labels = read_set(str(tmp_path / "d.npz"), "train")
    assert torch.equal(found, torch.as_tensor(pixels[:, :1] if layout == "none" else pixels))
    assert labels == ["3", "1", "1", "0"]
    assert read_set(str(tmp_path / "d.npz"), "test") is None


def test_npz_files_that_are_wrong(tmp_path):
    path = tmp_path / "d.npz"
    cases = [
        ({"images": numpy.zeros((2, 5)), "labels": numpy.zeros(2)}, r"is \(2, 5\); expected \(images"),
        ({"images": numpy.full((2, 5, 5), 256), "labels": numpy.zeros(2)}, "outside 0 to 255"),
        ({"images": numpy.full((2, 5, 5), 1.5), "labels": numpy.zeros(2)}, "outside 0 to 1"),
        ({"images": numpy.zeros((2, 5, 5)), "labels": numpy.zeros(3)}, "2 images in images and 3 labels"),
        ({"a": numpy.zeros(2)}, "holds a; expected x_train"),
    ]
    for arrays, why in cases:
        numpy.savez(path, **arrays)
        with pytest.raises(ValueError, match=why):
            read_set(str(path), "all")
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(ValueError, match=r"d\.npz is not a readable archive"):
        read_set(str(path), "all")
    with pytest.raises(ValueError, match="there is no "):
        read_set(str(tmp_path / "nothing"), "all")


def test_folders_of_classes(tmp_path):
    for part in ("train", "val"):
        for name, shade in (("b", 20), ("a", 10)):
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(2):
                path = tmp_path / part / name / f"{number}.png"
                Image.new("L", (4, 3), shade + number).save(path)
    pixels, labels = read_set(str(tmp_path), "train")
    assert labels == ["a", "a", "b", "b"]
    assert pixels[:, 0, 0, 0].tolist() == [10, 11, 20, 21]
    assert read_set(str(tmp_path), "valid") is not None
    assert read_set(str(tmp_path), "test") is None
    assert len(read_set(str(tmp_path / "train"), "all")[1]) == 4
    Image.new("RGB", (4, 3), "red").save(tmp_path / "train" / "a" / "0.png")
    pixels, _ = read_set(str(tmp_path), "train")  # grey ones become colours of equal parts
    assert pixels.shape == (4, 3, 3, 4)
    assert pixels[1, :, 0, 0].tolist() == [11, 11, 11]
    Image.new("L", (9, 9)).save(tmp_path / "train" / "b" / "1.png")
    with pytest.raises(ValueError, match=r"b/1\.png has 9 x 9 pixels, .* has 3 x 4; .* --size"):
        read_set(str(tmp_path), "train")
    assert read_set(str(tmp_path), "train", 6)[0].shape == (4, 3, 6, 6)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no folder with images"):
        read_set(str(tmp_path / "empty"), "all")
