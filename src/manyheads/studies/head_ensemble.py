"""Heads are an ensemble: several heads against the average of one-head models, and heads that collapse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from manyheads.common.intervals import Interval, paired_difference
from manyheads.heads.diversity import diversity, layers
from manyheads.studies.drawing import COLOURS, bars, panels
from manyheads.studies.fitting import Fit, OnStep, fit, new_model
from manyheads.studies.head_weights import attentions, by_head, make_equal
from manyheads.studies.language_models import FULL, TINY, LanguageModel, held_out
from manyheads.studies.result import Result
from manyheads.studies.study import (
    Claim,
    Judgement,
    Language,
    Part,
    Row,
    Size,
    Words,
    grid,
    judge_effects,
)  # fmt: skip

if TYPE_CHECKING:
    from matplotlib.figure import Figure

claim = Claim(
    sentence=Words(
        "Heads are an ensemble: several heads in one model are worth as much as the average of several "
        "one-head models, unless they collapse into one.",
        "多个头是一种集成：一个模型里的多个头，与多个单头模型的平均一样好，除非这些头坍缩成一个。",
    ),
    explanation=Words(
        "An ensemble is several models that are trained from different starts and whose predictions are "
        "averaged. It is better than its members because they err in different places. Articles say the "
        "same of heads: each is a weak member, and together they are strong. And like an ensemble of "
        "copies, heads that all say the same are worth no more than one.\n\n"
        "To test it, train models with one head each, as wide as one of several heads, and average their "
        "predicted probabilities. Compare them with one model that has all these heads. The members of "
        "the ensemble have an advantage: each has a feed-forward network of its own. For the collapse, "
        "train the model with all heads tied to the same weights: the similarity of their outputs (CKA) "
        "is then one.",
        "集成是指从不同初始值训练多个模型，再把它们的预测平均。它比单个成员好，因为各成员在不同的地方出错"
        "。文章对多个头也这样说：每个头是一个弱成员，合在一起就强。而且和一组复制品一样，如果所有头说的都"
        "相同，它们就只值一个头。\n\n"
        "为了检验，训练若干只有一个头的模型（与多头中一个头同宽），把它们预测的概率平均，再与拥有全部这些"
        "头的一个模型相比。集成的成员有一个优势：各有自己的前馈网络。至于坍缩，训练时强制所有头使用同样的"
        "权重，它们输出的相似度 (CKA) 就等于一。",
    ),
    formulas=(
        r"p_{ensemble}(y|x)=\frac{1}{h}\sum_{i=1}^{h} p_i(y|x),\qquad "
        r"\mathrm{CKA}(o_a,o_b)=1\ \Leftrightarrow\ \mathrm{collapse}",
    ),
    rule=Words(
        "Three conditions on the held-out loss, by the 95% interval over seeds, paired: several heads are "
        "better than a one-head model; they are worse than the average of one-head models by less than "
        "0.01 nats a token, or better; heads that are tied together are worse than free ones. Holds if "
        "all three are so, holds in part if some are, does not hold if none is; else it cannot be told.",
        "对留出损失有三个条件（按随机种子配对的 95% 区间）：多个头比单头模型好；与单头模型的平均相比，每词"
        "元差不到 0.01 奈特，或者更好；绑在一起的头比自由的头差。三项都满足，则成立；满足一部分，则部分成"
        "立；一项也不满足，则不成立；否则无法判断。",
    ),
    caption=Words(
        "Left: held-out loss of a one-head model, of the average of several, of one model with as many "
        "heads, and of the same with all heads tied together (the axis does not start at zero). Right: "
        "how alike the outputs of the heads of a layer are (CKA; 1: the same). Bars: 95% interval over "
        "seeds.",
        "左：单头模型、若干单头模型的平均、头数相同的一个模型、以及所有头绑在一起的模型的留出损失（纵轴不"
        "从零开始）。右：同一层各头输出的相似度（CKA；1 为相同）。误差线：各随机种子的 95% 区间。",
    ),
    sources=(
        "Veit, Wilber and Belongie 2016, Residual networks behave like ensembles of relatively shallow "
        "networks.",
        "Kornblith and others 2019, Similarity of neural network representations revisited.",
    ),
)


@dataclass(frozen=True)
class Setup(LanguageModel):
    """The language model; ``heads`` is also the size of the ensemble."""

    steps: int = 150


SIZES: Mapping[Size, Setup] = {
    "tiny": Setup(**TINY),
    "quick": Setup(),
    "full": Setup(**FULL | {"seeds": 3, "steps": 300}),
}
AS_GOOD = -0.01
AVERAGE, FREE, TIED = "average of one-head models", "several heads", "tied heads"

COLUMNS: Mapping[str, Words] = {
    "loss": Words("held-out loss", "留出损失"),
    "member_loss": Words("loss of one member", "单个成员的损失"),
    "cka": Words("similarity of the outputs (CKA)", "输出的相似度 (CKA)"),
}


class Ensemble(nn.Module):
    """The average of the probabilities that several language models predict, as logarithms.

    >>> members = [nn.Linear(3, 5), nn.Linear(3, 5)]
    >>> bool(torch.allclose(Ensemble(members)(torch.randn(2, 3)).exp().sum(-1), torch.ones(2)))
    True
    """

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        """What the members take, to log probabilities ``(batch, length, vocabulary)``."""
        logs = [member(*inputs, **options).log_softmax(-1) for member in self.members]
        return torch.stack(logs).logsumexp(0) - torch.tensor(float(len(logs))).log()


def parts(setup: Setup) -> Sequence[Part]:
    """A part for every kind of model and seed."""
    return grid(setup, _measure, model=(AVERAGE, FREE, TIED))


def _measure(setup: Setup, kind: str, seed: int) -> Row:
    task, data = setup.open()
    if kind == AVERAGE:
        task.heads, task.d_key, task.d_value = 1, *2 * (setup.d_model // setup.heads,)
        seeds = [setup.heads * seed + member for member in range(setup.heads)]
        members = [fit(task, data, new_model(task, each), setup.recipe, each) for each in seeds]
        losses = [member.metrics()["loss"] for member in members]
        together = Fit(task, data, Ensemble([member.model for member in members])).metrics()["loss"]
        return {"loss": together, "member_loss": sum(losses) / len(losses)}
    model = new_model(task, seed)
    after_step: OnStep | None = None
    if kind == TIED:
        make_equal(model)
        after_step = _tie
    fitted = fit(task, data, model, setup.recipe, seed, after_step=after_step)
    batch = task.inputs(held_out(task, data))
    alike = [layer.mean["cka"] for layer in layers(diversity(model, [batch], measures=["outputs"]))]
    return {"loss": fitted.metrics()["loss"], "cka": sum(alike) / len(alike)}


def _tie(step: int, model: nn.Module) -> None:
    """Give all heads of a layer the mean of their weights."""
    for module in attentions(model):
        for view in by_head(module):
            view.copy_(view.mean(0, keepdim=True).expand_as(view))


def figure(result: Result, language: Language) -> Figure:
    """The losses, and how alike heads are."""
    drawing, (left, right) = panels(2)
    losses = {
        Words("one head", "单头")[language]: result.interval("member_loss", model=AVERAGE),
        Words("average", "平均")[language]: result.interval("loss", model=AVERAGE),
        Words("several", "多头")[language]: result.interval("loss", model=FREE),
        Words("tied", "绑定")[language]: result.interval("loss", model=TIED),
    }
    bars(left, losses, COLOURS[:4])
    means = [each.mean for each in losses.values()]
    margin = max(max(means) - min(means), 0.01)
    left.set_ylim(max(min(means) - 2 * margin, 0.0), max(means) + margin)
    left.set_ylabel(Words("held-out loss (nats a token)", "留出损失（每词元奈特数）")[language])
    labels = {FREE: Words("several", "多头"), TIED: Words("tied", "绑定")}
    alike = {label[language]: result.interval("cka", model=kind) for kind, label in labels.items()}
    bars(right, alike, COLOURS[2:4])
    right.set_ylim(0, 1.05)
    right.set_ylabel(COLUMNS["cka"][language])
    return drawing


def verdict(result: Result) -> Judgement:
    """By the loss of several heads relative to one head, to the average and to tied heads."""
    free, tied = (result.values("loss", model=kind) for kind in (FREE, TIED))
    over_one = paired_difference(result.values("member_loss", model=AVERAGE), free)
    over_average = paired_difference(result.values("loss", model=AVERAGE), free)
    over_tied: Interval = paired_difference(tied, free)
    cka = result.interval("cka", model=FREE)
    numbers = Words(
        f"Several heads gain {over_one:.3f} nats a token over one head, {over_average:.3f} over the "
        f"average of one-head models, {over_tied:.3f} over tied heads; the CKA of free heads is "
        f"{cka:.2f} ({cka.count} seeds).",
        f"多个头每词元的损失比单头低 {over_one:.3f} 奈特，比单头模型的平均低 {over_average:.3f}，"
        f"比绑定的头低 {over_tied:.3f}；自由的头之间 CKA 为 {cka:.2f}（{cka.count} 个随机种子）。",
    )
    return Judgement(judge_effects([(over_one, 0.0), (over_average, AS_GOOD), (over_tied, 0.0)]), numbers)
