"""The first screen of the page: what it is, the heads that stand out, attention on an example; several heads
in colours; what each token receives, and rollout, against plain sums; units; a phone's width.
"""

import csv
import io
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers.page_document import SIZES, TOKENS, N, document, weight
from tests.helpers.page_views import FIRST, KEYS, everything

Show = Callable[..., Any]
PHONE = {"viewport": {"width": 390, "height": 844}}


def standouts(page: Any) -> list[list[str]]:
    """Kind, heads and text of each."""
    script = "all => all.map(one => [one.dataset.standout, one.dataset.heads, one.textContent])"
    return page.eval_on_selector_all(".standout", script)


def drawn_heads(page: Any, within: str) -> set[str]:
    script = "paths => paths.map(one => one.dataset.of)"
    return set(page.eval_on_selector_all(f"{within} .curves path", script))


def maps(heads: range, length: int) -> np.ndarray:
    """(heads, queries, keys) of the document made by hand."""
    return np.array(
        [[[weight(h, q, k, length) for k in range(length)] for q in range(length)] for h in heads]
    )


def rolled(length: int) -> np.ndarray:
    """Rollout, by matrix products: the last layer stands left."""
    starts = np.cumsum([0, *SIZES])
    joint = np.eye(length)
    for start, end in pairwise(starts):
        joint = (0.5 * maps(range(start, end), length).mean(0) + 0.5 * np.eye(length)) @ joint
    return joint


def shares(page: Any) -> list[float]:
    return page.eval_on_selector_all("svg.received > g", "all => all.map(one => Number(one.dataset.value))")


def test_five_heads_stand_out_each_with_its_number(show: Show) -> None:
    page = show(document())
    found = standouts(page)
    assert [(kind, heads) for kind, heads, _ in found] == [
        ("position", "0.0"),
        ("important", "1.2"),
        ("role", "2.1"),
        ("pair", "0.2 0.1"),
        ("sink", "2.2"),
    ]
    said = ["55% of its attention is on the previous", "1.8 times", "score 0.70", "distance 0.060", "80%"]
    for (_, _, text), number in zip(found, said, strict=True):
        assert number in text
    assert "11 attention heads of hand-made" in page.inner_text("[data-part=about]")


def test_what_stands_out_is_told_only_of_verified_heads(show: Show) -> None:
    made = document()
    labels = ["no: it was not proved" if i in (0, 7) else "yes" for i in range(N)]
    made["heads"]["labels"]["verified"] = labels
    heads = {head for _, names, _ in standouts(show(made)) for head in names.split()}
    assert len(heads) > 3
    assert not heads & {"0.0", "1.2"}


def test_a_table_alone_still_opens(show: Show) -> None:
    made = document()
    made |= {"roles": None, "importance": {}, "redundancy": None, "examples": [], "profiles": None}
    page = show(made)
    assert [kind for kind, _, _ in standouts(page)] == ["position", "sink", "sharp"]
    assert page.query_selector("[data-part=sentence]") is None
    assert page.is_visible(".card")


def test_attention_on_the_example_is_on_the_first_screen(show: Show) -> None:
    page = show(document())
    box = page.query_selector("[data-part=sentence] .curves").bounding_box()
    assert box["y"] + 40 < 900
    assert drawn_heads(page, "[data-part=sentence]") == {"0.0"}
    page.click("[data-standout=important]")
    assert drawn_heads(page, "[data-part=sentence]") == {"1.2"}
    assert page.get_attribute("[data-standout=important]", "aria-pressed") == "true"
    page.click("[data-standout=pair]")
    assert drawn_heads(page, "[data-part=sentence]") == {"0.1", "0.2"}
    page.hover(".heads [data-head='2.0']")
    assert drawn_heads(page, "[data-part=sentence]") == {"2.0"}


@pytest.mark.parametrize("way", ["Control", "Shift", "button"])
def test_several_heads_are_drawn_in_colours(show: Show, way: str) -> None:
    page = show(document())
    keys = [] if way == "button" else [way]
    page.click(".heads [data-head='0.3']")
    if way == "button":
        page.click("[data-control=several]")
    for head in ("1.1", "2.2"):
        page.click(f".heads [data-head='{head}']", modifiers=keys)
    page.click("[data-tab=head]")
    assert drawn_heads(page, ".pairs") == {"0.3", "1.1", "2.2"}
    legend = page.eval_on_selector_all(".lines [data-legend]", "all => all.map(one => one.textContent)")
    assert legend == ["0.3", "1.1", "2.2"]
    colours = page.eval_on_selector_all(
        ".pairs .curves path", "all => all.map(one => [one.dataset.of, getComputedStyle(one).stroke])"
    )
    assert len({tuple(one) for one in colours}) == len({colour for _, colour in colours}) == 3
    with page.expect_download() as waiting:
        page.click("figure:has(.lines) [aria-label^='Save its numbers']")
    rows = list(csv.DictReader(io.StringIO(Path(waiting.value.path()).read_text(encoding="utf-8"))))
    assert len(rows) == 3 * len(TOKENS) ** 2
    index = {name: i for i, name in enumerate(document()["heads"]["name"])}
    for row in rows:
        wanted = weight(index[row["head"]], int(row["query"]), int(row["key"]), len(TOKENS))
        assert abs(float(row["weight"]) - wanted) < 2e-5


