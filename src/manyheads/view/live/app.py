"""The addresses of the live page. Each hands its request to the queue, and answers with JSON."""

from __future__ import annotations

import asyncio
import hashlib
import html
import json
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from functools import cache
from importlib import resources

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException

from manyheads.common.errors import describe_error, first_line
from manyheads.heads.effects.live_model import call_before_modules
from manyheads.view.live import endpoints
from manyheads.view.live.contract import (
    AblationRequest,
    Failure,
    HeadRequest,
    HeadsRequest,
    InputRequest,
    PipelineRequest,
    QueryRequest,
    SelectedHeads,
    SelectionRequest,
)
from manyheads.view.live.growing_document import GrowingDocument
from manyheads.view.live.queue import Queue
from manyheads.view.live.request_bodies import GONE
from manyheads.view.live.security import Guard, is_loopback
from manyheads.view.live.selection import selected_heads
from manyheads.view.live.session import Live

_TYPES = {"page.js": "text/javascript; charset=utf-8", "page.css": "text/css; charset=utf-8"}


def app(live: Live, queue: Queue, document: GrowingDocument, *, host: str, token: str) -> Guard:
    """The ASGI application for a model, whose work is done by a queue.

    Parameters
    ----------
    live: the model.
    queue: runs it.
    document: what was measured so far.
    host: the address to listen on.
    token: the secret of this run.
    """
    routes = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    call_before_modules(live.model, queue.check)  # a pass that was given up ends in the middle

    @routes.get("/")
    async def page() -> Response:
        if not is_loopback(host):
            return HTMLResponse(page_html(live.loaded.name))
        return HTMLResponse(page_html(live.loaded.name, token, document.first_page()))

    @routes.get("/{name}")
    async def static(name: str) -> Response:
        if name not in _TYPES:
            raise HTTPException(404, f"there is nothing at /{name[:100]}")
        # the address has the version of the file, so a browser may keep it
        headers = {"cache-control": "private, max-age=31536000, immutable"}
        return Response(_static(name), media_type=_TYPES[name], headers=headers)

    @routes.get("/api/progress")
    async def progress() -> Response:
        return JSONResponse(document.progress())

    @routes.get("/api/document")
    async def whole_document(request: Request) -> Response:
        return await answered(request, document.document)

    @routes.post("/api/attend")
    async def attend(request: Request, body: InputRequest) -> Response:
        return await answered(request, lambda: endpoints.attend(live, body.input))

    @routes.post("/api/silence")
    async def silence(request: Request, body: AblationRequest) -> Response:
        return await answered(request, lambda: endpoints.ablate(live, body.input, body.heads))

    @routes.post("/api/exact")
    async def exact(request: Request, body: HeadRequest) -> Response:
        return await answered(
            request, lambda: endpoints.exact(live, body.input, body.heads, body.site, body.head)
        )

    @routes.post("/api/rows")
    async def rows(request: Request, body: QueryRequest) -> Response:
        return await answered(request, lambda: endpoints.rows(live, body.input, body.heads, body.query))

    @routes.post("/api/pipeline")
    async def pipeline(request: Request, body: PipelineRequest) -> Response:
        return await answered(request, lambda: endpoints.pipeline(live, body.input, body.heads, body.site))

    @routes.post("/api/quality")
    async def quality(request: Request, body: HeadsRequest) -> Response:
        return await answered(request, lambda: endpoints.quality(live, body.heads))

    @routes.post("/api/choose")
    async def choose(request: Request, body: SelectionRequest) -> Response:
        def selected() -> SelectedHeads:
            return {"heads": selected_heads(live, body.rule, body.ranking, body.keep)}

        return await answered(request, selected)

    @routes.post("/api/plan")
    async def plan(body: HeadsRequest) -> Response:
        return Response(
            endpoints.plan(live, body.heads),
            media_type="application/json",
            headers={"content-disposition": 'attachment; filename="plan.json"'},
        )

    async def answered(request: Request, compute: Callable[[], Mapping[str, object] | bytes]) -> Response:
        """The answer to a request when its turn comes; dropped if the browser goes away meanwhile."""

        def encode() -> bytes:
            result = compute()
            return result if isinstance(result, bytes) else json.dumps(result, allow_nan=False).encode()

        job = queue.submit(request.client or ("", 0), encode)
        answer = asyncio.wrap_future(job)
        disconnect = asyncio.ensure_future(_wait_for_disconnect(request))
        futures: list[asyncio.Future[bytes] | asyncio.Future[None]] = [answer, disconnect]
        try:
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise HTTPException(GONE, "the browser went away")
            return Response(answer.result(), media_type="application/json")
        except (CancelledError, asyncio.CancelledError):
            raise HTTPException(503, "the server is shutting down") from None
        except (ValueError, HTTPException):
            raise
        except Exception as error:
            message = f"the model failed on this input ({describe_error(error, 300)}); try another one"
            raise HTTPException(500, message) from error
        finally:
            answer.cancel()
            queue.drop(job)
            disconnect.cancel()

    @routes.exception_handler(ValueError)
    async def wrong(request: Request, error: ValueError) -> Response:
        return error_response(422, first_line(error, 500))

    @routes.exception_handler(RequestValidationError)
    async def unreadable(request: Request, error: RequestValidationError) -> Response:
        return error_response(422, validation_message(error))

    @routes.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return error_response(error.status_code, str(error.detail))

    return Guard(routes, host=host, token=token)


def error_response(status: int, sentence: str) -> Response:
    """An error, as the page reads it."""
    return JSONResponse(Failure(error=sentence), status)


def validation_message(error: RequestValidationError) -> str:
    """What is wrong with a request, in a sentence.

    >>> error = {"loc": ("body", "keep"), "msg": "Input should be less than 1"}
    >>> validation_message(RequestValidationError([error]))
    'keep: input should be less than 1'
    """
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"] if part != "body")[:100]
    message = str(first["msg"])
    message = message[:1].lower() + message[1:]
    return f"{field}: {message}" if field else f"the request: {message}"


def page_html(model: str, token: str = "", first: bytes = b"") -> str:
    """The page: what it shows comes by requests, for which it carries the token.

    For addresses that other machines reach, the token is empty here, and is in the printed address after #,
    where no server and no log sees it.

    Parameters
    ----------
    model: its name.
    token: the secret of this run.
    first: `FirstPage` as JSON, where there is one: the page then shows it at once.

    >>> '<title>&lt;b&gt;' in page_html("<b>")
    True
    """
    data = first.decode().replace("<", "\\u003c")  # only in strings, where it means the same
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
<script type="application/json" id="first">{data}</script></body>
</html>
"""


@cache
def _static(name: str) -> bytes:
    return resources.files("manyheads.view").joinpath("static", name).read_bytes()


@cache
def _version(name: str) -> str:
    return hashlib.sha256(_static(name)).hexdigest()[:16]


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
