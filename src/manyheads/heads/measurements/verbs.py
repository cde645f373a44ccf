"""What the measuring verbs measure, each as a map over parts of a text, a merge of states, and an end."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import ClassVar, NamedTuple, Protocol, cast

from manyheads.capture.site import Unverified
from manyheads.common.interrupts import Interrupted, UntilInterrupted, stop_if_interrupted
from manyheads.common.progress import Progress
from manyheads.common.registry import registered
from manyheads.common.types import JsonObject
from manyheads.data.batches import Corpus
from manyheads.heads.diversity.measure import MEASURES, compare_pairs
from manyheads.heads.diversity.result import ComparedHeads, table_of_pairs
from manyheads.heads.importance.method_comparison import MethodComparison, check_methods, compare_methods
from manyheads.heads.importance.request import Request
from manyheads.heads.inspect import Counted, count, count_corpus
from manyheads.heads.roles.find import count_cases, roles
from manyheads.heads.roles.role_cases import RoleCases, merged_cases
from manyheads.heads.table import HeadTable, Row
from manyheads.models.loaded import Loaded

State = JsonObject

# Methods of importance whose numbers are sums over batches.
SUMS = ("fisher", "gradient", "leave-one-out", "relevance", "confidence", "output-norm")
ELIMINATION = "elimination"  # ranks by the sums of all batches
SPLITTABLE = (*SUMS, ELIMINATION)


class Measurement(Protocol):
    """A verb with its options. States hold tensors and plain values, and are all that a shard needs.

    ``whole`` measures a text in one process, which Ctrl-C may end early; ``state`` measures a part of it, all
    or nothing; ``merge`` adds states up; ``finish`` makes of the state of a whole text what ``whole``
    returns.
    """

    verb: ClassVar[str]

    @property
    def options(self) -> dict[str, object]: ...

    def check(self) -> None: ...

    def whole(self, loaded: Loaded, corpus: Corpus, progress: Progress) -> object: ...

    def state(self, loaded: Loaded, corpus: Corpus, share: tuple[int, int], progress: Progress) -> State: ...

    @staticmethod
    def merge(states: Sequence[State]) -> State: ...

    @staticmethod
    def finish(state: State, options: dict[str, object]) -> object: ...


class _Checked:
    def check(self) -> None:
        """Raise a ValueError if what is measured does not add up over parts of a text; this does."""

    @property
    def options(self) -> dict[str, object]:
        """What has to be the same in all parts."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True)
class Inspect(_Checked):
    """The statistics of every head: `inspect`."""

    verb: ClassVar[str] = "inspect"

    def whole(self, loaded: Loaded, corpus: Corpus, progress: Progress) -> Counted:
        """The counts of a whole text; Ctrl-C keeps those so far."""
        return count_corpus(loaded.model, corpus, progress)

    def state(self, loaded: Loaded, corpus: Corpus, share: tuple[int, int], progress: Progress) -> State:
        """The counts of a part."""
        total = corpus.total(*share)
        counted = count(
            loaded.model,
            corpus.batches(*share),
            corpus.groups,
            progress=lambda stage, done, _: progress(stage, done, total),
        )
        if counted.error is not None:
            raise counted.error
        if counted.stopped or counted.table is None:
            raise Interrupted
        numbers = {"units": counted.units, "seconds": counted.seconds, "missed": counted.missed}
        return {"table": _document(counted.table)} | numbers

    @staticmethod
    def merge(states: Sequence[State]) -> State:
        """The counts of all parts."""
        return {
            "table": _merged([state["table"] for state in states]),
            "units": sum(state["units"] for state in states),
            "seconds": sum(state["seconds"] for state in states),
            "missed": {path: why for state in states for path, why in state["missed"].items()},
        }

    @staticmethod
    def finish(state: State, options: dict[str, object]) -> Counted:
        """The counts with their table."""
        return Counted(**state | {"table": _table(state["table"])})


