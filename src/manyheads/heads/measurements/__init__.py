"""Measuring a text in parts, on several processes or machines, and adding the parts up exactly."""

from manyheads.data.corpus import text as text
from manyheads.heads.measurements import ray_cluster as ray_cluster
from manyheads.heads.measurements.parts import measure_part as measure_part
from manyheads.heads.measurements.parts import merge_files as merge_files
from manyheads.heads.measurements.parts import merge_shards as merge_shards
from manyheads.heads.measurements.parts import merged_shard as merged_shard
from manyheads.heads.measurements.shard import Shard as Shard
from manyheads.heads.measurements.shard import Share as Share
from manyheads.heads.measurements.split import measured as measured
from manyheads.heads.measurements.verbs import Diversity as Diversity
from manyheads.heads.measurements.verbs import Importance as Importance
from manyheads.heads.measurements.verbs import Inspect as Inspect
from manyheads.heads.measurements.verbs import Measurement as Measurement
from manyheads.heads.measurements.verbs import Roles as Roles
