"""Which architectures `watch` sees right: every entry of transformers' model mapping, and other libraries.

`python -m bench.coverage [NAME ...] [--out DIR] [--jobs N] [--again]` builds each architecture small and with
random weights, runs it under `watch(statistics="full")`, and holds sites and numbers against the weights the
model itself makes in eager mode (see `bench.coverage_check`). Each runs in a process of its own; results are
kept in DIR/coverage.json, so that a stopped run goes on where it was. timm, diffusers and openai-whisper are
looked at where they are installed (`pip install --no-deps timm openai-whisper` is enough).
"""

import argparse
import json
import multiprocessing
import os
import resource
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from bench import harness

OUT = Path("out/coverage")
SECONDS, WALL_SECONDS, BYTES = 90, 3600, 16 * 2**30  # of each architecture; the machine may be busy
# Errors this small, or outputs that differ so much between the default implementation and eager, may be the
# noise of float32: such a model is tried again with smaller weights.
NEARLY, NOISE = 0.05, 1e-3
NOT_RUN, NO_ATTENTION, RIGHT, NAMED, WRONG = "does not run", "no attention", "right", "named", "wrong"


def measure(name: str) -> dict[str, Any]:
    """Build, run, watch and check one architecture."""
    from bench.coverage_others import ZOO

    if name in ZOO:
        return _judged(ZOO[name]())
    other = others().get(name)
    return _checked(*other()) if other else _transformers(name)


def _transformers(name: str) -> dict[str, Any]:
    from bench import coverage_build as make
    from bench.missing_packages import stand_in

    stand_in("torchvision")  # timm, whose backbones some architectures use, loads it for its data sets
    failures: list[str] = []
    near: dict[str, Any] = {}
    for how, divisor in make.SHRINKS:
        for gain in (
            1.0,
            0.4,
            0.0,
        ):  # of the weights: the larger, the more there is to see, and the more noise
            try:
                model = make.build(name, how, divisor, gain)
            except Exception as error:
                failures.append(_one_line(error))
                break
            given = _first_that_runs(model, make.inputs(name, model), failures)
            if given is None:
                break
            if gain and not _finite(model, given):
                continue
            found = _checked(model, lambda m, given=given: m(**given), make.to_eager)
            found |= {"shrunk": f"{how} / {divisor}", "inputs": sorted(given), "gain": gain}
            noisy = found.get("worst", 9.0) < NEARLY or found.get("gap", 0.0) > NOISE
            if found["status"] != WRONG or not noisy:
                return found
            near = near or found
        if near:
            return near
    common = Counter(failures).most_common(3)
    return {"status": NOT_RUN, "reason": " | ".join(text for text, _ in common) or "no inputs known for it"}


def _checked(
    model: torch.nn.Module,
    forward: Callable[[torch.nn.Module], Any],
    eager: Callable[[torch.nn.Module], None],
) -> dict[str, Any]:
    from bench.coverage_check import check

    try:
        verdict = check(model, forward, eager)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        if "the reference does not run" in str(error):
            return {"status": NOT_RUN, "reason": _one_line(error)}
        if "tokens are mixed unseen in" in str(error):
            return {"status": NAMED, "sites": 0, "reason": _one_line(error)}
        return {"status": WRONG, "sites": 0, "reason": f"raised under watch: {_one_line(error)} ({place})"}
    status = (NAMED if verdict.named else RIGHT) if verdict.attention else NO_ATTENTION
    if not verdict.right:
        status = WRONG
    return {
        "status": status,
        "sites": verdict.sites,
        "verified": verdict.verified,
        "reason": "; ".join(verdict.reasons[:6]),
        "routes": verdict.routes,
        "checked": verdict.checked,
        "excused": verdict.excused,
        "worst": verdict.worst,
        "gap": verdict.gap,
    }


