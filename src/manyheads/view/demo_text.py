"""The demo on the terminal: what happens to a sentence, the shape of every step, a few numbers."""

from __future__ import annotations

from pathlib import Path

from rich.cells import set_cell_size
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from torch import Tensor

from manyheads.common.language import words
from manyheads.heads.effects.bert_steps import LayerSteps, SentenceSteps, strongest_link
from manyheads.models.embedded import SMALL
from manyheads.view import text_maps
from manyheads.view.figures import attention_maps

# Maps with more tokens than this do not fit a terminal line; they are in the figure only.
MOST_TOKENS = 64
# A labelled map takes two characters a token.
MOST_LABELLED = 32
# The word that shows something: its heads look for what it stands for.
PRONOUNS = ("it", "he", "she", "they", "它", "他", "她")


def present_steps(steps: SentenceSteps, path: Path) -> None:
    """Print every step, draw the attention maps of all heads into a PNG file, and say where it is."""
    console = Console()
    print_steps(steps, console)
    with Console(stderr=True).status(words("Drawing all maps")):
        note = attention_maps.draw([layer.seen for layer in steps.layers], steps.tokens, path, steps.text)
    count = sum(len(layer.seen) for layer in steps.layers)
    console.print()
    console.print(words("All {count} maps: {path}", count=count, path=path), soft_wrap=True)
    if note:
        console.print(Text(note, "yellow"), soft_wrap=True)


