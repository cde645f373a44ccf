"""Public names: they resolve on a fresh import, and the lists of them in manyheads/__init__.py agree."""

import ast
import subprocess
import sys
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import pytest

import manyheads as mh


def lazy_imports(module):
    """What a module imports for type checkers only: names with the modules they come from."""
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    guards = [
        node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    imports = [node for guard in guards for node in guard.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname: node.module for node in imports for alias in node.names if alias.asname}


def test_type_checkers_see_the_names_that_are_there():
    rooms = dict.fromkeys(mh._ROOMS, "manyheads")
    assert lazy_imports(mh) == mh._HOMES | rooms
    assert set(mh.__all__) == {"__version__", "tasks", *mh._HOMES, *rooms}


@pytest.mark.parametrize("name", sorted(mh.__all__))
def test_every_public_name_resolves(name):
    assert getattr(mh, name) is not None


def test_the_functions_of_tasks_resolve():
    names = lazy_imports(mh.tasks)
    assert {"build", "train_task"} <= set(names)
    for name, module in names.items():
        assert getattr(mh.tasks, name) is getattr(import_module(module), name)


# Packages whose modules are reached as their attributes, and load then.
LAZY = [
    "data",
    "heads",
    "heads.effects",
    "heads.importance",
    "surgery",
    "training",
    "view",
    "view.live",
    "view.terminal",
]


@pytest.mark.parametrize("name", LAZY)
def test_type_checkers_see_modules_that_load_on_first_use(name):
    package = import_module(f"manyheads.{name}")
    modules = {key: home for key, home in lazy_imports(package).items() if home == package.__name__}
    assert modules
    for module in modules:
        assert getattr(package, module) is import_module(f"manyheads.{name}.{module}")


def test_a_name_that_is_not_there():
    for module in (mh, mh.nn, mh.heads, mh.surgery, mh.tasks):
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            _ = module.nothing


FRESH = """
import sys
import manyheads as mh
assert "torch" not in sys.modules, "import manyheads loads torch"
assert sorted(mh.tasks.TASKS)[0] == "dna"
assert "torch" not in sys.modules, "listing the tasks loads torch"
from manyheads import data, training
from manyheads.view import live, terminal
assert "torch" not in sys.modules, "a package loads torch, not only its modules"
data.corpus.choose, training.sweep.sweep, terminal.prune.print_pruned, mh.tasks.train_task, mh.view.study
mh.surgery.cut, mh.heads.roles, mh.nn.attention, mh.mask.causal, mh.tasks.find("language")
"""


def test_rooms_resolve_on_a_fresh_import_which_loads_no_torch():
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


DOCUMENTED = [
    *(name for name in mh._HOMES if name != "mask"),
    *(f"mask.{name}" for name in ("Mask", "alibi", "causal", "chunk", "padding", "window")),
    *(f"tasks.{name}" for name in ("available", "find", "train_task")),
]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_public_docstrings_have_an_example_and_point_further(name):
    text = attrgetter(name)(mh).__doc__
    for section in ("Examples\n", "See Also\n", "References\n"):
        assert section in text, section
    assert ">>> " in text
