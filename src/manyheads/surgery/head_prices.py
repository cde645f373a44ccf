"""What each head of a model costs: parameters, bytes of cache, time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from time import perf_counter, process_time
from typing import NamedTuple

import torch
from torch import nn

from manyheads.capture.call import Call
from manyheads.capture.interceptor import Interceptor
from manyheads.capture.mask_reading import update_site, visible
from manyheads.capture.site import Site
from manyheads.capture.weights import projections
from manyheads.common.compare_outputs import seeded_evaluation
from manyheads.common.devices import device_of
from manyheads.common.run_batch import run
from manyheads.common.types import Batch
from manyheads.heads.fingerprint import fingerprint
from manyheads.models.changes import changes_of, get_tensor
from manyheads.models.probe_batch import probe_batch
from manyheads.models.transformers_config import is_transformers
from manyheads.nn.orthogonal_rows import plain
from manyheads.surgery.arrangement import groups_of
from manyheads.surgery.cut import cut
from manyheads.surgery.decoding_speed import LayerCache, cache_by_layer
from manyheads.surgery.prices import HeadPrices
from manyheads.surgery.regions import regions_of

_REPEATS = 5


def head_prices(
    model: nn.Module, batch: Batch | None = None, *, latency: bool = False, repeats: int = _REPEATS
) -> HeadPrices:
    """Measure what the heads of a model cost.

    Parameters are those that `cut` would remove. Cache is what causal attention keeps of each token. Latency
    is measured: the model runs with all heads and with half of the heads of every layer removed, in turns;
    the difference in a layer, divided by the number of heads that went, is the time of one.

    Parameters
    ----------
    model: any torch.nn.Module; it is left as it is.
    batch: an input; transformers models need none. Time is that of this batch.
    latency: whether to measure time, too.
    repeats: how often each model is timed; the least processor time counts.

    See Also
    --------
    plan: removes what saves most for the least loss.
    card: what a cut model saves in the end.

    References
    ----------
    Yang, Howard, Chen, Zhang, Go, Sandler, Sze, Adam, "NetAdapt: platform-aware neural network adaptation for
    mobile applications" (2018).

    Examples
    --------
    >>> import manyheads as mh
    >>> prices = head_prices(mh.Encoder(12, heads=3, layers=2, vocabulary=17), torch.randint(17, (2, 5)))
    >>> prices.saved("parameters", {"blocks.1.attention": [2]})   # 16 rows or columns, 12 biases
    204.0
    """
    model = plain(model)
    batch = probe_batch(model) if batch is None else batch
    by_cache = cache_prices(model, batch)
    sites = {site.name: site for site in by_cache}
    by_site = projections(model, batch)
    parameters: dict[str, list[tuple[frozenset[int], int]]] = {}
    learned = dict(model.named_parameters(remove_duplicate=False))
    for name, of_site in by_site.items():
        each: dict[frozenset[int], int] = {}
        for parameter, (axis, users) in of_site.users.items():
            if parameter in learned:
                tensor = get_tensor(model, parameter)
                for using in users:
                    if using:
                        each[using] = each.get(using, 0) + tensor.numel() // tensor.shape[axis]
        parameters[name] = list(each.items())
    cache = {site.name: price.each for site, price in by_cache.items()}
    totals = {
        "cache": sum(price.whole for price in by_cache.values()),
        "parameters": float(sum(p.numel() for p in model.parameters())),
    }
    seconds: dict[str, float] = {}
    if latency:
        totals["latency"], seconds = _latency(model, batch, sites, repeats)
    kv_heads = {name: site.kv_heads for name, site in sites.items()}
    return HeadPrices(fingerprint(model), totals, parameters, cache, kv_heads, seconds)


class CachePrice(NamedTuple):
    """Bytes of keys and values that a site keeps of every token; and those of one key head, 0 where it goes
    and the site keeps as much.
    """

    whole: float
    each: float


def cache_prices(model: nn.Module, batch: Batch) -> dict[Site, CachePrice]:
    """The attention sites of a model, with the bytes of keys and values that each keeps of every token.

    Nothing is kept outside of causal attention. Where merged keys are repeated (`Repeat`), the class keeps
    one for every head. What a model of transformers keeps is measured: a layer with a window keeps no more
    of a longer text, and one with compressed keys (DeepSeek) keeps them whatever its number of heads.
    """
    widths: dict[str, int] = {}

    def on_call(call: Call) -> None:
        with torch._C.DisableTorchFunction():
            update_site(call, visible(call))
        key = 0 if call.key is None else call.key.shape[-1]
        widths[call.site.name] = (key + call.value.shape[-1]) * call.value.element_size()

    with seeded_evaluation(model), Interceptor(model, on_call) as interceptor:
        run(model, batch)
    repeated = changes_of(model).repeated
    layers = cache_by_layer(model) if is_transformers(model) else None
    prices = {}
    for name, site in interceptor.sites.by_name.items():
        under = f"{site.path}." if site.path else ""
        several = any(path.startswith(under) for path in repeated)
        key_heads = len(set(site.kv_heads))
        count = site.heads if several else key_heads
        held = LayerCache(count, float(count * widths[name]))
        number = getattr(model.get_submodule(site.path), "layer_idx", None)
        if layers is not None and isinstance(number, int) and number < len(layers):
            held = layers[number]
        whole = held.bytes if site.kind == "causal" else 0.0
        prices[site] = CachePrice(whole, whole / key_heads if held.heads in (key_heads, site.heads) else 0.0)
    return prices


def _latency(
    model: nn.Module, batch: Batch, sites: Mapping[str, Site], repeats: int
) -> tuple[float, dict[str, float]]:
    """The seconds of a forward pass, and of one head at each site."""
    removed: dict[str, list[int]] = {}
    for name, site in sites.items():
        groups = groups_of(site)
        if len(groups) > 1:
            removed[name] = sorted(head for group in groups[len(groups) // 2 :] for head in group)
        elif len(groups[0]) > 1:
            removed[name] = groups[0][len(groups[0]) // 2 :]
    if not removed:
        raise ValueError("save: every layer has a single head, so that the time of one cannot be measured")
    smaller = cut(model, removed, batch)
    paths = {
        name: path for path, region in regions_of(projections(model, batch)).items() for name in region.sites
    }
    least: list[dict[str, float]] = [{}, {}]
    for _ in range(repeats + 1):
        for each, times in zip((model, smaller), least, strict=True):
            for path, spent in _time_modules(each, batch, {"", *paths.values()}).items():
                times[path] = min(times.get(path, spent), spent)
    seconds = {}
    for name in sites:
        sharing = sum(path == paths[name] for path in paths.values())
        gone = len(removed.get(name, ())) * sharing
        saved = least[0][paths[name]] - least[1].get(paths[name], least[0][paths[name]])
        seconds[name] = max(saved, 0.0) / gone if gone else 0.0
    return least[0][""], seconds


def _time_modules(model: nn.Module, batch: Batch, paths: Iterable[str]) -> dict[str, float]:
    """The processor time of one pass, and of the modules at these paths within it."""
    seconds: dict[str, float] = {}
    starts: dict[str, float] = {}
    clock = process_time if device_of(model).type == "cpu" else perf_counter
    with ExitStack() as stack:
        stack.enter_context(seeded_evaluation(model))
        for path in filter(None, paths):

            def start_clock(module: nn.Module, args: object, path: str = path) -> None:
                starts[path] = clock()

            def stop_clock(module: nn.Module, args: object, output: object, path: str = path) -> None:
                seconds[path] = seconds.get(path, 0.0) + clock() - starts[path]

            module = model.get_submodule(path)
            stack.callback(module.register_forward_pre_hook(start_clock).remove)
            stack.callback(module.register_forward_hook(stop_clock).remove)
        start = clock()
        run(model, batch)
        seconds[""] = clock() - start
    return seconds
