"""DNA from files: FASTA by class, or tables of class and sequence."""

from __future__ import annotations

from pathlib import Path

from manyheads.common.decompression import content_of, decompressed
from manyheads.data.readers.image import PARTS
from manyheads.data.readers.table import read_rows

FASTA = frozenset({".fa", ".fasta", ".fna"})
TABLES = frozenset({".tsv", ".txt", ".tab"})
BASES = "ACGT"
UNSURE = "NRYSWKMBDHV"  # letters for one of several bases
_LETTERS = frozenset(BASES + UNSURE + "U")

# Classes and sequences, and how many records were left out because they held none.
Labelled = tuple[list[tuple[str, str]], int]


def read_sequences(data: str, part: str) -> Labelled | None:
    """Sequences with their classes, of one part of some data; None if the data has no such part.

    Parameters
    ----------
    data: a folder with a FASTA file for each class, or with such a folder for each part (train, val,
        test), or with train.tsv, val.tsv and test.tsv; a table of class and sequence, separated by a tab; or
        FASTA files, separated by commas. FASTA files are named by class and may be compressed (.gz).
    part: "train", "valid" or "test"; or "all" for data that has no parts.
    """
    path = Path(data).expanduser()
    if path.is_dir():
        return _folder(path, part)
    if part != "all":
        return None
    if path.is_file() and path.suffix.lower() in TABLES:
        return _table(path)
    files = [Path(name.strip()).expanduser() for name in data.split(",")]
    for file in files:
        if not file.is_file() or not _class_of(file):
            raise ValueError(
                f"data: there is no {file} to read; expected a folder of FASTA files named by class, such "
                "files separated by commas, or a table (.tsv) of class and sequence"
            )
    return _join_files(files)


def clean_sequence(sequence: str, where: str) -> str:
    """A sequence in capital letters, T for U; raises for letters that are no bases.

    >>> clean_sequence("acgun", "here")
    'ACGTN'
    """
    bases = sequence.upper()
    misfit = next((letter for letter in bases if letter not in _LETTERS), None)
    if misfit is not None:
        raise ValueError(
            f"data: {where} has {misfit!r}, which is not a base; expected {BASES}, or {UNSURE} for one of "
            "several"
        )
    return bases.replace("U", "T")


def read_fasta(path: Path) -> list[str]:
    """The sequences of a FASTA file; "" for a header without one."""
    content = decompressed(content_of(path, "data"), f"data: {path}")
    records: list[list[str]] = []
    for number, raw in enumerate(content.splitlines(), 1):
        line = raw.decode("ascii", "replace").strip()
        if line.startswith(">"):
            records.append([])
        elif line and not line.startswith(";"):
            if not records:
                raise ValueError(
                    f"data: line {number} of {path} comes before any header; expected FASTA: a line that "
                    "begins with >, then the sequence"
                )
            records[-1].append(clean_sequence(line, f"line {number} of {path}"))
    if not records:
        raise ValueError(f"data: {path} is empty; expected FASTA, at least one sequence")
    return ["".join(lines) for lines in records]


def _folder(path: Path, part: str) -> Labelled | None:
    names = () if part == "all" else PARTS[part]
    entries = sorted(path.iterdir())
    part_names = {name for aliases in PARTS.values() for name in aliases}
    tables = [file for file in entries if file.suffix.lower() in TABLES and file.stem.lower() in part_names]
    folders = [folder for folder in entries if folder.is_dir() and folder.name.lower() in part_names]
    if tables:
        chosen = [file for file in tables if file.stem.lower() in names]
        return _table(chosen[0]) if chosen else None
    if folders:
        chosen = [folder for folder in folders if folder.name.lower() in names]
        return _join_files(_files(chosen[0])) if chosen else None
    return _join_files(_files(path)) if part == "all" else None


def _files(folder: Path) -> list[Path]:
    files = [file for file in sorted(folder.iterdir()) if _class_of(file)]
    if not files:
        raise ValueError(
            f"data: {folder} holds no FASTA file; expected one for each class, ending in "
            f"{', '.join(sorted(FASTA))}"
        )
    return files


def _join_files(files: list[Path]) -> Labelled:
    pairs = [(_class_of(file), sequence) for file in files for sequence in read_fasta(file)]
    labelled = [(name, sequence) for name, sequence in pairs if sequence]
    if not labelled:
        raise ValueError(f"data: {files[0].parent} holds headers and no sequence; expected at least one")
    return labelled, len(pairs) - len(labelled)


def _class_of(file: Path) -> str:
    """The class that a FASTA file is named by; "" for other files."""
    name = Path(file.name.removesuffix(".gz"))
    return name.stem if name.suffix.lower() in FASTA else ""


def _table(path: Path) -> Labelled:
    pairs, empty = [], 0
    for line, cells in read_rows(path, columns=2):
        name, letters = (cell.strip() for cell in cells)
        if line == 1 and letters.lower() == "sequence":
            continue
        sequence = clean_sequence(letters, f"line {line} of {path}")
        if sequence and name:
            pairs.append((name, sequence))
        else:
            empty += 1
    if not pairs:
        raise ValueError(f"data: {path} holds no sequence; expected at least one")
    return pairs, empty
