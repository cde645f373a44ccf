"""Options that several verbs share, with the same help everywhere, and what makes a verb a command."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from importlib import import_module
from inspect import Parameter, Signature, cleandoc, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from rich.console import Console
from rich.status import Status

import manyheads as mh
from manyheads import data
from manyheads.common.interrupts import EXIT_CODE, Interrupted
from manyheads.common.language import choose_language, words
from manyheads.common.processes import processes, rank
from manyheads.data.columns import Columns
from manyheads.data.split import Split as Split
from manyheads.models.opening import Opening
from manyheads.view import terminal

if TYPE_CHECKING:
    from manyheads.data.batches import Corpus
    from manyheads.models.loaded import Loaded

# How Typer makes commands here.
SETTINGS: dict[str, Any] = {
    "rich_markup_mode": "rich",
    "add_completion": False,  # the app itself has it
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
Verb = Callable[..., str | None]  # returns what to say after Ctrl-C

Model = Annotated[
    str | None,
    typer.Argument(help="A folder, a hub name, or package.module:factory; the embedded MiniLM by default."),
]
TrainedFolder = Annotated[
    Path, typer.Argument(help="A folder that train wrote, or that prune wrote for a trained model.")
]
Device = Annotated[
    str | None, "Where the model runs: cpu, cuda:1, mps ...; the accelerator, if any, by default."
]
Unverified = Annotated[
    Literal["refuse", "allow"],
    "What to do with heads at sites about which nothing could be proved: refuse or allow.",
]
Out = Annotated[Path, "The folder for the results; created if it does not exist."]
Json = Annotated[bool, "Print JSON for machines."]
Open = Annotated[bool, "Open the page in your browser when it is written."]
Figure = Annotated[bool, "Open the figure when it is drawn."]
Spoken = Annotated[
    Literal["en", "zh"] | None, "The language of the output: en or zh; that of the locale by default."
]
Text = Annotated[
    str | None,
    "A text file, one text a line, or a pattern of files; FILE.jsonl, FILE.parquet or the name of a dataset "
    "with --column; - for standard input; an embedded text by default.",
    "Corpus",
]
TextColumn = Annotated[
    str | None, "The column of --text that is read; text, sentence, review ... by default.", "Corpus"
]
Images = Annotated[str | None, "A folder of images.", "Corpus"]
Tokens = Annotated[str | None, "Token ids in a NumPy file: (sequences, length) or (length,).", "Corpus"]
MaxLength = Annotated[
    int | None, "Cut longer sequences into pieces of this length; rows with labels, to this length.", "Corpus"
]
Limit = Annotated[int | None, "Read at most this many texts, images, rows or sequences.", "Corpus"]
Sample = Annotated[
    int, "Measure on a random sample of the corpus with at most this many tokens; 0 for all of it.", "Corpus"
]
BatchTokens = Annotated[int, "The number of tokens in a batch, padding included.", "Corpus"]


@dataclass(frozen=True)
class Source(Opening, Columns):
    """A model and the corpus it reads: a parameter of this type stands for all these options."""

    model: Model = None
    text: Text = None
    column: TextColumn = None
    images: Images = None
    tokens: Tokens = None
    max_length: MaxLength = None
    limit: Limit = None
    batch_tokens: BatchTokens = 4096

    def open(self, *, labels: bool = False, sample: int = 0) -> tuple[Loaded, Corpus]:
        """The model with its head, and its corpus, or a sample of it with so many tokens.

        ``labels`` is as for `corpus.choose`.
        """
        if sample < 0:
            raise ValueError(f"sample: got {sample}; expected a number of tokens, 0 for all of them")
        if self.text == "-" and processes() > 1:
            raise ValueError("text: several processes cannot share standard input; save the text to a file")
        with loading(self.model):
            loaded = mh.open_model(self.model, head=True, **self.how)
            files = self.text, self.images, self.tokens
            numbers = self.max_length, self.limit, self.batch_tokens
            columns = {name: getattr(self, name) for name in ("text_column", "label_column", "split")}
            columns |= {"column_of_text": self.column, "sample": sample}
            corpus = data.corpus.choose(loaded, *files, *numbers, self.data, labels=labels, **columns)
            corpus = corpus.sampled(sample)
        if corpus.reading:
            say(words(corpus.reading))
        return loaded, corpus


def present_part(result: object, out: Path, *, as_json: bool) -> bool:
    """Whether a result is not this process's to present: a part of it, which is then written, or none."""
    if isinstance(result, mh.heads.measurements.Shard):
        terminal.presentation.present(terminal.shards.ShardPresentation(result, out), as_json=as_json)
        return True
    return result is None


