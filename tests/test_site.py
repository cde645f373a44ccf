"""The site of the documentation builds without a broken link, has every public name, and loads nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import manyheads as mh

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site; MkDocs is strict about links, anchors and pages that are not listed."""
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return out


def test_every_public_name_is_in_the_reference(site):
    text = "".join(page.read_text(encoding="utf-8") for page in (site / "api").glob("*.html"))
    documented = {name.rpartition(".")[2] for name in re.findall(r'id="(manyheads\.[\w.]+)"', text)}
    assert not set(mh.__all__) - documented - {"__version__", "heads", "nn", "surgery", "tasks"}


def test_pages_load_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    loads = re.compile(
        r'<(?:script|img|iframe|link(?![^>]*rel="canonical"))[^>]*(?:src|href)="(https?:[^"]*)"'
    )
    assert not {url for page in pages for url in loads.findall(page.read_text(encoding="utf-8"))}


def test_search_needs_no_server(site):
    assert (site / "search" / "search_index.js").read_text(encoding="utf-8").startswith("var __index = {")
    assert "iframe-worker.js" in (site / "index.html").read_text(encoding="utf-8")


def test_the_changelog_and_the_benchmarks_are_there(site):
    for page in ("changelog.html", "contributing.html", "results/watch.html"):
        assert (site / page).exists()
    assert 'href="results/watch.html"' in (site / "speed.html").read_text(encoding="utf-8")
