"""The page that the package carries is the one that web/ describes."""

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

WEB = Path(__file__).parents[2] / "web"
STATIC = Path(__file__).parents[2] / "src" / "manyheads" / "view" / "static"
BUILT = ("page.js", "page.css", "widget.js")


def sources() -> str:
    """sha256 over (path NUL bytes NUL) of every source, as web/build.mjs reckons it."""
    files = [path for path in (WEB / "src").rglob("*") if path.is_file()]
    files += [WEB / name for name in ("build.mjs", "package.json", "package-lock.json", "tsconfig.json")]
    digest = hashlib.sha256()
    for name, path in sorted((path.relative_to(WEB).as_posix(), path) for path in files):
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@pytest.mark.parametrize("name", BUILT)
def test_built_files_name_the_sources_there_are(name: str) -> None:
    first = (STATIC / name).read_text(encoding="utf-8").split("\n", 1)[0]
    named = re.fullmatch(r"/\* manyheads page, sources sha256 ([0-9a-f]{64}) \*/", first)
    assert named, first
    assert named[1] == sources(), (
        "web/ changed after the page was built: run `make web` and commit what it wrote"
    )


def test_a_fresh_build_gives_the_same_bytes(tmp_path: Path) -> None:
    npm = shutil.which("npm")
    if npm is None or not (WEB / "node_modules" / ".package-lock.json").is_file():
        pytest.skip("npm, or web/node_modules (make web), is not here")
    done = subprocess.run(
        [npm, "run", "build", "--", "--out", str(tmp_path)], cwd=WEB, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(BUILT)
    for name in BUILT:
        assert (tmp_path / name).read_bytes() == (STATIC / name).read_bytes(), (
            f"{name} is not what web/ gives"
        )


def test_the_lock_file_names_no_host() -> None:
    assert '"resolved"' not in (WEB / "package-lock.json").read_text(encoding="utf-8")


def test_built_files_are_small_and_self_contained() -> None:
    for name in BUILT:
        text = (STATIC / name).read_text(encoding="utf-8")
        assert len(text) < 400_000
        assert "</script" not in text
        # the only addresses are the names of XML's own languages
        assert set(re.findall(r"https?://[\w./-]+", text)) <= {"http://www.w3.org/2000/svg"}
