"""Heads that are not verified, in a real browser: marked where they are shown, with the reason."""

import csv
import io
from pathlib import Path

import pytest
from tests.helpers.doubtful_model import doubtful, ids, proved
from tests.helpers.live_models import Characters, loaded
from tests.helpers.live_server import Served

import manyheads as mh
from manyheads.view.document import document, of_batches
from manyheads.view.live.session import begin

MARKED = ["1.0", "1.1"]


def report(model):
    batches = [ids(4, 11, seed) for seed in range(2)]
    return document(mh.inspect(model, batches), model, of_batches(batches, model))


@pytest.fixture(scope="module")
def doubted():
    return report(doubtful())


def marked(page, inside: str) -> list[str]:
    return page.eval_on_selector_all(f"{inside} .cell:has(.doubtful)", "all => all.map(x => x.dataset.head)")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_they_are_marked_and_the_reason_is_there(show, doubted, scheme) -> None:
    page = show(doubted, color_scheme=scheme)
    assert "2 of 10 heads are not verified" in page.text_content("[data-part=unverified]")
    assert marked(page, ".heads") == MARKED
    cell = page.locator('.heads [data-head="1.0"]')
    assert "Not verified" in cell.get_attribute("aria-label")
    cell.hover()
    for place in (".tip", ".card"):
        assert "opaque operator" in page.text_content(f"{place} [data-doubt=unverified]")
    page.locator('.heads [data-head="2.1"]').hover()
    assert page.locator(".card [data-doubt=unverified]").count() == 0
    assert "do not sum to one" in page.text_content(".card [data-doubt=note]")
    page.click('[data-filter="unverified"]')
    assert page.locator(".heads .cell:not(.out)").count() == 2
    page.click('[data-tab="glance"]')
    assert marked(page, ".glance") == MARKED


def test_one_head_says_why(show, doubted) -> None:
    page = show(doubted, "#head/1.1")
    assert "opaque operator" in page.text_content(".panel > [data-doubt=unverified]")
    assert page.locator(".panel > [data-doubt=note]").count() == 1


def test_the_numbers_of_the_map_say_it(show, doubted) -> None:
    page = show(doubted)
    with page.expect_download() as waiting:
        page.click("figure:has(.heads) [aria-label^='Save its numbers']")
    rows = list(csv.DictReader(io.StringIO(Path(waiting.value.path()).read_text(encoding="utf-8"))))
    assert [row["verified"][:3] for row in rows] == ["yes"] * 4 + ["no:"] * 2 + ["yes"] * 4
    assert "do not sum to one" in rows[-1]["notes"]


def test_nothing_is_marked_where_everything_is_proved(show) -> None:
    page = show(report(proved()))
    assert page.locator(".doubt, .doubtful, .remark, [data-filter=unverified]").count() == 0


def test_a_click_on_the_live_page_does_not_silence_them(opened) -> None:
    served = Served(begin(loaded(doubtful(), Characters())))
    try:
        page = opened(served.address)
        page.wait_for_selector(".heads-live [data-index]")
        assert marked(page, ".heads-live") == MARKED
        page.locator('.heads-live [data-head="1.0"]').click()
        assert "not silenced here" in page.text_content(".tip")
        with page.expect_response("**/api/silence") as waiting:
            page.locator('.heads-live [data-head="0.2"]').click()
        assert waiting.value.ok
        page.wait_for_selector('.heads-live [data-head="0.2"].silenced')
        assert page.locator(".heads-live .silenced").count() == 1
        page.close()
    finally:
        served.close()
