"""The document: its numbers are the table's, its maps the model's, and what fails costs only itself."""

import base64
import io
import json
import signal

import numpy
import pytest
import tokenizers
import torch
import transformers as hf
from tests.helpers.models import bert_config, gpt2_config, llama_config, t5_config, vit_config
from torch import nn

import manyheads as mh
from manyheads.common.interrupts import stop_if_interrupted
from manyheads.data.batches import Corpus, padded
from manyheads.heads.effects import page_measurements
from manyheads.heads.effects.questions import ask
from manyheads.heads.effects.silencing import silenced
from manyheads.heads.model_outputs import output_distance, read_output
from manyheads.heads.pooled_maps import EDGES, area, bin_of, see
from manyheads.heads.table import Row
from manyheads.nn.transformers import Encoder
from manyheads.surgery.silencing_curve import SHARES, silencing_curve
from manyheads.view.document import About, Sample, document, example, of_batches, of_corpus
from manyheads.view.document.image import grid
from manyheads.view.document.packing import packed, unpacked
from manyheads.view.document.sample import PIECE, FirstBatches, singles
from manyheads.view.document.token_text import read_token, token_texts, visible

SMALL = {"vocab_size": 97, "hidden_size": 15, "num_hidden_layers": 2, "num_attention_heads": 3}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(3)