def _judged(case: Any) -> dict[str, Any]:
    """The verdict on a model of the zoo, whose truth knows learned keys, top-k and heads that talk."""
    from tests.zoo.judge import judge

    verdict = judge(case)
    outcomes = [verdict.outcomes[aspect] for aspect in ("heads", "weights", "counts")]
    status = next((outcome for outcome in (WRONG, NAMED) if outcome in outcomes), RIGHT)
    sites = len(case.expected(case.inputs)[1])
    reason = "; ".join(f"{aspect}: {text}" for aspect, text in verdict.reasons.items())
    return {"status": status, "sites": sites, "reason": reason, "routes": {"zoo": sites}, "checked": {}}


def _first_that_runs(
    model: torch.nn.Module, candidates: Iterable[dict[str, Any]], failures: list[str]
) -> dict[str, Any] | None:
    for given in candidates:
        try:
            with torch.no_grad():
                model(**given)
        except Exception as error:
            failures.append(_one_line(error))
        else:
            return given
    return None


def _finite(model: torch.nn.Module, given: dict[str, Any]) -> bool:
    from bench.coverage_spy import tensors

    with torch.no_grad():
        return all(bool(x.isfinite().all()) for x in tensors(model(**given)) if x.is_floating_point())


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:220]


def _child(name: str, pipe: Connection, look: Callable[[str], dict[str, Any]]) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        found = look(name)
    except BaseException as error:
        found = {"status": NOT_RUN, "reason": _one_line(error)}
    pipe.send(found)


def _preload() -> None:
    """What every child would otherwise load by itself."""
    from transformers import BertModel, LlamaModel, ViTModel  # noqa: F401

    from bench import coverage_build, coverage_check, coverage_others  # noqa: F401

    _transformers("bert")


def each(
    names: Iterable[str],
    jobs: int,
    done: Callable[[str, dict[str, Any]], None],
    look: Callable[[str], dict[str, Any]] = measure,
) -> None:
    """Look at each in a process of its own, ``jobs`` at a time; whatever happens to one, the others go on."""
    _preload()
    context = multiprocessing.get_context("fork")  # the libraries are loaded once, here
    waiting, running = list(names), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(name, theirs, look))
            process.start()
            theirs.close()
            running[name] = process, ours, time.monotonic()
        multiprocessing.connection.wait([pipe for _, pipe, _ in running.values()], timeout=5)
        for name, (process, pipe, started) in list(running.items()):
            seconds = time.monotonic() - started
            if pipe.poll():
                try:
                    found = pipe.recv()
                except EOFError:
                    process.join()
                    found = {"status": NOT_RUN, "reason": f"its process ended with {process.exitcode}"}
            elif seconds > WALL_SECONDS:
                found = {"status": NOT_RUN, "reason": f"still running after {WALL_SECONDS} s"}
            else:
                continue
            process.kill()
            process.join()
            del running[name]
            done(name, found | {"seconds": round(seconds, 1)})


def names() -> tuple[list[str], list[str]]:
    """The entries of transformers' model mapping, and the other models."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return list(MODEL_MAPPING_NAMES), list(others())


def others() -> dict[str, Any]:
    from bench import coverage_others, coverage_timm

    return coverage_others.OTHERS | coverage_timm.families()


def collect(wanted: Iterable[str], out: Path, jobs: int, again: bool = False) -> dict[str, dict[str, Any]]:
    """The results of these architectures, from ``out`` where they are known."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "coverage.json"
    results = known(path)

    def done(name: str, found: dict[str, Any]) -> None:
        results[name] = found
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(results, indent=1))
        fresh.replace(path)
        harness.say(f"{name}: {found['status']} {found['reason'][:160]}")

    each([name for name in wanted if again or name not in results], jobs, done)
    return results


def known(path: Path) -> dict[str, dict[str, Any]]:
    """Results that a file keeps, by architecture; none if it is not there yet."""
    return json.loads(path.read_text()) if path.exists() else {}