def say(sentence: str) -> None:
    """Print for people, once, whatever the number of processes."""
    Console(stderr=True, quiet=rank() > 0).print(sentence, soft_wrap=True, markup=False, highlight=False)


def loading(what: str | None) -> Status:
    """What a person sees while this model, or the embedded one, or a package is loaded."""
    return Console(stderr=True).status(words("Loading {what}", what=what or words("the embedded MiniLM")))


def names(text: str | None) -> list[str] | None:
    """What an option lists, with commas between: "induction, retrieval"; None where it is not used."""
    return None if text is None else [name.strip() for name in text.split(",")]


def unwrapped(text: str) -> str:
    """A help with each paragraph in one line, so that it wraps by itself; indented lines stay as they are.

    >>> unwrapped("One head\\nand another.\\n\\n  manyheads demo\\n  manyheads train")
    'One head and another.\\n\\n  manyheads demo\\n  manyheads train'
    """
    return re.sub(r"(?<=\S)\n(?=\S)", " ", cleandoc(text))


def option(name: str, default: object, hint: Any) -> Parameter:
    """A parameter for Typer: beside its type, its help and its panel; only what is True has a --no-NAME."""
    kind, *beside = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if beside and isinstance(beside[0], str):
        flags = [f"--{name.replace('_', '-')}"] if default is not True else []
        hint = Annotated[kind, typer.Option(*flags, help=beside[0], rich_help_panel=[*beside, None][1])]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def command(verb: Verb, batch_tokens: int = 4096) -> Callable[..., None]:
    """A verb as Typer takes it.

    A text beside the type of a parameter is the help of its option. A parameter whose type is a dataclass,
    such as `Source`, stands for an option for each field; ``batch_tokens`` is the default of that field. A
    verb that Ctrl-C ended returns the sentence that says what was kept, or raises `Interrupted` when there is
    nothing to keep; the exit code is then 130. Every verb has --language, unless it has one for something
    else; the paragraphs of its help wrap where the terminal ends.
    """
    parameters: list[Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in signature(verb, eval_str=True).parameters.values():
        if is_dataclass(parameter.annotation):
            groups[parameter.name] = kind = parameter.annotation
            defaults = {field.name: field.default for field in fields(kind)} | {"batch_tokens": batch_tokens}
            hints = get_type_hints(kind, include_extras=True)
            parameters += [option(name, defaults[name], hint) for name, hint in hints.items()]
        else:
            parameters.append(option(parameter.name, parameter.default, parameter.annotation))
    has_language = any(parameter.name == "language" for parameter in parameters)
    if not has_language:
        parameters.append(option("language", None, Spoken))

    @wraps(verb)
    def run(**options: Any) -> None:
        if not has_language and (language := options.pop("language")) is not None:
            choose_language(language)  # else that of the command itself, or of the locale
        for name, kind in groups.items():
            options[name] = kind(**{field.name: options.pop(field.name) for field in fields(kind)})
        with loading("torch"):
            import_module("manyheads.models.open")  # the slow part of what every verb loads
        try:
            stopped = verb(**options)
        except Interrupted:
            stopped = words("Stopped before there was a result; nothing was written.")
        if stopped:
            say(stopped)
            raise typer.Exit(EXIT_CODE)

    run.__doc__ = unwrapped(verb.__doc__ or "")
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {}
    return run
