"""A document as one HTML file: the page, and all it shows, inside; it asks nothing of any network."""

from __future__ import annotations

import base64
import copy
import gzip
import hashlib
import html
import json
from collections.abc import Callable, Iterator
from importlib import resources
from os import PathLike
from typing import Any

from manyheads.common.whole_files import write_whole

# A report is smaller than this, whatever the model and the corpus.
LIMIT = 5_000_000


def write_report(document: dict[str, Any], path: str | PathLike[str]) -> None:
    """Write a document as a page that opens in any browser; the file is there whole or not at all."""
    write_whole(path, report(document))


def report(document: dict[str, Any]) -> str:
    """The HTML of a page that shows a document.

    It is smaller than 5 MB: where the document is too large, exact maps go first, numbers last. A policy in
    the page forbids every request, and any script but its own.

    >>> page = report({"version": 1, "made": {"model": "<b>&co"}, "examples": []})
    >>> "<title>&lt;b&gt;&amp;co: heads</title>" in page, "default-src 'none'" in page
    (True, True)
    """
    script, style = asset("page.js"), asset("page.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    model = str(document["made"]["model"] or "A model")[:200]
    name = html.escape(model.encode(errors="replace").decode())  # half a surrogate pair is no character
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name}: heads</title>\n<style>{style}</style>\n</head>\n<body>\n"
        '<div id="page"><noscript>This page needs JavaScript, which is off here.</noscript></div>\n'
        '<script type="application/octet-stream" id="document">'
    )
    tail = f"</script>\n<script>{script}</script>\n</body>\n</html>\n"
    room = LIMIT - len(head.encode()) - len(tail.encode())
    for smaller in _smaller(document):
        data = encoded(smaller)
        if len(data) < room:
            return f"{head}{data}{tail}"
    raise ValueError(
        f"report: {len(document['heads']['site']):,} heads do not fit into a page of {LIMIT:,} bytes; their "
        "numbers are in heads.json"
    )


def asset(name: str) -> str:
    """A file of the page that web/ was built into."""
    text = resources.files("manyheads").joinpath("view", "static", name).read_text(encoding="utf-8")
    # as the parser of HTML reads it, or the policy would not know the script again
    return text.replace("\r\n", "\n").replace("\r", "\n")


def compressed(document: dict[str, Any]) -> bytes:
    """A document as the page reads it: gzip of JSON."""
    return gzip.compress(json.dumps(document, allow_nan=False, separators=(",", ":")).encode(), mtime=0)


def encoded(document: dict[str, Any]) -> str:
    """A document as it stands in HTML: base64 of gzip of JSON, in which no text can be taken for a tag.

    >>> import json
    >>> json.loads(gzip.decompress(base64.b64decode(encoded({"version": 1}))))
    {'version': 1}
    """
    return base64.b64encode(compressed(document)).decode()


def _smaller(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The document, then less and less of it."""
    yield document
    document = copy.deepcopy(document)
    for less in _LESS:
        less(document)
        yield document


def _each_map(change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    def less(document: dict[str, Any]) -> None:
        for example in document["examples"]:
            for maps in example["maps"]:
                change(maps)

    return less


def _long_exact(maps: dict[str, Any]) -> None:
    if "pooled" in maps:
        maps["exact"] = {}


def _fewer_digits(document: dict[str, Any]) -> None:
    for metric in (*document["heads"]["metrics"].values(), *document["importance"].values()):
        for name, values in metric.items():
            metric[name] = [None if x is None else float(f"{x:.3g}") for x in values]


# What a page that grows too large loses, the least wanted first.
_LESS: tuple[Callable[[dict[str, Any]], Any], ...] = (
    _each_map(_long_exact),
    _each_map(lambda maps: maps.pop("pooled", None)),
    _each_map(lambda maps: maps.update(exact={})),
    lambda document: document["examples"].__delitem__(slice(1, None)),
    lambda document: [example.update(silenced=None, pipeline=None) for example in document["examples"]],
    lambda document: document["examples"].clear(),
    lambda document: document.update(redundancy=None, profiles=None),
    lambda document: document.update(roles=None),
    _fewer_digits,
)
