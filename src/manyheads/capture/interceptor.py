"""Interception: any PyTorch model's run, turned into attention calls.

`Interceptor` keeps the stack of running modules by forward hooks, and while a forward of its model runs in a
thread it puts a TorchFunctionMode on that thread, which sees every torch function however it was imported.
Nothing is left when the context ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from manyheads.capture import handlers, torch_patches
from manyheads.capture.call import Call, joined
from manyheads.capture.proof import Proof, proof_of, structure_of
from manyheads.capture.site import Site, Sites
from manyheads.capture.tensor_tags import Flow, memory_of

Callback = Callable[[Call], Tensor | None]


class Hook:
    """A forward hook that copies and pickles of the model do not carry on."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __call__(self, module: nn.Module, *args: Any) -> None:
        self.function(module, *args)

    def __deepcopy__(self, memo: Any) -> Hook:
        return Hook(_nothing)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (_nothing,)


def _nothing(*_: Any) -> None:
    pass


class Frame:
    """One running module."""

    __slots__ = ("asked", "calls", "contractions", "module", "name", "number", "parts", "path", "piece")

    def __init__(self, module: nn.Module, path: str, number: int) -> None:
        self.module = module
        self.path = path
        self.number = number  # which run of the module this is
        self.piece: Piece | None = None  # the queries last seen here
        self.calls = 0  # attention calls seen here
        self.asked = 0  # queries of a sequence seen here, where they come in pieces
        self.contractions = 0  # products of weights and values seen here, attention or not
        self.name: str | None = None  # of the site, where all calls are of one
        self.parts: list[Call] = []  # calls for some heads each, until all are there


class Piece:
    """Where in memory the queries and keys of a call are, kept so that nobody reuses it."""

    __slots__ = ("end", "kept", "key", "mask", "name", "query", "start", "storage")

    def __init__(self, query: Tensor, key: Tensor | None, mask: tuple[object, ...]) -> None:
        self.storage, self.kept = memory_of(query), (query, key)
        self.start = int(query.storage_offset())
        self.end = int(self.start + query.shape[-2] * query.stride(-2))
        self.query = query.shape
        self.key = None if key is None else (memory_of(key), key.storage_offset())
        self.mask = mask
        self.name = ""

    def same(self, last: Piece) -> bool:
        """Whether these are the same queries and keys, under the same mask."""
        return (
            self._beside(last)
            and len(self.mask) == len(last.mask)
            and all(
                a is b or (not isinstance(a, Tensor) and a == b)
                for a, b in zip(self.mask, last.mask, strict=True)
            )
            and (self.start, self.query) == (last.start, last.query)
            and self.key is not None
            and self.key == last.key
        )

    def follows(self, last: Piece) -> bool:
        """Whether these queries begin where the last ones ended."""
        return self._beside(last) and self.start == last.end

    def _beside(self, last: Piece) -> bool:
        return self.storage == last.storage


class State:
    """What one thread knows while a forward of the model runs in it."""

    def __init__(self, owner: Interceptor, tracing: bool) -> None:
        self.owner = owner
        self.frames: list[Frame] = []
        self.runs: dict[str, int] = {}
        self.counts: dict[str, int] = {}
        self.flow = Flow(owner.constants, tracing)
        self.flow.token_embeddings = None if owner.proof is None else owner.proof.token_embeddings
        self.heads = 0  # of the nn.MultiheadAttention that is running
        self.resumed = False
        self.mode = Mode(owner, self)

    def name(
        self, frame: Frame, query: Tensor, key: Tensor | None = None, mask: tuple[object, ...] = ()
    ) -> tuple[str, bool, int]:
        """The site of a call at ``frame``, its path numbered from the second call on; whether its weights are
        those of the last call again (the same queries and keys, for further values); and which of the calls
        for some heads each it is, where a module makes several.

        Calls of one site are told by the proof. Where there is none, queries that continue where the last
        call's ended, in the same memory, are a piece of the same attention (models that loop over packed
        sequences).
        """
        here = Piece(query, key, mask)
        last, frame.piece = frame.piece, here
        proof = self.owner.proof
        cycle = 0 if proof is None else proof.cycles.get(frame.path, 0)
        if last is not None and here.same(last):
            here.name = last.name
            return last.name, True, max(0, frame.calls - 1) % max(1, cycle)
        number, frame.calls = frame.calls, frame.calls + 1
        guess = proof is None or bool(proof.failed)
        if frame.name is not None and (cycle or (guess and last is not None and here.follows(last))):
            here.name = frame.name
        else:
            count = self.counts[frame.path] = self.counts.get(frame.path, 0) + 1
            here.name = frame.name = frame.path if count == 1 else f"{frame.path}#{count}"
        return here.name, False, number % max(1, cycle)


