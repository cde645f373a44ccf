"""app: the addresses of the live page. Each hands its question to the queue, and gives the answer as JSON."""

from __future__ import annotations

import asyncio
import hashlib
import html
import json
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import cache
from importlib import resources
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from manyheads.view.live import endpoints, selection
from manyheads.view.live.growing_document import Progress
from manyheads.view.live.queue import Queue
from manyheads.view.live.request_bodies import GONE
from manyheads.view.live.security import Guard, is_loopback
from manyheads.view.live.session import Input, Live

_TYPES = {"page.js": "text/javascript; charset=utf-8", "page.css": "text/css; charset=utf-8"}

Heads = Annotated[dict[str, list[int]], Field(max_length=4096)]


class Asked(BaseModel):
    """A text or a picture."""

    model_config = ConfigDict(extra="forbid", strict=True)
    text: str | None = Field(None, max_length=endpoints.CHARACTERS)
    image: str | None = None
    sample: int | None = None

    @property
    def given(self) -> Input:
        """The same for the model."""
        return Input(self.text, self.image, self.sample)


class Silenced(Asked):
    """A text or a picture, and heads."""

    heads: Heads


class OneHead(Silenced):
    """A text or a picture, heads that are silenced, and the head to look at."""

    site: str
    head: int


class OneQuery(Silenced):
    """A text or a picture, heads that are silenced, and the query to look from."""

    query: int


class Chosen(BaseModel):
    """Heads."""

    model_config = ConfigDict(extra="forbid", strict=True)
    heads: Heads


class Wanted(BaseModel):
    """Which heads somebody wants."""

    model_config = ConfigDict(extra="forbid", strict=True)
    rule: str | None = None
    ranking: str | None = None
    keep: float = Field(0.5, gt=0, le=1)


