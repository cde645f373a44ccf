"""How a text is split over processes and machines: the options that commands share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class Split:
    """A text in parts, on several processes or machines: a parameter of this type stands for all these."""

    shard: Annotated[
        str | None, "Measure one part of the text, as 3/20, for `manyheads merge`.", "Several machines"
    ] = None
    ray: Annotated[
        str | None,
        "Measure on a Ray cluster: HOST:PORT, auto, or local for one on this machine.",
        "Several machines",
    ] = None
    workers: Annotated[
        int | None,
        "With --ray, how many workers hold the model; one for each GPU, or each processor, by default.",
        "Several machines",
    ] = None
    shards: Annotated[
        int | None,
        "With --ray, into how many parts the text is cut; four for each worker by default.",
        "Several machines",
    ] = None

    @property
    def file(self) -> str:
        """The name of the file that --shard writes; "" without it."""
        return (self.shard and f"shard-{self.shard.replace('/', '-of-')}.safetensors") or ""
