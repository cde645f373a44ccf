"""Texts, pictures or token ids as batches for a model: bucketed by length, the same for every process."""

from __future__ import annotations

import random
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from manyheads.models import Loaded, if_any

BATCH_TOKENS = 4096
# A line longer than this is no text of its own but a file without line breaks.
LONGEST_LINE = 1_000_000
# Rare are the rarest tokens that together make up this share of a corpus; frequent, the most frequent ones.
QUARTER = 0.25
PICTURES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm"})
# A picture counts as this many tokens where a model does not say how it cuts it.
TOKENS_OF_A_PICTURE = 256
# So many tokens are read of what a task has held out, where nobody says how much or what to read.
HELD_OUT_TOKENS = 32768


@dataclass
class Corpus:
    """What a model is to read: sequences of token ids, or pictures.

    `groups` are token ids by name, for `watch`; `shares` how much of the corpus each group is.
    """

    what: str
    unit: str
    sizes: list[int]
    make: Any = field(repr=False)  # indices -> what the model takes
    batch_tokens: int = BATCH_TOKENS
    padding: bool = True
    groups: dict[str, list[int]] = field(default_factory=dict, repr=False)
    shares: dict[str, float] = field(default_factory=dict)

    def batches(self, rank: int = 0, processes: int = 1) -> Iterator[tuple[int, Any]]:
        """How many tokens (or pictures) a batch holds, and the batch, of the part of one process.

        The batches of a corpus do not depend on how many processes share them.
        """
        for indices in self.plan()[rank::processes]:
            yield (
                sum(self.sizes[i] for i in indices) if self.unit == "tokens" else len(indices),
                self.make(indices),
            )

    def plan(self) -> list[list[int]]:
        """Which sequences stand in which batch, in a mixed order: a part of them is a fair sample."""
        planned = bucketed(self.sizes, self.batch_tokens, self.padding)
        random.Random(0).shuffle(planned)
        return planned

    def total(self, rank: int = 0, processes: int = 1) -> int:
        """How many tokens (or pictures) there are for a process."""
        plan = self.plan()[rank::processes]
        return sum(
            sum(self.sizes[i] for i in batch) if self.unit == "tokens" else len(batch) for batch in plan
        )


def bucketed(sizes: Sequence[int], batch_tokens: int, padding: bool = True) -> list[list[int]]:
    """Sequences of like lengths together: number times longest is at most ``batch_tokens`` in each batch.

    A sequence longer than that is a batch of its own. Without padding, only equal lengths stand together.

    >>> bucketed([5, 2, 3, 5, 2], batch_tokens=10)
    [[0, 3], [2, 1, 4]]
    >>> bucketed([5, 2, 3, 5, 2], batch_tokens=10, padding=False)
    [[0, 3], [2], [1, 4]]
    """
    batches: list[list[int]] = []
    longest = 0
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if batches and (len(batches[-1]) + 1) * longest <= batch_tokens and (padding or sizes[i] == longest):
            batches[-1].append(i)
        else:
            batches.append([i])
            longest = sizes[i]
    return batches


def groups(
    counts: Mapping[int, int], special: Iterable[int]
) -> tuple[dict[str, list[int]], dict[str, float]]:
    """Special, frequent and rare token ids, and the share of the corpus that each group is.

    Frequent are the most frequent tokens that together make up at most a quarter of all that are not
    special (at least one); rare, the rarest that do.

    >>> groups({1: 4, 7: 4, 8: 2, 9: 1, 5: 1}, special=[1, 2])
    ({'special': [1], 'frequent': [7], 'rare': [5, 9]},
     {'special': 0.333..., 'frequent': 0.333..., 'rare': 0.166...})
    """
    total = sum(counts.values())
    chosen = {"special": sorted(set(special) & set(counts))}
    ordinary = {token: n for token, n in counts.items() if token not in set(chosen["special"])}
    rising = sorted(ordinary, key=lambda token: (ordinary[token], token))
    room = QUARTER * sum(ordinary.values())
    for name, order in (("frequent", rising[::-1]), ("rare", rising)):
        ids: list[int] = []
        filled = 0
        for token in order:
            filled += ordinary[token]
            if ids and filled > room:
                break
            ids.append(token)
        chosen[name] = sorted(ids)
    chosen = {name: ids for name, ids in chosen.items() if ids}
    return chosen, {name: sum(counts[token] for token in ids) / total for name, ids in chosen.items()}


