"""A real server process: it opens, answers, and ends cleanly by a signal."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from manyheads.view.live.server import address, listen

FACTORY = """
from tests.helpers.live_models import Characters, bert

def made():
    return bert(), Characters()
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tiny_factory.py").write_text(FACTORY)
    return tmp_path


def start(folder, *options):
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "manyheads", "serve", "tiny_factory:made", "--port", "0", *options],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_answers_and_ends_by_a_signal(folder, number):
    process = start(folder, "--json")
    try:
        told = json.loads(process.stdout.readline())
        assert told["heads"] == 6
        with httpx.Client(base_url=told["address"], timeout=60) as client:
            page = client.get("/")
            token = re.search(r'name="manyheads-live" content="([\w-]{20,})"', page.text)[1]
            answer = client.post("/api/attend", json={"text": "heads"}, headers={"x-manyheads-token": token})
            assert answer.json()["answer"]["kind"] == "neighbours"
            assert client.post("/api/attend", json={"text": "heads"}).status_code == 403
            process.send_signal(number)  # while a connection is open, and work goes on in spare time
            output, errors = process.communicate(timeout=600)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0
    assert (output, errors) == ("", "")


def test_mistakes_end_it_before_anybody_can_ask(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start(folder, "--port", str(taken.getsockname()[1]))
        _, errors = process.communicate(timeout=600)
    assert process.returncode == 2
    assert "--port 0" in errors
    assert "Traceback" not in errors


def test_the_address_for_others_has_the_secret_where_no_server_sees_it():
    with listen("127.0.0.1", 0) as socket_:
        port = socket_.getsockname()[1]
        assert address(socket_, "127.0.0.1", "secret") == f"http://127.0.0.1:{port}/"
        assert address(socket_, "localhost", "secret") == f"http://localhost:{port}/"
        assert address(socket_, "10.0.0.5", "secret") == f"http://10.0.0.5:{port}/#token=secret"
    with pytest.raises(ValueError, match=r"^host: .*127\.0\.0\.1"):
        listen("no such host.invalid", 0)