def print_steps(steps: SentenceSteps, console: Console) -> None:
    """Print every step of a sentence through the model."""
    width = min(console.width, 110)
    printer = _Printer(console, width)
    followed = _followed(steps)
    length, d_model = steps.words.shape
    first = steps.layers[0]
    heads, _, d_key = first.query.shape

    printer.title(words("The sentence"))
    console.print(Padding(Text(steps.text, "italic"), (0, 0, 0, 3)), width=width)
    if steps.model == SMALL:
        printer.note(
            words("The model: a small one that comes with manyheads and reads Chinese and English, {layers} "
                  "layers of {heads} heads.", layers=len(steps.layers), heads=heads)
        )  # fmt: skip
    else:
        printer.note(
            words("The model: MiniLM, a sentence encoder, {layers} layers of {heads} heads.",
                  layers=len(steps.layers), heads=heads)
        )  # fmt: skip

    printer.step(
        words("Tokens and ids"),
        steps.ids,
        words(
            "The tokenizer splits the sentence into tokens of its vocabulary and adds [CLS] and [SEP] around "
            "them. Each token has a number, its id."
        ),
    )
    printer.pieces(steps.tokens, steps.ids.tolist(), followed)
    unknown = len(steps.tokens) - 2 - int(steps.is_word.sum())
    if unknown:
        printer.note(
            words(
                "{unknown} of {count} tokens are [UNK], unknown to the tokenizer: one token for all these "
                "words, so what heads do with it says nothing about them.",
                unknown=unknown, count=len(steps.tokens) - 2,
            )
        )  # fmt: skip
    followed_word = steps.tokens[followed]
    printer.note(
        words(
            "Below, one token is followed: {token} (number {number}).", token=followed_word, number=followed
        )
    )

    printer.step(
        words("Embedding"),
        steps.words,
        words("Each id selects its row of a learned matrix: a vector of {width} numbers.", width=d_model),
    )
    printer.values(followed_word, steps.words[followed])
    printer.step(
        words("Positions"),
        steps.positions,
        words(
            "Attention ignores the order of the tokens, so each position has a learned vector. It is added, "
            "with another one for the segment that the token belongs to."
        ),
    )
    printer.values(words("position {number}", number=followed), steps.positions[followed])
    printer.step(
        words("Layer norm"),
        steps.normed,
        words("The sum is normalised to mean 0 and variance 1 in each token. This enters layer 0."),
    )
    printer.values(followed_word, steps.normed[followed])

    printer.title(words("Layer 0, step by step"))
    printer.step(
        words("Queries, keys, values"),
        first.query,
        words(
            "Three learned projections of every token, each split into {heads} heads of {width} numbers: "
            "what a token looks for (query), what it can be found by (key), what it passes on (value).",
            heads=heads, width=d_key,
        ),
    )  # fmt: skip
    names = (words("head 0 query"), words("head 0 key"), words("head 0 value"))
    for name, part in zip(names, (first.query, first.key, first.value), strict=True):
        printer.values(name, part[0, followed])
    printer.step(
        words("Attention maps"),
        first.weights,
        words(
            "In each head, every query is compared with every key: softmax(query . key / sqrt({width})). A "
            "row of a map is one token; bright columns are the tokens it attends to; each row sums to 1.",
            width=d_key,
        ),
    )
    if steps.causal:
        printer.note(
            words("This model reads from left to right: a token attends to itself and those before it.")
        )
    if length <= MOST_TOKENS:
        titles = [words("head {head}", head=h) for h in range(heads)]
        printer.lines(text_maps.grid(list(first.weights), titles, console, width - 2))
        printer.lines([Text(f"{words('weight')}  ").append_text(text_maps.scale(console))])
    else:
        printer.note(words("{length} tokens are too many to draw here: see the figure.", length=length))
    _print_attention(steps, first, followed, printer)
    printer.step(
        words("Each head's output"),
        first.outputs,
        words("The sum of the values, weighted by the attention of each token."),
    )
    printer.values(words("head {head}", head=0), first.outputs[0, followed])
    printer.step(
        words("Concatenation"),
        first.joined,
        words(
            "The outputs of the {heads} heads side by side: {heads} x {width} = {total}.",
            heads=heads, width=d_key, total=heads * d_key,
        ),
    )  # fmt: skip
    printer.step(
        words("Output projection"),
        first.projected,
        words("One more learned matrix mixes the outputs of the heads."),
    )
    printer.values(followed_word, first.projected[followed])
    printer.step(
        words("Residual, norm, feed-forward"),
        first.hidden,
        words(
            "The output is added to the input of the layer and normalised; then each token passes through a "
            "small network, and the result is added and normalised again. This enters layer 1."
        ),
    )
    printer.values(followed_word, first.hidden[followed])

    printer.title(words("All layers"))
    printer.note(
        words(
            "All attention above is computed by mh.MultiHeadAttention with the weights of the model. How far "
            "is the result from what the model itself computes?"
        )
    )
    console.print(Padding(_layers(steps, width), (1, 0, 1, 2)))
    printer.note(
        words(
            "The width of a head is exp(entropy): the effective number of tokens it attends to. Measured by "
            "mh.watch while the model ran, without attention maps in memory."
        )
    )

    link = strongest_link(steps)
    if link is not None:
        printer.note("")
        printer.note(
            words(
                "The strongest link between words that are not neighbours: {query} attends to {key} with "
                "{weight:.2f} of its attention, in head {head} of layer {layer}.",
                query=steps.tokens[link.query], key=steps.tokens[link.key], weight=link.weight,
                head=link.head, layer=link.layer,
            )
        )  # fmt: skip
        _print_map(steps, steps.layers[link.layer].weights[link.head], printer)

    printer.title(words("The sentence embedding"))
    printer.step(
        words("Mean, length 1"),
        steps.sentence,
        words("The mean over all tokens, scaled to length 1: the sentence as one vector."),
    )
    printer.values(words("sentence"), steps.sentence)
    printer.note(
        words(
            "Largest difference from the model's own embedding: {difference:.1e}", difference=steps.difference
        )
    )


def _followed(steps: SentenceSteps) -> int:
    """The word to follow: a pronoun, whose heads look for what it stands for; else the one in the middle, or
    the nearest to it that is in the vocabulary.
    """
    middle = len(steps.tokens) // 2
    positions: list[int] = steps.is_word.nonzero().flatten().tolist()
    pronouns = [position for position in positions if steps.tokens[position] in PRONOUNS]
    return min(pronouns or positions, key=lambda position: (abs(position - middle), position), default=middle)


