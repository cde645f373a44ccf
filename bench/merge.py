"""key heads merged: what is left of the model's quality, beside a mean and the best head of each group.

    MANYHEADS_DATA=/path/to/data python -m bench merge --out bench/results

The folder has translation/{train,test}.{en,de}. SmolLM2 (3 key heads become 1) is judged by perplexity on
captions that it was not fitted to, MiniLM (12 become 4) by the mean cosine of its embedding with the one
before, a translation model of ours (8 become 2 in all its attention) by sacreBLEU. MANYHEADS_PARTS says which
of sentences, translation and language run, all by default; MANYHEADS_STEPS how many steps SmolLM2's recovery
takes, 30 by default; MANYHEADS_TRANSLATION names the folder of the translation model, which is trained if it
is not there. What was measured is kept in results/merge.json and not measured again: delete it to begin
anew.
"""

import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sacrebleu
import torch

import manyheads as mh
from bench.cost import Cost, since
from bench.harness import machine, say, table, targets
from bench.models import minilm, smollm2
from bench.record import Record
from manyheads import tasks
from manyheads.data.batches import bucketed
from manyheads.data.examples import spread
from manyheads.data.readers.parallel_text import read_pairs
from manyheads.surgery.decoding_speed import cache_bytes
from manyheads.surgery.quality import compare_quality
from manyheads.tasks.translation import Translation

RECORD = Path(__file__).parent / "results" / "merge.json"
DATA = Path(os.environ.get("MANYHEADS_DATA", "data"))
TRANSLATION = Path(os.environ.get("MANYHEADS_TRANSLATION", "out/merge/translation"))
STEPS = int(os.environ.get("MANYHEADS_STEPS", "30"))
RATE = 1e-4
LONG, SIZE, FITTED, HELD = 128, 8, 6, 3  # tokens of a piece, pieces of a batch, batches
SENTENCES, PAIRS, BLEU = 600, 600, 200
HOW = ("aligned", "mean", "best")
NAMES = {"aligned": "aligned, best rank", "mean": "mean of the group", "best": "best head of the group"}


def run(quick: bool) -> str:
    wanted = os.environ.get("MANYHEADS_PARTS", ",".join(PARTS)).split(",")
    with tempfile.TemporaryDirectory() as folder:
        record = Record(Path(folder) / "merge.json" if quick else RECORD)
        for name in wanted:
            PARTS[name][0](record, quick)
            record.note(f"{name} by", machine(f"MANYHEADS_PARTS={name} python -m bench merge"))
        texts, goals = [], []
        for name, (_, tell) in PARTS.items():
            if f"{name} by" in record.found:
                text, reached = tell(record.found)
                texts += [text, record.found[f"{name} by"]]
                goals += reached
        return "\n\n".join([*texts, targets(*goals)])


def captions(name: str) -> list[str]:
    lines = (DATA / "translation" / name).read_text(encoding="utf-8").splitlines()
    random.Random(0).shuffle(lines)
    return lines


def merged(
    model: Any, kv_heads: int, batches: list[Any], measure: Callable[[Any], float], how: str
) -> tuple[dict[str, float], Any]:
    """Quality after the merge alone, and refitted; and the refitted model."""
    began = time.process_time()
    small = mh.merge(model, kv_heads, batches, how=how, refit=False)
    first, seconds = measure(small), time.process_time() - began
    say(f"{how}: {first:.4f} before the refit")
    began = time.process_time()
    mh.refit(small, batches, teacher=model)
    seconds += time.process_time() - began
    return {"merged": first, "quality": measure(small), "seconds": seconds}, small


