"""The moving picture of the live page in the README: a text is typed, heads are silenced, answers change.

    python tools/moving_picture.py [--out docs/pictures/live.webp]

The page is served as `manyheads serve` serves it, and filmed in Chromium, one frame after each act.
"""

from __future__ import annotations

import argparse
import io
import shutil
from pathlib import Path
from typing import Any

from PIL import Image
from screenshots import served

TEXT = "The cat sat on the mat because it was tired."
SILENCED = ("0.2", "1.1", "2.7", "4.4", "5.9")  # heads, one click each
VIEWPORT = {"width": 1100, "height": 760}
TYPED_AT_ONCE = 3  # characters in a frame
SHORT, LONG = 120, 1400  # milliseconds that a frame is shown


def film(page: Any) -> list[tuple[Image.Image, int]]:
    """Frames with the milliseconds that each is shown."""
    frames: list[tuple[Image.Image, int]] = []

    def frame(milliseconds: int) -> None:
        frames.append((Image.open(io.BytesIO(page.screenshot())).convert("RGB"), milliseconds))

    page.wait_for_selector("[data-part=spare]", state="hidden", timeout=600_000)
    page.fill("textarea", "")
    for end in range(TYPED_AT_ONCE, len(TEXT), TYPED_AT_ONCE):
        page.fill("textarea", TEXT[:end])
        frame(SHORT)
    with page.expect_response("**/api/attend"):
        page.fill("textarea", TEXT)
    page.wait_for_selector(".answers:not(.stale)")
    page.wait_for_timeout(500)
    frame(LONG)
    for head in SILENCED:
        target = f".heads-live [data-head='{head}']"
        page.hover(target)
        page.wait_for_timeout(400)
        frame(LONG // 2)
        page.click(target)
        page.wait_for_selector(".answers:not(.stale)")
        page.wait_for_timeout(600)
        frame(LONG)
    frames[-1] = (frames[-1][0], 2 * LONG)
    return frames


def main() -> None:
    parser = argparse.ArgumentParser(description="Film the live page for the README.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs/pictures/live.webp")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("there is no Chromium here (Debian: apt-get install chromium)")
    with served() as address, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=VIEWPORT, locale="en", color_scheme="light")
        page.goto(f"{address}#live/")
        frames = film(page)
        browser.close()
    first, *rest = [picture for picture, _ in frames]
    shown = [milliseconds for _, milliseconds in frames]
    first.save(options.out, save_all=True, append_images=rest, duration=shown, loop=0, quality=70, method=4)
    print(f"{options.out}: {len(frames)} frames, {options.out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
