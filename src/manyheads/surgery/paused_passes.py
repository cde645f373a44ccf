"""The forward passes of a model on many batches, all waiting at the same linear layer.

Maps are refitted one after the other, each on what those before it give once they are refitted. Running the
model again for each of them would cost as many passes as there are maps. Instead each batch's pass runs in
its own thread and waits at each map until the map has its new weights: one pass in all, and only one layer's
activations in memory. Only one thread runs at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from manyheads.capture.call import Call
from manyheads.capture.interceptor import Interceptor
from manyheads.capture.mask_reading import update_site, visible
from manyheads.common.preserved_state import evaluating
from manyheads.common.run_batch import run
from manyheads.common.types import Arguments, Batch, Function, Keywords
from manyheads.surgery.residual_streams import added

_thread_state = threading.local()  # the Pass that runs in this thread


class Stop(NamedTuple):
    """A pass that waits at a writer: a map whose output is added to the residual stream.

    writer: the name of the map.
    read: (..., width) what it reads; None where attention and its last map are one module.
    written: (..., d_model) what it writes, by the weights it has now.
    stream: (..., d_model) what that is added to.
    real: (batch, length), False for padding; None where there is none, or it is unknown.
    """

    writer: str
    read: Tensor | None
    written: Tensor
    stream: Tensor
    real: Tensor | None


class Pass(TorchFunctionMode):
    """One forward pass in its own thread, made by `passes`."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        super().__init__()
        self.real: Tensor | None = None
        self._model, self._batch = model, batch
        self._pending: dict[int, tuple[str, nn.Module, int, Tensor | None, Tensor]] = {}
        self._stop: Stop | None = None
        self._error: BaseException | None = None
        self._resume, self._reached = threading.Semaphore(0), threading.Semaphore(0)
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def advance(self) -> Stop | None:
        """Go on to the next writer; None at the end of the pass."""
        self._stop = None
        self._resume.release()
        self._reached.acquire()
        if self._error is not None:
            raise self._error
        return self._stop

    def close(self) -> None:
        """End the pass, wherever it is waiting."""
        if self._thread.is_alive():
            self._closed = True
            self._resume.release()
            self._thread.join()

    def wrote(self, name: str, module: nn.Module, read: Tensor | None, written: Tensor) -> None:
        """Record the output of a map."""
        self._pending[id(written)] = name, module, _version(module), read, written

    def __torch_function__(
        self, func: Function, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        # both may have been written, by attention and feed-forward side by side
        for key in added(func, args, self._pending):
            a, b = args[:2]
            name, module, version, read, written = self._pending.pop(key)
            self._wait(Stop(name, read, written, b if a is written else a, self.real))
            refitted = read is not None and _version(module) > version
            output = module.forward(read) if refitted else written
            args = (output, b, *args[2:]) if a is written else (a, output, *args[2:])
        return func(*args, **(kwargs or {}))

    def _wait(self, stop: Stop) -> None:
        self._stop = stop
        self._reached.release()
        self._resume.acquire()
        if self._closed:
            raise _Closed

    def _run(self) -> None:
        self._resume.acquire()
        _thread_state.current = self
        try:
            if not self._closed:
                with torch.no_grad(), self:
                    run(self._model, self._batch)
        except _Closed:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._pending.clear()
            self._reached.release()


def _version(module: nn.Module) -> int:
    """A number that grows whenever the weights of a map are changed in place."""
    return sum(parameter._version for parameter in module.parameters())


class _Closed(BaseException):
    """Unwinds a pass that is closed; a BaseException, so that no model catches it."""


@contextmanager
def passes(
    model: nn.Module, batches: Iterable[Batch], writers: Sequence[str] | None = None
) -> Iterator[list[Pass]]:
    """A context in which the model's passes on these batches wait at each writer, until `Pass.advance`.

    Writers are linear layers (nn.Linear, transformers' Conv1D, and nn.MultiheadAttention as a whole) whose
    output is added, as it is, to something of its shape. The model runs in eval mode. Name the
    writers where you can (for torch's attention, any map within): the outputs of all maps that may be writers
    are kept to the end of the pass, because they might still be added.

    Examples
    --------
    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.inner, self.outer = nn.Linear(2, 3), nn.Linear(3, 2)
    ...     def forward(self, x):
    ...         return x + self.outer(self.inner(x).relu())
    >>> block = Block()
    >>> with passes(block, [torch.ones(5, 2), torch.ones(7, 2)]) as (one, other):
    ...     stop = one.advance()
    ...     stop.writer, stop.read.shape, stop.stream.shape, one.advance()
    ('outer', torch.Size([5, 3]), torch.Size([5, 2]), None)
    """

    def on_call(call: Call) -> None:
        current: Pass | None = getattr(_thread_state, "current", None)
        if current is not None and not call.site.cross:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                real = update_site(call, visible(call))
                current.real = None if real is None else real.expand(call.output.shape[0], -1)

    def wrote(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Any], None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
            current: Pass | None = getattr(_thread_state, "current", None)
            if current is not None:
                fused = isinstance(module, nn.MultiheadAttention)
                current.wrote(name, module, None if fused else args[0], output[0] if fused else output)

        return hook

    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        stack.enter_context(Interceptor(model, on_call))
        for name, module in model.named_modules():
            fused = isinstance(module, nn.MultiheadAttention)
            if writers is not None and not any(
                writer == name or (fused and writer.startswith(f"{name}.")) for writer in writers
            ):
                continue
            if fused or isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
                stack.callback(module.register_forward_hook(wrote(name)).remove)
        paused: list[Pass] = []
        try:
            paused += [Pass(model, batch) for batch in batches]
            yield paused
        finally:
            for each in paused:
                each.close()
