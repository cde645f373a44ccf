"""Every address of the live page: what it answers, what it refuses, in sentences."""

import asyncio
import base64
import gc
import io
import json
import re
import shlex
import threading

import numpy
import pytest
import torch
import transformers as hf
from PIL import Image
from tests.helpers.live_models import SIZES, Characters, Site, apart, bert, loaded
from tests.helpers.models import llama_config, t5_config, vit_config

import manyheads as mh
from manyheads.common.run_batch import run
from manyheads.nn.transformers import Decoder, Seq2Seq
from manyheads.view.document.packing import unpacked
from manyheads.view.live import endpoints as ask
from manyheads.view.live import growing_document
from manyheads.view.live.app import page_html
from manyheads.view.live.contract import CHARACTERS
from manyheads.view.live.growing_document import GrowingDocument
from manyheads.view.live.session import begin

FIRST, SECOND = (f"encoder.layer.{i}.attention.self" for i in range(2))


def said(site, path, body=None, **headers):
    return apart(site.ask(path, body, **headers))


def answered(site, path, body=None):
    status, answer = said(site, path, body)
    assert status == 200, answer
    return answer


def refused(site, path, body, status=422):
    found, answer = said(site, path, body)
    assert found == status, answer
    assert "\n" not in answer["error"]
    return answer["error"]


def test_attention_is_exact(site):
    found = answered(site, "/api/attend", {"text": "heads attend"})
    assert found["cut"] is None
    assert found["example"]["tokens"]["self"][0]["text"] == "[0]"
    ids = torch.tensor([Characters()("heads attend")["input_ids"]])
    wanted = mh.maps(site.live.model, {"input_ids": ids}, {SECOND: [2]})[SECOND].weights[0, 0]
    shown = next(maps for maps in found["example"]["maps"] if maps["site"] == SECOND)
    assert torch.allclose(unpacked(shown["exact"]["2"]).float(), wanted, atol=1e-5)
    assert found["answer"]["kind"] == "neighbours"
    assert len(found["answer"]["items"]) == 5


def test_silencing_gives_what_the_silenced_model_says(site):
    heads = {FIRST: [0, 2], SECOND: [1]}
    found = answered(site, "/api/silence", {"text": "heads attend", "heads": heads})
    plain = answered(site, "/api/attend", {"text": "heads attend"})
    assert found["before"] == plain["answer"]
    assert found["after"] != found["before"]
    ids = torch.tensor([Characters()("heads attend")["input_ids"]])
    with torch.no_grad():
        full = site.live.model(ids).last_hidden_state.mean(1).double()
        with mh.silence(site.live.model, heads):
            other = site.live.model(ids).last_hidden_state.mean(1).double()
            maps = mh.maps(site.live.model, {"input_ids": ids}, {SECOND: [0]})[SECOND].weights[0, 0]
    apart = 1 - torch.nn.functional.cosine_similarity(full, other).item()
    assert found["change"] == pytest.approx(apart, rel=1e-3)
    assert found["measure"] == "cosine"
    shown = next(maps for maps in found["example"]["maps"] if maps["site"] == SECOND)
    assert torch.allclose(unpacked(shown["exact"]["0"]).float(), maps, atol=1e-5)
    nothing = answered(site, "/api/silence", {"text": "heads attend", "heads": {}})
    assert nothing["after"] == nothing["before"]
    assert nothing["change"] == pytest.approx(0.0, abs=1e-9)


