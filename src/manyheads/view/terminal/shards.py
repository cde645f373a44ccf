"""Parts of a text for the terminal: a shard that was written, and what all shards together say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

from manyheads.common.language import words
from manyheads.common.out_folder import writing
from manyheads.data.batches import Corpus
from manyheads.heads.measurements import Shard
from manyheads.heads.measurements.parts import result_of_shard
from manyheads.models.loaded import Loaded
from manyheads.view.terminal.diversity import DiversityPresentation
from manyheads.view.terminal.importance import ImportancePresentation
from manyheads.view.terminal.inspect import InspectPresentation
from manyheads.view.terminal.presentation import MeasuredPresentation
from manyheads.view.terminal.roles import RolesPresentation


@dataclass
class ShardPresentation(MeasuredPresentation):
    """A part of a text that was measured, and the folder for its file."""

    shard: Shard
    out: Path
    files: list[Path] = field(default_factory=list)

    def show(self, console: Console) -> None:
        """Which part of what."""
        shard = self.shard
        sentence = words(
            "{verb} of {model} on {corpus}: shard {share}, {read} of {total} batches",
            verb=shard.verb, model=shard.model, corpus=words(shard.corpus.what), share=shard.share,
            read=len(shard.numbers), total=shard.total,
        )  # fmt: skip
        console.print(Text(sentence), soft_wrap=True)

    def document(self) -> dict[str, object]:
        """The same for machines."""
        shard = self.shard
        return {
            "verb": shard.verb, "model": shard.model, "fingerprint": shard.fingerprint,
            "corpus": shard.corpus.what, "text": shard.text, "shard": shard.share,
            "batches": shard.numbers, "of": shard.total, "out": str(self.out),
        }  # fmt: skip

    def write(self) -> list[str]:
        """shard-3-of-20.safetensors."""
        with writing(self.out):
            path = self.shard.save(self.out)
        return [words("Written: {files}", files=path)]

    def ending(self, interrupted: bool) -> str | None:
        """None: a part is whole or does not exist."""
        return None


# What each verb prints and writes about a whole text.
PRESENTATIONS: dict[str, Callable[..., MeasuredPresentation]] = {
    "inspect": InspectPresentation,
    "roles": RolesPresentation,
    "importance": ImportancePresentation,
    "diversity": DiversityPresentation,
}


def presentation(
    verb: str, result: object, loaded: Loaded, corpus: Corpus, out: Path, page: bool = False
) -> MeasuredPresentation:
    """What a verb prints and writes about what it measured: a whole text, or a shard of it."""
    if isinstance(result, Shard):
        return ShardPresentation(result, out)
    return PRESENTATIONS[verb](result, loaded.name, corpus, out, *[loaded] * page)


def merged_presentation(shard: Shard, out: Path) -> MeasuredPresentation:
    """What a verb prints and writes about a whole text, from the merged shards; no page."""
    return PRESENTATIONS[shard.verb](result_of_shard(shard), shard.model, shard.corpus, out)
