"""``python -m manyheads`` is the ``manyheads`` command."""

import signal

from manyheads.common.interrupts import leave_at_once

if __name__ == "__main__":
    signal.signal(signal.SIGINT, leave_at_once)  # Ctrl-C leaves without a traceback from the first moment on
    from manyheads.cli import main

    main()
