"""Pictures of every view of the page for docs/pictures, from real models, taken in Chromium.

    python tools/screenshots.py [--out docs/pictures] [--work FOLDER]

Three models are looked at: the embedded MiniLM, a small picture model that learns scikit-learn's digits here,
and the translation that `manyheads train translation` learns in two minutes; MiniLM and the translation also
live. With --work, their reports are kept there, and the next run only takes the pictures again, with the page
as it is then.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import manyheads as mh
from manyheads.view.document import About, document, of_batches
from manyheads.view.report import report_html, write_report

SENTENCES = """\
four hundred and twenty-seven thousand, six hundred and thirty-five
Wednesday, March 28, 2007
ninety-one thousand, three hundred and sixty-four
Saturday, October 14, 1995
nineteen sixty-eight
7:45:12 PM
"""
RUN = "english-german"
# heads that are silenced in the live translation: without them it cannot see where it is
CROSS = [f"decoder.blocks.{n}.cross_attention:{head}" for n, head in ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2))]
WIDTH = 1240
SMALL_ENOUGH = 300_000  # bytes of a picture


class Shot(NamedTuple):
    """One picture: its name, whose page, which view, which head, what is typed and clicked before it is
    taken, and what is waited for.
    """

    name: str
    model: str
    view: str
    head: str = ""
    text: str = ""
    clicks: tuple[str, ...] = ()
    until: str = ""


SHOTS = (
    Shot("heads", "minilm", "heads", "0.2"),
    Shot("glance", "minilm", "glance", "0.2"),
    Shot("head", "minilm", "head", "0.2"),
    Shot("all", "minilm", "all", "0.2"),
    Shot("pipeline", "minilm", "pipeline"),
    Shot("picture", "digits", "picture", "3.4"),
    Shot("alignment", "translation", "alignment", clicks=("[data-target='2']",)),
    Shot(
        "live",
        "minilm, live",
        "live",
        text="The old ship left the harbour at dawn, and nobody on the quay waved it goodbye.",
        clicks=tuple(f".heads-live [data-head='{head}']" for head in ("0.2", "2.7", "4.4", "5.9")),
        until="[data-part=quality]:not([data-kept='1'], [data-kept=''])",
    ),
    Shot(
        "live-translation",
        "translation, live",
        "live",
        text="Wednesday, March 28, 2007",
        clicks=tuple(f".heads-live [data-head='{head}']" for head in CROSS),
        until="[data-which=after]",
    ),
)
# in the dark, a few are enough to see that nothing is lost
DARK = ("heads", "pipeline", "picture", "live")


class Pictures(nn.Module):
    """A vision transformer as small as can be: every pixel is a patch, and a class token reads them.

    >>> Pictures()(torch.rand(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """

    def __init__(self, side: int = 8, d_model: int = 48, heads: int = 6, layers: int = 4) -> None:
        super().__init__()
        self.patch = nn.Linear(1, d_model)
        self.first = nn.Parameter(torch.zeros(1, 1, d_model))
        self.places = nn.Parameter(0.1 * torch.randn(1, side * side + 1, d_model))
        self.encoder = mh.Encoder(d_model, heads=heads, layers=layers, positions="none", dropout=0.0)
        self.answer = nn.Linear(d_model, 10)

    def forward(self, pictures: Tensor) -> Tensor:
        """Pictures (batch, 1, side, side) between 0 and 1, to logits (batch, 10)."""
        patches = self.patch(pictures.flatten(1)[..., None])  # (batch, side * side, d_model)
        x = torch.cat([self.first.expand(len(patches), -1, -1), patches], 1) + self.places
        return self.answer(self.encoder(x)[:, 0])


def learned_digits(steps: int = 500) -> tuple[Pictures, Tensor]:
    """The model, and pictures that it did not see in training."""
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    data = load_digits()
    order = torch.randperm(len(data.target))
    pictures = torch.tensor(data.images, dtype=torch.float32)[order, None] / 16
    labels = torch.tensor(data.target)[order]
    model = Pictures()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    plan = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(steps):
        chosen = torch.randint(1500, (64,))
        loss = nn.functional.cross_entropy(model(pictures[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        plan.step()
    model.eval()
    with torch.no_grad():
        right = (model(pictures[1500:]).argmax(1) == labels[1500:]).float().mean()
    print(f"digits: {right:.1%} of {len(pictures) - 1500} unseen pictures are read right")
    return model, pictures[1500:]


def digits_report(path: Path) -> None:
    """Watch the picture model, and write what it does."""
    model, pictures = learned_digits()
    batches = list(pictures[:256].split(64))
    with torch.no_grad(), mh.watch(model, statistics="full") as seen:
        for batch in batches:
            model(batch)
    about = About("A model that reads digits", "scikit-learn's handwritten digits", 256, "images")
    write_report(document(seen.table, model, of_batches(batches, model), about=about), path)


def reports(work: Path) -> dict[str, Path]:
    """The three reports; those that are there already are shown with the page as it is now."""
    manyheads = [sys.executable, "-m", "manyheads"]
    minilm, digits, translation = (
        work / name / "report.html" for name in ("minilm", "digits", "translation")
    )
    if not minilm.exists():
        subprocess.run([*manyheads, "inspect", "--out", str(minilm.parent)], check=True)
    if not digits.exists():
        digits.parent.mkdir(parents=True, exist_ok=True)
        digits_report(digits)
    if not translation.exists():
        text = "sentences.txt"
        if not (work / RUN).exists():
            subprocess.run([*manyheads, "train", "translation", "--out", RUN], cwd=work, check=True)
        (work / text).write_text(SENTENCES, encoding="utf-8")
        command = [*manyheads, "inspect", RUN, "--text", text, "--out", translation.parent.name]
        subprocess.run(command, cwd=work, check=True)
    found = {"minilm": minilm, "digits": digits, "translation": translation}
    for path in found.values():
        renew(path)
    return found


def renew(path: Path) -> None:
    """Write a report again, from the document that it carries."""
    carried = re.search(r'id="document">([^<]*)</script>', path.read_text(encoding="utf-8"))
    if carried is None:
        raise ValueError(f"{path} carries no document; remove it to make it again")
    path.write_text(report_html(json.loads(gzip.decompress(base64.b64decode(carried[1])))), encoding="utf-8")


@contextmanager
def served(*model: str, folder: Path = Path()) -> Iterator[str]:
    """The live page of a model in a folder: its address."""
    command = [sys.executable, "-m", "manyheads", "serve", *model, "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["address"]
    finally:
        process.terminate()
        process.wait()


def take(browser: Any, address: str, shot: Shot, language: str, theme: str) -> bytes:
    """A PNG of the page; raises if the page complained."""
    page = browser.new_page(viewport={"width": WIDTH, "height": 900}, locale=language, color_scheme=theme)
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(f"{address}#{shot.view}/{shot.head}")
    page.wait_for_selector(f"[data-tab={shot.view}][aria-selected=true]")
    if shot.view == "live":
        page.wait_for_selector("[data-part=spare]", state="hidden", timeout=600_000)
    if shot.text:
        with page.expect_response("**/api/attend"):
            page.fill("textarea", shot.text)
    for place in shot.clicks:
        page.click(place)
        if shot.view == "live":
            page.wait_for_selector(".answers:not(.stale)")
    if shot.until:
        page.wait_for_selector(shot.until)
    page.mouse.move(0, 0)
    page.wait_for_timeout(1500 if shot.view == "live" else 200)
    if shot.view == "live":  # how long it took on a busy day is no part of the picture
        page.eval_on_selector(
            "[data-part=status]", "(one) => (one.textContent = one.textContent.split(' · ')[0])"
        )
    page.evaluate("scrollTo(0, 0)")  # else what stays in view stands in the middle of the picture
    taken: bytes = page.screenshot(full_page=True)
    page.close()
    if wrong:
        raise RuntimeError(f"{shot.name}: the page complained: {wrong}")
    return taken


def smaller(taken: bytes) -> bytes:
    """The same picture in 256 colours or fewer, until it is small enough."""
    from PIL import Image

    picture = Image.open(io.BytesIO(taken)).convert("RGB")
    for colours in (256, 128, 64):
        kept = io.BytesIO()
        picture.quantize(colours, dither=Image.Dither.NONE).save(kept, "PNG", optimize=True)
        if kept.tell() < SMALL_ENOUGH:
            break
    return kept.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description="Take pictures of every view of the page.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "pictures")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of the pictures to take; else all")
    parser.add_argument("--work", type=Path, help="where reports are kept for the next time")
    options = parser.parse_args()
    unknown = set(options.only or ()) - {shot.name for shot in SHOTS}
    if unknown:
        parser.error(f"no picture {', '.join(sorted(unknown))}: expected {', '.join(s.name for s in SHOTS)}")
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("there is no Chromium here (Debian: apt-get install chromium)")
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as driver, ExitStack() as open_pages:
        work = options.work or Path(scratch)
        found = {name: path.as_uri() for name, path in reports(work).items()}
        found["minilm, live"] = open_pages.enter_context(served())
        found["translation, live"] = open_pages.enter_context(served(RUN, folder=work))
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        wanted = [(shot, language, "light") for shot in SHOTS for language in ("en", "zh-CN")]
        wanted += [(shot, "en", "dark") for shot in SHOTS if shot.name in DARK]
        for shot, language, theme in wanted:
            if options.only and shot.name not in options.only:
                continue
            name = f"{shot.name}-{language[:2]}{'-dark' if theme == 'dark' else ''}.png"
            taken = smaller(take(browser, found[shot.model], shot, language, theme))
            (options.out / name).write_bytes(taken)
            print(f"{name}: {len(taken) / 1000:.0f} kB")
        browser.close()


if __name__ == "__main__":
    main()
