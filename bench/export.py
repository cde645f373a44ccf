"""Whether cut models get out, on the architectures that `bench.coverage_cut` cuts: reloaded, and as ONNX.

`python -m bench.export [NAME ...] [--out DIR] [--jobs N] [--again]`. Each architecture is cut unevenly, as
there, and saved. ``from_pretrained`` of its class must load the folder to the outputs of `mh.load`, to the
bit. Then `mh.export` writes ONNX files, runs them in onnxruntime, and refuses what differs by more than 1e-4;
its refusals are collected by name. The architectures are those of transformers that DIR/cut.json has as cut.
Results are kept in DIR/export.json, so that a stopped run goes on where it was.
"""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import manyheads as mh
from bench import coverage, harness
from bench.coverage_cut import (
    CUT,
    FAILED,
    NONE,
    REFUSED,
    choose,
    collect,
    measure,
    options,
    refusal,
    sites_of,
)
from manyheads.common.compare_outputs import seeded_evaluation, tensors
from manyheads.common.errors import describe_error

SECONDS = 600  # of each architecture: exporting takes longer than cutting
EXPORTED, RELOADED, LOST = "reloads, runs as ONNX", "reloads, no ONNX", "does not reload"


def take_out(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Cut a model, save it, load it with transformers, and export it: a verdict and the reason."""
    heads = choose(sites_of(model, batch))
    if not heads:
        return {"status": NONE, "reason": ""}
    try:
        small: Any = mh.cut(model, heads, batch=batch).eval()
    except Exception as error:
        return refusal(error, "cut: ")
    with tempfile.TemporaryDirectory() as folder:
        try:
            mh.save(small, f"{folder}/small")
            again = type(small).from_pretrained(f"{folder}/small")
            if not _equal(mh.load(f"{folder}/small"), again, batch):
                return {"status": LOST, "reason": "other outputs than mh.load"}
        except Exception as error:
            return {"status": LOST, "reason": describe_error(error, 300)}
        try:
            done = mh.export(small, to="onnx", out=f"{folder}/onnx", batch=batch)
        except Exception as error:
            return {"status": RELOADED, "reason": str(error)[:300]}
    return {"status": EXPORTED, "reason": "; ".join(done.notes), "differences": done.differences}


def _equal(a: nn.Module, b: nn.Module, batch: dict[str, Any]) -> bool:
    with seeded_evaluation(a):
        first = dict(tensors(a(**batch)))
    with seeded_evaluation(b):
        second = dict(tensors(b(**batch)))
    return first.keys() == second.keys() and all(
        torch.equal(first[name].nan_to_num(), second[name].nan_to_num()) for name in first
    )


def report(results: dict[str, dict[str, Any]]) -> str:
    """The table: what reloads, what runs as ONNX, and every refusal."""
    by: dict[str, list[str]] = {}
    for name, found in sorted(results.items()):
        by.setdefault(found["status"], []).append(name)
    exported, reloaded, lost = (len(by.get(status, ())) for status in (EXPORTED, RELOADED, LOST))
    tried = exported + reloaded + lost
    rows = ["| architecture | verdict | why, or what it does not do |", "|---|---|---|"]
    for status in (LOST, RELOADED, FAILED, REFUSED, EXPORTED):
        rows += [
            f"| {name} | {status} | {results[name]['reason'].replace('|', '/')[:160]} |"
            for name in by.get(status, ())
        ]
    targets = harness.targets(
        ("cut models that from_pretrained reloads, share", (exported + reloaded) / max(tried, 1), ">=", 1.0),
        ("cut models that run as ONNX to 1e-4, share", exported / max(tried, 1), ">=", 0.9),
    )
    found = f"{exported + reloaded} of {tried} cut architectures reload, {exported} run as ONNX."
    return "\n\n".join([found, "\n".join(rows), targets])


def _names(out: Path) -> list[str]:
    """The architectures of transformers that were cut; all of them if nothing is known."""
    results = coverage.known(out / "cut.json")
    return [name for name in coverage.names()[0] if not results or results.get(name, {}).get("status") == CUT]


def run(quick: bool = False, out: Path = coverage.OUT) -> str:
    """As a part of `python -m bench`: every architecture that is cut, or every twentieth."""
    torch.set_num_threads(1)
    coverage.SECONDS = SECONDS
    look = partial(measure, check=take_out)
    return report(collect(_names(out)[:: 20 if quick else 1], out / "export.json", jobs=2, look=look))


def main() -> None:
    asked = options("export", __doc__)
    coverage.SECONDS = SECONDS
    path, look = asked.out / "export.json", partial(measure, check=take_out)
    text = report(collect(asked.name or _names(asked.out), path, asked.jobs, asked.again, look))
    (asked.out / "export.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