def test_more_about_one_head_and_about_one_query(site):
    heads = {FIRST: [2]}
    asked = {"text": "heads attend", "heads": heads}
    ids = {"input_ids": torch.tensor([Characters()("heads attend")["input_ids"]])}
    every = {FIRST: [0, 1, 2], SECOND: [0, 1, 2]}
    with mh.silence(site.live.model, heads):
        wanted = mh.maps(site.live.model, ids, every)
    exact = answered(site, "/api/exact", asked | {"site": SECOND, "head": 1})["exact"]
    assert torch.allclose(unpacked(exact).float(), wanted[SECOND].weights[0, 1], atol=1e-5)
    rows = answered(site, "/api/rows", asked | {"query": 5})["rows"]
    for name, map_ in wanted.items():
        assert torch.allclose(unpacked(rows[name]).float(), map_.weights[0, :, 5], atol=1e-5)
    steps = answered(site, "/api/pipeline", asked)["pipeline"]
    assert [step["step"] for step in steps][:3] == ["tokens", "ids", "embedding"]
    mixed = next(step for step in steps if step["step"] == "heads")
    assert mixed["shape"] == [3, 14, 5]
    later = answered(site, "/api/pipeline", asked | {"site": SECOND})["pipeline"]
    weights = next(step for step in later if step["step"] == "weights")
    assert {step["site"] for step in later[1:]} == {weights["site"]} == {SECOND}
    assert torch.allclose(torch.tensor(weights["values"]), wanted[SECOND].weights[0], atol=1e-3)
    assert "no attention at 'nowhere'" in refused(site, "/api/pipeline", asked | {"site": "nowhere"})
    assert "no query 14" in refused(site, "/api/rows", asked | {"query": 14})
    assert "no head 3" in refused(site, "/api/exact", asked | {"site": SECOND, "head": 3})


def test_the_page_carries_what_it_shows_first(site):
    async def opened():
        async with site.client() as client:
            return (await client.get("/")).text

    site.document.document()
    page = apart(opened())
    first = json.loads(re.search(r'<script type="application/json" id="first">(.*?)</script>', page)[1])
    assert first["document"] == answered(site, "/api/document")
    assert first["progress"] == answered(site, "/api/progress")


def test_what_the_page_carries_ends_no_script():
    page = page_html("a model", first=json.dumps({"text": "</script><script>alert(1)</script>"}).encode())
    assert page.count("<script") == page.count("</script>") == 2


def test_other_machines_get_no_document_without_the_token():
    site = Site(begin(loaded(bert(), Characters())), host="0.0.0.0")
    try:
        site.document.document()

        async def opened():
            async with site.client(**{"x-manyheads-token": ""}) as client:
                return (await client.get("/")).text

        assert 'id="first"></script>' in apart(opened())
    finally:
        site.queue.close()


def test_quality_falls_as_heads_go(site):
    whole = answered(site, "/api/quality", {"heads": {}})
    assert (whole["metric"], whole["before"], whole["kept"]) == ("cosine", 1.0, 1.0)
    assert whole["value"] == pytest.approx(1.0)
    assert whole["sequences"] > 1
    some = answered(site, "/api/quality", {"heads": {FIRST: [1], SECOND: [0, 2]}})
    assert some["kept"] == pytest.approx(0.5)
    assert -1 <= some["value"] < 1 - 1e-6
    assert some["se"] > 0


def test_the_plan_goes_through_the_library(site, tmp_path):
    heads = answered(site, "/api/choose", {"ranking": "fisher", "keep": 0.5})["heads"]
    assert sum(map(len, heads.values())) == 3

    async def download():
        async with site.client() as client:
            return await client.post("/api/plan", json={"heads": heads})

    answer = apart(download())
    assert answer.headers["content-disposition"] == 'attachment; filename="plan.json"'
    (tmp_path / "plan.json").write_bytes(answer.content)
    plan = mh.Plan.load(tmp_path / "plan.json")
    assert dict(plan) == heads
    batch = site.live.batches[0]
    small = mh.prune(site.live.model, site.live.batches, using=plan, refit=False)
    with torch.no_grad(), mh.silence(site.live.model, heads):
        wanted = site.live.model(**batch).last_hidden_state
    with torch.no_grad():
        found = small(**batch).last_hidden_state
    real = batch["attention_mask"].bool()
    assert torch.allclose(found[real], wanted[real], atol=1e-5)


def test_heads_by_ranking_are_those_of_plan(site):
    table = mh.importance(site.live.model, site.live.batches)
    for keep in (0.3, 0.8):
        found = answered(site, "/api/choose", {"ranking": "fisher", "keep": keep})["heads"]
        assert found == dict(mh.plan(table, keep))
    assert answered(site, "/api/choose", {"ranking": "random", "keep": 1.0})["heads"] == {}


