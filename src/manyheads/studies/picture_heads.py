"""A sentence read with pictures: each head's share on text and picture, and what is lost without either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from manyheads.common.intervals import paired_difference
from manyheads.common.preserved_state import evaluating
from manyheads.data.examples import spread
from manyheads.heads.silence import silence
from manyheads.studies.drawing import COLOURS, GREY, bars, line, panels
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
from manyheads.tasks.picturebook.models import Stream, picture_shares
from manyheads.tasks.picturebook.task import Picturebook
from manyheads.training.task import Data

if TYPE_CHECKING:
    from matplotlib.figure import Figure

claim = Claim(
    sentence=Words(
        "When a sentence is read with a picture, some heads look at the picture and others at the text; "
        "without the picture, or without the heads that look at it, the words no longer fit.",
        "图文一起读时，有的头看图，有的头看文字；没有图，或者没有看图的头，词就对不上了。",
    ),
    explanation=Words(
        "A picture can be cut into patches, and every patch can be a token like a word. One stack of "
        "layers then reads both in a single row: each word attends to the patches and to the words before "
        "it. How much of a head's attention goes to the picture is a number between 0 and 1: its share."
        "\n\n"
        "A share says where a head looks, not whether it matters. For that, something has to be taken "
        "away: the picture (a blank page instead), the quarter of the heads that look at the picture "
        "most, or, to compare, the quarter that looks at it least. The task is to write the caption of a "
        "picture of coloured shapes, in English or Chinese; what is measured is how well the next word is "
        "predicted.",
        "图可以切成小块，每一块都可以像词一样成为一个词元。这样，一组层就能在同一行里读图和文：每个词既注"
        "意图块，也注意前面的词。一个头有多少注意力落在图上，是 0 到 1 之间的一个数：看图的比例。\n\n"
        "比例只说明头看哪里，不说明它是否重要。要知道后者，就得拿走一些东西：拿走图（换成白纸），拿走最看"
        "图的四分之一的头，或者作为对照，拿走最不看图的四分之一的头。任务是用英文或中文写出彩色图形的说明"
        "，测量的是下一个词预测得有多准。",
    ),
    formulas=(
        r"\mathrm{share}_h=\frac{1}{n}\sum_{i\,\in\,\mathrm{words}}\ \sum_{j\,\in\,\mathrm{picture}}"
        r"\mathrm{softmax}(Q_hK_h^{T}/\sqrt{d})_{ij}",
    ),
    rule=Words(
        "Models that read patches and words in one stream are trained. Three statements, by 95% intervals "
        "over seeds: the head that looks at the picture most has a share at least 0.3 above the one that "
        "looks least; a blank picture raises the held-out loss; silencing the quarter of the heads that "
        "look at the picture most raises it more than silencing the quarter that looks least. Holds if "
        "all three hold, in part if some do, does not hold if none does; else it cannot be told.",
        "训练把图块和词放在同一行里读的模型。三个陈述，按各种子的 95% 区间判断：最看图的头的比例比最不看图"
        "的头至少高 0.3；换成白纸，留出损失上升；关掉最看图的四分之一的头，比关掉最不看图的四分之一的头损"
        "失上升得更多。三个都成立则成立，有些成立则部分成立，没有一个成立则不成立；否则无法判断。",
    ),
    caption=Words(
        "Left: share of each head's attention that words give to the picture, by layer; the heads of a "
        "layer are ordered by it. Right: held-out loss (nats a token) with the picture, and without some "
        "part. Bars: 95% interval over seeds.",
        "左：各层每个头的注意力中，词给图的比例；同一层的头按比例排序。右：有图时以及去掉一部分之后的留出"
        "损失（每词元奈特数）。误差线：各随机种子的 95% 区间。",
    ),
    sources=(
        "Voita, Talbot, Moiseev, Sennrich and Titov 2019, Analyzing multi-head self-attention: "
        "specialized heads do the heavy lifting, the rest can be pruned.",
        "Li, Yatskar, Yin, Hsieh and Chang 2019, VisualBERT: a simple and performant baseline for vision "
        "and language.",
    ),
)


@dataclass(frozen=True)
class Setup(Settings):
    """The model of one stream and how long it is trained."""

    d_model: int = 48
    heads: int = 4
    layers: int = 2
    steps: int = 600
    batch_tokens: int = 1024
    tested: int = 150


SIZES: Mapping[Size, Setup] = {
    "tiny": Setup(seeds=2, d_model=8, heads=2, layers=2, steps=2, batch_tokens=64, tested=4),
    "quick": Setup(),
    "full": Setup(seeds=5, d_model=96, heads=8, layers=3, steps=1200, tested=300),
}
SPREAD = 0.3  # between the highest and the lowest share, at least
CONDITIONS = {
    "whole": Words("all", "完整"),
    "blank": Words("blank\npicture", "白纸"),
    "most": Words("without heads\nthat look most", "去掉最\n看图的头"),
    "least": Words("without heads\nthat look least", "去掉最\n不看图的头"),
}

COLUMNS: Mapping[str, Words] = {
    "share": Words("share of the picture", "看图的比例"),
    "loss": Words("held-out loss", "留出损失"),
}


def parts(setup: Setup) -> Sequence[Part]:
    """A part for every seed."""
    return grid(setup, _measure)


def _measure(setup: Setup, seed: int) -> list[Row]:
    tokenizer, data = _read(setup.data)
    task: Any = Picturebook(kind="single", d_model=setup.d_model, heads=setup.heads, layers=setup.layers)
    task.tokenizer = tokenizer
    recipe = Recipe(setup.steps, setup.batch_tokens, learning_rate=3e-3)
    model = fit(task, data, new_model(task, seed), recipe, seed).model
    assert isinstance(model, Stream)
    batch = task.collate(data.valid.take(spread(len(data.valid), setup.tested)))
    with evaluating(model):
        shares = picture_shares(model, [task.inputs(batch)])
        losses = _losses(task, model, batch, shares)
    nothing: Row = {"condition": None, "layer": None, "rank": None, "share": None, "loss": None}
    rows: list[Row] = [nothing | {"condition": name, "loss": loss} for name, loss in losses.items()]
    for layer, ordered in enumerate(shares.sort(-1, descending=True).values.tolist()):
        rows += [nothing | {"layer": layer, "rank": n, "share": x} for n, x in enumerate(ordered, 1)]
    return rows


@torch.no_grad()
def _losses(
    task: Picturebook, model: nn.Module, batch: dict[str, Tensor], shares: Tensor
) -> dict[str, float]:
    """The loss with everything, and with some part taken away."""
    count = max(1, shares.numel() // 4)
    order = shares.flatten().argsort(descending=True).tolist()
    losses = {}
    for name in CONDITIONS:
        chosen = {"most": order[:count], "least": order[-count:]}.get(name, [])
        heads: dict[int | str, list[int]] = {}
        for number in chosen:
            heads.setdefault(number // shares.shape[1], []).append(number % shares.shape[1])
        blank = {"pictures": torch.ones_like(batch["pictures"])} if name == "blank" else {}
        with silence(model, heads):
            summed, tokens = task.loss(model, batch | blank)
        losses[name] = float(summed / tokens)
    return losses


@cache
def _read(data: str | None) -> tuple[Tokenizer, Data]:
    task = Picturebook(kind="single", jitter=0.0)
    examples = task.open(data)
    return task.tokenizer, examples


def figure(result: Result, language: Language) -> Figure:
    """Shares by layer, and the loss without some part."""
    drawing, (left, right) = panels(2, height=4.0)
    layers, ranks = ([int(n) for n in result.distinct(c) if isinstance(n, int)] for c in ("layer", "rank"))
    for layer in layers:
        shares = {n: result.interval("share", layer=layer, rank=n) for n in ranks}
        line(left, shares, Words(f"layer {layer}", f"第 {layer} 层")[language], layer)
    left.set_xticks(ranks)
    left.set_ylim(0, 1.05)
    left.legend(frameon=False)
    left.set_xlabel(Words("heads of a layer, by their share", "同一层的头，按比例排序")[language])
    left.set_ylabel(COLUMNS["share"][language])
    losses = {words[language]: result.interval("loss", condition=name) for name, words in CONDITIONS.items()}
    bars(right, losses, [GREY, *COLOURS[:3]])
    right.tick_params(axis="x", labelsize=8)
    right.set_ylabel(COLUMNS["loss"][language])
    return drawing


def verdict(result: Result) -> Judgement:
    """By the spread of shares, and by what is lost without the picture or the heads that look at it."""
    highest, lowest = _extremes(result)
    apart = paired_difference(highest, lowest)
    blank = result.difference("loss", {"condition": "blank"}, {"condition": "whole"})
    most, least = (
        result.difference("loss", {"condition": name}, {"condition": "whole"}) for name in ("most", "least")
    )
    more = result.difference("loss", {"condition": "most"}, {"condition": "least"})
    ends = [sum(values.values()) / len(values) for values in (highest, lowest)]
    numbers = Words(
        f"The head that looks at the picture most gives it {ends[0]:.0%} of its attention, the one that "
        f"looks least {ends[1]:.0%}. The loss rises by {blank:.2f} with a blank picture, by {most:.2f} "
        f"without the heads that look most and by {least:.2f} without those that look "
        f"least ({blank.count} seeds).",
        f"最看图的头把 {ends[0]:.0%} 的注意力给图，最不看图的给 {ends[1]:.0%}。"
        f"换成白纸，损失上升 {blank:.2f}；去掉最看图的头上升 {most:.2f}，"
        f"去掉最不看图的头上升 {least:.2f}（{blank.count} 个随机种子）。",
    )
    effects = [(apart, SPREAD), (blank, 0.0), (more, 0.0)]
    return Judgement(judge_effects(effects), numbers)


def _extremes(result: Result) -> tuple[dict[int, float], dict[int, float]]:
    """The highest and the lowest share of any head, by seed."""
    shares: dict[int, list[float]] = {}
    for row in result.rows:
        if isinstance(row["share"], float):
            shares.setdefault(int(row["seed"] or 0), []).append(row["share"])
    return {seed: max(each) for seed, each in shares.items()}, {s: min(each) for s, each in shares.items()}
