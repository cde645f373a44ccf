"""Running a model again from the middle: what was computed before a site is replayed, not computed again.

While the full model runs, `RecordedForward` keeps the output of every call of a module (one that has modules
inside) that was complete when the attention at some site was made. To change a head at that site, the model
is run once more, and each of those calls returns what it returned before. Nothing is assumed about the model
but that a module called again with the same input gives the same output; leave-one-out checks that once, and
computes everything where it fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from manyheads.capture.thread_marks import internal


class _Call:
    """One call of a module: what was called inside it, and what it returned."""

    __slots__ = ("children", "module", "output")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.children: list[_Call] = []
        self.output: object = None


class RecordedForward:
    """What the modules of a model returned in one forward.

    >>> model = nn.Sequential(nn.Sequential(nn.Linear(2, 3)), nn.ReLU(), nn.Linear(3, 5))
    >>> recording = RecordedForward(model)
    >>> import torch
    >>> x = torch.ones(1, 2)
    >>> with recording.recorded():
    ...     mark = model[1].register_forward_pre_hook(lambda *_: recording.mark("here"))
    ...     y = model(x)
    >>> with recording.replayed("here"):                                    # the first layer does not run
    ...     model(torch.zeros(1, 2)).equal(y)
    True
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._open: list[_Call] = []
        self._before: dict[str, list[_Call]] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """A context for one forward of the model."""
        self._open, self._before = [], {}
        # what is small is computed again: it may be a step of the attention that is to be seen
        modules = [module for module in self._model.modules() if next(module.children(), None) is not None]
        handles = [module.register_forward_pre_hook(self._begin) for module in modules]
        handles += [module.register_forward_hook(self._end) for module in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._open = []

    def mark(self, site: str) -> None:
        """Note that the attention of a site is being called."""
        if self._open and site not in self._before:
            self._before[site] = [call for opened in self._open for call in opened.children]

    def _begin(self, module: nn.Module, args: object) -> None:
        self._open.append(_Call(module))

    def _end(self, module: nn.Module, args: object, output: object) -> None:
        call = self._open.pop()
        call.output, call.children = output, []  # a site inside it has taken those that it needs
        if self._open:
            self._open[-1].children.append(call)

    @contextmanager
    def replayed(self, site: str) -> Iterator[None]:
        """A context for one forward, in which the calls that were complete when the attention of a site was
        called return what they returned then.
        """
        waiting = deque(self._before.get(site, ()))

        def returning(module: nn.Module) -> Callable[..., object]:
            original_forward: Callable[..., object] = module.forward

            def forward(*args: object, **kwargs: object) -> object:
                if waiting and waiting[0].module is module:
                    return waiting.popleft().output
                return original_forward(*args, **kwargs)

            return forward

        forwards = {call.module: vars(call.module).get("forward") for call in waiting}
        before, internal.repeating = internal.repeating, True
        try:
            for module in forwards:
                vars(module)["forward"] = returning(module)
            yield
        finally:
            internal.repeating = before
            for module, original in forwards.items():
                if original is None:
                    del vars(module)["forward"]
                else:
                    vars(module)["forward"] = original
