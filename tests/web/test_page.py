"""The head map, all maps at a glance and the view of one head, in a real browser: numbers, pointer, keyboard,
words, files, hostile text. The document is made by hand, so that every number on the page is known.
"""

import csv
import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from playwright.sync_api import TimeoutError
from tests.helpers.page_document import SIZES, TOKENS, N, document, example, weight

Show = Callable[..., Any]


def cells(page: Any) -> dict[str, str | None]:
    """The value on each cell of the head map, by the head's name."""
    found = page.query_selector_all(".heads [role=gridcell]")
    return {cell.get_attribute("data-head"): cell.get_attribute("data-value") for cell in found}


def saved(page: Any, selector: str, kind: str) -> bytes:
    """What a click saves. Chromium now and then loses one of many downloads: then it clicks again. The one
    of an earlier click may still come, and is of another kind."""

    def is_wanted(download: Any) -> bool:
        return bool(download.suggested_filename.endswith(f".{kind}"))

    for patience in (6_000, 12_000, 30_000):
        try:
            with page.expect_download(is_wanted, timeout=patience) as waiting:
                page.click(selector)
            return Path(waiting.value.path()).read_bytes()
        except TimeoutError as error:
            lost = error
    raise lost


def test_the_map_shows_the_numbers_of_every_measure(show: Show) -> None:
    made = document()
    page = show(made)
    wanted = {
        **{name: one["mean"] for name, one in made["heads"]["metrics"].items()},
        "importance:fisher": made["importance"]["fisher"]["mean"],
        "redundancy": made["redundancy"]["twin_distance"],
    }
    offered = page.eval_on_selector_all(
        "[data-control=metric] option", "options => options.map(one => one.value)"
    )
    assert offered == [*wanted, "cluster", "role"]
    for measure, mean in wanted.items():
        page.select_option("[data-control=metric]", measure)
        assert {cell.get_attribute("data-metric") for cell in page.query_selector_all("[role=gridcell]")} == {
            measure
        }
        shown = cells(page)
        assert list(shown) == made["heads"]["name"]
        assert [None if value is None else float(value) for value in shown.values()] == mean
    page.select_option("[data-control=metric]", "role")
    assert "Layer 0, head 2, Role Sink" in page.get_attribute("[data-head='0.2']", "aria-label")


def test_uneven_layers_stand_as_they_are(show: Show) -> None:
    page = show(document())
    rows = page.query_selector_all(".heads [role=row]")
    assert [len(row.query_selector_all("[role=gridcell]")) for row in rows] == list(SIZES)
    left = [
        page.query_selector(f"[data-head='{name}']").bounding_box()["x"]
        for name in ("0.0", "1.0", "2.0", "2.2", "0.2")
    ]
    assert left[0] == left[1] == left[2] < left[3] == left[4]


def test_pointing_shows_a_number_with_its_standard_error(show: Show) -> None:
    page = show(document())
    page.hover("[data-head='1.2']")  # the eighth head: entropy 0.5 + 0.31 * (49 % 11), standard error 0.008
    assert page.inner_text(".tip strong") == "Layer 1, head 2"
    assert "2.050 ± 0.008" in page.inner_text(".tip")
    assert "Sink" in page.inner_text(".tip")
    assert page.inner_text(".card [data-row=entropy] .value") == "2.050 ± 0.008"
    page.hover("[data-head='0.4']")  # nothing was counted there
    assert page.inner_text(".card [data-row=entropy] .value") == "–"


def test_sorting_within_layers_and_overall(show: Show) -> None:
    made = document()
    page = show(made)
    page.select_option("[data-control=metric]", "confidence")
    page.select_option("[data-control=sort]", "value")
    for row in page.query_selector_all(".heads [role=row]"):
        boxes = [
            (cell.bounding_box()["x"], float(cell.get_attribute("data-value")))
            for cell in row.query_selector_all("[role=gridcell]")
        ]
        values = [value for _, value in sorted(boxes)]
        assert values == sorted(values, reverse=True)
        assert len(set(values)) == len(values)
    page.select_option("[data-control=sort]", "rank")
    assert [float(value or 0) for value in cells(page).values()] == sorted(
        made["heads"]["metrics"]["confidence"]["mean"], reverse=True
    )


