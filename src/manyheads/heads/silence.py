"""silence and gates: multiply the outputs of chosen heads, on any model, under any kernel."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from manyheads.capture.call import Call
from manyheads.capture.interceptor import Interceptor, module_paths
from manyheads.capture.site import Selection, Site, Unverified
from manyheads.common.types import Batch, Heads
from manyheads.heads.head_means import head_means

GateValues = Mapping[int | str, Tensor] | Mapping[int, Tensor] | Mapping[str, Tensor]


def silence(
    model: nn.Module,
    heads: Heads,
    *,
    mean_of: Iterable[Batch] | None = None,
    unverified: Unverified = "refuse",
) -> AbstractContextManager[None]:
    """A context in which the chosen heads output zeros: ``with silence(model, {3: [5, 7]}): ...``

    The attention output of those heads, weights times values, is zero. Where an output projection reads
    nothing else, this equals setting its columns for those heads to zero. Where something else flows into
    those columns (a norm over all heads, a convolution of the values beside attention), it does not, and the
    site's ``notes`` say so. Contexts nest; gradients flow, also through gradient checkpointing.

    Parameters
    ----------
    model: any torch.nn.Module.
    heads: ``{layer number or site: [head numbers]}``.
    mean_of: batches for mean ablation: the heads give their mean output over these batches instead of
        zeros, so that what does not depend on the input stays (a bias, for what reads the head). It is
        measured now, when `silence` is called.
    unverified: ``"allow"`` to silence heads at unverified sites, too (`Site.verified`).

    Raises
    ------
    ValueError, when the model has no such module, at the first call of a site that has no such head, that is
    not verified, or when a layer number fits several sites, and on exit when a named site was never
    called.

    See Also
    --------
    gates: multiply by any number.
    cut: remove heads for good.
    importance: which heads matter.

    References
    ----------
    Michel, Levy, Neubig, "Are sixteen heads really better than one?" (2019).
    Wang, Variengien, Conmy, Shlegeris, Steinhardt, "Interpretability in the wild" (2023), on mean ablation.

    Examples
    --------
    >>> layer = nn.MultiheadAttention(6, num_heads=2, bias=False, batch_first=True)
    >>> x = torch.randn(3, 5, 6)
    >>> with silence(layer, {0: [0, 1]}):
    ...     layer(x, x, x)[0].abs().max().item()
    0.0
    """
    chosen = Selection(heads, module_paths(model).values())
    means = None if mean_of is None else head_means(model, mean_of)
    return _silence(model, chosen, unverified, means)


@contextmanager
def _silence(
    model: nn.Module, chosen: Selection, unverified: Unverified, means: Mapping[str, Tensor] | None
) -> Iterator[None]:
    def edit(call: Call) -> Tensor | None:
        numbers = chosen.at(call.site)
        if not numbers:
            return None
        call.site.check("silence", unverified)
        off = torch.zeros(call.site.heads, dtype=torch.bool, device=call.output.device)
        off[numbers] = True
        off = off[call.heads, None, None]
        if means is None:
            return call.output.masked_fill(off, 0.0)  # not a product: what is infinite becomes zero, too
        if call.site.name not in means:
            raise ValueError(
                f"mean_of: the outputs of {call.site.name!r} were not seen whole on these batches; expected "
                "batches that reach it, or leave mean_of out"
            )
        mean = means[call.site.name].to(call.output)  # (heads, width)
        return torch.where(off, mean[call.heads, None, :], call.output)

    with Interceptor(model, edit, reruns=True, parts=True) as interceptor:
        yield
    chosen.finish(interceptor.sites.by_name.values())


class Gates(Mapping[str, Tensor]):
    """The gates of a model by site, each (heads,); new ones appear when their site is first called."""

    def __init__(self, values: GateValues | None, paths: set[str]) -> None:
        self._values: dict[int | str, Tensor] = {}
        self.sites: dict[str, Site] = {}
        self._gates: dict[str, Tensor] = {}
        self._lock = threading.Lock()
        self._chosen = None
        if values is not None:
            for key, value in values.items():
                if (
                    not isinstance(value, Tensor)
                    or not value.is_floating_point()
                    or value.dim() not in (1, 2)
                ):
                    got = tuple(value.shape) if isinstance(value, Tensor) else value
                    raise ValueError(
                        f"gates[{key!r}]: expected a floating tensor (heads,) or (batch, heads), got {got}"
                    )
                self._values[key] = value
            self._chosen = Selection({key: range(value.shape[-1]) for key, value in values.items()}, paths)

    def __getitem__(self, site: str) -> Tensor:
        return self._gates[site]

    def __iter__(self) -> Iterator[str]:
        return iter(self._gates)

    def __len__(self) -> int:
        return len(self._gates)

    def at(self, call: Call) -> Tensor | None:
        """The gate for a call; ones if there is none yet."""
        site = call.site
        with self._lock:
            self.sites[site.name] = site
            gate = self._gates.get(site.name)
            if gate is None and self._chosen is not None:
                if not self._chosen.at(site):
                    return None
                key = site.name if site.name in self._chosen.heads else site.layer
                gate = self._gates[site.name] = self._values[key]
            elif gate is None:
                dtype = torch.promote_types(call.output.dtype, torch.float32)
                gate = torch.ones(site.heads, dtype=dtype, device=call.output.device, requires_grad=True)
                self._gates[site.name] = gate
        if gate.shape[-1] != site.heads or (gate.dim() == 2 and gate.shape[0] != call.output.shape[0]):
            expected = f"({site.heads},) or ({call.output.shape[0]}, {site.heads})"
            raise ValueError(f"gates: {site.name!r} needs {expected}, got {tuple(gate.shape)}")
        return gate

    def finish(self) -> None:
        """Raise when there are gates for a site that was never called."""
        if self._chosen is not None:
            self._chosen.finish(self.sites.values())


def gates(
    model: nn.Module, values: GateValues | None = None, *, unverified: Unverified = "refuse"
) -> AbstractContextManager[Gates]:
    """A context in which each head's output is multiplied by its own gate, which has a gradient.

    Parameters
    ----------
    model: any torch.nn.Module.
    values: ``{layer number or site: gates}`` with gates (heads,), or (batch, heads) for one number per
        sequence; only these sites are gated. Without it every site gets ones that require a gradient, when it
        is first called.
    unverified: ``"allow"`` to gate heads at unverified sites, too.

    Returns
    -------
    A context that gives a mapping from site names to gates. Errors as for `silence`.

    See Also
    --------
    silence: gates of zero.
    importance: rankings by the gradient of gates, or by learned gates.

    References
    ----------
    Michel, Levy, Neubig, "Are sixteen heads really better than one?" (2019).
    Voita, Talbot, Moiseev, Sennrich, Titov, "Analyzing multi-head self-attention" (2019).

    Examples
    --------
    >>> layer = nn.MultiheadAttention(6, num_heads=2, batch_first=True)
    >>> x = torch.randn(3, 5, 6)
    >>> with gates(nn.Sequential(layer)) as gate:
    ...     layer(x, x, x)[0].sum().backward()
    >>> gate["0"], gate["0"].grad.shape
    (tensor([1., 1.], requires_grad=True), torch.Size([2]))
    """
    return _gates(model, Gates(values, set(module_paths(model).values())), unverified)


@contextmanager
def _gates(model: nn.Module, site_gates: Gates, unverified: Unverified) -> Iterator[Gates]:
    def edit(call: Call) -> Tensor | None:
        gate = site_gates.at(call)
        if gate is not None:
            call.site.check("gates", unverified)
        return None if gate is None else call.output * gate[..., call.heads, None, None].to(call.output)

    with Interceptor(model, edit, reruns=True, parts=True):
        yield site_gates
    site_gates.finish()
