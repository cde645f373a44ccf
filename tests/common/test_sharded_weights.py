"""Models whose weights are elsewhere: offloaded, gathered for each call (FSDP2), or split by heads."""

from __future__ import annotations

import os
import subprocess
import sys

import accelerate
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.helpers.models import llama_config

import manyheads as mh
from manyheads.common.devices import device_of, is_offloaded

COLUMNS = ("entropy", "confidence", "distance", "largest_logit", "output_norm")


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = llama_config(**sizes, intermediate_size=28, vocab_size=102)
    return transformers.LlamaForCausalLM(config).eval()


IDS = torch.arange(7, 29).view(2, 11)


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_an_offloaded_model_has_the_same_tables(where, tmp_path):
    model = llama()
    with torch.no_grad(), mh.watch(model, statistics="full") as expected:
        model(IDS)
    ranking = mh.importance(model, [IDS], method="fisher")
    cpu = torch.device("cpu")
    if where == "cpu":
        accelerate.cpu_offload(model, execution_device=cpu)
    else:
        accelerate.disk_offload(model, tmp_path, execution_device=cpu)
    assert is_offloaded(model)
    assert next(model.parameters()).device.type == "meta"
    assert device_of(model) == cpu
    with torch.no_grad(), mh.watch(model, statistics="full") as seen:
        model(IDS)
    for name in COLUMNS:
        assert torch.allclose(seen.table[name], expected.table[name], atol=1e-6), name
    assert not seen.sites[0].verified  # there is nothing to probe, and it is said
    again = mh.importance(model, [IDS], method="fisher")
    assert torch.allclose(again["importance"], ranking["importance"], rtol=1e-5)
    with pytest.raises(ValueError, match="offloaded or sharded, and not in memory to be changed"):
        mh.cut(model, {0: [0, 1, 2]}, unverified="allow")


SHARDED = """
import sys
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
import manyheads as mh

folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
ids = torch.arange(7, 29).view(2, 11)

def opened():
    return transformers.LlamaForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32).eval()

model = opened()
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
with torch.no_grad(), mh.watch(model, statistics="full") as seen:
    model(ids)
columns = {name: seen.table[name] for name in sys.argv[3].split()}
columns["importance"] = mh.importance(model, [ids], method="fisher")["importance"]
save_file(columns, f"{folder}/{rank}.safetensors")
attempts = {"cut": lambda model=model: mh.cut(model, {0: [0, 1, 2]})}
model = opened()
for layer in model.model.layers:
    plan = dict.fromkeys(("q_proj", "k_proj", "v_proj"), ColwiseParallel()) | {"o_proj": RowwiseParallel()}
    parallelize_module(layer.self_attn, mesh, plan)
with torch.no_grad():
    assert torch.allclose(model(ids).logits, opened()(ids).logits, atol=1e-5)  # split, and right
attempts["watch"] = lambda: mh.watch(model).__enter__()
attempts["silence"] = lambda: mh.silence(model, {0: [1]}).__enter__()
attempts["importance"] = lambda: mh.importance(model, [ids], method="fisher")
from transformers.distributed import DistributedConfig  # what transformers itself does

def spread(**how):
    config = DistributedConfig(**how)
    return transformers.LlamaForCausalLM.from_pretrained(f"{folder}/model", distributed_config=config).eval()

with torch.no_grad(), mh.watch(spread(fsdp_size=2), statistics="full") as seen:
    seen.model(ids)
save_file({name: seen.table[name] for name in sys.argv[3].split()}, f"{folder}/fsdp-{rank}.safetensors")
stage = spread(pp_size=2)
with torch.no_grad(), mh.watch(stage, statistics="full") as seen:
    stage(ids)
save_file({name: seen.table[name] for name in sys.argv[3].split()}, f"{folder}/stage-{rank}.safetensors")
assert seen.table["layer"] == [rank] * 6, seen.table["layer"]
other = f"model.layers.{1 - rank}"
assert seen.missed[other] == "another process computes it (pipeline parallelism)"
try:
    mh.importance(stage, [ids], method="fisher")
except ValueError as error:
    assert "is computed by another process" in str(error)
split = spread(tp_size=2)
attempts["tp_plan"] = lambda: mh.watch(split).__enter__()
for name, attempt in attempts.items():
    try:
        attempt()
    except ValueError as error:
        print(name, error)
dist.destroy_process_group()
"""


def test_two_processes_see_all_heads_or_refuse(tmp_path):
    """FSDP2: the table of one process. Tensor parallelism: one sentence, and never two heads as one. Stages
    of a pipeline: the rows of their layers, which are numbered as in the whole model.
    """
    model = llama()
    model.save_pretrained(tmp_path / "model")
    with torch.no_grad(), mh.watch(model, statistics="full") as seen:
        model(IDS)
    expected = {name: seen.table[name] for name in COLUMNS}
    expected["importance"] = mh.importance(model, [IDS], method="fisher")["importance"]
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", SHARDED, str(tmp_path), str(rank), " ".join(COLUMNS)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
        )
        for rank in (0, 1)
    ]
    printed = [run.communicate(timeout=300)[0].splitlines() for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert printed[0] == printed[1]
    assert [line.split()[0] for line in printed[0]] == ["cut", "watch", "silence", "importance", "tp_plan"]
    assert "offloaded or sharded" in printed[0][0]
    assert all("tensor parallelism" in line for line in printed[0][1:])
    for rank in (0, 1):
        columns = load_file(tmp_path / f"{rank}.safetensors")
        for name, values in expected.items():
            assert torch.allclose(columns[name], values, rtol=1e-5, atol=1e-6), name
        columns = load_file(tmp_path / f"fsdp-{rank}.safetensors")
        for name in COLUMNS:
            assert torch.allclose(columns[name], expected[name], atol=1e-6), name
    stages = [load_file(tmp_path / f"stage-{rank}.safetensors") for rank in (0, 1)]
    for name in COLUMNS:  # a layer each
        joined = torch.cat([stage[name] for stage in stages])
        assert torch.allclose(joined, expected[name], atol=1e-6), name
