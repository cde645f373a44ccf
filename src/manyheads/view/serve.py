"""The live page of a model: type a text and see every head; silence heads and see what changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from manyheads.models import open as models
from manyheads.models.loaded import Loaded
from manyheads.view import live

if TYPE_CHECKING:
    from manyheads.view.live.session import Live

PORT = 8610


def print_address(session: Live, address: str) -> None:
    """Print where the page of a model is."""
    print(f"{session.loaded.name}, {session.heads} heads: {address}", flush=True)


def serve(
    model: str | Loaded | None = None,
    *,
    text: str | None = None,
    images: str | None = None,
    data: str | None = None,
    text_column: str | None = None,
    label_column: str | None = None,
    split: str | None = None,
    host: str = "127.0.0.1",
    port: int = PORT,
    device: str | None = None,
    announce: Callable[[Live, str], None] = print_address,
    **opening: Any,
) -> None:
    """Serve the live page of a model until Ctrl-C or SIGTERM.

    Needs ``pip install 'manyheads[live]'``. The page answers as you type a text or drop an image: it shows
    what every head attends to, and what the model says with heads silenced, by hand, by rule or by ranking.
    Only this machine can reach the default host; on other hosts, the address that is announced holds a
    token.

    Parameters
    ----------
    model: what `open_model` opens (a folder, a name on the hub, ``package.module:factory``), or what it
        returned with ``head=True``; without it the embedded MiniLM.
    text: a text file, one text per line; the page measures on its first texts. By default a built-in text.
    images: a folder of images to measure on, for models that read images.
    data: a file with labels, or a dataset, to measure on instead, for a model with a task head; its columns
        and its split, as for `labelled`.
    host, port: where to listen; port 0 for any free one.
    device: where the model runs, such as ``cpu`` or ``cuda:1``.
    opening: ``dtype``, ``device_map``, ``attention`` and ``revision``, as for `open_model`.
    announce: called with the session (its ``loaded.name``, its number of ``heads``) and the address to open,
        as soon as the page answers.

    See Also
    --------
    report : the page of a table as a file, without a server.
    silence : what a click on a head does.
    plan : what the page downloads, for `cut` and `prune`.

    References
    ----------
    Hoover, B., Strobelt, H. and Gehrmann, S. (2020). exBERT: A Visual Analysis Tool to Explore Learned
    Representations in Transformer Models. ACL: System Demonstrations.

    Examples
    --------
    >>> import manyheads as mh
    >>> mh.serve("out/language", text="corpus.txt", port=0)                          # doctest: +SKIP
    out/language, 16 heads: http://127.0.0.1:40913/
    """
    try:
        server, session = live.server, live.session
    except ImportError as error:
        raise ImportError(f"the live page needs {error.name}: pip install 'manyheads[live]'") from None

    loaded = (
        model if isinstance(model, Loaded) else models.open_model(model, head=True, device=device, **opening)
    )
    columns = {"text_column": text_column, "label_column": label_column, "split": split}
    begun = session.begin(loaded, text, images, data, columns)
    server.serve(begun, host, port, lambda address: announce(begun, address))
