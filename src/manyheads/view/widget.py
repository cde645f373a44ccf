"""Heads in a notebook: tables that show themselves as a page, and the heads that were picked on it."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import nn

from manyheads.common.progress import Progress
from manyheads.common.types import Batch
from manyheads.heads.table import HeadTable
from manyheads.heads.watch import Watch
from manyheads.view.document.contract import HeadDocument
from manyheads.view.figures.head_pictures import table_picture
from manyheads.view.progress_bar import progress_bar
from manyheads.view.report import asset, compressed, page_document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INSTALL = "pip install 'manyheads[notebook]'"


def widget(
    shown: HeadTable | Watch,
    model: nn.Module | None = None,
    batches: Iterable[Batch] = (),
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress | None = None,
) -> Any:
    """The page about a table of heads, for Jupyter and VS Code; the heads picked on it are in ``selected``.

    A HeadTable, or what `watch` returns, shows itself as this page at the end of a cell. Call `widget` to
    give the page a name, or to see more.

    Parameters
    ----------
    shown: a table of any kind, or what `watch` returned.
    model, batches: with both, the page also has attention maps of examples, roles, importance, redundancy
        and the pruning curve. Batches are dicts, tuples or tensors; a few are enough.
    tokenizer: the model's: the page then shows words instead of token ids.
    progress: called while the parts of the page are measured; by default a bar is drawn.

    Returns
    -------
    A widget of anywidget. Its ``selected`` is ``{site: [head numbers]}``, as `silence`, `maps` and `cut`
    take it.

    See Also
    --------
    show : the attention of a model on a text, in one line.
    report : the same page as a file.
    watch : collects the table.

    References
    ----------
    Vig, J. (2019). A Multiscale Visualization of Attention in the Transformer Model. ACL: System
    Demonstrations.

    Examples
    --------
    >>> import torch
    >>> from manyheads.heads.watch import watch
    >>> layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True)
    >>> with watch(layer) as seen:
    ...     _ = layer(torch.randn(2, 5, 8))
    >>> page = widget(seen)
    >>> page.selected
    {}
    >>> page.picked = [1]                                                     # as a click on the second head
    >>> page.selected
    {'self_attn': [1]}
    """
    kind = widget_class()  # before anything is measured: without anywidget there is nothing to show
    with nullcontext(progress) if progress is not None else progress_bar("Measuring") as report:
        page = page_document(shown, model, batches, tokenizer=tokenizer, progress=report)
    return kind(shown.table if isinstance(shown, Watch) else shown, page)


@cache
def widget_class() -> type:
    """The class of widgets, defined when the first one is wanted: anywidget is not needed before."""
    try:
        import anywidget
        import traitlets
    except ImportError:
        raise ImportError(f"widgets need anywidget: {INSTALL}") from None

    class Heads(anywidget.AnyWidget):
        """A page about heads. `picked` are rows of the table, `selected` the heads in these rows."""

        _esm = asset("widget.js")
        _css = asset("page.css")
        document = traitlets.Bytes().tag(sync=True)
        picked = traitlets.List(traitlets.Int()).tag(sync=True)

        def __init__(self, table: HeadTable, page: HeadDocument) -> None:
            super().__init__(document=compressed(page))
            self._table = table

        def _repr_mimebundle_(self, **options: Any) -> Any:
            """The widget, and a picture for where there is no kernel: a saved notebook on the web."""
            shown = super()._repr_mimebundle_(**options)
            data, metadata = shown if isinstance(shown, tuple) else (shown, {})
            still = base64.b64encode(table_picture(self._table)).decode()
            return {**(data or {}), "image/png": still}, metadata

        @property
        def selected(self) -> dict[str, list[int]]:
            """The heads that were picked on the page."""
            by_site: dict[str, list[int]] = {}
            for i in self.picked:
                row = self._table.rows[i]
                by_site.setdefault(row.site, []).append(row.head)
            return by_site

    return Heads


def bundle(shown: HeadTable | Watch, table: HeadTable | None, **options: Any) -> object:
    """What a notebook asks of an object that shows itself: the widget, or a text where there is no table yet
    or no anywidget.

    >>> import torch
    >>> bundle(HeadTable([], torch.zeros(0), {}), None)
    {'text/plain': 'HeadTable(0 heads at 0 sites, 0 tokens: )'}
    """
    try:
        return {"text/plain": repr(shown)} if table is None else widget(shown)._repr_mimebundle_(**options)
    except ImportError:
        return {"text/plain": repr(shown)}
