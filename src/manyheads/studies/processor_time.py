"""How long some code keeps a processor busy: other jobs on the machine matter little."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def processor_seconds(run: Callable[[], object], repeats: int) -> float:
    """The least processor time of some calls after a first one that does not count, on one thread.

    >>> processor_seconds(lambda: sum(range(1000)), repeats=2) > 0
    True
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # processor time adds up over threads, and waiting threads count, too
    seconds = []
    try:
        run()
        for _ in range(repeats):
            begin = time.process_time()
            run()
            seconds.append(time.process_time() - begin)
    finally:
        torch.set_num_threads(threads)
    return max(min(seconds), 1e-6)
