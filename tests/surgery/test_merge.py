"""merge: fewer key heads, held to the formula of grouped-query attention in float64."""

import copy

import pytest
import torch
from tests.helpers.models import bert_config, llama_config
from torch import nn

import manyheads as mh
from manyheads.capture.weights import projections
from manyheads.models.changes import changes_of
from manyheads.surgery.head_alignment import Freedom, HeadWeights, freedom
from manyheads.surgery.merged_sites import find_freedoms
from manyheads.surgery.shared_heads import groups_by_distance, lost_energy, shared_matrices, square_root

BATCHES = [torch.randint(17, (7, 11), generator=torch.Generator().manual_seed(n)) for n in range(2)]


def decoder(positions="rotary", **options):
    torch.manual_seed(3)
    return mh.Decoder(20, heads=4, layers=2, vocabulary=17, d_key=6, positions=positions, **options).eval()


@pytest.fixture(scope="module")
def bert():
    from transformers import BertModel

    torch.manual_seed(5)
    config = bert_config(
        vocab_size=17, hidden_size=20, num_hidden_layers=2, num_attention_heads=4, intermediate_size=13
    )
    return BertModel(config).eval()


def rope(x, base=10000.0):
    """The rotary formula, pairs (i, i + width / 2): (length, width) in float64."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x)).double()[:, None] * base ** (-torch.arange(half).double() / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def test_pairs_that_a_rotation_turns_are_merged_without_loss():
    """Keys of two heads that differ by a turn and a scale of each pair give the same scores from one head."""
    torch.manual_seed(0)
    width, inputs, length = 6, 7, 5
    pairs = tuple((i, i + width // 2) for i in range(width // 2))
    w = torch.randn(width, inputs).double()
    turn = torch.zeros(width, width).double()
    for (i, j), angle, size in zip(pairs, (0.3, 1.1, 2.9), (0.5, 2.0, 1.3), strict=True):
        c, s = size * torch.cos(torch.tensor(angle)), size * torch.sin(torch.tensor(angle))
        turn[i, i] = turn[j, j] = c
        turn[j, i], turn[i, j] = s, -s
    keys = [w, turn @ w]
    spread = torch.randn(inputs, inputs).double()
    one, maps = shared_matrices(
        keys, [torch.eye(width).double()] * 2, square_root(spread @ spread.T), Freedom(pairs=pairs)
    )
    x, q = torch.randn(length, inputs).double(), torch.randn(length, width).double()
    for key, each in zip(keys, maps, strict=True):
        scores = rope(q) @ rope(x @ key.T).T
        torch.testing.assert_close(rope(q @ each) @ rope(x @ one.T).T, scores)


def test_shared_heads_lose_no_more_than_a_mean_or_a_turned_mean():
    torch.manual_seed(1)
    matrices = [torch.randn(4, 9).double() for _ in range(3)]
    importances = [(m := torch.randn(4, 4).double()) @ m.T for _ in range(3)]
    spread = torch.randn(9, 9).double()
    moments = spread @ spread.T
    root = square_root(moments)
    total = sum(float((w @ moments @ w.T * g).sum()) for w, g in zip(matrices, importances, strict=True))
    mean = torch.stack(matrices).mean(0)
    apart = [w - mean for w in matrices]
    by_mean = sum(float((d @ moments @ d.T * g).sum()) for d, g in zip(apart, importances, strict=True))
    for one in (Freedom(tuple(range(4))), Freedom(pairs=((0, 2), (1, 3)))):
        assert 0 < lost_energy(matrices, importances, root, one) < by_mean / total
    assert lost_energy(matrices, importances, root, Freedom()) == pytest.approx(by_mean / total)


def test_freedom_is_found_by_trying():
    """Any turn without positions, pairs with rotary ones, none behind a norm of the keys: it lets turns pass
    before it has learned, and scales never. What was found at another layer changes nothing.
    """
    x = torch.randn(2, 7, 12)
    every, pairs = Freedom(free=tuple(range(6))), Freedom(pairs=((0, 3), (1, 4), (2, 5)))
    expected = {
        "none": every,
        "rotary": pairs,
        "interleaved": Freedom(pairs=((0, 1), (2, 3), (4, 5))),
        "partial": Freedom((4, 5), ((0, 2), (1, 3))),
        "norm": Freedom(),
        "norm as it begins": Freedom(),
    }
    for name, right in expected.items():
        torch.manual_seed(2)
        rotary = {
            "rotary": mh.Rotary(6),
            "interleaved": mh.Rotary(6, interleaved=True),
            "partial": mh.Rotary(4),
        }.get(name)
        norm = name.startswith("norm")
        layer = mh.MultiHeadAttention(12, heads=3, d_key=6, rotary=rotary, qk_norm=norm).eval()
        if name == "norm":  # weights that differ, as after training
            for parameter in (layer.query_norm.weight, layer.key_norm.weight):
                nn.init.uniform_(parameter, 0.5, 2.0)
        with torch.no_grad():
            output = layer(x)
        weights = HeadWeights(layer, projections(layer, x)[""])

        def holds(layer=layer, output=output):
            with torch.no_grad():
                return bool((layer(x) - output).abs().max() < 1e-5)

        before = copy.deepcopy(layer.state_dict())
        for guess in (None, every, pairs, right, Freedom(), Freedom(tuple(range(8)))):
            assert freedom(weights, "key", holds, guess) == right, (name, guess)
        assert freedom(weights, "value", holds) == Freedom(free=tuple(range(4)))
        assert all(torch.equal(before[key], value) for key, value in layer.state_dict().items())


def test_pairs_that_turn_slowly_are_pairs():
    """A short batch does not show that they turn."""
    torch.manual_seed(2)
    layer = mh.MultiHeadAttention(12, heads=3, d_key=6, rotary=mh.Rotary(6, base=3e8)).eval()
    x = torch.randn(2, 300, 12)
    weights = projections(layer, x[:, :7])
    turning = Freedom(pairs=((0, 3), (1, 4), (2, 5)))
    assert find_freedoms(layer, weights, [""], [x[:, :7]])[""]["key"] != turning
    assert find_freedoms(layer, weights, [""], [x[:, :7], x])[""]["key"] == turning


def test_layers_with_and_without_positions_lose_nothing():
    """Key heads that are the same but for what a layer lets change become one: rotary first, then none, and
    of other widths.
    """
    torch.manual_seed(4)
    first = mh.MultiHeadAttention(20, heads=4, d_key=6, d_value=5, rotary=mh.Rotary(6))
    second = mh.MultiHeadAttention(20, heads=4, d_key=10, d_value=3)
    model = nn.Sequential(first, second).eval()
    turn = torch.zeros(6, 6)
    for i, j, angle in ((0, 3, 0.7), (1, 4, 1.9), (2, 5, -0.4)):
        c, s = torch.tensor(angle).cos(), torch.tensor(angle).sin()
        turn[i, i], turn[i, j], turn[j, i], turn[j, j] = 2 * c, -2 * s, 2 * s, 2 * c
    with torch.no_grad():
        for layer, width, change in ((first, 6, turn), (second, 10, torch.randn(10, 10))):
            reading = torch.randn(layer.d_value, layer.d_value)
            for linear, size, each in ((layer.key, width, change), (layer.value, layer.d_value, reading)):
                for a, b in ((0, 2), (1, 3)):
                    rows, others = (slice(h * size, (h + 1) * size) for h in (a, b))
                    linear.weight[others] = each @ linear.weight[rows]
                    linear.bias[others] = each @ linear.bias[rows]
    batches = [torch.randn(5, 13, 20) for _ in range(2)]
    small = mh.merge(model, 2, batches, refit=False)
    with torch.no_grad():
        torch.testing.assert_close(small(batches[0]), model(batches[0]), rtol=1e-3, atol=1e-4)


def test_a_model_that_cannot_be_refitted_is_refused_at_once():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.norm = mh.MultiHeadAttention(20, heads=4), nn.LayerNorm(20)

        def forward(self, x):
            return x + self.norm(self.attention(x))

    stages = []
    for verb in (lambda m, b, **o: mh.merge(m, 2, b, **o), lambda m, b, **o: mh.prune(m, b, 0.5, **o)):
        with pytest.raises(ValueError, match="refit=False"):
            verb(Normed(), [torch.randn(5, 7, 20)], progress=lambda stage, *_: stages.append(stage))
    assert not stages


def test_merged_attention_is_grouped_query_attention():
    """The output of a merged layer by the textbook, from its weights alone."""
    model, x = decoder(), torch.randn(3, 7, 20)
    small = mh.merge(model, 2, BATCHES, refit=False)
    layer = small.blocks[1].attention
    assert (layer.heads, layer.kv_heads, tuple(layer.key.weight.shape)) == (4, 2, (12, 20))
    q, k, v = (
        (x.double() @ m.weight.double().T + m.bias.double()).unflatten(-1, (count, -1)).transpose(1, 2)
        for m, count in ((layer.query, 4), (layer.key, 2), (layer.value, 2))
    )
    outputs = []
    for head in range(4):
        mine = []
        for b in range(3):
            scores = rope(q[b, head]) @ rope(k[b, head // 2]).T / 6**0.5
            scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
            mine.append(scores.softmax(-1) @ v[b, head // 2])
        outputs.append(torch.stack(mine))
    expected = torch.cat(outputs, -1) @ layer.output.weight.double().T + layer.output.bias.double()
    with torch.no_grad():
        actual = layer(x, causal=True)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)


def test_equal_key_heads_are_merged_without_a_change():
    """A model whose key heads are turned copies of two is the same with two, in groups by what they do."""
    model = decoder("none")
    with torch.no_grad():
        for block in model.blocks:
            layer = block.attention
            for linear, reader, width in ((layer.key, layer.query, 6), (layer.value, None, 5)):
                turn = torch.linalg.qr(torch.randn(width, width))[0]
                for a, b in ((0, 3), (1, 2)):
                    rows, others = (slice(h * width, (h + 1) * width) for h in (a, b))
                    linear.weight[others] = turn @ linear.weight[rows]
                    linear.bias[others] = turn @ linear.bias[rows]
                    assert reader is None or reader.weight.shape[0] == 24
    small = mh.merge(model, 2, BATCHES, refit=False)
    with torch.no_grad():
        torch.testing.assert_close(small(BATCHES[0]), model(BATCHES[0]), rtol=1e-4, atol=1e-5)
    assert list(small.original_heads.values()) == [[0, 3, 1, 2]] * 2
    averaged = mh.merge(model, 2, BATCHES, refit=False, how="mean")
    with torch.no_grad():
        assert (averaged(BATCHES[0]) - model(BATCHES[0])).abs().max() > 1e-3


def test_merged_models_are_saved_loaded_and_cut(tmp_path):
    model = decoder()
    small = mh.merge(model, 1, BATCHES)
    mh.save(small, tmp_path / "small")
    again = mh.load(tmp_path / "small").eval()
    cut = mh.cut(again, {0: [1]}, BATCHES[0][:2])
    with torch.no_grad():
        assert torch.equal(again(BATCHES[0]), small(BATCHES[0]))
        with mh.silence(small, {0: [1]}):
            expected = small(BATCHES[0])
        torch.testing.assert_close(cut(BATCHES[0]), expected, rtol=1e-4, atol=1e-5)
    assert cut.blocks[0].attention.heads == 3


def test_a_class_without_key_head_counts_repeats_its_keys(bert, tmp_path):
    from transformers import AutoModel

    batch = {"input_ids": BATCHES[0]}
    small = mh.merge(bert, 2, [batch], refit=False)
    layer = small.encoder.layer[0].attention.self
    assert tuple(layer.key.weight.shape) == tuple(layer.value.weight.shape) == (10, 20)
    assert layer.key(torch.ones(1, 20)).shape == (1, 20)
    assert any("repeated" in note for note in changes_of(small).notes)
    mh.save(small, tmp_path / "small")
    fewer = mh.cut(mh.load(tmp_path / "small"), {0: [0, 1]})
    with torch.no_grad():
        expected = small(**batch).last_hidden_state
        for again in (mh.load(tmp_path / "small"), AutoModel.from_pretrained(tmp_path / "small")):
            assert torch.equal(again.eval()(**batch).last_hidden_state, expected)
        with mh.silence(small, {0: [0, 1]}):
            silenced = small(**batch).last_hidden_state
        torch.testing.assert_close(fewer(**batch).last_hidden_state, silenced, rtol=1e-4, atol=1e-5)
    assert tuple(fewer.encoder.layer[0].attention.self.key.weight.shape) == (5, 20)


def test_refit_and_layer_fit_bring_a_merged_model_closer():
    model = decoder()
    errors = []
    for options in ({"refit": False}, {"refit": False, "fit_steps": 20}, {"refit": True}):
        small = mh.merge(model, 1, BATCHES * 3, **options)
        with torch.no_grad():
            errors.append(float((small(BATCHES[0]) - model(BATCHES[0])).square().mean()))
    assert max(errors[1:]) < errors[0]


def test_groups_are_of_equal_size_and_close():
    points = torch.tensor([0.0, 9.0, 0.1, 5.0, 9.2, 5.3, 0.3, 9.1, 5.1])
    groups = groups_by_distance((points[:, None] - points).abs(), 3)
    assert groups == [[0, 2, 6], [1, 4, 7], [3, 5, 8]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_heads": 3}, "does not divide; expected one of 1, 2"),
        ({"kv_heads": 8}, "does not divide"),
        ({"kv_heads": 0}, "at least 1"),
        ({"kv_heads": True}, "at least 1"),
        ({"kv_heads": 4}, "already has as few key heads"),
        ({"kv_heads": {}}, "got none"),
        ({"kv_heads": {7: 2}}, "7"),
        ({"kv_heads": 2, "how": "sum"}, "how: got 'sum'"),
        ({"kv_heads": 2, "grouping": "x"}, "grouping"),
        ({"kv_heads": 2, "recover": -1}, "recover: got -1"),
        ({"kv_heads": 2, "batches": []}, "at least one"),
    ],
)
def test_refusals(options, words):
    model = decoder()
    with pytest.raises(ValueError, match=words):
        mh.merge(model, **{"batches": BATCHES} | options)


def test_a_merged_llama_is_a_plain_llama(tmp_path):
    """Where the class has a number of key heads, transformers loads the folder without us."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    sizes = {
        "vocab_size": 17,
        "hidden_size": 12,
        "intermediate_size": 7,
        "num_hidden_layers": 1,
        "head_dim": 4,
    }
    model = LlamaForCausalLM(llama_config(**sizes, num_attention_heads=3, num_key_value_heads=3)).eval()
    small = mh.merge(model, 1, [{"input_ids": BATCHES[0]}], refit=False)
    mh.save(small, tmp_path / "small")
    config = LlamaConfig.from_pretrained(tmp_path / "small")
    assert (config.num_attention_heads, config.num_key_value_heads) == (3, 1)
    assert not hasattr(config, "quantization_config")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "small").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(BATCHES[0]).logits, small(BATCHES[0]).logits)
