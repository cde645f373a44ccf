"""Options that several verbs share, with the same help everywhere, and what makes a verb a command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar, get_type_hints

import typer
from rich.console import Console

from manyheads.common.interrupts import EXIT_CODE, Interrupted
from manyheads.common.processes import rank

if TYPE_CHECKING:
    from manyheads.data.batches import Corpus
    from manyheads.models.open import Loaded

Verb = TypeVar("Verb", bound=Callable[..., str | None])
CORPUS = "Corpus"  # the panel of --help for what is read, and how

Model = Annotated[
    str | None,
    typer.Argument(help="A folder, a hub name, or package.module:factory; the embedded MiniLM by default."),
]
TrainedFolder = Annotated[
    Path, typer.Argument(help="A folder that train wrote, or that prune wrote for a trained model.")
]
Device = Annotated[
    str | None,
    typer.Option(help="Where the model runs: cpu, cuda:1, mps ...; the accelerator, if any, by default."),
]
Unverified = Annotated[
    Literal["refuse", "allow"],
    typer.Option(help="What to do with heads at sites about which nothing could be proved: refuse or allow."),
]
Out = Annotated[Path, typer.Option(help="The folder for the results; created if it does not exist.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
BatchTokens = Annotated[
    int, typer.Option(help="The number of tokens per batch, padding included.", rich_help_panel=CORPUS)
]


@dataclass(frozen=True)
class Source:
    """A model and the corpus it reads: a parameter of this type stands for all these options."""

    model: Model = None
    text: Annotated[
        str | None,
        typer.Option(help="A text file, one text a line; - reads standard input.", rich_help_panel=CORPUS),
    ] = None
    images: Annotated[str | None, typer.Option(help="A folder of images.", rich_help_panel=CORPUS)] = None
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Token ids in a NumPy file: (sequences, length) or (length,).", rich_help_panel=CORPUS
        ),
    ] = None
    data: Annotated[
        str | None,
        typer.Option(
            help="For a model that train wrote: data of its task; what training held out by default.",
            rich_help_panel=CORPUS,
        ),
    ] = None
    max_length: Annotated[
        int | None,
        typer.Option(help="Cut longer sequences into pieces of this many tokens.", rich_help_panel=CORPUS),
    ] = None
    limit: Annotated[
        int | None,
        typer.Option(help="Read at most this many texts, images or sequences.", rich_help_panel=CORPUS),
    ] = None
    batch_tokens: BatchTokens = 4096
    device: Device = None

    def open(self, *, head: bool = True, labels: bool = False) -> tuple[Loaded, Corpus]:
        """The model and its corpus; ``head`` as in `models.open.load`, ``labels`` as in `data.corpus.choose`."""
        with Console(stderr=True).status(f"Loading {self.model or 'the embedded MiniLM'}"):
            from manyheads.data.corpus import choose
            from manyheads.models import open as models

            loaded = models.load(self.model, head=head, device=self.device)
            files = self.text, self.images, self.tokens
            numbers = self.max_length, self.limit, self.batch_tokens
            return loaded, choose(loaded, *files, *numbers, self.data, labels=labels)


def names(text: str | None) -> list[str] | None:
    """What an option lists, with commas between: "induction, retrieval"; None where it is not used."""
    return None if text is None else [name.strip() for name in text.split(",")]


def command(verb: Callable[..., str | None]) -> Callable[..., None]:
    """A verb as Typer takes it.

    A parameter with a `Source` as its default becomes the options of a source, with these defaults. A verb
    that Ctrl-C ended returns the sentence that says what was kept, or raises `Interrupted` when there is
    nothing to keep; the exit code is then 130.
    """
    parameters: list[Parameter] = []
    sources: list[str] = []
    for parameter in signature(verb, eval_str=True).parameters.values():
        if isinstance(parameter.default, Source):
            sources.append(parameter.name)
            parameters += [
                Parameter(
                    field.name,
                    Parameter.KEYWORD_ONLY,
                    default=getattr(parameter.default, field.name),
                    annotation=get_type_hints(Source, include_extras=True)[field.name],
                )
                for field in fields(Source)
            ]
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))

    @wraps(verb)
    def run(**options: object) -> None:
        for name in sources:
            options[name] = Source(**{field.name: options.pop(field.name) for field in fields(Source)})  # type: ignore[arg-type]
        try:
            stopped = verb(**options)
        except Interrupted:
            stopped = "Stopped before there was a result; nothing was written."
        if stopped:
            errors = Console(stderr=True, quiet=rank() > 0)
            errors.print(stopped, soft_wrap=True, markup=False, highlight=False)
            raise typer.Exit(EXIT_CODE)

    return with_parameters(run, parameters)


def with_parameters(function: Verb, parameters: list[Parameter]) -> Verb:
    """Give a function of keyword arguments the parameters that Typer is to see."""
    function.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {}
    return function