def test_sinks_rest_on_first_or_special_tokens():
    model = bert()
    with torch.no_grad():  # head 1 of the first layer: every query looks at the special token
        attention = model.encoder.layer[0].attention.self
        model.embeddings.word_embeddings.weight[0] = torch.arange(15.0)
        attention.query.weight[5:10] = 0.0
        attention.query.bias[5:10] = 1.0
        special = model.embeddings(torch.tensor([[0, 0]]))[0, 0]
        attention.key.weight[5:10] = 0.0
        attention.key.weight[5] = special
    site = Site(begin(loaded(model, Characters())))
    try:
        found = answered(site, "/api/choose", {"rule": "sinks"})["heads"]
        assert 1 in found.get(FIRST, [])
        table = site.live.tables["watch"]
        shares = dict(
            zip(zip(table["site"], table["head"], strict=True), table["special"].tolist(), strict=True)
        )
        for (name, head), share in shares.items():
            if share < 0.4:
                assert head not in found.get(name, []) or table["first"][table["head"].index(head)] >= 0.4
    finally:
        site.queue.close()


def test_of_twins_the_less_important_one_goes():
    model = bert()
    with torch.no_grad():  # heads 0 and 2 of the second layer look at the same things; 2 says less
        for layer in model.encoder.layer:
            for part in (layer.attention.self.query, layer.attention.self.key):
                part.weight.normal_()
        attention = model.encoder.layer[1].attention.self
        for part in (attention.query, attention.key):
            part.weight[10:15], part.bias[10:15] = part.weight[:5], part.bias[:5]
        attention.value.weight[10:15] *= 0.01
    site = Site(begin(loaded(model, Characters())))
    try:
        found = answered(site, "/api/choose", {"rule": "twins"})["heads"]
        assert 2 in found.get(SECOND, [])
        assert 0 not in found.get(SECOND, [])
    finally:
        site.queue.close()


def test_the_document_grows_in_spare_time(site):
    first = answered(site, "/api/document")
    assert first["heads"]["name"] == ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2"]
    assert first["examples"][0]["answer"]["kind"] == "neighbours"
    assert first["roles"] is None
    before = answered(site, "/api/progress")
    assert before["stages"]
    assert not before["finished"]
    for _ in site.document.steps():
        pass
    after = answered(site, "/api/progress")
    assert after["finished"]
    assert after["version"] == before["version"] + len(before["stages"])
    grown = answered(site, "/api/document")
    assert grown["header"]["notes"] == []
    assert set(grown["importance"]) >= {"fisher", "elimination"}
    table = site.live.tables["watch"]
    assert grown["heads"]["metrics"]["entropy"]["mean"] == pytest.approx(table["entropy"].tolist())
    assert grown["roles"]
    assert grown["curve"]["quality"] == "cosine"
    # what the page shows at full strength is what it measures when one clicks
    assert grown["curve"]["lines"][0]["mean"][0] == pytest.approx(1.0)


def test_who_asks_while_the_document_is_written_comes_first(site, monkeypatch):
    growing, begun, done = GrowingDocument(site.live, site.queue), threading.Event(), threading.Event()
    document = growing.document

    def endless():
        if begun.is_set():
            return document()
        begun.set()
        while True:
            run(site.live.model, site.live.batches[0])

    def steps():
        yield from growing.steps()
        done.set()

    monkeypatch.setattr(growing, "document", endless)
    site.queue.in_spare_time(steps())
    assert begun.wait(20)
    answered(site, "/api/attend", {"text": "here"})
    assert done.wait(60)
    assert growing.first_page()


