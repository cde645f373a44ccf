"""What watching a model missed: modules that mix tokens unseen, and sites of which nothing was proved."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from manyheads.capture.interceptor import module_paths
from manyheads.capture.proof import Proof
from manyheads.capture.site import Site
from manyheads.common.sharded_weights import layers_elsewhere

_HIDDEN_CALL = re.compile(r"scaled_dot_product|softmax")


def missed(
    model: nn.Module,
    ran: Iterable[str],
    sites: Iterable[Site],
    proofs: Iterable[Proof] = (),
    unread: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The paths of such modules, and the names of such sites, with the reason. ``unread`` are those of opaque
    kernels that cannot be read.

    >>> missed(nn.Identity(), [""], [Site("attn", 0, 2, (0, 1), reason="nothing was proved")])
    {'attn': 'nothing was proved'}
    """
    paths = module_paths(model)
    modules = {paths[id(module)]: module for module in model.modules()}
    elsewhere = "another process computes it (pipeline parallelism)"
    reasons = dict.fromkeys(layers_elsewhere(model), elsewhere)
    for path in ran:
        module = modules[path]
        if isinstance(module, torch.jit.ScriptModule) and _HIDDEN_CALL.search(str(module.inlined_graph)):
            reasons[path] = "it is traced or scripted, which shows nothing of what it does"
    for proof in proofs:
        reasons = proof.missed | reasons
        if proof.failed and "" in set(ran) | {""}:
            reasons.setdefault("", f"nothing was proved of this model: {proof.failed}")
    return reasons | dict(unread or {}) | {site.name: site.reason for site in sites if not site.verified}
