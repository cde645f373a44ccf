"""What a thread does besides running models, so that interceptors know what is not the model's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Internal(threading.local):
    """What this thread does besides running models.

    running: an interceptor computes something, which others must not take for the model's functions.
    repeating: a forward that was seen before is repeated in part, so that its code path tells nothing.
    unseen: a model runs to make the batches of a measurement, not to be measured.
    """

    running = repeating = unseen = False

    @contextmanager
    def marked(self, running: bool) -> Iterator[None]:
        """A context in which functions are, or are not, an interceptor's."""
        before, self.running = self.running, running
        try:
            yield
        finally:
            self.running = before


internal = _Internal()


@contextmanager
def unwatched() -> Iterator[None]:
    """A context in which the forwards of this thread are not seen, nor edited, by any `Interceptor`.

    For batches that a model makes itself, such as the translations that it is then measured on: these may be
    made one by one while a measurement goes on.
    """
    before, internal.unseen = internal.unseen, True
    try:
        yield
    finally:
        internal.unseen = before
