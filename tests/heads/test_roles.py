"""Roles against plain loops over materialised weights: causal, padded, grouped, crossed, in tiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.helpers import models
from tests.helpers.models import eager
from tests.helpers.roles import Known
from torch import Tensor, nn

import manyheads as mh
from manyheads.heads.roles import find, judge, probe_texts
from manyheads.heads.roles.catalogue import OFFSETS
from manyheads.heads.roles.role import ROLES
from manyheads.nn import tiles

Plain = dict[str, list[list[tuple[float, float]]]]  # role -> for each head its (score, baseline) by query


class Marks:
    """All of a tokenizer that roles on text ask for."""

    all_special_ids = (5, 6, 7)

    def decode(self, ids: list[int]) -> str:
        return "," if ids[0] % 10 == 3 else "word"


def double(model: nn.Module) -> nn.Module:
    return model.double().eval()


def batches(number: int = 2) -> list[dict[str, Tensor]]:
    return [models.tokens(seed, batch=3, length=7 + 4 * seed) for seed in range(number)]


def rows_of(weights: Tensor, real: Tensor, causal: bool) -> Iterator[tuple[int, int, int, Tensor, list[int]]]:
    """Sequence, head, query, weights and visible keys of every query that has a choice."""
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in weights.shape[:3])).tolist():
        visible = [j for j in range(weights.shape[3]) if real[b, j] and (j <= i or not causal)]
        if real[b, i] and len(visible) > 1:
            yield b, h, i, weights[b, h, i], visible


def plain(
    weights: list[Tensor], ids: list[Tensor], real: list[Tensor], norms: list[Tensor], causal: bool
) -> Plain:
    """Score and baseline of the roles on text for each query, by hand."""
    frequency: dict[int, int] = {}
    for x, mask in zip(ids, real, strict=True):
        for token in x[mask].tolist():
            frequency[token] = frequency.get(token, 0) + 1
    heads = weights[0].shape[1]
    found: Plain = {}

    def put(name: str, h: int, score: Any, baseline: Any) -> None:
        found.setdefault(name, [[] for _ in range(heads)])[h].append((float(score), float(baseline)))

    for w, x, mask, length in zip(weights, ids, real, norms, strict=True):
        for b, h, i, p, visible in rows_of(w, mask, causal):
            n, best = len(visible), max(visible, key=lambda j: float(p[j]))
            for offset in OFFSETS:
                if i + offset in visible:
                    name = {-1: "previous", 0: "self", 1: "next"}.get(offset, f"offset {offset:+d}")
                    put(f"positional:{name}", h, best == i + offset, 1 / n)
            put("reach", h, sum(p[j] * abs(i - j) for j in visible), sum(abs(i - j) for j in visible) / n)
            rests = [j for j in visible if j == 0 or int(x[b, j]) in Marks.all_special_ids]
            put("sink", h, sum(p[j] for j in rests), len(rests) / n)
            put("broad", h, -sum(p[j] * p[j].log() for j in visible), torch.tensor(float(n)).log())
            put(
                "no-op",
                h,
                sum(p[j] * length[b, h, j] for j in visible),
                sum(length[b, h, j] for j in visible) / n,
            )
            stops = [j for j in range(len(x[b])) if j > 0 and (x[b, j] % 10 == 3 or x[b, j] in (5, 6, 7))]
            inside = [j for j in visible if j in stops]
            if inside:
                put("separator", h, sum(p[j] for j in inside), len(inside) / n)
            ordinary = [j for j in visible if int(x[b, j]) not in Marks.all_special_ids]
            if ordinary:
                least = min(frequency[int(x[b, j])] for j in ordinary)
                rarest = [j for j in ordinary if frequency[int(x[b, j])] == least]
                put("rare", h, best in rarest, len(rarest) / n)
    return found


def value_norms(
    model: nn.Module, batch: dict[str, Tensor], paths: str, width: int, heads: int
) -> list[Tensor]:
    """(batch, heads, keys) by layer: the length of the values, read off the value projections."""
    found = []
    handles = [
        module.register_forward_hook(lambda _, __, out: found.append(out))
        for name, module in model.named_modules()
        if name.endswith(paths)
    ]
    with torch.no_grad():
        model(**batch)
    for handle in handles:
        handle.remove()
    values = [v.unflatten(-1, (-1, width)).norm(dim=-1).transpose(1, 2) for v in found]
    return [v.repeat_interleave(heads // v.shape[1], 1) for v in values]


MODELS = {
    "grouped and causal": (models.llama, True, "v_proj", 4, 6),
    "both ways": (models.bert, False, "self.value", 5, 3),
}
WHOLE, SMALL = tiles.TILE_ELEMENTS, 29


@pytest.mark.parametrize(
    ("name", "implementation", "tile", "padded"),
    [
        ("grouped and causal", "sdpa", WHOLE, True),
        ("grouped and causal", "sdpa", SMALL, True),
        ("grouped and causal", "sdpa", SMALL, False),  # then the kernel gets fewer key heads than heads
        ("grouped and causal", "eager", SMALL, True),
        ("both ways", "sdpa", SMALL, True),
        ("both ways", "eager", WHOLE, True),
    ],
)
def test_roles_on_text_are_what_loops_count(
    name: str, implementation: str, tile: int, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, causal, values, width, heads = MODELS[name]
    model = double(make(max_position_embeddings=32))
    given = batches() if padded else [{"input_ids": batch["input_ids"]} for batch in batches()]
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", tile)
    model.set_attn_implementation(implementation)
    text = [role for role in ROLES if ROLES[role].on == "text"]
    table = mh.roles(model, iter(given), tokenizer=Marks(), only=text)
    weights = [eager(model, batch) for batch in given]
    norms = [value_norms(model, batch, values, width, heads) for batch in given]
    ids = [batch["input_ids"] for batch in given]
    real = [batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool() for batch in given]
    for layer in range(2):
        wanted = plain([w[layer] for w in weights], ids, real, [n[layer] for n in norms], causal)
        assert {n.partition(":")[0] for n in wanted} == set(text)
        mine = [row for row, one in enumerate(table.rows) if one.layer == layer]
        assert len(mine) == heads
        for role, by_head in wanted.items():
            for row, cases in zip(mine, by_head, strict=True):
                score, baseline = torch.tensor(cases, dtype=torch.float64).T
                assert int(table.sums[f"{role}_score"][0, row]) == len(cases)
                wrong = f"{role} of layer {layer}, row {row}"
                torch.testing.assert_close(table[f"{role}_score"][row], score.mean(), msg=wrong)
                torch.testing.assert_close(table[f"{role}_baseline"][row], baseline.mean(), msg=wrong)
                if len(cases) > 1:
                    error = score.std() / len(cases) ** 0.5
                    torch.testing.assert_close(table[f"{role}_score_se"][row], error, atol=1e-7, rtol=1e-6)


def test_mean_weight_at_an_offset() -> None:
    model, batch = double(models.llama()), batches()[0]
    table = mh.roles(model, [batch], only=["positional"])
    for row, p in enumerate(torch.cat([w.transpose(0, 1) for w in eager(model, batch)])):
        picked = [p[b, i, i - 1] for b in range(3) for i in range(1, int(batch["attention_mask"][b].sum()))]
        torch.testing.assert_close(table["positional:previous_weight"][row], torch.stack(picked).mean())


def test_copies_of_random_tokens() -> None:
    """Prefix matching and copying, from materialised weights and the model's own modules."""
    model = double(models.llama(max_position_embeddings=128))
    batch = batches()[0]
    table = mh.roles(model, [batch], only=["duplicate", "induction", "copying"])
    cases: dict[str, list[list[tuple[float, float]]]] = {
        name: [[] for _ in table.rows] for name in ("duplicate", "induction", "copying")
    }
    sequences = list(probe_texts.repeated(probe_texts.read_batch_facts(model, [batch], None)))
    assert [len(facts.copy) for _, facts in sequences] == list(probe_texts.COPIES)
    for probe, facts in sequences:
        ids, n = probe["input_ids"], len(facts.copy)
        assert torch.equal(ids[:, :n], ids[:, n:])
        assert all(len(set(row.tolist())) == n for row in ids)
        for layer, p in enumerate(eager(model, probe)):
            written = head_outputs(model, layer, probe, p)
            for b, h, t in torch.cartesian_prod(*(torch.arange(k) for k in (len(ids), 6, n))).tolist():
                row, w = 6 * layer + h, p[b, h, n + t]
                others = [float(w[j]) for j in range(n) if j not in (t, t + 1)]
                average = sum(others) / len(others)
                cases["duplicate"][row].append((float(w[t]), average))
                if t < n - 1:
                    cases["induction"][row].append((float(w[t + 1]), average))
                logits = model.lm_head(model.model.norm(written[b, h, n + t]))[ids[b, :n]]
                own = logits[int(w.argmax()) % n]
                cases["copying"][row].append((float((logits < own).sum()) / (n - 1), 0.5))
    for name, by_row in cases.items():
        for row, found in enumerate(by_row):
            score, baseline = torch.tensor(found, dtype=torch.float64).T
            assert int(table.sums[f"{name}_score"][0, row]) == len(found)
            torch.testing.assert_close(table[f"{name}_score"][row], score.mean(), msg=f"{name} {row}")
            torch.testing.assert_close(table[f"{name}_baseline"][row], baseline.mean(), msg=f"{name} {row}")


