"""The report: one file without network, always small, nothing in it taken for markup; inspect writes it."""

import base64
import gzip
import hashlib
import html.parser
import json
import os
import re
import signal

import pytest
import torch
import transformers as hf
from tests.helpers.models import llama_config

import manyheads as mh
from manyheads.heads.table import Row
from manyheads.view import inspect
from manyheads.view import report as reports
from manyheads.view.document import About, document, of_batches
from manyheads.view.report import LIMIT, report_html, write_report

HOSTILE = "</script><script>alert(1)</script>\0\u202e&amp;\ud83d"


def llama(layers=2, heads=3, positions=64):
    config = llama_config(
        vocab_size=97,
        hidden_size=4 * heads,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=4,
        intermediate_size=11,
        max_position_embeddings=positions,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = hf.LlamaModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4) if parameter.dim() > 1 else None
    return model.eval()


def table(heads=2):
    rows = [Row("h.0.attn", 0, head, head, head, "causal") for head in range(heads)]
    return mh.HeadTable(rows, torch.ones(heads), {"entropy": torch.rand(3, heads) + 1})


class Reader(html.parser.HTMLParser):
    """The tags of a page, and the text in each."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes), []))

    def handle_endtag(self, tag):
        self.found.append((f"/{tag}", {}, []))

    def handle_data(self, data):
        if self.found:
            self.found[-1][2].append(data)

    def all(self, wanted):
        return [(attributes, "".join(text)) for tag, attributes, text in self.found if tag == wanted]


def carried(page):
    (data,) = [text for attributes, text in Reader(page).all("script") if attributes.get("id") == "document"]
    return json.loads(gzip.decompress(base64.b64decode(data)))


def test_it_carries_the_document_and_a_policy_that_knows_its_script():
    made = document(table(), about=About("a model"))
    page = report_html(made)
    read = Reader(page)
    assert carried(page) == made
    (policy,) = [
        a["content"] for a, _ in read.all("meta") if a.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert "connect-src" not in rules
    (script,) = [text for attributes, text in read.all("script") if not attributes]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", page.replace(script, ""))
    assert len(read.all("script")) == 2


def test_no_text_is_taken_for_markup(tmp_path):
    made = document(table(), about=About(HOSTILE, HOSTILE, groups={HOSTILE: HOSTILE}, notes=[HOSTILE]))
    write_report(made, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    read = Reader(page)
    assert len(read.all("script")) == 2
    assert read.all("title")[0][1].startswith("</script><script>alert(1)</script>")
    assert carried(page)["header"]["notes"] == [HOSTILE]
    assert len(page) - len(report_html(document(table(), about=About("x" * 100_000)))) < 2000


def test_a_file_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("before")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_report(document(table()), path)
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    assert path.read_text() == "before"


def test_a_page_that_grows_too_large_loses_the_least_wanted_first(monkeypatch):
    model = llama()
    batch = {"input_ids": torch.randint(3, 97, (1, 13))}
    made = document(mh.inspect(model, [batch]), model, of_batches([batch], model))
    size = len(report_html(made).encode())  # the page has words in Chinese
    sizes, before = [], json.dumps(made)
    data = len(reports.encoded(made))
    for limit in (size + 1, size - data // 10, size - data // 5):
        monkeypatch.setattr(reports, "LIMIT", limit)
        page = report_html(made)
        assert len(page.encode()) < limit
        sizes.append(len(page.encode()))
        assert carried(page)["heads"] == made["heads"]
    assert sizes == sorted(sizes, reverse=True)
    assert json.dumps(made) == before
    monkeypatch.setattr(reports, "LIMIT", size - data)
    with pytest.raises(ValueError, match="6 heads do not fit into a page"):
        report_html(made)


@pytest.mark.parametrize(("layers", "heads", "length"), [(12, 12, 512), (32, 32, 61)])
def test_large_models_fit(layers, heads, length, monkeypatch):
    for name in ("ranking", "roles_of_heads", "redundancy", "silencing_curve"):  # few numbers, much time
        monkeypatch.setattr(f"manyheads.heads.effects.page_measurements.{name}", lambda *_, **__: None)
    monkeypatch.setattr("manyheads.view.document.examples.WORK", 0)
    model = llama(layers, heads, positions=512)
    batches = [{"input_ids": torch.randint(3, 97, (1, size))} for size in (13, length)]
    counted = mh.inspect(model, [batches[0]])
    made = document(counted, model, of_batches(batches, model))
    page = report_html(made)
    assert len(page.encode()) < LIMIT
    found = carried(page)
    assert found == made  # it was fitted before, nothing had to go
    short, long = found["examples"]
    assert sum(len(maps["exact"]) for maps in short["maps"]) == layers * heads
    assert all(len(maps["peak"]) == heads for maps in long["maps"])
    assert any(maps["exact"] for maps in long["maps"])


# ---------------------------------------------------------------- inspect


def batches():
    return [{"input_ids": torch.randint(3, 97, (2, 7))} for _ in range(2)]


def test_inspect_writes_it(tmp_path):
    counted = mh.inspect(llama(), batches(), out=tmp_path)
    found = carried((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert found["header"]["model"] == "LlamaModel"
    assert found["heads"]["metrics"]["entropy"]["mean"] == counted["entropy"].tolist()
    assert found["examples"][0]["maps"]
    assert not found["header"]["stopped"]


def test_an_interruption_while_measuring_leaves_a_page(tmp_path, monkeypatch):
    def interrupted(*_, progress, **__):
        signal.raise_signal(signal.SIGINT)
        progress("diversity", 1, 2)
        raise AssertionError("it did not stop between two units")

    monkeypatch.setattr("manyheads.heads.effects.page_measurements.diversity", interrupted)
    before = signal.getsignal(signal.SIGINT)
    counted = mh.inspect(llama(), batches(), out=tmp_path)
    assert signal.getsignal(signal.SIGINT) is before
    found = carried((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert found["header"]["stopped"]
    assert found["redundancy"] is None
    assert found["examples"]
    assert found["heads"]["metrics"]["entropy"]["mean"] == counted["entropy"].tolist()


def test_a_count_that_ended_early_has_a_page_of_numbers(tmp_path):
    broken = [*batches(), {"input_ids": torch.full((1, 3), 97)}]
    with pytest.raises(ValueError, match="failed on a batch"):
        mh.inspect(llama(), broken, out=tmp_path)
    found = carried((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert found["examples"] == []
    assert any("ended early" in note for note in found["header"]["notes"])


def test_only_the_first_process_writes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(inspect, "rank", lambda: 1)
    mh.inspect(llama(), batches(), out=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(inspect, "write_report", full)
    with pytest.raises(OSError, match=r"No space left on device.*make room"):
        mh.inspect(llama(), batches(), out=tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["heads.csv", "heads.json", "summary.txt"]


def test_the_public_report(tmp_path):
    torch.manual_seed(0)
    model = mh.Encoder(d_model=8, heads=2, layers=2, vocabulary=17).eval()
    batch = torch.randint(17, (3, 5))
    with torch.no_grad(), mh.watch(model) as seen:
        model(batch)
    stages = []
    path = mh.report(
        seen,
        tmp_path / "new" / "page.html",
        model,
        [batch],
        title="tiny",
        progress=lambda stage, *_: stages.append(stage),
    )
    page = carried(path.read_text(encoding="utf-8"))
    assert page["header"]["model"] == "tiny"
    assert page["examples"]
    assert "importance" in stages
    alone = carried(mh.report(seen.table, tmp_path / "table.html").read_text(encoding="utf-8"))
    assert alone["examples"] == []
    assert alone["heads"]["metrics"] == carried(mh.report(seen, path).read_text("utf-8"))["heads"]["metrics"]
    with pytest.raises(ValueError, match="batches: expected both a model and batches"):
        mh.report(seen, path, model)
    with pytest.raises(TypeError, match="shown: expected a HeadTable"):
        mh.report(model, path)
