"""Important heads have nameable roles: importance by role, with the three roles of the translation paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from manyheads.common.intervals import Interval
from manyheads.heads.importance import importance
from manyheads.heads.roles import roles
from manyheads.studies.drawing import grouped_bars, panels
from manyheads.studies.result import Result
from manyheads.studies.silencing import candidates
from manyheads.studies.study import Claim, Judgement, Language, Part, Row, Size, Verdict, Words, grid
from manyheads.studies.subjects import (
    FULL,
    NAMES,
    Subjects,
    join_verdicts,
    list_models,
    subject,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

claim = Claim(
    sentence=Words(
        "The important heads have roles that can be named: positional, syntactic, rare words.",
        "重要的头都有说得出名字的作用：位置、语法、罕见词。",
    ),
    explanation=Words(
        "The paper on translation looked at the heads that survive when most are removed and found three "
        "kinds: positional heads, which nearly always look at the same distance, such as the word before; "
        "syntactic heads, which follow one grammatical relation; and heads that look at the rarest word "
        "of the sentence.\n\n"
        "Here every head is tested for these roles, each against a baseline, and ranked by importance. If "
        "the claim is true, most of the most important quarter of heads have one of the roles, and more "
        "of them than of the other heads. Syntactic heads need a treebank (a CoNLL-U file as data); "
        "without one, the other two roles are counted. In a model of encoder and decoder the heads of the "
        "encoder are looked at, as in the paper.",
        "那篇翻译论文考察了大多数头被去掉后留下来的头，发现有三种：位置头，几乎总是看同样的距离，比如前一"
        "个词；语法头，跟随一种语法关系；以及看句子里最罕见的词的头。\n\n"
        "这里对每个头检验这些作用（各有对照基准），并按重要性排序。如果这个说法是对的，最重要的四分之一的"
        "头里大多数都有其中一种作用，而且比例高于其余的头。语法头需要树库（用 data 给出 CoNLL-U 文件）；没"
        "有树库时只数另外两种。有编码器和解码器的模型，与论文一样只看编码器的头。",
    ),
    formulas=(
        r"\mathrm{positional:}\ P(\mathrm{argmax}_j\,p_{ij}=i+k)\geq 0.9,\qquad "
        r"\mathrm{rare:}\ \mathrm{argmax}_j\,p_{ij}=\mathrm{rarest\ token}",
    ),
    rule=Words(
        "For a model the claim holds if, with 95% intervals over repetitions, more than half of the most "
        "important quarter of heads have a role, and more of them than of the others; in part if only the "
        "second is so; it does not hold if the second is refuted (the interval of the difference does not "
        "reach above zero); else it cannot be told. Over models: the verdict that all share; in part if "
        "it holds for some at least in part; else it cannot be told.",
        "对一个模型：若最重要的四分之一的头中有作用的超过一半，且比例高于其余的头（均按各次重复的 95% 区间"
        "），则成立；若只有后者如此，则部分成立；若后者被否定（差的区间不高于零），则不成立；否则无法判断"
        "。对全部模型：若结论相同，则取该结论；若对其中一些至少部分成立，则部分成立；否则无法判断。",
    ),
    caption=Words(
        "Share of heads with one of the roles, among the most important quarter and among the others. "
        "Bars: 95% interval over samples of text (MiniLM) or training seeds (ours).",
        "最重要的四分之一的头与其余的头中，有上述作用之一的头所占的比例。误差线：各文本样本（MiniLM）或各"
        "训练种子（自训模型）的 95% 区间。",
    ),
    sources=(
        "Voita, Talbot, Moiseev, Sennrich and Titov 2019, Analyzing multi-head self-attention: "
        "specialized heads do the heavy lifting, the rest can be pruned.",
    ),
)


@dataclass(frozen=True)
class Setup(Subjects):
    """The models, what they read, and how importance is measured."""

    sentences: int = 20
    method: str = "fisher"


SIZES: Mapping[Size, Setup] = {
    "tiny": Setup(seeds=2, sentences=4, windows=4, d_model=16, heads=2, layers=2, context=16, steps=2),
    "quick": Setup(),
    "full": Setup(**FULL, models=("MiniLM", "language", "translation")),
}
QUARTER = 4
ROLES = ("positional", "rare", "syntactic")

COLUMNS: Mapping[str, Words] = {
    "positional": Words("positional", "位置"),
    "rare": Words("rare words", "罕见词"),
    "syntactic": Words("syntactic", "语法"),
    "any_role": Words("any of them", "任意一种"),
}


def parts(setup: Setup) -> Sequence[Part]:
    """A part for every model and repetition."""
    return grid(setup, _measure, model=setup.models)


def _measure(setup: Setup, name: str, seed: int) -> list[Row]:
    looked = subject(replace(setup, data=None), name, seed)
    treebank = setup.data if name == "MiniLM" else None
    only = ["positional", "rare", *(["syntactic"] if treebank else [])]
    table = roles(looked.model, looked.all_batches, treebank, tokenizer=looked.tokenizer, only=only)
    labels = {(row.site, row.head): words for row, words in zip(table.rows, table["roles"], strict=True)}
    ranking = candidates(importance(looked.model, looked.all_batches, setup.method, seed=seed))
    order = (-ranking["importance"]).argsort().tolist()
    heads = [_roles(labels[ranking.rows[i].site, ranking.rows[i].head]) for i in order]
    top = -(-len(heads) // QUARTER)
    rows: list[Row] = []
    for group, chosen in (("important", heads[:top]), ("other", heads[top:])):
        shares = {role: sum(role in each for each in chosen) / len(chosen) for role in only}
        named = sum(bool(each) for each in chosen) / len(chosen)
        rows.append({"group": group, "syntactic": None, **shares, "any_role": named})
    return rows


def _roles(labels: str) -> set[str]:
    """The roles of the paper among the labels of a head.

    >>> sorted(_roles("previous, rare")), _roles("syntactic: obj, offset -2") == {"syntactic", "positional"}
    (['positional', 'rare'], True)
    """
    kinds = (label.partition(":")[0].split(" ")[0] for label in labels.split(", ") if label)
    return {kind if kind in ("rare", "syntactic") else "positional" for kind in kinds}


def figure(result: Result, language: Language) -> Figure:
    """The share of heads with a role, important or not."""
    models = [str(name) for name in result.distinct("model")]
    drawing, axes = panels(len(models))
    groups = {
        "important": Words("most important quarter", "最重要的四分之一"),
        "other": Words("other", "其余"),
    }
    for each, name in zip(axes, models, strict=True):
        measured = [column for column in COLUMNS if _percent(result, name, "important", column).count]
        shares = {
            words[language]: [_percent(result, name, group, column) for column in measured]
            for group, words in groups.items()
        }
        grouped_bars(each, shares, [COLUMNS[column][language] for column in measured])
        each.set_title(NAMES[name][language], fontsize=11, loc="left")
        each.set_ylim(0, 100)
    axes[0].legend(frameon=False)
    axes[0].set_ylabel(Words("heads with this role (%)", "有这种作用的头（%）")[language])
    return drawing


def verdict(result: Result) -> Judgement:
    """By the share of heads with a role among the important ones and among the others."""
    models = [str(name) for name in result.distinct("model")]
    important, other = (
        list_models({name: _percent(result, name, group) for name in models}, ".0f")
        for group in ("important", "other")
    )
    looked_for = [role for role in ROLES if any(row[role] is not None for row in result.rows)]
    numbers = Words(
        f"Heads with a role among the most important quarter (%): {important.en}; "
        f"among the others: {other.en}. Roles looked for: {len(looked_for)} of 3.",
        f"最重要的四分之一的头中有作用的（%）：{important.zh}；其余的头中：{other.zh}。"
        f"检验了三种作用中的 {len(looked_for)} 种。",
    )
    return Judgement(join_verdicts(_of_model(result, name) for name in models), numbers)


def _of_model(result: Result, name: str) -> Verdict:
    first, second = ({"model": name, "group": group} for group in ("important", "other"))
    more = result.difference("any_role", first, second)
    if more.low > 0:
        return "holds" if result.interval("any_role", **first).low > 0.5 else "holds in part"
    return "does not hold" if more.high <= 0 else "cannot be told"


def _percent(result: Result, model: str, group: str, column: str = "any_role") -> Interval:
    share = result.interval(column, model=model, group=group)
    return Interval(100 * share.mean, 100 * share.low, 100 * share.high, share.count)