@dataclass(frozen=True)
class Roles(_Checked):
    """What each head is for: `roles`.

    treebank, only, least: as for `roles`.
    reads_text: whether tokens are words, for which the tokenizer is asked; not of token ids without a text.
    """

    verb: ClassVar[str] = "roles"
    treebank: Path | None = None
    only: list[str] | None = None
    least: int = 100
    reads_text: bool = True

    @property
    def options(self) -> dict[str, object]:
        """What has to be the same in all parts; of the treebank, its content."""
        digest = None if self.treebank is None else hashlib.sha256(self.treebank.read_bytes()).hexdigest()
        return asdict(self) | {"treebank": digest}

    def whole(self, loaded: Loaded, corpus: Corpus, progress: Progress) -> HeadTable:
        """The roles on a whole text; Ctrl-C judges what was read."""
        return roles(loaded.model, least=self.least, progress=progress, **self._arguments(loaded, corpus))

    def state(self, loaded: Loaded, corpus: Corpus, share: tuple[int, int], progress: Progress) -> State:
        """The cases in a part of the text and of what is made up."""
        arguments = self._arguments(loaded, corpus)
        cases = count_cases(loaded.model, share=share, progress=progress, **arguments)
        stop_if_interrupted()
        return vars(cases) | {"table": _document(cases.table)}

    def _arguments(self, loaded: Loaded, corpus: Corpus) -> JsonObject:
        return {
            "batches": (batch for _, batch in corpus.batches()),
            "treebank": self.treebank,
            "tokenizer": loaded.tokenizer() if self.reads_text and corpus.unit == "tokens" else None,
            "only": self.only,
        }

    @staticmethod
    def merge(states: Sequence[State]) -> State:
        """The cases of all parts."""
        cases = merged_cases([Roles._cases(state) for state in states])
        return vars(cases) | {"table": _document(cases.table)}

    @staticmethod
    def finish(state: State, options: JsonObject) -> HeadTable:
        """The roles that can be claimed."""
        return Roles._cases(state).judged(options["least"])

    @staticmethod
    def _cases(state: State) -> RoleCases:
        return RoleCases(**state | {"table": _table(state["table"])})


@dataclass(frozen=True)
class Importance(_Checked):
    """Which heads matter: `importance`, by several methods.

    gates: how many heads the method ``gates`` keeps.
    state_file: where ``leave-one-out`` keeps its results after Ctrl-C, of a whole text.
    memory: as for `importance`.
    """

    verb: ClassVar[str] = "importance"
    methods: list[str] | None = None
    loss: str | None = None
    gates: int | None = None
    seed: int = 0
    unverified: Unverified = "refuse"
    state_file: Path | None = None
    memory: str | int | None = None

    def __post_init__(self) -> None:
        check_methods(self.methods, self.loss)

    @property
    def options(self) -> dict[str, object]:
        """What has to be the same in all parts."""
        free = ("gates", "state_file", "memory")
        return {name: value for name, value in asdict(self).items() if name not in free}

    def check(self) -> None:
        """Raise a ValueError for methods whose numbers are no sums over batches."""
        if whole := [name for name in self.methods or () if name not in SPLITTABLE]:
            raise ValueError(
                f"method: {', '.join(whole)} needs the whole text in one process; expected some of "
                f"{', '.join(SPLITTABLE)}, or neither --shard nor --ray nor several processes"
            )

    def whole(self, loaded: Loaded, corpus: Corpus, progress: Progress) -> MethodComparison:
        """The rankings by a whole text; Ctrl-C keeps what was computed."""
        return self._compared(loaded, corpus, (0, 1), progress)

    def state(self, loaded: Loaded, corpus: Corpus, share: tuple[int, int], progress: Progress) -> State:
        """The rankings by a part."""
        state: State = {"tables": {}, "seconds": {}}
        if ELIMINATION in (self.methods or ()):
            state[ELIMINATION] = self._elimination(loaded, corpus, share, progress)
        methods = None if self.methods is None else [name for name in self.methods if name != ELIMINATION]
        if methods is None or methods:
            others = replace(self, methods=methods, state_file=None, gates=None)
            comparison = others._compared(loaded, corpus, share, progress)
            if comparison.error is not None:
                raise comparison.error
            tables = {method: _document(table) for method, table in comparison.tables.items()}
            state |= {"tables": tables, "seconds": comparison.seconds}
        stop_if_interrupted()
        return state

    def _elimination(
        self, loaded: Loaded, corpus: Corpus, share: tuple[int, int], progress: Progress
    ) -> State:
        batches, started = corpus.numbered(share), perf_counter()
        until = UntilInterrupted(batches, len(batches))
        request = Request(loaded.model, until, seed=self.seed, memory=self.memory, progress=progress)
        part = registered("importance.elimination.part")(request)
        table = _document(part["table"])
        return {"table": table, "moments": part["moments"], "seconds": perf_counter() - started}

    def _compared(
        self, loaded: Loaded, corpus: Corpus, share: tuple[int, int], progress: Progress
    ) -> MethodComparison:
        return compare_methods(
            loaded, corpus, self.methods, self.loss, gates=self.gates, seed=self.seed, state=self.state_file,
            unverified=self.unverified, memory=self.memory, share=share, progress=progress,
        )  # fmt: skip

    @staticmethod
    def merge(states: Sequence[State]) -> State:
        """The rankings by all parts."""
        methods = list(states[0]["tables"])
        merged: State = {
            "tables": {name: _merged([state["tables"][name] for state in states]) for name in methods},
            "seconds": {name: sum(state["seconds"][name] for state in states) for name in methods},
        }
        if ELIMINATION in states[0]:
            parts = [state[ELIMINATION] for state in states]
            table = registered("importance.elimination.joined")(
                _table(_merged([part["table"] for part in parts])), [part["moments"] for part in parts]
            )
            merged["tables"][ELIMINATION] = _document(table)
            merged["seconds"][ELIMINATION] = sum(part["seconds"] for part in parts)
        return merged

    @staticmethod
    def finish(state: State, options: dict[str, object]) -> MethodComparison:
        """The rankings with their tables, in the order that was asked for."""
        methods = cast("Sequence[str] | None", options["methods"])
        names = [name for name in methods or state["tables"] if name in state["tables"]]
        tables = {name: _table(state["tables"][name]) for name in names}
        return MethodComparison(tables, {name: state["seconds"][name] for name in names})