def sentences(record: Record, quick: bool) -> None:
    """MiniLM."""
    model, tokenizer = minilm()
    lines = captions("train.en")[: 200 if quick else SENTENCES]

    def batches(texts: list[str]) -> list[Any]:
        return [
            dict(tokenizer(texts[i : i + 30], padding=True, return_tensors="pt"))
            for i in range(0, len(texts), 30)
        ]

    held_out, fitted = batches(lines[: len(lines) // 5]), batches(lines[len(lines) // 5 :])

    def measure(small: Any) -> float:
        return compare_quality(model, small, held_out).after.value

    for how in HOW:
        record.once(f"minilm, {how}", lambda how=how: merged(model, 4, fitted, measure, how)[0])

    def parameters() -> list[int]:
        small = mh.merge(model, 4, fitted[:1], refit=False)
        return [sum(p.numel() for p in each.parameters()) for each in (model, small)]

    record.once("minilm, parameters", parameters)


def tell_sentences(found: dict[str, Any]) -> tuple[str, list[Any]]:
    rows = []
    for how in HOW:
        its = found[f"minilm, {how}"]
        rows.append([NAMES[how], f"{its['merged']:.4f}", f"{its['quality']:.4f}"])
    before, after = found["minilm, parameters"]
    header = ["key heads", "merged", "refitted"]
    text = (
        f"### MiniLM, 12 key heads become 4\n\n{table(header, rows)}\n\nMean cosine with the embedding "
        f"before, 120 captions, fitted to 480 others; {before:,} parameters become {after:,}. Its class has "
        "no number of key heads: the smaller projections repeat their outputs."
    )
    best = max(found[f"minilm, {how}"]["quality"] for how in ("mean", "best"))
    return text, [
        ("MiniLM, refitted: cosine above the better control", found["minilm, aligned"]["quality"], ">=", best)
    ]


def translation(record: Record, quick: bool) -> None:
    """Our own model, in all its attention: encoder, decoder and between them."""
    if not TRANSLATION.exists():
        task = Translation(heads=8, layers=2)
        mh.train(
            task, str(DATA / "translation"), out=TRANSLATION, steps=700, evaluate_examples=100, watch_every=0
        )
    task, model = tasks.load(TRANSLATION)
    model.eval()
    examples = task.open(str(DATA / "translation")).train
    chosen = spread(len(examples), PAIRS)
    batches = [
        task.inputs(task.collate(examples.take([chosen[i] for i in places])))
        for places in bucketed([examples.sizes[i] for i in chosen], 2000)
    ]
    pairs = read_pairs(str(DATA / "translation"), task.source, task.target, "test")[0][:BLEU]

    def measure(small: Any) -> float:
        written = task.predict(small, [pair[0] for pair in pairs], beams=1)
        return sacrebleu.corpus_bleu(written, [[pair[1] for pair in pairs]]).score

    record.note(
        "translation, steps", json.loads((TRANSLATION / "log.jsonl").read_text().splitlines()[-1])["step"]
    )
    record.once("translation, before", lambda: measure(model))
    for how in HOW:

        def judged(how: str = how) -> dict[str, float]:
            result, small = merged(model, 2, batches, measure, how)
            mh.recover(small, batches, teacher=model, steps=20 if quick else 200, learning_rate=5e-4)
            return result | {"recovered": measure(small)}

        record.once(f"translation, {how}", judged)


def tell_translation(found: dict[str, Any]) -> tuple[str, list[Any]]:
    whole = found["translation, before"]
    rows = [["8 key heads", "", f"{whole:.2f}", ""]]
    for how in HOW:
        its = found[f"translation, {how}"]
        rows.append([NAMES[how], *(f"{its[name]:.2f}" for name in ("merged", "quality", "recovered"))])
    header = ["key heads", "merged", "refitted", "200 steps later"]
    text = (
        f"### Translation, 8 key heads become 2\n\n{table(header, rows)}\n\nsacreBLEU, cased, {BLEU} "
        "test sentences, greedy: English to German, 2 layers that read and 2 that write, width 128, trained "
        f"for {found['translation, steps']} steps. Merged in the encoder, the decoder and between them, on "
        f"{PAIRS} pairs."
    )
    return text, []


def language(record: Record, quick: bool) -> None:
    """SmolLM2."""
    model, tokenizer = smollm2()
    ids = torch.tensor(tokenizer(" ".join(captions("train.en")[:12_000]))["input_ids"])
    pieces = ids[: len(ids) // LONG * LONG].view(-1, LONG)
    pieces = pieces[torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))]
    fed = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in pieces.split(SIZE)]
    held_out, fitted, rest = fed[:HELD], fed[HELD : HELD + FITTED], fed[HELD:]

    def measure(small: Any) -> float:
        """The perplexity."""
        with torch.no_grad():
            losses = [small(**batch, labels=batch["input_ids"]).loss for batch in held_out]
        return float(torch.stack(losses).mean().exp())

    record.once("smollm2, before", lambda: measure(model))
    folder = Path("out/merge/smollm2")

    def judged(how: str) -> dict[str, float]:
        result, small = merged(model, 1, fitted, measure, how)
        if how == "aligned":
            mh.save(small, folder)
        return result | {"cache": cache_bytes(small) or 0.0}

    def recovered() -> dict[str, float]:
        small, cost = mh.load(folder).eval(), since(Cost())
        mh.recover(
            small, rest, teacher=model, steps=STEPS, learning_rate=RATE,
            progress=lambda stage, done, total: say(f"{done} of {total} steps"),
        )  # fmt: skip
        return {"quality": measure(small), "minutes": cost().minutes, "steps": STEPS}

    for how in HOW:
        record.once(f"smollm2, {how}", lambda how=how: judged(how))
    record.once("smollm2, recovered", recovered)


def tell_language(found: dict[str, Any]) -> tuple[str, list[Any]]:
    """What was measured so far: a run of this part takes long, and each figure is kept when it is there."""
    whole, recovered = found["smollm2, before"], found.get("smollm2, recovered")
    rows = [["3 key heads", "", f"{whole:.2f}", ""]]
    for how in HOW:
        its = found.get(f"smollm2, {how}", {})
        last = recovered["quality"] if how == "aligned" and recovered else None
        shown = (its.get("merged"), its.get("quality"), last)
        rows.append([NAMES[how], *("" if x is None else f"{x:.2f} ({x / whole:.3f}x)" for x in shown)])
    header = ["key heads", "merged", "refitted", "recovered"]
    text = (
        f"### SmolLM2-135M, 3 key heads become 1\n\n{table(header, rows)}\n\nPerplexity on "
        f"{HELD * SIZE * LONG:,} tokens of captions; merged and refitted on {FITTED * SIZE * LONG:,} others."
    )
    goals: list[Any] = []
    if "smollm2, aligned" in found:
        its = found["smollm2, aligned"]
        text += f" Cache: {3 * its['cache']:,.0f} bytes a token before, {its['cache']:,.0f} after."
        goals.append(("SmolLM2, refitted: perplexity over that before", its["quality"] / whole, "<=", 1.15))
    if recovered:
        text += (
            f" {recovered['steps']} steps of recovery took {recovered['minutes']:.1f} minutes of two cores."
        )
        goals.append(("SmolLM2, recovered: the same", recovered["quality"] / whole, "<=", 1.05))
    return text, goals


PARTS = {
    "sentences": (sentences, tell_sentences),
    "translation": (translation, tell_translation),
    "language": (language, tell_language),
}
