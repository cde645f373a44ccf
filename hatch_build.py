"""README for a package index, which shows pictures and links only by their whole address.

    MANYHEADS_REPOSITORY=https://github.com/OWNER/manyheads python -m build

Without the variable the links stay relative, as they are in a checkout.
"""

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")


class ReadmeHook(MetadataHookInterface):
    """Sets the field readme, which pyproject.toml calls dynamic."""

    def update(self, metadata: dict) -> None:
        """Called by hatchling; the version is that of the tag by then."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        if repository := os.environ.get("MANYHEADS_REPOSITORY"):
            text = with_whole_addresses(text, repository, os.environ.get("MANYHEADS_TAG", "HEAD"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def with_whole_addresses(text: str, repository: str, tag: str) -> str:
    """A page with pictures and links that lead to a tag of a repository on GitHub.

    >>> with_whole_addresses("![a](docs/a.png) [b](b.md#c) [d](https://d.org)", "https://g.h/r/", "v1")
    '![a](https://g.h/r/raw/v1/docs/a.png) [b](https://g.h/r/blob/v1/b.md#c) [d](https://d.org)'
    """
    base = repository.rstrip("/")

    def whole(match: re.Match[str]) -> str:
        mark, name, path = match.groups()
        return f"{mark}[{name}]({base}/{'raw' if mark else 'blob'}/{tag}/{path})"

    return LINK.sub(whole, text)
