"""Interception: any PyTorch model's run, turned into attention calls.

`Interceptor` keeps the stack of running modules by forward hooks, and while a forward of its model runs in a
thread it puts a TorchFunctionMode on that thread, which sees every torch function however it was imported.
Nothing is left when the context ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import type_before_parametrizations
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from manyheads.capture import handlers, kernels, torch_patches
from manyheads.capture.call import Call, join_calls
from manyheads.capture.frame import Frame, Piece
from manyheads.capture.probe_inputs import Inputs
from manyheads.capture.proof import ForwardCall, Proof, Step, proof_of, proof_reaching, structure_of
from manyheads.capture.site import Site, Sites
from manyheads.capture.tensor_tags import Flow
from manyheads.capture.thread_marks import internal
from manyheads.common.quantised import is_quantised
from manyheads.common.sharded_weights import check_whole_heads
from manyheads.common.types import Arguments, Function, Keywords
from manyheads.nn.orthogonal_rows import without_constraints

Callback = Callable[[Call], Tensor | None]
_MOVES_AXES = {torch.transpose, torch.permute, torch.movedim, torch.swapaxes} | {
    getattr(Tensor, name) for name in ("transpose", "permute", "movedim", "swapaxes")
}


class Hook:
    """A forward hook that copies and pickles of the model do not carry on."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __call__(self, module: nn.Module, *args: object) -> None:
        self.function(module, *args)

    def __deepcopy__(self, memo: object) -> Hook:
        return Hook(_nothing)

    def __reduce__(self) -> tuple[type[Hook], tuple[Function]]:
        return Hook, (_nothing,)


def _nothing(*_: object) -> None:
    pass


class State:
    """What one thread knows while a forward of the model runs in it."""

    def __init__(self, owner: Interceptor, tracing: bool, forward: ForwardCall | None = None) -> None:
        self.owner = owner
        self.forward = forward  # what runs, where it is to be proved
        self.frames: list[Frame] = []
        self.runs: dict[str, int] = {}
        self.counts: dict[str, int] = {}
        self.flow = Flow(owner.constants, tracing)
        self.flow.token_embeddings = None if owner.proof is None else owner.proof.token_embeddings
        self.heads = 0  # of the nn.MultiheadAttention that is running
        self.resumed = False
        self.seen = 0  # calls of attention, or of what looked like it
        self.unreached: set[str] = set()  # modules that run code which no probe comes to
        self.mode = Mode(owner, self)

    def name(
        self, frame: Frame, query: Tensor, key: Tensor | None = None, mask: tuple[object, ...] = ()
    ) -> tuple[str, bool, int]:
        """The site of a call at ``frame``, its path numbered from the second call on; whether its weights are
        those of the last call again (the same queries and keys, for further values); and which of the calls
        for some heads each it is, where a module makes several.

        The proof says which calls belong to one site. Where there is none, queries that continue where the
        last call's ended, in the same memory, are a piece of the same attention (models that loop over
        packed sequences).
        """
        here = Piece(query, key, mask)
        last, frame.piece = frame.piece, here
        if last is not None and here.same(last):
            here.name = last.name
            return last.name, True, max(0, frame.calls - 1) % max(1, self._cycle(frame))
        number, frame.calls = frame.calls, frame.calls + 1
        here.name = self._next_name(frame, last, here)
        if self.owner.reach(self, ("site", here.name)):
            here.name = self._next_name(frame, last, here)  # by the new proof
        if here.name != frame.name:
            frame.name = here.name
            self.counts[frame.path] = self.counts.get(frame.path, 0) + 1
        return here.name, False, number % max(1, self._cycle(frame))

    def _cycle(self, frame: Frame) -> int:
        proof = self.owner.proof
        return 0 if proof is None else proof.cycles.get(frame.path, 0)

    def _next_name(self, frame: Frame, last: Piece | None, here: Piece) -> str:
        proof = self.owner.proof
        guess = proof is None or bool(proof.failed)
        if frame.name is not None and (
            self._cycle(frame) or (guess and last is not None and here.follows(last))
        ):
            return frame.name
        count = self.counts.get(frame.path, 0) + 1
        return frame.path if count == 1 else f"{frame.path}#{count}"


