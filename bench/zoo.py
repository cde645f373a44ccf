"""Which attention manyheads gets right, names, refuses, or gets wrong without a word: the zoo of tests/zoo.

`python -m bench.zoo [NAME ...]` judges every hand-written module and every library model that is installed
(see tests/zoo/judge.py), prints a row for each, and writes bench/results/zoo.md. A NAME is a part of a
model's name; a table of chosen models is only printed. `--drawn N` judges N modules drawn at random instead,
and writes bench/results/zoo_drawn.md with those that are wrong.
"""

import argparse
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from tests.zoo.case import Case
from tests.zoo.catalogue import HANDWRITTEN, LIBRARY
from tests.zoo.compare import NAMED, REFUSED, RIGHT, WRONG
from tests.zoo.drawn import draw
from tests.zoo.judge import ASPECTS, Verdict, judge

from bench import harness

OUT = Path("bench/results/zoo.md")


def verdicts(cases: Iterable[tuple[str, Callable[[], Case]]]) -> list[Verdict]:
    """Judge these, one after the other, with a line on stderr for each."""
    out = []
    for name, make in cases:
        started = time.perf_counter()
        try:
            verdict = judge(make())
        except ImportError as error:
            harness.say(f"{name}: skipped, {error}")
            continue
        except Exception as error:
            verdict = Verdict(name, "does not run")
            verdict.say("heads", WRONG, f"the zoo itself: {type(error).__name__}: {str(error)[:200]}")
        harness.say(f"{name}: {_short(verdict)} {time.perf_counter() - started:.1f} s")
        out.append(verdict)
    return out


def _short(verdict: Verdict) -> str:
    return " ".join(f"{verdict.outcomes.get(aspect, ''):>7}" for aspect in ASPECTS)


def report(judged: list[Verdict], rows: bool = True) -> str:
    """The table, the counts, and what is wrong by name."""
    counts = {aspect: Counter(v.outcomes.get(aspect, "") for v in judged) for aspect in ASPECTS}
    totals = [
        [outcome, *(counts[aspect][outcome] for aspect in ASPECTS)]
        for outcome in (RIGHT, NAMED, REFUSED, WRONG)
    ]
    wrong = [verdict for verdict in judged if verdict.wrong]
    parts = [
        f"{len(judged)} models, {len(wrong)} wrong in something without a word.",
        harness.table(["", *ASPECTS], totals),
    ]
    if rows:
        parts.append(
            harness.table(
                ["theme", "model", *ASPECTS],
                [[v.theme, v.name, *(_cell(v, aspect) for aspect in ASPECTS)] for v in judged],
            )
        )
    parts += ["Wrong:", "\n".join(f"- **{v.name}**: {'; '.join(v.wrong)}" for v in wrong) or "none"]
    if rows:
        parts += ["Named or refused:", "\n".join(filter(None, map(_excuses, judged))) or "none"]
        parts += ["Named in models whose attention is right:", "\n".join(_alarms(judged)) or "none"]
    return "\n\n".join(parts)


def _alarms(judged: list[Verdict]) -> list[str]:
    """Modules in `missed` though all attention is right: other mixers of tokens, or false alarms."""
    right = [v for v in judged if all(v.outcomes.get(a) == RIGHT for a in ("heads", "weights", "counts"))]
    return [
        f"- {v.name}: {'; '.join(f'{k}: {why}' for k, why in v.missed.items())}" for v in right if v.missed
    ]


def _excuses(verdict: Verdict) -> str:
    """What was named or refused in one model, and why."""
    told = [
        f"{aspect} {verdict.outcomes[aspect]}: {reason}"
        for aspect, reason in verdict.reasons.items()
        if verdict.outcomes[aspect] in (NAMED, REFUSED)
    ]
    return f"- {verdict.name}: {'; '.join(told)}" if told else ""


def _cell(verdict: Verdict, aspect: str) -> str:
    outcome = verdict.outcomes.get(aspect, "")
    return "**WRONG**" if outcome == WRONG else outcome


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.zoo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", nargs="*", metavar="NAME", help="parts of names; default all")
    parser.add_argument("--drawn", type=int, metavar="N", help="judge N modules drawn at random instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.drawn:
        chosen = [(str(seed), partial(draw, seed)) for seed in range(options.drawn)]
    else:
        cases = HANDWRITTEN | LIBRARY
        names = [n for n in cases if not options.name or any(part in n for part in options.name)]
        chosen = [(name, cases[name]) for name in names]
    if not chosen:
        parser.error(f"no model of the zoo has {' or '.join(options.name)} in its name")
    judged = verdicts(chosen)
    text = report(judged, rows=not options.drawn)
    print(text)
    if not options.name:
        out = OUT.with_stem("zoo_drawn") if options.drawn else OUT
        command = f"python -m bench.zoo{f' --drawn {options.drawn}' if options.drawn else ''}"
        out.write_text(
            f"## zoo: {(__doc__ or '').splitlines()[0]}\n\n{text}\n\n`{command}`, torch {torch.__version__}\n"
        )
        harness.say(f"written to {out}")
    sys.exit(any(verdict.wrong for verdict in judged))


if __name__ == "__main__":
    main()
