"""Texts, images, token ids or the examples of a task as a corpus that a model can read."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
from torch import Tensor

from manyheads.common.decompression import open_image
from manyheads.common.errors import UnreadDataError
from manyheads.common.json_files import in_one_sentence, read_bytes
from manyheads.common.registry import registered
from manyheads.common.types import Batch
from manyheads.data.batches import BATCH_TOKENS, Corpus, groups, padded, unknown_share
from manyheads.data.examples import spread
from manyheads.data.labelled import labelled
from manyheads.data.labelled.columns import choose_columns
from manyheads.data.labelled.language import HiddenTokens
from manyheads.data.labelled.media import image_tokens
from manyheads.data.readers.records import IMAGES as IMAGE_SUFFIXES
from manyheads.data.readers.records import is_missing, read_records
from manyheads.data.text_lines import pieces
from manyheads.data.text_streams import read_texts, reservoir
from manyheads.data.token_store import TokenStore
from manyheads.models.loaded import Loaded, if_any
from manyheads.models.task_head import task_kind

# The number of tokens that are read of a task's held-out examples by default.
HELD_OUT_TOKENS = 32768


def text(
    loaded: Loaded,
    path: str | None = None,
    *,
    column: str | None = None,
    split: str | None = None,
    max_length: int | None = None,
    limit: int | None = None,
    sample: int = 0,
    batch_tokens: int = BATCH_TOKENS,
) -> Corpus:
    """Texts, read one at a time: of a text file, one text per line, or of what else `read_texts` reads; ``-``
    for standard input; without a path, the built-in sample text.

    Texts longer than ``max_length`` (or than the model's positions) are cut into pieces; ``limit`` is the
    largest number of texts. With ``sample``, at most that many texts are kept, drawn at random.

    >>> from manyheads.models.open import open_model
    >>> corpus = text(open_model(), limit=5)
    >>> len(corpus.sizes), sorted(corpus.groups)
    (5, ['frequent', 'rare', 'special'])
    """
    what = "built-in sample text" if path is None else "standard input" if path == "-" else path
    texts: Iterable[str] = read_texts(path, column, split, limit)
    if not sample:
        return _of_texts(loaded, texts, what, max_length, batch_tokens)
    drawn, count = reservoir(texts, sample)
    corpus = _of_texts(loaded, drawn, what, max_length, batch_tokens)
    corpus.drawn_from = count if count > len(drawn) else 0
    return corpus


def column(
    loaded: Loaded,
    data: str,
    name: str | None = None,
    *,
    split: str | None = None,
    max_length: int | None = None,
    limit: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> Corpus:
    """The texts in a column of a table, for a model without a task head; its labels are not read.

    Parameters
    ----------
    data, split, limit: as for `labelled`.
    name: the column. Default: text, sentence, review and the like.
    """
    table = read_records(data, split, limit)
    chosen = choose_columns(table, HiddenTokens.customs, name).inputs[0]
    cells = (row.values[chosen] for row in table.rows)
    texts = [str(cell) for cell in cells if not is_missing(cell)]
    if not texts:
        raise ValueError(f"data: the column {chosen!r} of {table.what} is empty; expected at least one text")
    return _of_texts(loaded, texts, f"{table.what}, column {chosen!r}", max_length, batch_tokens)


def _of_texts(
    loaded: Loaded, texts: Iterable[str], what: str, max_length: int | None, batch_tokens: int
) -> Corpus:
    tokenizer = loaded.tokenizer()
    length = loaded.longest(max_length, tokenizer)
    sequences = TokenStore()
    for line in texts:
        for ids in pieces(tokenizer, line, length):
            sequences.add(ids)
    special = list(getattr(tokenizer, "all_special_ids", None) or [])
    padding = getattr(tokenizer, "pad_token_id", None)
    corpus = _of_ids(loaded, sequences, what, batch_tokens, special, padding)
    corpus.unknown = unknown_share(sequences.counts, tokenizer)
    return corpus


def tokens(
    loaded: Loaded,
    path: str,
    *,
    max_length: int | None = None,
    limit: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> Corpus:
    """Token ids from a NumPy file: (sequences, length), or one long stream that is cut into pieces."""
    content = read_bytes(path, "tokens")
    with in_one_sentence(f"tokens: {path} is not a .npy file of numbers; write it with numpy.save"):
        ids = numpy.load(BytesIO(content), allow_pickle=False)
    if not isinstance(ids, numpy.ndarray) or ids.ndim not in (1, 2) or ids.dtype.kind not in "iu":
        kind = f"{ids.dtype} {ids.shape}" if isinstance(ids, numpy.ndarray) else "several arrays"
        raise ValueError(f"tokens: {path} holds {kind}; expected integers (sequences, length) or (length,)")
    if not ids.size:
        raise ValueError(f"tokens: {path} holds no tokens; expected at least one")
    vocabulary = loaded.vocabulary
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or (vocabulary is not None and high >= vocabulary):
        expected = f"0 to {vocabulary - 1}" if vocabulary else "0 or more"
        raise ValueError(
            f"tokens: {path} holds the id {low if low < 0 else high}; expected {expected}, the model's "
            "vocabulary: make the ids with its tokenizer"
        )
    if (
        ids.ndim == 2
        and max_length is None
        and loaded.positions is not None
        and ids.shape[1] > loaded.positions
    ):
        raise ValueError(
            f"tokens: {path} holds sequences of {ids.shape[1]} tokens, but the model has {loaded.positions} "
            f"positions; --max-length {loaded.positions} cuts them into pieces"
        )
    length = loaded.longest(max_length)
    if ids.ndim == 1:
        length = min(length or batch_tokens, batch_tokens) if max_length is None else length
    rows = [ids] if ids.ndim == 1 else ids[:limit]
    piece_length = length or rows[0].size
    row_pieces = (row[i : i + piece_length] for row in rows for i in range(0, len(row), piece_length))
    sequences = TokenStore()
    for piece in islice(row_pieces, limit if ids.ndim == 1 else None):
        sequences.add(piece.tolist())
    return _of_ids(loaded, sequences, path, batch_tokens, [], None)


def images(
    loaded: Loaded, path: str, *, limit: int | None = None, batch_tokens: int = BATCH_TOKENS
) -> Corpus:
    """The images of a folder and of the folders in it, in the order of their names."""
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"images: {path} is not a folder; expected one with images")
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES)[:limit]
    if not files:
        raise ValueError(
            f"images: {path} holds no images; expected files that end in {', '.join(sorted(IMAGE_SUFFIXES))}"
        )
    processor = loaded.processor()

    def make(indices: Sequence[int]) -> Batch:
        pixels = []
        for i in indices:
            with open_image(files[i], "images") as image:
                pixels.append(image.convert("RGB"))
        try:
            batch = processor(pixels, return_tensors="pt")
        except TypeError:
            batch = processor(pixels)
        return dict(batch) if isinstance(batch, Mapping) else batch

    tokens_per_image = image_tokens(loaded.model)
    return Corpus(path, "images", [tokens_per_image] * len(files), make, batch_tokens)


def examples(
    loaded: Loaded,
    data: str | None = None,
    *,
    limit: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    labels: bool = False,
) -> Corpus:
    """The examples that a trained model's task reads from ``data``, or some that its training held out.

    Data that only the folder names, and that do not lie in it, are not read: `manyheads.tasks.may_read`.

    With ``labels``, batches also have the labels of their examples, for a loss.
    """
    task, folder = loaded.task, loaded.folder
    if task is None or folder is None:
        raise ValueError(
            f"data: {loaded.name} was not trained by manyheads; give --text, --images or --tokens"
        )
    try:
        dataset = registered("tasks.held_out")(folder, task) if data is None else task.read(data)
    except (OSError, ValueError) as error:
        if data is not None or str(error).startswith("MODEL:"):
            raise
        raise UnreadDataError(f"MODEL: what {folder} was trained on cannot be read now ({error})") from error
    example_count = limit or len(dataset)
    if limit is None and data is None:
        example_count = max(1, int(HELD_OUT_TOKENS * len(dataset) / sum(dataset.sizes)))
    chosen = spread(len(dataset), example_count)
    random.Random(0).shuffle(chosen)  # the first ones are a fair sample of sorted data
    what = data or f"{len(chosen):,} of {len(dataset):,} held-out examples"

    def make(indices: Sequence[int]) -> dict[str, Tensor]:
        batch = task.collate(dataset.take([chosen[i] for i in indices], 0))
        return task.inputs(batch) | ({"labels": batch["labels"]} if labels and "labels" in batch else {})

    corpus = Corpus(what, task.unit, [dataset.sizes[i] for i in chosen], make, batch_tokens)
    if task.unit == "tokens":
        counts = Counter(token for i in range(len(chosen)) for token in _first_ids(make([i])))
        corpus.groups, corpus.shares = groups(counts, _special(loaded))
        corpus.unknown = unknown_share(counts, if_any(loaded.tokenizer))
    return corpus


def _first_ids(batch: Mapping[str, Tensor]) -> list[int]:
    """The token ids of a batch of one sequence."""
    ids: list[int] = next(x for x in batch.values() if x.dim() == 2 and not x.is_floating_point())[0].tolist()
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
    text_column: str | None = None,
    label_column: str | None = None,
    split: str | None = None,
    column_of_text: str | None = None,
    sample: int = 0,
) -> Corpus:
    """The corpus that the options of a command name: one of --text, --images, --tokens and --data.

    Without any, a model that manyheads trained reads what its training held out, and others the built-in
    sample text.
    A model of transformers with a task head reads --data with its labels: `labelled`. Of --text, at most
    ``sample`` texts are kept, drawn at random; 0 for all.
    """
    sources = {"--text": text_file, "--images": image_folder, "--tokens": token_file, "--data": data}
    passed = [name for name, path in sources.items() if path is not None]
    if len(passed) > 1:
        raise ValueError(f"got {' and '.join(passed)}; expected one of {', '.join(sources)}")
    for name, number in (("max-length", max_length), ("limit", limit), ("batch-tokens", batch_tokens)):
        if number is not None and number < 1:
            raise ValueError(f"{name}: got {number}; expected 1 or more")
    columns = {"text-column": text_column, "label-column": label_column, "split": split}
    if text_file is not None:
        columns.pop("split")
    elif column_of_text is not None:
        raise ValueError("column: it is for --text; expected a .jsonl or .parquet file there, or a dataset")
    if unused := [name for name, value in columns.items() if value is not None]:
        if data is None:
            raise ValueError(f"{unused[0]}: it is for --data; expected a file with columns, or a dataset")
        if loaded.task is not None:
            raise ValueError(
                f"{unused[0]}: {loaded.name} was trained by manyheads, whose task knows its columns"
            )
    if data is not None and loaded.task is None:
        options: Any = {
            "split": split,
            "max_length": max_length,
            "limit": limit,
            "batch_tokens": batch_tokens,
        }
        names = None if text_column is None else [name.strip() for name in text_column.split(",")]
        if task_kind(loaded.model) is not None:
            return labelled(data, loaded, text=names, label=label_column, **options)
        if label_column is not None:
            raise ValueError(
                f"label-column: {loaded.name} has no task head whose labels can be read; leave the option "
                "out to read its texts, or give the model with its head"
            )
        return column(loaded, data, text_column, **options)
    if image_folder is not None:
        return images(loaded, image_folder, limit=limit, batch_tokens=batch_tokens)
    if data is not None or (loaded.task is not None and not passed):
        if max_length is not None:
            raise ValueError(
                f"max-length: {loaded.name} reads examples as long as its task makes them; expected --text "
                "or --tokens with it"
            )
        return examples(loaded, data, limit=limit, batch_tokens=batch_tokens, labels=labels)
    if token_file is not None:
        return tokens(loaded, token_file, max_length=max_length, limit=limit, batch_tokens=batch_tokens)
    return text(
        loaded, text_file, column=column_of_text, split=split, max_length=max_length, limit=limit,
        sample=sample, batch_tokens=batch_tokens,
    )  # fmt: skip


def _of_ids(
    loaded: Loaded,
    sequences: TokenStore,
    what: str,
    batch_tokens: int,
    special: Sequence[int],
    padding: int | None,
) -> Corpus:
    counts = sequences.counts
    vocabulary = loaded.vocabulary
    if vocabulary is not None and max(counts) >= vocabulary:
        raise ValueError(
            f"text: the tokenizer gives the id {max(counts)}; expected 0 to {vocabulary - 1}, the model's "
            "vocabulary: take the tokenizer that belongs to the model"
        )
    chosen, shares = groups(counts, special)
    fill = padding if isinstance(padding, int) and (vocabulary is None or 0 <= padding < vocabulary) else 0

    def make(indices: Sequence[int]) -> Batch:
        return loaded.arguments(*padded([sequences[i] for i in indices], fill))

    # A padded query of a decoder still attends to the encoder, and would count there.
    padding_works = loaded.arrange is not None or (loaded.takes_mask and loaded.start is None)
    return Corpus(what, "tokens", sequences.sizes, make, batch_tokens, padding_works, chosen, shares)
