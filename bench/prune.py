"""heads removed: what is left of the model's quality, and what of the time.

MiniLM is judged by the mean cosine of its embedding with the uncut one's on sentences that were not
calibrated on, SmolLM2 by perplexity on pieces of text likewise. Text as a user would bring it:

    MANYHEADS_TEXT=sentences.txt MANYHEADS_LONG_TEXT=book.txt python -m bench prune --out bench/results

The first file is ranked, refitted, recovered and measured on, a sentence a line; the second is for SmolLM2.
Without them a text of our own is read, which is short: to try, not to quote. MANYHEADS_PARTS says which of
sentences, speed and language run, all by default; MANYHEADS_STEPS how many steps the two recoveries take, by
default 1900,30 (on two free cores under 10 minutes each), and MANYHEADS_RATES at which learning rates, by
default 1.5e-4,5e-5. What was measured is kept in results/prune.json, what is needed to go on in out/prune: a
run that was stopped goes on where it was, and every report tells all parts that were ever run. Delete both to
begin anew.
"""

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import manyheads as mh
from bench.cost import Cost, since
from bench.harness import machine, milliseconds, say, table, targets
from bench.models import minilm, smollm2
from bench.record import Record
from manyheads.data.batches import bucketed
from manyheads.surgery.quality import compare_quality

RECORD = Path(__file__).parent / "results" / "prune.json"
OUT = Path("out/prune")
LONG = 128  # tokens of a piece of text for the language model
STEPS = [int(number) for number in os.environ.get("MANYHEADS_STEPS", "1900,30").split(",")]
RATES = [float(number) for number in os.environ.get("MANYHEADS_RATES", "1.5e-4,5e-5").split(",")]
OFTEN = 8  # MiniLM sees its text so many times as often as each of the sentences made of it
JOINED = 50_000  # sentences put together from the first words of one and the last words of another
SENTENCES = 30  # of like length in a step of the recovery: so each counts alike, however short it is
ROUNDS = 6
SHARES = (0.75, 0.5)
LANGUAGE_SHARES = (0.8, 0.9, 0.7, 0.5)
Batch = dict[str, torch.Tensor]


class Pruned(Record):
    """What was measured, and the rankings and cut models that it takes to go on."""

    def __init__(self, path: Path, out: Path, quick: bool) -> None:
        super().__init__(path)
        self.out, self.quick = out, quick

    def ranking(self, name: str, rank: Callable[[], mh.HeadTable]) -> mh.HeadTable:
        """A ranking, from its file if it is there."""
        path = self.out / f"{name}.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            rank().save(path)
            say(f"{name} ranked")
        return mh.HeadTable.load(path)

    def recovered(
        self,
        name: str,
        model: Any,
        fed: list[Batch],
        measure: Callable[[Any], float],
        steps: int,
        learning_rate: float,
    ) -> dict[str, float]:
        """A cut model of ``out``, recovered: its quality, and the minutes of two cores that took."""
        small = mh.load(self.out / name).eval()
        cost = since(Cost(**self.found.get(f"{name}, recovering", {})))

        def progress(stage: str, done: float, total: float | None) -> None:
            if done % 50 == 0:  # as often as recover writes its state
                self.note(f"{name}, recovering", asdict(cost()))
                say(f"{name}: {done} of {total} steps recovered")

        state = self.out / f"{name}.recovery.safetensors"
        mh.recover(
            small,
            fed,
            teacher=model,
            steps=steps,
            learning_rate=learning_rate,
            state=state,
            progress=progress,
        )
        minutes = cost().minutes
        return {"quality": measure(small), "steps": steps, "rate": learning_rate, "minutes": minutes}