def test_a_stage_that_fails_leaves_a_note(site, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no roles\ntoday")

    monkeypatch.setattr(growing_document.page_measurements, "roles_of_heads", broken)
    growing = GrowingDocument(site.live, site.queue)
    for _ in growing.steps():
        pass
    assert growing.finished
    assert growing.notes == ["roles: left out (RuntimeError: no roles)"]


@pytest.mark.parametrize(
    "text",
    ["<script>alert(1)</script>", "a\x00b", "👩‍👩‍👧 \u202eevil", "\r\n\t a", "é" * 3, "x"],
)
def test_hostile_texts_are_texts(site, text):
    body = json.dumps({"text": text}).encode()

    async def post():
        async with site.client(**{"content-type": "application/json"}) as client:
            return await client.post("/api/attend", content=body)

    found = apart(post())
    assert found.status_code == 200, found.text
    assert len(found.json()["example"]["tokens"]["self"]) > 2


def test_a_long_text_is_cut_and_the_page_is_told(site):
    found = answered(site, "/api/attend", {"text": "a" * CHARACTERS})
    assert found["cut"] == {"tokens": CHARACTERS + 2, "shown": 64}
    assert len(found["example"]["tokens"]["self"]) == 64
    assert "100" in refused(site, "/api/attend", {"text": "a" * (CHARACTERS + 1)})


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/api/attend", {}, "a text or an image"),
        ("/api/attend", {"text": " \n"}, "it is empty"),
        ("/api/attend", {"text": 7}, "text"),
        ("/api/attend", {"text": "a", "more": 1}, "more"),
        ("/api/attend", {"image": "AAAA"}, "reads texts"),
        ("/api/attend", [], "request"),
        ("/api/silence", {"text": "a"}, "heads"),
        ("/api/silence", {"text": "a", "heads": {"nowhere": [0]}}, "nowhere"),
        ("/api/silence", {"text": "a", "heads": {FIRST: [3]}}, "no head 3"),
        ("/api/silence", {"text": "a", "heads": {FIRST: [-1]}}, "no head -1"),
        ("/api/silence", {"text": "a", "heads": {FIRST: [1, 1]}}, "twice"),
        ("/api/silence", {"text": "a", "heads": {FIRST: ["1"]}}, "heads"),
        ("/api/choose", {}, "a rule or a ranking"),
        ("/api/choose", {"rule": "all", "ranking": "fisher"}, "a rule or a ranking"),
        ("/api/choose", {"rule": "all"}, "sinks"),
        ("/api/choose", {"ranking": "best"}, "elimination"),
        ("/api/choose", {"ranking": "fisher", "keep": 0.0}, "keep"),
        ("/api/plan", {"heads": {}}, "none is chosen"),
        ("/api/plan", {"heads": {FIRST: [0, 1, 2], SECOND: [0, 1, 2]}}, "at least one"),
    ],
)
def test_mistakes_are_sentences(site, path, body, word):
    assert word in refused(site, path, body)


def test_addresses_that_do_not_exist(site):
    assert "nothing at" in refused(site, "/favicon.ico", None, 404)
    assert said(site, "/api/none", {})[0] == 404
    assert said(site, "/api/attend")[0] == 405
    assert said(site, "/../pyproject.toml")[0] == 404


def test_what_fails_inside_the_model_is_a_sentence(site, monkeypatch):
    def broken(*_):
        raise RuntimeError("out of memory\nmuch more")

    monkeypatch.setattr(ask, "attend", broken)
    assert "RuntimeError: out of memory)" in refused(site, "/api/attend", {"text": "a"}, 500)


def test_a_tab_gets_its_turn_whatever_others_call_themselves(site):
    """Many requests under many names of tabs wait; one more is not refused."""
    begun, free = threading.Event(), threading.Event()
    site.queue.submit(("", 0), lambda: begun.set() or free.wait(20))
    assert begun.wait(20)

    async def many():
        async with site.client() as client:

            async def post(tab):
                return await client.post("/api/attend", json={"text": "a"}, headers={"x-manyheads-tab": tab})

            waiting = [asyncio.ensure_future(post(str(i))) for i in range(48)]
            while len(site.queue) < len(waiting):
                await asyncio.sleep(0.01)
            polite = asyncio.ensure_future(site.ask("/api/attend", {"text": "b"}))
            free.set()
            return (await polite)[0], [found.status_code for found in await asyncio.gather(*waiting)]

    assert apart(many()) == (200, [200] * 48)


