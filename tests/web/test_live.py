"""The live page in a real browser: type, see, silence, compare, choose by rule, download the plan."""

import time

import pytest
import torch
from tests.helpers.live_models import Characters, bert, loaded
from tests.helpers.live_server import Served

import manyheads as mh
from manyheads.view.document.packing import unpacked
from manyheads.view.live import endpoints
from manyheads.view.live.session import Input, begin

HOSTILE = "<script>window.hacked = 1</script> \u0000 👩‍👩‍👧 \u202e"


@pytest.fixture(scope="module")
def twin():
    """A model with the weights of the one that is served, whose own may be measured at any time."""
    return bert()


@pytest.fixture(scope="module")
def served(twin):
    """It begins after the twin is there: its threads set random generators back to what they were."""
    made = Served(begin(loaded(bert(), Characters())))
    yield made
    made.close()


@pytest.fixture
def page(browser, served):
    """The open page, with nothing wrong on its console and no request to anywhere else."""
    context = browser.new_context(locale="en-GB", viewport={"width": 1280, "height": 1000})
    page = context.new_page()
    wrong = []
    page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "request",
        lambda sent: (
            None if sent.url.startswith((served.address, "data:", "blob:")) else wrong.append(sent.url)
        ),
    )
    page.wrong = wrong
    page.goto(served.address)
    page.wait_for_selector(".heads-live [data-index]")
    yield page
    context.close()
    assert wrong == []


def typed(page, text):
    """Type a text and wait until the page shows what came of it."""
    with page.expect_response("**/api/attend"):
        page.fill("textarea", text)
    page.wait_for_selector(".answers:not(.stale)")


def items(page, which):
    lines = page.locator(f'[data-which="{which}"] li')
    return [
        [line.get_attribute("data-text"), float(line.get_attribute("data-value"))] for line in lines.all()
    ]


def test_type_and_see(page, served):
    assert page.locator(".heads-live [data-index]").count() == 6
    typed(page, "heads attend")
    wanted = served.ask(endpoints.attend, Input("heads attend"))
    assert items(page, "before") == wanted["answer"]["items"]
    shown = page.locator(".looks .token").all_inner_texts()
    assert len(shown) == len("heads attend") + 2
    assert "14 tokens" in page.locator('[data-part="status"]').inner_text()


def test_silence_by_click_and_by_key(page, served):
    typed(page, "heads attend")
    with page.expect_response("**/api/silence"):
        page.locator('.heads-live [data-head="0.1"]').click()
    page.wait_for_selector('[data-which="after"]')
    page.wait_for_selector('[data-part="quality"]:not([data-kept="1"], [data-kept=""])')
    heads = {"encoder.layer.0.attention.self": [1]}
    wanted = served.ask(endpoints.ablate, Input("heads attend"), heads)
    assert items(page, "before") == wanted["before"]["items"]
    assert items(page, "after") == wanted["after"]["items"]
    assert "silenced" in page.locator('.heads-live [data-head="0.1"]').get_attribute("class")
    quality = served.ask(endpoints.quality, heads)
    assert float(page.locator('[data-part="quality"]').get_attribute("data-value")) == pytest.approx(
        quality["value"]
    )
    assert "5 of 6" in page.locator('[data-part="kept"]').inner_text()
    with page.expect_response("**/api/attend"):  # the same head again, by the keyboard
        page.locator('.heads-live [data-head="0.1"]').focus()
        page.keyboard.press("Space")
    page.wait_for_selector('[data-which="after"]', state="detached")
    assert "6 of 6" in page.locator('[data-part="kept"]').inner_text()


def test_choose_by_ranking_and_download_a_plan_that_cuts(page, served, twin, tmp_path):
    typed(page, "heads attend")
    with page.expect_response("**/api/choose"), page.expect_response("**/api/silence"):
        page.locator('[data-control="share"]').focus()
        page.keyboard.press("End")  # the least important 95%: one head a layer stays
    page.wait_for_selector(".heads-live .silenced >> nth=3")
    with page.expect_download() as saved:
        page.locator('[data-do="plan"]').click()
    assert saved.value.suggested_filename == "plan.json"
    saved.value.save_as(tmp_path / "plan.json")
    plan = mh.Plan.load(tmp_path / "plan.json")
    assert plan.removed == 4
    small = mh.prune(twin, served.live.batches, using=plan, refit=False)
    batch = served.live.batches[0]
    with torch.no_grad(), mh.silence(twin, plan):
        wanted = twin(**batch).last_hidden_state
    with torch.no_grad():
        found = small(**batch).last_hidden_state
    real = batch["attention_mask"].bool()
    assert torch.allclose(found[real], wanted[real], atol=1e-5)
    page.locator('[data-do="clear"]').click()
    page.wait_for_selector(".heads-live .silenced", state="detached")


def test_choose_by_rule(page, served):
    from manyheads.view.live import selection

    typed(page, "heads attend")
    for rule in ("sinks", "twins"):
        with page.expect_response("**/api/choose") as answer:
            page.locator(f'[data-rule="{rule}"]').click()
        assert answer.value.json() == {"heads": served.ask(selection.by_rule, rule)}


def test_hostile_text_is_text(page):
    typed(page, HOSTILE)
    assert page.evaluate("window.hacked") is None
    assert page.locator(".looks script").count() == 0
    typed(page, "x" * 100_000)
    assert "64" in page.locator('[data-part="status"]').inner_text()
    assert page.locator(".looks .token").count() == 64


