"""a cache that forgets where it may: SmolLM2 at 8192 tokens.

    MANYHEADS_LONG_TEXT=book.txt,web.txt python -m bench cache --out bench/results

Heads are priced on a piece of 2048 tokens from the start of each text; then a context of 8192 tokens from a
later part of the first, with ten keys planted in it, is read with every cache in chunks of 512
(MANYHEADS_CONTEXTS=2: of the first two). Perplexity is of all its tokens. Each planted key is asked for at
the end; a point is a digit predicted right (with the digits before it) at its depth. Memory is that of the
process (resident, trimmed) with the cache and without.

Beside ours: heads chosen at random, and heads chosen by kvpress, whose DuoAttention press scores heads on the
fly; its code runs here on our text, because its own (BookSum) is not to be had offline. Its heads are then
run in our cache, with its 128 first and 256 last tokens: kvpress itself masks the keys that it drops and
frees no memory, and its hooks do not run with transformers above 5.2. It takes part if PYTHONPATH has it:

    pip install --no-deps --target FOLDER kvpress cachetools fire termcolor

MANYHEADS_RIVALS names those to compare with, by default kvpress,random. What was measured is kept in
results/cache.json; delete it to begin anew.
"""

import copy
import ctypes
import gc
import os
import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

import manyheads as mh
from bench.harness import MIB, say, table, targets
from bench.memory import status
from bench.models import smollm2
from bench.record import Record

RECORD = Path(__file__).parent / "results" / "cache.json"
LENGTH, PIECE, CHUNK = 8192, 2048, 512
BUDGET, FIRST, WINDOW = 0.545, 4, 512
PIECES = 1  # of each text, to price
STEPS = 24  # of decoding that are timed
NAMES = ("Alma", "Boris", "Clara", "David", "Edith", "Felix", "Grace", "Henry", "Irene", "Jacob")


def texts(tokenizer: Any) -> dict[str, Tensor]:
    """The token ids of each text, by the name of its file."""
    paths = [path for path in os.environ.get("MANYHEADS_LONG_TEXT", "").split(",") if path]
    if not paths:
        raise ValueError("MANYHEADS_LONG_TEXT: expected text files of at least 20,000 tokens, with commas")
    return {
        Path(path).stem: tokenizer(Path(path).read_text(), return_tensors="pt").input_ids[0] for path in paths
    }