def test_heads_of_a_layer_are_added_by_keyboard(show: Show) -> None:
    page = show(document(), "#head/0.2")
    page.focus("[data-overlay='0.2']")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert drawn_heads(page, ".pairs") == {"0.2", "0.3"}
    assert page.inner_text(".headbar h2") == "Layer 0, head 2"  # its numbers stay
    assert page.evaluate("document.activeElement.dataset.overlay") == "0.3"
    page.keyboard.press("Enter")
    assert drawn_heads(page, ".pairs") == {"0.2"}


def test_received_attention_and_rollout_are_plain_sums(show: Show) -> None:
    length = len(TOKENS)
    page = show(document(), "#head/1.1")
    exact = maps(range(5, 8), length)
    assert shares(page) == pytest.approx(exact[1].mean(0).tolist(), abs=1e-4)
    page.select_option("[data-control=from]", "3")
    assert shares(page) == pytest.approx(exact[1, 3].tolist(), abs=1e-4)
    page.select_option("[data-control=received]", "layer")
    assert shares(page) == pytest.approx(exact.mean(0)[3].tolist(), abs=1e-4)
    page.select_option("[data-control=received]", "rollout")
    wanted = rolled(length)
    assert shares(page) == pytest.approx(wanted[3].tolist(), abs=1e-4)
    assert "leaves out values" in page.inner_text("figure:has(svg.received) .note")
    page.select_option("[data-control=from]", "-1")
    assert shares(page) == pytest.approx(wanted.mean(0).tolist(), abs=1e-4)
    assert sum(shares(page)) == pytest.approx(1, abs=1e-4)


def test_no_rollout_without_every_head(show: Show) -> None:
    page = show(document(), "#head/1.0")
    page.select_option("[data-choice=example]", "1")  # exact for the first head of each layer only
    page.select_option("[data-control=received]", "rollout")
    assert shares(page) == []
    assert "No rollout here: it needs the exact maps" in page.inner_text("figure:has(svg.received) .note")


def test_no_rollout_where_a_head_is_not_verified(show: Show) -> None:
    made = document()
    made["heads"]["labels"]["verified"] = ["yes"] * (N - 1) + ["no: it was not proved"]
    page = show(made, "#head/1.0")
    page.select_option("[data-control=received]", "rollout")
    assert shares(page) == []


def test_rollout_of_an_image(show: Show) -> None:
    page = show(everything(), "#picture")
    figure = "figure:has([data-received])"
    for mode, wanted in (
        ("in this head", None),
        ("all layers (rollout)", rolled(KEYS)[0, FIRST:]),
    ):
        page.click(f"{figure} >> text={mode}")
        page.click("text=class token")
        with page.expect_download() as waiting:
            page.click(f"{figure} >> text=CSV")
        rows = list(csv.DictReader(io.StringIO(Path(waiting.value.path()).read_text(encoding="utf-8"))))
        if wanted is None:
            head = document()["heads"]["name"].index(rows[0]["mode"])
            wanted = maps(range(head, head + 1), KEYS)[0].mean(0)[FIRST:]
        assert [float(row["share"]) for row in rows] == pytest.approx(wanted.tolist(), abs=1e-4)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_number_has_a_unit_and_a_meaning(show: Show, language: str) -> None:
    page = show(everything())
    page.select_option("[data-switch=language]", language)
    offered = page.eval_on_selector_all("[data-control=metric] option", "all => all.map(one => one.value)")
    numbers = set(offered) - {"cluster", "role"}
    shown = page.eval_on_selector_all(".card [data-row]", "all => all.map(one => one.dataset.row)")
    assert set(shown) == numbers
    page.focus(".card .meanings summary")
    page.keyboard.press("Enter")
    page.wait_for_selector(".card .meanings[open]")
    parts = page.eval_on_selector_all(
        ".card .meanings dl > div",
        "all => all.map(one => ['.unit', 'dd'].map(name => one.querySelector(name).textContent))",
    )
    assert len(parts) == len(numbers)
    for unit, meaning in parts:
        assert len(unit) > 2  # more than the brackets around it
        assert len(meaning) > 8


def test_views_have_names_of_their_own(show: Show) -> None:
    page = show(everything())
    for language in ("en", "zh"):
        page.select_option("[data-switch=language]", language)
        names = page.eval_on_selector_all("[role=tab]", "all => all.map(one => one.textContent)")
        assert len(set(names)) == len(names) == 7


