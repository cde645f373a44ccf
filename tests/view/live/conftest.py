"""The application for a tiny sentence encoder."""

import pytest
from tests.helpers.live_models import Characters, Site, bert, loaded

from manyheads.view.live.session import begin


@pytest.fixture(scope="module")
def site():
    """The application for a tiny sentence encoder."""
    made = Site(begin(loaded(bert(), Characters())))
    yield made
    made.queue.close()