def _print_attention(steps: SentenceSteps, layer: LayerSteps, followed: int, printer: _Printer) -> None:
    """What the followed token attends to in each head, and the narrowest head enlarged."""
    rows = layer.weights[:, followed]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(words("head"), justify="right")
    table.add_column(words("{token} attends to", token=steps.tokens[followed]), overflow="fold")
    table.add_column(words("width"), justify="right")
    for h, row in enumerate(rows):
        weights, keys = row.topk(min(3, len(row)))
        best = Text("  ").join(
            Text(steps.tokens[int(key)]).append(f" {weight:.2f}", "dim")
            for weight, key in zip(weights.tolist(), keys.tolist(), strict=True)
        )
        table.add_row(str(h), best, f"{layer.effective_keys[h]:.1f}")
    printer.console.print(Padding(table, (1, 2, 0, 2)), width=printer.width)
    narrowest = int(layer.effective_keys.argmin())
    printer.note("")
    printer.note(words("Head {head}, the narrowest of this layer:", head=narrowest))
    _print_map(steps, layer.weights[narrowest], printer)


def _print_map(steps: SentenceSteps, weights: Tensor, printer: _Printer) -> None:
    if len(steps.tokens) <= min(MOST_LABELLED, (printer.width - 12) // 2):
        printer.lines(text_maps.large(weights, steps.tokens, printer.console, printer.width - 2))


def _layers(steps: SentenceSteps, width: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    names = [
        words("layer"), words("differs by"), words("maps differ by"), words("narrowest head"),
        words("widest head"),
    ]  # fmt: skip
    shown = len(names) if width >= 70 else 3
    for name in names[:shown]:
        table.add_column(name, justify="right")
    for n, layer in enumerate(steps.layers):
        low, high = int(layer.effective_keys.argmin()), int(layer.effective_keys.argmax())
        heads = [f"{head} ({layer.effective_keys[head]:.1f})" for head in (low, high)]
        row = [str(n), f"{layer.difference:.1e}", f"{layer.map_difference:.1e}", *heads]
        table.add_row(*row[:shown])
    return table


def shape(x: Tensor) -> str:
    """The shape of a tensor as people write it.

    >>> import torch
    >>> shape(torch.zeros(12, 5, 32)), shape(torch.zeros(384))
    ('12 x 5 x 32', '384')
    """
    return " x ".join(str(size) for size in x.shape)


class _Printer:
    """Prints numbered steps, in lines no longer than the terminal."""

    def __init__(self, console: Console, width: int) -> None:
        self.console, self.width, self.number = console, width, 0

    def title(self, text: str) -> None:
        self.console.print()
        self.console.rule(Text(text, "bold"), align="left", style="dim")

    def step(self, name: str, value: Tensor, explanation: str) -> None:
        self.number += 1
        head = (
            Text(f"{self.number:>2} ", "cyan").append(name, "bold cyan").append(f"  {shape(value)}", "green")
        )
        self.console.print()
        self.console.print(head, width=self.width)
        self.note(explanation)

    def note(self, text: str) -> None:
        self.console.print(Padding(Text(text), (0, 0, 0, 3)), width=self.width)

    def pieces(self, tokens: list[str], ids: list[int], marked: int) -> None:
        """Tokens with their ids, as many to a line as fit."""
        line = Text("   ")
        for n, (token, number) in enumerate(zip(tokens, ids, strict=True)):
            piece = Text(token, "bold reverse" if n == marked else "bold").append(
                f" {number}", "not bold dim not reverse"
            )
            if line.cell_len + piece.cell_len > self.width:
                self.console.print(line)
                line = Text("   ")
            line.append_text(piece).append("   ")
        self.console.print(line, no_wrap=True)

    def values(self, name: str, x: Tensor) -> None:
        """The first few numbers of a vector, as many as fit."""
        label = set_cell_size(name, 14)
        fit = max(2, min(6, (self.width - 14 - 9) // 8))
        numbers = "".join(f"{value:>8.3f}" for value in x[:fit].tolist())
        self.console.print(Text(f"   {label}", "bold").append(f"{numbers}  ...", "dim"))

    def lines(self, lines: list[Text]) -> None:
        self.console.print()
        for line in lines:
            self.console.print(Text("  ").append_text(line), no_wrap=True)
