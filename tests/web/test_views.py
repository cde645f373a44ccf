"""Pipeline, all heads, pictures and alignments in a browser: numbers, pointer, keyboard, files; and every
view of the page before axe, by keyboard alone, and in both languages. Every number of the document is known.
"""

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.helpers.page_document import SIZES, TOKENS, N, weight
from tests.helpers.page_views import (
    COLUMNS,
    FIRST,
    KEPT,
    KEYS,
    ROWS,
    SOURCE,
    TARGET,
    distance,
    everything,
    layers,
)

Show = Callable[..., Any]
VIEWS = ("heads", "glance", "head", "all", "pipeline", "picture", "alignment")
PACKED = 1 / 65535  # exact maps are kept in steps of this


@pytest.fixture
def page(show: Show) -> Callable[[str], Any]:
    """page(view) opens a view of the document."""

    def opened(view: str) -> Any:
        found = show(everything())
        found.click(f"[data-tab={view}]")
        return found

    return opened


def numbers(page: Any, selector: str) -> list[float]:
    """What the elements carry, in the order of the page."""
    return [float(x) for x in page.eval_on_selector_all(selector, "all => all.map(one => one.dataset.value)")]


def rows(page: Any, figure: Any) -> list[dict[str, str]]:
    """The table that a chart saves."""
    with page.expect_download() as waiting:
        figure.query_selector_all(".save")[2].click()
    return list(csv.DictReader(io.StringIO(Path(waiting.value.path()).read_text(encoding="utf-8"))))


def charts(page: Any) -> list[Any]:
    return page.query_selector_all("figure.chart")


def flat(values: list[list[float]]) -> list[float]:
    return [x for row in values for x in row]


def steps() -> dict[str, Any]:
    return {step["step"]: step["values"] for step in everything()["examples"][0]["pipeline"]}


