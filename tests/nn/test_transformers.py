"""Encoder, Decoder and Seq2Seq: who sees whom, all positions, the tools of torch, bad input."""

import copy
import io

import pytest
import torch

from manyheads.nn import mask
from manyheads.nn.positions import Rotary
from manyheads.nn.transformers import Decoder, Encoder, Seq2Seq

POSITIONS = ["sinusoidal", "learned", "rotary", "alibi", "none"]
LENGTHS = torch.tensor([11, 7, 2])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(5)


def options(positions):
    return {"positions": positions, "max_length": 17 if positions == "learned" else None}


def ids(batch=3, length=11):
    return torch.randint(101, (batch, length))


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("positions", POSITIONS)
def test_order_is_seen_except_without_positions(positions):
    encoder = Encoder(12, 3, 2, vocabulary=101, **options(positions)).eval()
    x = ids(1)
    turned = encoder(x.flip(1)).flip(1)
    assert torch.allclose(encoder(x), turned, atol=1e-3) == (positions in ("none", "alibi"))


def test_alibi_sees_distance():
    encoder = Encoder(12, 3, 2, vocabulary=101, positions="alibi").eval()
    x = ids(1)
    order = torch.tensor([0, 5, 2, 3, 4, 1, 6, 7, 8, 9, 10])  # swaps two tokens
    assert not torch.allclose(encoder(x[:, order])[:, order], encoder(x), atol=1e-3)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("make", [Encoder, Decoder])
def test_a_padded_sequence_is_what_it_is_alone(make, positions):
    model = make(12, 3, 2, vocabulary=101, **options(positions)).eval()
    x = ids()
    together = model(x, lengths=LENGTHS)
    for row, length in enumerate(LENGTHS.tolist()):
        close(together[row, :length], model(x[row : row + 1, :length])[0])


@pytest.mark.parametrize("positions", POSITIONS)
def test_decoder_never_sees_later_tokens(positions):
    decoder = Decoder(12, 3, 2, vocabulary=101, **options(positions)).eval()
    x = ids()
    changed = x.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 101
    close(decoder(x)[:, :7], decoder(changed)[:, :7])
    assert not torch.allclose(decoder(x)[:, 7:], decoder(changed)[:, 7:], atol=1e-3)


@pytest.mark.parametrize("positions", POSITIONS)
def test_decoder_with_a_cache_is_the_decoder_without(positions):
    decoder = Decoder(12, 3, 2, vocabulary=101, cross=True, **options(positions)).eval()
    x, context, lengths = ids(), torch.randn(3, 5, 12), torch.tensor([5, 1, 3])
    with torch.no_grad():
        whole = decoder(x, context, context_lengths=lengths)
        cache = decoder.new_cache(11, context, context_lengths=lengths)
        pieces = [decoder(piece, cache=cache) for piece in x.split([5, 1, 1, 4], dim=1)]
    assert cache.length == 11
    close(torch.cat(pieces, 1), whole)
    with torch.no_grad(), pytest.raises(ValueError, match="11"):
        decoder(x[:, :1], cache=cache)


def test_cache_rows_can_be_chosen_and_repeated():
    decoder = Decoder(12, 3, 2, vocabulary=101, cross=True, positions="learned", max_length=17).eval()
    x, context, lengths = ids(), torch.randn(3, 5, 12), torch.tensor([5, 1, 3])
    rows = torch.tensor([2, 0, 2, 1])
    with torch.no_grad():
        whole = decoder(x[rows], context[rows], context_lengths=lengths[rows])
        cache = decoder.new_cache(11, context, context_lengths=lengths)
        decoder(x[:, :7], cache=cache)
        cache.reorder(rows)
        rest = decoder(x[rows, 7:], cache=cache)
    close(rest, whole[:, 7:])


def test_last_gives_the_last_logits_only():
    decoder = Decoder(12, 3, 2, vocabulary=101)
    x = ids()
    close(decoder(x, last=True), decoder(x)[:, -1:])


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_hidden_states_are_what_enters_and_leaves_each_block(norm):
    encoder = Encoder(12, 3, 3, vocabulary=101, norm=norm).eval()
    out, hidden = encoder(ids(), return_hidden=True)
    assert len(hidden) == 4
    for i, block in enumerate(encoder.blocks):
        close(block(hidden[i]), hidden[i + 1])
    close(encoder.norm(hidden[-1]), out)
    assert (norm == "post") == torch.equal(hidden[-1], out)


