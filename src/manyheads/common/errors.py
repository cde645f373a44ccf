"""Errors that one room raises and another reads, and errors of other packages in one line."""

from __future__ import annotations

from collections.abc import Sequence


class UnreadDataError(ValueError):
    """The data that a model was trained on cannot or may not be read. ``why`` is the message without advice.

    >>> print(UnreadDataError("MODEL: out/language names a.txt, which is not in the folder", "a.txt"))
    MODEL: out/language names a.txt, which is not in the folder; give --data a.txt
    """

    def __init__(self, why: str, path: str = "DATA") -> None:
        super().__init__(f"{why}; give --data {path}")
        self.why = why


class FailedChangeError(RuntimeError):
    """A changed copy of a model does not compute what it should; the model itself is as it was."""


def check_choices(option: str, chosen: Sequence[str], choices: Sequence[str]) -> None:
    """Raise unless ``chosen`` is a list of one or more of the choices.

    >>> check_choices("roles", ["query", "keys"], ["query", "key", "value"])
    Traceback (most recent call last):
    ValueError: roles: expected some of query, key, value, got 'keys'
    """
    if isinstance(chosen, str):
        raise TypeError(f"{option}: expected several, as in [{chosen!r}], got {chosen!r}")
    for name in chosen:
        if name not in choices:
            raise ValueError(f"{option}: expected some of {', '.join(choices)}, got {name!r}")
    if not chosen:
        raise ValueError(f"{option}: expected some of {', '.join(choices)}, got none")


def lacks_gradient(error: RuntimeError) -> bool:
    """Whether torch says of a function that it has no backward pass.

    >>> lacks_gradient(RuntimeError("derivative for aten::attend is not implemented"))
    True
    """
    return any(words in str(error) for words in ("autograd formula", "derivative for", "not differentiable"))


def first_line(error: BaseException, longest: int = 200) -> str:
    """The first line of an error's message, cut to a length; the name of its class if it has no message.

    >>> first_line(ValueError("one\\ntwo")), first_line(KeyError())
    ('one', 'KeyError')
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:longest] if lines else type(error).__name__


def describe_error(error: BaseException, longest: int = 200) -> str:
    """The class of an error, and the first line of its message.

    >>> describe_error(ValueError("one\\ntwo")), describe_error(KeyError())
    ('ValueError: one', 'KeyError')
    """
    name, line = type(error).__name__, first_line(error, longest)
    return name if line == name else f"{name}: {line}"
