"""Measuring a text as the options of a command ask: whole, shared by processes, in part, or on a cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from manyheads.common.processes import gathered, processes, rank
from manyheads.common.progress import Progress, no_progress
from manyheads.data.batches import Corpus
from manyheads.data.split import Split
from manyheads.heads.measurements.parts import measure_part, merged_shard, result_of_shard
from manyheads.heads.measurements.ray_cluster import Cluster, measured_on_ray
from manyheads.heads.measurements.shard import Shard, Share, check_whole
from manyheads.heads.measurements.verbs import Measurement
from manyheads.models.loaded import Loaded


def measure_split(
    split: Split,
    measurement: Measurement,
    loaded: Loaded,
    corpus: Corpus,
    reopen: Callable[[], tuple[Loaded, Corpus]],
    out: Path,
    progress: Progress,
) -> object:
    """What the verb is to present: its result, or a part of it to be merged.

    ``reopen`` opens the model and the text in the processes of a cluster.
    """
    if split.ray is None:
        for name in ("workers", "shards"):
            if getattr(split, name) is not None:
                raise ValueError(f"{name}: it is for --ray; expected it only with a cluster")
    values_by_way = {"--shard": split.shard, "--ray": split.ray, "torchrun": processes() > 1 or None}
    if len(ways := [name for name, value in values_by_way.items() if value is not None]) > 1:
        raise ValueError(f"got {' and '.join(ways)}; expected one way to split the text")
    if split.shard is not None:
        return measure_part(measurement, loaded, corpus, Share.read(split.shard), progress)
    if split.ray is not None:
        cluster = Cluster(split.ray, split.workers, split.shards)
        return measured_on_ray(measurement, loaded, corpus, reopen, cluster, out, progress)
    return measured(measurement, loaded, corpus, progress)


def measured(
    measurement: Measurement, loaded: Loaded, corpus: Corpus, progress: Progress = no_progress
) -> Any | None:
    """What a verb returns for a text. The processes of torchrun share it; then None for all but the first."""
    if processes() == 1:
        return measurement.whole(loaded, corpus, progress)
    measurement.check()
    part: Shard | str
    try:
        part = measure_part(measurement, loaded, corpus, Share(rank(), processes()), progress)
    except (ValueError, TypeError, OSError) as error:  # the others must not wait for this one
        part = str(error)
    shards = []
    for one in gathered(part):
        if isinstance(one, str):
            raise ValueError(one)
        shards.append(one)
    if rank() > 0:
        check_whole(shards)
        return None
    return result_of_shard(merged_shard(shards))
