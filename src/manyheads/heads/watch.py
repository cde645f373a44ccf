"""watch: see every attention call of any model while it runs, and sum up what each head does."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from manyheads.capture.call import Call, measuring
from manyheads.capture.interceptor import Interceptor
from manyheads.capture.mask_reading import Visible, find_unmasked, update_site, visible, without_dead_rows
from manyheads.capture.site import Site
from manyheads.capture.unseen import missed
from manyheads.common.registry import registered
from manyheads.heads.call_statistics import CORE, FULL, LOGITS, OF_ONE_SEQUENCE, Tally, measure
from manyheads.heads.fingerprint import fingerprint
from manyheads.heads.table import HeadTable, Row
from manyheads.nn.statistics import StatisticsSet


def watch(
    model: nn.Module,
    statistics: StatisticsSet = "core",
    *,
    tokens: Mapping[str, Iterable[int]] | None = None,
    segments: Sequence[str] = (),
    profiles: bool = False,
) -> Watch:
    """See what the heads of a model do while it runs: ``with watch(model) as seen: model(**batch)``.

    The model's output stays the same to the bit, whatever kernel it uses; nothing of the size (length,
    length) is allocated. The one exception is torch's native fast path of nn.TransformerEncoder, which shows
    nothing and is off while watching (1e-5 at positions that are not padding). Compiled models run uncompiled
    while they are watched.

    Parameters
    ----------
    model: any torch.nn.Module.
    statistics: ``"core"``, ``"logits"`` or ``"full"``; logits adds largest_logit; full also adds
        effective_keys, confidence, distance, distance_spread and local, and costs more time.
    tokens: token ids by name, e.g. ``{"special": [101, 102], "rare": rarest}``: adds for each name the
        share of attention on keys with those tokens.
    segments: names of segments; adds for each name the share of attention on it. Before each forward, pass
        the segment of each key to `Watch.segment`.
    profiles: also keep each metric by position, and with full statistics the attention each key receives.

    Returns
    -------
    A context with `table` (a HeadTable), `sites` and `missed`, which stay readable afterwards.

    See Also
    --------
    inspect: the same with files and a page.
    maps: the weights themselves.
    statistics: from queries and keys.

    References
    ----------
    Clark, Khandelwal, Levy, Manning, "What does BERT look at?" (2019).

    Examples
    --------
    >>> layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True)
    >>> with watch(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)) as seen:
    ...     _ = seen.model(torch.randn(2, 5, 8))
    >>> seen.table
    HeadTable(6 heads at 3 sites, 10 tokens: entropy, entropy_normalised, self, previous, next, first,
    output_norm)
    >>> seen.table["site"][:2], seen.table["entropy"].shape
    (['layers.0.self_attn', 'layers.0.self_attn'], torch.Size([6]))
    """
    return Watch(model, statistics, tokens or {}, tuple(segments), profiles)


class Watch:
    """What `watch` returns: a context that collects, and what was collected."""

    def __init__(
        self,
        model: nn.Module,
        statistics: StatisticsSet,
        tokens: Mapping[str, Iterable[int]],
        segments: tuple[str, ...],
        profiles: bool,
    ) -> None:
        sets = {"core": CORE, "logits": LOGITS, "full": FULL}
        if statistics not in sets:
            raise ValueError(f"statistics: expected 'core', 'logits' or 'full', got {statistics!r}")
        self.model = model
        self._statistics: StatisticsSet = statistics
        self._metrics = sets[statistics]
        for name in (*tokens, *segments):
            if name in FULL or name in Row._fields or name == "tokens" or name.endswith("_se"):
                raise ValueError(
                    f"{name!r} is already the name of a column: choose another for these tokens or segment"
                )
        self._tokens = {
            name: torch.tensor(sorted(set(ids)), dtype=torch.long) for name, ids in tokens.items()
        }
        self._segments = segments
        self._segment_ids: Tensor | None = None
        self._profiles = profiles
        self._interceptor = Interceptor(model, self._on_call, tokens=bool(tokens))
        self._tallies: dict[str, Tally] = {}
        self._cached_visibilities: dict[Hashable, tuple[list[weakref.ref[Tensor]], Visible]] = {}
        self._lock = threading.Lock()
        self._fingerprint = fingerprint(model)

    def __enter__(self) -> Watch:
        self._interceptor.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._interceptor.__exit__(*error)
        self._cached_visibilities.clear()

    def segment(self, ids: Tensor) -> None:
        """Set the segment of each key in the coming forwards: indices into ``segments``, (batch, keys)."""
        if not self._segments:
            raise ValueError(
                "segment: name the segments first, as in watch(model, segments=['question', 'passage'])"
            )
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
            raise ValueError(
                f"segment: expected integer ids (batch, keys), got {getattr(ids, 'shape', ids)!r}"
            )
        self._segment_ids = ids

    @property
    def sites(self) -> list[Site]:
        """The sites seen so far, in the order of their first call."""
        return list(self._interceptor.sites.by_name.values())

    @property
    def missed(self) -> dict[str, str]:
        """Modules that mix tokens without an attention call that was seen, and how; and unverified sites, and
        why.
        """
        seen = self._interceptor
        return missed(self.model, seen.ran, self.sites, seen.proofs, seen.unread)

    @property
    def table(self) -> HeadTable:
        """What was collected so far."""
        if not self._tallies:
            unseen = f"; tokens are mixed unseen in {', '.join(self.missed)}" if self.missed else ""
            ran = (
                "no attention was seen in the model"
                if self._interceptor.ran
                else "the model was not run while watched"
            )
            raise ValueError(f"watch: {ran}{unseen}")
        sums: dict[str, list[Tensor]] = {}
        tokens: list[Tensor] = []
        profiles: dict[str, dict[str, Tensor]] = {}
        with self._lock:
            for site in self._interceptor.measured:
                tally = self._tallies[site.name]
                tokens.append(tally.tokens)
                for name, value in tally.sums.items():
                    foreign = site.kind == "cross" and name in OF_ONE_SEQUENCE
                    sums.setdefault(name, []).append(torch.zeros_like(value) if foreign else value)
                if tally.profiles is not None:
                    profiles[site.name] = {name: value.cpu() for name, value in tally.profiles.items()}
        joined = {name: torch.cat(values, 1) for name, values in sums.items()}
        rows = rows_of(self.model, self._interceptor.measured)
        labels = labels_of(self._interceptor.measured)
        return HeadTable(rows, torch.cat(tokens), joined, self._fingerprint, profiles, labels)

    def _repr_mimebundle_(self, **options: object) -> object:
        """In a notebook it shows what was collected as a page."""
        return registered("view.notebook")(self, self.table if self._tallies else None, **options)

    def _on_call(self, call: Call) -> None:
        """Count one call."""
        if call.again or call.output.device.type == "meta":  # numbers that are not there tell nothing
            return
        with measuring(call), torch.no_grad():
            call = without_dead_rows(call)
            visibility = self._visibility(call)
            site = call.site
            real_queries = update_site(call, visibility)
            features = self._features(call)
            columns = None if features is None else features[1]
            received = self._profiles and self._statistics == "full"  # then nothing must come from padding
            spared = (
                call.scores is None
                and visibility.mask.lengths is not None
                and visibility.keys == call.queries
            )
            metrics = measure(
                call, visibility, self._statistics, columns, real_queries if received or spared else None
            )
            counted = metrics["keys"] > 0
            if call.scores is not None and not visibility.aligned:  # padding whose own key is not seen
                counted = counted & find_unmasked(call.scores).any(-1)
            if real_queries is not None:
                counted = counted & real_queries.unsqueeze(1)
            self._heard(call, metrics, counted)
            values = {name: metrics[name] for name in self._metrics if name in metrics}
            if features is not None:
                values |= dict(zip(features[0], metrics["features"].unbind(-1), strict=True))
            with self._lock:
                tally = self._tally(site, call.output.device)
                fewer = {"entropy_normalised": metrics["keys"] > 1} if "entropy_normalised" in values else {}
                tally.add(values, counted, fewer, visibility.offset)
                if received:
                    keys = metrics["received"].shape[2]
                    real = (
                        visibility.real
                        if visibility.real is not None
                        else torch.ones(1, keys, dtype=torch.bool)
                    )
                    tally.received(metrics["received"], real[:, :keys].to(call.output.device))

    def _heard(self, call: Call, metrics: dict[str, Tensor], counted: Tensor) -> None:
        """For who wants more of a call than its sums: its metrics (batch, heads, queries) where counted."""

    def _visibility(self, call: Call) -> Visible:
        """`visible`, cached for masks that the next layer uses again."""
        tensors = [x for x in (*call.mask.tensors, call.mask.lengths, call.mask.queries) if x is not None]
        if call.scores is not None or not call.mask.tensors:
            return visible(call)
        versions = [0 if x.is_inference() else x._version for x in tensors]
        geometry = call.mask.causal, call.mask.window, call.mask.chunk, call.queries, call.keys
        key = tuple(map(id, tensors)), tuple(versions), geometry
        cached = self._cached_visibilities.get(key)
        if cached is not None and all(ref() is x for ref, x in zip(cached[0], tensors, strict=True)):
            return cached[1]
        visibility = visible(call)
        if len(self._cached_visibilities) >= 16:
            self._cached_visibilities.clear()
        self._cached_visibilities[key] = ([weakref.ref(x) for x in tensors], visibility)
        return visibility

    def _features(self, call: Call) -> tuple[list[str], Tensor] | None:
        """Names and 0/1 columns (batch, keys, n) of the token groups and segments known for this call's
        keys.
        """
        names, columns = [], []
        if call.tokens is not None:
            for name, ids in self._tokens.items():
                names.append(name)
                columns.append(torch.isin(call.tokens, ids.to(call.tokens.device)))
        segment_ids = self._segment_ids
        if segment_ids is not None and segment_ids.shape == (call.value.shape[0], call.keys):
            for number, name in enumerate(self._segments):
                names.append(name)
                columns.append(segment_ids.to(call.value.device) == number)
        if not names:
            return None
        expanded = [column.expand(call.value.shape[0], -1) for column in columns]
        return names, torch.stack(expanded, -1).to(torch.promote_types(call.output.dtype, torch.float32))

    def _tally(self, site: Site, device: torch.device) -> Tally:
        tally = self._tallies.get(site.name)
        if tally is None:
            names = [*self._metrics, *self._tokens, *self._segments]
            tally = self._tallies[site.name] = Tally(names, site.heads, device, self._profiles)
        return tally


def rows_of(model: nn.Module, sites: Iterable[Site]) -> list[Row]:
    """The rows of a table of these sites: one for each head, with its number before the model was cut.

    >>> [row.head for row in rows_of(nn.Identity(), [Site("attn", layer=0, heads=2, kv_heads=(0, 0))])]
    [0, 1]
    """
    original: Mapping[str, Sequence[int]] = getattr(model, "original_heads", None) or {}
    return [
        Row(
            site.name,
            site.layer,
            h,
            original.get(site.name, range(site.heads))[h],
            site.kv_heads[h],
            site.kind,
        )
        for site in sites
        for h in range(site.heads)
    ]


def labels_of(sites: Iterable[Site]) -> dict[str, list[str]]:
    """The columns ``verified`` (``yes``, or why not) and ``notes`` of a table of these sites, where there is
    anything to note.

    >>> labels_of([Site("attn", layer=0, heads=2, kv_heads=(0, 1), reason="nothing was proved")])["verified"]
    ['no: nothing was proved', 'no: nothing was proved']
    """
    rows = [site for site in sites for _ in range(site.heads)]
    verified = ["yes" if site.verified else f"no: {site.reason}" for site in rows]
    notes = ["; ".join(site.notes) for site in rows]
    labels = {"verified": verified} if any(word != "yes" for word in verified) else {}
    return labels | ({"notes": notes} if any(notes) else {})