def test_filters_fade_the_other_heads(show: Show) -> None:
    page = show(document())
    left = "cells => cells.filter(cell => !cell.classList.contains('out')).map(cell => cell.dataset.head)"
    assert page.inner_text("[data-filter=sink]").split() == ["Sink", "2"]
    page.click("[data-filter=sink]")
    assert page.eval_on_selector_all("[role=gridcell]", left) == ["0.2", "1.2"]
    assert page.inner_text("[role=status]") == "2 of 11 heads: Sink"
    page.click("[data-filter=induction]")
    assert page.eval_on_selector_all("[role=gridcell]", left) == ["2.1"]
    page.click("[data-filter=redundant]")  # a twin at 0.24 or nearer; the next is at 0.27
    assert page.eval_on_selector_all("[role=gridcell]", left) == document()["heads"]["name"][:8]
    # importance is 1 to 11 thousandths; a twentieth of 66 is 3.3: the two least, 1 and 2
    page.click("[data-filter=cuttable]")
    assert page.eval_on_selector_all("[role=gridcell]", left) == ["0.0", "0.4"]
    page.click("[data-tab=glance]")
    assert page.eval_on_selector_all("[role=gridcell]", left) == ["0.0", "0.4"]
    page.click("[data-tab=heads]")
    page.click("[data-filter='']")
    assert len(page.eval_on_selector_all("[role=gridcell]", left)) == N


def test_the_map_by_keyboard_alone(show: Show) -> None:
    page = show(document())
    focused = "document.activeElement.dataset.head ?? document.activeElement.dataset.tab"
    page.focus("[data-tab=heads]")
    page.keyboard.press("ArrowRight")
    assert page.evaluate(focused) == "glance"
    page.keyboard.press("Home")
    assert page.evaluate(focused) == "heads"
    for _ in range(40):  # through controls and filters: the whole map is one stop
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.getAttribute('role')") == "gridcell":
            break
    assert page.evaluate(focused) == "0.0"
    assert page.is_visible(".tip")
    page.keyboard.press("End")
    assert page.evaluate(focused) == "0.4"
    page.keyboard.press("ArrowDown")  # no head below: layers are uneven
    assert page.evaluate(focused) == "0.4"
    for key in ("ArrowLeft", "ArrowLeft", "ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    assert page.evaluate(focused) == "2.2"
    page.keyboard.press("Space")
    assert page.get_attribute("[data-head='2.2']", "aria-selected") == "true"
    assert page.inner_text("[role=status]") == "Head 2.2 selected"
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    assert page.inner_text(".headbar h2") == "Layer 1, head 2"
    assert page.evaluate(focused) == "head"
    assert page.evaluate("location.hash") == "#head/1.2"


def test_a_link_leads_to_a_head(show: Show) -> None:
    page = show(document(), "#head/2.1")
    assert page.inner_text(".headbar h2") == "Layer 2, head 1"
    assert page.inner_text(".headbar .tag") == "Induction"


def test_several_heads_can_be_picked(show: Show) -> None:
    page = show(document())
    page.click("[data-head='0.1']")
    page.click("[data-head='1.1']", modifiers=["Control"])
    chosen = "cells => cells.filter(one => one.ariaSelected === 'true').map(one => one.dataset.head)"
    assert page.eval_on_selector_all("[role=gridcell]", chosen) == ["0.1", "1.1"]
    page.click("[data-head='2.0']")
    assert page.eval_on_selector_all("[role=gridcell]", chosen) == ["2.0"]
    page.dblclick("[data-head='0.3']")
    assert page.inner_text(".headbar h2") == "Layer 0, head 3"


def test_one_head_shows_what_is_known_about_it(show: Show) -> None:
    made = document()
    page = show(made, "#head/0.2")
    tiles = page.eval_on_selector_all(
        "[data-tile]", "tiles => tiles.map(tile => [tile.dataset.tile, Number(tile.dataset.value)])"
    )
    assert dict(tiles) == {
        "entropy": made["heads"]["metrics"]["entropy"]["mean"][2],
        "confidence": made["heads"]["metrics"]["confidence"]["mean"][2],
        "redundancy": made["redundancy"]["twin_distance"][2],
    }
    assert float(page.get_attribute("circle[data-role=sink]", "data-value")) == 0.9
    assert "claimed" in page.get_attribute("circle[data-role=sink]", "class")
    assert page.get_attribute("circle[data-role=induction]", "class") == "score"
    assert (
        float(page.get_attribute("circle[data-method=fisher]", "data-value"))
        == made["importance"]["fisher"]["mean"][2]
    )
    assert float(page.get_attribute("circle[data-change]", "data-change")) == 0.02
    assert "cow" in page.inner_text(".known")
    assert "no treebank was given" in page.inner_text(".known")
    page.click(".twins [data-head='0.3']")  # its twin
    assert page.inner_text(".headbar h2") == "Layer 0, head 3"
    page.click("[data-step='1']")
    assert page.inner_text(".headbar h2") == "Layer 0, head 4"
    page.select_option("[data-control=head]", "9")
    assert page.inner_text(".headbar h2") == "Layer 2, head 1"


def test_lines_and_heat_map_are_the_exact_weights(show: Show) -> None:
    page = show(document(), "#head/1.2")  # head 7 of all
    page.focus("[role=option][data-query='3']")
    shown = page.eval_on_selector_all(".weights text", "texts => texts.map(text => text.textContent)")
    assert shown == [
        f"{100 * weight(7, 3, key, 7):.{0 if weight(7, 3, key, 7) >= 0.1 else 1}f}%" for key in range(7)
    ]
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.dataset.query") == "4"
    assert "مرحبا attends to " in page.evaluate("document.activeElement.getAttribute('aria-label')")
    rows = list(
        csv.DictReader(
            io.StringIO(saved(page, "figure:has(.heat) [aria-label^='Save its numbers']", "csv").decode())
        )
    )
    assert len(rows) == 49
    for row in rows:
        assert row["query_token"] == TOKENS[int(row["query"])]
        assert (
            abs(float(row["weight"]) - weight(7, int(row["query"]), int(row["key"]), 7)) < 1e-5 + 0.5 / 65535
        )
    box = page.query_selector(".heat image").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 2.5 / 7, box["y"] + box["height"] * 5.5 / 7)
    assert "👩‍👩‍👧‍👦" in page.inner_text(".tip")
    assert "-house" in page.inner_text(".tip")
    assert f"{weight(7, 5, 2, 7):.3f}" in page.inner_text(".tip")


