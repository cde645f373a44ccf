"""The live page of a model at a real address, for a browser."""

import threading

import uvicorn
from tests.helpers.live_models import TOKEN

from manyheads.view.live.app import app
from manyheads.view.live.growing_document import GrowingDocument
from manyheads.view.live.queue import Queue
from manyheads.view.live.server import configured, listen


class Served:
    """The live page of a model, at a real address, in a thread."""

    def __init__(self, live):
        self.live, self.queue = live, Queue()
        self.document = GrowingDocument(self.live, self.queue)
        self.socket = listen("127.0.0.1", 0)
        self.address = f"http://127.0.0.1:{self.socket.getsockname()[1]}/"
        made = app(self.live, self.queue, self.document, host="127.0.0.1", token=TOKEN)
        self.server = uvicorn.Server(configured(made))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})
        self.thread.start()

    def ask(self, question, *asked):
        """What a function of the live model gives: in its turn, since one thread runs the model."""
        return self.queue.submit(("test", 0), lambda: question(self.live, *asked)).result(60)

    def close(self):
        self.server.should_exit = self.server.force_exit = True
        self.thread.join(20)
        self.queue.close()
        self.socket.close()
