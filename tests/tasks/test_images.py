"""Images: the model against its parts, what moving and mirroring do, parts of data, and what goes wrong."""

import numpy
import pytest
import torch
from PIL import Image

from manyheads.data.readers.image import patches
from manyheads.models.config import build
from manyheads.tasks.classification import pooled
from manyheads.tasks.images import Images

SIZES = {"d_model": 12, "heads": 3, "layers": 1}


def squares(number=40, side=6, channels=1, seed=0):
    """Light squares on dark or dark ones on light, with a little noise."""
    random = numpy.random.default_rng(seed)
    shape = (number, side, side) if channels == 1 else (number, side, side, channels)
    classes = numpy.arange(number) % 2
    pixels = random.integers(60, size=shape)
    pixels[classes == 1] += 190
    return pixels.astype(numpy.uint8), numpy.array(["dark", "light"])[classes]


def npz(path, parts, **options):
    arrays = {}
    for seed, (part, number) in enumerate(parts.items()):
        arrays[f"x_{part}"], arrays[f"y_{part}"] = squares(number, seed=seed, **options)
    numpy.savez(path, **arrays)
    return str(path)


@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_the_model_is_patches_an_encoder_and_a_class(tmp_path, pooling):
    task = Images(patch=3, pooling=pooling, stem="patches", **SIZES)
    task.open(npz(tmp_path / "d.npz", {"train": 20}))
    model = build(task.describe()).double().eval()
    pixels = torch.rand(5, 1, 6, 6, dtype=torch.float64)
    x = model.stem.project(patches((pixels - model.mean) / model.spread, 3))
    if pooling == "first":
        x = torch.cat([model.first.expand(5, -1, -1), x], 1)
    seen = model.encoder(x)
    wanted = model.output(seen[:, 0] if pooling == "first" else seen.mean(1))
    assert torch.allclose(model(pixels)["logits"], wanted)
    assert model.labels == ["dark", "light"]
    assert task.open(str(tmp_path / "d.npz")).train.sizes[0] == x.shape[1]


def test_convolutions_see_around_their_square(tmp_path):
    task = Images(patch=2, stem="convolutions", **SIZES)
    task.open(npz(tmp_path / "d.npz", {"train": 20}))
    model = build(task.describe()).eval()
    pixels = torch.rand(1, 1, 6, 6, requires_grad=True)
    tokens = model.stem(pixels)
    assert tokens.shape == (1, 9, 12)
    (gradient,) = torch.autograd.grad(tokens[0, 4].sum(), pixels)
    seen = gradient[0, 0] != 0  # of the square in the middle
    assert seen[1:5, 1:5].any()
    assert not seen[0].any()
    assert not seen[:, 5].any()


def test_moved_and_mirrored_in_training_only(tmp_path):
    task = Images(shift=1, flip=True, **SIZES)
    data = task.open(npz(tmp_path / "d.npz", {"train": 20, "val": 4}))
    plain = numpy.load(tmp_path / "d.npz")
    held = data.valid.take([2], 0)[0][0]
    assert torch.equal(held[0], torch.as_tensor(plain["x_val"][2]))
    picture = torch.as_tensor(plain["x_train"][3])
    padded = torch.nn.functional.pad(picture, (1, 1, 1, 1))
    moved = {(d, r): padded[d : d + 6, r : r + 6] for d in range(3) for r in range(3)}
    either = moved | {(*key, "mirrored"): value.flip(1) for key, value in moved.items()}
    seen = set()
    for epoch in range(60):
        one = data.train.take([3], 0, epoch)[0][0][0]
        found = [key for key, value in either.items() if torch.equal(one, value)]
        assert found, "no picture that was moved by a pixel"
        seen.add(found[0])
    assert len(seen) > 12
    assert torch.equal(data.train.take([3], 7)[0][0], data.train.take([3], 7)[0][0])


def test_parts(tmp_path):
    task = Images(**SIZES)
    path = npz(tmp_path / "d.npz", {"train": 30, "test": 8})
    data = task.open(path)
    assert (len(data.train), len(data.valid), len(task.read(path))) == (27, 3, 8)
    other = npz(tmp_path / "v.npz", {"val": 6})
    data = Images(**SIZES).open(path, other)
    assert (len(data.train), len(data.valid)) == (30, 6)
    with pytest.raises(ValueError, match="has no part called train or all"):
        Images(**SIZES).open(other)


