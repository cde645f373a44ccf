"""The direct path from a head's output to the logits: through its output projection, the last norm and the
vocabulary head, leaving out later layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from manyheads.capture.call import Call
from manyheads.capture.interceptor import Interceptor
from manyheads.common.run_batch import run
from manyheads.common.types import Batch


@dataclass(frozen=True, eq=False)
class Lens:
    """The direct path of a model from heads to logits.

    matrices: for each site what reads its heads, (heads, d_value, d_model).
    norm: what the residual stream goes through before the vocabulary head.
    vocabulary: (vocabulary, d_model) the weight of that head.
    """

    matrices: dict[str, Tensor]
    norm: nn.Module
    vocabulary: Tensor

    def logits(self, site: str, output: Tensor, heads: slice, ids: Tensor) -> Tensor:
        """What heads of a site add to the logits of some tokens, up to one positive factor for each query.

        output (batch, heads, rows, d_value), ids (batch, n) -> (batch, heads, rows, n).
        """
        written = output @ self.matrices[site][heads].to(output.dtype)
        # A norm scales by a positive number and, for LayerNorm, takes the mean away and adds a bias.
        normed = self.norm(written) - self.norm(torch.zeros_like(written[:1, :1, :1]))
        logits: Tensor = normed @ self.vocabulary[ids].to(normed.dtype).transpose(1, 2).unsqueeze(1)
        return logits


def lens(model: nn.Module, batch: Batch, vocabulary: int) -> Lens:
    """Run the model once on a short batch to find its parts. Raises a ValueError that says what is missing.

    What reads the heads is the next module that is given just their outputs.
    """
    search = _Search(model, vocabulary)
    leaves = [module for module in model.modules() if next(module.children(), None) is None]
    handles: list[RemovableHandle] = [module.register_forward_pre_hook(search.before) for module in leaves]
    handles += [module.register_forward_hook(search.after) for module in leaves]
    try:
        with Interceptor(model, search.see):
            run(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    if search.head is None:
        raise ValueError("the model has no vocabulary head")
    if search.norm is None:
        raise ValueError("what enters the vocabulary head does not come from a norm")
    projections = {site: _matrix(*parts).detach() for site, parts in search.readers.items()}
    matrices = {
        site: matrix for site, matrix in projections.items() if matrix.shape[2] == search.head.shape[1]
    }
    if not matrices:
        raise ValueError("no output projection from the heads to the width of the vocabulary head was found")
    return Lens(matrices, search.norm, search.head.detach())


class _Search:
    """The parts of a model that a run shows."""

    def __init__(self, model: nn.Module, vocabulary: int) -> None:
        self.modules = dict(model.named_modules())
        self.vocabulary = vocabulary
        self.readers: dict[str, tuple[nn.Module, Tensor]] = {}  # by site, with an output of its heads
        self.norm: nn.Module | None = None
        self.head: Tensor | None = None
        self._waiting: tuple[str, Tensor] | None = None
        self._last: tuple[nn.Module, Tensor] | None = None  # the norm that ran last, and what came out

    def see(self, call: Call) -> None:
        """An attention call: wait for the module that reads it."""
        owner = self.modules.get(call.site.path)
        if isinstance(owner, nn.MultiheadAttention):  # reads by a function, not by calling its module
            self.readers[call.site.name] = owner.out_proj, call.output
        else:
            self._waiting = call.site.name, call.output

    def before(self, module: nn.Module, args: tuple[object, ...]) -> None:
        """A module is about to run: it may be the reader that is waited for, or the vocabulary head."""
        x, weight = args[0] if args else None, getattr(module, "weight", None)
        if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or weight.dim() != 2:
            return
        with torch._C.DisableTorchFunction():
            if self._waiting is not None:
                site, output = self._waiting
                flat = output.transpose(1, 2).flatten(-2)
                if x.shape == flat.shape and torch.equal(x, flat):
                    self.readers[site], self._waiting = (module, output), None
            if (
                weight.shape[0] >= self.vocabulary
                and x.is_floating_point()
                and weight.shape[1] == x.shape[-1]
            ):
                last = self._last
                self.head = weight
                self.norm = last[0] if last is not None and last[1].data_ptr() == x.data_ptr() else None

    def after(self, module: nn.Module, args: object, output: object) -> None:
        """A module has run: it may be the last norm."""
        weight = getattr(module, "weight", None)
        if isinstance(output, Tensor) and isinstance(weight, Tensor) and weight.dim() == 1:
            self._last = module, output


def _matrix(module: nn.Module, output: Tensor) -> Tensor:
    """What a linear module multiplies heads by, (heads, d_value, d_model), in whatever layout it keeps it."""
    _, heads, _, width = output.shape
    one = torch.eye(heads * width, dtype=output.dtype, device=output.device)
    matrix: Tensor = module(one) - module(torch.zeros_like(one[:1]))
    return matrix.view(heads, width, -1)
