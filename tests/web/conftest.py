"""A real browser for these tests: Debian's Chromium through Playwright, and a report to look at."""

import os
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from tests.helpers.models import bert_config

import manyheads as mh
from manyheads.data.batches import Corpus
from manyheads.view.document import About, document, of_corpus
from manyheads.view.report import write_report

# The shell has no windows to draw and takes half the time.
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser")
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "dog", "run", "##ning", "fast", "it", "rained"]


@pytest.fixture(scope="session")
def browser():
    """Chromium, started once; without one these tests are skipped."""
    sync = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("there is no Chromium: apt-get install chromium-headless-shell, or say where in CHROMIUM")
    with sync.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def opened(browser):
    """A function that opens a file or an address; afterwards nothing may have gone wrong on any page:
    no error in the console, no exception, no request to anywhere but what was opened.
    """
    contexts, wrong = [], []
    usual = {"locale": "en-GB", "viewport": {"width": 1280, "height": 900}}

    def visit(where, **options):
        context = browser.new_context(**(usual | options))
        contexts.append(context)
        page = context.new_page()
        url = f"file://{where}" if str(where).startswith("/") else str(where)
        own = url.partition("#")[0] if url.startswith("file:") else "/".join(url.split("/")[:3])
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))

        def asked(request):
            if not request.url.startswith(("data:", "blob:", own)):
                wrong.append(f"a request to {request.url}")

        page.on("request", asked)
        page.goto(url)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert not wrong


@pytest.fixture
def show(opened, tmp_path):
    """A function that opens the report of a document, perhaps at a fragment such as ``#head/0.2``."""
    number = 0

    def shown(document, fragment="", **options):
        nonlocal number
        number += 1
        path = tmp_path / f"report{number}.html"
        write_report(document, path)
        page = opened(f"{path}{fragment}", **options)
        page.wait_for_selector("[role=tab]")
        return page

    return shown


def tokenizer():
    """WordPiece with a few words."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    return hf.BertTokenizerFast(vocab={word: i for i, word in enumerate(words)})


def bert(layers=3, heads=4):
    """A small encoder with a masked language model's head, attention far from even."""
    torch.manual_seed(0)
    config = bert_config(
        vocab_size=5 + len(WORDS),
        hidden_size=8 * heads,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=37,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    return hf.BertForMaskedLM(config).eval()


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A small model's report: ``path``, and the ``table``, ``document`` and ``model`` it was made from."""
    model, words = bert(), tokenizer()
    texts = [" ".join(WORDS[(3 * i + j) % 11] for j in range(4 + i % 7)) for i in range(29)]
    sequences = [words(text)["input_ids"] for text in texts]

    def batch(indices):
        return dict(words.pad({"input_ids": [sequences[i] for i in indices]}, return_tensors="pt"))

    corpus = Corpus("a small text", "tokens", [len(ids) for ids in sequences], batch)
    table = mh.inspect(model, [one for _, one in corpus.batches()], tokens={"special": [2, 3]})
    about = About("a small BERT", corpus.what, sum(corpus.sizes), groups={"special": "20% of the text"})
    found = document(table, model, of_corpus(corpus, model), about=about, tokenizer=words)
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(found, path)
    return SimpleNamespace(path=path, table=table, document=found, model=model, tokenizer=words)
