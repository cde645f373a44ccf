"""Eight heads translate better than one, by 2 to 3 BLEU as articles say: BLEU by the number of heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from manyheads.common.intervals import paired_difference
from manyheads.studies.by_heads import draw_by_heads
from manyheads.studies.fitting import Recipe, fit, new_model
from manyheads.studies.result import Result
from manyheads.studies.study import (
    Claim,
    Judgement,
    Language,
    Part,
    Row,
    Settings,
    Size,
    Words,
    grid,
    judge_effects,
)
from manyheads.studies.translation_text import opened

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MANY = 8  # heads, against one
GAIN = 2.0  # BLEU: the least that the articles promise

claim = Claim(
    sentence=Words(
        "In translation eight heads score 2 to 3 BLEU above one head of the same size.",
        "翻译中，参数量相同时八个头比一个头高 2 到 3 BLEU。",
    ),
    explanation=Words(
        "Translation is where multi-head attention comes from. To write the next word, the decoder needs "
        "the word it translates, that word's neighbours, and what it wrote before, all at once; one head "
        "gives one weighted mean of them.\n\n"
        "BLEU compares the model's sentences with those of a human translator, from 0 to 100, by the "
        "words and word sequences they share. The paper that introduced multi-head attention measured a "
        "difference of 0.9 BLEU between 8 heads and one; articles about it often speak of 2 to 3.",
        "多头注意力正是为翻译而提出的。写下一个词时，解码器同时需要正在翻译的词、它的邻词以及已经写出的内"
        "容；一个头只能给出它们的一个加权平均。\n\n"
        "BLEU 按共有的词和词序列，把模型的句子与人工译文比较，范围为 0 到 100。提出多头注意力的论文测得 8 "
        "个头与一个头相差 0.9 BLEU；介绍它的文章常说相差 2 到 3。",
    ),
    formulas=(
        r"\mathrm{BLEU}=\min(1,e^{1-r/c})\,\exp\left(\frac{1}{4}\sum_{n=1}^{4}\log p_n\right)",
        r"p_n:\ \mathrm{precision\ of\ n\!-\!grams},\quad c,\ r:\ \mathrm{length\ of\ output,\ reference}",
    ),
    rule=Words(
        "Translation models of the same size are trained with 1, 2, 4 ... heads, and BLEU on held-out "
        "sentences is compared by seed. Two statements, by 95% intervals over seeds: eight heads score "
        "more than one; the difference is above 2 BLEU. Holds if both hold, in part if only the first "
        "does, does not hold if neither does; else it cannot be told.",
        "训练同样大小、头数为 1、2、4……的翻译模型，按随机种子配对比较留出句子上的 BLEU。两个陈述，按各种"
        "子的 95% 区间判断：八个头的分数高于一个头；相差超过 2 BLEU。两者都成立则成立，只有前者成立则部分"
        "成立，都不成立则不成立；否则无法判断。",
    ),
    caption=Words(
        "BLEU on held-out sentences (higher is better) by the number of heads; all models have the same "
        "number of parameters. Bars: 95% interval over seeds.",
        "各头数在留出句子上的 BLEU（越高越好）；所有模型参数量相同。误差线：各随机种子的 95% 区间。",
    ),
    sources=(
        "Vaswani and others 2017, Attention is all you need, table 3 (A).",
        "Papineni and others 2002, BLEU: a method for automatic evaluation of machine translation.",
    ),
)


@dataclass(frozen=True)
class Setup(Settings):
    """The translation model and how long it is trained."""

    heads: tuple[int, ...] = (1, 8)
    d_model: int = 64
    layers: int = 2
    vocabulary: int = 400
    steps: int = 300
    batch_tokens: int = 1024
    learning_rate: float = 3e-3


SIZES: Mapping[Size, Setup] = {
    "tiny": Setup(seeds=2, heads=(1, 8), d_model=16, layers=1, steps=2, batch_tokens=64),
    "quick": Setup(),
    "full": Setup(
        seeds=3,
        heads=(1, 2, 4, 8, 16, 32),
        d_model=128,
        layers=3,
        vocabulary=2000,
        steps=500,
        batch_tokens=2048,
    ),
}

COLUMNS: Mapping[str, Words] = {
    "bleu": Words("BLEU", "BLEU 分数"),
    "loss": Words("held-out loss", "留出损失"),
    "parameters": Words("parameters", "参数量"),
}


def parts(setup: Setup) -> Sequence[Part]:
    """A part for every number of heads and seed."""
    return grid(setup, _measure, heads=setup.heads)


def _measure(setup: Setup, heads: int, seed: int) -> Row:
    task, data = opened(
        setup.data, d_model=setup.d_model, heads=heads, layers=setup.layers, vocabulary=setup.vocabulary
    )
    recipe = Recipe(
        setup.steps, setup.batch_tokens, learning_rate=setup.learning_rate, warmup=max(setup.steps // 5, 1)
    )
    model = new_model(task, seed)
    metrics = fit(task, data, model, recipe, seed).metrics(examples=0)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"bleu": metrics["bleu"], "loss": metrics["loss"], "parameters": parameters}


def figure(result: Result, language: Language) -> Figure:
    """BLEU by the number of heads."""
    return draw_by_heads(result, "bleu", COLUMNS["bleu"], language)


def verdict(result: Result) -> Judgement:
    """By the gain of eight heads over one."""
    gain = paired_difference(result.values("bleu", heads=MANY), result.values("bleu", heads=1))
    means = {h: result.interval("bleu", heads=h).mean for h in result.distinct("heads")}
    best = max(means, key=lambda h: means[h])
    numbers = Words(
        f"{MANY} heads score {gain:.2f} BLEU above one head ({means[1]:.1f}); the best number is {best}, "
        f"with {means[best]:.1f} BLEU ({gain.count} seeds).",
        f"{MANY} 个头比一个头（{means[1]:.1f}）高 {gain:.2f} BLEU；最好的头数是 {best}，"
        f"BLEU 为 {means[best]:.1f}（{gain.count} 个随机种子）。",
    )
    return Judgement(judge_effects([(gain, 0.0), (gain, GAIN)]), numbers)