def matrices(page: Any) -> dict[str, list[float]]:
    """Numbers in the cells of every matrix on the page, by its name."""
    return page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll('[data-matrix]')].map(one =>
           [one.dataset.matrix,
            [...one.querySelectorAll('rect')].map(cell => Number(cell.dataset.value))]))"""
    )


def test_the_pipeline_shows_every_matrix_as_it_is(page: Callable[[str], Any]) -> None:
    opened = page("pipeline")
    opened.click("[role=radiogroup][aria-label=Head] button:nth-child(4)")
    known, shown = steps(), matrices(opened)
    head = 3
    assert shown["word vectors E"] == flat(known["embedding"])
    assert shown["positions P"] == flat(known["positions"])
    assert shown["output Y"] == flat(known["projected"])
    assert shown[f"attention weights {head}"] == pytest.approx(flat(known["weights"][head]))
    scores = [0.0 if x is None else x for x in flat(known["scores"][head])]  # hidden by a mask: no number
    assert [x if x == x else 0.0 for x in shown[f"scores Q Kᵀ, scaled {head}"]] == scores
    assert shown[f"output of head {head}"] == flat(known["heads"][head])
    assert shown[f"queries {head}"] == flat(known["query"][head])
    assert shown[f"values {head}"] == flat(known["value"][head])
    # keys are drawn twice, the second time as they are multiplied: turned
    turned = [list(column) for column in zip(*known["key"][head], strict=True)]
    assert shown[f"keys {head}"] == flat(turned)
    side_by_side = [[x for one in known["heads"] for x in one[row]] for row in range(len(TOKENS))]
    assert shown["heads side by side"] == flat(side_by_side)
    assert opened.text_content("text.id >> nth=2") == "127"


def test_the_pipeline_follows_a_word_and_says_where_it_looks(page: Callable[[str], Any]) -> None:
    opened = page("pipeline")
    opened.click("[role=radiogroup][aria-label=Head] button:nth-child(1)")
    opened.click("[role=radiogroup][aria-label=Follow] button:nth-child(2)")
    # head 0, query 1: half of it on key 3, a fourteenth of the rest on each
    said = opened.inner_text(".reading")
    assert said.startswith("In head 0, “\u2068light\u2069” attends most to “\u2068灯塔\u2069” 57%")
    followed = opened.eval_on_selector_all("text.followed", "all => all.map(one => one.textContent)")
    assert set(followed) == {"light", "114"}
    opened.keyboard.press("ArrowRight")
    assert opened.inner_text("[role=radio][aria-checked=true] >> nth=0") == "-house"
    opened.click("[data-matrix='attention weights 0'] rect[data-row='5'][data-column='1']")
    assert "👩‍👩‍👧‍👦" in opened.inner_text(".reading").split("looks")[0]


def test_a_head_of_the_pipeline_is_chosen_by_click_and_remembered(page: Callable[[str], Any]) -> None:
    opened = page("pipeline")
    opened.click("[data-head-number='4'] >> nth=0")
    assert "attention weights 4" in matrices(opened)
    opened.click("[data-tab=head]")
    assert "#head/0.4" in opened.url
    opened.click("[data-tab=pipeline]")
    assert "attention weights 4" in matrices(opened)


def test_pointing_at_a_cell_says_its_number_and_its_place(page: Callable[[str], Any]) -> None:
    opened = page("pipeline")
    opened.hover("[data-matrix='word vectors E'] rect[data-row='2'][data-column='1']")
    said = opened.inner_text(".tip")
    assert f"{abs(steps()['embedding'][2][1]):.3f}" in said
    assert "-house" in said
    assert "channel 1" in said


def test_the_map_of_heads_has_a_point_for_each(page: Callable[[str], Any]) -> None:
    opened = page("all")
    made = everything()
    points = opened.query_selector_all(".space .point")
    assert [one.get_attribute("data-head") for one in points] == made["heads"]["name"]
    assert numbers(opened, ".space .point") == made["redundancy"]["twin_distance"]
    assert "Head 0.2, cluster 1; twin 0.3 at distance 0.090" in points[2].get_attribute("aria-label")
    assert len(opened.query_selector_all(".space .blob")) == 2  # clusters of one head are none
    # distances on the page are those of the document, in one unit for both directions
    places = [one.bounding_box() for one in points]
    across = (places[10]["x"] - places[9]["x"]) / (made["redundancy"]["x"][10] - made["redundancy"]["x"][9])
    down = (places[9]["y"] - places[10]["y"]) / (made["redundancy"]["y"][10] - made["redundancy"]["y"][9])
    assert across == pytest.approx(down, rel=0.02)


def test_points_are_picked_opened_and_walked_by_key(page: Callable[[str], Any]) -> None:
    opened = page("all")
    opened.click("[data-head='1.1']")
    assert opened.get_attribute("[data-head='1.1']", "aria-pressed") == "true"
    opened.focus("[data-head='1.1']")
    before = opened.query_selector("[data-head='1.1']").bounding_box()["x"]
    opened.keyboard.press("ArrowRight")
    name = opened.evaluate("document.activeElement.dataset.head")
    assert opened.query_selector(f"[data-head='{name}']").bounding_box()["x"] > before
    opened.keyboard.press("Enter")
    assert f"#head/{name}" in opened.url


def test_pairs_are_ordered_by_cluster_and_keep_their_distances(page: Callable[[str], Any]) -> None:
    opened = page("all")
    table = rows(opened, charts(opened)[1])
    names = everything()["heads"]["name"]
    assert sorted(row["head"] for row in table) == sorted(names)
    assert {row["head"] for row in table[:3]} == {"0.0", "0.1", "0.2"}
    assert {row["head"] for row in table[3:5]} == {"0.3", "0.4"}
    for row in table:
        for name in names:
            wanted = distance(names.index(row["head"]), names.index(name))
            assert float(row[name]) == pytest.approx(wanted, abs=1e-4)


def test_layers_and_the_prune_curve_carry_their_numbers(page: Callable[[str], Any]) -> None:
    opened = page("all")
    made = everything()
    mean = made["heads"]["metrics"]["distance"]["mean"]
    wanted = [sum(mean[head] for head in heads) / len(heads) for _, heads in layers()]
    assert numbers(opened, ".depth .mean[data-metric=distance]") == pytest.approx(wanted)
    assert numbers(opened, ".depth .dot[data-metric=distance]") == mean
    assert numbers(opened, ".depth .mean[data-metric=diversity]") == pytest.approx([0.3, 0.41, 0.52])
    # of the head that nothing was counted for, there is no dot
    assert len(opened.query_selector_all(".depth .dot[data-metric=entropy]")) == N - 1
    fisher, random = made["curve"]["lines"]
    assert numbers(opened, ".pruning [data-line=fisher]") == fisher["mean"]
    assert numbers(opened, ".pruning [data-line=random]") == random["mean"]
    assert len(opened.query_selector_all(".pruning .band")) == 1
    table = rows(opened, charts(opened)[3])
    control = [row for row in table if row["ranking"] == "random"]
    assert [float(row["kept"]) for row in control] == KEPT
    assert [float(row["cosine_se"]) for row in control] == random["se"]


def test_a_patch_shows_where_it_looks(page: Callable[[str], Any]) -> None:
    opened = page("picture")
    opened.click(".tiles [data-head='1.2']")  # the eighth head
    opened.click("[data-patch='11']")
    query = FIRST + 11
    wanted = [weight(7, query, FIRST + patch, KEYS) for patch in range(ROWS * COLUMNS)]
    assert numbers(opened, "[data-patch]") == pytest.approx(wanted, abs=PACKED)
    assert "head 1.2, the patch in row 2, column 1" in opened.inner_text(".reading")
    assert opened.get_attribute("[data-patch='11']", "aria-selected") == "true"
    opened.keyboard.press("Tab")
    opened.focus("[data-patch='11']")
    opened.keyboard.press("ArrowUp")
    wanted = [weight(7, FIRST + 6, FIRST + patch, KEYS) for patch in range(ROWS * COLUMNS)]
    assert numbers(opened, "[data-patch]") == pytest.approx(wanted, abs=PACKED)
    opened.click("text=class token")
    wanted = [weight(7, 0, FIRST + patch, KEYS) for patch in range(ROWS * COLUMNS)]
    assert numbers(opened, "[data-patch]") == pytest.approx(wanted, abs=PACKED)
    assert "class token" in opened.inner_text(".reading")


def test_every_head_has_the_patch_in_small(page: Callable[[str], Any]) -> None:
    opened = page("picture")
    lines = opened.query_selector_all(".tiles [role=row]")
    assert [len(line.query_selector_all("[role=gridcell]")) for line in lines] == list(SIZES)
    before = opened.get_attribute(".tiles [data-head='2.1'] image >> nth=1", "href")
    opened.click("[data-patch='0']")
    assert opened.get_attribute(".tiles [data-head='2.1'] image >> nth=1", "href") != before
    table = rows(opened, charts(opened)[1])
    assert len(table) == N * ROWS * COLUMNS
    last = [float(row["weight"]) for row in table if row["head"] == "2.2"]
    assert last == pytest.approx([weight(10, FIRST, FIRST + i, KEYS) for i in range(15)], abs=PACKED)


def aligned(head: int) -> list[float]:
    return [weight(head, q, k, len(SOURCE)) for q in range(len(TARGET)) for k in range(len(SOURCE))]


def test_an_alignment_of_a_head_and_of_their_mean(page: Callable[[str], Any]) -> None:
    opened = page("alignment")
    opened.click(".tiles [data-head='2.1']")
    head = layers()[-1][1][1]
    assert numbers(opened, ".alignment [data-value]") == pytest.approx(aligned(head), abs=PACKED)
    assert numbers(opened, ".ribbon [data-value]") == pytest.approx(aligned(head), abs=PACKED)
    opened.click("text=mean of all heads")
    every = [aligned(one) for one in layers()[-1][1]]
    mean = [sum(at) / len(every) for at in zip(*every, strict=True)]
    assert numbers(opened, ".alignment [data-value]") == pytest.approx(mean, abs=PACKED)
    assert "<b>" in opened.text_content(".ribbon")  # as text


def test_a_target_word_is_chosen_by_key_and_by_click(page: Callable[[str], Any]) -> None:
    opened = page("alignment")
    opened.click(".tiles [data-head='2.0']")
    opened.focus("[role=option][tabindex='0']")
    opened.keyboard.press("ArrowRight")
    # the ninth head, query 1: half of it on key (3 + 8) % 5
    assert opened.inner_text(".reading").startswith(
        "“\u2068dreiund\u2069” attends most to “\u2068and\u2069” 60%"
    )
    opened.click("[data-target='2']")
    assert "zwanzig" in opened.inner_text(".reading")
    assert opened.get_attribute("[data-target='2']", "aria-selected") == "true"


@pytest.mark.parametrize("view", ["all", "pipeline", "picture", "alignment"])
def test_every_chart_is_saved_as_svg_png_and_csv(page: Callable[[str], Any], view: str) -> None:
    opened = page(view)
    found = charts(opened)
    assert len(found) == {"all": 4, "pipeline": 5, "picture": 3, "alignment": 3}[view]
    names = set()
    for figure in found:
        files = []
        for button in figure.query_selector_all(".save"):
            with opened.expect_download() as waiting:
                button.click()
            names.add(waiting.value.suggested_filename)
            files.append(Path(waiting.value.path()).read_bytes())
        drawing = ElementTree.fromstring(files[0])
        assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
        assert float(drawing.get("width", "0")) > 100
        assert float(drawing.get("height", "0")) > 50
        assert b"var(--" not in files[0]  # a file has no page around it to ask for colours
        assert files[1].startswith(b"\x89PNG")
        assert len(files[1]) > 2000
        assert len(files[2].splitlines()) > 3
    assert len(names) == 3 * len(found)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("language", ["en", "zh"])
def test_axe_finds_nothing(page: Callable[[str], Any], theme: str, language: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed").Axe()
    opened = page("heads")
    opened.select_option("[data-switch=theme]", theme)
    opened.select_option("[data-switch=language]", language)
    for view in VIEWS:
        opened.click(f"[data-tab={view}]")
        found = axe.run(opened).response["violations"]
        said = [f"{view}: {one['id']}: {one['nodes'][0]['html'][:200]}" for one in found]
        assert not said


# the name of what is focused and seen to be focused; null outside the view
FOCUSED = """() => { const one = document.activeElement;
  if (!one.closest("[role=tabpanel]")) return null;
  if (!one.matches(":focus-visible")) return "";
  return one.getAttribute("aria-label") || one.textContent || one.title }"""


def test_everything_is_reached_by_keyboard(page: Callable[[str], Any]) -> None:
    opened = page("heads")
    opened.evaluate("document.activeElement.blur()")
    opened.keyboard.press("Tab")
    for view in VIEWS:
        opened.focus("[role=tab][aria-selected=true]")
        if view != VIEWS[0]:
            opened.keyboard.press("ArrowRight")
        assert opened.get_attribute(f"[data-tab={view}]", "aria-selected") == "true"
        wanted = opened.evaluate(
            """() => [...document.querySelectorAll('[role=tabpanel] :is(button, select, input, [tabindex])')]
                 .filter(one => one.tabIndex >= 0 && one.checkVisibility()).length"""
        )
        assert wanted > 3
        reached = 0
        for _ in range(wanted + 20):  # what is focused may show more to focus, such as the card of a head
            opened.keyboard.press("Tab")
            name = opened.evaluate(FOCUSED)
            if name is None:  # out of it again: nothing holds the keyboard
                break
            assert name.strip(), f"{view}: what is focused has no name, or is not seen to be focused"
            reached += 1
        assert wanted <= reached < wanted + 20, view


def test_chinese_has_every_word(page: Callable[[str], Any]) -> None:
    opened = page("heads")
    opened.select_option("[data-switch=language]", "zh")
    for view in ("all", "pipeline", "picture", "alignment"):
        opened.click(f"[data-tab={view}]")
        for text in opened.eval_on_selector_all(
            "[role=tabpanel] :is(h3, .note, .lead, .label, .reading)",
            "all => all.map(one => one.textContent)",
        ):
            assert re.search("[\u4e00-\u9fff]", text), text
            assert "undefined" not in text


def test_it_prints_without_what_only_a_screen_needs(page: Callable[[str], Any]) -> None:
    opened = page("all")
    opened.select_option("[data-switch=theme]", "dark")
    opened.emulate_media(media="print")
    opened.wait_for_selector(".manyheads[data-theme=light]")
    assert not opened.is_visible(".saves >> nth=0")
    assert not opened.is_visible("[role=tablist]")
    assert opened.is_visible(".space")
