"""Measuring a text as the options of a command ask: whole, one part of it, or on a cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from manyheads.common.processes import processes
from manyheads.common.progress import Progress
from manyheads.data.batches import Corpus
from manyheads.data.split import Split
from manyheads.heads.measurements.parts import measure_part, measured
from manyheads.heads.measurements.ray_cluster import Cluster, measured_on_ray
from manyheads.heads.measurements.shard import Share
from manyheads.heads.measurements.verbs import Measurement
from manyheads.models.loaded import Loaded


def measured_as_asked(
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
