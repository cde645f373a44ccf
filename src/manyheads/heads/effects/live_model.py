"""What the live page needs of a model beforehand: its sites, a first table, an input, a way to stop it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from manyheads.capture.site import Site
from manyheads.common.types import Batch
from manyheads.heads.fingerprint import fingerprint
from manyheads.heads.observer import observed
from manyheads.heads.table import HeadTable
from manyheads.heads.watch import labels_of, rows_of
from manyheads.models.loaded import Loaded
from manyheads.models.probe_batch import probe_batch


def sites_of(model: nn.Module, batch: Batch) -> dict[str, Site]:
    """The attention sites that a model calls on a batch, by name.

    >>> from manyheads.nn.transformers import Encoder
    >>> list(sites_of(Encoder(d_model=8, heads=2, layers=1, vocabulary=17), torch.randint(17, (1, 5))))
    ['blocks.0.attention']
    """
    with observed(model) as observer:
        observer.forward(batch)
        return {site.name: site for site in observer.sites}


def table_without_numbers(model: nn.Module, sites: Iterable[Site]) -> HeadTable:
    """The heads of a model, where nothing was measured yet.

    >>> from manyheads.nn.transformers import Encoder
    >>> model = Encoder(d_model=8, heads=2, layers=1, vocabulary=17)
    >>> table_without_numbers(model, sites_of(model, torch.randint(17, (1, 5))).values()).metrics
    []
    """
    sites = list(sites)
    rows = rows_of(model, sites)
    return HeadTable(rows, torch.zeros(len(rows)), {}, fingerprint(model), labels=labels_of(sites))


def call_before_modules(model: nn.Module, check: Callable[[], None]) -> None:
    """From now on, call ``check`` before every module runs: it may raise to end a forward pass early.

    >>> model, calls = nn.Sequential(nn.Linear(2, 3), nn.ReLU()), []
    >>> call_before_modules(model, lambda: calls.append(1))
    >>> _ = model(torch.ones(1, 2))
    >>> len(calls)
    3
    """
    for module in model.modules():
        module.register_forward_pre_hook(lambda *_: check())


def image_probe(loaded: Loaded) -> Batch:
    """A batch that a model of images runs on, where there are no images."""
    try:
        return probe_batch(loaded.model)
    except ValueError as error:
        raise ValueError(
            f"images: {loaded.name} reads images, and the form of its input could not be guessed ({error}); "
            "give --images FOLDER"
        ) from error
