"""``python -m manyheads`` is the ``manyheads`` command."""

import signal

from manyheads.common.interrupts import leave_at_once


def main() -> None:
    """The command; Ctrl-C leaves without a traceback from its first moment on."""
    signal.signal(signal.SIGINT, leave_at_once)
    from manyheads.cli import main as command

    command()


if __name__ == "__main__":
    main()
