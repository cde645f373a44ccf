"""The snippets of README and docs run, say what they print, and cover every public name.

Python blocks of one page share a namespace and run in order. An expression followed by ``# -> text`` must
have exactly that repr.
"""

import ast
import importlib
import re
import tomllib
from pathlib import Path

import pytest
import torch

import manyheads as mh

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("README*.md"), *ROOT.glob("docs/*.md"), ROOT / "CONTRIBUTING.md"])
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
SAYS = "  # -> "
# Pages for users; CONTRIBUTING is for people who change the package.
FOR_USERS = [page for page in PAGES if page.name != "CONTRIBUTING.md"]
# Pages in Chinese, each with the English page whose code and structure it shares.
CHINESE = {page: ROOT / "docs" / page.name for page in sorted((ROOT / "docs" / "zh").glob("*.md"))}
ENGLISH_ONLY = {"architecture.md", "decisions.md"}  # for people who change the package
WITH_CONTENTS = ["CONTRIBUTING.md", "docs/decisions.md", "docs/architecture.md"]
READMES = ["README.md", "README.zh-CN.md"]


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
    "ignore:`torch.jit:DeprecationWarning",  # torch's compiler, when it is first imported
    "ignore:'pin_memory' argument is set:UserWarning",  # transformers' Trainer without a GPU
    "ignore:.isinstance.treespec, LeafSpec:FutureWarning",  # Lightning
    "ignore:The 'train_dataloader' does not have many workers",  # on machines with more cores
)
# The Chinese README has the code of the English one, and says the same of it: another test holds that.
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "README.zh-CN.md"], ids=lambda page: page.name
)
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


@pytest.mark.parametrize("page", FOR_USERS, ids=lambda page: page.name)
def test_a_page_imports_manyheads_as_mh_and_nothing_deeper(page):
    for source in blocks(page):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").partition(".")[0] != "manyheads"
            if isinstance(node, ast.Import):
                ours = [alias for alias in node.names if alias.name.partition(".")[0] == "manyheads"]
                assert all((alias.name, alias.asname) == ("manyheads", "mh") for alias in ours)


def headings(page):
    """The headings of a page with their levels, without what stands in its code blocks."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [(len(marks), title.strip()) for marks, title in re.findall(r"^(#+) (.+)$", text, re.MULTILINE)]


def anchor(title):
    """What GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", [*PAGES, *CHINESE], ids=lambda page: f"{page.parent.name}/{page.name}")
def test_links_lead_somewhere(page):
    links = LINK.findall(page.read_text(encoding="utf-8"))
    for path, section in links:
        if "://" in path:
            continue
        target = page.parent / path if path else page
        assert target.exists(), path
        if section:
            assert section in [anchor(title) for _, title in headings(target)], f"{path}#{section}"


@pytest.mark.parametrize("name", WITH_CONTENTS)
def test_a_table_of_contents_has_every_section_in_order(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    listed = re.findall(r"^- \[(.+)\]\(#(.+)\)$", text, re.MULTILINE)
    sections = [title for level, title in headings(ROOT / name) if level == 2]
    assert listed == [(title, anchor(title)) for title in sections]


def test_benchmarks_that_pages_name_exist():
    main, learn = (importlib.import_module(name) for name in ("bench.__main__", "bench.learn"))
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert set(re.findall(r"bench PART=(\w+)", text)) <= {*main.PARTS, *main.ALSO}
    assert set(re.findall(r"python -m bench\.learn (\w+)", text)) <= set(learn.PARTS)
    for name in re.findall(r"python -m (bench\.\w+)", text):
        assert (ROOT / name.replace(".", "/")).with_suffix(".py").exists(), name


@pytest.mark.parametrize("name", ["docs/getting-started.md", "docs/zh/getting-started.md"])
def test_the_extras_are_listed(name):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (ROOT / name).read_text(encoding="utf-8")
    assert set(re.findall(r"`(\w+)`\s?[(（]", text)) >= set(extras["optional-dependencies"])


def test_both_readmes_show_the_same_code():
    english, chinese = (
        ["".join(ast.unparse(ast.parse(source))) for source in blocks(ROOT / name)] for name in READMES
    )
    assert english == chinese
    english, chinese = (re.findall(f"{SAYS}(.*)", "".join(blocks(ROOT / name))) for name in READMES)
    assert english == chinese


def test_both_readmes_have_the_same_sections_commands_and_numbers():
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in READMES]
    measured = [re.findall(r"^\|.*(?:make bench|bench\.learn).*$", text, re.MULTILINE) for text in texts]
    english, chinese = ([sorted(re.findall(r"\d[\d.,/]*\d|\d", row)) for row in rows] for rows in measured)
    assert english == chinese
    english, chinese = ([level for level, _ in headings(ROOT / name)] for name in READMES)
    assert english == chinese
    english, chinese = (re.findall(r"^(?:manyheads|make) [^#\n]*\S", text, re.MULTILINE) for text in texts)
    assert english == chinese


def test_every_page_for_users_is_there_in_chinese():
    english = {page.name for page in ROOT.glob("docs/*.md")} - ENGLISH_ONLY
    assert {page.name for page in CHINESE} == english


@pytest.mark.parametrize("page", CHINESE, ids=lambda page: page.stem)
def test_a_chinese_page_has_the_code_sections_and_tables_of_the_english_one(page):
    texts = [each.read_text(encoding="utf-8") for each in (page, CHINESE[page])]
    chinese, english = (re.findall(r"^```.*?^```$", text, re.MULTILINE | re.DOTALL) for text in texts)
    assert chinese == english
    chinese, english = ([level for level, _ in headings(each)] for each in (page, CHINESE[page]))
    assert chinese == english
    chinese, english = ([line.count("|") for line in text.split("\n") if line[:1] == "|"] for text in texts)
    assert chinese == english


def test_llms_txt_names_pages_that_exist():
    paths = [path for path, _ in LINK.findall((ROOT / "llms.txt").read_text(encoding="utf-8"))]
    assert len(paths) > 15
    assert not [path for path in paths if not (ROOT / path).exists()]


# What a stranger looks for, in this order; the Chinese README has the same sections.
ORDER = {
    "README.md": [
        "Install", "From AutoModel to a smaller model in eight lines", "Commands by task",
        "Compared with BertViz, TransformerLens and nnsight", "What it does", "Numbers", "Status",
    ],
    "README.zh-CN.md": [
        "安装", "八行代码：从 AutoModel 到更小的模型", "按任务查命令",
        "与 BertViz、TransformerLens、nnsight 的比较", "能做什么", "测量结果", "进展",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", READMES)
def test_a_readme_has_its_sections_in_order_with_a_picture_before_them(name):
    assert [title for level, title in headings(ROOT / name) if level == 2] == ORDER[name]
    assert "![" in (ROOT / name).read_text(encoding="utf-8").split("\n## ")[0]


def test_the_commands_of_the_readme_are_on_its_first_screen():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:12]
    assert any(line.startswith("make demo") for line in lines)
    assert any(line.startswith("make test") for line in lines)