def report(
    results: dict[str, dict[str, Any]],
    cut: Mapping[str, dict[str, Any]],
    grow: Mapping[str, dict[str, Any]],
) -> str:
    """The table of every architecture, the misses by name, and the counts against what is to be reached.

    cut, grow: what `bench.coverage_cut` and `bench.coverage_grow` found, for columns of their own.
    """
    mapping, peers = names()
    rows, misses, excused = [], [], []
    compared: Counter[str] = Counter()
    for name in (*mapping, *peers):
        found = results.get(name)
        if found is None:
            continue
        status = found["status"]
        ran, attention = status != NOT_RUN, status in (RIGHT, NAMED, WRONG)
        verdict = {RIGHT: "right", NAMED: "named", WRONG: "WRONG"}.get(status, "")
        route = ", ".join(sorted(found.get("routes", {})))
        beside = [each.get(name, {}).get("status", "") if attention else "" for each in (cut, grow)]
        sites = found.get("sites", ""), found.get("verified", "")
        rows.append([name, _yes(ran), _yes(attention) if ran else "", *sites, verdict, *beside, route])
        if status in (NOT_RUN, NAMED, WRONG):
            misses.append(f"- {name} {'is ' * (status != NOT_RUN)}{status}: {found['reason'][:300]}")
        if found.get("excused"):
            excused.append(f"- {name}: {'; '.join(sorted(set(found['excused'])))[:300]}")
        if status == RIGHT:
            compared.update(found["checked"] | {"sites": found["sites"]})
    mapped = [results[name]["status"] for name in mapping if name in results]
    ran = sum(status != NOT_RUN for status in mapped)
    seen = sum(status in (RIGHT, NAMED, WRONG) for status in mapped)
    right = sum(status == RIGHT for status in mapped)
    beyond = [results[name]["status"] for name in peers if name in results]
    counts = (
        f"{len(mapping)} entries in the model mapping, {len(mapped)} tried: {ran} run, {seen} of those have "
        f"attention, {right} of those are right, {mapped.count(NAMED)} are not and say so, "
        f"{mapped.count(WRONG)} are wrong without a word. Beyond transformers, of {len(beyond)} tried: "
        f"{beyond.count(RIGHT)} right, {beyond.count(NAMED)} named, {beyond.count(WRONG)} wrong, "
        f"{beyond.count(NO_ATTENTION)} without attention, {beyond.count(NOT_RUN)} do not run."
    )
    whole = compared.pop("sites", 0)
    metrics = ", ".join(f"{name} at {count} of {whole} sites" for name, count in sorted(compared.items()))
    goals = harness.targets(
        ("entries that run", ran, ">=", 400),
        ("right, of those with attention", right / max(seen, 1), ">=", 0.95),
    )
    return "\n\n".join(
        [
            harness.table(
                [
                    "architecture",
                    "runs",
                    "attention",
                    "sites",
                    "verified",
                    "verdict",
                    "cut",
                    "grow",
                    "reference",
                ],
                rows,
            ),
            "Misses:",
            "\n".join(misses),
            "Softmaxes in modules named attention that are no attention of queries to keys:",
            "\n".join(excused),
            f"Compared where it has a meaning and the reference tells it: {metrics}.",
            counts,
            goals,
        ]
    )


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def run(quick: bool = False, out: Path = OUT) -> str:
    """As a part of `python -m bench`: every architecture, or every twentieth."""
    torch.set_num_threads(1)
    mapping, peers = names()
    results = collect([*(mapping[::20] if quick else mapping), *peers], out, jobs=2)
    return report(results, known(out / "cut.json"), known(out / "grow.json"))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.coverage", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("name", nargs="*", metavar="NAME", help="architectures; default all")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="where results are kept")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes at a time")
    parser.add_argument("--again", action="store_true", help="also those that are known already")
    parser.add_argument(
        "--missed", action="store_true", help="those known to be wrong or not to run, once more"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    mapping, peers = names()
    wanted = options.name or [*mapping, *peers]
    if options.missed and (before := known(options.out / "coverage.json")):
        wanted = [name for name in wanted if before.get(name, {}).get("status") in (NOT_RUN, WRONG)]
    results = collect(wanted, options.out, options.jobs, options.again or options.missed)
    text = report(results, known(options.out / "cut.json"), known(options.out / "grow.json"))
    (options.out / "coverage.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
