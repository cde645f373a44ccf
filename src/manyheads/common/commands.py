"""A function of typed options as a command of Typer: help beside types, dataclasses as groups of options."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, cleandoc, signature
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from manyheads.common.console import say
from manyheads.common.interrupts import EXIT_CODE, Interrupted
from manyheads.common.language import choose_language, words

# How Typer makes commands here.
SETTINGS: dict[str, Any] = {
    "rich_markup_mode": "rich",
    "add_completion": False,  # the app itself has it
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
Verb = Callable[..., str | None]  # returns what to say after Ctrl-C

LANGUAGE = "The language of the output: en or zh; that of the locale by default."
OutputLanguage = Annotated[Literal["en", "zh"] | None, LANGUAGE]


def command(
    verb: Verb, defaults: Mapping[str, object] | None = None, load: Callable[[], object] = bool
) -> Callable[..., None]:
    """A verb as Typer takes it.

    A text beside the type of a parameter is the help of its option. A parameter whose type is a dataclass
    stands for an option for each field. A verb that Ctrl-C ended returns the sentence that says what was
    kept, or raises `Interrupted` when there is nothing to keep; the exit code is then 130. Every verb has
    --language; the paragraphs of its help wrap where the terminal ends.

    Parameters
    ----------
    verb: the function; its docstring is the help of the command.
    defaults: of fields of its dataclasses, where the verb has others than they have.
    load: called before the verb, when its options are understood: for what is slow to import.
    """
    parameters: list[Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in signature(verb, eval_str=True).parameters.values():
        if is_dataclass(parameter.annotation):
            groups[parameter.name] = kind = parameter.annotation
            values = {field.name: field.default for field in fields(kind)} | dict(defaults or {})
            hints = get_type_hints(kind, include_extras=True)
            parameters += [option(name, values[name], hint) for name, hint in hints.items()]
        else:
            parameters.append(option(parameter.name, parameter.default, parameter.annotation))
    parameters.append(option("language", None, OutputLanguage))

    @wraps(verb)
    def run(**options: Any) -> None:
        if (language := options.pop("language")) is not None:
            choose_language(language)  # else that of the command itself, or of the locale
        for name, kind in groups.items():
            options[name] = kind(**{field.name: options.pop(field.name) for field in fields(kind)})
        load()
        try:
            message = verb(**options)
        except Interrupted:
            message = words("Stopped before there was a result; nothing was written.")
        if message:
            say(message)
            raise typer.Exit(EXIT_CODE)

    run.__doc__ = unwrapped(verb.__doc__ or "")
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {}
    return run


def option(name: str, default: object, hint: Any) -> Parameter:
    """A parameter for Typer: beside its type, its help and its panel; only what is True has a --no-NAME.

    The short form of --out is -o everywhere.
    """
    kind, *details = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if details and isinstance(details[0], str):
        flags = [f"--{name.replace('_', '-')}"] if default is not True else []
        flags += ["-o"] if name == "out" else []
        hint = Annotated[kind, typer.Option(*flags, help=details[0], rich_help_panel=[*details, None][1])]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def optional(name: str, hint: Any, help: str, default: object = None, panel: str | None = None) -> Parameter:
    """An option that is None unless it is passed; its help says what holds then."""
    kind = next((part for part in get_args(hint) if part is not type(None)), hint)
    if default is not None and default is not False and default != "":
        help = f"{help} [dim]({default})[/dim]"
    return option(name, None, Annotated[kind | None, help, panel])


def optional_fields(group: Any) -> list[Parameter]:
    """The same for each field of a dataclass, whose help stands beside its type."""
    options = []
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        kind, help = get_args(hints[field.name])
        options.append(optional(field.name, kind, help, field.default))
    return options


def late_commands(
    name: str, help: str, helps: Callable[[], Mapping[str, str]], build: Callable[[str], TyperCommand]
) -> typer.Typer:
    """A group of commands that are built when they are called, because that needs torch.

    Parameters
    ----------
    name, help: of the group.
    helps: the commands by name, each with its help in one line.
    build: makes the command of a name.
    """

    class Group(TyperGroup):
        """What Typer asks for its commands."""

        def list_commands(self, ctx: object) -> list[str]:
            return list(helps())

        def get_command(self, ctx: object, cmd_name: str) -> TyperCommand | None:
            commands = helps()
            return built_command(cmd_name, lambda: None, commands[cmd_name]) if cmd_name in commands else None

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            name, stub, rest = super().resolve_command(ctx, args)
            return name, build(name) if name and name in helps() else stub, rest

    return typer.Typer(name=name, cls=Group, no_args_is_help=True, help=help, **SETTINGS)


def built_command(name: str, function: Callable[..., None], help: str) -> TyperCommand:
    """The command of a function that Typer takes."""
    app = typer.Typer(**SETTINGS)
    app.command(name, help=help)(function)
    command: TyperCommand = typer.main.get_command(app)  # type: ignore[assignment]
    return command


def unwrapped(text: str) -> str:
    """A help with each paragraph in one line, so that it wraps by itself; indented lines stay as they are.

    >>> unwrapped("One head\\nand another.\\n\\n  manyheads demo\\n  manyheads train")
    'One head and another.\\n\\n  manyheads demo\\n  manyheads train'
    """
    return re.sub(r"(?<=\S)\n(?=\S)", " ", cleandoc(text))


def listed_names(text: str | None) -> list[str] | None:
    """What an option lists, separated by commas; None where it is not used.

    >>> listed_names("induction, retrieval")
    ['induction', 'retrieval']
    """
    return None if text is None else [name.strip() for name in text.split(",")]
