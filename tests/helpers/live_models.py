"""Tiny models, and the application around them, without a socket."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import torch
import transformers as hf
from tests.helpers.models import SIZES as SIZES
from tests.helpers.models import bert_config

from manyheads.models.loaded import Loaded
from manyheads.view.live.app import app
from manyheads.view.live.growing_document import GrowingDocument
from manyheads.view.live.queue import Queue

TOKEN = "a-secret"


class Characters:
    """A tokenizer of characters between 0 (special) and 0; 1 is the mask, written _."""

    all_special_ids = (0,)
    pad_token_id = 0
    mask_token, mask_token_id = "_", 1

    def __call__(self, text):
        return {"input_ids": [0, *(1 if c == "_" else 2 + ord(c) % 95 for c in text), 0]}

    def decode(self, ids, skip_special_tokens=False):
        return "".join("_" if i == 1 else chr(93 + i) for i in ids if i)

    def convert_ids_to_tokens(self, i):
        return "[0]" if i == 0 else self.decode([i])


def loaded(model, tokenizer=None, processor=None):
    """A model as `models.open.open_model` gives it."""
    return Loaded("tiny", model.eval(), lambda: _or_raise(tokenizer), lambda: _or_raise(processor))


def _or_raise(found):
    if found is None:
        raise ValueError("text: tiny comes without it")
    return found


def bert(kind=hf.BertModel, **options):
    """A BERT of 2 layers of 3 heads."""
    torch.manual_seed(3)
    return kind(bert_config(max_position_embeddings=64, **options)).eval()


class Site:
    """The application for a model, its queue, and a client that knows the token."""

    def __init__(self, live, host="127.0.0.1"):
        self.live, self.queue = live, Queue()
        self.document = GrowingDocument(live, self.queue)
        self.app = app(live, self.queue, self.document, host=host, token=TOKEN)

    def client(self, **headers):
        """An httpx client; the token is sent unless headers say otherwise."""
        known = {"x-manyheads-token": TOKEN} | headers
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        base = "http://127.0.0.1:8610"
        return httpx.AsyncClient(transport=transport, base_url=base, headers=known)

    async def ask(self, path, body=None, **headers):
        """What the application says: status and JSON."""
        async with self.client(**headers) as client:
            said = await (client.get(path) if body is None else client.post(path, json=body))
        return said.status_code, json.loads(said.content)


def apart(question):
    """Run a coroutine to its end in a thread: Playwright's browser keeps a loop running in the main one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, question).result()
