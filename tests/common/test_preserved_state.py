"""Every public call leaves the model, the random generators and torch's settings as it found them."""

import contextlib
import random
import signal
import subprocess
import sys
from collections import deque
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as hooks_of_all
from torch.overrides import _get_current_function_mode_stack

import manyheads as mh
from manyheads.common.preserved_state import evaluating, flushes_denormals, seed_generators, untouched
from manyheads.data.examples import Examples
from manyheads.heads.along_sequence import along
from manyheads.heads.importance import METHODS
from manyheads.heads.inspect import count
from manyheads.models import open as models
from manyheads.nn.blocks import TransformerBlock
from manyheads.surgery.pruning_curve import pruning_curve
from manyheads.tasks.language import Language
from manyheads.training.evaluation import evaluate
from manyheads.training.train import train
from manyheads.view.document import document, of_batches
from manyheads.view.report import report_html

TOKENS = 23


class Trouble:
    """Counts the runs of a model and of its copies, and raises in one of them."""

    def __init__(self):
        self.runs, self.at, self.error = 0, None, None

    def __deepcopy__(self, memo):
        return self

    def run(self):
        self.runs += 1
        if self.runs - 1 == self.at:
            raise self.error("inside the model")


class Net(nn.Module):
    """A model that leaves traces whenever it runs, in eval mode, too, and whose modules are not all alike."""

    def __init__(self):
        super().__init__()
        self.trouble = Trouble()
        self.embedding = nn.Embedding(TOKENS, 12)
        self.blocks = nn.ModuleList(TransformerBlock(12, heads=3, dropout=0.1) for _ in range(2))
        self.norm = nn.BatchNorm1d(12)
        self.register_buffer("runs", torch.zeros((), dtype=torch.int64))
        self.register_buffer("places", torch.zeros(0), persistent=False)
        self.longest = 0
        self.table = torch.zeros(3)  # no buffer
        self.kept = {"lengths": [], "last": deque(maxlen=2), "seen": set()}
        self.out = nn.Linear(12, TOKENS)

    def forward(self, ids):
        self.trouble.run()
        self.runs += 1
        torch.rand(()), np.random.random(), random.random()
        self.table[1] += 1
        for add in (self.kept["lengths"].append, self.kept["last"].append, self.kept["seen"].add):
            add(ids.shape)  # as modules do that keep their keys
        self.kept[self.trouble.runs] = self.table
        if ids.shape[1] > self.longest:  # as rotary tables grow
            self.longest = ids.shape[1]
            self.places = torch.linspace(0, 1, self.longest)
        x = self.embedding(ids) + self.places[: ids.shape[1], None]
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x.transpose(1, 2)).transpose(1, 2))


def make():
    with torch.random.fork_rng():
        seed_generators(3)
        model = Net()
    model.train()
    model.blocks[0].eval()  # a frozen part, as in fine-tuning
    model.blocks[0].requires_grad_(False)
    model.out.bias.grad = torch.ones(TOKENS)
    return model


def batches():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(TOKENS, (3, 7), generator=generator) for _ in range(2)]


HOOKS = [name for name in vars(hooks_of_all) if name.startswith("_global_") and "hook" in name]


def state_of(model):
    """All that may not change, as things that == compares."""
    found = {}
    for name, module in model.named_modules():
        found[name] = {
            "training": module.training,
            "attributes": sorted(module.__dict__),
            "hooks": {key: list(value) for key, value in vars(module).items() if "hook" in key and value},
        }
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            found[kind, name] = (
                id(tensor), tensor.tolist(), tensor.requires_grad, tensor.dtype, tensor.device,
                None if tensor.grad is None else tensor.grad.tolist(),
            )  # fmt: skip
    # what torch.manual_seed leaves for a device that is used later
    found["seed of devices"] = id(torch.cuda._lazy_seed_tracker.manual_seed_all_cb)
    if isinstance(model, Net):
        found["longest"], found["table"] = model.longest, model.table.tolist()
        found["kept"] = repr(model.kept)
    return found


def state_of_torch():
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": repr(np.random.get_state()),
        "python": random.getstate(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "deterministic": torch.get_deterministic_debug_mode(),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "native attention": torch.backends.mha.get_fastpath_enabled(),
        "denormals": flushes_denormals(),
        "modes": len(_get_current_function_mode_stack()),
        "hooks": {name: list(getattr(hooks_of_all, name) or ()) for name in HOOKS},
        "attention": id(F.scaled_dot_product_attention),
        "softmax": (id(F.softmax), id(torch.softmax), id(torch.Tensor.softmax)),
        "signals": [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)],
    }


