"""Under which conditions a probe runs: unseen, without dropout, and with a message where it takes long."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from manyheads.capture.call import SDPA
from manyheads.capture.thread_marks import internal
from manyheads.capture.torch_patches import without_checkpoints
from manyheads.common.types import Arguments, Function, Keywords

_DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout
}  # fmt: skip
_SLOW = 2.0  # seconds after which a message is shown


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """A context in which no other mode sees the probe, and the random state is restored afterwards."""
    modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    devices = {x.device.index for x in module.parameters() if x.device.type == "cuda"}
    try:
        with ExitStack() as stack:
            for mode in reversed(modes):
                if isinstance(mode, DeviceContext):
                    stack.enter_context(mode)
            if all(type(mode).__module__.startswith("torch.") for mode in _get_current_dispatch_mode_stack()):
                stack.enter_context(_disable_current_modes())  # those that count or trace
            stack.enter_context(internal.marked(False))  # what runs now is a model
            stack.enter_context(without_checkpoints())
            stack.enter_context(torch.random.fork_rng(devices=[d for d in devices if d is not None]))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            for device in {x.device.type for x in module.parameters()} | {"cpu"}:
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


class WithoutDropout(TorchFunctionMode):
    """A context in which nothing is dropped, whatever a model in training mode asks for."""

    def __torch_function__(
        self, func: Function, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func in SDPA:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = kwargs if len(args) > 4 else kwargs | {"dropout_p": 0.0}
        return func(*args, **kwargs)


@contextmanager
def message_when_slow() -> Iterator[None]:
    """Show a message at a terminal when the probe takes long."""
    text = "manyheads: probing the model once to find out what its heads are ..."
    timer = threading.Timer(_SLOW, lambda: print(text, file=sys.stderr))
    if sys.stderr is not None and sys.stderr.isatty():
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
