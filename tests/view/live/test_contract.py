"""What the live server takes and answers is what its contract says."""

import json

import pytest
from tests.helpers.contract_check import mismatches
from tests.helpers.live_models import apart

from manyheads.view.document.contract import HeadDocument
from manyheads.view.live.contract import ENDPOINTS, Failure, FirstPage, LiveProgress

FIRST = "encoder.layer.0.attention.self"
BODIES = {
    "/api/attend": {"text": "heads attend"},
    "/api/silence": {"text": "heads attend", "heads": {FIRST: [1]}},
    "/api/exact": {"text": "heads attend", "heads": {}, "site": FIRST, "head": 2},
    "/api/rows": {"text": "heads attend", "heads": {FIRST: [0]}, "query": 3},
    "/api/pipeline": {"text": "heads attend", "heads": {}},
    "/api/quality": {"heads": {FIRST: [0, 2]}},
    "/api/choose": {"ranking": "random", "keep": 0.5},
}


@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_answer_keeps_the_contract(site, path):
    takes, gives = ENDPOINTS[path]
    takes.model_validate(BODIES[path])
    status, answer = apart(site.ask(path, BODIES[path]))
    assert status == 200
    assert mismatches(answer, gives, path) == []


def test_the_application_has_these_endpoints_and_the_plan(site):
    posts = {route.path for route in site.app.app.routes if "POST" in getattr(route, "methods", ())}
    assert posts == {*ENDPOINTS, "/api/plan"}


def test_progress_document_and_errors(site):
    assert mismatches(apart(site.ask("/api/progress"))[1], LiveProgress) == []
    assert mismatches(apart(site.ask("/api/document"))[1], HeadDocument) == []
    assert mismatches(json.loads(site.document.first_page()), FirstPage) == []
    for body in ({"text": ""}, {"text": 3}):
        status, answer = apart(site.ask("/api/attend", body))
        assert status == 422
        assert mismatches(answer, Failure) == []
