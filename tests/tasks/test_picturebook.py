"""The picture book: shapes, pictures and captions from files, both ways to see, and who looks where."""

import io
import random
import zipfile
from collections import Counter

import pytest
import torch
from PIL import Image

import manyheads as mh
from manyheads.models.config import build
from manyheads.tasks import find, load
from manyheads.tasks.picturebook import captions, synthetic
from manyheads.tasks.picturebook.models import Stream, picture_shares
from manyheads.tasks.picturebook.task import KINDS, Picturebook, jittered
from manyheads.training.train import train

SMALL = {"d_model": 12, "heads": 3, "layers": 2, "decoder_layers": 1, "dropout": 0.0, "vocabulary": 270}
SMALL |= {"size": 12, "patch": 4, "max_tokens": 23, "jitter": 0.0}
COLOURS = {"red": "rot", "green": "grün", "blue": "blau", "white": "weiß", "black": "schwarz", "gray": "grau"}


def png(colour, size=12, mode="RGB"):
    file = io.BytesIO()
    Image.new(mode, (size, size), colour).save(file, "PNG")
    return file.getvalue()


def rows(names=COLOURS):
    return ["file\ten\tde\tgroup", *(f"{name}.png\tall {name}\tganz {names[name]}\tx" for name in names)]


@pytest.fixture
def book(tmp_path):
    """Six pictures of one colour each, with captions in two languages."""
    for name in COLOURS:
        (tmp_path / f"{name}.png").write_bytes(png(name))
    (tmp_path / "captions.tsv").write_text("\n".join(rows()) + "\n", encoding="utf-8")
    return tmp_path


def opened(book, **options):
    task = Picturebook(**(SMALL | options))
    return task, task.open(str(book))


def test_scenes_are_different_and_can_be_told_apart():
    known = synthetic.scenes(1584)
    said = [scene.describe() for scene in known]
    for language in synthetic.LANGUAGES:
        assert len({each[language] for each in said}) == 1584
    with pytest.raises(ValueError, match="at most 1584 different scenes"):
        synthetic.scenes(1585)
    assert synthetic.scenes(31) == synthetic.scenes(31)
    assert all(s.one.colour != s.other.colour for s in known if s.relation == synthetic.BEFORE)


def test_pictures_show_what_is_said():
    """The colours are there, and the first thing stands where the words say."""
    for number, scene in enumerate(synthetic.scenes(60, seed=3)):
        picture = synthetic.draw(scene, 48, random.Random(number))
        places = []
        for thing in (scene.one, scene.other):
            same = (
                picture == torch.tensor(synthetic.COLOURS[thing.colour], dtype=torch.uint8).view(3, 1, 1)
            ).all(0)
            assert same.sum() > 30
            places.append(same.nonzero().float().mean(0))
        if scene.one.colour == scene.other.colour:
            continue
        down, right = (places[1] - places[0]).tolist()
        if scene.relation == synthetic.BESIDE:
            assert right > 10
        elif scene.relation == synthetic.ABOVE:
            assert down > 10
        else:
            assert max(abs(down), abs(right)) < 6


def test_shapes_have_their_areas():
    radius, size = 0.3, 64
    for shape, area in (
        ("circle", 3.1416),
        ("square", 1.7**2),
        ("cross", 4 * 0.6 - 0.36),
        ("triangle", 1.9 * 0.95),
    ):
        cover = synthetic._cover(shape, (0.5, 0.5), radius, size)
        assert float(cover.mean()) / radius**2 == pytest.approx(area, rel=0.03)


