"""Roles: the induction heads of SmolLM2 found and silenced; what MiniLM's heads know of syntax.

The treebank is not ours: TREEBANK=file.conllu says where one is, and without it that part is left out.
"""

import os
import random
from collections.abc import Iterator
from importlib import resources
from typing import Any

import torch
from torch.nn import functional as F

import manyheads as mh
from bench import models
from bench.harness import say, table, targets
from manyheads.heads.roles import probe_texts

LISTED = 12
SILENCED = 20
DRAWS = 5
TOP = 3
EXPECTED = ((18, 6), (17, 3))  # the heads that were expected first


def run(quick: bool) -> str:
    return f"{induction(quick)}\n\n{syntax(quick)}"


def texts(tokenizer: Any) -> list[dict[str, torch.Tensor]]:
    lines = (
        resources.files("manyheads").joinpath("data/files/text.txt").read_text(encoding="utf-8").splitlines()
    )
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return [dict(tokenizer(lines[:16], padding=True, return_tensors="pt"))]


def induction(quick: bool) -> str:
    """Which heads look for what came after the same token, and what is lost without them."""
    model, tokenizer = models.smollm2()
    batches = texts(tokenizer)
    names = ["duplicate", "induction", "copying"]
    found = mh.roles(model, batches, tokenizer=tokenizer, only=names, progress=_say)
    score = found["induction_score"]
    order = score.argsort(descending=True).tolist()
    rows = [
        [
            f"layer {found.rows[row].layer} head {found.rows[row].head}",
            f"{score[row]:.3f}",
            f"{found['induction_baseline'][row]:.4f}",
            f"{found['duplicate_score'][row]:.3f}",
            f"{found['copying_score'][row]:.2f}",
            found["roles"][row],
        ]
        for row in order[:LISTED]
    ]
    header = ["head", "induction", "random place", "duplicate", "copying", "roles"]
    cases = int(found.sums["induction_score"][0][0])
    heads = [(row.layer, row.head) for row in found.rows]
    given = probe_texts.batch_facts(model, batches, tokenizer)
    sequences = list(probe_texts.repeated(given))
    whole = repeated_loss(model, sequences)
    without = silenced_loss(model, sequences, [heads[row] for row in order[:TOP]])
    say(f"loss {whole:.3f}, without the top {TOP} {without:.3f}")
    others = [heads[row] for row in order[TOP:]]
    losses = []
    for draw in range(1 if quick else DRAWS):
        chosen = random.Random(draw).sample(others, SILENCED)
        losses.append(silenced_loss(model, sequences, chosen))
        say(f"without {SILENCED} others: {losses[-1]:.3f}")
    mean = sum(losses) / len(losses)
    silenced = table(
        ["silenced", "loss on the second copy", "more by"],
        [
            ["nothing", f"{whole:.3f}", ""],
            [f"the {TOP} best induction heads", f"{without:.3f}", f"{without - whole:.3f}"],
            *(
                [f"{SILENCED} other heads, draw {draw}", f"{loss:.3f}", f"{loss - whole:.3f}"]
                for draw, loss in enumerate(losses)
            ),
        ],
    )
    rank = [heads.index(head) for head in EXPECTED]
    goals = targets(
        ("layer 18 head 6: its place by induction score", 1 + order.index(rank[0]), "<=", 2),
        ("layer 17 head 3: its place by induction score", 1 + order.index(rank[1]), "<=", 2),
        (
            "the weaker of both / the median head",
            min(float(score[row]) for row in rank) / float(score.median()),
            ">=",
            10,
        ),
        (
            f"harm of silencing {TOP} / harm of {SILENCED} others, mean",
            (without - whole) / (mean - whole),
            ">=",
            1,
        ),
        (
            f"harm of silencing {TOP} / harm of {SILENCED} others, worst draw",
            (without - whole) / (max(losses) - whole),
            ">=",
            1,
        ),
    )
    claimed = sum("induction" in words for words in found["roles"])
    return (
        f"SmolLM2-135M, random tokens that come twice, {cases} queries a head; {claimed} of {len(found)} "
        f"heads are claimed as induction heads, the median head scores {score.median():.4f}:\n\n"
        f"{table(header, rows)}\n\n{silenced}\n\n{goals}"
    )


def repeated_loss(model: Any, sequences: list[tuple[Any, Any]]) -> float:
    """The mean loss on the tokens of the second copy, which the first one gives away."""
    total, count = 0.0, 0
    with torch.no_grad():
        for batch, facts in sequences:
            logits = model(**batch).logits[:, facts.begin : -1]
            answers = batch["input_ids"][:, facts.begin + 1 :]
            total += float(F.cross_entropy(logits.flatten(0, 1), answers.flatten(), reduction="sum"))
            count += answers.numel()
    return total / count


def silenced_loss(model: Any, sequences: list[tuple[Any, Any]], heads: list[tuple[int, int]]) -> float:
    chosen: dict[int, list[int]] = {}
    for layer, head in heads:
        chosen.setdefault(layer, []).append(head)
    with mh.silence(model, chosen):
        return repeated_loss(model, sequences)


def syntax(quick: bool) -> str:
    """For each relation and direction the best head against the best fixed offset."""
    path = os.environ.get("TREEBANK")
    if path is None:
        return "Syntax was left out: TREEBANK=file.conllu gives a treebank."
    model, tokenizer = models.minilm()
    found = mh.roles(model, texts(tokenizer), path, tokenizer=tokenizer, only=["syntactic"], progress=_say)
    rows = sorted(_relations(found), key=lambda row: -row[0])
    best = rows[0]
    lines = [
        [name, head, f"{score:.3f}", f"{error:.3f}", f"{baseline:.3f}", f"{100 * gain:+.1f}", f"{count:,}"]
        for gain, name, head, score, error, baseline, count in rows
    ]
    header = ["relation", "best head", "accuracy", "se", "best offset", "points", "pairs"]
    claims = sum(bool(words) for words in found["roles"])
    reached = sum(gain >= 0.1 for gain, *_ in rows)
    return (
        f"MiniLM on {os.path.basename(path)}: {claims} of {len(found)} heads have a syntactic role. "
        f"Relations with at least 100 pairs, the best head of each:\n\n{table(header, lines)}\n\n"
        + targets(
            (f"points over the best offset ({best[1]})", 100 * best[0], ">=", 10),
            ("relations and directions with 10 points or more", reached, ">=", 1),
        )
    )


def _relations(found: mh.HeadTable) -> Iterator[tuple[float, str, str, float, float, float, int]]:
    for column in (name.removesuffix("_score") for name in found.sums if name.endswith("_score")):
        score, baseline = found[f"{column}_score"], found[f"{column}_baseline"]
        row = int(score.nan_to_num(-1.0).argmax())
        count = int(found.sums[f"{column}_score"][0][row])
        if count >= 100:
            head = f"{found.rows[row].layer}.{found.rows[row].head}"
            error = float(found[f"{column}_score_se"][row])
            gain = float(score[row] - baseline[row])
            name = column.partition(":")[2]
            yield gain, name, head, float(score[row]), error, float(baseline[row]), count


def _say(stage: str, done: float, total: float | None) -> None:
    if done in (0, total):
        say(f"{stage}: {done} of {total}")
