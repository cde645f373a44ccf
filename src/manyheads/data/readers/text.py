"""Text files, datasets of the hub, and tokenizers that are learned from them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from manyheads.common.decompression import File, content_of
from manyheads.common.errors import describe_error
from manyheads.common.json_files import read_bytes
from manyheads.common.text_encodings import how_to_convert
from manyheads.common.whole_files import write_whole

if TYPE_CHECKING:
    from datasets import Dataset
    from tokenizers import Tokenizer

SUFFIXES = frozenset({".txt", ".md", ".rst", ".text"})
_HUB = re.compile(r"[\w.-]+/[\w.-]+")
_LONGEST = 1000  # characters of a word
_ENDLESS = re.compile(rf"\S{{{_LONGEST}}}|\s{{{_LONGEST}}}")


def read_text(path: File) -> str:
    """A file, or one in an archive, as text; a ValueError names the file and the line that is not UTF-8."""
    content = content_of(path, "data")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"data: line {line} of {path} is not UTF-8 (byte {content[error.start]:#04x}); "
            f"{how_to_convert(content, str(path))}"
        ) from None


def read_documents(data: str) -> list[str]:
    """A text file, the text files of a folder in the order of their names, or a dataset of the hub."""
    path = Path(data).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES)
        if not files:
            raise ValueError(f"data: {data} holds no text; expected files in {', '.join(sorted(SUFFIXES))}")
        texts = [read_text(file) for file in files]
    elif path.exists():
        texts = [read_text(path)]
    elif is_hub_name(data):
        texts = [str(row["text"] or "") for row in from_hub(data, "train", ["text"])]
    else:
        raise ValueError(
            f"data: there is no {data}; expected a text file, a folder, or a dataset (owner/name)"
        )
    if not any(text.strip() for text in texts):
        raise ValueError(f"data: {data} is empty; expected some text")
    return texts


def is_hub_name(data: str) -> bool:
    """Whether this could be the name of a dataset on the hub, ``owner/name``.

    >>> is_hub_name("owner/name"), is_hub_name("folder/file.txt/")
    (True, False)
    """
    return bool(_HUB.fullmatch(data))


def from_hub(name: str, split: str, columns: list[str]) -> Dataset:
    """A split of a dataset on the hub, by the package datasets."""
    try:
        import datasets
    except ImportError:
        raise ImportError(
            "datasets of the hub need the package datasets: pip install 'manyheads[data]'"
        ) from None
    try:
        rows = datasets.load_dataset(name, split=split)
    except Exception as error:
        raise ValueError(
            f"data: {name!r} is not a file here, and the hub gave no dataset ({describe_error(error)})"
        ) from error
    if missing := [column for column in columns if column not in rows.column_names]:
        raise ValueError(f"data: {name} has no column {missing[0]!r}; it has {', '.join(rows.column_names)}")
    return rows


def character_tokenizer(texts: Iterable[str], special: list[str]) -> Tokenizer:
    """A tokenizer whose tokens are the characters of these texts; others become the last special token.

    >>> tokenizer = character_tokenizer(["abba\\n"], ["<unknown>"])
    >>> tokenizer.encode("ab\\nx").ids, tokenizer.decode([2, 3])
    ([2, 3, 1, 0], 'ab')
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(set().union(*map(set, texts)))
    vocabulary = {token: number for number, token in enumerate([*special, *letters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=special[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(special)
    return tokenizer


def train_bpe(texts: Iterable[str], size: int, special: list[str], *, merge: bool = True) -> Tokenizer:
    """Byte-pair encoding of these texts with ``size`` tokens; without merges, the tokens are bytes.

    >>> tokenizer = train_bpe([], 256, [], merge=False)
    >>> tokenizer.get_vocab_size(), tokenizer.decode(tokenizer.encode("äa\\n").ids)
    (256, 'äa\\n')
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if not merge:
        vocabulary = {token: number for number, token in enumerate([*special, *alphabet])}
        tokenizer = Tokenizer(models.BPE(vocabulary, []))
        tokenizer.add_special_tokens(special)
    else:
        tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=merge)
    tokenizer.decoder = decoders.ByteLevel()
    if merge:
        smallest_size = len(alphabet) + len(special)
        if size < smallest_size:
            raise ValueError(
                f"vocabulary: expected at least {smallest_size} (bytes and special tokens), got {size}"
            )
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator((part for text in texts for part in _in_parts(text)), trainer)
    return tokenizer


def _in_parts(text: str) -> list[str]:
    """A text, in parts if it has endless words: learning the merges of one takes the square of its length."""
    if not _ENDLESS.search(text):
        return [text]
    return [text[start : start + _LONGEST] for start in range(0, len(text), _LONGEST)]


def lines_of(text: str) -> Iterator[str]:
    """A text in pieces that together are the text: encoding them one by one takes little memory.

    >>> list(lines_of("one\\ntwo"))
    ['one\\n', 'two']
    """
    yield from text.splitlines(keepends=True)


def save_tokenizer(
    tokenizer: Tokenizer,
    folder: Path,
    length: int,
    names: dict[str, str],
    *,
    begins_with: str | None = None,
    ends_with: str | None = None,
) -> None:
    """Write a tokenizer so that transformers' AutoTokenizer reads it, too.

    Parameters
    ----------
    tokenizer, folder: what to write, and where.
    length: the longest text that the model reads.
    names: special tokens by the names that transformers has for them.
    begins_with, ends_with: tokens that the tokenizer of transformers puts around every text.
    """
    from tokenizers import Tokenizer, processors

    copy = Tokenizer.from_str(tokenizer.to_str())
    affixes = [token for token in (begins_with, ends_with) if token is not None]
    if affixes:
        template = " ".join(filter(None, (begins_with, "$A", ends_with)))
        ids = [(token, tokenizer.token_to_id(token)) for token in affixes]
        copy.post_processor = processors.TemplateProcessing(template, special_tokens=ids)
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length, **names}
    write_whole(folder / "tokenizer.json", copy.to_str())
    write_whole(folder / "tokenizer_config.json", json.dumps(kind, indent=1))


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer.json of a folder."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    try:
        return Tokenizer.from_str(read_bytes(path, "tokenizer").decode())
    except Exception as error:
        raise ValueError(f"{path}: missing or damaged ({error}); expected what train wrote") from error