def test_seq2seq_is_its_encoder_and_decoder():
    model = Seq2Seq(12, 3, 2, vocabulary=101, target_vocabulary=53, decoder_layers=1).eval()
    source, target = ids(), torch.randint(53, (3, 7))
    logits, read, written = model(source, target, source_lengths=LENGTHS, return_hidden=True)
    assert logits.shape == (3, 7, 53)
    assert (len(read), len(written)) == (3, 2)
    assert torch.equal(logits, model(source, target, source_lengths=LENGTHS))
    row, length = 1, 7
    close(logits[row], model(source[row : row + 1, :length], target[row : row + 1])[0])
    short = model(source, target, source_lengths=LENGTHS, target_lengths=torch.tensor([7, 3, 5]))
    close(short[1, :3], logits[1, :3])


def test_seq2seq_shares_the_embedding_of_one_vocabulary():
    shared = Seq2Seq(12, 3, 1, vocabulary=101)
    assert shared.decoder.embedding is shared.encoder.embedding
    apart = Seq2Seq(12, 3, 1, vocabulary=101, target_vocabulary=101)
    assert apart.decoder.embedding is not apart.encoder.embedding


def test_vectors_in_and_out_without_a_vocabulary():
    x = torch.randn(2, 7, 12)
    assert Encoder(12, 3, 1)(x).shape == (2, 7, 12)
    assert Decoder(12, 3, 1)(x).shape == (2, 7, 12)
    assert Seq2Seq(12, 3, 1)(x, x[:, :5]).shape == (2, 5, 12)
    assert Seq2Seq(12, 3, 1, target_vocabulary=53)(x, torch.zeros(2, 5, dtype=torch.int64)).shape == (
        2,
        5,
        53,
    )


def test_tied_output_is_the_embedding():
    tied, untied = (Decoder(12, 3, 1, vocabulary=101, tied=t) for t in (True, False))
    assert tied.output is None
    assert untied.output.weight.shape == (101, 12)
    _, hidden = tied(ids(), return_hidden=True)
    close(tied(ids()[:0]), torch.zeros(0, 11, 101))
    x = ids()
    logits, hidden = tied(x, return_hidden=True)
    close(logits, tied.norm(hidden[-1]) @ tied.embedding.weight.T)


def test_masks_join_what_the_model_hides_itself():
    encoder = Encoder(12, 3, 2, vocabulary=101, positions="alibi").eval()
    x = ids()
    seen = encoder(x, lengths=LENGTHS, mask=mask.causal())
    changed = x.clone()
    changed[:, 1:] = (changed[:, 1:] + 1) % 101
    close(encoder(changed, lengths=LENGTHS, mask=mask.causal())[:, 0], seen[:, 0])


def test_rotary_can_be_given_and_turns_the_even_part_of_odd_heads():
    assert Encoder(12, 3, 1, positions=Rotary(2, base=77.0)).blocks[0].attention.rotary.base == 77.0
    assert Encoder(15, 3, 1, positions="rotary").blocks[0].attention.rotary.width == 4
    assert Encoder(12, 3, 1, positions="rotary", d_key=8).blocks[0].attention.rotary.width == 8


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_tokens_and_positions_start_equally_large(positions):
    encoder = Encoder(64, 4, 1, vocabulary=101, **options(positions))
    places = encoder.positions(torch.zeros(1, 17, 64))
    tokens = encoder.enter(torch.randint(101, (1, 17))) - places
    assert 0.5 < places.std() / tokens.std() < 2


@pytest.mark.parametrize("positions", POSITIONS)
def test_every_parameter_gets_a_gradient(positions):
    model = Seq2Seq(12, 3, 2, vocabulary=101, dropout=0.1, checkpoint=True, **options(positions))
    model(ids(), ids()[:, :5], source_lengths=LENGTHS).logsumexp(-1).sum().backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not without


@pytest.mark.parametrize("positions", POSITIONS)
def test_encoder_compiles_whole(positions):
    encoder = Encoder(12, 3, 2, vocabulary=101, **options(positions)).eval()
    x = ids()
    compiled = torch.compile(encoder, backend="aot_eager", fullgraph=True)
    close(compiled(x), encoder(x))


