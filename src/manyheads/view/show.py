"""show: the attention of a model on a text, in one line of a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from manyheads.common.devices import device_of, to_device
from manyheads.common.types import Batch
from manyheads.heads.effects.page_measurements import counted_table
from manyheads.models.loaded import Loaded
from manyheads.models.open import open_model
from manyheads.view.progress_bar import progress_bar
from manyheads.view.report import page_document
from manyheads.view.widget import widget_class

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Shown = nn.Module | Loaded | str | None


def show(
    model: Shown, text: str | Sequence[str] | Batch, *, tokenizer: PreTrainedTokenizerBase | None = None
) -> object:
    """What every head of a model attends to on a text: the interactive page, in one line of a notebook.

    Only the attention is measured, which takes seconds even for a large model; `widget` and `inspect` measure
    roles, importance and redundancy, too.

    Parameters
    ----------
    model: any torch.nn.Module, what `open_model` returned, or the string that it takes; None for the embedded
        MiniLM.
    text: a text, or several, which need a tokenizer; or a batch as the model takes it: a dict, a tuple or a
        tensor.
    tokenizer: the model's. Default: what `open_model` opens with the model; for a transformers model that was
        loaded by `from_pretrained`, the one stored beside it.

    Returns
    -------
    A widget of anywidget. The heads that are picked on it are in its ``selected``.

    See Also
    --------
    widget : the page of a table, with everything that can be measured.
    maps : the numbers.
    serve : type, and see the heads of every text at once.

    References
    ----------
    Vig, J. (2019). A Multiscale Visualization of Attention in the Transformer Model. ACL: System
    Demonstrations (BertViz).

    Examples
    --------
    >>> import manyheads as mh
    >>> page = mh.show(None, "Heads attend.")
    >>> page.picked = [3]                                                     # as a click on a head
    >>> page.selected
    {'encoder.layer.0.attention.self': [3]}
    """
    kind = widget_class()
    loaded = model if isinstance(model, Loaded) else None
    if model is None or isinstance(model, str):
        loaded = open_model(model, head=True)
    module = loaded.model if loaded is not None else model
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"model: expected a torch.nn.Module or a name for open_model, got {type(model).__name__}"
        )
    if _is_text(text) and tokenizer is None:
        tokenizer = loaded.tokenizer() if loaded is not None else _tokenizer_beside(module)
    batches = _batches(module, loaded, text, tokenizer)
    table = counted_table(module, batches)
    title = loaded.name if loaded is not None else type(module).__name__
    with progress_bar("Measuring") as progress:
        page = page_document(
            table,
            module,
            batches,
            tokenizer=tokenizer,
            title=title,
            progress=progress,
            only_examples=True,
        )
    return kind(table, page)


def _is_text(text: object) -> bool:
    return isinstance(text, str) or (
        isinstance(text, Sequence) and len(text) > 0 and all(isinstance(part, str) for part in text)
    )


def _batches(
    model: nn.Module, loaded: Loaded | None, text: Any, tokenizer: PreTrainedTokenizerBase | None
) -> list[Batch]:
    """Each text as a batch of one sequence, on the model's device; a batch as it is."""
    device = device_of(model)
    if not _is_text(text):
        if isinstance(text, str | Sequence) and not isinstance(text, Mapping | tuple | list):
            raise TypeError(f"text: expected a text, several, or a batch, got {type(text).__name__}")
        return [to_device(text, device)]
    assert tokenizer is not None
    texts = [text] if isinstance(text, str) else list(text)
    if not all(part.strip() for part in texts):
        raise ValueError("text: expected some text, got an empty one")
    opened = loaded or Loaded(type(model).__name__, model, lambda: tokenizer, lambda: None)  # type: ignore[arg-type,return-value]
    batches = []
    for part in texts:
        encoded = tokenizer(part)
        ids = torch.tensor([encoded["input_ids"] if isinstance(encoded, Mapping) else list(encoded)])
        batch = opened.arguments(ids, torch.ones_like(ids))
        batches.append(to_device(batch, device))
    return batches


def _tokenizer_beside(model: nn.Module) -> PreTrainedTokenizerBase:
    """The tokenizer of a transformers model, from where the model was loaded."""
    source = getattr(model, "name_or_path", "") or getattr(
        getattr(model, "config", None), "_name_or_path", ""
    )
    if not source:
        raise ValueError(
            f"tokenizer: {type(model).__name__} does not say where it was loaded from; pass tokenizer=..., "
            "or a batch instead of a text"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:
        raise ValueError(
            f"tokenizer: {source}, where the model was loaded from, has none that can be read ({error}); "
            "pass tokenizer=..., or a batch instead of a text"
        ) from error
    return tokenizer
