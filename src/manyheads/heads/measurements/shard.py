"""A shard: what was measured on a part of a text, which adds up exactly with the other parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from manyheads.common.tensor_files import load_tensors, save_tensors
from manyheads.common.types import JsonObject
from manyheads.data.batches import CorpusSummary

_FORMAT, _VERSION = "manyheads shard", 1
_SUFFIX = ".safetensors"


class Share(NamedTuple):
    """A part of the batches of a text: every ``parts``-th one, from ``number`` on, which is 0 or more.

    >>> str(Share(2, 20)), Share.read("3/20")
    ('3/20', Share(number=2, parts=20))
    """

    number: int
    parts: int

    def __str__(self) -> str:
        return f"{self.number + 1}/{self.parts}"

    @classmethod
    def read(cls, text: str) -> Share:
        """From what people write: 3/20 is the third of twenty."""
        number, slash, count = text.partition("/")
        if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise ValueError(f"shard: got {text!r}; expected one of several, such as 3/20, third of twenty")
        return cls(int(number) - 1, int(count))


@dataclass
class Shard:
    """What was measured on a part of a text.

    Attributes
    ----------
    verb: ``inspect``, ``roles``, ``importance`` or ``diversity``.
    options: what has to be the same in all parts.
    model: its name, for people.
    fingerprint: of the model and its weights.
    corpus: what a reader has to know about the whole text.
    text: the fingerprint of the whole text, as it is cut into batches.
    total: the number of batches of the whole text.
    numbers: of the batches that were read.
    state: what was counted: tensors and plain values in dictionaries.
    share: which part this is, for people; "" for several.
    where: the file that it was read from.
    """

    verb: str
    options: JsonObject
    model: str
    fingerprint: str
    corpus: CorpusSummary
    text: str
    total: int
    numbers: list[int]
    state: JsonObject = field(repr=False)
    share: str = ""
    where: str = ""

    @property
    def name(self) -> str:
        """How messages call it: its file, or its number."""
        return self.where or f"shard {self.share}"

    def save(self, folder: Path) -> Path:
        """Write it into a folder, as shard-3-of-20.safetensors; the file."""
        number, _, count = self.share.partition("/")
        path = folder / f"shard-{number}-of-{count}{_SUFFIX}"
        parts = {name: value for name, value in vars(self).items() if name != "where"}
        document = {"format": _FORMAT, "version": _VERSION} | parts | {"corpus": asdict(self.corpus)}
        save_tensors(path, document)
        return path

    @classmethod
    def load(cls, path: Path) -> Shard:
        """Read what `save` wrote."""
        try:
            document = load_tensors(path)
            if not isinstance(document, dict) or document.pop("format", None) != _FORMAT:
                raise ValueError(f"{path} is not a shard")
            if (version := document.pop("version", None)) != _VERSION:
                raise ValueError(f"{path} has version {version} of shards, this manyheads reads {_VERSION}")
            corpus = CorpusSummary(**document.pop("corpus"))
            return cls(**document, corpus=corpus, where=str(path))
        except (ValueError, TypeError, OSError) as error:
            raise ValueError(
                f"merge: {error}; expected files that `--shard` wrote: write that one again"
            ) from None


def find_shards(paths: Sequence[str | Path]) -> list[Path]:
    """The files of shards among files and folders; what else is in a folder is left alone."""
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(
                f"merge: there is no {path}; expected files that `--shard` wrote, or their folders"
            )
        inside = sorted(path.glob(f"shard-*{_SUFFIX}")) if path.is_dir() else [path]
        files += [file for file in inside if file.resolve() not in {other.resolve() for other in files}]
    if not files:
        raise ValueError(
            f"merge: {', '.join(map(str, paths)) or 'nothing'} holds no shard; expected files that `--shard` "
            "wrote, or their folders"
        )
    return files


def check_whole(shards: Sequence[Shard]) -> None:
    """Raise a ValueError unless the shards are of one measurement and make up the whole text, once."""
    first = shards[0]
    for shard in shards[1:]:
        pair = f"merge: {first.name} and {shard.name}"
        if shard.verb != first.verb:
            raise ValueError(f"{pair} are of {first.verb} and {shard.verb}; expected shards of one verb")
        if shard.fingerprint != first.fingerprint:
            raise ValueError(
                f"{pair} are of different models ({first.model} {first.fingerprint}, {shard.model} "
                f"{shard.fingerprint}); expected the same weights in all shards"
            )
        if (shard.text, shard.total) != (first.text, first.total):
            raise ValueError(
                f"{pair} are of different texts, or of one that was cut into batches in different ways "
                f"({first.corpus.what} {first.text}, {shard.corpus.what} {shard.text}); expected one text "
                "and the same --max-length, --limit, --batch-tokens and --sample"
            )
        if differing := [name for name in first.options if shard.options.get(name) != first.options[name]]:
            values = f"{first.options[differing[0]]} and {shard.options.get(differing[0])}"
            raise ValueError(f"{pair} differ in {differing[0]} ({values}); expected the same options in all")
    owners: dict[int, Shard] = {}
    for shard in shards:
        twice = [number for number in shard.numbers if number in owners]
        if twice:
            raise ValueError(
                f"merge: {owners[twice[0]].name} and {shard.name} overlap in {len(twice)} of {first.total} "
                "batches; expected each batch once: leave one of them out"
            )
        owners |= dict.fromkeys(shard.numbers, shard)
    if missing := first.total - len(owners):
        raise ValueError(
            f"merge: {missing} of {first.total} batches are in none of the {len(shards)} shards"
            f"{_missing_shards(shards)}; expected all of them: nothing was merged"
        )


def _missing_shards(shards: Sequence[Shard]) -> str:
    counts = {shard.share.partition("/")[2] for shard in shards}
    if len(counts) != 1 or not (count := counts.pop()).isdecimal():
        return ""
    present = {shard.share for shard in shards}
    missing = [f"{n}/{count}" for n in range(1, int(count) + 1) if f"{n}/{count}" not in present]
    return f": run --shard {', '.join(missing)}" if missing else ""


def join_shards(shards: Sequence[Shard], state: dict[str, object]) -> Shard:
    """One shard for the whole text, from all shards and their states, merged."""
    numbers = sorted(number for shard in shards for number in shard.numbers)
    return replace(shards[0], numbers=numbers, state=state, share="", where="")