def text(
    loaded: Loaded,
    path: str | None = None,
    *,
    max_length: int | None = None,
    limit: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> Corpus:
    """A text file, one text a line, ``-`` for standard input, or without a path a text of our own.

    Texts longer than ``max_length`` (or than the model's positions) are cut into pieces; ``limit`` stops
    after so many texts.

    >>> from manyheads.models import load
    >>> corpus = text(load(), limit=5)
    >>> len(corpus.sizes), sorted(corpus.groups)
    (5, ['frequent', 'rare', 'special'])
    """
    tokenizer = loaded.tokenizer()
    length = _length(loaded, max_length, getattr(tokenizer, "model_max_length", None))
    sequences: list[array[int]] = []
    for line in _lines(path, limit):
        sequences += [array("q", ids) for ids in _pieces(tokenizer, line, length)]
    what = "a text of our own" if path is None else "standard input" if path == "-" else path
    special = list(getattr(tokenizer, "all_special_ids", None) or [])
    padding = getattr(tokenizer, "pad_token_id", None)
    return _of_ids(loaded, sequences, what, batch_tokens, special, padding)


def tokens(
    loaded: Loaded,
    path: str,
    *,
    max_length: int | None = None,
    limit: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> Corpus:
    """Token ids from a NumPy file: (sequences, length), or one long stream that is cut into pieces."""
    try:
        import numpy
    except ImportError:
        raise ImportError("--tokens needs NumPy: pip install numpy") from None
    try:
        ids = numpy.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise ValueError(f"tokens: there is no file {path}; expected token ids saved by numpy.save") from None
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(
            f"tokens: {path} is no .npy file of numbers ({error}); write it by numpy.save"
        ) from error
    if not isinstance(ids, numpy.ndarray) or ids.ndim not in (1, 2) or ids.dtype.kind not in "iu":
        found = f"{ids.dtype} {ids.shape}" if isinstance(ids, numpy.ndarray) else "several arrays"
        raise ValueError(f"tokens: {path} holds {found}; expected integers (sequences, length) or (length,)")
    if not ids.size:
        raise ValueError(f"tokens: {path} holds no token at all; expected at least one")
    known = loaded.vocabulary
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or (known is not None and high >= known):
        wrong = low if low < 0 else high
        raise ValueError(
            f"tokens: {path} holds the id {wrong}; expected {f'0 to {known - 1}' if known else '0 or more'}, "
            "the ids that the model knows: make them with its own tokenizer"
        )
    if (
        ids.ndim == 2
        and max_length is None
        and loaded.positions is not None
        and ids.shape[1] > loaded.positions
    ):
        raise ValueError(
            f"tokens: {path} holds sequences of {ids.shape[1]} tokens, and the model has {loaded.positions} "
            f"positions; --max-length {loaded.positions} cuts them into pieces"
        )
    length = _length(loaded, max_length)
    if ids.ndim == 1:
        length = min(length or batch_tokens, batch_tokens) if max_length is None else length
    rows = [ids] if ids.ndim == 1 else ids[:limit]
    cut = length or rows[0].size
    sequences = [array("q", row[i : i + cut].tolist()) for row in rows for i in range(0, len(row), cut)]
    return _of_ids(loaded, sequences[: limit if ids.ndim == 1 else None], path, batch_tokens, [], None)


def images(
    loaded: Loaded, path: str, *, limit: int | None = None, batch_tokens: int = BATCH_TOKENS
) -> Corpus:
    """The pictures of a folder and of the folders in it, in the order of their names."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise ImportError("--images needs Pillow: pip install pillow") from None
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"images: {path} is not a folder; expected one with pictures")
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in PICTURES)[:limit]
    if not files:
        raise ValueError(
            f"images: {path} holds no picture; expected files that end in {', '.join(sorted(PICTURES))}"
        )
    processor = loaded.processor()

    def make(indices: Sequence[int]) -> Any:
        pictures = []
        for i in indices:
            try:
                with Image.open(files[i]) as picture:
                    pictures.append(picture.convert("RGB"))
            except (UnidentifiedImageError, OSError, SyntaxError) as error:
                raise ValueError(
                    f"images: {files[i]} cannot be read ({error}); repair it or take it away"
                ) from error
        try:
            made = processor(pictures, return_tensors="pt")
        except TypeError:
            made = processor(pictures)
        return dict(made) if isinstance(made, Mapping) else made

    side, patch = (
        getattr(getattr(loaded.model, "config", None), n, None) for n in ("image_size", "patch_size")
    )
    each = (
        (side // patch) ** 2 + 1 if isinstance(side, int) and isinstance(patch, int) else TOKENS_OF_A_PICTURE
    )
    return Corpus(path, "images", [each] * len(files), make, batch_tokens)


def examples(
    loaded: Loaded,
    data: str | None = None,
    *,
    limit: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    labels: bool = False,
) -> Corpus:
    """What the task of a trained model reads: ``data`` of its own kind, or some of what training held out.

    With ``labels``, batches also have those of their examples, for a loss.
    """
    from manyheads.tasks import held_out
    from manyheads.training.batches import spread

    task, folder = loaded.task, loaded.folder
    if task is None or folder is None:
        raise ValueError(
            f"data: {loaded.name} was not trained by manyheads; give --text, --images or --tokens"
        )
    try:
        found = held_out(folder, task) if data is None else task.read(data)
    except (OSError, ValueError) as error:
        if data is not None:
            raise
        raise ValueError(
            f"MODEL: what {folder} was trained on cannot be read any more ({error}); give --data"
        ) from error
    most = limit or len(found)
    if limit is None and data is None:
        most = max(1, int(HELD_OUT_TOKENS * len(found) / sum(found.sizes)))
    chosen = spread(len(found), most)
    random.Random(0).shuffle(chosen)  # the first ones are a fair sample of data that are in some order
    what = data or f"{len(chosen):,} of {len(found):,} held-out examples"

    def make(indices: Sequence[int]) -> Any:
        batch = task.collate(found.take([chosen[i] for i in indices], 0))
        return task.inputs(batch) | ({"labels": batch["labels"]} if labels else {})

    corpus = Corpus(what, task.unit, [found.sizes[i] for i in chosen], make, batch_tokens)
    if task.unit == "tokens":
        counts = Counter(token for i in range(len(chosen)) for token in _first_ids(make([i])))
        corpus.groups, corpus.shares = groups(counts, _special(loaded))
    return corpus


def _first_ids(batch: Mapping[str, Any]) -> list[int]:
    """The token ids of a batch of one sequence."""
    whole = (
        x for x in batch.values() if isinstance(x, Tensor) and x.dim() == 2 and not x.is_floating_point()
    )
    ids: list[int] = next(whole)[0].tolist()
    return ids


def _special(loaded: Loaded) -> list[int]:
    return list(getattr(if_any(loaded.tokenizer), "all_special_ids", None) or [])


def choose(
    loaded: Loaded,
    text_file: str | None,
    image_folder: str | None,
    token_file: str | None,
    max_length: int | None,
    limit: int | None,
    batch_tokens: int,
    data: str | None = None,
    *,
    labels: bool = False,
) -> Corpus:
    """The corpus that a command was asked for: one of --text, --images, --tokens and --data.

    Without any, a model that manyheads trained reads what its training held out, and others a text of ours.
    """
    named = {"--text": text_file, "--images": image_folder, "--tokens": token_file, "--data": data}
    given = [name for name, path in named.items() if path is not None]
    if len(given) > 1:
        raise ValueError(f"got {' and '.join(given)}; expected one of {', '.join(named)}")
    for name, number in (("max-length", max_length), ("limit", limit), ("batch-tokens", batch_tokens)):
        if number is not None and number < 1:
            raise ValueError(f"{name}: got {number}; expected 1 or more")
    if image_folder is not None:
        return images(loaded, image_folder, limit=limit, batch_tokens=batch_tokens)
    if data is not None or (loaded.task is not None and not given):
        if max_length is not None:
            raise ValueError(
                f"max-length: {loaded.name} reads examples as long as its task makes them; expected --text "
                "or --tokens with it"
            )
        return examples(loaded, data, limit=limit, batch_tokens=batch_tokens, labels=labels)
    lengths: Any = {"max_length": max_length, "limit": limit, "batch_tokens": batch_tokens}
    if token_file is not None:
        return tokens(loaded, token_file, **lengths)
    return text(loaded, text_file, **lengths)


def _of_ids(
    loaded: Loaded,
    sequences: list[array[int]],
    what: str,
    batch_tokens: int,
    special: Sequence[int],
    padding: int | None,
) -> Corpus:
    counts: Counter[int] = Counter()
    for ids in sequences:
        counts.update(ids)
    known = loaded.vocabulary
    if known is not None and max(counts) >= known:
        raise ValueError(
            f"text: the tokenizer gives the id {max(counts)}, and the model knows 0 to {known - 1}; "
            "take the tokenizer that belongs to the model"
        )
    chosen, shares = groups(counts, special)
    fill = padding if isinstance(padding, int) and (known is None or 0 <= padding < known) else 0

    def make(indices: Sequence[int]) -> Any:
        longest = max(len(sequences[i]) for i in indices)
        ids = torch.full((len(indices), longest), fill)
        real = torch.zeros_like(ids)
        for row, i in enumerate(indices):
            ids[row, : len(sequences[i])] = torch.tensor(sequences[i])
            real[row, : len(sequences[i])] = 1
        return _arguments(loaded, ids, real)

    sizes = [len(ids) for ids in sequences]
    # A padded query of a decoder still looks at the encoder, and would count there.
    padded = loaded.arrange is not None or (loaded.takes_mask and loaded.start is None)
    return Corpus(what, "tokens", sizes, make, batch_tokens, padded, chosen, shares)


def _arguments(loaded: Loaded, ids: Tensor, real: Tensor) -> Any:
    """What the model takes: names where it has them, the ids alone where it does not."""
    if loaded.arrange is not None:
        return loaded.arrange(ids, real.sum(1))
    if not loaded.takes_names:
        return ids
    batch = {"input_ids": ids}
    if loaded.takes_mask:
        batch["attention_mask"] = real
    if loaded.start is not None:  # the decoder reads the same text, one token late
        start = torch.full_like(ids[:, :1], loaded.start)
        batch |= {"decoder_input_ids": torch.cat([start, ids[:, :-1]], 1), "decoder_attention_mask": real}
    return batch


def _length(loaded: Loaded, max_length: int | None, tokenizer: int | None = None) -> int | None:
    """How long a sequence may be. Tokenizers that know no limit say an astronomical number."""
    positions = loaded.positions
    if max_length is None:
        known = [n for n in (positions, tokenizer) if n is not None and n < 10**9]
        return min(known, default=None)
    if positions is not None and max_length > positions:
        raise ValueError(
            f"max-length: got {max_length}, and the model has {positions} positions; give at most {positions}"
        )
    return max_length


def _pieces(tokenizer: Any, line: str, length: int | None) -> list[list[int]]:
    """The ids of a text, with the special tokens of the model, in pieces that fit."""
    if not callable(tokenizer):
        raise ValueError(
            f"text: expected a tokenizer that can be called with a text, got {type(tokenizer).__name__}"
        )
    if length is None or not getattr(tokenizer, "is_fast", False):
        found = tokenizer(line)
        ids = found["input_ids"] if isinstance(found, Mapping) else list(found)
        return [ids[i : i + length] for i in range(0, len(ids), length)] if length else [ids] if ids else []
    least = tokenizer.num_special_tokens_to_add() + 1
    if length < least:
        raise ValueError(
            f"max-length: got {length}; this tokenizer needs at least {least} for one token of text"
        )
    found = tokenizer(line, truncation=True, max_length=length, return_overflowing_tokens=True)
    pieces: list[list[int]] = [ids for ids in found["input_ids"] if ids]
    return pieces


def _lines(path: str | None, limit: int | None) -> Iterator[str]:
    """The lines with something in them, one at a time; a mistake in the file is an error that says where."""
    if path is None:
        own = resources.files("manyheads").joinpath("data/text.txt").read_text(encoding="utf-8")
        yield from own.splitlines()[:limit]
        return
    if path == "-":
        yield from _checked(sys.stdin.buffer, "standard input", limit)
        return
    if not Path(path).is_file():
        what = "a folder" if Path(path).is_dir() else "no file"
        raise ValueError(f"text: {path} is {what}; expected a text file, one text a line")
    with open(path, "rb") as file:
        yield from _checked(file, path, limit)


def _checked(file: BinaryIO, name: str, limit: int | None) -> Iterator[str]:
    read = number = 0
    while limit is None or read < limit:
        line = file.readline(LONGEST_LINE + 1)
        if not line:
            break
        number += 1
        if len(line) > LONGEST_LINE:
            raise ValueError(
                f"text: line {number} of {name} has over {LONGEST_LINE:,} bytes; expected one text a line: "
                "break it into lines first, for instance with `fold -s`"
            )
        try:
            decoded = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"text: line {number} of {name} is not UTF-8 (byte {line[error.start]:#04x} at place "
                f"{error.start}); convert it, for instance with `iconv -t UTF-8`"
            ) from None
        if decoded:
            read += 1
            yield decoded
    if not read:
        raise ValueError(f"text: {name} is empty; expected at least one line of text")