@torch.no_grad()
def head_outputs(model: Any, layer: int, batch: dict[str, Tensor], weights: Tensor) -> Tensor:
    """(batch, heads, length, d_model): what each head of a Llama layer adds to the stream."""
    found: list[Tensor] = []
    attention = model.model.layers[layer].self_attn
    handle = attention.v_proj.register_forward_hook(lambda _, __, out: found.append(out))
    model(**batch)
    handle.remove()
    values = found[0].unflatten(-1, (3, 4)).transpose(1, 2).repeat_interleave(2, 1)
    parts = []
    for h, output in enumerate((weights @ values).unbind(1)):
        alone = torch.zeros(*output.shape[:2], 24, dtype=output.dtype)
        alone[..., 4 * h : 4 * h + 4] = output
        parts.append(attention.o_proj(alone))
    return torch.stack(parts, 1)


def test_planted_keys() -> None:
    model = double(models.gpt2(n_positions=128))
    generator = torch.Generator().manual_seed(2)
    batch = {"input_ids": torch.randint(5, 60, (3, 41), generator=generator)}
    table = mh.roles(model, [batch], only=["retrieval"])
    hits: list[list[float]] = [[] for _ in table.rows]
    weight: list[list[float]] = [[] for _ in table.rows]
    chance: list[float] = []
    for probe, facts in probe_texts.planted(probe_texts.read_batch_facts(model, [batch], None)):
        ids = probe["input_ids"][0].tolist()
        secret = ids[-(probe_texts.KEY + probe_texts.ANSWER - 1) :]
        begin = next(i for i in range(len(ids)) if ids[i : i + len(secret)] == secret)
        assert len(ids) <= 128
        assert ids.count(secret[0]) == 2
        assert facts.begin == len(ids) - probe_texts.ANSWER
        maps = torch.cat([p[0] for p in eager(model, probe)])  # (heads of both layers, length, length)
        for step in range(probe_texts.ANSWER):
            query, place = len(ids) - probe_texts.ANSWER + step, begin + probe_texts.KEY + step
            chance.append(1 / (query + 1))
            for row in range(len(table)):
                hits[row].append(float(maps[row, query].argmax() == place))
                weight[row].append(float(maps[row, query, place]))
    assert len(chance) == probe_texts.PLANTED * probe_texts.ANSWER
    for row in range(len(table)):
        mean = [sum(x) / len(x) for x in (hits[row], weight[row], chance)]
        got = [float(table[f"retrieval_{part}"][row]) for part in ("score", "weight", "baseline")]
        assert got == pytest.approx(mean, rel=1e-6, abs=1e-9)