def run(quick: bool) -> str:
    wanted = os.environ.get("MANYHEADS_PARTS", ",".join(PARTS)).split(",")
    unknown = [name for name in wanted if name not in PARTS]
    if unknown:
        raise ValueError(f"MANYHEADS_PARTS: no part {', '.join(unknown)}; expected {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory() as folder:
        kept, out = (Path(folder) / "record.json", Path(folder)) if quick else (RECORD, OUT)
        record = Pruned(kept, out, quick)
        for name in wanted:
            measure, _ = PARTS[name]
            if f"{name} by" not in record.found:
                measure(record)
                record.note(f"{name} by", machine(f"MANYHEADS_PARTS={name} python -m bench prune"))
        return report(record.found)


def report(found: dict[str, Any]) -> str:
    """All parts that were ever measured, in one text."""
    told, goals = [], []
    for name, (_, tell) in PARTS.items():
        if f"{name} by" in found:
            text, reached = tell(found)
            told += [text, found[f"{name} by"]]
            goals += reached
    return "\n\n".join([*told, targets(*goals)])


def lines(variable: str) -> list[str]:
    """The texts that a variable names, in a mixed order, or a text of our own."""
    path = os.environ.get(variable)
    if path is None:
        from importlib import resources

        return resources.files("manyheads").joinpath("data/files/text.txt").read_text().splitlines() * 8
    found = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    random.Random(0).shuffle(found)
    return found


def joined(texts: list[str], count: int) -> list[str]:
    """The first words of a text and the last words of another, many times."""
    draw = random.Random(0)
    found = []
    for _ in range(count):
        first, last = (draw.choice(texts).split() for _ in range(2))
        found.append(" ".join([*first[: draw.randint(1, len(first))], *last[draw.randrange(len(last)) :]]))
    return found


def batches(tokenizer: Any, texts: list[str], tokens: int = 2048, count: int | None = None) -> list[Batch]:
    """Sentences of like length together: up to so many tokens, or so many sentences."""
    options = {"truncation": True, "max_length": 128}
    sizes = [len(tokenizer(text, **options)["input_ids"]) for text in texts]
    if count is None:
        groups = bucketed(sizes, tokens)
    else:
        rising = sorted(range(len(texts)), key=lambda i: sizes[i])
        groups = [rising[i : i + count] for i in range(0, len(rising), count)]
    return [
        dict(tokenizer([texts[i] for i in group], padding=True, return_tensors="pt", **options))
        for group in groups
    ]


def sentences(record: Pruned) -> None:
    """MiniLM, cut by a quarter and by half."""
    model, tokenizer = minilm()
    texts = lines("MANYHEADS_TEXT")
    held, count, steps = (30, 60, 4) if record.quick else (300, 1700, STEPS[0])
    rest = texts[held:]
    own, ranked = (batches(tokenizer, rest[:size]) for size in (count, min(count, 512)))
    held_out = batches(tokenizer, texts[:held])

    def measure(small: Any) -> float:
        return compare_quality(model, small, held_out).after.value

    tables = {
        "random": record.ranking("minilm-random", lambda: mh.importance(model, ranked, "random")),
        "fisher": record.ranking("minilm-fisher", lambda: mh.importance(model, ranked, "fisher")),
        "elimination": record.ranking(
            "minilm-elimination", lambda: mh.importance(model, ranked, "elimination")
        ),
    }
    for share in SHARES:
        for name, ranking in tables.items():
            small = None

            def cut(ranking: mh.HeadTable = ranking, share: float = share) -> float:
                nonlocal small
                small = mh.cut(model, mh.plan(ranking, share))
                return measure(small)

            def refitted(name: str = name, share: float = share) -> dict[str, float]:
                nonlocal small
                small = small or mh.cut(model, mh.plan(tables[name], share))
                began = time.process_time()
                mh.refit(small, own, teacher=model)
                seconds = time.process_time() - began
                return {"quality": measure(small), "seconds": seconds}

            record.once(f"minilm, {1 - share:.0%} cut, {name}", cut)
            if name != "random":  # the control
                record.once(f"minilm, {1 - share:.0%} cut, {name}, refitted", refitted)
    last = f"minilm, {1 - SHARES[-1]:.0%} cut"

    def in_rounds() -> dict[str, float]:
        began = time.process_time()
        small = mh.prune(model, own, SHARES[-1], rounds=2 if record.quick else ROUNDS, method="fisher")
        seconds = time.process_time() - began
        mh.save(small, record.out / "minilm-rounds")
        return {"quality": measure(small), "seconds": seconds}

    record.once(f"{last}, rounds, refitted", in_rounds)
    own_text = rest[:count]
    made = joined(own_text, 20 if record.quick else JOINED)
    fed = batches(tokenizer, own_text * OFTEN + made, count=SENTENCES)
    record.once(
        "minilm, recovered",
        lambda: record.recovered("minilm-rounds", model, fed, measure, steps, RATES[0]),
    )
    tokens = sum(int(batch["attention_mask"].sum()) for batch in own)
    record.note(
        "minilm, text",
        f"Ranked on {min(count, 512)} sentences, refitted on {len(rest[:count]):,} ({tokens:,} tokens), "
        f"recovered on them, {OFTEN} times as often as on {JOINED:,} that are put together from the first "
        f"words of one and the last words of another, {SENTENCES} of like length a step, measured on {held} "
        f"others. In rounds: fisher on all of them, ranked anew on what the refit made, in {ROUNDS} goes. "
        "Seconds are those of one core.",
    )


def tell_sentences(found: dict[str, Any]) -> tuple[str, list[Any]]:
    rows = []
    recovered = found["minilm, recovered"]
    for share in SHARES:
        for name in ("random", "fisher", "elimination", "rounds"):
            key = f"minilm, {1 - share:.0%} cut, {name}"
            after = found.get(f"{key}, refitted")
            if key not in found and after is None:
                continue
            last = name == "rounds"
            rows.append(
                [
                    f"{1 - share:.0%} cut, {name}",
                    f"{found[key]:.4f}" if key in found else "",
                    f"{after['quality']:.4f} ({after['seconds']:.0f} s)" if after else "",
                    _recovered(recovered, 4) if last else "",
                ]
            )
    title = "### MiniLM, 72 heads: mean cosine with the uncut embedding"
    told = table(["", "cut", "refitted", "recovered"], rows)
    return "\n\n".join([title, told, found["minilm, text"]]), [
        *(
            (f"cosine, {1 - share:.0%} cut, refitted", found[key]["quality"], ">=", goal)
            for share, goal in zip(SHARES, (0.975, 0.92), strict=True)
            for key in [f"minilm, {1 - share:.0%} cut, elimination, refitted"]
        ),
        ("cosine, 50% cut, recovered", recovered["quality"], ">=", 0.97),
        ("minutes of recovery", recovered["minutes"], "<=", 10),
    ]


def _recovered(found: dict[str, float], digits: int) -> str:
    return f"{found['quality']:.{digits}f} ({found['steps']} steps, {found['minutes']:.1f} min)"


def speed(record: Pruned) -> None:
    """Time saved against multiply-adds saved, at length 512 and batch 8."""
    model, _ = minilm()
    batch = {"input_ids": torch.randint(1000, 20000, (8, 512)), "attention_mask": torch.ones(8, 512).long()}
    for share in SHARES:
        heads = int(12 * share)
        small = mh.cut(model, {layer: range(heads, 12) for layer in range(6)})
        saved, before = 1 - work(small, batch) / work(model, batch), []
        ratios: list[float] = []
        with torch.inference_mode():
            for turn in range(3 if record.quick else 41):
                times = []
                for each in (model, small) if turn % 2 else (small, model):
                    started = time.perf_counter()
                    each(**batch)
                    times.append(time.perf_counter() - started)
                whole, less = times if turn % 2 else times[::-1]
                if turn:
                    ratios.append(1 - less / whole)
                    before.append(whole)
        figures = {"uncut": statistics.median(before), "work": saved, "time": statistics.median(ratios)}
        record.note(f"speed, {heads} heads", figures)
        say(f"{heads} of 12 heads: {figures}")


def tell_speed(found: dict[str, Any]) -> tuple[str, list[Any]]:
    rows, worst = [], []
    for heads in (int(12 * share) for share in SHARES):
        its = found[f"speed, {heads} heads"]
        worst.append(its["time"] / its["work"])
        rows.append(
            [
                f"{heads} of 12 heads in each layer",
                milliseconds(its["uncut"]),
                f"{its['work']:.1%}",
                f"{its['time']:.1%}",
                f"{worst[-1]:.2f}",
            ]
        )
    header = ["MiniLM, length 512, batch 8", "uncut, ms", "multiply-adds saved", "time saved", "ratio"]
    text = f"### Speed\n\n{table(header, rows)}\n\nMedians over pairs of runs, one model after the other."
    return text, [("time saved over multiply-adds saved, smallest", min(worst), ">=", 0.85)]


def work(model: Any, batch: Batch) -> int:
    """Floating-point operations of a forward pass, as torch counts them."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        model(**batch)
    return counted.get_total_flops()


def language(record: Pruned) -> None:
    """SmolLM2, whose heads share key heads in groups of three."""
    model, tokenizer = smollm2()
    path = os.environ.get("MANYHEADS_LONG_TEXT")
    text = Path(path).read_text(encoding="utf-8") if path else "\n".join(lines("MANYHEADS_LONG_TEXT"))
    sizes = (16, 2, 1, 1, 2, 2) if record.quick else (LONG, 8, 6, 8, 16, STEPS[1])
    long, size, held, ranked, fitted, steps = sizes
    ids = torch.tensor(tokenizer(text[: 20_000 if record.quick else None])["input_ids"])
    pieces = ids[: len(ids) // long * long].view(-1, long)
    pieces = pieces[torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))]
    fed = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in pieces.split(size)]
    held_out, own = fed[:held], fed[held:]

    def measure(small: Any) -> float:
        return compare_quality(model, small, held_out).after.value

    record.once("smollm2, uncut", lambda: compare_quality(model, model, held_out).before.value)
    ranking = record.ranking("smollm2-elimination", lambda: mh.importance(model, own[:ranked], "elimination"))
    for share in LANGUAGE_SHARES[: 1 if record.quick else None]:

        def cut_and_refitted(share: float = share) -> dict[str, float]:
            chosen = mh.plan(ranking, share)
            small = mh.cut(model, chosen)
            cut, began = measure(small), time.perf_counter()
            mh.refit(small, own[:fitted], teacher=model)
            if share == LANGUAGE_SHARES[0]:
                mh.save(small, record.out / "smollm2")
            seconds = time.perf_counter() - began
            return {"heads": chosen.removed, "cut": cut, "quality": measure(small), "seconds": seconds}

        record.once(f"smollm2, {1 - share:.0%} cut", cut_and_refitted)
    record.once(
        "smollm2, recovered", lambda: record.recovered("smollm2", model, own, measure, steps, RATES[1])
    )

    def sides() -> dict[str, Any]:
        return mh.card(model, mh.load(record.out / "smollm2"), held_out[:1], repeats=3, sizes=(1,)).as_json()

    record.once("smollm2, card", sides)
    tokens = [f"{batches * size * long:,}" for batches in (ranked, fitted, held)]
    record.note(
        "smollm2, text",
        f"Pieces of {long} tokens; ranked on {tokens[0]} tokens, refitted on {tokens[1]}, recovered on "
        f"{steps * size * long:,}, measured on {tokens[2]} others.",
    )


def tell_language(found: dict[str, Any]) -> tuple[str, list[Any]]:
    uncut, recovered = found["smollm2, uncut"], found["smollm2, recovered"]
    rows = [["uncut", f"{uncut:.2f}", "", ""]]
    for share in sorted(LANGUAGE_SHARES, reverse=True):
        its = found.get(f"smollm2, {1 - share:.0%} cut")
        if its is not None:
            last = _recovered(recovered, 2) if share == LANGUAGE_SHARES[0] else ""
            what = f"{its['heads']} of 270 heads cut ({1 - share:.0%})"
            rows.append([what, f"{its['cut']:.2f}", f"{its['quality']:.2f} ({its['seconds']:.0f} s)", last])
    before, after = (found["smollm2, card"][side] for side in ("before", "after"))
    notes = (
        f"{found['smollm2, text']} With 20% of its heads cut it has {after['parameters']:,} of "
        f"{before['parameters']:,} parameters, and its KV cache takes {after['cache']:,} of "
        f"{before['cache']:,} bytes a token."
    )
    told = table(["SmolLM2-135M", "cut", "refitted", "recovered"], rows)
    return f"### SmolLM2-135M: perplexity\n\n{told}\n\n{notes}", [
        ("perplexity over the uncut one's, 20% cut, recovered", recovered["quality"] / uncut, "<=", 1.1),
        ("minutes of recovery", recovered["minutes"], "<=", 30),
    ]


PARTS: dict[str, tuple[Callable[[Pruned], None], Callable[[dict[str, Any]], tuple[str, list[Any]]]]] = {
    "sentences": (sentences, tell_sentences),
    "speed": (speed, tell_speed),
    "language": (language, tell_language),
}
