"""Models of pictures from a folder of pictures to the page: `inspect --images`, and the live page."""

import base64
import io
import sys

import pytest
import torch
from PIL import Image
from tests.helpers.live_models import loaded
from tests.helpers.live_server import Served

import manyheads as mh
from manyheads import cli
from manyheads.view.live.session import begin

MODELS = """
import numpy
import torch
import transformers as hf


class Pixels:
    image_mean = image_std = (0.5, 0.5, 0.5)

    def __call__(self, pictures, return_tensors="pt"):
        small = [torch.tensor(numpy.asarray(one.resize((20, 12)))) for one in pictures]
        return {"pixel_values": torch.stack(small).permute(0, 3, 1, 2).float() / 127.5 - 1}


def vit():
    config = hf.ViTConfig(
        image_size=(12, 20),
        patch_size=4,
        hidden_size=15,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=11,
        num_labels=3,
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    return hf.ViTForImageClassification(config).eval(), Pixels()
"""
ROWS, COLUMNS = 3, 5


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a module of a model and a folder of pictures, to stand in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "tiny_pictures", raising=False)
    (tmp_path / "tiny_pictures.py").write_text(MODELS)
    (tmp_path / "pictures").mkdir()
    for number in range(4):
        drawn = Image.radial_gradient("L").resize((40, 24)).rotate(40 * number)
        Image.merge("RGB", [drawn, drawn.rotate(90), drawn.rotate(180)]).save(
            tmp_path / "pictures" / f"{number}.png"
        )
    return tmp_path


def shown(page):
    """What the chosen head gives each patch, from the chosen query."""
    patches = page.query_selector_all("[data-patch]")
    return [float(patch.get_attribute("data-value")) for patch in patches]


def test_inspect_shows_where_a_patch_looks(here, opened, monkeypatch, capsys):
    arguments = ["tiny_pictures:vit", "--images", "pictures", "--out", "found"]
    monkeypatch.setattr(sys, "argv", ["manyheads", "inspect", *arguments])
    with pytest.raises(SystemExit) as done:
        cli.main()
    assert done.value.code == 0, capsys.readouterr().err
    page = opened(f"{here / 'found' / 'report.html'}#picture/1.2")
    page.wait_for_selector("[data-patch]")
    assert "4 images" in page.inner_text(".who")
    import tiny_pictures

    model, processor = tiny_pictures.vit()
    picture = processor([Image.open(here / "pictures" / "0.png").convert("RGB")])
    site = mh.HeadTable.load("found/heads.json")["site"][5]
    weights = mh.maps(model, picture, {site: [2]})[site].weights[0, 0]
    page.click("[data-patch='7']")
    assert len(shown(page)) == ROWS * COLUMNS
    assert shown(page) == pytest.approx(weights[8, 1:].tolist(), abs=1e-4)  # the class token comes first
    page.click("role=radio[name='class token']")
    assert shown(page) == pytest.approx(weights[0, 1:].tolist(), abs=1e-4)


def test_a_dropped_picture_shows_where_a_patch_looks(here, opened, monkeypatch):
    import tiny_pictures

    model, processor = tiny_pictures.vit()
    # as for pictures of many patches: what every head sees is asked for patch by patch
    monkeypatch.setattr("manyheads.heads.pooled_maps.SHORT", 16)
    served = Served(begin(loaded(model, processor=processor), images="pictures"))
    try:
        page = opened(served.address)
        page.wait_for_selector(".heads-live [data-index]")
        assert page.locator(".ask .chip").count() == 4
        file = io.BytesIO()
        Image.linear_gradient("L").resize((30, 18)).convert("RGB").save(file, "PNG")
        with page.expect_response("**/api/attend"):
            page.set_input_files(
                ".drop input", {"name": "a.png", "mimeType": "image/png", "buffer": file.getvalue()}
            )
        page.wait_for_selector("[data-which=before] li")
        page.click("[data-tab=picture]")
        page.wait_for_selector("[data-patch][data-value]")
        with page.expect_response("**/api/rows") as answer:
            page.click("[data-patch='4']")
        assert answer.value.request.post_data_json["image"] == base64.b64encode(file.getvalue()).decode()
        page.click(".tiles [data-head='0.1']")
        page.wait_for_selector("[data-patch='4'][aria-selected=true]")
        given = processor([Image.open(file).convert("RGB")])
        site = next(iter(served.live.sites))
        wanted = mh.maps(model, given, {site: [1]})[site].weights[0, 0, 5, 1:]
        assert shown(page) == pytest.approx(wanted.tolist(), abs=1e-4)
        page.click("[data-tab=live]")
        with page.expect_response("**/api/silence"):
            page.click(".heads-live [data-head='1.0']")
        page.wait_for_selector("[data-which=after] li")
        assert torch.isfinite(torch.tensor(shown_change(page)))
        page.close()  # before the server: it still asks how good the silenced model is
    finally:
        served.close()


def shown_change(page):
    """The number in the sentence that says how far the answer moved."""
    return float(page.inner_text(".says > .note").split(" nats")[0].split()[-1].replace("−", "-"))
