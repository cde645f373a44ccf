"""The pipeline told in the terminal: what happens to the sentence, the shape of every step, a few numbers."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from torch import Tensor

from manyheads.view import text_maps
from manyheads.view.demo.pipeline import Layer, Pipeline, strongest_link

# Maps with more tokens than this do not fit a terminal line; they are left to the picture.
MOST_TOKENS = 64
# A labelled map takes two characters a token.
MOST_LABELLED = 32


def tell(way: Pipeline, console: Console) -> None:
    """Print every step of a sentence's way through the model."""
    width = min(console.width, 110)
    say = _Teller(console, width)
    followed = _followed(way)
    length, d_model = way.words.shape
    first = way.layers[0]
    heads, _, d_key = first.query.shape

    say.title("The sentence")
    console.print(Padding(Text(way.text, "italic"), (0, 0, 0, 3)), width=width)

    say.step(
        "Tokens and ids",
        way.ids,
        "The tokenizer cuts the sentence into pieces it knows and adds [CLS] and [SEP] around them. "
        "Each piece has a number.",
    )
    say.pieces(way.tokens, way.ids.tolist(), followed)
    unknown = len(way.tokens) - 2 - int(way.known.sum())
    if unknown:
        say.note(
            f"{unknown} of {len(way.tokens) - 2} tokens are [UNK], unknown to the tokenizer: one token for "
            "all these words, so what heads do with it says nothing about them."
        )
    say.note(f"Below, one token is followed: {way.tokens[followed]} (number {followed}).")

    say.step(
        "Embedding", way.words, f"Each id picks its row of a learned table: a vector of {d_model} numbers."
    )
    say.values(way.tokens[followed], way.words[followed])
    say.step(
        "Positions",
        way.positions,
        "Attention does not know which token came first, so each place has a learned vector of its own. "
        "It is added, with one that says which segment a token belongs to.",
    )
    say.values(f"place {followed}", way.positions[followed])
    say.step(
        "Layer norm",
        way.normed,
        "The sum is scaled to mean 0 and variance 1 in each token. This enters layer 0.",
    )
    say.values(way.tokens[followed], way.normed[followed])

    say.title("Layer 0, in slow motion")
    say.step(
        "Queries, keys, values",
        first.query,
        f"Three learned projections of every token, each cut into {heads} heads of {d_key} numbers: "
        "what a token looks for (query), what it offers (key), what it hands over (value).",
    )
    for name, part in (("query", first.query), ("key", first.key), ("value", first.value)):
        say.values(f"head 0 {name}", part[0, followed])
    say.step(
        "Attention maps",
        first.weights,
        f"In each head, every query meets every key: softmax(query . key / sqrt({d_key})). A row of a map is "
        "one token; bright columns are the tokens it looks at; each row sums to 1.",
    )
    if length <= MOST_TOKENS:
        titles = [f"head {h}" for h in range(heads)]
        say.lines(text_maps.grid(list(first.weights), titles, console, width - 2))
        say.lines([Text("weight  ").append_text(text_maps.scale(console))])
    else:
        say.note(f"{length} tokens are too many to draw here: see the picture.")
    _looks(way, first, followed, say)
    say.step(
        "Each head's output",
        first.outputs,
        "Each token takes the values it looked at, mixed by those weights.",
    )
    say.values("head 0", first.outputs[0, followed])
    say.step(
        "Concatenation",
        first.joined,
        f"The {heads} heads are laid side by side again: {heads} x {d_key} = {heads * d_key}.",
    )
    say.step("Output projection", first.projected, "One more learned matrix mixes what the heads found.")
    say.values(way.tokens[followed], first.projected[followed])
    say.step(
        "Residual, norm, feed-forward",
        first.hidden,
        "It is added to what came in and normed; then each token passes a small network alone, is added and "
        "normed again. This enters layer 1.",
    )
    say.values(way.tokens[followed], first.hidden[followed])

    say.title("All layers")
    say.note(
        "All attention here is computed by manyheads' MultiHeadAttention with MiniLM's weights copied in. "
        "How far is it from what MiniLM computes by itself?"
    )
    console.print(Padding(_layers(way, width), (1, 0, 1, 2)))
    say.note(
        "The width of a head is exp(entropy): how many tokens it looks at, as if it shared its "
        "attention evenly among so many. Measured by mh.watch while MiniLM ran, without its maps in memory."
    )

    link = strongest_link(way)
    if link is not None:
        say.note("")
        say.note(
            f"The strongest link between words that are not neighbours: {way.tokens[link.query]} looks at "
            f"{way.tokens[link.key]} with {link.weight:.2f} of its attention, in head {link.head} of layer "
            f"{link.layer}."
        )
        _enlarged(way, way.layers[link.layer].weights[link.head], say)

    say.title("The sentence embedding")
    say.step(
        "Mean, length 1",
        way.sentence,
        "The mean over all tokens, scaled to length 1: the sentence as one vector.",
    )
    say.values("sentence", way.sentence)
    say.note(f"Largest difference from MiniLM's own: {way.difference:.1e}")