def loss(result, batch):
    return result.square().mean()


def watched(model, tmp_path, statistics="core"):
    with mh.watch(model, statistics), untouched(model):  # what runs inside is the caller's doing
        model(batches()[0])


def silenced(model, tmp_path):
    with mh.silence(model, {0: [1]}), untouched(model):
        model(batches()[0])


def silenced_by_means(model, tmp_path):
    with mh.silence(model, {0: [1]}, mean_of=batches()), untouched(model):
        model(batches()[0])


def terms(model, tmp_path):
    terms = mh.diversity_terms(model, outputs=1, attention=1, orthogonality=1, batch=batches()[0])
    with terms, untouched(model):
        model(batches()[0])


def gated(model, tmp_path):
    with mh.gates(model) as gates, untouched(model):
        model(batches()[0]).sum()
    del gates


def cut_and(verb):
    def call(model, tmp_path):
        small = mh.cut(model, {0: [1]}, batches()[0])
        before = state_of(small)
        try:
            verb(small, model, tmp_path)
        finally:
            after = state_of(small)
            kept = {key for key in before if not (isinstance(key, tuple) and key[0] == "parameter")}
            assert {key: after[key] for key in kept} == {key: before[key] for key in kept}

    return call


def save(small, model, tmp_path):
    mh.save(small, tmp_path / "saved")
    mh.load(tmp_path / "saved", factory=make)


def widget(model, tmp_path):
    with evaluating(model), mh.watch(model) as seen:
        model(batches()[0])
    mh.widget(seen, model, batches())


def page(model, tmp_path):
    with evaluating(model), mh.watch(model) as seen:
        model(batches()[0])
    report_html(document(seen.table, model, of_batches(batches(), model)))


def ranked(model, tmp_path, method):
    mh.importance(model, batches(), method, loss=loss if method == "gradient" else None)


class CountsLetters:
    """The part of a task that `evaluate` needs."""

    def collate(self, examples):
        return torch.stack(examples)

    def measure(self, model, batch):
        return model(batch).mean().item()

    def metrics(self, parts):
        return {"mean": sum(parts)}


def measured(model, tmp_path):
    rows = torch.cat(batches())
    evaluate(CountsLetters(), model, Examples([7] * len(rows), lambda i, random: rows[i]), batch_tokens=14)


VERBS = {
    "watch": watched,
    "watch full": lambda model, tmp_path: watched(model, tmp_path, "full"),
    "silence": silenced,
    "gates": gated,
    "maps": lambda model, tmp_path: mh.maps(model, batches()[0], {0: [1]}),
    "roles": lambda model, tmp_path: mh.roles(model, batches()),
    "diversity": lambda model, tmp_path: mh.diversity(model, batches()),
    **{f"importance {method}": partial(ranked, method=method) for method in METHODS},
    "elimination": lambda model, tmp_path: mh.importance(model, batches(), "elimination"),
    "plan": lambda model, tmp_path: mh.plan(mh.importance(model, batches()), keep=0.5).check(model),
    "cut": lambda model, tmp_path: mh.cut(model, {0: [1], 1: [0, 2]}, batches()[0]),
    "refit": cut_and(lambda small, model, tmp_path: mh.refit(small, batches(), teacher=model)),
    "recover": cut_and(lambda small, model, tmp_path: mh.recover(small, batches(), teacher=model, steps=2)),
    "card": cut_and(lambda small, model, tmp_path: mh.card(model, small, batches(), repeats=1)),
    "save and load": cut_and(save),
    "prune": lambda model, tmp_path: mh.prune(model, batches(), keep=0.5, refit=True, recover=2),
    "curve": lambda model, tmp_path: pruning_curve(
        model, batches(), batches(), methods=["fisher"], shares=(0.5,)
    ),
    "inspect": lambda model, tmp_path: mh.inspect(model, batches(), out=tmp_path / "out"),
    "count": lambda model, tmp_path: count(model, [(1, batch) for batch in batches()]),
    "evaluate": measured,
    "page": page,
    "widget": widget,
    "along": lambda model, tmp_path: along(model, batches()),
    "grow": lambda model, tmp_path: mh.grow(model, {0: 1}, batches()[0]),
    "compare": lambda model, tmp_path: mh.compare(model, make(), batches()),
    "prices": lambda model, tmp_path: mh.head_prices(model, batches()[0]),
    "merge": lambda model, tmp_path: mh.merge(model, 1, batches(), recover=2),
    "show": lambda model, tmp_path: mh.show(model, batches()[0]),
    "silence by means": silenced_by_means,
    "terms": terms,
}


