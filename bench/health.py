"""whether alarms about heads come before the loss breaks, whether the clip saves the run, and what looks cost.

40 small language models on the text of Shakespeare: 20 by ordinary recipes, 20 made to diverge. A run that
breaks in its first steps cannot be announced, so these train well for 400 steps at a rate near the largest
that still works; then the rate rises to 8 times that within 300 steps and stays. What was measured is kept
in results/health.json, and not measured again: delete the file to begin anew. The rules of the alarms were
set on seeds from 100 on (`python -m bench.health tune`); what is reported are seeds 1 to 4.
"""

import math
import sys
import tempfile
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.harness import table, targets
from bench.record import Record
from manyheads.nn.transformers import Decoder
from manyheads.training.head_alarms import Alarm
from manyheads.training.head_health import HeadHealth

RECORD = Path(__file__).parent / "results" / "health.json"
TEXT = Path("/work/shared/data/language/tinyshakespeare.txt")
SEEDS, TUNING = (1, 2, 3, 4), (101, 102)
STEPS, RISES, TIMES = 1000, (400, 600, 750, 900), 8.0  # it rises, stays and falls in the log
EVERY, CLIP = 25, 50.0
CONTEXT, BATCH = 32, 16
# The loss breaks when its mean over MEAN steps exceeds the lowest so far by BREAK nats from then on to the end
# (or is not a number): ten times the standard error of that mean, and what the last 500 steps had gained.
MEAN, BREAK = 25, 0.15
AHEAD = 50
# What an alarm may be about to count: what announces divergence. Twins and dead heads are waste, not danger.
DANGER = ("largest_logit", "entropy_normalised", "gradient_norm", "loss")
SMALL: dict[str, Any] = {"d_model": 32, "heads": 4, "layers": 3}
DIVERGING: dict[str, dict[str, Any]] = {
    "pre-norm, rate x8": {"rate": 1.2e-2, "rises": True},
    "pre-norm, rate x8, gradients not clipped": {"rate": 1.2e-2, "rises": True, "max_norm": math.inf},
    "pre-norm, 8 heads, rate x8": {"rate": 1.2e-2, "rises": True, "heads": 8},
    "post-norm, no warm-up, rate x8": {"rate": 6e-3, "warmup": 0, "rises": True, "norm": "post"},
    "post-norm, no warm-up, 2 layers, rate x8": {
        "rate": 8e-3, "warmup": 0, "rises": True, "norm": "post", "layers": 2,
    },
}  # fmt: skip
HEALTHY: dict[str, dict[str, Any]] = {
    "pre-norm": {"rate": 3e-3},
    "pre-norm, high rate": {"rate": 1e-2},
    "post-norm, warm-up": {"rate": 3e-3, "warmup": 200, "norm": "post"},
    "8 heads in 2 groups, dropout, ALiBi": {
        "rate": 5e-3, "heads": 8, "kv_heads": 2, "dropout": 0.1, "positions": "alibi",
    },
    "query and key norms, learned positions": {
        "rate": 5e-3, "qk_norm": True, "positions": "learned", "max_length": CONTEXT,
    },
}  # fmt: skip


@cache
def characters() -> tuple[Tensor, int]:
    """The text as ids, and how many there are."""
    text = TEXT.read_text()
    ids = {letter: number for number, letter in enumerate(sorted(set(text)))}
    return torch.tensor([ids[letter] for letter in text]), len(ids)


def learn(
    seed: int,
    rate: float,
    warmup: int = 100,
    rises: bool = False,
    max_norm: float = 1.0,
    clip: float | None = None,
    steps: int = STEPS,
    **model: Any,
) -> dict[str, Any]:
    """One run: the losses, the alarms, the largest logit at every look, and what the clip did."""
    text, vocabulary = characters()
    torch.manual_seed(seed)
    torch.set_flush_denormal(True)
    decoder = Decoder(**(SMALL | model), vocabulary=vocabulary)
    optimizer = torch.optim.AdamW(
        decoder.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    alarms: list[Alarm] = []
    health = HeadHealth(decoder, EVERY, clip=clip, on_alarm=alarms.append)
    batches = torch.Generator().manual_seed(seed + 1000)
    losses = []
    for step in range(1, steps + 1):
        now = rate * min(1.0, step / warmup) if warmup else rate
        if rises:
            now *= TIMES ** float(np.interp(step, RISES, (0, 1, 1, 0)))
        for group in optimizer.param_groups:
            group["lr"] = now
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1), generator=batches)
        ids = text[starts + torch.arange(CONTEXT + 1)]
        health.before_step()
        loss = F.cross_entropy(decoder(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(decoder.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        health.after_step(loss)
        losses.append(round(loss.item(), 4))
        if not math.isfinite(losses[-1]):
            break
    largest = health.history["largest_logit"].amax(1).tolist()
    return {
        "losses": losses,
        "alarms": [[alarm.step, alarm.metric, alarm.message] for alarm in alarms],
        "logits": [[step, round(value, 1)] for step, value in zip(health.history.steps, largest, strict=True)],
        "clipped": len(health.clipped),
    }


def means(losses: list[float]) -> np.ndarray:
    """The mean of the last MEAN losses at each step from MEAN on."""
    return np.convolve(losses, np.ones(MEAN) / MEAN, "valid")


def broken(losses: list[float], by: float = BREAK) -> int | None:
    """The step from which on the loss stays ``by`` above its lowest, or None."""
    if not math.isfinite(losses[-1]):
        return len(losses)
    mean = means(losses)
    above = mean > np.minimum.accumulate(mean) + by
    if not above[-1]:
        return None
    back = np.flatnonzero(~above)
    return int(back[-1]) + 1 + MEAN


def through_logits(run: dict[str, Any]) -> bool:
    """Whether the largest logit passed the clip before the loss had risen half as far as a break."""
    risen = broken(run["losses"], BREAK / 2) or len(run["losses"])
    return any(value > CLIP and step < risen for step, value in run["logits"])


def announced(run: dict[str, Any]) -> list[Any] | None:
    """The first alarm about divergence."""
    return next((alarm for alarm in run["alarms"] if alarm[1] in DANGER), None)
