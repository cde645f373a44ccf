"""``python -m manyheads`` is the ``manyheads`` command."""

from manyheads.cli import main

if __name__ == "__main__":
    main()
