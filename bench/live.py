"""How long a person waits on the live page, at the server and in a browser, for 64 tokens on MiniLM."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.harness import say, table, targets

TARGET = 300.0  # milliseconds
TOKENS = 64
HEADS = 72
CHROMIUM = Path("/usr/bin/chromium")


def painted(when: str) -> str:
    """A script for the page: when something holds and is painted, in milliseconds since it opened."""
    return f"""() => new Promise((done) => {{
      const look = () => {{
        if ({when}) requestAnimationFrame(() => setTimeout(() => done(performance.now())));
        else requestAnimationFrame(look);
      }};
      look();
    }})"""


def run(quick: bool) -> str:
    """Serve MiniLM, ask it, and open it."""
    repeats = 3 if quick else 15
    with served() as (address, token, _):
        say("waiting until everything is measured that is measured in spare time")
        http = at_the_server(address, token, repeats)
        say("in the browser")
        browser = in_the_browser(address, repeats) if CHROMIUM.exists() else {}
    rows = [
        [what, where, f"{statistics.median(times):.0f}", f"{max(times):.0f}", len(times)]
        for where, found in (("server", http), ("Chromium", browser))
        for what, times in found.items()
    ]
    goals = [
        (f"{what}, {where}: median, ms", statistics.median(times), "<=", TARGET)
        for where, found in (("server", http), ("Chromium", browser))
        for what, times in found.items()
        if what != "quality"
    ]
    missing = "" if browser else f"\n\nThere is no {CHROMIUM}: nothing was measured in a browser.\n"
    header = ["a person waits for", "measured at", "median, ms", "slowest, ms", "times"]
    about = (
        f"A text of {TOKENS} tokens that was not asked about before, all {HEADS} maps exact; one server, one "
        "browser, everything else finished. In the browser: from the key or the click to the frame after it "
        "is drawn.\n\n"
    )
    return f"{about}{table(header, rows)}{missing}\n\n{targets(*goals)}"


@contextmanager
def served() -> Iterator[tuple[str, str, int]]:
    """A server of MiniLM in a process of its own; its address, its token and the process's number."""
    import httpx

    command = [sys.executable, "-m", "manyheads", "serve", "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["address"]
        page = httpx.get(address).text
        found = re.search(r'name="manyheads-live" content="([\w-]+)"', page)
        assert found is not None
        yield address, found[1], process.pid
    finally:
        process.terminate()
        process.wait()


def at_the_server(address: str, token: str, repeats: int) -> dict[str, list[float]]:
    """Milliseconds from a request to its whole answer."""
    import httpx

    with httpx.Client(base_url=address, headers={"x-manyheads-token": token}, timeout=600) as client:
        client.get("/api/document")
        while not client.get("/api/progress").json()["finished"]:
            time.sleep(1.0)

        def ask(path: str, body: dict[str, Any]) -> float:
            before = time.perf_counter()
            answer = client.post(path, json=body)
            spent = 1e3 * (time.perf_counter() - before)
            answer.raise_for_status()
            if path == "/api/attend":
                assert len(answer.json()["example"]["tokens"]["self"]) == TOKENS
            return spent

        return {
            "attention": several(lambda i: ask("/api/attend", {"text": sentence(i)}), repeats),
            "silencing": several(
                lambda i: ask("/api/silence", {"text": sentence(0), "heads": heads(i)}), repeats
            ),
            "quality": several(lambda i: ask("/api/quality", {"heads": heads(i)}), repeats),
        }


def in_the_browser(address: str, repeats: int) -> dict[str, list[float]]:
    """Milliseconds until a person sees it."""
    from playwright.sync_api import sync_playwright

    cells = f"document.querySelectorAll('.heads-live [data-index]').length >= {HEADS}"
    count = "Number(document.querySelector('.heads-live canvas')?.dataset.painted ?? 0)"
    all_maps = f"{cells} && {count} > (window.before ?? 0)"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})

        def opened(_: int) -> float:
            page.goto(address, wait_until="commit")
            return float(page.evaluate(painted(all_maps)))

        opening = several(opened, repeats)

        def typed(i: int) -> float:
            text = sentence(100 + i)
            begun = page.evaluate(
                """(text) => {
                  const area = document.querySelector("textarea");
                  window.before = Number(document.querySelector(".heads-live canvas").dataset.painted);
                  area.value = text;
                  const begun = performance.now();
                  area.dispatchEvent(new Event("input", { bubbles: true }));
                  return begun;
                }""",
                text,
            )
            done = page.evaluate(painted(all_maps))
            page.wait_for_timeout(400)
            return float(done) - float(begun)

        typing = several(typed, repeats)

        def clicked(i: int) -> float:
            begun = page.evaluate(
                """(index) => {
                  const said = document.querySelector('[data-which="after"]');
                  if (said) said.dataset.old = "1";
                  const begun = performance.now();
                  const cell = document.querySelector(`.heads-live [data-index="${index}"]`);
                  cell.dispatchEvent(new MouseEvent("click", { bubbles: true }));
                  return begun;
                }""",
                i,
            )
            new = """document.querySelector('[data-which="after"]:not([data-old])')"""
            done = page.evaluate(painted(f"{new} && !document.querySelector('.answers.stale')"))
            page.wait_for_timeout(400)
            return float(done) - float(begun)

        clicking = several(clicked, repeats)
        browser.close()
    return {"opening the page, with attention": opening, "attention": typing, "silencing": clicking}


def several(once: Callable[[int], float], repeats: int) -> list[float]:
    """What it gives each time, after two times that do not count."""
    return [once(i) for i in range(repeats + 2)][2:]


def sentence(number: int) -> str:
    """A text of 64 tokens for MiniLM, with its two special ones; another one for each number."""
    words = ["cat", "sees", "the", "dog", "and", "runs"] * 10
    digits = [str(number // 100 % 10), str(number // 10 % 10), str(number % 10)]
    return " ".join([*digits, *words][: TOKENS - 2])


def heads(number: int) -> dict[str, list[int]]:
    """Some heads; others for each number."""
    return {
        f"encoder.layer.{layer}.attention.self": [(number + layer) % 12] for layer in range(number % 6 + 1)
    }
