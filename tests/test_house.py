"""The rooms of the house are those on the map, and tests stand where what they test stands."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE, TESTS = ROOT / "src" / "manyheads", ROOT / "tests"
# Tests of what is not in src/, and the modules that tests import.
ELSEWHERE = {"bench", "web", "zoo", "helpers"}
OF_ALL = {"test_docs.py", "test_wheel.py", "test_house.py", "test_names.py"}
FILES = sorted(path for path in TESTS.rglob("test_*.py") if path.relative_to(TESTS).parts[0] not in ELSEWHERE)


def modules(folder: Path) -> set[str]:
    """The modules and packages in a folder of the package."""
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    return packages | {path.stem for path in folder.glob("*.py")}


def test_the_map_has_every_room_and_no_other():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^  (\w+)/ ", text, re.M)) == {
        path.parent.name for path in SOURCE.glob("*/__init__.py")
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(TESTS).as_posix())
def test_a_test_is_named_after_a_module_beside_which_it_would_stand(path):
    """tests/ROOM/test_MODULE.py or test_MODULE_ASPECT.py; test_all_ASPECT.py is about a whole room."""
    if path.parent == TESTS and path.name in OF_ALL:
        return
    name = path.stem.removeprefix("test_")
    known = modules(SOURCE / path.parent.relative_to(TESTS)) | {"all"}
    assert any(name == module or name.startswith(f"{module}_") for module in known)


@pytest.mark.parametrize(
    "path", sorted(TESTS.rglob("*.py")), ids=lambda path: path.relative_to(TESTS).as_posix()
)
def test_no_test_imports_another(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    names = [f"{node.module}.{alias.name}" for node in imports for alias in node.names]
    assert not [name for name in names if re.match(r"tests\..*\btest_", name)]