def test_cross_attention_has_the_roles_that_mean_something_there() -> None:
    model = double(models.t5())
    ids = models.tokens(batch=1)["input_ids"]
    batch = {"input_ids": ids, "decoder_input_ids": ids[:, :5]}
    table = mh.roles(model, [batch], only=["positional", "reach", "sink", "broad", "syntactic"][:4])
    crossed = [row for row, one in enumerate(table.rows) if one.kind == "cross"]
    assert len(crossed) == 6
    assert table["positional:previous_score"][crossed].isnan().all()
    for row in crossed:
        assert "positional, reach: no meaning in cross-attention" in table["not_judged"][row]
    weights = eager(model, batch, "cross_attentions")
    wanted = torch.cat([p[0, :, :, 0].mean(-1) for p in weights])  # id 1 is special, and stands nowhere
    torch.testing.assert_close(table["sink_score"][crossed], wanted)


def test_learned_sinks_are_sinks_and_places() -> None:
    model, ids = models.gpt_oss(), models.tokens(batch=2)["input_ids"]
    table = mh.roles(model, [{"input_ids": ids}], only=["sink", "broad", "positional"], least=2)
    assert (table["sink_score"] > table["sink_baseline"]).any()
    with torch.no_grad(), mh.watch(model, "full") as seen:
        model(input_ids=ids)
    # watch counts the first token, too, where a query has no choice but the sink
    first = seen.table.sums["entropy"][0] - table.sums["broad_score"][0]
    assert first.tolist() == [2.0] * len(table)  # one for each sequence
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.sinks.fill_(50.0)
    all_there = mh.roles(model, [{"input_ids": ids}], only=["sink", "positional"], least=2)
    torch.testing.assert_close(all_there["sink_score"], torch.ones(len(table), dtype=torch.float64))
    assert all_there["positional:self_score"].tolist() == [0.0] * len(table)


