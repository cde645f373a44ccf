"""mh.serve: it opens a model, prints the address, and answers until a signal."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tests.helpers.live_models import Characters, bert, loaded

import manyheads as mh

FACTORY = """
from tests.helpers.live_models import Characters, bert

def tiny():
    return bert(), Characters()
"""


def test_it_answers_and_returns_at_ctrl_c(tmp_path):
    (tmp_path / "tiny_factory.py").write_text(FACTORY)
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-c", "import manyheads as mh; mh.serve('tiny_factory:tiny', port=0); print('end')"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        address = re.fullmatch(r"tiny_factory:tiny, 6 heads: (http://127\.0\.0\.1:\d+/)\n", line)[1]
        assert httpx.get(address, timeout=60).status_code == 200
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, output, errors) == (0, "end\n", "")


def test_a_model_that_is_open_already(monkeypatch):
    calls = []
    model = loaded(bert(), Characters())
    monkeypatch.setattr(
        "manyheads.view.live.server.serve",
        lambda live, host, port, announce: announce(f"http://{host}:{port}/"),
    )
    mh.serve(model, port=7, announce=lambda *call: calls.append(call))
    (live, address) = calls[0]
    assert (live.loaded.name, live.heads, address) == ("tiny", 6, "http://127.0.0.1:7/")


def test_without_the_extra_it_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "manyheads.view.live.server", raising=False)
    monkeypatch.delattr("manyheads.view.live.server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ImportError, match=r"pip install 'manyheads\[live\]'"):
        mh.serve(loaded(bert(), Characters()))