def test_an_error_is_a_sentence_and_the_page_lives_on(page, monkeypatch):
    def broken(*_):
        raise ValueError("text: this one is too strange")

    with monkeypatch.context() as patched:
        patched.setattr(endpoints, "attend", broken)
        with page.expect_response("**/api/attend"):
            page.fill("textarea", "strange")
        page.wait_for_selector("text=this one is too strange")
    page.wrong.clear()  # the browser itself reports the status
    typed(page, "heads")
    assert page.locator(".status .wrong").is_hidden()


def test_the_text_is_an_example_in_the_other_views(page):
    typed(page, "heads attend")
    page.locator('[data-tab="glance"]').click()
    page.wait_for_selector(".glance [data-index]")
    assert page.locator('[data-choice="example"] option').count() == 2
    with page.expect_response("**/api/pipeline"):
        page.locator('[data-tab="pipeline"]').click()
    page.wait_for_selector(".follow-bar [role=radio] bdi:text-is('d')")
    page.locator('[data-tab="live"]').click()
    assert page.input_value("textarea") == "heads attend"


def test_long_texts_are_shown_exactly_when_asked(page, served, monkeypatch):
    monkeypatch.setattr("manyheads.heads.pooled_maps.SHORT", 16)  # all texts are long then
    typed(page, "attending heads")
    page.locator('[data-tab="head"]').click()
    with page.expect_response("**/api/exact"):
        page.locator('[data-control="head"]').select_option("4")
    page.wait_for_selector(".heat")
    page.locator('[data-tab="live"]').click()
    with page.expect_response("**/api/exact") as answer:
        page.locator('.heads-live [data-head="0.2"]').hover()
    shares = unpacked(answer.value.json()["exact"]).mean(0)
    page.wait_for_function("document.querySelector('.looks .shaded')")
    shown = [token.get_attribute("title") for token in page.locator(".looks .token").all()]
    assert [float(text.rstrip("%")) for text in shown] == pytest.approx((100 * shares).tolist(), abs=0.06)


def test_in_chinese_and_at_night(page):
    page.locator('[data-switch="language"]').select_option("zh")
    page.wait_for_selector("text=模型的回答")
    page.locator('[data-switch="theme"]').select_option("dark")
    assert page.locator(".manyheads").get_attribute("data-theme") == "dark"
    assert page.locator(".heads-live [data-index]").count() == 6


def test_what_takes_longer_arrives_by_itself(page, served):
    assert page.locator('[data-part="spare"]').is_visible()
    typed(page, "heads attend")
    page.locator("textarea").focus()
    served.queue.in_spare_time(served.document.steps())
    page.wait_for_selector('[data-part="spare"]', state="hidden", timeout=60_000)
    assert page.evaluate("document.activeElement.tagName") == "TEXTAREA"
    page.locator('[data-tab="heads"]').click()
    page.locator('[data-control="metric"]').select_option("importance:fisher")
    wanted = served.live.tables["fisher"]["importance"].tolist()
    cells = [page.locator(f'.heads [data-index="{i}"]') for i in range(6)]
    assert [float(cell.get_attribute("data-value")) for cell in cells] == pytest.approx(wanted)


def test_tokens_head_numbers_and_answer_stay_in_view(page):
    """Of a deep model the maps are many screens; a low window does the same to a small one."""
    page.set_viewport_size({"width": 1280, "height": 180})
    typed(page, "heads attend")
    page.evaluate(
        "[...document.querySelectorAll('.heads-live [data-index]')].at(-1).scrollIntoView({block: 'end'})"
    )
    page.wait_for_timeout(100)
    assert page.evaluate("scrollY") > 200
    for part in (".stays .tokens", ".stays .head-numbers", "[data-part=answers] h3"):
        box = page.query_selector(part).bounding_box()
        assert -1 <= box["y"] < 180, part
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_page_without_its_token_says_so(browser, served):
    context = browser.new_context()
    page = context.new_page()
    wrong = '<meta name="manyheads-live" content="wrong"><body><script src="/page.js"></script>'
    page.route("**/", lambda route: route.fulfill(content_type="text/html", body=wrong))
    page.goto(served.address)
    page.wait_for_selector("text=token")
    context.close()


def test_accessibility(page):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    typed(page, "heads attend")
    with page.expect_response("**/api/silence"):
        page.locator('.heads-live [data-head="0.1"]').click()
    page.wait_for_selector('[data-which="after"]')
    time.sleep(0.6)  # the faded part is back
    found = axe.Axe().run(page).response["violations"]
    page.wrong.clear()
    assert [(one["id"], node["html"], node["failureSummary"]) for one in found for node in one["nodes"]] == []


def test_quality_says_what_it_was_measured_on_and_what_is_noise(page, served):
    typed(page, "heads attend")
    with page.expect_response("**/api/quality") as answer:
        page.locator('.heads-live [data-head="0.1"]').click()
    page.wait_for_selector('[data-part="quality"]:not([data-kept="1"], [data-kept=""])')
    found = answer.value.json()
    told = page.locator(".quality").inner_text()
    assert f"{found['sequences']} sequences of built-in sample text" in told
    assert "±" in page.locator('[data-part="quality"]').inner_text()
    assert page.locator('[data-part="noise"]').is_visible() == found["within_noise"]
    code = page.locator(".command code").inner_text()
    assert code == served.live.command
    page.locator('[data-do="clear"]').click()