def test_long_texts_are_never_held_as_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    count = find._Collected._count
    monkeypatch.setattr(
        find._Collected,
        "_count",
        lambda self, rows, roles: sizes.append(rows.weights.numel()) or count(self, rows, roles),
    )
    encoder = mh.Encoder(4, heads=2, layers=1)
    table = mh.roles(encoder, [torch.randn(1, 2003, 4)], only=["broad"])
    assert sum(sizes) == 2 * 2003**2
    assert max(sizes) <= tiles.TILE_ELEMENTS
    assert table["tokens"].tolist() == [2003.0, 2003.0]


def random_ids(*shape: int, seed: int = 4) -> Tensor:
    return torch.randint(8, 100, shape, generator=torch.Generator().manual_seed(seed))


def test_heads_that_were_told_what_to_do_are_found_out() -> None:
    table = mh.roles(Known(), [random_ids(5, 61)])
    found = dict(zip(Known.NAMES, (set(words.split(", ")) for words in table["roles"]), strict=True))
    assert {"previous", "local"} <= found["previous"]
    assert "broad" in found["everything"]
    assert {"sink", "global"} <= found["first"]
    assert {"duplicate", "copying"} <= found["same"]
    assert {"induction", "copying", "retrieval"} <= found["after same"]
    assert {"induction", "retrieval"} <= found["after same, written with a minus"]
    assert "copying" not in found["after same, written with a minus"]
    assert not {"induction", "duplicate", "retrieval"} & (
        found["previous"] | found["everything"] | found["first"]
    )
    row = Known.NAMES.index("after same")
    assert table["induction_score"][row] > 0.99
    assert table["copying_score"][row] > 0.95
    assert table["copying_score"][row + 1] < 0.05
    assert "induction 1.00 (another token of the first copy 0.00, 440 queries)" in table["evidence"][row]
    assert table["not_judged"][0] == "separator: no tokenizer; syntactic: no treebank"