def _followed(way: Pipeline) -> int:
    """The token in the middle, or the nearest to it that the tokenizer knows."""
    middle = len(way.tokens) // 2
    places: list[int] = way.known.nonzero().flatten().tolist()
    return min(places, key=lambda place: (abs(place - middle), place), default=middle)


def _looks(way: Pipeline, layer: Layer, followed: int, say: _Teller) -> None:
    """Where the followed token looks in each head, and the head that is surest about it, enlarged."""
    rows = layer.weights[:, followed]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("head", justify="right")
    table.add_column(f"{way.tokens[followed]} looks at", overflow="fold")
    table.add_column("width", justify="right")
    for h, row in enumerate(rows):
        weights, places = row.topk(min(3, len(row)))
        best = Text("  ").join(
            Text(way.tokens[int(place)]).append(f" {weight:.2f}", "dim")
            for weight, place in zip(weights.tolist(), places.tolist(), strict=True)
        )
        table.add_row(str(h), best, f"{layer.effective_keys[h]:.1f}")
    say.console.print(Padding(table, (1, 2, 0, 2)), width=say.width)
    narrowest = int(layer.effective_keys.argmin())
    say.note("")
    say.note(f"Head {narrowest}, the narrowest of this layer:")
    _enlarged(way, layer.weights[narrowest], say)


def _enlarged(way: Pipeline, weights: Tensor, say: _Teller) -> None:
    if len(way.tokens) <= min(MOST_LABELLED, (say.width - 12) // 2):
        say.lines(text_maps.large(weights, way.tokens, say.console, say.width - 2))


def _layers(way: Pipeline, width: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    names = ["layer", "differs by", "maps differ by", "narrowest head", "widest head"]
    shown = len(names) if width >= 70 else 3
    for name in names[:shown]:
        table.add_column(name, justify="right")
    for n, layer in enumerate(way.layers):
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


class _Teller:
    """Prints numbered steps, in lines no longer than the terminal."""

    def __init__(self, console: Console, width: int) -> None:
        self.console, self.width, self.number = console, width, 0

    def title(self, text: str) -> None:
        self.console.print()
        self.console.rule(Text(text, "bold"), align="left", style="dim")

    def step(self, name: str, value: Tensor, says: str) -> None:
        self.number += 1
        head = (
            Text(f"{self.number:>2} ", "cyan").append(name, "bold cyan").append(f"  {shape(value)}", "green")
        )
        self.console.print()
        self.console.print(head, width=self.width)
        self.note(says)

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
        label = f"{name[:14]:<14}"
        fit = max(2, min(6, (self.width - len(label) - 9) // 8))
        numbers = "".join(f"{value:>8.3f}" for value in x[:fit].tolist())
        self.console.print(Text(f"   {label}", "bold").append(f"{numbers}  ...", "dim"))

    def lines(self, lines: list[Text]) -> None:
        self.console.print()
        for line in lines:
            self.console.print(Text("  ").append_text(line), no_wrap=True)
