"""The report: one HTML file with the page and all it shows inside; it sends no request to any network."""

from __future__ import annotations

import base64
import copy
import gzip
import hashlib
import html
import json
from collections.abc import Callable, Iterable, Iterator
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from manyheads.common.progress import Progress, no_progress
from manyheads.common.types import Batch
from manyheads.common.whole_files import write_whole
from manyheads.heads.table import HeadTable
from manyheads.heads.watch import Watch
from manyheads.view.document.assemble import About, document
from manyheads.view.document.contract import HeadDocument, Maps
from manyheads.view.document.sample import of_batches

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A report is smaller than this, whatever the model and the corpus.
LIMIT = 5_000_000


def report(
    shown: HeadTable | Watch,
    path: str | PathLike[str],
    model: nn.Module | None = None,
    batches: Iterable[Batch] = (),
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    processor: object = None,
    title: str = "",
    progress: Progress = no_progress,
) -> Path:
    """Write a page about a table of heads: one HTML file under 5 MB that opens offline in any browser.

    Parameters
    ----------
    shown: a table of any kind, or what `watch` returned.
    path: the file to write, such as ``report.html``; its folder is created if it does not exist.
    model, batches: with both, the page also has attention maps of examples, roles, importance, redundancy
        and the pruning curve. Batches are dicts, tuples or tensors; a few are enough.
    tokenizer: the model's: the page then shows words instead of token ids.
    processor: the model's image processor: the page then shows images as they were before normalisation.
    title: the name of the model on the page; by default the name of its class.
    progress: called while the parts of the page are measured.

    Returns
    -------
    The path of the file. It is written completely or not at all.

    See Also
    --------
    inspect : measures the table and writes the page with it.
    widget : the same page in a notebook.
    serve : the page of a model that answers while you type.

    References
    ----------
    Vig, J. (2019). A Multiscale Visualization of Attention in the Transformer Model. ACL: System
    Demonstrations.

    Examples
    --------
    >>> import tempfile, torch
    >>> import manyheads as mh
    >>> model = mh.Encoder(d_model=8, heads=2, layers=2, vocabulary=17).eval()
    >>> batch = torch.randint(17, (3, 5))
    >>> with mh.watch(model) as seen:
    ...     _ = model(batch)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = mh.report(seen, f"{folder}/report.html", model, [batch])
    ...     page.name, page.stat().st_size < 5_000_000
    ('report.html', True)
    """
    page = page_document(
        shown, model, batches, tokenizer=tokenizer, processor=processor, title=title, progress=progress
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_report(page, path)
    return path


def page_document(
    shown: HeadTable | Watch,
    model: nn.Module | None = None,
    batches: Iterable[Batch] = (),
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    processor: object = None,
    title: str = "",
    progress: Progress = no_progress,
    only_examples: bool = False,
) -> HeadDocument:
    """The document about a table; arguments as in `report` and `document`."""
    table = shown.table if isinstance(shown, Watch) else shown
    if not isinstance(table, HeadTable):
        raise TypeError(f"shown: expected a HeadTable or what watch returns, got {type(shown).__name__}")
    batches = list(batches)
    if (model is None) != (not batches):
        missing = "batches" if model is not None else "model"
        raise ValueError(f"{missing}: expected both a model and batches, or neither; give {missing}")
    of = model if model is not None else shown.model if isinstance(shown, Watch) else None
    about = About(title or ("" if of is None else type(of).__name__))
    sample = of_batches(batches, model) if model is not None else None
    return document(
        table, model, sample, about=about, tokenizer=tokenizer, processor=processor, progress=progress,
        only_examples=only_examples,
    )  # fmt: skip


def write_report(page: HeadDocument, path: str | PathLike[str]) -> None:
    """Write a document as a page that opens in any browser; the file is written completely or not at all."""
    write_whole(path, report_html(page))


def report_html(page: HeadDocument) -> str:
    """The HTML of a page that shows a document.

    It is smaller than 5 MB: where the document is too large, exact maps go first, numbers last. A policy in
    the page forbids every request, and every script but its own.

    >>> import torch
    >>> page = report_html(document(HeadTable([], torch.zeros(0), {}), about=About("<b>&co")))
    >>> "<title>&lt;b&gt;&amp;co: heads</title>" in page, "default-src 'none'" in page
    (True, True)
    """
    script, style = asset("page.js"), asset("page.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    model = (page["header"]["model"] or "A model")[:200]
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
    for smaller in _smaller(page):
        data = encoded(smaller)
        if len(data) < room:
            return f"{head}{data}{tail}"
    raise ValueError(
        f"report: {len(page['heads']['site']):,} heads do not fit into a page of {LIMIT:,} bytes; expected "
        "fewer: read their numbers in heads.json"
    )


def asset(name: str) -> str:
    """A file that web/ was built into."""
    text = resources.files("manyheads").joinpath("view", "static", name).read_text(encoding="utf-8")
    # line ends as the HTML parser reads them, or the hash in the policy would not match the script
    return text.replace("\r\n", "\n").replace("\r", "\n")


def compressed(page: HeadDocument) -> bytes:
    """A document as the page reads it: gzip of JSON."""
    return gzip.compress(json.dumps(page, allow_nan=False, separators=(",", ":")).encode(), mtime=0)


def encoded(page: HeadDocument) -> str:
    """A document as it stands in HTML: base64 of gzip of JSON, in which no text can be taken for a tag.

    >>> import torch
    >>> page = document(HeadTable([], torch.zeros(0), {}))
    >>> json.loads(gzip.decompress(base64.b64decode(encoded(page)))) == page
    True
    """
    return base64.b64encode(compressed(page)).decode()


def _smaller(page: HeadDocument) -> Iterator[HeadDocument]:
    """The document, then less and less of it."""
    yield page
    page = copy.deepcopy(page)
    for reduce in _REDUCTIONS:
        reduce(page)
        yield page


def _of_each_map(reduce: Callable[[Maps], None]) -> Callable[[HeadDocument], None]:
    def reduce_all(page: HeadDocument) -> None:
        for example in page["examples"]:
            for maps in example["maps"]:
                reduce(maps)

    return reduce_all


def _drop_long_exact(maps: Maps) -> None:
    if "pooled" in maps:
        maps["exact"] = {}


def _drop_pooled(maps: Maps) -> None:
    maps.pop("pooled", None)


def _drop_exact(maps: Maps) -> None:
    maps["exact"] = {}


def _drop_other_examples(page: HeadDocument) -> None:
    del page["examples"][1:]


def _drop_steps(page: HeadDocument) -> None:
    for example in page["examples"]:
        example["silenced"] = example["pipeline"] = None


def _drop_examples(page: HeadDocument) -> None:
    page["examples"] = []


def _drop_redundancy(page: HeadDocument) -> None:
    page["redundancy"] = page["profiles"] = None


def _drop_roles(page: HeadDocument) -> None:
    page["roles"] = None


def _fewer_digits(page: HeadDocument) -> None:
    for metric in (*page["heads"]["metrics"].values(), *page["importance"].values()):
        for values in (metric["mean"], metric["se"]):
            values[:] = [None if x is None else float(f"{x:.3g}") for x in values]


# What a page that is too large loses, the least wanted first.
_REDUCTIONS: tuple[Callable[[HeadDocument], None], ...] = (
    _of_each_map(_drop_long_exact),
    _of_each_map(_drop_pooled),
    _of_each_map(_drop_exact),
    _drop_other_examples,
    _drop_steps,
    _drop_examples,
    _drop_redundancy,
    _drop_roles,
    _fewer_digits,
)
