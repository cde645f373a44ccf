"""Who may ask: names, origins and tokens; what every answer carries."""

import pytest
from tests.helpers.live_models import TOKEN, Site, apart

from manyheads.view.live.request_bodies import LARGEST
from manyheads.view.live.security import HEADERS, Guard

ASKED = {"text": "heads"}


def said(site, path="/api/progress", body=None, **headers):
    return apart(site.ask(path, body, **{name.replace("_", "-"): value for name, value in headers.items()}))


@pytest.mark.parametrize("host", ["127.0.0.1:8610", "localhost:1", "LOCALHOST", "[::1]:8610", "127.9.9.9"])
def test_names_of_this_machine(site, host):
    assert said(site, host=host)[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "10.0.0.5:8610", "127.0.0.1.evil.example", "", "[::2]"]
)
def test_other_names_are_refused_so_that_rebinding_gets_nothing(site, host):
    status, answer = said(site, host=host)
    assert status == 421
    assert answer["error"].startswith("Host: ")
    assert said(site, "/", host=host)[0] == 421


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://127.0.0.1:8610", 200),
        ("http://127.0.0.1:9999", 403),
        ("http://evil.example", 403),
        ("null", 403),
        ("file://", 403),
    ],
)
def test_only_our_own_page_may_ask(site, origin, status):
    assert said(site, origin=origin)[0] == status


@pytest.mark.parametrize(("from_", "status"), [("same-origin", 200), ("none", 200), ("cross-site", 403)])
def test_what_the_browser_says_of_a_request(site, from_, status):
    assert said(site, sec_fetch_site=from_)[0] == status


@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], TOKEN + "x", "Ω"])
def test_no_answer_without_the_token(site, token):
    status, answer = said(site, "/api/attend", ASKED, x_manyheads_token=token.encode("utf-8"))
    assert status == 403
    assert "token" in answer["error"]


def test_the_page_has_the_token_here_and_not_for_other_machines(site):
    async def page(some):
        async with some.client(**{"x-manyheads-token": ""}) as client:
            return (await client.get("/")).text

    assert f'content="{TOKEN}"' in apart(page(site))
    open_to_all = Site(site.live, host="0.0.0.0")
    try:
        assert TOKEN not in apart(page(open_to_all))
        for host, status in (("10.0.0.5:8610", 200), ("[fe80::1]:8610", 200), ("evil.example", 421)):
            assert said(open_to_all, host=host)[0] == status
    finally:
        open_to_all.queue.close()


def test_every_answer_forbids_what_the_page_does_not_need(site):
    async def headers():
        async with site.client() as client:
            return [
                (await client.get(path)).headers for path in ("/", "/page.js", "/api/progress", "/nothing")
            ]

    kept = {"cache-control": "private, max-age=31536000, immutable"}  # the page asks for a version of it
    for place, found in enumerate(apart(headers())):
        assert {name: found[name] for name in HEADERS} == HEADERS | (kept if place == 1 else {})
    assert "unsafe" not in HEADERS["content-security-policy"]


def test_large_bodies_are_refused_before_they_are_read(site):
    status, answer = said(site, "/api/attend", {"text": "x" * LARGEST})
    assert status == 413
    assert "larger than" in answer["error"]


def test_large_bodies_without_a_length_are_refused_while_they_are_read(site):
    async def chunks():
        for _ in range(LARGEST // 2**20 + 2):
            yield b"x" * 2**20

    async def ask():
        async with site.client(**{"content-type": "application/json"}) as client:
            return await client.post("/api/attend", content=chunks())

    answer = apart(ask())
    assert answer.status_code == 413
    assert "larger than" in answer.json()["error"]


def test_websockets_get_no_answer():
    sent = []
    guard = Guard(None, host="127.0.0.1", token=TOKEN)

    async def keep(message):
        sent.append(message)

    apart(guard({"type": "websocket"}, None, keep))
    assert sent == []