def test_two_thousand_requests_leave_nothing(site):
    """What is kept after 2,000 requests is what was kept after the first few."""

    async def ask(numbers):
        async with site.client() as client:
            for number in numbers:
                path, body = "/api/attend", {"text": f"heads {number}"}
                answer = await (
                    client.post(path, json=body) if number % 10 == 0 else client.get("/api/progress")
                )
                assert answer.status_code == 200
        gc.collect()
        return len(gc.get_objects())

    before, after = apart(ask(range(200))), apart(ask(range(200, 2000)))
    assert after < before + 2000
    assert len(site.live.results) <= 8
    assert len(site.queue) == site.app.bodies.counted == 0


async def given_up(site, path, body, until):
    """Ask for something, and leave as soon as something holds."""
    leave = asyncio.Event()
    messages = iter([{"type": "http.request", "body": json.dumps(body).encode()}])
    headers = {"host": "localhost", "x-manyheads-token": "a-secret", "content-type": "application/json"}

    async def receive():
        for message in messages:
            return message
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        pass

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8610),
        "scheme": "http",
        "http_version": "1.1",
    }
    asked = asyncio.ensure_future(site.app(scope, receive, send))
    while not until():
        await asyncio.sleep(0.01)
    leave.set()
    await asked


def test_what_the_browser_gave_up_on_never_runs(site, monkeypatch):
    begun, free, ran = threading.Event(), threading.Event(), []
    site.queue.submit(("", 0), lambda: begun.set() or free.wait(20))
    assert begun.wait(20)  # from here on the queue holds only what waits
    monkeypatch.setattr(ask, "attend", lambda live, given: ran.append(given.text) or {})

    async def main():
        await given_up(site, "/api/attend", {"text": "gone"}, lambda: len(site.queue))
        assert len(site.queue) == 0
        free.set()
        return await site.ask("/api/attend", {"text": "here"})

    apart(main())
    assert ran == ["here"]


def test_what_the_browser_gave_up_on_ends_in_the_middle(site, monkeypatch):
    begun = threading.Event()

    def endless(live, heads):
        begun.set()
        while True:
            run(live.model, live.batches[0])

    monkeypatch.setattr(ask, "quality", endless)

    async def main():
        await given_up(site, "/api/quality", {"heads": {}}, begun.is_set)
        return await site.ask("/api/attend", {"text": "here"})

    status, answer = apart(main())
    assert status == 200, answer


def picture(size=(8, 8), form="PNG"):
    file = io.BytesIO()
    Image.new("RGB", size, (200, 30, 90)).save(file, form)
    return base64.b64encode(file.getvalue()).decode()


class Pixels:
    """An image processor."""

    image_mean = image_std = (0.5, 0.5, 0.5)

    def __call__(self, pictures, return_tensors="pt"):
        small = [one.resize((8, 8)) for one in pictures]
        values = torch.stack([torch.tensor(numpy.asarray(one)) for one in small])
        return {"pixel_values": values.permute(0, 3, 1, 2).float() / 127.5 - 1}


def test_pictures():
    model = hf.ViTForImageClassification(vit_config(image_size=8, patch_size=2, num_labels=3, **SIZES))
    site = Site(begin(loaded(model, processor=Pixels())))
    try:
        progress = answered(site, "/api/progress")
        assert (progress["reads"], progress["stages"], progress["finished"]) == ("image", [], True)
        assert len(answered(site, "/api/document")["heads"]["name"]) == 6
        for form in ("PNG", "JPEG", "WEBP"):
            found = answered(site, "/api/attend", {"image": picture((23, 17), form)})
            assert (found["example"]["kind"], found["answer"]["kind"]) == ("image", "class")
            assert (found["example"]["picture"]["rows"], found["example"]["picture"]["first"]) == (4, 1)
        where = found["example"]["maps"][1]["site"]
        body = {"image": picture(), "heads": {where: [0, 1, 2]}}
        assert answered(site, "/api/silence", body)["measure"] == "kl_sequence"
        assert "reads images" in refused(site, "/api/attend", {"text": "a"})
        assert "base64" in refused(site, "/api/attend", {"image": "%"})
        assert "cannot be read" in refused(
            site, "/api/attend", {"image": base64.b64encode(b"<svg/>").decode()}
        )
        assert "cannot be read" in refused(site, "/api/attend", {"image": picture((40, 40))[:80]})
        assert "pixels" in refused(site, "/api/attend", {"image": picture((9000, 4000))})
        large = base64.b64encode(bytes(ask.IMAGE_BYTES + 1)).decode()
        assert "bytes" in refused(site, "/api/attend", {"image": large})
        assert "--images" in refused(site, "/api/quality", {"heads": {}})
        assert "--images" in refused(site, "/api/choose", {"ranking": "fisher"})
    finally:
        site.queue.close()


