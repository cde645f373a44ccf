"""The same heads matter on other data: rank agreement across texts, domains, languages and seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from manyheads.common.intervals import Interval
from manyheads.heads.importance import agreement, importance
from manyheads.heads.table import HeadTable
from manyheads.studies.drawing import line, panels
from manyheads.studies.result import Result
from manyheads.studies.study import Claim, Judgement, Language, Part, Row, Size, Words, grid
from manyheads.studies.subjects import (
    FULL,
    NAMES,
    Subjects,
    judge_all,
    on_lines,
    subject,
    windows_of_lines,
)  # fmt: skip
from manyheads.studies.text_samples import sample, texts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

claim = Claim(
    sentence=Words(
        "The same heads matter on other data.",
        "换了数据，重要的还是同样的头。",
    ),
    explanation=Words(
        "Heads are ranked on some text, and the least important are cut. That is only safe if the ranking "
        "is a property of the model and not of the text: on another text the same heads should matter. So "
        "the heads of one model are ranked on texts that share nothing, of other domains (plain "
        "sentences, Python's documentation, numbers and dates) and of another language (numbers in "
        "English and in German), and the rankings are compared: 1 is the same order, 0 no relation.\n\n"
        "The last comparison is another one: two models of the same shape, trained on the same text from "
        "different seeds. Head 3 of one has nothing to do with head 3 of the other but its layer; where "
        "even these rankings agree, it is the layer that matters.",
        "先在一些文本上给头排序，再剪掉最不重要的头。只有当排序属于模型、而不属于文本时，这样做才安全：换"
        "一段文本，重要的应当还是同样的头。因此，这里用互不重叠的文本、不同领域的文本（普通句子、Python 文"
        "档、数字与日期）和不同语言的文本（英语和德语的数字）给同一个模型的头排序，再比较这些排序：1 表示"
        "次序相同，0 表示毫无关系。\n\n"
        "最后一项比较不同：两个形状相同的模型，用同样的文本、不同的随机种子训练。一个模型的 3 号头与另一个"
        "的 3 号头除了同在一层之外没有关系；如果连这样的排序也一致，那么起作用的是层。",
    ),
    formulas=(r"\rho=\mathrm{corr}(\mathrm{rank}(a),\,\mathrm{rank}(b))",),
    rule=Words(
        "Spearman's rank correlation of the heads' importance (by Fisher information), for each model and "
        "each kind of change: other text, other domain, other language, other training seed; with the 95% "
        "interval over repetitions. Holds if all intervals lie above 0.5; does not hold if all lie below; "
        "holds in part if some lie above; else it cannot be told.",
        "对每个模型和每一种改变（换文本、换领域、换语言、换训练种子），计算头的重要性（按 Fisher 信息）的 "
        "Spearman 秩相关及其各次重复的 95% 区间。若所有区间都高于 0.5，则成立；若都低于 0.5，则不成立；若"
        "其中一些高于 0.5，则部分成立；否则无法判断。",
    ),
    caption=Words(
        "Rank correlation between the importance of heads on one text and on another, by what was "
        "changed. Dotted: the limit of the rule. Bars: 95% interval over samples of text (MiniLM) or "
        "training seeds (ours).",
        "头在一段文本和另一段文本上的重要性之间的秩相关，按改变的内容分列。点线：规则的界限。误差线：各文"
        "本样本（MiniLM）或各训练种子（自训模型）的 95% 区间。",
    ),
    sources=(
        "Michel, Levy and Neubig 2019, Are sixteen heads really better than one?, section 4.",
        "Spearman 1904, The proof and measurement of association between two things.",
    ),
)


@dataclass(frozen=True)
class Setup(Subjects):
    """The models, what they read, and how importance is measured."""

    layers: int = 3
    steps: int = 150
    method: str = "fisher"


SIZES: Mapping[Size, Setup] = {
    "tiny": Setup(
        seeds=2, sentences=4, windows=4, d_model=16, heads=2, layers=2, context=16, steps=2,
        method="output-norm",
    ),
    "quick": Setup(),
    "full": Setup(**FULL | {"text": "sentences", "sentences": 20}),
}  # fmt: skip
LEAST = 0.5
CHANGES: Mapping[str, Words] = {
    "text": Words("other text", "换文本"),
    "domain": Words("other domain", "换领域"),
    "language": Words("other language", "换语言"),
    "seed": Words("other training seed", "换训练种子"),
}
# What is compared for a change of domain and of language.
PAIRS = {
    "domain": (("documents", "sentences"), ("documents", "english"), ("sentences", "english")),
    "language": (("english", "german"),),
}

COLUMNS: Mapping[str, Words] = {"spearman": Words("rank correlation", "秩相关")}


def parts(setup: Setup) -> Sequence[Part]:
    """A part for every model and repetition."""
    return grid(setup, _measure, model=setup.models)


def _measure(setup: Setup, name: str, seed: int) -> list[Row]:
    looked = subject(setup, name, seed)

    def ranked(batches: Any, model: Any = looked.model) -> HeadTable:
        return importance(model, batches, setup.method, seed=seed)

    lines = {
        source: sample(texts(source), seed, setup.seeds, setup.sentences)
        for source in ("sentences", "documents", "english", "german")
    }
    if name == "MiniLM":
        on = {source: on_lines(taken) for source, taken in lines.items()}
    else:
        on = {source: windows_of_lines(looked, taken) for source, taken in lines.items()}
    tables = {source: ranked(each.all_batches) for source, each in on.items()}
    home = on["documents"]
    rows: list[Row] = [{"change": "text", "spearman": _rho(ranked(home.batches), ranked(home.held_out))}]
    rows += [
        {"change": change, "spearman": fmean(_rho(tables[one], tables[other]) for one, other in pairs)}
        for change, pairs in PAIRS.items()
    ]
    if name != "MiniLM":  # which was trained once
        other = subject(setup, name, setup.seeds + seed).model
        batches = looked.all_batches
        rows.append({"change": "seed", "spearman": _rho(ranked(batches), ranked(batches, other))})
    return rows


def _rho(one: HeadTable, other: HeadTable) -> float:
    return agreement({"one": one, "other": other})[0].spearman


def figure(result: Result, language: Language) -> Figure:
    """Rank correlation by what was changed."""
    drawing, (axes,) = panels()
    for number, name in enumerate(result.distinct("model")):
        points = {
            position + 0.08 * number: each
            for position, change in enumerate(CHANGES)
            if (each := _of(result, str(name), change)).count
        }
        line(axes, points, NAMES[str(name)][language], number, "o")
    axes.axhline(LEAST, color="black", linestyle=":", linewidth=1)
    axes.set_ylim(top=1.02)
    axes.set_xticks(range(len(CHANGES)), [words[language] for words in CHANGES.values()])
    axes.set_ylabel(COLUMNS["spearman"][language])
    axes.legend(frameon=False, loc="lower left")
    return drawing


def verdict(result: Result) -> Judgement:
    """By the rank correlation of every change, in every model."""
    models = [str(name) for name in result.distinct("model")]
    measured = {
        name: {change: each for change in CHANGES if (each := _of(result, name, change)).count}
        for name in models
    }
    numbers = Words(
        "Rank correlation. "
        + " ".join(f"{NAMES[name].en}: {_listed(measured[name], 'en')}." for name in models),
        "秩相关。" + "".join(f"{NAMES[name].zh}：{_listed(measured[name], 'zh')}。" for name in models),
    )
    return Judgement(judge_all((each for by in measured.values() for each in by.values()), LEAST), numbers)


def _of(result: Result, model: str, change: str) -> Interval:
    return result.interval("spearman", model=model, change=change)


def _listed(measured: Mapping[str, Interval], language: Language) -> str:
    between = {"en": ", ", "zh": "，"}[language]
    return between.join(f"{CHANGES[change][language]} {each:.2f}" for change, each in measured.items())