def test_a_long_input_is_pooled_and_exact_in_its_window(show: Show) -> None:
    page = show(document(), "#head/1.0")
    page.select_option("[data-choice=example]", "1")
    assert page.inner_text("figure:has(.heat) h3") == "Heat map: queries #0 to #39, keys #0 to #39"
    page.focus("[data-zoom=row]")
    page.keyboard.press("End")
    assert page.inner_text("figure:has(.heat) h3") == "Heat map: queries #13 to #52, keys #13 to #52"
    page.uncheck("[data-zoom=together]")
    page.focus("[data-zoom=column]")
    page.keyboard.press("Home")
    assert page.evaluate("document.activeElement.dataset.zoom") == "column"
    assert page.inner_text("figure:has(.heat) h3") == "Heat map: queries #13 to #52, keys #0 to #39"
    options = page.eval_on_selector_all(
        "[role=option]", "options => options.map(option => Number(option.dataset.query))"
    )
    assert options == list(range(13, 53))
    box = page.query_selector(".overview image").bounding_box()
    page.mouse.click(box["x"] + box["width"] - 1, box["y"] + 1)
    assert page.inner_text("figure:has(.heat) h3") == "Heat map: queries #0 to #39, keys #13 to #52"
    page.click("[data-step='1']")  # of this head only the overview is in the document
    assert page.is_visible(".overview")
    assert not page.is_visible(".heat")
    assert "there was no room" in page.inner_text(".seen")


def test_all_maps_at_a_glance(show: Show) -> None:
    page = show(document())
    page.click("[data-tab=glance]")
    assert len(page.query_selector_all(".glance [role=gridcell]")) == N
    picture = "document.querySelector('.panel canvas').toDataURL()"
    before = page.evaluate(picture)
    page.select_option("[data-control=scale]", "common")
    common = page.evaluate(picture)
    assert common != before
    page.select_option("[data-choice=example]", "1")
    assert page.evaluate(picture) != common
    assert len(page.query_selector_all(".glance [role=gridcell]")) == N
    page.focus(".glance [data-head='0.0']")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.inner_text(".headbar h2") == "Layer 1, head 0"


def test_chinese_and_dark_are_remembered(show: Show) -> None:
    page = show(document())
    page.focus("[data-switch=language]")
    page.select_option("[data-switch=language]", "zh")
    assert page.inner_text("[data-tab=heads]") == "概览"
    assert page.get_attribute("#page", "lang") == "zh-CN"
    assert page.evaluate("document.activeElement.dataset.switch") == "language"
    page.select_option("[data-switch=theme]", "dark")
    dark = page.evaluate("getComputedStyle(document.querySelector('#page')).backgroundColor")
    page.reload()
    page.wait_for_selector("[role=tab]")
    assert page.inner_text("[data-tab=heads]") == "概览"
    assert page.evaluate("getComputedStyle(document.querySelector('#page')).backgroundColor") == dark
    page.emulate_media(media="print")  # paper is white
    page.wait_for_selector("#page[data-theme=light]")