class ComparedPairs(NamedTuple):
    """A table of diversity, how many batches it is of, and the warnings of `diversity`."""

    table: HeadTable
    read: int
    total: int
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Diversity(_Checked):
    """Which heads are alike: `diversity`."""

    verb: ClassVar[str] = "diversity"
    measures: list[str] = field(default_factory=lambda: list(MEASURES))
    rows: int = 128

    def whole(self, loaded: Loaded, corpus: Corpus, progress: Progress) -> ComparedPairs:
        """Every pair of heads on a whole text; Ctrl-C keeps what was compared."""
        batches = corpus.numbered()
        until = UntilInterrupted(batches, len(batches))
        progress("diversity", 0, len(until))
        with _noted() as notes:
            table = table_of_pairs(
                compare_pairs(loaded.model, until, self.measures, self.rows, progress=progress)
            )
        return ComparedPairs(table, until.read, len(until), notes)

    def state(self, loaded: Loaded, corpus: Corpus, share: tuple[int, int], progress: Progress) -> State:
        """Every pair of heads on a part."""
        batches = corpus.numbered(share)
        until = UntilInterrupted(batches, len(batches))
        with _noted() as notes:
            pairs = compare_pairs(loaded.model, until, self.measures, self.rows, progress=progress)
        stop_if_interrupted()
        return pairs.document() | {"batches": len(until), "notes": notes}

    @staticmethod
    def merge(states: Sequence[State]) -> State:
        """Every pair of heads on all parts."""
        first, *others = map(Diversity._pairs, states)
        for other in others:
            first.merge(other)
        notes = dict.fromkeys(note for state in states for note in state["notes"])
        return first.document() | {"batches": sum(state["batches"] for state in states), "notes": [*notes]}

    @staticmethod
    def finish(state: State, options: dict[str, object]) -> ComparedPairs:
        """The table of all pairs."""
        with _noted() as notes:
            table = table_of_pairs(Diversity._pairs(state))
        return ComparedPairs(table, state["batches"], state["batches"], [*state["notes"], *notes])

    @staticmethod
    def _pairs(state: State) -> ComparedHeads:
        return ComparedHeads.restored({k: v for k, v in state.items() if k not in ("batches", "notes")})


VERBS: dict[str, type[Measurement]] = {kind.verb: kind for kind in (Inspect, Roles, Importance, Diversity)}


@contextmanager
def _noted() -> Iterator[list[str]]:
    """Collect what `diversity` warns of inside, to be shown with the results."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield notes
    messages = (str(warning.message) for warning in caught)
    notes += [text.removeprefix("diversity: ") for text in messages if text.startswith("diversity: ")]


def _document(table: HeadTable) -> State:
    """A table as tensors and plain values."""
    return vars(table) | {"rows": [tuple(row) for row in table.rows]}


def _table(document: State) -> HeadTable:
    return HeadTable(**document | {"rows": [Row(*row) for row in document["rows"]]})


def _merged(documents: Iterable[State]) -> State:
    return _document(merged_tables([_table(document) for document in documents]))


def merged_tables(tables: Sequence[HeadTable]) -> HeadTable:
    """Tables merged, with the word that says what they measure."""
    merged = tables[0].merge(*tables[1:])
    if measure := tables[0].labels.get("measure"):
        if any(table.labels.get("measure") != measure for table in tables):
            raise ValueError(
                "merge: the parts measured different things; expected the same loss in all of them"
            )
        merged.labels = {"measure": measure} | merged.labels
    return merged
