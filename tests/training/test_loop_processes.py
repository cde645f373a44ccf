"""Two processes learn what one learns alone: the same global batches, weighted by tokens."""

import os
import subprocess
import sys

import pytest

from manyheads.models.folder import load
from manyheads.tasks.translation import Translation
from manyheads.training.log import read
from manyheads.training.train import train

MODEL = {"d_model": 10, "heads": 5, "layers": 1, "dropout": 0.0, "vocabulary": 280}
OPTIONS = {
    "steps": 4, "batch_tokens": 61, "warmup": 1, "learning_rate": 0.01, "evaluate_every": 4,
    "evaluate_examples": 5, "watch_every": 2, "seed": 3, "diversity": "orthogonality=0.5",
    "orthogonal": "value",
}  # fmt: skip
# What `accelerate launch` runs; the command itself also imports all else that accelerate can do.
LAUNCH = [
    sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
    "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
]  # fmt: skip
# Every Python that starts leaves a file behind: there really were two.
SEEN = "import os; open(f\"{0}/rank-{{os.environ.get('RANK')}}\", 'w')"


def test_two_processes_are_one(tmp_path):
    """Sentences of very different lengths: an average of the processes' averages would be something else."""
    data = tmp_path / "train"
    lines = ["a", "some words", "rather many more words in this sentence", "no", "two of them here"] * 9
    (tmp_path / "train.en").write_text("\n".join(lines))
    (tmp_path / "train.de").write_text("\n".join(line.upper() for line in reversed(lines)))
    given = {"data": data, "out": tmp_path / "two", "tracker": "none", "accumulate": 2, **MODEL, **OPTIONS}
    (tmp_path / "sitecustomize.py").write_text(SEEN.format(tmp_path))
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    done = subprocess.run(
        [*LAUNCH, "-m", "manyheads", "train", "translation", *flags],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "4 steps" in done.stdout
    assert {"rank-0", "rank-1"} <= {path.name for path in tmp_path.iterdir()}
    train(Translation(**MODEL), str(data), out=tmp_path / "one", **OPTIONS)
    one, two = (read(tmp_path / name / "log.jsonl") for name in ("one", "two"))
    assert len(one) == len(two) == 4
    assert len({line["tokens"] for line in one}) > 1
    for a, b in zip(one, two, strict=True):
        assert a["tokens"] == b["tokens"]
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)
        assert a["gradient_norm"] == pytest.approx(b["gradient_norm"], rel=1e-4)
        assert a["diversity"] == pytest.approx(b["diversity"], abs=1e-4)
    assert one[-1]["valid"] == pytest.approx(two[-1]["valid"], abs=1e-4)


CLIPPED = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import manyheads as mh

dist.init_process_group("gloo")
torch.manual_seed(0)
model = mh.Decoder(12, heads=3, layers=1, vocabulary=17)
with torch.no_grad():
    model.blocks[0].attention.query.weight.mul_(20)
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
health = mh.HeadHealth(wrapped, every=2, clip=3.0, clip_every=1)
torch.manual_seed(1 + dist.get_rank())  # another share of the batch each
for _ in range(3):
    health.before_step()
    loss = wrapped(torch.randint(17, (2, 7))).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    health.after_step(loss)
weights = torch.cat([p.detach().flatten() for p in model.parameters()])
both = [torch.empty_like(weights) for _ in range(2)]
dist.all_gather(both, weights)
assert torch.equal(*both) and health.clipped
acts = [None, None]
dist.all_gather_object(acts, [tuple(act) for act in health.clipped])
assert acts[0] == acts[1], acts
assert health.history.steps == ([2] if dist.get_rank() == 0 else [])
print("agreed", flush=True)
dist.destroy_process_group()
"""


def test_two_processes_clip_alike_and_one_of_them_looks(tmp_path):
    (tmp_path / "clipped.py").write_text(CLIPPED)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, str(tmp_path / "clipped.py")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("agreed") == 2


DYNAMIC = """
import sys
import torch
import torch.distributed as dist

import manyheads as mh

text, out = sys.argv[1:]
task = mh.tasks.find("language")(context=16, d_model=12, heads=4, layers=2)
options = dict(steps=24, batch_tokens=160, evaluate_every=12, evaluate_examples=3, watch_every=0)
result = mh.train(task, text, out=out, dynamic=True, final_heads=0.5, **options)
acts = [None, None]
dist.all_gather_object(acts, [str(act) for act in result.dynamic.acts])
assert acts[0] == acts[1], acts
assert any("cut" in act for act in acts[0]), acts
weights = torch.cat([p.detach().flatten() for p in result.model.parameters()])
both = [torch.empty_like(weights) for _ in range(2)]
dist.all_gather(both, weights)
assert torch.equal(*both)
print("agreed", flush=True)
dist.destroy_process_group()
"""


def test_two_processes_change_the_same_heads(tmp_path):
    """What comes out is one ordinary smaller model, the same in both."""
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 60)
    (tmp_path / "dynamic.py").write_text(DYNAMIC)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, str(tmp_path / "dynamic.py"), str(tmp_path / "text.txt"), str(tmp_path / "run")],
        env=os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("agreed") == 2
    assert sum(block.attention.heads for block in load(tmp_path / "run").blocks) == 4
