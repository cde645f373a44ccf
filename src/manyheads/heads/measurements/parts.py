"""One part of a text, and all parts merged."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

from manyheads.common.progress import Progress, no_progress
from manyheads.data.batches import Corpus
from manyheads.heads.fingerprint import fingerprint
from manyheads.heads.importance.method_comparison import MethodComparison
from manyheads.heads.inspect import Counted, table_or_error
from manyheads.heads.measurements.shard import Shard, Share, check_whole, find_shards, join_shards
from manyheads.heads.measurements.verbs import VERBS, ComparedPairs, Measurement
from manyheads.heads.table import HeadTable
from manyheads.models.loaded import Loaded


def measure_part(
    measurement: Measurement,
    loaded: Loaded,
    corpus: Corpus,
    share: Share,
    progress: Progress = no_progress,
    text: str = "",
) -> Shard:
    """Measure a part of a text; ``text`` is the fingerprint of the whole, where it was computed before.

    Ctrl-C raises `Interrupted`: a part is whole or does not exist.

    >>> from manyheads.data.corpus import text
    >>> from manyheads.heads.measurements.verbs import Inspect
    >>> from manyheads.models.open import open_model
    >>> loaded = open_model()
    >>> corpus = text(loaded, limit=5, batch_tokens=30)
    >>> shards = [measure_part(Inspect(), loaded, corpus, Share(number, 2)) for number in range(2)]
    >>> [len(shard.numbers) for shard in shards], len(result_of_shard(merged_shard(shards)).table)
    ([3, 2], 72)
    """
    measurement.check()
    batches = corpus.numbered(share)
    if share.parts > batches.total:
        raise ValueError(
            f"shard: got {share}, and the text is read in {batches.total} "
            f"{'batch' if batches.total == 1 else 'batches'}; expected at most as many shards: "
            "take fewer, or a smaller --batch-tokens"
        )
    state = measurement.state(loaded, corpus, share, progress)
    return Shard(
        measurement.verb,
        measurement.options,
        loaded.name,
        fingerprint(loaded.model),
        corpus.summary,
        text or corpus.fingerprint,
        batches.total,
        list(batches.numbers),
        state,
        str(share),
    )


def merged_shard(shards: Sequence[Shard]) -> Shard:
    """The shards of a whole text as one: every batch once, or a ValueError that names what is wrong."""
    check_whole(shards)
    return join_shards(shards, VERBS[shards[0].verb].merge([shard.state for shard in shards]))


def result_of_shard(shard: Shard) -> Any:
    """What the verb returns for a whole text, from the shard of all of it."""
    return VERBS[shard.verb].finish(shard.state, shard.options)


def merge_files(paths: Sequence[str | PathLike[str]]) -> Shard:
    """The shards in files, and in the files of folders, as one: see `merged_shard`."""
    shards = [Shard.load(path) for path in find_shards([str(path) for path in paths])]
    if unknown := [shard for shard in shards if shard.verb not in VERBS]:
        raise ValueError(
            f"merge: {unknown[0].name} is of {unknown[0].verb!r}; expected one of {', '.join(VERBS)}"
        )
    return merged_shard(shards)


def merge_shards(paths: Sequence[str | PathLike[str]]) -> dict[str, HeadTable]:
    """The tables of a whole text, from the files that ``--shard`` wrote on parts of it.

    Sums and counts add up, so that the tables, with their standard errors, are those of one process that
    reads the whole text. Parts that are missing, that overlap, or that are of another model, text or options
    raise a ValueError.

    Parameters
    ----------
    paths: files, or folders of them.

    Returns
    -------
    Tables by name: by method for ``importance``, otherwise one, by its verb.

    See Also
    --------
    HeadTable.merge : adds up tables that you counted yourself.
    merge : merges key/value heads of a model.

    References
    ----------
    Chan, Golub and LeVeque (1983). Algorithms for computing the sample variance. The American Statistician.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import manyheads as mh
    >>> from manyheads.data.corpus import text
    >>> from manyheads.heads.measurements import Inspect
    >>> loaded = mh.open_model()
    >>> corpus = text(loaded, limit=5, batch_tokens=30)
    >>> with tempfile.TemporaryDirectory() as folder:  # as `manyheads inspect --shard 1/2 --out FOLDER` does
    ...     for number in range(2):
    ...         _ = measure_part(Inspect(), loaded, corpus, Share(number, 2)).save(Path(folder))
    ...     mh.merge_shards([folder])
    {'inspect': HeadTable(72 heads at 6 sites, ...)}
    """
    if isinstance(paths, str | PathLike):
        raise TypeError(f"paths: expected a list of files and folders, got {paths!r}")
    shard = merge_files(paths)
    result = result_of_shard(shard)
    if isinstance(result, MethodComparison):
        return result.tables
    table = table_or_error(result) if isinstance(result, Counted) else result
    return {shard.verb: table.table if isinstance(table, ComparedPairs) else table}
