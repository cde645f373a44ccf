"""Modules that look like attention and ran, but made no call that could be seen."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import nn

from manyheads.heads.intercept import module_paths

_LOOKS_LIKE_IT = re.compile(r"attention|attn", re.IGNORECASE)
_HIDDEN_CALL = re.compile(r"scaled_dot_product|softmax")


def missed(model: nn.Module, ran: Iterable[str], seen: Iterable[str]) -> dict[str, str]:
    """The paths of such modules with the reason. ``ran`` are the paths that ran, ``seen`` those of the sites.

    A module counts as seen when a call was made in it, in a part of it, or in the attention module that it
    is a part of.

    >>> class LinearAttention(nn.Module):
    ...     pass
    >>> missed(nn.Sequential(LinearAttention()), ran=["", "0"], seen=[])
    {'0': 'LinearAttention made no attention call that torch functions show'}
    """
    paths = module_paths(model)
    modules = {paths[id(module)]: module for module in model.modules()}
    sites = set(seen)
    reasons: dict[str, str] = {}
    for path in ran:
        module = modules[path]
        kind = type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            if _HIDDEN_CALL.search(str(module.inlined_graph)):
                reasons[path] = "it is traced or scripted, which shows nothing of what it does"
        elif _LOOKS_LIKE_IT.search(kind) and not _holds(path, sites) and not _is_part(path, modules, sites):
            reasons[path] = f"{kind} made no attention call that torch functions show"
    return {path: reasons[path] for path in modules if path in reasons and not _holds_other(path, reasons)}


def _holds(path: str, sites: set[str]) -> bool:
    """Whether a site is this module or inside it."""
    return any(site == path or site.startswith(f"{path}.") or not path for site in sites)


def _is_part(path: str, modules: dict[str, nn.Module], sites: set[str]) -> bool:
    """Whether the module is a part of an attention module that was seen."""
    while "." in path:
        path = path.rpartition(".")[0]
        if _LOOKS_LIKE_IT.search(type(modules[path]).__name__) and _holds(path, sites):
            return True
    return False


def _holds_other(path: str, reasons: dict[str, str]) -> bool:
    """Whether a part of this module is missed itself: then that part is the one to name."""
    return any(other.startswith(f"{path}.") for other in reasons)