def test_classes_and_sizes_must_be_those_of_training(tmp_path):
    task = Images(**SIZES)
    task.open(npz(tmp_path / "d.npz", {"train": 20}))
    pixels, _ = squares(4)
    numpy.savez(tmp_path / "other.npz", images=pixels, labels=numpy.array(["grey"] * 4))
    with pytest.raises(ValueError, match="the class 'grey' is not among those of training: dark, light"):
        task.read(str(tmp_path / "other.npz"))
    with pytest.raises(ValueError, match="images of 8 x 8 pixels, and the model reads 6 x 6"):
        task.read(npz(tmp_path / "large.npz", {"test": 4}, side=8))
    with pytest.raises(ValueError, match="all examples are of the class 'grey'"):
        Images(**SIZES).open(str(tmp_path / "other.npz"))
    with pytest.raises(ValueError, match="6 x 6 pixels cannot be cut into patches of 4"):
        Images(patch=4, **SIZES).open(str(tmp_path / "d.npz"))


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [("pooling", "last", "pooling: expected first or mean"), ("stem", "x", "stem: expected convolutions"),
     ("size", 0, "size: expected 1"), ("label_smoothing", 1.0, "label_smoothing: expected"),
     ("shift", -1, "shift: 0 or more")],
)  # fmt: skip
def test_options_are_checked(option, value, why):
    with pytest.raises(ValueError, match=why):
        Images(**{option: value})
    with pytest.raises(ValueError, match="2, 4, 8"):
        Images(patch=6)


def test_pictures_of_people_are_brought_to_the_model(tmp_path):
    task = Images(patch=3, stem="patches", **SIZES)
    task.open(npz(tmp_path / "d.npz", {"train": 20}))
    model = build(task.describe())
    light = Image.new("RGB", (50, 30), (230, 230, 230))
    light.save(tmp_path / "light.png")
    (batch,) = (task.processor()([light], return_tensors="pt"),)
    assert batch["pixels"].shape == (1, 1, 6, 6)
    assert batch["pixels"].unique().tolist() == pytest.approx([230 / 255])
    (name,) = task.predict(model, [str(tmp_path / "light.png")])
    assert name == task.labels[int(model(**batch)["logits"].argmax())]


def test_metrics_are_what_counting_gives(tmp_path):
    task = Images(patch=3, stem="patches", label_smoothing=0.3, **SIZES)
    data = task.open(npz(tmp_path / "d.npz", {"train": 20, "val": 10}))
    model = build(task.describe()).eval()
    batch = task.collate(data.valid.take(range(10)))
    with torch.no_grad():
        model.output.bias.copy_(torch.tensor([4.0, -4.0, *[0.0] * (len(task.labels) - 2)]))  # no even guesses
        logits = model(batch["pixels"])["logits"]
        found = task.metrics([task.measure(model, task.collate(data.valid.take(part))) for part in
                              (range(7), range(7, 10))])  # fmt: skip
    p = logits.softmax(-1)[torch.arange(10), batch["labels"]]
    assert found["loss"] == pytest.approx(-p.log().mean().item(), rel=1e-5)
    assert found["accuracy"] == (logits.argmax(-1) == batch["labels"]).float().mean().item()
    smoothed = torch.nn.functional.cross_entropy(logits, batch["labels"], label_smoothing=0.3).item()
    summed, count = task.loss(model, batch)
    assert (summed / count).item() == pytest.approx(smoothed, rel=1e-5)
    one = task.collate(data.valid.take([0]))
    assert abs(task.loss(model, one)[0].item() - task.measure(model, one)[0]) > 0.1


def test_the_mean_leaves_padding_out():
    x = torch.randn(3, 5, 2, dtype=torch.float64)
    x[1, 2:] = torch.nan
    found = pooled(x, torch.tensor([5, 2, 4]), "mean")
    wanted = torch.stack([x[0].mean(0), x[1, :2].mean(0), x[2, :4].mean(0)])
    assert torch.allclose(found, wanted)
