"""heads removed: what is left of the model's quality, and what of the time.

MiniLM is judged by the mean cosine of its embedding with the uncut one's on sentences that were not
calibrated on, SmolLM2 by perplexity on pieces of text likewise. Text as a user would bring it:

    MANYHEADS_TEXT=sentences.txt MANYHEADS_LONG_TEXT=book.txt python -m bench prune

Without them a text of our own is read, which is short: to try, not to quote. MANYHEADS_STEPS is how many
steps the recoveries take (MiniLM, SmolLM2), by default 300,60 (under 10 and 15 minutes on two free cores);
MANYHEADS_PARTS which of sentences, speed and language run.
"""

import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import manyheads as mh
from bench.harness import milliseconds, say, table, targets
from bench.models import minilm, smollm2
from manyheads.corpus import bucketed
from manyheads.surgery.card import card, quality

LONG = 128  # tokens of a piece of text for the language model
SHARES = (0.75, 0.5)


def run(quick: bool) -> str:
    parts = os.environ.get("MANYHEADS_PARTS", "sentences,speed,language").split(",")
    steps = [int(n) for n in os.environ.get("MANYHEADS_STEPS", "300,60").split(",")]
    found, goals = [], []
    if "sentences" in parts:
        text, reached = sentences(quick, 8 if quick else steps[0])
        found.append(text)
        goals += reached
    if "speed" in parts:
        text, reached = speed(quick)
        found.append(text)
        goals += reached
    if "language" in parts and not quick:
        text, reached = language(steps[1])
        found.append(text)
        goals += reached
    return "\n\n".join([*found, targets(*goals)])


def lines(variable: str) -> list[str]:
    """The texts that a variable names, in a mixed order, or a text of our own."""
    path = os.environ.get(variable)
    if path is None:
        from importlib import resources

        return resources.files("manyheads").joinpath("data/text.txt").read_text().splitlines() * 8
    found = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    random.Random(0).shuffle(found)
    return found


def batches(tokenizer: Any, texts: list[str], tokens: int = 2048) -> list[dict[str, torch.Tensor]]:
    """Sentences of like length together."""
    options = {"truncation": True, "max_length": 128}
    sizes = [len(tokenizer(text, **options)["input_ids"]) for text in texts]
    return [
        dict(tokenizer([texts[i] for i in group], padding=True, return_tensors="pt", **options))
        for group in bucketed(sizes, tokens)
    ]


def sentences(quick: bool, steps: int) -> tuple[str, list[Any]]:
    """MiniLM, cut by a quarter and by half."""
    model, tokenizer = minilm()
    texts = lines("MANYHEADS_TEXT")
    held, count = (30, 60) if quick else (300, 1600)
    rest = texts[held:]
    own, ranked = (batches(tokenizer, rest[:size]) for size in (count, min(count, 512)))
    held_out = batches(tokenizer, texts[:held])
    tables = {
        "random": mh.importance(model, ranked, "random"),
        "fisher": mh.importance(model, ranked, "fisher"),
        "elimination": mh.elimination(model, ranked),
    }
    say(f"ranked on {min(count, 512)} sentences")
    rows, refitted = [], {}
    for share in SHARES:
        for name, ranking in tables.items():
            small = mh.cut(model, mh.plan(ranking, share))
            cut = quality(model, small, held_out)[2]
            if name == "random":  # the control
                rows.append([f"{1 - share:.0%} cut, {name}", f"{cut:.4f}", "", ""])
                continue
            started = time.perf_counter()
            mh.refit(small, own, teacher=model)
            spent = time.perf_counter() - started
            after = quality(model, small, held_out)[2]
            recovered = ""
            say(f"{1 - share:.0%}, {name}: refitted {after:.4f} in {spent:.0f} s")
            if name == "elimination":
                refitted[share] = after
                if share == SHARES[-1]:
                    began = time.perf_counter()
                    mh.recover(small, batches(tokenizer, rest), teacher=model, steps=steps)
                    minutes = (time.perf_counter() - began) / 60
                    gained = quality(model, small, held_out)[2]
                    recovered = f"{gained:.4f} ({steps} steps, {minutes:.1f} min)"
            rows.append([f"{1 - share:.0%} cut, {name}", f"{cut:.4f}", f"{after:.4f}", recovered])
            say(" | ".join(rows[-1]))
    tokens = sum(int(batch["attention_mask"].sum()) for batch in own)
    text = "\n\n".join(
        [
            "### MiniLM, 72 heads: mean cosine with the uncut embedding",
            table(["", "cut", "refitted", "recovered"], rows),
            f"Ranked on {min(count, 512)} sentences, refitted on {count} ({tokens:,} tokens), recovered on "
            f"{len(rest):,}, measured on {held} others.",
        ]
    )
    return text, [
        ("cosine, 25% cut, refitted", refitted[0.75], ">=", 0.975),
        ("cosine, 50% cut, refitted", refitted[0.5], ">=", 0.92),
        ("cosine, 50% cut, recovered", gained, ">=", 0.97),
    ]


