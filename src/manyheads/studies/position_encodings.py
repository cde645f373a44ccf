"""Without positions translation suffers, most in long sentences: five encodings, by length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from manyheads.common.intervals import paired_difference
from manyheads.studies.drawing import COLOURS, GREY, bars, panels
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
)  # fmt: skip
from manyheads.studies.translation_text import opened
from manyheads.training.evaluation import evaluate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

claim = Claim(
    sentence=Words(
        "Without position encodings translation suffers, and most in long sentences.",
        "没有位置编码，翻译质量会下降，长句尤其明显。",
    ),
    explanation=Words(
        "Attention compares what tokens are, not where they stand: if the words of the source are "
        'shuffled, an encoder without positions gives the same vectors in another order. "Twenty-one '
        'thousand and five" and "five thousand and twenty-one" then look the same. The decoder is '
        "better off: each of its tokens sees only those before it, from which it can guess how far it is."
        "\n\n"
        "There are many ways to say where a token stands. Sinusoids and learned vectors are added to the "
        "tokens. Rotary positions turn queries and keys by an angle that grows with the position, so that "
        "a score depends on the distance. ALiBi lowers the scores of far keys. The longer the sentence, "
        "the more orders there are to mix up.",
        "注意力比较的是词元是什么，而不是在哪里：把源句的词打乱，没有位置编码的编码器给出的还是同样的向量"
        "，只是换了次序。“twenty-one thousand and five”和“five thousand and twenty-one”看起来就一样了"
        "。解码器要好一些：它的每个词元只看前面的词元，由此可以猜出自己走了多远。\n\n"
        "表示位置的办法很多。正弦编码和可学习的向量加到词元上；旋转位置编码把查询和键转动一个随位置增大的"
        "角度，使分数取决于距离；ALiBi 降低远处键的分数。句子越长，可能弄混的次序就越多。",
    ),
    formulas=(r"\mathrm{Attention}(P\,x)=P\,\mathrm{Attention}(x)\quad\mathrm{for\ every\ permutation}\ P",),
    rule=Words(
        "Translation models are trained with no positions and with four encodings, and their held-out "
        "loss is compared by seed, for the shorter and the longer half of the sentences. Two statements, "
        "by 95% intervals over seeds: without positions the loss is higher than the mean of the four "
        "encodings; this gap is greater for the longer half. Holds if both hold, in part if one does, "
        "does not hold if neither does; else it cannot be told.",
        "训练没有位置编码和有四种位置编码的翻译模型，分较短和较长的两半句子，按随机种子配对比较留出损失。"
        "两个陈述，按各种子的 95% 区间判断：没有位置编码时的损失高于四种编码的平均；较长的一半差距更大。两"
        "者都成立则成立，其一成立则部分成立，都不成立则不成立；否则无法判断。",
    ),
    caption=Words(
        "Held-out loss (nats a token, lower is better) of translation with each position encoding: left "
        "the shorter half of the sentences, right the longer half. Bars: 95% interval over seeds.",
        "各种位置编码下翻译的留出损失（每词元奈特数，越低越好）：左为较短的一半句子，右为较长的一半。误差"
        "线：各随机种子的 95% 区间。",
    ),
    sources=(
        "Vaswani and others 2017, Attention is all you need, section 3.5.",
        "Su and others 2021, RoFormer: enhanced transformer with rotary position embedding.",
        "Press, Smith and Lewis 2022, Train short, test long: attention with linear biases enables input "
        "length extrapolation.",
    ),
)


@dataclass(frozen=True)
class Setup(Settings):
    """The translation model and how long it is trained."""

    d_model: int = 64
    heads: int = 4
    layers: int = 1
    vocabulary: int = 400
    max_tokens: int = 64
    steps: int = 220
    batch_tokens: int = 512
    learning_rate: float = 5e-3


SIZES: Mapping[Size, Setup] = {
    "tiny": Setup(seeds=2, d_model=8, heads=2, steps=2, batch_tokens=64),
    "quick": Setup(),
    "full": Setup(
        seeds=3, d_model=128, layers=3, vocabulary=2000, max_tokens=128, steps=500, batch_tokens=2048,
        learning_rate=1e-3,
    ),
}  # fmt: skip
ENCODINGS = {
    "none": Words("none", "无"),
    "sinusoidal": Words("sinusoidal", "正弦"),
    "learned": Words("learned", "可学习"),
    "rotary": Words("rotary", "旋转"),
    "alibi": Words("ALiBi", "ALiBi"),
}
HALVES = {"short": Words("shorter half", "较短的一半"), "long": Words("longer half", "较长的一半")}

COLUMNS: Mapping[str, Words] = {
    "loss": Words("held-out loss", "留出损失"),
    "bleu": Words("BLEU", "BLEU 分数"),
}


def parts(setup: Setup) -> Sequence[Part]:
    """A part for every encoding and seed."""
    return grid(setup, _measure, positions=ENCODINGS)


def _measure(setup: Setup, positions: str, seed: int) -> list[Row]:
    task, data = opened(
        setup.data, d_model=setup.d_model, heads=setup.heads, layers=setup.layers, positions=positions,
        dropout=0.0, label_smoothing=0.0, vocabulary=setup.vocabulary, max_tokens=setup.max_tokens,
    )  # fmt: skip
    recipe = Recipe(setup.steps, setup.batch_tokens, learning_rate=setup.learning_rate)
    model = fit(task, data, new_model(task, seed), recipe, seed).model
    by_length = sorted(range(len(data.valid)), key=lambda i: data.valid.sizes[i])
    middle = len(by_length) // 2
    halves = {"short": by_length[:middle], "long": by_length[middle:]}
    rows: list[Row] = []
    for half, indices in halves.items():
        metrics = evaluate(task, model, data.valid, indices)
        rows.append({"half": half} | {name: metrics[name] for name in COLUMNS})
    return rows


def figure(result: Result, language: Language) -> Figure:
    """Loss by encoding, for the two halves."""
    drawing, axes = panels(len(HALVES))
    colours = [GREY, *[COLOURS[0]] * (len(ENCODINGS) - 1)]
    highest = max(float(row["loss"] or 0) for row in result.rows)
    for each, (half, title) in zip(axes, HALVES.items(), strict=True):
        losses = {
            words[language]: result.interval("loss", positions=positions, half=half)
            for positions, words in ENCODINGS.items()
        }
        bars(each, losses, colours)
        each.set_ylim(0, 1.15 * highest)
        each.set_title(title[language], fontsize=11, loc="left")
        each.set_xlabel(Words("position encoding", "位置编码")[language])
    axes[0].set_ylabel(COLUMNS["loss"][language])
    return drawing


def verdict(result: Result) -> Judgement:
    """By the gap to the mean of the encodings, and how much greater it is in long sentences."""
    gaps = {half: _gap(result, half) for half in HALVES}
    both = {seed: (gaps["short"][seed] + gaps["long"][seed]) / 2 for seed in gaps["long"]}
    worse = paired_difference(both, dict.fromkeys(both, 0.0))
    longer = paired_difference(gaps["long"], gaps["short"])
    best = min(ENCODINGS, key=lambda name: sum(result.values("loss", positions=name, half="long").values()))
    numbers = Words(
        f"Without positions the loss is {worse:.3f} nats a token above the mean of the encodings; the gap of "
        f"the longer half is greater by {longer:.3f}. In the longer half the best is "
        f"{ENCODINGS[best].en} ({worse.count} seeds).",
        f"没有位置编码时，损失比各种编码的平均每词元高 {worse:.3f} 奈特；较长一半的差距比较短一半大"
        f" {longer:.3f}。较长一半中最好的是：{ENCODINGS[best].zh}（{worse.count} 个随机种子）。",
    )
    return Judgement(judge_effects([(worse, 0.0), (longer, 0.0)]), numbers)


def _gap(result: Result, half: str) -> dict[int, float]:
    """How much higher the loss without positions is than the mean of the encodings, by seed."""
    losses = {name: result.values("loss", positions=name, half=half) for name in ENCODINGS}
    without = losses.pop("none")
    return {
        seed: loss - sum(each[seed] for each in losses.values()) / len(losses)
        for seed, loss in without.items()
        if all(seed in each for each in losses.values())
    }
