"""Generation: on the cache as without it, ragged prompts as alone, beams against every sequence there is."""

import itertools

import pytest
import torch

from manyheads.nn.generate import Modules, _read_prompt, _search, generate, narrow
from manyheads.nn.transformers import Decoder, Encoder, Seq2Seq

POSITIONS = ["sinusoidal", "learned", "rotary", "alibi", "none"]
LENGTHS = torch.tensor([7, 3, 5])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(11)


def lively(model):
    """Weights so large that texts vary, depend on all that was written, and have no ties."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(
                parameter, std=1.0 if "embedding" in name else 2.5 * parameter.shape[1] ** -0.5
            )
    return model.eval()


def decoder(positions="rotary", vocabulary=23, **options):
    longest = {"max_length": 17} if positions == "learned" else {}
    options = {"positions": positions, "vocabulary": vocabulary, "tied": False} | longest | options
    return lively(Decoder(12, 3, 2, **options))


def greedy_without_cache(step, ids, count):
    """The definition: the most probable token, count times, from scratch each time."""
    for _ in range(count):
        ids = torch.cat([ids, step(ids)[:, -1:].argmax(-1)], dim=1)
    return ids[:, -count:]


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("lengths", [None, LENGTHS, torch.tensor([2, 3, 2])])
def test_greedy_is_the_definition_row_by_row(positions, lengths):
    model = decoder(positions, window=4, kv_heads=1)
    prompt = torch.randint(23, (3, 7))
    written = generate(model, prompt, new_tokens=9, lengths=lengths)
    assert written.shape == (3, 9)
    for row in range(3):
        alone = prompt[row : row + 1, : None if lengths is None else lengths[row]]
        assert torch.equal(written[row : row + 1], greedy_without_cache(model, alone, 9))
    assert len(written.unique()) > 3


def test_greedy_seq2seq_is_the_definition_row_by_row():
    model = lively(Seq2Seq(12, 3, 2, vocabulary=23, target_vocabulary=19))
    source = torch.randint(23, (3, 7))
    written = generate(model, source, new_tokens=9, lengths=LENGTHS, start=2)
    for row in range(3):
        alone = source[row : row + 1, : LENGTHS[row]]
        expected = greedy_without_cache(
            lambda target, alone=alone: model(alone, target), torch.tensor([[2]]), 9
        )
        assert torch.equal(written[row : row + 1], expected)


def test_seq2seq_writes_from_vectors():
    model = lively(Seq2Seq(12, 3, 1, target_vocabulary=19))
    assert generate(model, torch.randn(2, 5, 12), new_tokens=3, start=0).shape == (2, 3)


def test_a_text_that_ended_is_filled_up_and_all_ended_stops():
    model = decoder()
    prompt = torch.randint(23, (3, 7))
    free = generate(model, prompt, new_tokens=9)
    end = int(free[0, 2])
    written = generate(model, prompt, new_tokens=9, end=end)
    for row in range(3):
        places = (free[row] == end).nonzero()
        stop = int(places[0]) + 1 if len(places) else 9
        assert torch.equal(written[row, :stop], free[row, :stop])
        assert (written[row, stop:] == end).all()
    first = int((free[0] == end).nonzero()[0]) + 1
    assert generate(model, prompt[:1], new_tokens=9, end=end).shape == (1, first)


def every_sequence(logits_of, vocabulary, count, end, penalty):
    """The best of all sequences by log probability / length ** penalty.

    ``logits_of`` gives the logits (sequences, count, vocabulary) of each token of each sequence.
    """
    tokens = torch.tensor(list(itertools.product(range(vocabulary), repeat=count)))
    log_probability = logits_of(tokens).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    best, chosen = -torch.inf, None
    for sequence, steps in zip(tokens.tolist(), log_probability.tolist(), strict=True):
        stop = sequence.index(end) + 1 if end in sequence else count
        score = sum(steps[:stop]) / stop**penalty
        if score > best:
            best, chosen = score, sequence[:stop] + [end] * (count - stop)
    return chosen


@pytest.mark.parametrize("penalty", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("end", [None, 0, 2])
def test_a_wide_enough_beam_is_exhaustive_search(penalty, end):
    model = decoder(vocabulary=3)
    prompt, lengths = torch.randint(3, (7, 3)), torch.tensor([3, 2, 1, 3, 2, 1, 3])
    with torch.no_grad():
        written = generate(
            model, prompt, new_tokens=4, lengths=lengths, end=end, beams=81, length_penalty=penalty
        )
        for row in range(7):
            start = prompt[row, : lengths[row]].expand(81, -1)

            def logits_of(tokens, start=start):
                return model(torch.cat([start, tokens], dim=1))[:, start.shape[1] - 1 : -1]

            got = written[row].tolist()
            assert got + [end] * (4 - len(got)) == every_sequence(logits_of, 3, 4, end, penalty)


def test_a_wide_enough_beam_is_exhaustive_search_for_seq2seq():
    model = lively(Seq2Seq(12, 3, 1, vocabulary=5, target_vocabulary=3))
    source, lengths = torch.randint(5, (7, 4)), torch.tensor([4, 2, 3, 1, 4, 3, 2])
    with torch.no_grad():
        written = generate(model, source, new_tokens=4, lengths=lengths, start=1, end=0, beams=81)
        for row in range(7):
            alone = source[row : row + 1, : lengths[row]].expand(81, -1)

            def logits_of(tokens, alone=alone):
                return model(alone, torch.cat([torch.ones(81, 1, dtype=torch.int64), tokens], dim=1))[:, :-1]

            got = written[row].tolist()
            assert got + [0] * (4 - len(got)) == every_sequence(logits_of, 3, 4, 0, 1.0)


@pytest.mark.parametrize("end", [None, 3])
def test_a_beam_of_one_is_greedy(end):
    model = decoder(vocabulary=7)
    prompt = torch.randint(7, (3, 5))
    with torch.no_grad():
        ids, cache = _read_prompt(model, prompt, None, 6, 1, None)
        written = _search(Modules(model, cache), ids, 6, end, beams=1, length_penalty=1.0)
    assert torch.equal(written, generate(model, prompt, new_tokens=6, end=end))


def test_a_beam_finds_what_greedy_misses():
    model = decoder(vocabulary=7)
    prompt = torch.randint(7, (11, 5))

    def total(written):
        with torch.no_grad():
            scores = model(torch.cat([prompt, written], 1)).log_softmax(-1)[:, 4:-1]
        return scores.gather(-1, written[..., None]).sum((1, 2))

    greedy, beam = (total(generate(model, prompt, new_tokens=5, beams=beams)) for beams in (1, 5))
    assert (beam >= greedy - 1e-4).float().mean() > 0.9
    assert (beam > greedy + 1e-2).any()


def test_sampling_follows_the_probabilities():
    model = decoder(vocabulary=5)
    prompt = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        expected = (model(prompt)[0, -1] / 3.0).softmax(-1)
    seed = torch.Generator().manual_seed(1)
    written = generate(model, prompt.expand(20011, -1), new_tokens=1, temperature=3.0, generator=seed)
    share = written[:, 0].bincount(minlength=5) / 20011
    torch.testing.assert_close(share, expected, atol=0.015, rtol=0)


def test_the_same_seed_writes_the_same():
    model = decoder()
    prompt = torch.randint(23, (3, 7))

    def sample(seed):
        source = torch.Generator().manual_seed(seed)
        return generate(model, prompt, new_tokens=9, temperature=5.0, top_k=11, top_p=0.95, generator=source)

    assert torch.equal(sample(1), sample(1))
    assert not torch.equal(sample(1), sample(2))


def test_one_candidate_or_a_cold_temperature_is_greedy():
    model = decoder()
    prompt = torch.randint(23, (3, 7))
    greedy = generate(model, prompt, new_tokens=9)
    assert torch.equal(generate(model, prompt, new_tokens=9, top_k=1), greedy)
    assert torch.equal(generate(model, prompt, new_tokens=9, top_p=1e-9), greedy)
    assert torch.equal(generate(model, prompt, new_tokens=9, temperature=1e-4), greedy)


def test_narrow_keeps_the_most_probable():
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.7, 0.1, 0.1, 0.1]]).log()
    assert narrow(logits, top_k=2).isfinite()[0].tolist() == [False, True, False, True]
    assert narrow(logits, top_p=0.65).isfinite().tolist() == [
        [False, True, False, True],
        [True] + [False] * 3,
    ]
    assert narrow(logits, top_p=0.75).isfinite()[0].tolist() == [False, True, True, True]
    # first the two best, then what holds 0.5 of those two
    assert narrow(logits, top_k=2, top_p=0.5).isfinite()[0].tolist() == [False, True, False, False]
    assert torch.equal(narrow(logits, top_k=9, top_p=1.0), logits)


def test_dropout_is_off_while_writing_and_back_on_after():
    model = decoder(dropout=0.5).train()
    model.blocks[0].eval()
    prompt = torch.randint(23, (3, 7))
    written = generate(model, prompt, new_tokens=5)
    assert torch.equal(written, generate(model, prompt, new_tokens=5))
    assert model.training
    assert model.blocks[1].training
    assert not model.blocks[0].training


def test_bad_input_is_named():
    model, prompt = decoder("learned"), torch.randint(23, (3, 7))

    def refuse(match, model=model, prompt=prompt, error=ValueError, **options):
        with pytest.raises(error, match=match):
            generate(model, prompt, **{"new_tokens": 5} | options)

    refuse("new_tokens: expected at least 1, got 0", new_tokens=0)
    refuse(r"new_tokens: 7 tokens and 12 new ones need 18 positions, expected at most 17", new_tokens=12)
    refuse("beams: expected at least 1, got 0", beams=0)
    refuse("beams: expected 1 with temperature, top_k or top_p, got 2", beams=2, top_k=5)
    refuse("top_k: expected at least 1, got 0", top_k=0)
    refuse("top_p: expected a share above 0 and up to 1, got 1.5", top_p=1.5)
    refuse("temperature: expected more than 0", temperature=0.0)
    refuse(r"lengths: expected 3 numbers from 1 to 7, got \[7, 0, 2\]", lengths=torch.tensor([7, 0, 2]))
    refuse(r"lengths: expected 3 numbers from 1 to 7, got \[7, 2\]", lengths=torch.tensor([7, 2]))
    refuse(r"prompt: expected \(batch, length\) with at least one id, got \(3, 0\)", prompt=prompt[:, :0])
    refuse("ids: expected 0 to 22", prompt=prompt + 20)
    refuse("model: expected a Decoder with a vocabulary", model=Decoder(12, 3, 1))
    refuse("model: expected a Seq2Seq with a target vocabulary", model=Seq2Seq(12, 3, 1))
    refuse("start: expected the id", model=Seq2Seq(12, 3, 1, vocabulary=23))
    refuse("model: expected a Decoder or a Seq2Seq, got Encoder", model=Encoder(12, 3, 1), error=TypeError)
    chunked = Decoder(12, 3, 1, vocabulary=23, chunk=4)
    refuse("a decoder with chunks takes prompts of equal lengths", model=chunked, lengths=LENGTHS)
    assert generate(model, prompt, new_tokens=11).shape == (3, 11)