@pytest.mark.parametrize("language", ["en", "zh"])
def test_nothing_overflows_on_a_phone(show: Show, language: str) -> None:
    page = show(everything(), **PHONE)
    page.select_option("[data-switch=language]", language)
    tabs = page.eval_on_selector_all("[role=tab]", "all => all.map(one => one.dataset.tab)")
    for tab in tabs:
        page.click(f"[data-tab={tab}]")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, tab


def test_the_pipeline_shows_the_heads_of_every_layer(show: Show) -> None:
    page = show(everything(), "#pipeline")
    layers = page.eval_on_selector_all("[aria-label=Layer] button", "all => all.map(one => one.textContent)")
    assert layers == ["0", "1", "2"]
    tiles = "svg.pipeline .tile"
    assert len(page.query_selector_all(tiles)) == SIZES[0]
    pictures = "all => all.map(one => one.getAttribute('href'))"
    first = page.eval_on_selector_all(f"{tiles} image", pictures)
    page.click("[aria-label=Layer] button:nth-child(3)")
    assert len(page.query_selector_all(tiles)) == SIZES[2]
    # heads 8 to 10 of all: on seven tokens they attend as 1 to 3 do
    assert page.eval_on_selector_all(f"{tiles} image", pictures) == first[1:4]
    assert len(set(first)) == SIZES[0]


def compared() -> dict[str, Any]:
    """A document as `manyheads compare` writes it: changes of heads, no example."""
    made = document()
    numbers = {"mean": [0.01 * i for i in range(N)], "se": [0.001] * N}
    made["heads"]["metrics"] = {"attention": numbers, "entropy_change": numbers, "first_change": numbers}
    moved = ["yes" if i in (2, 5) else "no" for i in range(N)]
    made["heads"]["labels"] = {"moved": moved, "matched": [f"9.{i}" for i in range(N)]}
    made |= {"examples": [], "roles": None, "redundancy": None, "importance": {}, "curve": None}
    made["header"]["model"] = "base → fine-tuned"
    return made


def test_a_comparison_says_what_it_compares_and_which_heads_moved(show: Show) -> None:
    page = show(compared())
    lead = page.inner_text("[data-part=about] .lead")
    assert "compares two models, or two texts on one model: base → fine-tuned" in lead
    names = compared()["heads"]["name"]
    assert [(kind, heads) for kind, heads, _ in standouts(page)] == [
        ("moved", names[5]),
        ("moved", names[2]),
    ]
    assert "0.050 from its counterpart, head 9.5" in standouts(page)[0][2]
    assert page.inner_text("[data-control=metric] option:checked") == "Attention moved"
    assert "0.070 ± 0.001 of 1" in page.get_attribute(f"[data-head='{names[7]}']", "aria-label")


def test_changes_have_the_unit_of_what_changed(show: Show) -> None:
    for locale, entropy in (("en-US", "Change: entropy"), ("zh-CN", "变化：熵")):
        page = show(compared(), locale=locale)
        page.select_option("[data-control=metric]", "entropy_change")
        assert page.inner_text("[data-control=metric] option:checked") == entropy
        page.select_option("[data-control=metric]", "first_change")
        assert "%" in page.get_attribute("[data-head='0.1']", "aria-label")


def test_importance_and_what_silencing_changes_have_units(show: Show) -> None:
    made = document()
    made["importance"]["fisher"]["measure"] = "KL(full || silenced), nats a token"
    made["examples"][0]["silenced"]["measure"] = "1 - cosine of the mean hidden state"
    page = show(made, "#head/0.2")
    assert "nats/token" in page.inner_text("figure:has-text('Importance by each method')")
    assert "(1 - cosine of the mean hidden state)" in page.inner_text("figure:has-text('Without this head')")


def test_a_regression_answers_with_an_amount_not_a_share(show: Show) -> None:
    made = document()
    made["examples"][0]["answer"] = {"kind": "amount", "items": [["LABEL_0", -0.45]]}
    made["examples"][0]["silenced"]["answer"] = [[["LABEL_0", -0.89]]] * N
    text = show(made, "#head/0.2").inner_text("figure:has-text('Without this head')")
    assert "−0.450" in text
    assert "−0.890" in text
    assert "%" not in text
    assert "LABEL_0" not in text


def test_an_answer_that_is_not_asked_again_is_shown_once(show: Show) -> None:
    made = document()
    made["examples"][0]["answer"] = {"kind": "translation", "items": [["ein Hund läuft", 0.31]]}
    made["examples"][0]["silenced"]["answer"] = None
    text = show(made, "#head/0.2").inner_text("figure:has-text('Without this head')")
    assert "The model's translation: “ein Hund läuft” (31%)" in text
