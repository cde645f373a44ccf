"""What cutting loses: heads or parameters. Pruned models against equally large ones trained from scratch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from manyheads.common.intervals import Interval
from manyheads.heads.importance import importance
from manyheads.studies.drawing import bars, panels
from manyheads.studies.fitting import Recipe, fit, new_model
from manyheads.studies.language_text import opened
from manyheads.studies.result import Result
from manyheads.studies.study import Claim, Judgement, Language, Part, Row, Settings, Size, Words, grid
from manyheads.studies.subjects import judge_all, on_examples
from manyheads.surgery.cut import cut
from manyheads.surgery.plan import plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

claim = Claim(
    sentence=Words(
        "Cutting heads loses heads, not just parameters: the same number of parameters taken from the "
        "feed-forwards costs less, and a model of the pruned size trained from scratch is worse.",
        "剪头失去的是头，而不只是参数：从前馈层去掉同样多的参数代价更小，而同样大小、从零训练的模型更差。",
    ),
    explanation=Words(
        "A model without half of its heads is smaller, and smaller models are worse. So when pruning "
        "hurts, is it because heads are missing or because parameters are? One control takes the same "
        "number of parameters from somewhere else: all heads stay, and the feed-forward layers are "
        "narrower. If that costs less, heads were worth more than their parameters.\n\n"
        "The other control has as many heads as the pruned model, but never had more: it is trained from "
        "scratch for as many steps in all. If it is worse, the many heads were of use while training, "
        "even if few are needed afterwards. The pruned model loses the least important half of the heads "
        "of each layer and is trained on for a while; all models see equally many steps.",
        "少了一半头的模型更小，而小的模型本来就更差。那么剪头变差时，是因为少了头，还是因为少了参数？第一"
        "个对照从别处去掉同样多的参数：保留所有的头，把前馈层变窄。如果这样代价更小，头就比它的参数更值钱"
        "。\n\n"
        "另一个对照的头数与剪过的模型一样，但从来没有更多的头：它从零训练，总步数相同。如果它更差，说明许"
        "多头在训练时有用，即使之后只需要少数几个。剪过的模型在每一层失去最不重要的一半的头，再继续训练一"
        "段；所有模型的总步数相同。",
    ),
    formulas=(
        r"\frac{h}{2}\cdot 4\,d\,d_{key}\ \mathrm{parameters\ fewer}\;=\;"
        r"2\,d\,(d_{hidden}-d'_{hidden})\ \mathrm{parameters\ fewer}",
    ),
    rule=Words(
        "Held-out losses are compared by seed, with 95% intervals: (a) the pruned model minus the one "
        "with narrower feed-forwards, (b) the model from scratch minus the pruned one. Holds if both "
        "intervals lie above zero; does not hold if both lie below; holds in part if one lies above; else "
        "it cannot be told.",
        "按随机种子配对比较留出损失及其 95% 区间：（a）剪过的模型减去前馈层变窄的模型，（b）从零训练的模型"
        "减去剪过的模型。若两个区间都高于零，则成立；若都低于零，则不成立；若有一个高于零，则部分成立；否"
        "则无法判断。",
    ),
    caption=Words(
        "Held-out loss above that of the full model (nats a token, lower is better), after equally many "
        "steps. All three have the same number of parameters, within 1%. Bars: 95% interval over seeds.",
        "与完整模型相比留出损失的增加（每个词元的奈特数，越低越好），总训练步数相同。三个模型的参数量相同"
        "（相差不到 1%）。误差线：各随机种子的 95% 区间。",
    ),
    sources=(
        "Voita, Talbot, Moiseev, Sennrich and Titov 2019, Analyzing multi-head self-attention, section 6.3.",
        "Michel, Levy and Neubig 2019, Are sixteen heads really better than one?",
    ),
)


@dataclass(frozen=True)
class Setup(Settings):
    """The language model, how long it is trained, and how long it recovers from the cut."""

    d_model: int = 64
    heads: int = 8
    layers: int = 2
    context: int = 64
    steps: int = 120
    recovery: int = 40
    batch_tokens: int = 1024
    windows: int = 32


SIZES: Mapping[Size, Setup] = {
    "tiny": Setup(
        seeds=2, d_model=16, heads=4, layers=1, context=16, steps=2, recovery=1, batch_tokens=128, windows=4
    ),
    "quick": Setup(),
    "full": Setup(
        seeds=5, d_model=128, layers=4, context=128, steps=500, recovery=125, batch_tokens=1024, windows=64
    ),
}  # fmt: skip
SMALL: Mapping[str, Words] = {
    "pruned": Words("heads pruned,\nthen trained on", "剪去头后\n继续训练"),
    "scratch": Words("fewer heads\nfrom scratch", "头较少，\n从零训练"),
    "narrow": Words("all heads, narrower\nfeed-forwards", "头全在，\n前馈层变窄"),
}

COLUMNS: Mapping[str, Words] = {
    "loss": Words("held-out loss", "留出损失"),
    "parameters": Words("parameters", "参数量"),
}


def parts(setup: Setup) -> Sequence[Part]:
    """A part for every seed: the pruned model comes from the full one."""
    return grid(setup, _measure)


def _measure(setup: Setup, seed: int) -> list[Row]:
    half, d_key = setup.heads // 2, setup.d_model // setup.heads
    whole = Recipe(steps=setup.steps + setup.recovery, batch_tokens=setup.batch_tokens)
    task, data = _task(setup, setup.heads, d_key, None)
    first = Recipe(steps=setup.steps, batch_tokens=setup.batch_tokens)
    trained = fit(task, data, new_model(task, seed), first, seed).model
    batches = on_examples(task, trained, data.train, setup.windows).all_batches
    chosen = plan(importance(trained, batches, seed=seed), 0.5, scope="layer")
    pruned = cut(trained, chosen, batches[0])
    gentle = Recipe(setup.recovery, setup.batch_tokens, first.learning_rate / 4, warmup=setup.recovery // 5)
    rows = [_row("pruned", fit(task, data, pruned, gentle, seed + 1000))]
    removed = setup.layers * half * (4 * setup.d_model + 3) * d_key  # with the biases of q, k and v
    hidden = 4 * setup.d_model - round(removed / setup.layers / (2 * setup.d_model + 1))
    for name, heads, width in (
        ("full", setup.heads, None),
        ("scratch", half, None),
        ("narrow", setup.heads, hidden),
    ):
        task, data = _task(setup, heads, d_key, width)
        rows.append(_row(name, fit(task, data, new_model(task, seed), whole, seed)))
    return rows


def _task(setup: Setup, heads: int, d_key: int, d_hidden: int | None) -> tuple[Any, Any]:
    task, data = opened(setup.data, setup.context)
    task.d_model, task.layers, task.heads = setup.d_model, setup.layers, heads
    task.d_key = task.d_value = d_key
    task.d_hidden = d_hidden
    return task, data


def _row(name: str, fitted: Any) -> Row:
    model: nn.Module = fitted.model
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"model": name, "loss": fitted.metrics()["loss"], "parameters": parameters}


def figure(result: Result, language: Language) -> Figure:
    """How much worse each small model is than the full one."""
    drawing, (axes,) = panels()
    bars(axes, {words[language]: _minus(result, name, "full") for name, words in SMALL.items()})
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_ylabel(Words("loss above the full model (nats)", "比完整模型高出的损失（奈特）")[language])
    return drawing


def verdict(result: Result) -> Judgement:
    """By the pruned model against the two others of its size."""
    heads, history = _minus(result, "pruned", "narrow"), _minus(result, "scratch", "pruned")
    numbers = Words(
        f"The pruned model is worse than the one with narrower feed-forwards by {heads:.3f} nats a token; "
        f"the model from scratch is worse than the pruned one by {history:.3f} ({heads.count} seeds).",
        f"剪过的模型比前馈层变窄的模型每词元高 {heads:.3f} 奈特；"
        f"从零训练的模型比剪过的模型高 {history:.3f} 奈特（{heads.count} 个随机种子）。",
    )
    return Judgement(judge_all((heads, history), 0.0), numbers)


def _minus(result: Result, first: str, second: str) -> Interval:
    return result.difference("loss", {"model": first}, {"model": second})
