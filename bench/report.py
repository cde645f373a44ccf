"""How large a report is, and how long it takes to open: 12 layers of 12 heads, 512 tokens.

The model's weights are drawn at random (their maps are the hardest to compress); it reads English by MiniLM's
tokenizer.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import manyheads as mh
from bench.harness import say, table, targets
from bench.live import CHROMIUM, painted
from bench.models import minilm
from manyheads.data.text_lines import read_lines
from manyheads.view.document import About, document, of_batches
from manyheads.view.report import LIMIT, write_report

OPENS = 500.0  # milliseconds
LENGTH = 512  # tokens of the longest example
SHOWN = {  # what is waited for in each view: the drawing of every head
    "heads": "document.querySelectorAll('.heads [data-index]').length >= {heads}",
    "glance": "Number(document.querySelector('.panel canvas')?.dataset.painted) > 0",
    "head": "document.querySelector('.heat, .overview')",
}


def run(quick: bool) -> str:
    """Write the reports, and open them."""
    repeats = 2 if quick else 7
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        heads, spent = written(*many(), path)
        size = path.stat().st_size
        say(f"{size / 1e6:.2f} MB")
        opened = opening(path, heads, repeats) if CHROMIUM.exists() else {}
    times = [f"{statistics.median(opened[view]):.0f}" if opened else "–" for view in SHOWN]
    rows = [[heads, LENGTH, f"{size / 1e6:.2f}", *times, f"{spent:.0f}"]]
    goals = [("MB", size / 1e6, "<=", LIMIT / 1e6)]
    if opened:
        goals.append(("open, ms", statistics.median(opened["heads"]), "<=", OPENS))
    header = ["heads", "tokens", "MB", "open, ms", "all maps, ms", "one head, ms", "written in, s"]
    about = (
        "One input of that many tokens, and shorter ones. From file://, in a new Chromium page each time: "
        "from the start of its navigation to the frame after every head is drawn; medians.\n\n"
    )
    return f"{about}{table(header, rows)}\n\n{targets(*goals)}"


def many() -> tuple[Any, Any]:
    """A BERT of 12 layers of 12 heads that nobody trained, and MiniLM's tokenizer."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 768}
    return BertModel(BertConfig(initializer_range=0.06, **sizes)).eval(), minilm()[1]


def written(model: Any, tokenizer: Any, path: Path) -> tuple[int, float]:
    """Watch a model on a text of our own, once many tokens of it, and write what is to be seen."""
    text = " ".join(read_lines(None, None))
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    ids = (ids * (1 + LENGTH // len(ids)))[:LENGTH]
    batches = [{"input_ids": torch.tensor([ids[:part]])} for part in (LENGTH, 12, 24, 48)]
    begun = time.perf_counter()
    found = mh.inspect(model, batches)
    say("counted; measuring for the page")
    about = About("12 x 12 heads, random", "built-in sample text")
    made = document(found, model, of_batches(batches, model), about=about, tokenizer=tokenizer)
    write_report(made, path)
    return len(found), time.perf_counter() - begun


def opening(path: Path, heads: int, repeats: int) -> dict[str, list[float]]:
    """Milliseconds until a person sees each view, from the longest example on."""
    from playwright.sync_api import sync_playwright

    found: dict[str, list[float]] = {view: [] for view in SHOWN}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        for _ in range(repeats + 1):
            for view, shown in SHOWN.items():
                page = browser.new_page(viewport={"width": 1280, "height": 900})
                page.goto(f"{path.as_uri()}#{view}/0.1", wait_until="commit")
                found[view].append(float(page.evaluate(painted(shown.format(heads=heads)))))
                page.close()
        browser.close()
    return {view: times[1:] for view, times in found.items()}