def sharp(model):
    """Attention far from even."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4) if parameter.dim() > 1 else None
    return model.eval()


def bert(length=64):
    config = bert_config(
        **SMALL, intermediate_size=11, max_position_embeddings=length, attn_implementation="eager"
    )
    return sharp(hf.BertModel(config))


def llama(head=hf.LlamaForCausalLM):
    config = llama_config(
        vocab_size=97,
        hidden_size=18,
        num_hidden_layers=2,
        num_attention_heads=6,
        head_dim=4,
        num_key_value_heads=3,
        intermediate_size=11,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    return sharp(head(config))


def t5():
    config = t5_config(
        vocab_size=97,
        d_model=15,
        d_kv=5,
        d_ff=11,
        num_layers=2,
        num_heads=3,
        decoder_start_token_id=0,
    )
    return sharp(hf.T5ForConditionalGeneration(config))


def ids(*shape):
    return torch.randint(3, 97, shape)


# ---------------------------------------------------------------- numbers


def test_packed_numbers_come_back():
    values = torch.rand(5, 7, dtype=torch.float64)
    for dtype, within in (("uint8", 0.5 / 255), ("uint16", 0.5 / 65535), ("float32", 1e-7)):
        assert (unpacked(packed(values, dtype)) - values).abs().max() <= within * 1.0001
    raw = base64.b64decode(packed(torch.tensor([1 / 65535 * 258]), "uint16")["data"])
    assert raw == b"\x02\x01"  # little-endian


def test_the_numbers_are_those_of_the_table():
    model = llama()
    table = mh.inspect(model, [{"input_ids": ids(2, 11)}], tokens={"special": range(40)})
    found = document(table, about=About("a <model>", "a text", groups={"special": "half"}))
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    heads = found["heads"]
    assert list(heads["metrics"]) == table.metrics
    for name in table.metrics:
        for column, part in ((name, "mean"), (f"{name}_se", "se")):
            assert [x is None for x in heads["metrics"][name][part]] == table[column].isnan().tolist()
            kept = [x for x in heads["metrics"][name][part] if x is not None]
            assert kept == table[column][~table[column].isnan()].tolist()
    assert heads["kv_head"] == table["kv_head"]
    assert heads["name"][7] == "1.1"
    assert found["stacks"][0]["kind"] == "causal"
    assert [layer["heads"] for layer in found["stacks"][0]["layers"]] == [[*range(6)], [*range(6, 12)]]
    assert found["examples"] == []
    assert found["roles"] is found["redundancy"] is found["curve"] is found["profiles"] is None
    assert found["importance"]["confidence"]["mean"] == table["confidence"].tolist()


def test_nothing_counted_is_null():
    rows = [Row("attn", 0, 0, 0, 0, "self")]
    table = mh.HeadTable(rows, torch.zeros(1), {"entropy": torch.zeros(3, 1)})
    assert document(table)["heads"]["metrics"]["entropy"] == {"mean": [None], "se": [None]}


def test_tables_of_other_kinds_show_what_they_have():
    model, batches = llama(), [{"input_ids": ids(3, 29)}]
    judged = mh.roles(model, batches, least=5)
    found = document(judged)["roles"]
    names = [role for one in judged["roles"] for role in one.split(", ") if role]
    claimed = [one["role"] for head in found["heads"] for one in head if one["claimed"]]
    assert sorted(claimed) == sorted(names)
    assert set(claimed) <= set(found["names"]) == set(found["says"]) == set(found["against"])
    sink = next(one for one in found["heads"][5] if one["role"] == "sink")
    assert sink["score"] == pytest.approx(judged["sink_score"][5].item(), abs=1e-6)
    assert sink["baseline"] == pytest.approx(judged["sink_baseline"][5].item(), abs=1e-6)
    assert sink["cases"] == judged.sums["sink_score"][0, 5].item()
    assert found["not_judged"]["syntactic"] == "no treebank"

    alike = mh.diversity(model, batches, measures=["attention"])
    found = document(alike)["redundancy"]
    js = alike.matrices["js"]
    torch.testing.assert_close(unpacked(found["matrix"]), js, atol=1 / 65535, rtol=0)
    for head, near in enumerate(found["nearest"]):
        others = sorted((js[head, i].item(), i) for i in range(len(js)) if i != head)[:5]
        assert [i for i, _ in near] == [i for _, i in others]
        assert found["twin"][head] == others[0][1]
    assert found["x"] == alike["x"].tolist()
    ranked = mh.importance(model, batches)
    assert document(ranked)["importance"]["importance"]["mean"] == ranked["importance"].tolist()


# ---------------------------------------------------------------- tokens


def test_marks_of_sub_words():
    words = ["[UNK]", "[CLS]", "[SEP]", "un", "##believ", "##able", "#", "##", "你"]
    tokenizer = hf.BertTokenizerFast(vocab={word: i for i, word in enumerate(words)})
    found = token_texts(tokenizer, range(9))
    assert [token["shown"] for token in found] == [
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "un",
        "believ",
        "able",
        "#",
        "##",
        "你",
    ]
    assert [token["mark"] for token in found] == [
        "unknown",
        "special",
        "special",
        None,
        "joined",
        "joined",
        None,
        None,
        None,
    ]
    assert found[4]["text"] == "##believ"


def byte_level(texts):
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return hf.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")


def test_bytes_are_read_as_characters():
    tokenizer = byte_level(["你你你你 the cats", "你 the cat the cat"] * 9)
    text = "你 the cats\n😀"
    found = token_texts(tokenizer, [*tokenizer(text)["input_ids"], 0])
    shown = [(token["shown"], token["mark"]) for token in found]
    assert shown[0] == ("你", None)
    assert (("the", "space") in shown) or ((" the", "space") in shown)
    assert ("↵", "newline") in shown
    assert shown[-1] == ("<|end|>", "special")
    pieces = [token for token in found if token["mark"] == "byte"]
    assert " ".join(token["shown"] for token in pieces) == "F0 9F 98 80"  # no merge was learned for it


def test_marks_of_sentence_pieces():
    pieces = [
        ("<unk>", 0.0),
        ("▁the", -1.0),
        ("▁", -2.0),
        ("cat", -1.5),
        ("s", -2.5),
        ("<0xE4>", -9.0),
        ("<0x0A>", -9.0),
    ]
    inner = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    inner.decoder = tokenizers.decoders.Metaspace()
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    found = [(token["shown"], token["mark"]) for token in token_texts(tokenizer, range(7))]
    assert found[:4] == [("<unk>", "unknown"), ("the", "space"), ("␣", "space"), ("cat", None)]
    assert found[5:] == [("E4", "byte"), ("↵", "newline")]


def test_hidden_characters_are_shown():
    assert visible("a\0b\x1bc\x7f") == "a␀b␛c␡"
    assert visible("\u202eabc\u200b\ufeff\ud83d") == "[202E]abc[200B][FEFF][D83D]"
    assert visible("👩‍👩‍👧‍👦 mañana שלום") == "👩‍👩‍👧‍👦 mañana שלום"
    assert visible("\t \n") == "⇥␣↵"
    assert len(visible("x" * 100_000)) == 80
    assert read_token("").shown == ""


def test_tokens_without_a_tokenizer_are_numbers():
    assert token_texts(None, [7, 11]) == [{"text": str(i), "shown": str(i), "mark": None} for i in (7, 11)]


# ---------------------------------------------------------------- maps


def exact_maps(found):
    return {
        (maps["site"], int(head)): unpacked(one)
        for maps in found["maps"]
        for head, one in maps["exact"].items()
    }


def test_exact_maps_are_the_models_own():
    model, batch = bert(), {"input_ids": ids(1, 13)}
    found, seen = example(model, batch)
    with torch.no_grad():
        own = model(**batch, output_attentions=True).attentions
    assert seen.result.last_hidden_state.shape == (1, 13, 15)
    maps = exact_maps(found)
    assert len(maps) == 6
    for layer, weights in enumerate(own):
        for head in range(3):
            site = f"encoder.layer.{layer}.attention.self"
            torch.testing.assert_close(maps[site, head], weights[0, head].double(), atol=1e-5, rtol=0)
    assert found["kind"] == "text"
    assert [token["text"] for token in found["tokens"]["self"]] == [
        str(i) for i in batch["input_ids"][0].tolist()
    ]
    assert "pooled" not in found["maps"][0]


def test_thumbnails_are_means_over_areas():
    model = bert(length=101)
    batch = {"input_ids": ids(1, 101)}
    seen = see(model, batch, thumbnail=7, exact=lambda site: [1])
    shown = see(model, batch, pooled=1000, exact=lambda site: [0, 1, 2])
    for small, whole in zip(seen.maps, shown.maps, strict=True):
        weights = torch.stack([whole.exact[head] for head in range(3)])
        mean = area(101, 7)
        torch.testing.assert_close(small.thumbnails, mean @ weights @ mean.T)
        assert list(small.exact) == [1]
    assert area(7, 7).equal(torch.eye(7))
    torch.testing.assert_close(area(101, 7).sum(1), torch.ones(7))
    found, _ = example(model, batch, thumbnail=7)
    peak = torch.tensor(found["maps"][1]["peak"])
    again = unpacked(found["maps"][1]["thumbnails"]) * peak[:, None, None]
    assert (again - seen.maps[1].thumbnails).abs().max() <= peak.max() / 255


def test_long_maps_are_pooled_as_maps_does(monkeypatch):
    monkeypatch.setattr("manyheads.heads.pooled_maps._HELD", 3 * 101 * 19)  # several pieces
    model = bert(length=101)
    batch = {"input_ids": ids(1, 101)}
    found, _ = example(model, batch, pooled=13, exact=lambda site: [2] if "1" in site.name else [])
    wanted = mh.maps(model, batch, {0: range(3), 1: range(3)}, size=13)
    for maps in found["maps"]:
        own = wanted[maps["site"]]
        assert (maps["row_size"], maps["column_size"]) == (own.row_size, own.column_size) == (8, 8)
        assert (unpacked(maps["pooled"]) - own.weights[0]).abs().max() <= 0.51 / 255
    assert [list(maps["exact"]) for maps in found["maps"]] == [[], ["2"]]


def test_padding_is_no_part_of_a_map():
    model, row = bert(), ids(1, 7)
    padded = {
        "input_ids": torch.cat([row, torch.zeros(1, 4, dtype=torch.long)], 1),
        "attention_mask": torch.tensor([[1] * 7 + [0] * 4]),
    }
    with_padding, plain = (exact_maps(example(model, b)[0]) for b in (padded, {"input_ids": row}))
    assert all(weights.shape == (7, 7) for weights in with_padding.values())
    for key, weights in plain.items():
        torch.testing.assert_close(with_padding[key], weights, atol=2e-5, rtol=0)


def test_distances_count_every_weight():
    seen = see(bert(), {"input_ids": ids(1, 41)})
    maps = seen.maps[1]
    for head, weights in maps.exact.items():
        wanted = torch.zeros(2 * len(EDGES) + 1, dtype=torch.float64)
        for i in range(41):
            for j in range(41):
                away = j - i
                step = 0 if away == 0 else 1 + next(n for n, edge in enumerate(EDGES) if abs(away) <= edge)
                wanted[len(EDGES) + (step if away > 0 else -step)] += weights[i, j].item() / 41
        torch.testing.assert_close(maps.distance[head], wanted, atol=1e-6, rtol=0)
    assert bin_of(torch.tensor([3, 4, 5])).tolist() == [len(EDGES) + 3] * 2 + [len(EDGES) + 4]


def test_source_and_target_of_an_encoder_and_decoder():
    model = t5()
    for sizes in ((7, 5), (7, 7)):  # also where lengths cannot tell them apart
        batch = {"input_ids": ids(1, sizes[0]), "decoder_input_ids": ids(1, sizes[1])}
        found, _ = example(model, batch)
        assert found["kind"] == "pair"
        axes = {maps["site"]: (maps["queries"], maps["keys"]) for maps in found["maps"]}
        for site, axis in axes.items():
            wanted = (
                ("target", "source")
                if "EncDec" in site
                else ("source",) * 2
                if "encoder" in site
                else ("target",) * 2
            )
            assert axis == wanted, site
        shown = {name: [token["text"] for token in tokens] for name, tokens in found["tokens"].items()}
        assert shown["source"] == [str(i) for i in batch["input_ids"][0].tolist()]
        assert shown["target"] == [str(i) for i in batch["decoder_input_ids"][0].tolist()]


def test_a_picture_and_its_patches():
    from PIL import Image

    config = vit_config(
        image_size=30,
        patch_size=6,
        hidden_size=15,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=11,
    )
    model = sharp(hf.ViTModel(config))
    colours = torch.rand(3, 30, 30)

    class Processor:
        image_mean, image_std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)

    mean, spread = (torch.tensor(x).view(3, 1, 1) for x in (Processor.image_mean, Processor.image_std))
    found, _ = example(model, {"pixel_values": ((colours - mean) / spread)[None]}, processor=Processor())
    shown = found["picture"]
    assert (shown["rows"], shown["columns"], shown["first"], found["kind"]) == (5, 5, 1, "image")
    with Image.open(io.BytesIO(base64.b64decode(shown["png"].partition(",")[2]))) as drawn:
        levels = torch.from_numpy(numpy.array(drawn)).permute(2, 0, 1)
    assert (levels / 255 - colours).abs().max() < 0.51 / 255
    tokens = found["tokens"]["self"]
    assert (tokens[0]["mark"], tokens[1]["text"], tokens[-1]["text"], len(tokens)) == (
        "special",
        "0,0",
        "4,4",
        26,
    )
    assert found["pipeline"] is None
    assert grid(3 * 5 + 2, 30, 50) == (3, 5, 2)
    assert grid(196, 224, 224) == (14, 14, 0)


# ---------------------------------------------------------------- pipeline


def steps(found):
    return {step["step"]: step for step in found["pipeline"]}


def test_the_pipeline_of_gpt2_is_its_arithmetic():
    config = gpt2_config(vocab_size=97, n_embd=15, n_layer=2, n_head=3, n_positions=19)
    model = sharp(hf.GPT2Model(config))
    row = ids(1, 7)
    way = steps(example(model, {"input_ids": row})[0])
    assert list(way) == [
        *("tokens", "ids", "embedding", "positions", "input", "query", "key", "value"),
        *("scores", "weights", "heads", "joined", "projected"),
    ]
    assert way["ids"]["values"] == row[0].tolist()

    def near(step, wanted):
        assert way[step]["shape"] == list(wanted.shape)
        torch.testing.assert_close(torch.tensor(way[step]["values"]), wanted.detach(), rtol=1e-3, atol=1e-3)

    block = model.h[0]
    near("embedding", model.wte(row[0]))
    near("positions", model.wpe(torch.arange(7)))
    x = block.ln_1(model.wte(row[0]) + model.wpe(torch.arange(7)))
    near("input", x)
    q, k, v = (part.view(7, 3, 5).transpose(0, 1) for part in block.attn.c_attn(x[None])[0].split(15, -1))
    for step, wanted in (("query", q), ("key", k), ("value", v)):
        near(step, wanted)
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(1, 2) / 5**0.5).masked_fill(hidden, -torch.inf)
    written = torch.tensor(
        [[[-torch.inf if x is None else x for x in r] for r in h] for h in way["scores"]["values"]]
    )
    torch.testing.assert_close(written, scores.detach(), rtol=1e-3, atol=1e-3)
    weights = scores.softmax(-1)
    near("weights", weights)
    near("heads", weights @ v)
    joined = (weights @ v).transpose(0, 1).reshape(7, 15)
    near("joined", joined)
    near("projected", block.attn.c_proj(joined[None])[0])


def test_the_pipeline_of_other_models():
    way = steps(example(llama(), {"input_ids": ids(1, 23)})[0])
    assert "positions" not in way  # they are in the queries and keys
    assert way["key"]["shape"][1:] == [23, 4]
    assert way["projected"]["shape"] == [23, 18]
    assert torch.tensor(way["weights"]["values"]).shape == (6, 16, 16)
    assert way["scores"]["shape"] == way["weights"]["shape"] == [6, 23, 23]
    own = Encoder(d_model=8, heads=2, layers=1, vocabulary=97).eval()
    assert {"embedding", "query", "projected"} <= set(steps(example(own, ids(1, 5))[0]))
    layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True).eval()
    assert example(layer, torch.randn(1, 5, 8))[0]["pipeline"] is None


# ---------------------------------------------------------------- without heads


@pytest.mark.parametrize("make", [bert, llama, t5])
def test_what_silencing_changes(make):
    model = make()
    batch = {"input_ids": ids(1, 7)}
    if make is t5:
        batch["decoder_input_ids"] = ids(1, 5)
    table = mh.inspect(model, [batch])
    found = silenced(model, batch, table.rows, length=100, order=[0, 3, 4])  # five at once
    with torch.no_grad():
        full = read_output(model(**batch), model)
        for i, row in enumerate(table.rows):
            if i not in (0, 3, 4):
                assert found["change"][i] is None
                continue
            with mh.silence(model, {row.site: [row.head]}):
                other = read_output(model(**batch), model)
            assert found["change"][i] == pytest.approx(
                output_distance(full, other).item(), rel=1e-3, abs=1e-7
            )


def test_models_that_cannot_be_batched_are_silenced_one_by_one():
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.MultiheadAttention(6, num_heads=3, batch_first=True)

        def forward(self, x):
            assert len(x) == 1
            return self.inner(x, x, x, need_weights=False)[0]

    model, x = Alone().eval(), torch.randn(1, 5, 6)
    table = mh.inspect(model, [x])
    change = silenced(model, x, table.rows)["change"]
    with torch.no_grad():
        full = read_output(model(x), model)
        with mh.silence(model, {"inner": [1]}):
            other = read_output(model(x), model)
    assert change[1] == pytest.approx(output_distance(full, other).item(), rel=1e-4)


def test_the_input_is_no_neighbour_of_itself_when_a_head_is_silenced():
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 13}
    model = hf.BertModel(bert_config(vocab_size=37, **sizes)).eval()
    batches = [{"input_ids": torch.randint(5, 37, (1, 7))} for _ in range(3)]
    with torch.no_grad():
        values = torch.cat([read_output(model(**batch), model).value[:1].float() for batch in batches])
    said, question = ask(model, batches[1], None, (["one", "two", "three"], values))
    with torch.no_grad(), mh.silence(model, {0: [0]}):
        after = question.answer(model(**question.batch))
    assert {text for text, _ in said["items"]} == {text for text, _ in after} == {"one", "three"}


def test_the_curve_is_what_silencing_gives():
    model, batches = llama(), [{"input_ids": ids(3, 11)}]
    ranked = mh.importance(model, batches)
    found = silencing_curve(model, batches, {"fisher": ranked})
    assert found["quality"] == "perplexity"
    assert [line["name"] for line in found["lines"]] == ["fisher", "random"]
    fisher, random = found["lines"]
    # of 12 heads, two for each key head: one alone cannot go, so there is no point at 0.875
    plans = [mh.plan(ranked, keep) for keep in SHARES[2:]]
    assert set(fisher["kept"]) == {1.0, *(round(plan.keep, 4) for plan in plans)}
    half = plans[SHARES[2:].index(0.5)]
    share = fisher["kept"].index(round(half.keep, 4))

    def perplexity():
        with torch.no_grad():
            logits = model(**batches[0]).logits[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(logits, batches[0]["input_ids"][:, 1:].flatten()).exp().item()

    assert fisher["mean"][0] == pytest.approx(perplexity(), rel=1e-4)
    with mh.silence(model, half):
        assert fisher["mean"][share] == pytest.approx(perplexity(), rel=1e-4)
    assert random["se"][0] == pytest.approx(0.0, abs=1e-9)
    assert random["se"][share] > 0


# ---------------------------------------------------------------- all of it


def sample(model, *batches):
    return of_batches(list(batches), model)


def test_a_whole_document():
    model = llama().train()
    batches = [{"input_ids": ids(3, 23)}, {"input_ids": ids(2, 13)}]
    table = mh.inspect(model, batches)
    calls = []
    found = document(table, model, sample(model, *batches), progress=lambda *call: calls.append(call))
    assert model.training
    text = json.dumps(found, allow_nan=False)
    assert json.dumps(json.loads(text)) == text
    assert list(dict.fromkeys(stage for stage, _, _ in calls)) == [
        "importance", "examples", "redundancy", "roles", "curve",
    ]  # fmt: skip
    assert all(0 <= done <= total for _, done, total in calls)
    n = len(table)
    first = found["examples"][0]
    assert first["answer"]["kind"] == "next"
    assert len(first["silenced"]["change"]) == len(first["silenced"]["answer"]) == n
    assert set(found["importance"]) == {"fisher", "output-norm", "confidence", "leave-one-out"}
    assert found["profiles"]["mass"]["shape"] == [n, len(found["profiles"]["offsets"])]
    assert max(found["profiles"]["offsets"]) == 0  # causal
    torch.testing.assert_close(
        unpacked(found["profiles"]["mass"]).sum(1), torch.ones(n).double(), atol=1e-3, rtol=0
    )
    assert found["roles"]["names"]
    assert found["redundancy"]["matrix"]["shape"] == [n, n]
    assert "twin_distance" in found["heads"]["metrics"]
    assert any("measured on" in note for note in found["header"]["notes"])
    assert not found["header"]["stopped"]


def fails(*_, **__):
    raise RuntimeError("no such thing\nand more")


def test_what_fails_costs_only_itself(monkeypatch):
    model, batch = llama(), {"input_ids": ids(2, 13)}
    table = mh.inspect(model, [batch])
    for name in ("roles", "fisher"):
        monkeypatch.setattr(page_measurements, name, fails)
    found = document(table, model, sample(model, batch))
    assert found["roles"] is found["curve"] is None
    assert found["redundancy"] is not None
    assert found["examples"][0]["silenced"] is not None
    assert "roles: left out (RuntimeError: no such thing)" in found["header"]["notes"]
    monkeypatch.setattr("manyheads.view.document.examples.silenced", fails)
    found = document(table, model, sample(model, batch))
    assert found["examples"][0]["silenced"] is None
    assert found["examples"][0]["maps"]


def interrupted(*_, **__):
    signal.raise_signal(signal.SIGINT)
    stop_if_interrupted()


def test_an_interruption_keeps_what_there_is(monkeypatch):
    model, batch = llama(), {"input_ids": ids(2, 13)}
    table = mh.inspect(model, [batch])
    monkeypatch.setattr(page_measurements, "diversity", interrupted)
    found = document(table, model, sample(model, batch))
    assert found["header"]["stopped"]
    assert found["examples"][0]["maps"]
    assert found["redundancy"] is found["roles"] is found["curve"] is None
    assert any(note.startswith("redundancy: interrupted") for note in found["header"]["notes"])
    monkeypatch.setattr("manyheads.view.document.examples.silenced", interrupted)
    found = document(table, model, sample(model, batch))
    assert len(found["examples"]) == 1
    assert found["examples"][0]["silenced"] is None


def test_a_model_of_numbers_has_a_document_too():
    layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    batches = [torch.randn(3, 7, 8)]
    found = document(mh.inspect(model, batches), model, sample(model, *batches))
    assert found["examples"][0]["maps"][0]["thumbnails"]["shape"] == [2, 7, 7]
    assert [token["text"] for token in found["examples"][0]["tokens"]["self"]] == [*"0123456"]
    assert found["curve"]["quality"] == "cosine"


def test_batches_one_by_one():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    batch = {"input_ids": ids(2, 3), "attention_mask": mask, "decoder_input_ids": ids(2, 3)}
    first, second = singles(batch)
    assert first["input_ids"].tolist() == batch["input_ids"][:1, :2].tolist()
    assert first["decoder_input_ids"].shape == (1, 3)
    assert second["attention_mask"].shape == (1, 3)
    assert singles(torch.randn(2, 3, 5)) == []
    first = FirstBatches(iter([ids(2, 5), ids(2, 5), ids(2, 5)]), tokens=11)
    assert len(list(first)) == 3
    assert len(first.batches) == 2
    long = of_batches([ids(900, 7)], nn.Linear(1, 1))
    assert long.batches[0].shape == (1024 // 7, 7)
    assert Sample().batches == []


def test_a_page_reads_the_beginnings_of_long_texts():
    long = of_corpus(numbered([200, 100, 300, 50] * 5), nn.Linear(2, 2))
    assert max(batch["input_ids"].shape[1] for batch in long.batches) == PIECE
    assert sum(batch["input_ids"].shape[0] for batch in long.batches) > 12
    assert long.note.endswith("of 20 texts")
    assert long.piece == PIECE
    short = of_corpus(numbered([23, 11] * 5), nn.Linear(2, 2))
    assert (short.note, short.piece) == ("170 tokens in 10 of 10 texts", 0)


def test_a_text_beside_another_is_read_whole():
    read = of_corpus(numbered([200, 100], beside=7), nn.Linear(2, 2))
    assert max(batch["input_ids"].shape[1] for batch in read.batches) == 200


def numbered(sizes, beside=0):
    """A corpus of ids, perhaps with another text of ids beside each."""

    def make(indices):
        batch = dict(
            zip(("input_ids", "attention_mask"), padded([[5] * sizes[i] for i in indices]), strict=True)
        )
        return batch | ({"decoder_input_ids": torch.ones(len(indices), beside).long()} if beside else {})

    return Corpus("ids", "tokens", sizes, make)
