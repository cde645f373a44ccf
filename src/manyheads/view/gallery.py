"""The gallery of claims: one page in English and Chinese, to be read from top to bottom."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from html import escape
from importlib import resources

from manyheads.studies import find
from manyheads.studies.drawing import as_svg, formula_svg
from manyheads.studies.result import Result, summary
from manyheads.studies.study import VERDICTS, Language, Words

LANGUAGES: tuple[Language, ...] = ("en", "zh")
TITLE = Words("Multi-head attention: what is claimed, and what holds", "多头注意力：有哪些说法，哪些成立")
INTRODUCTION = Words(
    "Articles say why multi-head attention works. Here each claim is an experiment: a rule that was fixed "
    "before the run, a figure, and the verdict that the numbers give. Every one can be run again with the "
    "command below it.",
    "许多文章解释多头注意力为什么有效。在这里，每个说法都是一个实验：先定规则，再运行，由数字给出结论。每"
    "个实验都可以用下面的命令重新运行。",
)
MOST_ROWS = 60


def page(results: Sequence[Result], language: Language) -> str:
    """The page of some results, in both languages; a button switches, ``language`` is shown first.

    It is one HTML file that loads nothing.
    """
    static = resources.files("manyheads.view").joinpath("static")
    style, script = (
        static.joinpath(name).read_text(encoding="utf-8") for name in ("gallery.css", "gallery.js")
    )
    sections = "\n".join(_section(number, result) for number, result in enumerate(results, 1))
    contents = ""
    if len(results) > 1:
        rows = "".join(_entry(number, result) for number, result in enumerate(results, 1))
        contents = f"<p>{_bilingual(INTRODUCTION)}</p><ol class='contents'>{rows}</ol>"
    return f"""<!doctype html>
<html lang="{language}" data-language="{language}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(TITLE[language])}</title>
<style>{style}</style>
</head>
<body>
<header><button id="language" type="button">中文 / English</button></header>
<main>
<h1>{_bilingual(TITLE)}</h1>
{contents}
{sections}
</main>
<script>{script}</script>
</body>
</html>
"""


def _bilingual(words: Words) -> str:
    """A text in both languages, of which the page shows one."""
    return "".join(f'<span lang="{language}">{escape(words[language])}</span>' for language in LANGUAGES)


def _entry(number: int, result: Result) -> str:
    claim = find(result.study).claim
    return f'<li><a href="#{result.study}">{_bilingual(claim.sentence)}</a> {_badge(result)}</li>'


def _badge(result: Result) -> str:
    verdict = find(result.study).verdict(result).verdict
    return f'<strong class="verdict {verdict.replace(" ", "-")}">{_bilingual(VERDICTS[verdict])}</strong>'


def _section(number: int, result: Result) -> str:
    study = find(result.study)
    claim, judgement = study.claim, study.verdict(result)
    paragraphs = "".join(_paragraphs(claim.explanation, language) for language in LANGUAGES)
    formulas = "".join(map(_formula, claim.formulas))
    figures = "".join(_figure(as_svg(study.figure(result, language)), language) for language in LANGUAGES)
    sources = "".join(f"<li>{escape(source)}</li>" for source in claim.sources)
    rule = Words("The rule, fixed before the run: ", "运行之前定下的规则：")
    size = " --full" if result.size == "full" else ""
    return f"""<section id="{result.study}">
<h2>{number}. {_bilingual(claim.sentence)}</h2>
{paragraphs}
{formulas}
<figure>{figures}<figcaption>{_bilingual(claim.caption)}</figcaption></figure>
<p>{_badge(result)} {_bilingual(judgement.because)}</p>
<p class="rule">{_bilingual(rule)}{_bilingual(claim.rule)}</p>
<pre>manyheads study {result.study}{size}</pre>
<details><summary>{_bilingual(Words("Try it yourself", "自己试试"))}</summary>{_settings(result)}</details>
<details><summary>{_bilingual(Words("All numbers", "全部数字"))}</summary>{_table(result)}</details>
<details><summary>{_bilingual(Words("Sources, machine", "来源与机器"))}</summary><ul>{sources}</ul>
<p>{escape(result.machine)}; {result.seconds:,.0f} s</p></details>
</section>"""


def _formula(formula: str) -> str:
    """A line of formulas, which wraps at wide spaces where the screen is narrow."""
    parts = (_inline(formula_svg(part.strip())) for part in formula.split(r"\qquad"))
    return f'<p class="formula">{" ".join(parts)}</p>'


def _figure(svg: str, language: Language) -> str:
    """A figure as wide as the page, but no narrower than its panels can be read: then it scrolls."""
    panels = svg.count('id="axes_')
    return f'<div lang="{language}" class="figure" style="--panels:{panels}">{_inline(svg)}</div>'


def _paragraphs(words: Words, language: Language) -> str:
    parts = "".join(f"<p>{escape(part)}</p>" for part in words[language].split("\n\n"))
    return f'<div lang="{language}">{parts}</div>'


def _settings(result: Result) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(_format_value(value))}</td></tr>"
        for name, value in result.settings.items()
    )
    first = next((name for name in result.settings if name not in ("seeds", "data")), "seeds")
    example = f"manyheads study {result.study} --set {first}={_format_value(result.settings[first])}"
    return f"<table>{rows}</table><pre>{escape(example)}</pre>"


def _format_value(value: object) -> str:
    return (
        ",".join(map(str, value)) if isinstance(value, list | tuple) else "" if value is None else str(value)
    )


def _table(result: Result) -> str:
    columns = find(result.study).COLUMNS
    keys = [name for name in result.rows[0] if name not in columns and name != "seed"]
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in keys)
    head += "".join(f"<th>{_bilingual(words)}</th>" for words in columns.values())
    rows = ""
    for key, values in list(summary(result, list(columns)))[:MOST_ROWS]:
        cells = [str(key.get(name, "")) for name in keys] + [f"{values[column]:.4g}" for column in columns]
        rows += f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
    return f'<div class="wide"><table><tr>{head}</tr>{rows}</table></div>'


def _inline(svg: str) -> str:
    """An SVG file as a part of a page: without its header, with ids of its own, as wide as there is room."""
    body = svg[svg.index("<svg") :]
    salt = f"i{hashlib.sha256(body.encode()).hexdigest()[:8]}-"
    body = re.sub(r'\bid="([^"]+)"', rf'id="{salt}\1"', body)
    return re.sub(r'(url\(#|href="#)', rf"\1{salt}", body)
