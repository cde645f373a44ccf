"""The ``manyheads`` command, also as ``python -m manyheads``."""

import atexit
import os
import signal
import sys

from manyheads.common.interrupts import leave_at_once
from manyheads.common.lazy_names import submodules

find = submodules("manyheads")


def run() -> None:
    """Run the command and end the process without taking the interpreter apart.

    Python frees torch's and transformers' modules one by one when it ends, which takes about two seconds.
    """
    signal.signal(signal.SIGINT, leave_at_once)
    code: object = 0
    try:
        find("cli").main()  # the verbs load only now: Ctrl-C is quiet while they do
    except SystemExit as end:
        code = end.code
    if not (code is None or isinstance(code, int)):
        sys.exit(str(code))
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # nobody reads the output any more
        code = code or 1
    os._exit(code or 0)


if __name__ == "__main__":
    run()
