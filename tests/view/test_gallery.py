"""The gallery: one file that loads nothing, in two languages, with ids that do not clash."""

import html.parser
import re

import pytest

from manyheads.studies.run import study
from manyheads.view.gallery import page

NAMES = ("splitting_is_free", "several_heads")


@pytest.fixture(scope="module")
def text():
    return page([study(name, "tiny") for name in NAMES], "en")


class Outline(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.ids, self.languages, self.sources, self.open = [], [], [], []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if "id" in values:
            self.ids.append(values["id"])
        if "lang" in values:
            self.languages.append(values["lang"])
        self.sources += [values[name] for name in ("src", "href") if name in values]
        if tag not in ("meta", "link", "br", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def outline(text):
    read = Outline()
    read.feed(text)
    assert not read.open
    return read


def test_it_loads_nothing(text):
    assert all(source.startswith("#") for source in outline(text).sources)
    assert "url(http" not in text
    assert "@import" not in text


def test_ids_are_all_different(text):
    ids = outline(text).ids
    assert len(ids) == len(set(ids))
    assert set(NAMES) <= set(ids)
    assert {name[1:] for name in re.findall(r'(?:url\(|href=")(#[^")]+)', text)} <= set(ids)


def test_everything_is_there_in_both_languages(text):
    languages = outline(text).languages
    assert languages.count("zh") == languages.count("en") - 1  # the page itself begins in English
    assert "参数量相同时，多个头胜过一个头，但头并非越多越好。" in text


def test_the_same_results_give_the_same_page():
    result = study("splitting_is_free", "tiny")
    assert page([result], "zh") == page([result], "zh")


def test_text_from_a_result_is_no_markup():
    result = study("splitting_is_free", "tiny")
    result.machine = "<script>alert(1)</script>"
    result.settings = {"heads": ["</table>"]}
    assert "<script>alert" not in page([result], "en")
    assert "</table></td>" not in page([result], "en")
