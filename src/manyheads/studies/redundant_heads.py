"""Redundant heads found while training can be put to use: cut, or started anew, against left alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from manyheads.capture.weights import projections
from manyheads.common.intervals import Interval
from manyheads.heads.importance import importance
from manyheads.studies.drawing import bars, panels
from manyheads.studies.fitting import fit, new_model
from manyheads.studies.language_models import FULL, TINY, LanguageModel, held_out
from manyheads.studies.result import Result
from manyheads.studies.study import Claim, Judgement, Language, Part, Row, Size, Words, grid, judge_effects
from manyheads.surgery.cut import cut
from manyheads.surgery.in_place import become
from manyheads.surgery.plan import plan
from manyheads.surgery.reseed import reseed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

claim = Claim(
    sentence=Words(
        "Redundant heads that are found while training can be put to use: cut they cost nothing, started "
        "anew they help.",
        "训练中发现的冗余头可以利用起来：剪掉不损失什么，重新开始则有帮助。",
    ),
    explanation=Words(
        "Half-way through training, some heads matter little: the loss would hardly change without them. "
        "One can leave them alone and hope that they find something to do. One can cut them and go on "
        "with a smaller, faster model. Or one can start them anew: give them new queries, keys and "
        "values, orthogonal to those of the heads that stay, and let nothing read them yet, so that they "
        "look for something that the others do not do.\n\n"
        "All runs see the same batches with the same seed. At a third of the steps the quarter of the "
        "heads that matters least (by the Fisher measure) is left alone, cut, or started anew. As a "
        "control, a random quarter is started anew.",
        "训练到一定阶段，有些头几乎不起作用：没有它们，损失也几乎不变。可以不去管它们，指望它们自己找到用"
        "处；可以剪掉它们，用更小更快的模型继续训练；也可以让它们重新开始：换上与其余的头正交的查询、键和"
        "值，并且暂时不被读取，让它们去寻找别的头没有做的事。\n\n"
        "同一个随机种子的各次训练使用同样的批次。在三分之一的步数处，对最不重要的四分之一的头（按 Fisher "
        "度量）分别不作处理、剪掉或重新开始。作为对照，另外随机选四分之一的头重新开始。",
    ),
    formulas=(r"W_Q^{new}\,(W_Q^{other})^{T}=0,\qquad W_O^{new}=0",),
    rule=Words(
        "Holds if the loss after cutting is less than 0.02 nats above that of the model left alone (the "
        "95% interval over seeds is below 0.02), and the loss after starting anew is below it (the "
        "interval is below zero). In part if one of them is so, does not hold if neither is or may be.",
        "若剪掉之后的损失比不作处理时最多高 0.02 奈特（各随机种子的 95% 区间低于 0.02），并且重新开始之后"
        "的损失更低（区间低于零），则成立；只有一项是则部分成立；两项都不是也不可能是则不成立。",
    ),
    caption=Words(
        "Held-out loss (nats a token) minus that of the model left alone, by seed; bars: 95% interval. "
        "Below zero is better. The dashed line is the 0.02 of the rule.",
        "留出损失（每词元奈特数）与不作处理的模型之差，按随机种子配对；误差线：95% 区间。低于零为更好。虚"
        "线是规则中的 0.02。",
    ),
    sources=(
        "Michel, Levy and Neubig 2019, Are sixteen heads really better than one?",
        "Evci and others 2020, Rigging the lottery: making all tickets winners.",
    ),
)
WAYS = {
    "alone": Words("left alone", "不作处理"),
    "cut": Words("cut", "剪掉"),
    "anew": Words("started anew", "重新开始"),
    "random": Words("random ones started anew", "随机的头重新开始"),
}
COSTS_NOTHING = 0.02  # nats a token


@dataclass(frozen=True)
class Setup(LanguageModel):
    """The language model, when its heads are looked at, and how many of them."""

    seeds: int = 4
    heads: int = 8
    steps: int = 200
    at: float = 1 / 3
    share: float = 0.25


SIZES: Mapping[Size, Setup] = {
    "tiny": Setup(**(TINY | {"heads": 4, "steps": 6})),
    "quick": Setup(),
    "full": Setup(**FULL),
}
COLUMNS: Mapping[str, Words] = {
    "loss": Words("held-out loss", "留出损失"),
    "heads_left": Words("heads at the end", "最后的头数"),
}


def parts(setup: Setup) -> Sequence[Part]:
    """A part for every way and seed."""
    return grid(setup, _measure, way=WAYS)


def _measure(setup: Setup, way: str, seed: int) -> Row:
    task, data = setup.open()
    model = new_model(task, seed)
    batch = task.inputs(held_out(task, data))
    act = None if way == "alone" else partial(_act, setup, way, batch, seed)
    fitted = fit(task, data, model, setup.recipe, seed, surgery=act)
    heads = sum(block.attention.heads for block in fitted.model.blocks)  # type: ignore[union-attr]
    return {"loss": fitted.metrics()["loss"], "heads_left": heads}


def _act(
    setup: Setup,
    way: str,
    batch: dict[str, object],
    seed: int,
    step: int,
    model: nn.Module,
    optimizer: Optimizer,
) -> None:
    """Cut the heads that matter least, or start them anew, at one step."""
    if step != round(setup.at * setup.steps):
        return
    ranking = importance(model, [batch], method="random" if way == "random" else "fisher", seed=seed)
    chosen = plan(ranking, keep=1 - setup.share)
    if way == "cut":
        become(model, cut(model, chosen, batch), optimizer)
    else:
        heads = {site: list(numbers) for site, numbers in chosen.items()}
        reseed(model, projections(model, batch), heads, seed=seed, optimizer=optimizer)


def figure(result: Result, language: Language) -> Figure:
    """The difference to the model left alone, for each way."""
    drawing, (axes,) = panels()
    bars(axes, {WAYS[way][language]: _more(result, way) for way in WAYS if way != "alone"})
    axes.axhline(0, color="#333333", linewidth=0.8)
    axes.axhline(COSTS_NOTHING, color="#777777", linewidth=0.9, linestyle="--")
    axes.set_ylabel(Words("loss minus that of the model left alone", "与不作处理的损失之差")[language])
    return drawing


def verdict(result: Result) -> Judgement:
    """By the loss after cutting and after starting anew."""
    after_cut, anew, random = (_more(result, way) for way in ("cut", "anew", "random"))
    numbers = Words(
        f"Against the model left alone, cutting changes the loss by {after_cut:.3f} nats, starting anew by "
        f"{anew:.3f}, starting random heads anew by {random:.3f}.",
        f"与不作处理相比，剪掉使损失变化 {after_cut:.3f} 奈特，重新开始 {anew:.3f}，"
        f"随机的头重新开始 {random:.3f}。",
    )
    effects = [(_negative(after_cut), -COSTS_NOTHING), (_negative(anew), 0.0)]
    return Judgement(judge_effects(effects), numbers)


def _more(result: Result, way: str) -> Interval:
    return result.difference("loss", {"way": way}, {"way": "alone"})


def _negative(effect: Interval) -> Interval:
    return Interval(-effect.mean, -effect.high, -effect.low, effect.count)
