"""The rooms of the house are those on the map, tests stand where what they test stands, and the walks through
the code in docs/architecture.md are short and lead past what exists.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE, TESTS = ROOT / "src" / "manyheads", ROOT / "tests"
# Tests of what is not in src/, and the modules that tests import.
ELSEWHERE = {"bench", "web", "zoo", "helpers"}
OF_ALL = {
    "test_docs.py",
    "test_notebooks.py",
    "test_site.py",
    "test_wheel.py",
    "test_house.py",
    "test_names.py",
}
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


# Tests that compare with transformers itself, have odd configs on purpose, or write a module as a user does.
ODD_CONFIGS = {
    "cli/test_importance.py",
    "helpers/models.py",
    "models/test_transformers_loading.py",
    "nn/test_transformers_parity.py",
    "surgery/test_cut_numbers.py",
    "view/test_inspect.py",
    "web/test_pictures.py",
}


def test_common_configs_are_built_in_one_place():
    """tests/helpers/models.py has ``bert_config(**changes)`` and the like: small, and the same for all."""
    built = re.compile(r"\b(Bert|GPT2|Llama|T5|ViT)Config\(")
    files = {path.relative_to(TESTS).as_posix(): path for path in TESTS.rglob("*.py")}
    found = {name for name, path in files.items() if built.search(path.read_text(encoding="utf-8"))}
    assert found <= ODD_CONFIGS


OURS = re.compile(r"(from|import) (manyheads\b|\.)")


def inside_functions(source: str) -> set[str]:
    """What the functions of a file import from the package."""
    nodes = ast.walk(ast.parse(source))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    parts = (part for node in functions for part in ast.walk(node))
    lines = {ast.unparse(part) for part in parts if isinstance(part, ast.Import | ast.ImportFrom)}
    return {line for line in lines if OURS.match(line)}


def test_no_function_imports_from_the_house():
    """A cycle would hide there. What is heavy is reached by a lazy name (common/lazy_names.py)."""
    files = sorted(SOURCE.rglob("*.py"))
    assert not {str(path): lines for path in files if (lines := inside_functions(path.read_text("utf-8")))}


def test_an_import_inside_a_function_is_seen():
    source = """
import manyheads
class Verb:
    def run(self):
        import torch
        if self:
            from manyheads.nn import mask
"""
    assert inside_functions(source) == {"from manyheads.nn import mask"}


# What there is one of, as it would look in a file, and the files that may have it.
ONE_OF_EACH = {
    "rows of a CSV or TSV file": (r"csv\.reader\(", {"data/readers/table.py", "heads/table_files.py"}),
    "a batch on a device": (r"lambda (\w+): \1\.to\(device\)", {"common/devices.py"}),
    "the device of a model": (r"next\((iter\()?\w*\.?(model|module)\.parameters\(\)", set()),
    "the positions of a config": (
        r'"max_position_embeddings"',
        {"models/text_config.py", "models/gguf_export.py"},
    ),
    "the part of a config for text": (
        r"\.get_text_config\(",
        {"models/text_config.py", "models/transformers_config.py"},
    ),
    "files that are whole or absent": (r"os\.(replace|fsync)\(", {"common/whole_files.py"}),
    "Ctrl-C": (r"signal\.signal\(", {"common/interrupts.py", "cli/__init__.py", "__main__.py"}),
    "the first line of an error": (r"str\(e(rror)?\)\.(split|partition)", {"common/errors.py"}),
}


@pytest.mark.parametrize("what", ONE_OF_EACH)
def test_there_is_one_of_each(what):
    """A second one would soon differ: import the first."""
    pattern, homes = ONE_OF_EACH[what]
    files = {path.relative_to(SOURCE).as_posix(): path for path in SOURCE.rglob("*.py")}
    found = {name for name, path in files.items() if re.search(pattern, path.read_text(encoding="utf-8"))}
    assert found == homes


def test_any_is_rare():
    """It was 1,066 times in src, and is to stay below half of that: common/types.py has names for most."""
    files = (path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    assert sum(len(re.findall(r"\bAny\b", text)) for text in files) < 533


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
# `heads/watch.py: watch, Watch.table`: a file, from src/manyheads or the root, and names defined in it.
REFERENCE = re.compile(r"`([\w./-]+\.(?:py|ts|md|toml))(?:: ([\w., ]+))?`")
REFERENCES = sorted({(path, names) for path, names in REFERENCE.findall(ARCHITECTURE)})
# Each walk, and the number of files that it must stay under.
WALKS = {"inspect": 18, "cut": 18, "train": 22}


def located(path: str) -> Path:
    """A file that architecture.md names."""
    return SOURCE / path if (SOURCE / path).exists() else ROOT / path


def defined(path: Path) -> set[str]:
    """The names that a file defines: functions, classes and values of its top level, and methods."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return set(re.findall(r"(?:function|const|interface|type|class) (\w+)", text))
    names = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def imported(path: Path) -> set[Path]:
    """The files of ours that a file imports, or names: ``package.module:attribute``, ``mh.heads.watch``."""
    text = path.read_text(encoding="utf-8")
    modules = set(re.findall(r'"(manyheads[\w.]+):\w+"', text))
    names = {"mh": "manyheads"}
    nodes = list(ast.walk(ast.parse(text)))
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("manyheads"):
            modules.add(node.module)
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            name, _, rest = ast.unparse(node).partition(".")
            modules |= {f"{names[name]}.{rest}"} if name in names else set()
    modules |= set(names.values())
    files = {ROOT / "src" / name.replace(".", "/") for name in modules}
    return {path.with_suffix(".py") for path in files} | {path / "__init__.py" for path in files}


def walk(name: str) -> list[Path]:
    """The files of a walk, in order: every reference in its table."""
    section = ARCHITECTURE.split(f"## Walk: {name}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    return [located(path) for row in rows for path, _ in REFERENCE.findall(row)]


@pytest.mark.parametrize(("path", "names"), REFERENCES, ids=lambda value: value or "file")
def test_what_the_architecture_names_exists(path, names):
    assert located(path).is_file()
    assert not {name.strip() for name in names.split(",") if name} - defined(located(path))


@pytest.mark.parametrize("name", WALKS)
def test_a_walk_is_short_and_does_not_turn_back(name):
    files = walk(name)
    assert 5 < len(files) < WALKS[name]
    assert len(set(files)) == len(files)


@pytest.mark.parametrize("name", WALKS)
def test_each_file_of_a_walk_is_reached_from_one_before_it(name):
    files = walk(name)
    for number, path in enumerate(files[1:], 1):
        assert any(path in imported(earlier) for earlier in files[:number]), path


def test_the_map_of_the_architecture_has_every_room_and_no_other():
    rooms = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert set(re.findall(r"^\| \*\*(\w+)\*\*", ARCHITECTURE, re.M)) == rooms