@pytest.mark.parametrize("form", ["folder", "zip", "zip beside", "table"])
def test_books_in_all_their_forms(book, tmp_path_factory, form):
    data = book
    if form != "folder":
        data = tmp_path_factory.mktemp("book")
        if form == "table":
            data = book / "other.tsv"
            (book / "captions.tsv").rename(data)
        else:
            with zipfile.ZipFile(data / "pictures.zip", "w") as archive:
                for name in COLOURS:
                    archive.write(book / f"{name}.png", f"{name}.png")
                if form == "zip":
                    archive.write(book / "captions.tsv", "captions.tsv")
            if form == "zip":
                data = data / "pictures.zip"
            else:
                (book / "captions.tsv").rename(data / "captions.tsv")
    pages, languages, empty = captions.read_pages(str(data), 12, [])
    assert (languages, empty, len(pages)) == (["en", "de"], 0, 6)
    assert pages[1].captions == {"en": "all green", "de": "ganz grün"}
    assert pages[0].picture[:, 5, 5].tolist() == [255, 0, 0]
    assert [list(page.captions) for page in captions.read_pages(str(data), 12, ["de"])[0]] == [["de"]] * 6


def test_pictures_of_other_sizes_and_kinds(book):
    (book / "red.png").write_bytes(png((255, 0, 0, 0), size=31, mode="RGBA"))  # transparent: white
    (book / "green.png").write_bytes(png(77, size=5, mode="L"))
    pages, _, _ = captions.read_pages(str(book), 12, [])
    assert all(page.picture.shape == (3, 12, 12) for page in pages)
    assert pages[0].picture.min() == 255
    assert pages[1].picture.unique().tolist() == [77]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (
            ["name\ten", "red.png\tred"],
            "captions.tsv has no column 'file' in its first line; it has name, en",
        ),
        (["file\tgroup", "red.png\tx"], "captions.tsv has no captions; expected columns such as en or zh"),
        (["file\ten"], "captions.tsv has no rows"),
        (["file\ten", "red.png\tred\tmore"], "line 2 of .*captions.tsv has 3 columns; expected 2"),
        (
            ["file\ten", "red.png\tred", "pink.png\tpink"],
            "line 3 of .*captions.tsv names 'pink.png', which is not",
        ),
        (["file\ten", "red.png\t"], "captions.tsv has no caption; expected at least one"),
    ],
)
def test_bad_tables_are_named(book, table, words):
    (book / "captions.tsv").write_text("\n".join(table) + "\n")
    with pytest.raises(ValueError, match=words):
        Picturebook(**SMALL).open(str(book))