def planted(ids: Tensor, tokenizer: Any, length: int) -> tuple[Tensor, list[tuple[float, Tensor, Tensor]]]:
    """A text with ten keys in it, and for each key its depth, the question and the digits."""
    draw = random.Random(0)
    keys = [(name, str(draw.randrange(10_000, 100_000))) for name in NAMES]
    notes = [
        tokenizer(f"\nThe pass key of {name} is {key}. Remember it.\n", return_tensors="pt").input_ids[0]
        for name, key in keys
    ]
    text = ids[: length - sum(map(len, notes))]
    step = len(text) // len(notes)
    parts, depths = [], []
    for number, note in enumerate(notes):
        start = 0 if number == 0 else number * step - step // 2
        parts += [text[start : number * step + step // 2], note]
        depths.append((number * step + step // 2) / len(text))
    parts.append(text[(len(notes) - 1) * step + step // 2 :])
    asked = []
    for depth, (name, key) in zip(depths, keys, strict=True):
        question = tokenizer(f"\nThe pass key of {name} is", return_tensors="pt").input_ids[0]
        whole = tokenizer(f"\nThe pass key of {name} is {key}", return_tensors="pt").input_ids[0]
        asked.append((depth, question, whole[len(question) :]))
    return torch.cat(parts)[None], asked


@torch.no_grad()
def read(model: Any, ids: Tensor, cache: Any) -> float:
    """Fill a cache in chunks; the mean cross-entropy of all tokens but the first."""
    total, last = 0.0, None
    for start in range(0, ids.shape[1], CHUNK):
        part = ids[:, start : start + CHUNK]
        logits = model(part, past_key_values=cache, use_cache=True).logits[0].float()
        total += float(F.cross_entropy(logits[:-1], part[0, 1:], reduction="sum"))
        if last is not None:
            total += float(F.cross_entropy(last, part[0, 0]))
        last = logits[-1].clone()
    return total / (ids.shape[1] - 1)


@torch.no_grad()
def answers(model: Any, cache: Any, asked: list[tuple[float, Tensor, Tensor]]) -> list[list[float]]:
    """For each key: its depth, the share of digits predicted right, and their mean log probability."""
    rows = []
    for depth, question, digits in asked:
        ids = torch.cat([question, digits])[None]
        logits = model(ids, past_key_values=copy.deepcopy(cache), use_cache=True).logits[0]
        logits = logits[len(question) - 1 : -1].float().log_softmax(-1)
        right = (logits.argmax(-1) == digits).float().mean()
        rows.append([depth, float(right), float(logits.gather(1, digits[:, None]).mean())])
    return rows


def resident() -> int:
    """The memory of this process, without what the allocator could give back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return status("VmRSS")


def measure(model: Any, ids: Tensor, asked: Any, cache: Any) -> dict[str, Any]:
    before = resident()
    started = time.process_time()
    loss = read(model, ids, cache)
    seconds = time.process_time() - started
    held = resident() - before
    return {"loss": loss, "bytes": held, "seconds": seconds, "keys": answers(model, cache, asked)}


@torch.no_grad()
def decoding(model: Any, caches: dict[str, Any]) -> dict[str, float]:
    """The fastest step of each, in processor seconds, all taking turns."""
    token, best = torch.tensor([[28]]), dict.fromkeys(caches, float("inf"))
    for step in range(STEPS):
        for name, cache in caches.items():
            started = time.process_time()
            model(token, past_key_values=cache, use_cache=True)
            if step:
                best[name] = min(best[name], time.process_time() - started)
    return best


def kvpress_scores(model: Any, tokenizer: Any, pieces: list[Tensor]) -> Tensor | None:
    """What kvpress scores the key/value heads with on these pieces, (layers, kv_heads); None without it."""
    try:
        from kvpress.presses import duo_attention_press as press
    except ImportError:
        return None

    class Texts:
        def to_pandas(self):
            return self

        def sample(self, number, random_state):
            return self

        def __getitem__(self, name):
            return self

        def tolist(self):
            return list(range(len(pieces)))

    class Tokens(dict):
        def to(self, device):
            return self

    class Tokenizer:
        @staticmethod
        def from_pretrained(name):
            return lambda number, return_tensors: Tokens(input_ids=pieces[number])

    press.load_dataset, press.AutoTokenizer = lambda *a, **k: Texts(), Tokenizer
    return torch.tensor(press.duo_attention_on_the_fly(model, num_samples=len(pieces)))


def cheapest(scores: Tensor, count: int) -> dict[int, list[int]]:
    chosen: dict[int, list[int]] = {}
    for index in scores.flatten().argsort()[:count].tolist():
        chosen.setdefault(index // scores.shape[1], []).append(index % scores.shape[1])
    return chosen


def run(quick: bool) -> str:
    torch.set_num_threads(1)
    model, tokenizer = smollm2()
    length = 2048 if quick else LENGTH
    record = Record(Path("out/cache-quick.json") if quick else RECORD)
    corpora = texts(tokenizer)
    pieces = [ids[n * PIECE : (n + 1) * PIECE][None] for ids in corpora.values() for n in range(PIECES)]

    def make_plan() -> dict[str, Any]:
        started = time.process_time()
        plan = mh.cache_plan(
            model, pieces, BUDGET, first=FIRST, window=WINDOW,
            progress=lambda stage, done, total: say(f"{stage} {done} of {total}"),
        )  # fmt: skip
        return {
            "forget": {str(layer): heads for layer, heads in plan.forget.items()},
            "prices": {str(layer): prices for layer, prices in plan.prices.items()},
            "protected": sum(map(len, plan.protected.values())),
            "seconds": time.process_time() - started,
        }

    planned = record.once("plan", make_plan)
    forget = {int(layer): heads for layer, heads in planned["forget"].items()}
    plan = mh.CachePlan.of(model, forget, first=FIRST, window=WINDOW)
    plans = {"full": mh.CachePlan.of(model, {}), "ours": plan}
    rivals = os.environ.get("MANYHEADS_RIVALS", "kvpress,random").split(",")
    if "kvpress" in rivals:
        scores = record.once("kvpress", lambda: _listed(kvpress_scores(model, tokenizer, pieces)))
        if scores is not None:
            chosen = cheapest(torch.tensor(scores), plan.forgetting)
            plans["kvpress"] = mh.CachePlan.of(model, chosen, first=128, window=256)
    if "random" in rivals:
        scores = torch.rand(len(plan.sizes), 3, generator=torch.Generator().manual_seed(0))
        chosen = cheapest(scores, plan.forgetting)
        plans["random"] = mh.CachePlan.of(model, chosen, first=FIRST, window=WINDOW)
    contexts = list(corpora)[: int(os.environ.get("MANYHEADS_CONTEXTS", "1"))]
    caches: dict[str, Any] = {}
    for text in contexts:
        whole, asked = planted(corpora[text][PIECES * PIECE + 4096 :], tokenizer, length)
        for name, one in plans.items():
            key, timed = f"{text} {name}", name in ("full", "ours") and text == contexts[0]
            if key in record.found and not (timed and "decoding" not in record.found):
                continue
            cache = DynamicCache(config=model.config) if name == "full" else mh.HeadwiseCache(model, one)
            record.note(key, measure(model, whole, asked, cache))
            say(f"{key}: {record.found[key]}")
            if timed:
                caches["DynamicCache" if name == "full" else name] = cache
            if name == "ours" and "decoding" not in record.found:
                caches["full"] = filled(model, caches["DynamicCache"], plans["full"])
                record.note("decoding", decoding(model, caches))
                caches.clear()
            del cache
    return report(record.found, contexts, plans, model, length)


def filled(model: Any, full: DynamicCache, plan: mh.CachePlan) -> mh.HeadwiseCache:
    """Our cache with the keys and values of a full one, and no head forgets: to read again takes long."""
    cache = mh.HeadwiseCache(model, plan)
    for layer, source in zip(cache.layers, full.layers, strict=True):
        (group,) = layer.memory.groups
        group._keys, group._values = source.keys.clone(), source.values.clone()
        group.held = layer.memory.length = source.keys.shape[2]
        layer.memory.start = torch.zeros(1, dtype=torch.int64)
        layer.memory._started = layer.is_initialized = True
    return cache


def _listed(scores: Tensor | None) -> list[list[float]] | None:
    return None if scores is None else scores.tolist()


def report(found: dict[str, Any], corpora: list[str], plans: dict[str, Any], model: Any, length: int) -> str:
    rows, worst, factor = [], {}, {}
    full_bytes = found[f"{corpora[0]} full"]["bytes"]
    for name, plan in plans.items():
        for text in corpora:
            if f"{text} {name}" not in found:
                continue
            figure, full = found[f"{text} {name}"], found[f"{text} full"]
            ratio = torch.tensor(figure["loss"] - full["loss"]).exp().item()
            right = sum(row[1] for row in figure["keys"]) / len(figure["keys"])
            lost = max(a[1] - b[1] for a, b in zip(full["keys"], figure["keys"], strict=True))
            factor[name] = max(factor.get(name, 0.0), ratio)
            worst[name] = max(worst.get(name, -1.0), lost)
            rows.append(
                [
                    name,
                    text,
                    plan.forgetting,
                    f"{figure['bytes'] / MIB:.0f}",
                    f"{figure['bytes'] / full_bytes:.3f}",
                    f"{torch.tensor(figure['loss']).exp():.3f}",
                    f"{ratio:.4f}",
                    f"{100 * right:.0f}",
                    f"{100 * lost:.0f}",
                    f"{figure['seconds']:.0f}",
                ]
            )
    head = [
        "heads chosen by", "text", "forget", "MiB", "of full", "perplexity", "of full", "digits right %",
        "most lost at a depth", "read s",
    ]  # fmt: skip
    columns = [key for text in corpora for name in plans if (key := f"{text} {name}") in found]
    depths = [
        [f"{row[0]:.0%}", *(f"{found[key]['keys'][n][1]:.0%}" for key in columns)]
        for n, row in enumerate(found[f"{corpora[0]} full"]["keys"])
    ]
    times = found["decoding"]
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    full_held = 2 * 90 * 64 * 4 * length
    expected = (weights + full_held) / (weights + full_held * plans["ours"].share(length))
    measured = times["full"] / times["ours"]
    share = max(found[f"{text} ours"]["bytes"] for text in corpora) / full_bytes
    goals = targets(
        ("bytes of the full cache, as process memory", share, "<=", 0.6),
        ("perplexity beside the full cache, worst text", factor["ours"], "<=", 1.01),
        ("points lost at a depth, worst", 100 * worst["ours"], "<=", 1),
        ("decoding: speed-up measured / predicted by bytes", measured / expected, ">=", 0.9),
    )
    steps = ", ".join(f"{name} {1e3 * seconds:.0f} ms" for name, seconds in times.items())
    return "\n\n".join(
        [
            f"SmolLM2-135M, {length} tokens, prefill in chunks of {CHUNK}. Ours keeps {FIRST} first and "
            f"{WINDOW} last tokens in {plans['ours'].forgetting} of 90 key/value heads; priced in "
            f"{found['plan']['seconds']:.0f} s of processor time, {found['plan']['protected']} heads "
            "protected. The full cache is transformers' DynamicCache.",
            table(head, rows),
            goals,
            f"One step of decoding after {length} tokens (processor time, fastest of {STEPS}): {steps}. "
            f"DynamicCache copies itself at each step; full is our cache without a head that forgets. Bytes "
            f"predict {expected:.3f}x for ours beside full ({weights / MIB:.0f} MiB of weights, "
            f"{full_held / MIB:.0f} MiB of keys and values); measured {measured:.3f}x.",
            "Digits right by depth of the key. A depth has one key, of six tokens with the space before it; "
            "one token is 17 points, and the full cache itself misses many: the points lost at a depth are "
            "bounded by that as much as by the heads that forget.",
            table(["depth", *columns], depths),
        ]
    )