def test_few_cases_are_no_claim() -> None:
    table = mh.roles(Known(), [random_ids(1, 61)], only=["positional"])
    assert set(table["roles"]) == {""}
    assert "previous 60" in table["not_judged"][0]
    assert "of 100 queries" in table["not_judged"][0]
    assert mh.roles(Known(), [random_ids(1, 61)], only=["positional"], least=60)["roles"][0] == "previous"


def test_a_claim_must_hold_two_standard_errors_to_either_side() -> None:
    def table(hits: float) -> mh.HeadTable:
        sums = {
            "retrieval_score": torch.tensor([[100.0], [hits], [hits]]),
            "retrieval_baseline": torch.tensor([[100.0], [0.0], [0.0]]),
        }
        return judge(mh.HeadTable([("attn", 0, 0, 0, 0, "causal")], torch.ones(1), sums))  # type: ignore[list-item]

    assert table(58.0)["roles"] == [""]  # 0.58 is above 0.5, but its standard error is 0.05
    assert table(62.0)["roles"] == ["retrieval"]


def test_merged_tables_are_judged_again() -> None:
    parts = [mh.roles(Known(), [random_ids(2, 41, seed=s)], only=["positional", "reach"]) for s in (1, 2)]
    merged = parts[0].merge(parts[1])
    assert "roles" not in merged.labels
    whole = mh.roles(
        Known(), [random_ids(2, 41, seed=1), random_ids(2, 41, seed=2)], only=["positional", "reach"]
    )
    again = judge(merged)
    assert again["roles"] == whole["roles"]
    for column in whole.sums:
        torch.testing.assert_close(again.sums[column], whole.sums[column])


def test_the_model_is_left_as_it_was() -> None:
    model = Known().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    mh.roles(model, [random_ids(2, 41)])
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_bad_input() -> None:
    model, given = Known(), [random_ids(2, 31)]
    with pytest.raises(ValueError, match="batches: expected at least one, got none"):
        mh.roles(model, [])
    with pytest.raises(ValueError, match=r"no role 'nosuch'; there are positional, reach, .*syntactic"):
        mh.roles(model, given, only=["sink", "nosuch"])
    with pytest.raises(TypeError, match="only: expected a list of roles, got the text 'sink'"):
        mh.roles(model, given, only="sink")
    with pytest.raises(ValueError, match="'syntactic' needs a treebank"):
        mh.roles(model, given, only=["syntactic"])
    with pytest.raises(ValueError, match="least: expected a whole number, 2 or more, got 1"):
        mh.roles(model, given, least=1)
    with pytest.raises(ValueError, match=r"batches: the model failed .*IndexError"):
        mh.roles(model, [torch.full((1, 5), 999)])
    with pytest.raises(ValueError, match="no attention was seen"):
        mh.roles(nn.Linear(3, 3), [torch.randn(2, 3)], only=["sink"])


def test_what_cannot_be_looked_for_is_named() -> None:
    encoder = mh.Encoder(6, heads=2, layers=1)
    note = mh.roles(encoder, [torch.randn(2, 61, 6)])["not_judged"][0]
    assert "rare, separator, duplicate, induction, copying, retrieval: the batches hold no token ids" in note
    note = mh.roles(models.bert(), [models.tokens()])["not_judged"][0]
    assert "copying: the model has no vocabulary head" in note
    assert "retrieval: only 0 tokens of text fit around a key, and 64 are needed" in note
