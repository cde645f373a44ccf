"""Devices that have no float64: the verbs that look at heads run there, and say what they say on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

ROOT = Path(__file__).parent.parent.parent

# A process of its own: a device that was pretended once is torch's accelerator from then on.
SCRIPT = """
import copy, sys
import torch
from torch import nn
import manyheads as mh
from manyheads.common import devices
from tests.helpers.pretend_device import OnDevice, Pretended, moved, reads

devices.WITHOUT_FLOAT64.add("pretended")
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(23, 12)
        layer = nn.TransformerEncoderLayer(12, 3, 24, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.out = nn.Linear(12, 23)

    def forward(self, ids):
        return self.out(self.layers(self.embedding(ids)))

def watched(model, ids, statistics):
    with torch.no_grad(), mh.watch(model, statistics, profiles=True) as seen:
        model(ids)
    return seen.table

def silenced(model, ids):
    with torch.no_grad(), mh.silence(model, {0: [1]}):
        return model(ids)

def inspected(model, ids):
    return mh.heads.inspect.count(model, [(ids.numel(), ids)]).table

def waits(context, model, ids):
    "What the second forward in a context reads from the device."
    with torch.no_grad(), context:
        model(ids)
        reads.clear()
        model(ids)
        return list(reads)

def ranked(method):
    loss = (lambda result, batch: result.square().mean()) if method == "gradient" else None
    return lambda model, ids: mh.importance(model, [ids], method, loss=loss)

VERBS = {
    "core": lambda model, ids: watched(model, ids, "core"),
    "full": lambda model, ids: watched(model, ids, "full"),
    "silence": silenced,
    "inspect": inspected,
    "maps": lambda model, ids: mh.maps(model, ids, {0: [1]})["layers.layers.0.self_attn"].weights,
    "roles": lambda model, ids: mh.roles(model, [ids]),
    "diversity": lambda model, ids: mh.diversity(model, [ids]),
    "elimination": lambda model, ids: mh.importance(model, [ids], "elimination"),
} | {method: ranked(method) for method in
     ("fisher", "gradient", "leave-one-out", "confidence", "output-norm", "relevance", "gates", "random")}

def numbers(found):
    if isinstance(found, torch.Tensor):
        return {"": found}
    return {name: found[name] for name in found.sums} | dict(getattr(found, "matrices", None) or {})

plain, ids = Net().eval(), torch.randint(23, (3, 7))
expected = {name: numbers(verb(plain, ids)) for name, verb in VERBS.items()}
try:
    with Pretended():
        OnDevice(torch.ones(2)).double()
except TypeError as error:
    assert "float64" in str(error)
else:
    raise AssertionError("the pretended device has float64")
with Pretended():
    there, read = moved(copy.deepcopy(plain)), moved(ids)
    for name, verb in VERBS.items():
        found = {column: value.cpu() for column, value in numbers(verb(there, read)).items()}
        assert found.keys() == expected[name].keys(), name
        for column, value in expected[name].items():
            assert torch.allclose(found[column], value, rtol=1e-3, atol=1e-3, equal_nan=True), (name, column)
        print(name)
    assert waits(mh.silence(there, {0: [1]}), there, read) == []
    assert waits(mh.watch(there), there, read) == []
    assert set(waits(mh.watch(there, "full"), there, read)) <= {"_to_copy"}  # float64, on the host
"""

# The same of a run of training, with its looks at heads and its evaluation.
TRAINING = """
import sys
import torch
from accelerate import PartialState
import manyheads as mh
from manyheads.common import devices
from manyheads.training import loop
from tests.helpers.pretend_device import DEVICE, OnDevice, Pretended

devices.WITHOUT_FLOAT64.add("pretended")
torch.pretended.get_amp_supported_dtype = lambda: [torch.bfloat16]
torch.__future__.set_overwrite_module_params_on_conversion(True)
folder, kinds, update = sys.argv[1], [], loop.Loop._update

def looked_at(self, *arguments):
    kinds.append(type(next(self.model.parameters()).data))
    return update(self, *arguments)

loop.Loop._update = looked_at

def trained(out):
    task = mh.tasks.find("language")(d_model=12, heads=2, layers=1, context=16, dropout=0.0)
    settings = {"steps": 4, "evaluate_every": 4, "watch_every": 2, "batch_tokens": 64}
    return mh.train(task, data=f"{folder}/text.txt", out=f"{folder}/{out}", **settings).metrics["loss"]

PartialState(cpu=True)
expected = trained("cpu")
PartialState._shared_state["device"] = DEVICE
with Pretended():
    loss = trained("pretended")
assert kinds == [torch.Tensor] * 4 + [OnDevice] * 4, kinds
assert abs(loss - expected) < 1e-3, (loss, expected)
print("trained")
"""


PRETENDING = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no backends written in Python",
)


def ran(*arguments):
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@PRETENDING
def test_a_device_without_float64_says_what_the_cpu_says():
    assert len(ran(SCRIPT)) == 16


@PRETENDING
def test_training_on_a_device_without_float64(tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat and saw the dog run to the tree\n" * 60)
    assert ran(TRAINING, str(tmp_path))[-1] == "trained"
