"""How to prune: the options of ``manyheads prune``, with their help. This module loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from manyheads.heads.options import Memory
from manyheads.models.opening import Format


@dataclass(frozen=True, kw_only=True)
class PruneOptions:
    """How `prune_to_folder` prunes. The text beside a type says what the field is; it is its help, too.

    >>> PruneOptions(keep=0.5, uniform=True).scope
    'layer'
    """

    keep: Annotated[float | None, "The share of heads that stays, between 0 and 1."] = None
    save: Annotated[
        str | None,
        "What to save instead: cache=0.5, parameters=0.2 or latency=0.2, or several, separated by commas.",
    ] = None
    kv_heads: Annotated[
        int | None, "Merge key and value heads instead, to this many in every layer; no head goes."
    ] = None
    plan: Annotated[Path | None, "A plan.json to follow instead, made for exactly this model."] = None
    refit: Annotated[bool, "Fit the remaining output projections to the uncut model."] = True
    recover: Annotated[int, "The number of steps of distillation from the uncut model."] = 0
    rounds: Annotated[int, "Remove the heads in this many rounds, and rank them again in between."] = 1
    method: Annotated[str, "How heads are ranked: a method of manyheads importance."] = "elimination"
    uniform: Annotated[bool, "Remove the same number of heads from every layer."] = False
    groups: Annotated[
        bool, "Of heads that share a key head (grouped-query attention), remove whole groups only."
    ] = False
    floor: Annotated[int, "The fewest heads that every layer keeps."] = 1
    protect: Annotated[
        str,
        "Heads that stay: 3.5,4.0 (layer.head), or out/roles/roles.json for its retrieval heads, "
        "roles.json:induction for those of another role; or several of these, separated by commas.",
    ] = ""
    sample: Annotated[
        int,
        "Rank and refit on a random sample of the corpus with at most this many tokens; 0 for all of it. "
        "Recovery reads all.",
    ] = 16_384
    memory: Memory = None
    metric: Annotated[
        str | None, "Measure quality by your own function of the model, package.module:function."
    ] = None
    export: Annotated[
        Format | None,
        "Also write the smaller model in this format, into a folder of that name beside it.",
    ] = None
    on_disk: Annotated[
        bool,
        "Cut a model that is too large to open, from folder to folder, one tensor at a time; only with "
        "--plan, and without refit, text or card.",
    ] = False
    curve: Annotated[bool, "Also draw quality against heads kept, with the random control."] = False

    def __post_init__(self) -> None:
        if sum(one is not None for one in (self.keep, self.plan, self.save, self.kv_heads)) != 1:
            raise ValueError("keep: expected one of --keep, --save, --kv-heads and --plan")
        if self.keep is not None and not 0 < self.keep < 1:
            raise ValueError(
                f"keep: got {self.keep}; expected the share of heads that stays, between 0 and 1"
            )
        if self.kv_heads is not None and self.kv_heads < 1:
            raise ValueError(f"kv_heads: got {self.kv_heads}; expected a number of key heads, at least 1")
        if self.kv_heads is not None and self.curve:
            raise ValueError("curve: it is for heads that are removed, and --kv-heads removes none")
        if self.on_disk and (self.plan is None or self.recover or self.curve or self.export or self.metric):
            raise ValueError(
                "on_disk: it follows a plan and does nothing else; expected --plan, and none of --recover, "
                "--curve, --export and --metric"
            )
        self._check_ranking()
        if self.recover < 0:
            raise ValueError(f"recover: got {self.recover}; expected a number of steps, 0 for none")
        if self.sample < 0:
            raise ValueError(f"sample: got {self.sample}; expected a number of tokens, 0 for all of them")

    def _check_ranking(self) -> None:
        """Raise for options of ranking and choosing heads where none are ranked, or chosen in another way."""
        ignored: tuple[str, ...] = ()
        if self.kv_heads is not None or (self.plan is not None and not self.curve):  # the curve ranks, too
            ignored = ("rounds", "method", "uniform", "groups", "floor", "protect")
        elif self.save is not None and not self.curve:
            ignored = ("rounds", "uniform", "groups")
        for name in ignored:
            if getattr(self, name) != getattr(type(self), name):
                way = next(w for w in ("kv_heads", "plan", "save") if getattr(self, w) is not None)
                way = way.replace("_", "-")
                raise ValueError(f"{name}: got {getattr(self, name)!r} with --{way}, which does not use it")

    @property
    def scope(self) -> Literal["global", "layer"]:
        """As for `plan`."""
        return "layer" if self.uniform else "global"
