"""Which extra brings a package: as pyproject.toml says; a missing one is named with its command."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from manyheads.common.extras import EXTRAS, missing_extra
from manyheads.common.lazy_names import attributes

ROOT = Path(__file__).parents[2]
IMPORTED_AS = {"pillow": "PIL"}


def test_the_extras_are_those_of_the_project():
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("not a checkout")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, packages in EXTRAS.items():
        names = [re.split(r"[\[>=<]", each)[0] for each in declared[extra]]
        imported = {IMPORTED_AS.get(name, name) for name in names}
        assert set(packages) <= imported, extra
        assert imported - set(packages) <= {package for each in EXTRAS.values() for package in each}, extra


def test_a_name_that_needs_a_missing_package(monkeypatch, tmp_path):
    (tmp_path / "needs_it.py").write_text("import accelerate.nothing_like_this\nname = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"needs accelerate, .*: pip install 'manyheads\[train\]'"):
        attributes("package", {"name": "needs_it"})("name")


def test_other_errors_stay_as_they_are():
    assert missing_extra(ImportError("cannot import name 'x' from 'accelerate'", name="accelerate")) is None
    assert missing_extra(ModuleNotFoundError("No module named 'my_model'", name="my_model")) is None


@pytest.mark.parametrize(
    ("verb", "package", "extra"), [("train", "accelerate", "train"), ("sweep", "optuna", "sweep")]
)
def test_the_command_says_what_to_install(verb, package, extra, tmp_path):
    arguments = [verb, "language", "--out", str(tmp_path / "out")]
    hide = f"import sys; sys.modules[{package!r}] = None; sys.argv[1:] = {arguments!r}\n"
    run = f"{hide}from manyheads.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True)
    assert done.returncode == 2
    assert f"pip install 'manyheads[{extra}]'" in done.stderr
    assert package in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
