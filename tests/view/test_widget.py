"""The widget: tables show themselves, what is picked is read from Python, nothing is needed without it."""

import gzip
import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import manyheads as mh
from manyheads.nn.transformers import Encoder
from manyheads.view import widget as widgets

pytest.importorskip("anywidget", reason="anywidget is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the notebook's own packages


def watched():
    torch.manual_seed(0)
    model = Encoder(d_model=9, heads=3, layers=2, vocabulary=17).eval()
    with torch.no_grad(), mh.watch(model) as seen:
        model(torch.randint(17, (2, 7)))
    return seen


def carried(widget):
    return json.loads(gzip.decompress(widget.document))


def test_what_is_picked_is_read_from_python():
    seen = watched()
    page = mh.widget(seen)
    assert carried(page)["header"]["model"] == "Encoder"
    assert carried(page)["heads"]["metrics"]["entropy"]["mean"] == seen.table["entropy"].tolist()
    assert page.selected == {}
    page.set_state({"picked": [4, 0, 1]})  # as the page says it
    assert page.selected == {"blocks.1.attention": [1], "blocks.0.attention": [0, 1]}
    with torch.no_grad(), mh.silence(seen.model, page.selected):
        seen.model(torch.randint(17, (1, 5)))


def test_with_a_model_it_shows_more():
    seen = watched()
    page = mh.widget(seen.table, seen.model, [torch.randint(17, (2, 7))])
    assert carried(page)["examples"][0]["maps"]
    assert carried(page)["importance"]["fisher"]["mean"]


def test_tables_and_watches_show_themselves():
    seen = watched()
    for shown in (seen, seen.table):
        bundle = shown._repr_mimebundle_(include=None, exclude=None)
        bundle = bundle[0] if isinstance(bundle, tuple) else bundle
        assert "application/vnd.jupyter.widget-view+json" in bundle
    with mh.watch(nn.Linear(2, 2)) as empty:
        pass
    assert empty._repr_mimebundle_() == {"text/plain": repr(empty)}


def test_without_anywidget_they_are_text(monkeypatch):
    widgets.widget_class.cache_clear()
    monkeypatch.setitem(sys.modules, "anywidget", None)
    table = watched().table
    assert table._repr_mimebundle_() == {"text/plain": repr(table)}
    with pytest.raises(ImportError, match=r"pip install 'manyheads\[notebook\]'"):
        mh.widget(table)


def test_mistakes_are_told():
    seen = watched()
    with pytest.raises(TypeError, match="shown: expected a HeadTable or what watch returns, got int"):
        mh.widget(3)
    with pytest.raises(ValueError, match="batches: expected both a model and batches"):
        mh.widget(seen, seen.model)
    with pytest.raises(ValueError, match="model: expected both a model and batches"):
        mh.widget(seen, batches=[torch.ones(1, 2)])


def test_nothing_of_it_is_loaded_before_it_is_wanted():
    code = (
        "import sys, manyheads.heads.watch, manyheads.heads.table; "
        "print([n for n in sys.modules if n.startswith(('anywidget', 'ipywidgets', 'manyheads.view.'))])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )


def test_progress_is_reported_while_the_page_is_measured():
    seen, stages = watched(), []
    mh.widget(seen, seen.model, [torch.randint(17, (2, 7))], progress=lambda stage, *_: stages.append(stage))
    assert {"importance", "examples", "redundancy", "roles"} <= set(stages)