def test_pictures_that_it_is_measured_on_can_be_asked_about(tmp_path):
    for number, size in enumerate([(8, 8), (23, 17), (9, 9)]):
        Image.new("RGB", size, (200, 50 * number, 90)).save(tmp_path / f"{number}.png")
    model = hf.ViTForImageClassification(vit_config(image_size=8, patch_size=2, num_labels=3, **SIZES))
    site = Site(begin(loaded(model, processor=Pixels()), images=str(tmp_path)))
    try:
        assert answered(site, "/api/progress")["pictures"] == 3
        first = answered(site, "/api/document")["examples"][0]
        again = answered(site, "/api/attend", {"sample": 0})["example"]
        assert again | {"pipeline": None} == first | {"pipeline": None}
        other = answered(site, "/api/attend", {"sample": 2})
        assert other["example"]["picture"]["png"] != first["picture"]["png"]
        rows = answered(site, "/api/rows", {"sample": 2, "heads": {}, "query": 16})["rows"]
        assert [one["shape"] for one in rows.values()] == [[3, 17], [3, 17]]
        assert "below 3" in refused(site, "/api/attend", {"sample": 3})
        assert answered(site, "/api/quality", {"heads": {}})["metric"] == "agreement"
    finally:
        site.queue.close()


def test_models_that_write_have_a_perplexity():
    config = llama_config(
        vocab_size=97,
        max_position_embeddings=64,
        num_key_value_heads=2,
        **SIZES | {"num_attention_heads": 4, "hidden_size": 24},
    )
    torch.manual_seed(0)
    site = Site(begin(loaded(hf.LlamaForCausalLM(config), Characters())))
    try:
        found = answered(site, "/api/attend", {"text": "once upon"})
        assert found["answer"]["kind"] == "next"
        heads = {"model.layers.0.self_attn": [0, 1]}
        quality = answered(site, "/api/quality", {"heads": heads})
        assert quality["metric"] == "perplexity"
        total = count = 0.0
        model = site.live.model
        with torch.no_grad(), mh.silence(model, heads):
            for batch in ask.quality_batches(site.live):
                for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
                    ids = ids[mask.bool()]
                    logits = model(ids[None]).logits[0, :-1]
                    total += torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum").item()
                    count += len(ids) - 1
        assert quality["value"] == pytest.approx(torch.tensor(total / count).exp().item(), rel=1e-4)
        assert "share" in refused(site, "/api/plan", {"heads": {"model.layers.0.self_attn": [0]}})
        assert answered(site, "/api/plan", {"heads": heads})["remove"] == heads
        chosen = answered(site, "/api/choose", {"ranking": "elimination", "keep": 0.5})["heads"]
        assert answered(site, "/api/plan", {"heads": chosen})["remove"] == chosen
    finally:
        site.queue.close()


def test_models_that_fill_in_begin_with_a_gap():
    site = Site(begin(loaded(bert(hf.BertForMaskedLM), Characters())))
    try:
        progress = answered(site, "/api/progress")
        assert progress["mask"] == "_"
        assert all("_" in sample for sample in progress["samples"])
        found = answered(site, "/api/attend", {"text": "he_ds"})
        assert (found["answer"]["kind"], found["answer"]["place"]) == ("mask", 3)
        assert answered(site, "/api/quality", {"heads": {}})["metric"] == "agreement"
    finally:
        site.queue.close()


