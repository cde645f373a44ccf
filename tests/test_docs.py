"""The snippets of README and docs run, say what they print, and cover every public name.

Python blocks of one page share a namespace and run in order. An expression followed by ``# -> text`` must
have exactly that repr.
"""

import ast
import re
from pathlib import Path

import pytest
import torch

import manyheads as mh

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("README*.md"), *ROOT.glob("docs/*.md"), ROOT / "CONTRIBUTING.md"])
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
SAYS = "  # -> "


def blocks(page):
    """The Python blocks of a page, each padded so that its line numbers are the page's."""
    text = page.read_text(encoding="utf-8")
    return ["\n" * text.count("\n", 0, match.start(1)) + match[1] for match in FENCE.finditer(text)]


def run(source, namespace, name):
    """Run a block statement by statement and hold it to what it says."""
    lines = source.split("\n")
    checked = 0
    for node in ast.parse(source, name).body:
        code = lines[node.end_lineno - 1]
        if isinstance(node, ast.Expr) and SAYS in code:
            value = eval(compile(ast.Expression(node.value), name, "eval"), namespace)
            assert repr(value) == code.split(SAYS)[1], f"{name}:{node.lineno}"
            checked += 1
        else:
            exec(compile(ast.Module([node], []), name, "exec"), namespace)
    assert checked == source.count(SAYS), f"{name}: '# ->' stands where nothing is checked"


@pytest.mark.filterwarnings(
    "ignore:`torch.jit:DeprecationWarning"
)  # torch's compiler, when it is first imported
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_snippets_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace = {}
    for source in blocks(page):
        run(source, namespace, page.name)


def test_a_snippet_that_lies_is_found():
    with pytest.raises(AssertionError, match="page:1"):
        run("1 + 1  # -> 3", {}, "page")
    with pytest.raises(AssertionError, match="nothing is checked"):
        run("x = 1 + 1  # -> 2", {}, "page")


def used(source):
    """The names that a block takes from ``mh``."""
    attributes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute))
    return {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "mh"}


def test_every_public_name_is_shown_at_work():
    shown = {
        name
        for page in PAGES
        if page.parent.name == "docs"
        for source in blocks(page)
        for name in used(source)
    }
    assert not set(mh.__all__) - shown - {"__version__"}


def test_every_mask_is_shown_at_work():
    text = "".join(source for page in PAGES for source in blocks(page))
    made = [
        name
        for name, value in vars(mh.mask).items()
        if getattr(value, "__annotations__", {}).get("return") == "Mask"
    ]
    assert len(made) > 4
    assert not [name for name in made if not name.startswith(("_", "as_")) and f"mask.{name}(" not in text]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    assert not [link for link in links if not (page.parent / link).exists()]


def test_both_readmes_show_the_same_code():
    english, chinese = (
        ["".join(ast.unparse(ast.parse(source))) for source in blocks(ROOT / name)]
        for name in ("README.md", "README.zh-CN.md")
    )
    assert english == chinese
