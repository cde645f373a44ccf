"""mh.serve: a page that answers until a signal, also of a model that is open already."""

import re
import signal
import threading

import httpx
import pytest
from tests.helpers.live_models import Characters, bert, loaded

import manyheads as mh


@pytest.fixture
def stopped_by():
    """A thread that stops the server of this process; joined at the end."""
    threads = []

    def start(function):
        thread = threading.Thread(target=function)
        threads.append(thread)
        thread.start()

    yield start
    for thread in threads:
        thread.join(60)


def test_it_serves_an_open_model_until_ctrl_c(stopped_by, capsys):
    seen = {}

    def visit(address):
        try:
            with httpx.Client(base_url=address, timeout=60) as client:
                token = re.search(r'name="manyheads-live" content="([\w-]{20,})"', client.get("/").text)[1]
                body, headers = {"text": "heads"}, {"x-manyheads-token": token}
                seen["answer"] = client.post("/api/attend", json=body, headers=headers).json()["answer"]
        finally:
            signal.raise_signal(signal.SIGINT)

    def announce(live, address):
        seen["heads"] = live.heads
        stopped_by(lambda: visit(address))

    before = signal.getsignal(signal.SIGINT)
    mh.serve(loaded(bert(), Characters()), port=0, announce=announce)
    assert seen["heads"] == 6
    assert seen["answer"]["kind"] == "neighbours"
    assert signal.getsignal(signal.SIGINT) is before
    assert capsys.readouterr() == ("", "")


def test_by_default_the_address_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(
        "manyheads.view.live.server.serve", lambda live, host, port, announce: announce(f"http://{host}/")
    )
    mh.serve(loaded(bert(), Characters()))
    assert capsys.readouterr().out == "tiny, 6 heads: http://127.0.0.1/\n"


def test_without_the_extra_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "manyheads.view.live.server", None)
    with pytest.raises(ImportError, match=r"pip install 'manyheads\[live\]'"):
        mh.serve(loaded(bert(), Characters()))