class Mode(TorchFunctionMode):
    """Hands every torch function of one forward pass to the channel that knows it."""

    def __init__(self, owner: Interceptor, state: State) -> None:
        super().__init__()
        self.owner = owner
        self.state = state
        self.flow = state.flow
        self.channels = handlers.CHANNELS

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        channel = self.channels.get(func)
        if channel is not None:
            return channel(self, func, args, kwargs)
        out = func(*args, **kwargs)
        flow = self.flow
        if (flow.tracing or flow.tags) and isinstance(out, Tensor | tuple | list):
            flow.follow(func, args, kwargs, out)
        return out


class Interceptor:
    """A context in which ``callback`` is called at each attention call of ``model``, after it was computed.

    What the callback returns, unless None, takes the place of the call's output (batch, heads, queries,
    d_value).

    Parameters
    ----------
    model: any module. Its parts may be run in any thread; calls of other models are not seen.
    callback: gets a `Call`. With ``reruns`` it must do the same each time: gradient checkpointing repeats
        calls during the backward pass, also after the context has ended.
    reruns: whether the callback is called in such repetitions, too (editing needs it, counting must not
        have it).
    tokens: follow token ids to the keys (`Call.tokens`); costs a little.
    parts: whether the callback takes calls for some of a site's heads (`Call.heads`), as a model makes them
        that computes its heads one by one. Without it they are joined, too late to be edited.
    proof: what is known of the model's sites; found out at the first forward unless given.
    prefix: the path of ``model`` inside the model that names are about.

    >>> calls = []
    >>> layer = nn.MultiheadAttention(6, num_heads=2, batch_first=True)
    >>> x = torch.randn(3, 5, 6)
    >>> with Interceptor(nn.Sequential(layer), calls.append):
    ...     _ = layer(x, x, x, need_weights=False)
    >>> calls[0].site.name, calls[0].query.shape
    ('0', torch.Size([3, 2, 5, 3]))
    """

    def __init__(
        self,
        model: nn.Module,
        callback: Callback,
        *,
        reruns: bool = False,
        tokens: bool = False,
        parts: bool = False,
        proof: Proof | None = None,
        prefix: str = "",
    ) -> None:
        self.paths = module_paths(model, prefix)
        self.model = model
        self.callback = callback
        self.reruns = reruns
        self.tokens = tokens
        self.parts = parts
        self.proof = proof
        self._proves = proof is None
        self._structures: dict[str, int] = {}  # of the parts that were called from outside
        self.sites = Sites()
        self.ran: set[str] = set()
        self.embedded: list[Tensor] | None = None  # the ids of every embedding, where somebody wants them
        modules = list(model.modules())
        self.constants = frozenset(
            id(tensor) for part in modules for tensor in (*part._parameters.values(), *part._buffers.values())
        )
        self._tracing = True
        self.follows_streams = True  # tell self-attention from cross-attention, which costs a little
        self._local = threading.local()
        self._handles: list[Any] = []
        self._depth = 0
        # torch's own leaves (linear maps, norms, dropout) make no attention calls: leave them their speed
        self._hooked = [module for module in modules if not _is_torch_leaf(module)]

    def __enter__(self) -> Interceptor:
        self._depth += 1
        if self._depth == 1:
            for module in self._hooked:
                begin = module.register_forward_pre_hook(Hook(self._begin), with_kwargs=True)
                self._handles.append(begin)
                self._handles.append(module.register_forward_hook(Hook(self._end), always_call=True))
            torch_patches.add(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            torch_patches.remove(self)
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            state = self.state
            if (
                state is not None and not state.resumed
            ):  # KeyboardInterrupt skips the hook that would have ended it
                self._stop(state)

    @property
    def state(self) -> State | None:
        """What this thread knows of a forward that is running in it, or None."""
        return getattr(self._local, "state", None)

    def site(
        self, name: str, heads: int, kv_heads: Callable[[], tuple[int, ...]], cross: bool | None
    ) -> Site:
        """The site of this name, made when it is new."""
        known = self.sites.by_name.get(name)
        if known is None:
            known = self.sites.find(name, heads, kv_heads(), cross)
            self._tracing = True
            if self.proof is not None:
                self.proof.tell(known)
        if known.cross is None:
            known.cross = cross
        return known

    @property
    def measured(self) -> list[Site]:
        """The sites whose calls the callback got, in the order of their first call."""
        return [site for site in self.sites.by_name.values() if self.parts or not site.refuted]

    def emit(self, call: Call, frame: Frame) -> Tensor | None:
        """Call the callback, with calls for some heads each joined to one unless it takes parts. What a site
        was wrongly taken for is of use to nobody.
        """
        if call.site.refuted and not self.parts:
            return None
        if call.site.in_order and not call.again:
            call.own = 0 if frame.asked + call.queries > call.keys else frame.asked
            frame.asked = call.own + call.queries
        if self.parts or call.output.shape[1] == call.site.heads:
            return self.callback(call)
        frame.parts.append(call)
        if call.heads.stop < call.site.heads:
            return None
        whole, frame.parts = joined(frame.parts), []
        if whole.output.shape[1] == call.site.heads and self.callback(whole) is not None:
            message = (
                f"{call.site.name}: this model computes its heads one by one, which cannot be edited here"
            )
            raise ValueError(f"{message}: expected all heads in one call")
        return None

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        path = self.paths.get(id(module))
        if path is None:  # a copy or a replica that carries our hooks
            return
        state = self.state
        if state is not None and not state.resumed and state.frames and state.frames[0].module is module:
            self._stop(state)  # an interrupted forward left it behind
            state = None
        if state is None:
            if not self.reruns and torch_patches.in_backward():
                return
            torch_patches.stay_eager()
            if self._proves:
                if path not in self._structures:
                    self._structures[path] = structure_of(module)
                self.proof = proof_of(self.model, module, path, args, kwargs, self._structures[path])
            tracing, self._tracing = (self._tracing or self.tokens) and self.follows_streams, False
            state = self._local.state = State(self, tracing)
            state.mode.__enter__()
        number = state.runs[path] = state.runs.get(path, 0) + 1
        state.frames.append(Frame(module, path, number))
        self.ran.add(path)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        state = self.state
        if state is None:
            return
        for depth in range(len(state.frames) - 1, -1, -1):
            if state.frames[depth].module is module:
                del state.frames[depth:]
                break
        if not state.frames and not state.resumed:
            self._stop(state)

    def _stop(self, state: State) -> None:
        self._local.state = None
        state.flow.tags.clear()
        state.mode.__exit__(None, None, None)

    @contextmanager
    def resume(self, frames: list[Frame], counts: dict[str, int]) -> Iterator[None]:
        """Go on as inside the forward that had these frames and counts: for a checkpoint's repetition."""
        before = self.state
        state = State(self, tracing=False)
        state.frames, state.counts, state.resumed = list(frames), dict(counts), True
        with self:
            self._local.state = state
            try:
                with state.mode:
                    yield
            finally:
                self._local.state = before


def _is_torch_leaf(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and next(module.children(), None) is None


def module_paths(model: nn.Module, prefix: str = "") -> dict[int, str]:
    """The path of each module by its id, as if nothing had been compiled, behind ``prefix``. Raises for what
    cannot be seen into.

    >>> list(module_paths(nn.Sequential(nn.Linear(2, 3))).values())
    ['', '0']
    """
    if isinstance(model, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        raise TypeError(
            f"model: got a traced or scripted {type(model).__name__}, which shows nothing of what it does; "
            "give the module it was made from"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    return {
        id(module): ".".join(
            part for part in (*prefix.split("."), *path.split(".")) if part not in ("", "_orig_mod")
        )
        for path, module in model.named_modules()
    }