def held_to_it(verb, model, tmp_path, errors=()):
    before, torch_before = state_of(model), state_of_torch()
    with contextlib.suppress(*errors):
        verb(model, tmp_path)
    after, torch_after = state_of(model), state_of_torch()
    assert {name for name in before if after.get(name) != before[name]} == set()
    assert set(after) == set(before)
    assert {name for name in torch_before if torch_after[name] != torch_before[name]} == set()


@pytest.mark.parametrize("name", VERBS)
def test_a_verb_leaves_everything_as_it_was(name, tmp_path):
    held_to_it(VERBS[name], make(), tmp_path)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("name", VERBS)
def test_a_verb_that_fails_leaves_everything_as_it_was(name, error, tmp_path):
    model = make()
    VERBS[name](model, tmp_path / "first")
    runs = model.trouble.runs
    assert runs
    for at in sorted({0, runs - 1, random.Random(name).randrange(runs)}):
        model = make()
        model.trouble.at, model.trouble.error = at, error
        held_to_it(VERBS[name], model, tmp_path / str(at), (RuntimeError, ValueError, KeyboardInterrupt))
        assert model.trouble.runs > at  # it was raised


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("flushing", [False, True])
def test_training_leaves_everything_as_it_was(error, flushing, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} and {n + 1} are {2 * n + 1}.\n" for n in range(31)), encoding="utf-8")

    def tell(report):
        if error is not None and report.step == 2:
            raise error("inside a callback")

    options = {"batch_tokens": 130, "steps": 3, "evaluate_every": 2, "save_every": 2, "watch_every": 2}
    task = Language(d_model=10, heads=5, layers=1, context=13, dropout=0.1)
    torch.set_flush_denormal(flushing)
    try:
        before = state_of_torch()
        with contextlib.suppress(RuntimeError, KeyboardInterrupt):
            train(task, str(text), out=tmp_path / "out", callbacks=[tell], **options)
        after = state_of_torch()
    finally:
        torch.set_flush_denormal(False)
    assert {name for name in before if after[name] != before[name]} == set()


def test_generating_leaves_the_model_and_draws_from_the_callers_numbers():
    model = mh.Decoder(12, heads=3, layers=1, vocabulary=TOKENS, dropout=0.1)
    model.blocks[0].eval()
    before, torch_before = state_of(model), state_of_torch()
    mh.generate(model, torch.ones(1, 3, dtype=torch.int64), new_tokens=4, temperature=1.0)
    assert state_of(model) == before
    after = state_of_torch()
    assert {name for name in after if after[name] != torch_before[name]} == {"torch"}


FRESH = """
import random, tempfile
import torch, manyheads as mh
model, ids = mh.Decoder(12, heads=3, layers=2, vocabulary=17), torch.randint(17, (3, 7))
state = random.getstate()
mh.show(model, ids), mh.inspect(model, [ids], out=tempfile.mkdtemp() + "/out")
assert random.getstate() == state
"""


def test_what_is_imported_by_the_first_call_draws_no_random_numbers():
    subprocess.run([sys.executable, "-c", FRESH], check=True)


def test_a_model_that_is_opened_leaves_torch_as_it_was():
    before = state_of_torch()
    models.open_model()
    assert state_of_torch() == before


def test_a_module_that_builds_itself_when_it_first_runs_keeps_what_it_built():
    lazy = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    with evaluating(lazy):
        lazy(torch.ones(2, 5))
    assert lazy[0].weight.shape == (3, 5)
    assert all(module.training for module in lazy.modules())


def test_a_buffer_that_nobody_wrote_to_is_not_written_to():
    norm = nn.BatchNorm1d(3)
    x = torch.randn(5, 3, requires_grad=True)
    y = norm.eval()(x) * norm.running_var
    with evaluating(norm):
        norm(x)
    y.sum().backward()  # raises if what it needs was changed in place
    assert x.grad is not None


def test_settings_that_a_model_changes_are_put_back():
    torch_before = state_of_torch()
    with contextlib.suppress(KeyboardInterrupt), untouched():
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_flush_denormal(True)
        torch.set_grad_enabled(False)
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
        raise KeyboardInterrupt
    assert state_of_torch() == torch_before
