"""What the site has besides docs/: the reference, the changelog, the benchmarks; MkDocs calls these hooks."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

import manyheads as mh

ROOT = Path(__file__).parents[1]
# The reference by room: what a reader looks for, and the rooms of the package that have it.
REFERENCE = {
    "build": ("Build: attention, modules, transformers", ("nn",)),
    "see": ("See and measure heads", ("capture", "data", "heads", "view")),
    "cut": ("Change heads, save and load", ("surgery", "models")),
    "train": ("Train", ("training", "tasks")),
    "studies": ("Studies", ("studies",)),
}
# Files outside docs/ that pages link to, and where the site has them.
OUTSIDE = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {site: (ROOT / source).read_text(encoding="utf-8") for source, site in OUTSIDE.items()}
    pages.pop("index.md")  # docs/ has one
    results = sorted((ROOT / "bench" / "results").glob("*.md"))
    pages |= {f"results/{path.name}": path.read_text(encoding="utf-8") for path in results}
    listed = "\n".join(f"- [{path.stem}]({path.name})" for path in results)
    pages["results/index.md"] = f"# Benchmarks\n\nWritten by `python -m bench`.\n\n{listed}\n"
    pages |= {f"api/{name}.md": reference(*entry) for name, entry in REFERENCE.items()}
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        text, pictures = notebook(path)
        pages[f"notebooks/{path.stem}.md"] = text
        for name, content in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    for picture in (ROOT / "bench" / "results").glob("*.png"):
        files.append(File.generated(config, f"results/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files outside docs/ lead to where the site has them."""
    up = "../" * page.file.src_uri.count("/")

    def moved(match: re.Match[str]) -> str:
        path, anchor = match[1], match[2] or ""
        if path.startswith("bench/results"):
            name = path.removeprefix("bench/results").strip("/") or "index.md"
            return f"]({up}results/{name}{anchor})"
        return f"]({up}{OUTSIDE[path]}{anchor})"

    known = "|".join([*map(re.escape, OUTSIDE), r"bench/results[\w./-]*"])
    markdown = re.sub(rf"\]\((?:\.\./)+({known})(#[^)]*)?\)", moved, markdown)
    return re.sub(r"\]\(((?:\.\./)?notebooks/[\w-]+)\.ipynb\)", r"](\1.md)", markdown)


def notebook(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as a page, with a link to the file itself, and its pictures by name."""
    content = nbformat.read(path, as_version=4)
    text, resources = MarkdownExporter().from_notebook_node(content, {"unique_key": path.stem})
    text = re.sub(r"\]\(([\w-]+)\.ipynb\)", r"](\1.md)", text)
    return f"{text}\n[This notebook as a file]({path.name})\n", resources["outputs"]


def reference(title: str, rooms: tuple[str, ...]) -> str:
    """A page with the public names of some rooms."""
    lines = [f"# {title}", ""]
    for module, names in mh._NAMES.items():
        if module.split(".")[1] in rooms:
            lines += [f"::: {module}.{name}\n" for name in names]
    return "\n".join(lines)
