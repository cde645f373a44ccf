"""docs/claims.md and docs/zh/claims.md, and their figures, from the recorded results of the full studies.

    python tools/claims.py
    python tools/claims.py DIR

Between <!-- claim NAME --> and <!-- end -->, docs/concepts.md and docs/zh/concepts.md have the figure and the
verdict of a claim: those on record, or else those that `manyheads study NAME --out DIR` left in a folder.

Records are made by `manyheads study NAME --full --out DIR`; DIR/NAME/result.json is the record: copy it to
src/manyheads/studies/records/NAME.json.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from manyheads.common.whole_files import write_whole
from manyheads.studies import NAMES, find
from manyheads.studies.drawing import as_svg
from manyheads.studies.result import Result, read_result, summary
from manyheads.studies.run import recorded
from manyheads.studies.study import VERDICTS, Language, Words

DOCS = Path(__file__).parents[1] / "docs"
FILES: dict[Language, str] = {"en": "claims.md", "zh": "zh/claims.md"}
PICTURES: dict[Language, str] = {"en": "pictures/claims", "zh": "../pictures/claims"}
TITLE = Words("# Claims about multi-head attention", "# 关于多头注意力的说法")
INTRODUCTION = Words(
    "Each claim is an experiment that you can run. The rule for the verdict was fixed before the run. The\n"
    "numbers below are those of the full size, as far as it is on record; `tools/claims.py` writes this\n"
    "page from the records. [studies.md](studies.md) explains how to run them.",
    "每个说法都是一个可以运行的实验，判断规则在运行之前定下。下面是已有记录的完整规模结果，本页由\n"
    "`tools/claims.py` 根据记录生成。运行方法见 [studies.md](studies.md)。",
)
HEADER = Words("| claim | verdict |\n|---|---|", "| 说法 | 结论 |\n|---|---|")
RULE = Words("Rule", "规则")
CONCEPTS: dict[Language, str] = {"en": "concepts.md", "zh": "zh/concepts.md"}
SHORT = Words("a short run, ", "短实验，")
IN_BRACKETS = Words(" ({}). ", "（{}）。")
BLOCK = re.compile(r"(<!-- claim (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
MOST_ROWS = 40


def written(language: Language) -> str:
    """The page."""
    results = {name: result for name in NAMES if (result := recorded(name)) is not None}
    rows = [
        f"| [{find(name).claim.sentence[language]}](#{anchor(find(name).claim.sentence[language])}) | "
        f"{VERDICTS[find(name).verdict(result).verdict][language]} |"
        for name, result in results.items()
    ]
    parts = [TITLE[language], INTRODUCTION[language], "\n".join([HEADER[language], *rows])]
    parts += [_section(result, language) for result in results.values()]
    return "\n\n".join(parts) + "\n"


def _section(result: Result, language: Language) -> str:
    study, name = find(result.study), result.study
    claim, judgement = study.claim, study.verdict(result)
    verdict = VERDICTS[judgement.verdict][language]
    return "\n\n".join(
        [
            f"## {claim.sentence[language]}",
            claim.explanation[language],
            f"![{claim.caption[language]}]({PICTURES[language]}/{name}.{language}.svg)",
            claim.caption[language],
            f"**{verdict}**. {judgement.because[language]}",
            f"{RULE[language]}: {claim.rule[language]}",
            f"```\n{_command(result)}\n```",
            _table(result, language),
            "\n".join(f"- {source}" for source in claim.sources),
        ]
    )


def illustrated(text: str, language: Language, results: Mapping[str, Result]) -> str:
    """A page with the figures and the verdicts of the claims that it names, as far as there are results."""

    def block(match: re.Match[str]) -> str:
        result = results.get(match[2])
        return match[0] if result is None else f"{match[1]}\n{_figure(result, language)}\n\n{match[3]}"

    return BLOCK.sub(block, text)


def _figure(result: Result, language: Language) -> str:
    study, judgement = find(result.study), find(result.study).verdict(result)
    caption, verdict = study.claim.caption[language], VERDICTS[judgement.verdict][language]
    size = f"{SHORT[language]}`manyheads study {result.study}`"
    if result.size == "full":
        size = f"`{_command(result)}`"
    sentence = f"*{study.claim.sentence[language]}* **{verdict}**" + IN_BRACKETS[language].format(size)
    sentence += judgement.because[language]
    return f"![{caption}]({PICTURES[language]}/{result.study}.{language}.svg)\n\n{sentence}"


def anchor(title: str) -> str:
    """What MkDocs and GitHub make of a heading.

    >>> anchor('"All heads\' weights sum to one": what does?')
    'all-heads-weights-sum-to-one-what-does'
    """
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _command(result: Result) -> str:
    data = result.settings["data"]
    return f"manyheads study {result.study} --full" + (f" --data {data}" if data else "")


def _table(result: Result, language: Language) -> str:
    columns = find(result.study).COLUMNS
    keys = [name for name in result.rows[0] if name not in columns and name != "seed"]
    titles = [*(name.replace("_", " ") for name in keys), *(words[language] for words in columns.values())]
    lines = [f"| {' | '.join(titles)} |", f"|{'---:|' * len(titles)}"]
    for key, values in list(summary(result, list(columns)))[:MOST_ROWS]:
        cells = ["" if (value := key.get(name)) is None else str(value) for name in keys]
        cells += [f"{values[column]:.4g}" if values[column].count else "" for column in columns]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Write the pages and their figures."""
    pictures = DOCS / "pictures" / "claims"
    pictures.mkdir(parents=True, exist_ok=True)
    records = {name: result for name in NAMES if (result := recorded(name)) is not None}
    paths = Path(sys.argv[1]).glob("*/result.json") if sys.argv[1:] else ()
    short = {result.study: result for result in map(read_result, paths) if result.complete}
    pages = "".join((DOCS / file).read_text(encoding="utf-8") for file in CONCEPTS.values())
    named = {name for _, name, _ in BLOCK.findall(pages)}
    results = {name: result for name, result in short.items() if name in named} | records
    for language, file in FILES.items():
        write_whole(DOCS / file, written(language))
        page = DOCS / CONCEPTS[language]
        write_whole(page, illustrated(page.read_text(encoding="utf-8"), language, results))
        for name, result in results.items():
            figure = as_svg(find(name).figure(result, language))
            write_whole(pictures / f"{name}.{language}.svg", figure)


if __name__ == "__main__":
    main()