def test_seq2seq_compiles_with_lengths():
    model = Seq2Seq(12, 3, 1, vocabulary=101).eval()
    x = ids()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    close(compiled(x, x[:, :5], source_lengths=LENGTHS), model(x, x[:, :5], source_lengths=LENGTHS))


@pytest.mark.parametrize("positions", POSITIONS)
def test_encoder_exports(positions):
    encoder = Encoder(12, 3, 2, vocabulary=101, **options(positions)).eval()
    exported = torch.export.export(encoder, (ids(),))
    x = ids()
    close(exported.module()(x), encoder(x))


def test_copies_and_saved_weights_are_the_same_model():
    model = Seq2Seq(12, 3, 2, vocabulary=101, positions="learned", max_length=17, tied=False).eval()
    x = ids()
    expected = model(x, x)
    assert torch.equal(copy.deepcopy(model)(x, x), expected)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = Seq2Seq(12, 3, 2, vocabulary=101, positions="learned", max_length=17, tied=False).eval()
    assert not torch.equal(fresh(x, x), expected)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(fresh(x, x), expected)
    twin = copy.deepcopy(model)
    assert twin.decoder.embedding is twin.encoder.embedding


def test_under_autocast():
    model = Seq2Seq(12, 3, 2, vocabulary=101, positions="rotary")
    x = ids()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x, x, source_lengths=LENGTHS)
    logits.float().logsumexp(-1).sum().backward()
    torch.testing.assert_close(logits.float(), model(x, x, source_lengths=LENGTHS), atol=0.2, rtol=0.1)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"positions: expected a Rotary or one of sinusoidal.* got 'rope'"):
        Encoder(12, 3, 1, positions="rope")
    with pytest.raises(ValueError, match="max_length: expected a number with positions='learned'"):
        Encoder(12, 3, 1, positions="learned")
    with pytest.raises(ValueError, match=r"max_length: .* got max_length=17 with positions='rotary'"):
        Encoder(12, 3, 1, positions="rotary", max_length=17)
    with pytest.raises(ValueError, match="layers: expected at least 1, got 0"):
        Encoder(12, 3, 0)
    with pytest.raises(ValueError, match="vocabulary: expected at least 1, got 0"):
        Encoder(12, 3, 1, vocabulary=0)
    with pytest.raises(ValueError, match="heads"):
        Encoder(12, 5, 1, positions="rotary")
    encoder = Encoder(12, 3, 1, vocabulary=101, positions="learned", max_length=11)
    with pytest.raises(ValueError, match=r"ids: expected 0 to 100 \(vocabulary\), got 5 to 101"):
        encoder(torch.tensor([[5, 101]]))
    with pytest.raises(ValueError, match=r"ids: expected 0 to 100 \(vocabulary\), got -1 to 5"):
        encoder(torch.tensor([[5, -1]]))
    with pytest.raises(ValueError, match=r"ids: expected \(batch, length\), got \(2,\)"):
        encoder(torch.tensor([5, 1]))
    with pytest.raises(TypeError, match=r"ids: expected int64 or int32 .* got torch.float32"):
        encoder(torch.randn(2, 7, 12))
    with pytest.raises(ValueError, match=r"length: expected at most the 11 learned positions .* got 12"):
        encoder(ids(length=12))
    with pytest.raises(TypeError, match=r"x: expected vectors .* got torch.int64"):
        Encoder(12, 3, 1)(ids())
    with pytest.raises(ValueError, match=r"x: expected \(batch, length, 12\), got \(2, 7, 13\)"):
        Encoder(12, 3, 1)(torch.randn(2, 7, 13))
    with pytest.raises(ValueError, match="lengths"):
        encoder(ids(), lengths=torch.tensor([5, 5]))
    decoder = Decoder(12, 3, 1, vocabulary=101)
    with pytest.raises(ValueError, match="cache: got lengths or a context too"):
        decoder(ids(), lengths=LENGTHS, cache=decoder.new_cache(11))
    with pytest.raises(ValueError, match="context: got one, but this decoder has no cross-attention"):
        decoder.new_cache(11, torch.randn(3, 5, 12))
