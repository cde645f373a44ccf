"""Whether `cut` gives what `silence` gives, on the architectures of `bench.coverage`.

Every site loses something: every second one its second key head's group, the others one head of every group (where
each head has its own keys, that is one head). Sites that share weights lose the same heads. Whether the outputs
agree is for `cut` to find out; here its refusals and failures are collected, by name.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import manyheads as mh
from manyheads.heads.sites import Site

CUT, REFUSED, FAILED = "cut", "refused", "failed"


def choose(sites: list[Site]) -> dict[str, list[int]]:
    """Heads to remove at every site that has several."""
    chosen: dict[str, list[int]] = {}
    order: dict[str, int] = {}  # of modules: the calls of one module lose the same heads
    for site in sites:
        groups: dict[int, list[int]] = {}
        for head, key_head in enumerate(site.kv_heads):
            groups.setdefault(key_head, []).append(head)
        whole = order.setdefault(site.path, len(order)) % 2 == 0
        if len(groups) == site.heads or (whole and len(groups) > 1):
            heads = list(groups.values())[1 if whole and len(groups) > 1 else 0]
        else:
            heads = [group[0] for group in groups.values()]
        if len(heads) < site.heads:
            chosen[site.name] = heads
    return chosen


def check(model: nn.Module, forward: Callable[[nn.Module], Any]) -> dict[str, str]:
    """Cut a model that runs by ``forward``; a verdict and, unless it was cut, the reason."""
    wrapped = _Run(model, forward).eval()
    with torch.no_grad(), mh.watch(wrapped) as seen:
        wrapped()
    heads = choose(seen.sites)
    if not heads:
        return {"cut": REFUSED, "why": "no site has heads to spare"}
    try:
        mh.cut(wrapped, heads, batch=())
    except (ValueError, RuntimeError) as error:
        verdict = REFUSED if isinstance(error, ValueError) else FAILED
        return {"cut": verdict, "why": " ".join(str(error).split())[:300]}
    return {"cut": CUT, "why": ""}


class _Run(nn.Module):
    """A model together with its input, so that it can be run without knowing how."""

    def __init__(self, model: nn.Module, forward: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.model = model
        self.run = forward

    def forward(self) -> Any:
        return self.run(self.model)