def speed(quick: bool) -> tuple[str, list[Any]]:
    """Time saved against multiply-adds saved, at length 512 and batch 8."""
    model, _ = minilm()
    batch = {"input_ids": torch.randint(1000, 20000, (8, 512)), "attention_mask": torch.ones(8, 512).long()}
    rows, worst = [], 2.0
    for share in SHARES:
        heads = int(12 * share)
        small = mh.cut(model, {layer: range(heads, 12) for layer in range(6)})
        saved, before = 1 - work(small, batch) / work(model, batch), []
        ratios: list[float] = []
        with torch.inference_mode():
            for turn in range(3 if quick else 21):
                times = []
                for each in (model, small) if turn % 2 else (small, model):
                    started = time.perf_counter()
                    each(**batch)
                    times.append(time.perf_counter() - started)
                whole, less = times if turn % 2 else times[::-1]
                if turn:
                    ratios.append(1 - less / whole)
                    before.append(whole)
        measured = statistics.median(ratios)
        worst = min(worst, measured / saved)
        rows.append(
            [
                f"{heads} of 12 heads in each layer",
                milliseconds(statistics.median(before)),
                f"{saved:.1%}",
                f"{measured:.1%}",
                f"{measured / saved:.2f}",
            ]
        )
        say(f"{rows[-1]}")
    header = ["MiniLM, length 512, batch 8", "uncut, ms", "multiply-adds saved", "time saved", "ratio"]
    text = f"### Speed\n\n{table(header, rows)}\n\nMedians over pairs of runs, one model after the other."
    return text, [("time saved over multiply-adds saved, smallest", worst, ">=", 0.85)]


def work(model: Any, batch: dict[str, torch.Tensor]) -> int:
    """Floating-point operations of a forward pass, as torch counts them."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        model(**batch)
    return counted.get_total_flops()


def language(steps: int) -> tuple[str, list[Any]]:
    """SmolLM2, whose heads share key heads in groups of three."""
    model, tokenizer = smollm2()
    text = "\n".join(lines("MANYHEADS_LONG_TEXT")) if "MANYHEADS_LONG_TEXT" not in os.environ else ""
    text = text or Path(os.environ["MANYHEADS_LONG_TEXT"]).read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(text)["input_ids"])
    pieces = ids[: len(ids) // LONG * LONG].view(-1, LONG)
    pieces = pieces[torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))]
    fed = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in pieces.split(8)]
    held_out, own = fed[:4], fed[4:]
    ranking = mh.elimination(model, own[:6])
    say("SmolLM2 ranked")
    rows = []
    for share in (0.9, 0.8, 0.7):
        plan = mh.plan(ranking, share)
        small = mh.cut(model, plan)
        _, before, cut = quality(model, small, held_out)
        mh.refit(small, own[:12], teacher=model)
        after = quality(model, small, held_out)[2]
        recovered = ""
        if share == 0.8:
            began = time.perf_counter()
            mh.recover(small, own, teacher=model, steps=steps, learning_rate=3e-5)
            minutes = (time.perf_counter() - began) / 60
            gained = quality(model, small, held_out)[2]
            recovered = f"{gained:.2f} ({steps} steps, {minutes:.1f} min)"
            sides = card(model, small, held_out, repeats=3, sizes=(1,))
        rows.append([f"{plan.removed} of 270 heads cut", f"{cut:.2f}", f"{after:.2f}", recovered])
        say(f"{rows[-1]}")
    header = ["SmolLM2-135M", "cut", "refitted", "recovered"]
    told = table(header, [["uncut", f"{before:.2f}", "", ""], *rows])
    notes = (
        f"Pieces of {LONG} tokens; ranked on {6 * 8 * LONG:,} tokens, refitted on {12 * 8 * LONG:,}, "
        f"measured on {4 * 8 * LONG:,} others. KV cache at 20%: {sides.after.cache:,} of "
        f"{sides.before.cache:,} bytes a token."
    )
    return f"### SmolLM2-135M: perplexity\n\n{told}\n\n{notes}", [
        ("perplexity over the uncut one's, 20% cut, recovered", gained / before, "<=", 1.1)
    ]