def test_models_that_translate_read_their_own_translation():
    config = t5_config(
        vocab_size=97, d_model=12, d_kv=5, d_ff=11, num_layers=2, num_heads=3, decoder_start_token_id=0
    )
    torch.manual_seed(1)
    site = Site(begin(loaded(hf.T5ForConditionalGeneration(config), Characters())))
    try:
        found = answered(site, "/api/attend", {"text": "heads"})
        assert (found["answer"]["kind"], found["example"]["kind"]) == ("translation", "pair")
        ids = torch.tensor([Characters()("heads")["input_ids"]])
        wanted = site.live.model.generate(ids, max_new_tokens=48, do_sample=False, num_beams=1)[0, :-1]
        shown = [token["text"] for token in found["example"]["tokens"]["target"]]
        assert shown == [Characters().convert_ids_to_tokens(i) for i in wanted.tolist()]
        heads = {
            maps["site"]: [0, 1, 2] for maps in found["example"]["maps"] if maps["queries"] != maps["keys"]
        }
        silenced = answered(site, "/api/silence", {"text": "heads", "heads": heads})
        assert silenced["after"]["items"] != silenced["before"]["items"]
        assert silenced["example"]["tokens"] == found["example"]["tokens"]
    finally:
        site.queue.close()


def test_own_seq2seq_is_no_trouble():
    """A model of our own that a factory gives, without a task: what cannot be read is left out."""
    model = Seq2Seq(12, heads=3, layers=1, vocabulary=97)
    with pytest.raises((ValueError, TypeError)):
        begin(loaded(model, Characters()))


def test_a_cut_model_can_be_cut_again(tmp_path):
    small = mh.cut(bert(), {0: [1]})
    site = Site(begin(loaded(small, Characters())))
    try:
        heads = answered(site, "/api/document")["heads"]
        assert heads["original_head"] == [0, 2, 0, 1, 2]
        assert "no head 2" in refused(site, "/api/plan", {"heads": {FIRST: [2]}})
        (tmp_path / "plan.json").write_text(json.dumps(answered(site, "/api/plan", {"heads": {FIRST: [1]}})))
        smaller = mh.cut(small, mh.Plan.load(tmp_path / "plan.json"))
        assert smaller.original_heads[FIRST] == [0]
    finally:
        site.queue.close()


def test_models_of_our_own_are_read_as_their_task_says():
    """As `models.open.open_model` gives a folder that train wrote: ids and lengths are arranged."""
    model = Decoder(12, heads=3, layers=2, vocabulary=97)
    own = loaded(model, Characters())
    own.arrange = lambda ids, lengths: {"x": ids, "lengths": lengths}
    site = Site(begin(own))
    try:
        assert answered(site, "/api/attend", {"text": "heads"})["answer"]["kind"] == "next"
        heads = answered(site, "/api/choose", {"ranking": "fisher", "keep": 0.5})["heads"]
        whole = answered(site, "/api/quality", {"heads": {}})
        assert whole["metric"] == "perplexity"
        assert whole["value"] == pytest.approx(whole["before"])
        assert answered(site, "/api/quality", {"heads": heads})["value"] != pytest.approx(
            whole["before"], rel=1e-6
        )
    finally:
        site.queue.close()


def test_the_command_takes_the_text_along(tmp_path, monkeypatch):
    """Typed in any folder, it fits to what the page was shown with."""
    (tmp_path / "my text's.txt").write_text("\n".join(f"heads attend to {i}" for i in range(30)))
    monkeypatch.chdir(tmp_path)
    live = begin(loaded(bert(), Characters()), text="my text's.txt")
    words = shlex.split(live.command)
    assert words[words.index("--text") + 1] == str(tmp_path / "my text's.txt")
    assert words[words.index("--plan") + 1] == "plan.json"
    assert "--text" not in begin(loaded(bert(), Characters())).command
    with pytest.raises(ValueError, match="text: got standard input, which can be read only once"):
        begin(loaded(bert(), Characters()), text="-")


def test_a_classifier_is_judged_by_its_choices():
    live = begin(loaded(bert(hf.BertForSequenceClassification, num_labels=3), Characters()))
    found = ask.quality(live, {f"bert.{FIRST}": [0, 1, 2], f"bert.{SECOND}": [0, 1]})
    assert (found["metric"], found["before"]) == ("agreement", 1.0)
    assert 0 <= found["value"] <= 1
    nothing = ask.quality(live, {})
    assert (nothing["value"], nothing["within_noise"]) == (1.0, False)
