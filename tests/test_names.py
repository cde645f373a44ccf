"""Names say what a thing is: no file of these rooms uses a name that says only how a thing came to be."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

BANNED = {"found", "told", "made", "known", "said", "place", "own", "mine", "given"}
# Terms of the field, idioms, and names that a library prescribes.
ALLOWED = ("in_place", "given_up", "connection_made")
SOURCE = Path(__file__).parents[1] / "src" / "manyheads"
FILES = sorted(SOURCE.rglob("*.py"))


def names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name of a variable, parameter, function, class, attribute, keyword or import, with its line.

    The fields of a TypedDict are left out: they are keys of a JSON file or of the page's document.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "TypedDict" for base in node.bases):
            yield node.name, node.lineno
            continue
        if isinstance(node, ast.Name):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg | ast.keyword):
            yield node.arg or "", node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.alias):
            yield node.asname or node.name, node.lineno
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
            yield node.name or "", node.lineno
        yield from names(node)


def is_banned(name: str) -> bool:
    """Whether a name is one of those, or has one as a part: ``own_output``, but not ``drops_in_place``."""
    for allowed in ALLOWED:
        name = name.replace(allowed, "")
    return not BANNED.isdisjoint(name.lower().split("_"))


def banned(source: str) -> list[str]:
    """The banned names of a file, each with its line."""
    return [f"line {line}: {name}" for name, line in names(ast.parse(source)) if is_banned(name)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_no_banned_name(path: Path) -> None:
    assert banned(path.read_text(encoding="utf-8")) == []


def test_a_banned_name_is_seen_wherever_it_stands() -> None:
    source = """
def made(known, *, told=1):
    found: int = given.said(own=2)
    place = [mine for mine in known]
class Answer(TypedDict):
    place: int
"""
    seen = {line.rpartition(" ")[2] for line in banned(source)}
    assert seen == BANNED
    assert not any(line.startswith("line 6") for line in banned(source))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("own_output", True), ("_KNOWN", True), ("_drops_in_place", False), ("ownership", False)],
)
def test_parts_of_a_name_count(name: str, expected: bool) -> None:
    assert is_banned(name) == expected
