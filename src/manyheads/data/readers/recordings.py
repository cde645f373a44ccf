"""Recordings of words: from a folder, an archive or a table, and which of them are held out."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from manyheads.common.decompression import File
from manyheads.data.readers.archive import listing
from manyheads.data.readers.audio import read_sound
from manyheads.data.readers.table import read_named_rows

LABELS = "labels.tsv"
SUFFIXES = frozenset({".wav", ".wave", ".flac", ".ogg"})
FIELDS = ("label", "speaker", "take")
TAKES = "takes"
HELD_OUT = 10  # one take in ten
LOUDEST = 32767

Files: TypeAlias = dict[str, Path | zipfile.Path]
# Sound files with what is said in them: label, speaker and take.
Labelled: TypeAlias = list[tuple[Path | zipfile.Path, dict[str, str]]]


@dataclass(eq=False)
class Recording:
    """A sound with what is said in it, by whom, and the number of the take."""

    samples: Tensor  # (samples,) int16, as loud as they can be: half the memory that floats need
    label: str
    speaker: str = ""
    take: str = ""

    @classmethod
    def of(cls, sound: Tensor, label: str, speaker: str = "", take: str = "") -> Recording:
        """A recording of samples ``(samples,)`` between -1 and 1, whatever its loudness.

        >>> Recording.of(torch.tensor([0.0, -0.1]), "seven").samples
        tensor([     0, -32767], dtype=torch.int16)
        """
        loudness = sound.abs().max().clamp(min=1e-9)
        return cls((sound / loudness * LOUDEST).round().to(torch.int16), label, speaker, take)

    @property
    def sound(self) -> Tensor:
        """The samples as floats between -1 and 1."""
        return self.samples.float() / LOUDEST


def read_recordings(data: str, rate: int, names: str, longest: float) -> tuple[list[Recording], list[str]]:
    """Recordings, and notes for the user about those that were left out.

    Parameters
    ----------
    data: a folder or a zip archive of sound files (WAV, FLAC, OGG), with a ``labels.tsv`` that says what is
        said in them, or with names that do. Or a .tsv file, with the sound files beside it. Tables have the
        columns ``file`` and ``label``, and may have ``speaker`` and ``take``.
    rate: the sample rate to bring them to.
    names: the pattern of file names, such as ``{label}_{speaker}_{take}`` or ``{label}/{speaker}_{take}``.
    longest: seconds; longer recordings are left out.
    """
    path = Path(data).expanduser()
    labels: File | None = path
    if path.suffix.lower() == ".tsv" and path.is_file():
        files = listing(str(path.parent), SUFFIXES)
    else:
        files = listing(data, SUFFIXES | {".tsv"})
        labels = files.get(LABELS)
        files = {name: file for name, file in files.items() if Path(name).suffix.lower() in SUFFIXES}
    if not files:
        raise ValueError(f"data: {data} holds no sound; expected WAV, FLAC or OGG files")
    rows, notes = _from_table(files, labels) if labels is not None else _from_names(files, names, data)
    recordings, long = [], 0
    for file, about in rows:
        sound = read_sound(file, rate)
        if len(sound) > longest * rate:
            long += 1
        else:
            recordings.append(Recording.of(sound, **about))
    if long:
        notes.append(f"{long:,} recordings longer than {longest:g} seconds were left out")
    if not recordings:
        raise ValueError(f"data: {data} holds no recording of at most {longest:g} seconds; give more")
    return recordings, notes


def hold_out(recordings: Sequence[Recording], part: str) -> tuple[list[Recording], list[Recording]]:
    """Recordings to learn from, and recordings to be measured on.

    Parameters
    ----------
    recordings: all.
    part: ``takes``: the first tenth of the takes that each speaker has of each label; or the name of a
        speaker: all of theirs.

    Examples
    --------
    >>> sound = torch.ones(2)
    >>> takes = [Recording.of(sound, "one", who, str(n)) for who in ("ann", "bob") for n in range(20)]
    >>> train, valid = hold_out(takes, "takes")
    >>> len(train), [(one.speaker, one.take) for one in valid]
    (36, [('ann', '0'), ('ann', '1'), ('bob', '0'), ('bob', '1')])
    >>> [len(part) for part in hold_out(takes, "bob")]
    [20, 20]
    """
    if part != TAKES:
        speakers = sorted({recording.speaker for recording in recordings} - {""})
        if part not in speakers or len(speakers) < 2:
            names = ", ".join(speakers) or "none"
            raise ValueError(
                f"held_out: expected takes, or one of at least two speakers ({names}), got {part!r}"
            )
        held_out = {id(recording) for recording in recordings if recording.speaker == part}
    else:
        groups: dict[tuple[str, str], list[Recording]] = {}
        for recording in recordings:
            groups.setdefault((recording.label, recording.speaker), []).append(recording)
        held_out = {
            id(recording)
            for group in groups.values()
            for recording in sorted(group, key=lambda recording: _natural(recording.take))[
                : len(group) // HELD_OUT
            ]
        }
        if not held_out:  # no speaker has ten takes of a word
            held_out = {id(recording) for recording in recordings[::HELD_OUT]}
    train = [recording for recording in recordings if id(recording) not in held_out]
    if not train:
        raise ValueError(f"data: {len(recordings)} recordings are too few; expected two or more")
    return train, [recording for recording in recordings if id(recording) in held_out]


def _natural(take: str) -> list[tuple[bool, int, str]]:
    """A sort key by which take 10 comes after take 9."""
    parts = re.split(r"(\d+)", take)
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def _from_table(files: Files, labels: File) -> tuple[Labelled, list[str]]:
    rows, empty = [], 0
    for number, row in read_named_rows(labels, ("file", "label")):
        if row["file"] not in files:
            raise ValueError(
                f"data: line {number} of {labels} names {row['file']!r}, which is not a sound file there"
            )
        if row["label"]:
            rows.append((files[row["file"]], {field: row[field] for field in FIELDS if field in row}))
        else:
            empty += 1
    if not rows:
        raise ValueError(f"data: {labels} has no row with a label; expected at least one")
    return rows, [f"{empty:,} recordings without a label were left out"] if empty else []


def _from_names(files: Files, names: str, data: str) -> tuple[Labelled, list[str]]:
    pattern = _pattern(names)
    rows = []
    for name, file in files.items():
        stem = name[: name.rindex(".")]
        if match := pattern.fullmatch(stem if "/" in names else stem.rsplit("/", 1)[-1]):
            rows.append((file, match.groupdict()))
    if not rows:
        raise ValueError(
            f"data: no sound file in {data} is named like {names} (there is {next(iter(files))}); give "
            f"names, or a {LABELS} with the columns file and label"
        )
    other = len(files) - len(rows)
    return rows, [f"{other:,} recordings with other names than {names} were left out"] if other else []


def _pattern(names: str) -> re.Pattern[str]:
    """The pattern of file names as a regular expression."""
    parts = re.split(r"\{(\w*)\}", names)
    fields = parts[1::2]
    unknown = [field for field in fields if field not in FIELDS]
    if unknown or "label" not in fields or len(set(fields)) < len(fields):
        raise ValueError(f"names: expected {{label}} and perhaps {{speaker}} and {{take}}, got {names!r}")
    literal = map(re.escape, parts[::2])
    groups = [f"(?P<{field}>[^/]+?)" for field in fields]
    return re.compile("".join(a + b for a, b in zip(literal, [*groups, ""], strict=True)))
