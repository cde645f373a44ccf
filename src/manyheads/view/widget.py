"""Heads in a notebook: tables that show themselves, and what a person picked there, read from Python."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from manyheads.heads.table import HeadTable
from manyheads.heads.watch import Watch
from manyheads.view.document import About, document, of_batches
from manyheads.view.report import asset, compressed

INSTALL = "pip install 'manyheads[notebook]'"


def widget(
    shown: HeadTable | Watch,
    model: nn.Module | None = None,
    batches: Iterable[Any] = (),
    *,
    tokenizer: Any = None,
) -> Any:
    """The page about a table of heads, for Jupyter and VS Code; what is picked on it is in ``selected``.

    A HeadTable, or what `watch` returns, shows itself as such a page at the end of a cell. Call this to have
    a name for it, or to see more.

    Parameters
    ----------
    shown: a table of any kind, or what `watch` returned.
    model, batches: with both, also maps of examples, roles, importance, redundancy and the prune curve, as on
        the page of ``manyheads inspect``. Batches are dicts, tuples or tensors; a few are enough.
    tokenizer: the model's, for words.

    Returns
    -------
    A widget. Its ``selected`` is ``{site: [head numbers]}``, as `silence`, `maps` and `cut` take it.

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
    table = shown.table if isinstance(shown, Watch) else shown
    if not isinstance(table, HeadTable):
        raise TypeError(f"shown: expected a HeadTable or what watch returns, got {type(shown).__name__}")
    given = list(batches)
    if (model is None) != (not given):
        missing = "batches" if model is not None else "model"
        raise ValueError(f"{missing}: expected both a model and batches, or neither; give {missing}")
    of = model if model is not None else shown.model if isinstance(shown, Watch) else None
    about = About("" if of is None else type(of).__name__)
    sample = of_batches(given, model) if model is not None else None
    made = document(table, model, sample, about=about, tokenizer=tokenizer)
    return _kind()(table, made)


_made: list[type] = []


def _kind() -> type:
    """The class of widgets, made when the first one is wanted: anywidget is not needed before."""
    if not _made:
        try:
            import anywidget
            import traitlets
        except ImportError:
            raise ImportError(f"widgets need anywidget: {INSTALL}") from None

        class Heads(anywidget.AnyWidget):
            """A page about heads. `picked` are rows of the table, `selected` the heads that they are."""

            _esm = asset("widget.js")
            _css = asset("page.css")
            document = traitlets.Bytes().tag(sync=True)
            picked = traitlets.List(traitlets.Int()).tag(sync=True)

            def __init__(self, table: HeadTable, made: dict[str, Any]) -> None:
                super().__init__(document=compressed(made))
                self._table = table

            @property
            def selected(self) -> dict[str, list[int]]:
                """The heads that were picked on the page."""
                found: dict[str, list[int]] = {}
                for i in self.picked:
                    row = self._table.rows[i]
                    found.setdefault(row.site, []).append(row.head)
                return found

        _made.append(Heads)
    return _made[0]


def bundle(shown: HeadTable | Watch, table: HeadTable | None, **wanted: Any) -> Any:
    """What a notebook asks of something that shows itself: the widget, or its text where there is none to
    show, or nothing to show it with.

    >>> import torch
    >>> bundle(HeadTable([], torch.zeros(0), {}), None)
    {'text/plain': 'HeadTable(0 heads at 0 sites, 0 tokens: )'}
    """
    try:
        return {"text/plain": repr(shown)} if table is None else widget(shown)._repr_mimebundle_(**wanted)
    except ImportError:
        return {"text/plain": repr(shown)}