class Mode(TorchFunctionMode):
    """Hands every torch function of one forward pass to the channel that knows it."""

    def __init__(self, owner: Interceptor, state: State) -> None:
        super().__init__()
        self.owner, self.state, self.flow = owner, state, state.flow
        self.channels = handlers.CHANNELS

    def __torch_function__(
        self,
        func: Function,
        types: Iterable[type[Tensor]],
        args: Arguments = (),
        kwargs: Keywords | None = None,
    ) -> object:
        kwargs = kwargs or {}
        frames = self.state.frames
        before, flow = internal.running, self.flow
        if frames and not before:
            frame = frames[-1]
            frame.functions = hash((frame.functions, func, _axes_moved(func, args)))
        if func is F.multi_head_attention_forward:
            return handlers.multi_head(self, func, args, kwargs)
        out = func(*args, **kwargs)
        channel = None if before or (frames and frames[-1].quantised) else self.channels.get(func)
        if channel is None and not ((flow.tracing or flow.tags) and isinstance(out, Tensor | tuple | list)):
            return out
        internal.running = True
        try:
            if channel is not None:
                return channel(self, func, args, kwargs, out)
            flow.follow(func, args, kwargs, out)
        finally:
            internal.running = before
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
        check_whole_heads(model)
        self.model = model
        self.callback = callback
        self.reruns = reruns
        self.tokens = tokens
        self.parts = parts
        self.proof = proof
        self.proofs = [] if proof is None else [proof]  # all that were needed
        self.steps: set[Step] | None = None  # what happens, if it is to be recorded
        self._proves = proof is None
        self._structures: dict[str, int] = {}  # of the parts that were called from outside
        self.sites = Sites()
        self.ran: set[str] = set()
        self.unread: dict[str, str] = {}  # modules whose kernels cannot be read, and why
        self.checked_forms: set[object] = set()  # ways in which opaque kernels were called, at each site
        self.embedded: list[Tensor] | None = None  # the ids of every embedding, if they are to be recorded
        modules = list(model.modules())
        # Held as long as their ids are known: offloaded weights are replaced, and an id would be used again.
        self._held = [x for part in modules for x in (*part._parameters.values(), *part._buffers.values())]
        self.constants = frozenset(map(id, self._held))
        self._quantised = {id(part) for part in modules if is_quantised(part)}
        self._tracing = True
        self.probing = False  # what runs is a probe, whose attention calls are differentiated one by one
        self.follows_streams = True  # tell self-attention from cross-attention, which costs a little
        self._local = threading.local()
        self._handles: list[RemovableHandle] = []
        self._depth = 0
        # torch's own leaves (linear maps, norms, dropout) make no attention calls: leave them their speed
        self._hooked = [part for part in without_constraints(model) if not _is_torch_leaf(part)]

    def __enter__(self) -> Interceptor:
        self._depth += 1
        if self._depth == 1:
            for module in self._hooked:
                begin = module.register_forward_pre_hook(Hook(self._begin), with_kwargs=True)
                self._handles.append(begin)
                self._handles.append(module.register_forward_hook(Hook(self._end), always_call=True))
            torch_patches.add(self)
            kernels.install()
            handlers.open_channels()
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            torch_patches.remove(self)
            kernels.uninstall()
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
        site = self.sites.by_name.get(name)
        if site is None:
            site = self.sites.find(name, heads, kv_heads(), cross)
            self._tracing = True
        if self.proof is not None and site.proof is not self.proof:
            self.proof.describe(site)
        if site.cross is None:
            site.cross = cross
        return site

    def reach(self, state: State, step: Step) -> bool:
        """Something happens in a forward that depends on the code path: a function of attention runs, with
        what ran before it in its module; a call has a number of heads; a site gets its name; a module makes
        no call. Where the probe did not come to it, as when a model takes another path for long sequences,
        another probe is made that does. Returns whether there is another proof now.
        """
        if self.steps is not None:
            self.steps.add(step)
        if state.forward is None or self.proof is None or self.proof.failed or internal.repeating:
            return False
        if step in self.proof.steps or not state.frames:
            return False
        proof = proof_reaching(step, state.forward)
        if proof is None:
            if not state.forward.inputs.stateful or self._is_new(step):
                state.unreached.add(state.frames[-1].path)
            return False
        self._adopt(proof)
        state.flow.token_embeddings = proof.token_embeddings
        return True

    def _is_new(self, step: Step) -> bool:
        """Whether nothing like a step happened in the probe, whatever ran before it."""
        return self.proof is not None and all(step[:3] != other[:3] for other in self.proof.steps)

    def _adopt(self, proof: Proof) -> None:
        self.proof = proof
        if proof not in self.proofs:
            self.proofs.append(proof)

    @property
    def measured(self) -> list[Site]:
        """The sites whose calls the callback got, in the order of their first call."""
        return [site for site in self.sites.by_name.values() if self.parts or not site.refuted]

    def emit(self, call: Call, frame: Frame) -> Tensor | None:
        """Call the callback, with calls for some heads each joined to one unless it takes parts. Calls of a
        refuted site are dropped.
        """
        state = self.state
        if state is not None and state.unreached and _makers(call) & state.unreached:
            call.site.verified, call.site.reason = False, "it runs code that no probe came to"
        if call.site.refuted and not self.parts:
            return None
        if call.site.in_order and not call.again:
            call.self_keys_start = 0 if frame.queries_seen + call.queries > call.keys else frame.queries_seen
            frame.queries_seen = call.self_keys_start + call.queries
        if self.parts or call.output.shape[1] == call.site.heads:
            return self.callback(call)
        frame.parts.append(call)
        if call.heads.stop < call.site.heads:
            return None
        whole, frame.parts = join_calls(frame.parts), []
        if whole.output.shape[1] == call.site.heads and self.callback(whole) is not None:
            message = (
                f"{call.site.name}: this model computes its heads one by one, which cannot be edited here"
            )
            raise ValueError(f"{message}: expected all heads in one call")
        return None

    def _begin(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> None:
        path = self.paths.get(id(module))
        if path is None:  # a copy or a replica that carries our hooks
            return
        state = self.state
        if state is not None and not state.resumed and state.frames and state.frames[0].module is module:
            self._stop(state)  # an interrupted forward left it behind
            state = None
        if state is None:
            if internal.unseen or (not self.reruns and torch_patches.in_backward()):
                return
            torch_patches.stay_eager()
            kernels.refresh()
            forward = None
            if self._proves:
                if path not in self._structures:
                    self._structures[path] = structure_of(module)
                forward = ForwardCall(self.model, module, path, Inputs(args, kwargs), self._structures[path])
                with internal.marked(True):
                    self._adopt(proof_of(forward))
            tracing, self._tracing = (self._tracing or self.tokens) and self.follows_streams, False
            state = self._local.state = State(self, tracing, forward)
            state.mode.__enter__()
        if state.frames:
            state.frames[-1].is_leaf = False
        number = state.runs[path] = state.runs.get(path, 0) + 1
        state.frames.append(Frame(module, path, number, id(module) in self._quantised))
        self.ran.add(path)

    def _end(self, module: nn.Module, args: Arguments, output: object) -> None:
        state = self.state
        if state is None:
            return
        for depth in range(len(state.frames) - 1, -1, -1):
            if state.frames[depth].module is module:
                frame = state.frames[depth]
                if frame.quantised and isinstance(output, Tensor) and state.flow.tracing:
                    state.flow.follow(F.linear, args, {}, output)
                if not frame.calls and (
                    self.steps is not None or (self.proof is not None and frame.path in self.proof.attending)
                ):
                    self.reach(state, ("no call", frame.path))
                del state.frames[depth:]
                if depth and frame.is_leaf:  # what it does is a part of what runs around it
                    parent = state.frames[-1]
                    # a quantised map is a plain one in the probe
                    ran = (F.linear, "") if frame.quantised else (frame.functions,)
                    parent.functions = hash((parent.functions, *ran))
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


def _axes_moved(func: Function, args: Arguments) -> str:
    """What tells two calls of a function apart that put axes in another order."""
    if func in _MOVES_AXES:
        return repr(args[1:])
    return args[0] if func is torch.einsum and isinstance(args[0], str) else ""


def _makers(call: Call) -> set[str]:
    """The modules that computed the scores of a call, and its output."""
    return set() if call.origin is None else {call.origin.key[0], call.origin.frame[0]}


def _is_torch_leaf(module: nn.Module) -> bool:
    parts = all(name == "parametrizations" for name, _ in module.named_children())
    return parts and type_before_parametrizations(module).__module__.startswith("torch.nn.")


def module_paths(model: nn.Module, prefix: str = "") -> dict[int, str]:
    """The path of each module by its id, as if nothing had been compiled, behind ``prefix``. Raises for what
    cannot be seen into.

    >>> list(module_paths(nn.Sequential(nn.Linear(2, 3))).values())
    ['', '0']
    """
    if isinstance(model, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        raise TypeError(
            f"model: got a traced or scripted {type(model).__name__}, which hides what it does; "
            "pass the module it was made from"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    return {
        id(module): ".".join(
            part for part in (*prefix.split("."), *path.split(".")) if part not in ("", "_orig_mod")
        )
        for path, module in model.named_modules()
    }