def test_damaged_pictures_are_named(book, tmp_path_factory):
    whole = (book / "red.png").read_bytes()
    for content in (b"", b"no picture", whole[: len(whole) // 2]):
        (book / "red.png").write_bytes(content)
        with pytest.raises(ValueError, match=r"red.png is not a readable image"):
            Picturebook(**SMALL).open(str(book))
    archive = tmp_path_factory.mktemp("zip") / "book.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(book.iterdir()):
            file.write(path, path.name)
    with pytest.raises(ValueError, match=r"book.zip.red.png is not a readable image"):
        Picturebook(**SMALL).open(str(archive))
    (book / "captions.tsv").unlink()
    with pytest.raises(ValueError, match=r"has no captions.tsv; expected one"):
        Picturebook(**SMALL).open(str(book))


def test_empty_captions_are_left_out_and_counted(book):
    lines = rows()
    lines[1] = "red.png\tall red\t\tx"
    (book / "captions.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    _, data = opened(book)
    assert len(data.train) + len(data.valid) == 11
    assert "1 empty captions were left out" in data.notes


def test_pictures_or_captions_are_held_out(book):
    def seen(examples):
        return Counter(
            tuple(picture[:, 0, 0].tolist()) for picture, _ in examples.take(range(len(examples)), 0)
        )

    _, data = opened(book)
    train, valid = seen(data.train), seen(data.valid)
    assert not set(train) & set(valid)
    assert list(valid.values()) == [2]
    _, data = opened(book, held_out="captions")
    train, valid = seen(data.train), seen(data.valid)
    assert len(data.valid) == 1
    assert set(valid) < set(train)


def test_long_captions_are_left_out_and_counted(book):
    lines = rows()
    lines[3] = f"blue.png\t{'b l u e ' * 40}\tganz blau\tx"
    (book / "captions.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    _, data = opened(book, held_out="captions", max_tokens=11)
    assert data.notes[0] == "1 captions longer than 11 tokens were left out"
    with pytest.raises(ValueError, match="max_tokens: all captions are longer than 4"):
        opened(book, max_tokens=4, vocabulary=259)


def test_the_first_token_says_the_language(book):
    task, data = opened(book)
    batch = task.collate(data.train.take(range(len(data.train)), 0))
    first = [task.tokenizer.id_to_token(number) for number in batch["ids"][:, 0].tolist()]
    texts = task.decode_up_to("<end>", batch["ids"][:, 1:])
    assert Counter(first) == {"<en>": 5, "<de>": 5}
    assert all(
        text.startswith("all" if language == "<en>" else "ganz")
        for language, text in zip(first, texts, strict=True)
    )
    assert task.languages == "en,de"


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_the_formula(book, kind):
    task, data = opened(book, kind=kind, label_smoothing=0.2)
    torch.manual_seed(0)
    model = build(task.describe()).double()
    examples = [(picture.double(), ids) for picture, ids in data.train.take(range(5), 0)]
    loss, count = task.loss(model, task.collate(examples))
    total = tokens = 0
    for picture, ids in examples:
        for row, label in zip(
            model(picture[None], ids[None, :-1])[0].log_softmax(-1), ids[1:].tolist(), strict=True
        ):
            total -= 0.8 * row[label].item() + 0.2 * row.mean().item()
            tokens += 1
    assert count == tokens
    assert loss.item() == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("positions", ["learned", "rotary", "alibi"])
def test_writing_is_choosing_the_likeliest_again_and_again(book, kind, positions):
    """What is written with a cache, of all languages together, is what the whole model says step by step."""
    torch.manual_seed(0)
    task, data = opened(book, kind=kind, positions=positions)
    model = build(task.describe()).eval()
    batch = task.collate(data.train.take(range(4), 0))
    end = task.tokenizer.token_to_id("<end>")
    written = model.write(batch["pictures"], batch["ids"][:, 0], end, 7)
    for row in range(4):
        ids = batch["ids"][row : row + 1, :1]
        for place in range(7):
            with torch.no_grad():
                token = model(batch["pictures"][row : row + 1], ids)[:, -1].argmax(-1, keepdim=True)
            assert token.item() == written[row, place]
            if token.item() == end:
                assert bool((written[row, place:] == end).all())
                break
            ids = torch.cat([ids, token], 1)


def test_in_a_single_stream_patches_do_not_see_words_and_words_not_the_future(book):
    torch.manual_seed(0)
    model = Stream(4, vocabulary=31, d_model=12, heads=3, layers=2)
    pictures, ids = torch.rand(1, 3, 12, 12), torch.randint(31, (1, 7))
    weights = mh.maps(model, {"pictures": pictures, "ids": ids}, {0: [0], 1: [0, 1, 2]})
    for each in weights.values():
        w = each.weights
        assert float(w[..., :9, 9:].abs().max()) == 0
        assert float(w[..., 9:, :9].min()) > 0
        assert float(w[..., 9:, 9:].triu(1).abs().max()) == 0
    other = ids.clone()
    other[0, 4:] = (other[0, 4:] + 1) % 31
    with torch.no_grad():
        torch.testing.assert_close(model(pictures, other)[:, :4], model(pictures, ids)[:, :4])
        assert not torch.allclose(model(pictures.flip(3), ids)[:, 0], model(pictures, ids)[:, 0])


def test_shares_are_what_the_maps_say():
    torch.manual_seed(0)
    model = Stream(4, vocabulary=31, d_model=12, heads=3, layers=2)
    batch = {
        "pictures": torch.rand(2, 3, 12, 12),
        "ids": torch.randint(31, (2, 7)),
        "lengths": torch.tensor([7, 3]),
    }
    shares = picture_shares(model, [batch, batch])
    with torch.no_grad():
        x = torch.cat([model.stem(1 - batch["pictures"]), model.embedding(batch["ids"])], 1)
        place = torch.arange(16)
        mask = (place < 9) | (place <= place[:, None])
        x = model.stack.positions(x)
        for layer, block in enumerate(model.stack.blocks):
            _, weights = block.attention(block.attention_norm(x), mask=mask, return_weights=True)
            given = weights[..., :9].sum(-1)  # (batch, heads, queries)
            wanted = torch.cat([given[0, :, 9:16], given[1, :, 9:12]], 1).mean(1)
            torch.testing.assert_close(shares[layer].float(), wanted, rtol=1e-4, atol=1e-5)
            x = block(x, mask=mask)


def test_pictures_are_moved_and_scaled_a_little():
    picture = torch.zeros(1, 21, 21)
    picture[:, 9:12, 9:12] = 1.0
    places = []
    for seed in range(30):
        found = jittered(picture, 0.2, torch.Generator().manual_seed(seed))
        weights = found[0] / found.sum()
        places.append([(weights.sum(axis) * torch.arange(21)).sum().item() for axis in (0, 1)])
    spread = torch.tensor(places)
    assert spread.min() >= 10 - 0.2 * 21 - 1
    assert spread.max() <= 10 + 0.2 * 21 + 1
    assert spread.std(0).min() > 1
    torch.testing.assert_close(jittered(picture, 0.0, torch.Generator()), picture, atol=1e-5, rtol=0)


def test_chrf_is_sacrebleus():
    sacrebleu = pytest.importorskip("sacrebleu")
    found = [
        ("en", "a red circle", "a red square"),
        ("zh", "红色圆形", "红色圆形"),
        ("en", "a cross", "a cross"),
    ]
    metrics = Picturebook().metrics([(3.0, 4, found[:1]), (1.0, 4, found[1:])])
    assert metrics["chrf"] == sacrebleu.corpus_chrf([r[1] for r in found], [[r[2] for r in found]]).score
    assert metrics["chrf_zh"] == 100
    assert 0 < metrics["chrf_en"] < 100
    assert metrics["exact"] == pytest.approx(2 / 3)
    assert metrics["loss"] == 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_folder_describes(book, tmp_path_factory, kind):
    out = tmp_path_factory.mktemp("run") / "run"
    options = {"steps": 2, "batch_tokens": 200, "evaluate_examples": 2, "watch_every": 0}
    result = train(Picturebook(kind=kind, **SMALL), str(book), out=out, **options)
    assert {"chrf", "chrf_en", "chrf_de", "exact", "loss"} == set(result.metrics)
    task, model = load(out)
    said = task.predict(model, [str(book / "red.png"), str(book / "blue.png")])
    assert all(text.startswith("en: ") and "; de: " in text for text in said)
    only = task.predict(model, [str(book / "red.png")], caption_language="de")
    assert said[0].endswith(f"; de: {only[0]}")
    with pytest.raises(ValueError, match="caption_language: expected one of en, de, got 'fr'"):
        task.predict(model, [str(book / "red.png")], caption_language="fr")
    batch = task.inputs(task.collate(task.read(str(book)).take(range(5), 0)))
    with torch.no_grad(), mh.watch(mh.load(out)) as seen:
        seen.model(**batch)
    assert len(seen.table) == (6 if kind == "single" else 12)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "song"}, "kind: expected one of cross, single, got 'song'"),
        ({"held_out": "words"}, "held_out: expected pictures or captions"),
        ({"size": 13, "patch": 4}, "size: expected a multiple of the patch, 4, got 13"),
        ({"size": 12, "patch": 6}, "patch: expected 2, 4, 8 ... with convolutions, got 6"),
        ({"stem": "pixels"}, "stem: expected convolutions or patches, got 'pixels'"),
        ({"max_tokens": 3}, "max_tokens: expected 4 or more"),
        ({"jitter": 1.0}, "jitter: expected 0 or more and below 1"),
    ],
)
def test_options_are_checked(options, words):
    with pytest.raises(ValueError, match=words):
        find("picturebook")(**options)


def test_languages_that_are_not_there(book):
    with pytest.raises(ValueError, match=r"captions.tsv has no column 'fr'"):
        opened(book, languages="en,fr")
    with pytest.raises(ValueError, match="languages: expected some of en, zh without data, got 'fr'"):
        Picturebook(languages="fr", **SMALL).open(None)
