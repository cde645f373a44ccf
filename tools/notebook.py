"""The page in a real JupyterLab: what `watch` saw and a table show themselves; Python knows what is picked.

    python tools/notebook.py [--jupyter jupyter] [--picture FILE]

Needs JupyterLab with jupyterlab_widgets and anywidget beside it (its command may belong to another
environment: the kernel is this Python), ipykernel, Playwright and Chromium. It takes half a minute, so it is
no part of the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CELLS = (
    """
import torch
import manyheads as mh

torch.manual_seed(0)
model = mh.Decoder(32, heads=4, layers=3, vocabulary=97).eval()
with torch.no_grad(), mh.watch(model) as seen:
    model(torch.randint(97, (2, 13)))
seen
""",
    "seen.table",
    "page = mh.widget(seen)\npage",
)
HEADS = 12
# what the kernel prints when it runs some code
ASK = """async (code) => {
  const { kernel } = window.jupyterapp.shell.currentWidget.sessionContext.session;
  const asked = kernel.requestExecute({ code });
  let text = "";
  asked.onIOPub = (message) => { text += message.content.text ?? message.content.evalue ?? ""; };
  await asked.done;
  return text.trim();
}"""


def notebook(folder: Path) -> Path:
    """A notebook of these cells, whose kernel is this Python."""
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel = folder / "data" / "kernels" / "this"
    kernel.mkdir(parents=True)
    (kernel / "kernel.json").write_text(
        json.dumps({"argv": command, "display_name": "this Python", "language": "python"})
    )
    empty: dict[str, Any] = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    cells = [empty | {"id": str(i), "source": text.strip()} for i, text in enumerate(CELLS)]
    path = folder / "heads.ipynb"
    spec = {"name": "this", "display_name": "this Python", "language": "python"}
    path.write_text(
        json.dumps({"cells": cells, "metadata": {"kernelspec": spec}, "nbformat": 4, "nbformat_minor": 5})
    )
    return path


@contextmanager
def lab(jupyter: str, folder: Path) -> Iterator[str]:
    """JupyterLab on a folder; its address."""
    options = ["--no-browser", "--allow-root", "--port=0", "--expose-app-in-browser"]
    environment = {"JUPYTER_PATH": str(folder / "data"), "JUPYTER_CONFIG_DIR": str(folder / "config")}
    process = subprocess.Popen(
        [jupyter, "lab", *options],
        cwd=folder,
        env=os.environ | environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"(http://(?:localhost|127\.0\.0\.1):\d+/lab)(\?token=\w+)", line):
                yield f"{found[1]}/tree/heads.ipynb{found[2]}"
                return
        raise RuntimeError("JupyterLab did not say where it listens")
    finally:
        process.terminate()
        process.wait()


def look(page: Any, address: str) -> dict[str, Any]:
    """Run the notebook, click and ask; what was found."""
    page.goto(address)
    page.set_default_timeout(120_000)
    page.wait_for_function("window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel")
    page.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells')")
    page.wait_for_function("document.querySelectorAll('.jp-OutputArea .manyheads').length === 3")
    shown = page.locator(".jp-OutputArea .manyheads")
    heads = [shown.nth(i).locator(".heads [data-index], [data-index]").count() for i in range(3)]
    before = page.evaluate(ASK, "print(page.selected)")
    last = shown.nth(2)
    last.locator("[data-head='1.2']").click()
    last.locator("[data-head='2.0']").click(modifiers=["Control"])
    page.wait_for_timeout(500)
    after = page.evaluate(ASK, "print(page.selected)")
    page.evaluate(ASK, "page.picked = [3]")
    page.wait_for_timeout(500)
    picked = last.locator("[data-index][aria-selected=true]")
    return {
        "heads shown": heads,
        "picked first": before,
        "after clicks": after,
        "shown when Python picks": picked.evaluate_all("all => all.map((one) => one.dataset.head)"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Try the page in a real JupyterLab.")
    parser.add_argument("--jupyter", default="jupyter", help="the command of an environment with JupyterLab")
    parser.add_argument("--picture", type=Path, help="where to write a picture of it")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("there is no Chromium here (Debian: apt-get install chromium)")
    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        folder = Path(name)
        notebook(folder)
        with lab(options.jupyter, folder) as address:
            browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1400, "height": 1000})
            wrong: list[str] = []
            page.on("pageerror", lambda error: wrong.append(str(error)))
            found = look(page, address)
            if options.picture is not None:
                options.picture.write_bytes(page.screenshot())
            browser.close()
    wanted = {
        "heads shown": [HEADS] * 3,
        "picked first": "{}",
        "after clicks": "{'blocks.1.attention': [2], 'blocks.2.attention': [0]}",
        "shown when Python picks": ["0.3"],
    }
    for what, value in found.items():
        print(f"{what}: {value}{'' if value == wanted[what] else f'; expected {wanted[what]}'}")
    if found != wanted or wrong:
        raise SystemExit(f"something is wrong{': ' + wrong[0] if wrong else ''}")


if __name__ == "__main__":
    main()