def app(live: Live, queue: Queue, progress: Progress, *, host: str, token: str) -> Guard:
    """The ASGI application for a model, whose work is done by a queue.

    Parameters
    ----------
    live: the model.
    queue: runs it.
    progress: what is known of it so far, and what comes next.
    host: the address that is listened on.
    token: the secret of this run.
    """
    made = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    for module in live.model.modules():  # so that what nobody waits for ends in the middle of a pass
        module.register_forward_pre_hook(lambda *_: queue.check())

    @made.get("/")
    async def page() -> Response:
        if not is_loopback(host):
            return HTMLResponse(page_html(live.loaded.name))
        return HTMLResponse(page_html(live.loaded.name, token, progress.first()))

    @made.get("/{name}")
    async def static(name: str) -> Response:
        if name not in _TYPES:
            raise HTTPException(404, f"there is nothing at /{name[:100]}")
        # the page asks for a version: whoever has it need not ask again
        kept = {"cache-control": "private, max-age=31536000, immutable"}
        return Response(_static(name), media_type=_TYPES[name], headers=kept)

    @made.get("/api/progress")
    async def how_far() -> Response:
        return JSONResponse(progress.told() | {"waiting": len(queue)})

    @made.get("/api/document")
    async def document(request: Request) -> Response:
        return await answered(request, progress.document)

    @made.post("/api/attend")
    async def attend(request: Request, asked: Asked) -> Response:
        return await answered(request, lambda: endpoints.attend(live, asked.given))

    @made.post("/api/silence")
    async def silence(request: Request, asked: Silenced) -> Response:
        return await answered(request, lambda: endpoints.without(live, asked.given, asked.heads))

    @made.post("/api/exact")
    async def exact(request: Request, asked: OneHead) -> Response:
        return await answered(
            request, lambda: endpoints.exact(live, asked.given, asked.heads, asked.site, asked.head)
        )

    @made.post("/api/rows")
    async def rows(request: Request, asked: OneQuery) -> Response:
        return await answered(request, lambda: endpoints.rows(live, asked.given, asked.heads, asked.query))

    @made.post("/api/pipeline")
    async def pipeline(request: Request, asked: Silenced) -> Response:
        return await answered(request, lambda: endpoints.pipeline(live, asked.given, asked.heads))

    @made.post("/api/quality")
    async def quality(request: Request, chosen: Chosen) -> Response:
        return await answered(request, lambda: endpoints.quality(live, chosen.heads))

    @made.post("/api/choose")
    async def chosen_by(request: Request, wanted: Wanted) -> Response:
        def found() -> Any:
            return {"heads": selection.heads(live, wanted.rule, wanted.ranking, wanted.keep)}

        return await answered(request, found)

    @made.post("/api/plan")
    async def plan(chosen: Chosen) -> Response:
        return Response(
            endpoints.plan(live, chosen.heads),
            media_type="application/json",
            headers={"content-disposition": 'attachment; filename="plan.json"'},
        )

    async def answered(request: Request, run: Callable[[], Any]) -> Response:
        """What a question gives when its turn comes; it is dropped if the browser goes away meanwhile."""

        def written() -> bytes:
            found = run()
            return found if isinstance(found, bytes) else json.dumps(found, allow_nan=False).encode()

        job = queue.submit(request.client or ("", 0), written)
        waiting = asyncio.wrap_future(job)
        gone = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise HTTPException(GONE, "the browser went away")
            return Response(waiting.result(), media_type="application/json")
        except (CancelledError, asyncio.CancelledError):
            raise HTTPException(503, "the server is shutting down") from None
        except (ValueError, HTTPException):
            raise
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0][:300]
            what = f"the model failed on this ({type(error).__name__}: {first}); try something else"
            raise HTTPException(500, what) from error
        finally:
            waiting.cancel()
            queue.drop(job)
            gone.cancel()

    @made.exception_handler(ValueError)
    async def wrong(request: Request, error: ValueError) -> Response:
        return error_response(422, (str(error).strip().splitlines() or ["this cannot be done"])[0][:500])

    @made.exception_handler(RequestValidationError)
    async def unreadable(request: Request, error: RequestValidationError) -> Response:
        return error_response(422, sentence(error))

    @made.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return error_response(error.status_code, str(error.detail))

    return Guard(made, host=host, token=token)


def error_response(status: int, what: str) -> Response:
    """An error, as the page reads it."""
    return JSONResponse({"error": what}, status)


def sentence(error: RequestValidationError) -> str:
    """What is wrong with a request, in a sentence.

    >>> sentence(RequestValidationError([{"loc": ("body", "keep"), "msg": "Input should be less than 1"}]))
    'keep: input should be less than 1'
    """
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")[:100]
    what = str(first["msg"])
    what = what[:1].lower() + what[1:]
    return f"{where}: {what}" if where else f"the request: {what}"


def page_html(model: str, token: str = "", first: bytes = b"") -> str:
    """The page: what it shows comes by requests, for which it carries the token.

    For other addresses than this machine's own the token is empty, and stands in the address that was
    printed, after #, where no server and no log sees it.

    Parameters
    ----------
    model: its name.
    token: the secret of this run.
    first: what the page would ask for first, as JSON, where it is known: then it shows it at once.

    >>> '<title>&lt;b&gt;' in page_html("<b>")
    True
    """
    known = first.decode().replace("<", "\\u003c")  # only in strings, where it means the same
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="manyheads-live" content="{html.escape(token)}">
<title>{html.escape(model)} · manyheads</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/page.css?{_version("page.css")}">
<script src="/page.js?{_version("page.js")}" defer></script>
</head>
<body><div id="page"></div>
<script type="application/json" id="first">{known}</script></body>
</html>
"""


@cache
def _static(name: str) -> bytes:
    return resources.files("manyheads.view").joinpath("static", name).read_bytes()


@cache
def _version(name: str) -> str:
    return hashlib.sha256(_static(name)).hexdigest()[:16]


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
