"""Low layers look near and carry syntax, high layers look far: reach and treebank relations by layer."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from manyheads.common.intervals import Interval, paired_difference
from manyheads.heads.roles import roles
from manyheads.heads.table import HeadTable
from manyheads.studies.by_layer import draw_by_layer, lower_and_upper
from manyheads.studies.drawing import panels
from manyheads.studies.result import Result
from manyheads.studies.study import (
    Claim,
    Judgement,
    Language,
    Part,
    Row,
    Size,
    Verdict,
    Words,
    grid,
    judge_effect,
)  # fmt: skip
from manyheads.studies.subjects import FULL, Subjects, join_verdicts, list_models, subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

claim = Claim(
    sentence=Words(
        "Low layers look near and carry syntax; high layers look far and carry meaning.",
        "低层看近处、管语法；高层看远处、管语义。",
    ),
    explanation=Words(
        "A layer can only combine what the layers below it have prepared. So it is plausible that the "
        "first layers join neighbours into phrases, and that later ones relate whole phrases across the "
        "sentence. How far a head looks is measured by the mean distance of what it attends to, compared "
        "with a reader that spreads its attention evenly: 1 is as far as that.\n\n"
        "Syntax is measured with a treebank, in which people have marked which word depends on which. For "
        "each relation (subject, object, article ...) the score is how often the best head of a layer "
        "puts its largest weight on the right word, minus how often a fixed distance would. No treebank "
        "comes with the package: give one as data (a CoNLL-U file). What a layer means by meaning is not "
        "measured here.",
        "一层只能组合它下面各层准备好的内容。因此可以设想：前几层把相邻的词合成短语，后面的层在整个句子里"
        "联系这些短语。一个头看多远，用它所注意的位置的平均距离来衡量，并与均匀分配注意力的读者比较：1 表"
        "示与之一样远。\n\n"
        "语法用树库来衡量，树库里由人标出了哪个词依存于哪个词。对每种关系（主语、宾语、冠词……），得分是"
        "一层中最好的头把最大权重放在正确的词上的比例，减去按固定距离去猜的比例。本软件包不附带树库：请用 "
        "data 给出一个 CoNLL-U 文件。“语义”在这里没有测量。",
    ),
    formulas=(
        r"\mathrm{reach}_h=\frac{\sum_j p_{ij}\,|i-j|}{\frac{1}{n}\sum_j |i-j|},\qquad "
        r"\mathrm{syntax}_{layer}=\mathrm{mean}_{r}\;\max_h\,(\mathrm{score}_{h,r}-\mathrm{baseline}_{r})",
    ),
    rule=Words(
        "For each model, reach in the upper half of the layers minus that in the lower half has to be "
        "above 0.05 (95% interval over repetitions); for MiniLM with a treebank, syntax in the lower half "
        "minus that in the upper half has to be above 0.02. Holds if all are; does not hold if all "
        "intervals lie below; holds in part if some are above; else it cannot be told. Without a treebank "
        "only half of the claim is measured: then it holds in part at best.",
        "对每个模型，上半部分各层的视距减去下半部分各层的视距必须高于 0.05（各次重复的 95% 区间）；给出树"
        "库时，MiniLM 下半部分各层的语法得分减去上半部分的必须高于 0.02。若全部如此，则成立；若所有区间都"
        "在其下，则不成立；若只有一些如此，则部分成立；否则无法判断。没有树库时只测量了这个说法的一半：那"
        "时至多部分成立。",
    ),
    caption=Words(
        "Left: how far the heads of a layer look, relative to a reader that spreads its attention evenly. "
        "Right: syntax of a layer, by the best head for each relation (needs a treebank). Bars: 95% "
        "interval over samples of text (MiniLM) or training seeds (ours).",
        "左：一层的头看多远，以均匀分配注意力的读者为 1。右：一层的语法得分，按每种关系中最好的头计算（需"
        "要树库）。误差线：各文本样本（MiniLM）或各训练种子（自训模型）的 95% 区间。",
    ),
    sources=(
        "Clark, Khandelwal, Levy and Manning 2019, What does BERT look at?",
        "Vig and Belinkov 2019, Analyzing the structure of attention in a transformer language model.",
        "Tenney, Das and Pavlick 2019, BERT rediscovers the classical NLP pipeline.",
    ),
)

SIZES: Mapping[Size, Subjects] = {
    "tiny": Subjects(seeds=2, sentences=4, windows=4, d_model=16, heads=2, layers=2, context=16, steps=2),
    "quick": Subjects(seeds=5, steps=200),
    "full": Subjects(**FULL),
}
LEAST_REACH, LEAST_SYNTAX = 0.05, 0.02
FEWEST_PAIRS = 50  # of a relation, to be counted

COLUMNS: Mapping[str, Words] = {
    "reach": Words("reach (1: as far as an even reader)", "视距（1：与均匀读者一样远）"),
    "syntax": Words("syntax (best head over a fixed distance)", "语法（最好的头超出固定距离）"),
}


def parts(setup: Subjects) -> Sequence[Part]:
    """A part for every model and repetition."""
    return grid(setup, _measure, model=setup.models)


def _measure(setup: Subjects, name: str, seed: int) -> list[Row]:
    looked = subject(replace(setup, data=None), name, seed)
    table = roles(looked.model, looked.all_batches, only=["reach"])
    reach = _by_layer(table, table["reach_score"] / table["reach_baseline"])
    syntax: list[float | None] = [None] * len(reach)
    if setup.data is not None and name == "MiniLM":
        with tempfile.TemporaryDirectory() as folder:
            treebank = Path(folder) / "sample.conllu"
            treebank.write_text(_sample_of_treebank(setup.data, seed, setup.seeds), encoding="utf-8")
            table = roles(
                looked.model, looked.batches[:1], treebank, tokenizer=looked.tokenizer, only=["syntactic"]
            )
        syntax = list(map(fmean, zip(*_syntax(table), strict=True)))
    return [
        {"layer": number, "reach": float(here.mean()), "syntax": score}
        for number, (here, score) in enumerate(zip(reach, syntax, strict=True), 1)
    ]


def _by_layer(table: HeadTable, values: Tensor) -> list[Tensor]:
    """The values of the heads of each layer."""
    sites = table["site"]
    return [values[torch.tensor([each == site for each in sites])] for site in dict.fromkeys(sites)]


def _syntax(table: HeadTable) -> list[list[float]]:
    """For each relation with enough pairs, by layer, how far the best head is above a fixed distance."""
    relations = [name.removesuffix("_score") for name in table.sums if name.endswith("_score")]
    enough = [name for name in relations if float(table.sums[f"{name}_score"][0].min()) >= FEWEST_PAIRS]
    if not enough:
        raise ValueError(
            f"data: no relation of the treebank has {FEWEST_PAIRS} pairs in each sample; expected more "
            "sentences, or fewer seeds"
        )
    return [
        [float(each.max()) for each in _by_layer(table, table[f"{name}_score"] - table[f"{name}_baseline"])]
        for name in enough
    ]


def _sample_of_treebank(path: str, seed: int, seeds: int) -> str:
    """Every so many-th sentence of a CoNLL-U file."""
    sentences = Path(path).read_text(encoding="utf-8").strip().split("\n\n")
    return "\n\n".join(sentences[seed::seeds]) + "\n\n"


def figure(result: Result, language: Language) -> Figure:
    """Reach and, where there is a treebank, syntax by layer."""
    columns = [column for column in COLUMNS if any(row[column] is not None for row in result.rows)]
    drawing, axes = panels(len(columns))
    for each, column in zip(axes, columns, strict=True):
        draw_by_layer(each, result, column, language)
        each.set_ylabel(COLUMNS[column][language])
    axes[0].legend(frameon=False, loc="lower right")
    return drawing


def verdict(result: Result) -> Judgement:
    """By the difference between the halves, in reach and in syntax."""
    models = [str(name) for name in result.distinct("model")]
    rises = {name: _upper_minus_lower(result, "reach", name) for name in models}
    with_treebank = [
        name for name in models if any(row["syntax"] is not None for row in result.where(model=name))
    ]
    falls = {name: _upper_minus_lower(result, "syntax", name, sign=-1) for name in with_treebank}
    verdicts: set[Verdict] = {judge_effect(rise, LEAST_REACH) for rise in rises.values()}
    verdicts |= {judge_effect(fall, LEAST_SYNTAX) for fall in falls.values()}
    reach, syntax = list_models(rises, ".2f"), list_models(falls, ".3f")
    numbers = Words(
        f"Reach grows from the lower to the upper half by: {reach.en}. "
        + (f"Syntax falls by: {syntax.en}." if falls else "Syntax was not measured: 0 treebanks."),
        f"从下半部分到上半部分，视距增加：{reach.zh}。"
        + (f"语法得分下降：{syntax.zh}。" if falls else "没有树库，未测量语法。"),
    )
    joined = join_verdicts(verdicts)
    return Judgement("holds in part" if joined == "holds" and not falls else joined, numbers)


def _upper_minus_lower(result: Result, column: str, name: str, sign: int = 1) -> Interval:
    lower, upper = lower_and_upper(result, column, model=name)
    return paired_difference(upper, lower) if sign > 0 else paired_difference(lower, upper)