def test_every_chart_is_saved_as_svg_png_and_csv(show: Show) -> None:
    made = document()
    for fragment, charts in (("#heads", 2), ("#glance", 1), ("#head/0.2", 9)):
        page = show(made, fragment)
        figures = page.query_selector_all("figure.chart")
        assert len(figures) == charts
        for number in range(charts):
            figure = f"figure.chart >> nth={number}"
            drawn = ElementTree.fromstring(saved(page, f"{figure} >> text=SVG", "svg"))
            assert drawn.tag == "{http://www.w3.org/2000/svg}svg"
            assert "var(" not in ElementTree.tostring(drawn, encoding="unicode")
            image = saved(page, f"{figure} >> text=PNG", "png")
            assert image[:8] == b"\x89PNG\r\n\x1a\n"
            width, height = struct.unpack(">II", image[16:24])
            assert abs(width - 2 * float(drawn.get("width") or 0)) <= 2
            assert height > 60
            rows = list(csv.reader(io.StringIO(saved(page, f"{figure} >> text=CSV", "csv").decode())))
            assert len(rows) > 1
            assert len({len(row) for row in rows}) == 1
        page.close()
    page = show(made)
    table = list(csv.DictReader(io.StringIO(saved(page, "text=CSV", "csv").decode())))
    assert [row["confidence"] for row in table] == [
        str(value) for value in made["heads"]["metrics"]["confidence"]["mean"]
    ]
    assert [row["role"] for row in table] == [
        "Sink" if i in (2, 7) else "Induction" if i == 9 else "" for i in range(N)
    ]


HOSTILE = (
    "<script>document.title='taken'</script>",
    "</script><img src=x onerror=\"document.title='taken'\">",
    "a" * 100_000,
    "NUL\0NUL",
    "\u202eright to left",
    "\ud83d",
    "=1+1",
    "\n",
    "   ",
    "🇨🇳👩‍👩‍👧‍👦",
    "",
)


def test_hostile_text_is_shown_as_text(show: Show) -> None:
    made = document()
    made["header"]["model"] = made["header"]["corpus"] = HOSTILE[0]
    made["header"]["notes"] = list(HOSTILE)
    made["heads"]["site"] = [site + HOSTILE[1] for site in made["heads"]["site"]]
    for stack in made["stacks"]:
        for layer in stack["layers"]:
            layer["site"] += HOSTILE[1]
    made["examples"] = [example(HOSTILE[1], HOSTILE), example("a" * 100_000, TOKENS)]
    for maps in (maps for one in made["examples"] for maps in one["maps"]):
        maps["site"] += HOSTILE[1]
    made["examples"][0]["answer"] = {"kind": "next", "items": [[text, 0.1] for text in HOSTILE]}
    made["examples"][0]["silenced"] = {"change": [0.1] * N, "answer": [[[text, 0.2] for text in HOSTILE]] * N}
    made["roles"]["heads"][0][0].update(role=HOSTILE[1], claimed=True)
    made["importance"] = {HOSTILE[0]: made["importance"]["fisher"]}
    page = show(made)
    assert page.inner_text("h1") == HOSTILE[0]
    for tab in [tab.get_attribute("data-tab") for tab in page.query_selector_all("[role=tab]")]:
        page.click(f"[data-tab={tab}]")
    page.click("[data-tab=head]")
    assert page.query_selector_all("#page script, #page img[src=x], #page svg script") == []
    assert "taken" not in page.title().replace(HOSTILE[0], "")
    names = page.eval_on_selector_all(
        ".lines [role=option] text", "texts => texts.map(text => text.textContent)"
    )
    assert names[0].startswith("<script>document.title")
    assert len(names[2]) <= 24
    assert names[3] == "NUL␀NUL"
    assert names[4] == "‹202E›right to left"
    assert names[5] == "‹D83D›"
    assert names[7] == "⏎"
    assert names[8] == "␣␣␣"
    assert names[9] == HOSTILE[9]
    assert names[10] == "∅"
    for number in range(len(page.query_selector_all("figure.chart"))):
        ElementTree.fromstring(saved(page, f"figure.chart >> nth={number} >> text=SVG", "svg"))
    rows = list(
        csv.DictReader(io.StringIO(saved(page, "figure:has(.heat) >> text=CSV", "csv").decode(), newline=""))
    )
    assert rows[6 * len(HOSTILE)]["query_token"] == "'=1+1"


def test_accessibility(show: Show) -> None:
    axe = Path(pytest.importorskip("axe_playwright_python").__file__).with_name("axe.min.js")
    page = show(document())
    for theme in ("light", "dark"):
        page.select_option("[data-switch=theme]", theme)
        for tab in ("heads", "glance", "head"):
            page.click(f"[data-tab={tab}]")
            if tab == "heads":
                page.click("[data-head='1.1']")
                page.click("[data-filter=sink]")
            page.evaluate(axe.read_text(encoding="utf-8"))
            found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
            assert [
                (one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found["violations"]
            ] == []


def test_nothing_is_called_cuttable_where_nobody_measured_what_the_model_needs(show: Show) -> None:
    made = document()
    norm = made["importance"][next(iter(made["importance"]))]
    made["importance"] = {"output-norm": norm, "confidence": norm}
    page = show(made)
    assert page.locator("[data-filter=cuttable]").count() == 0
    page.locator("[data-control=metric]").select_option("importance:output-norm")
    assert "does not measure what the model would lose" in page.inner_text(".manyheads")
