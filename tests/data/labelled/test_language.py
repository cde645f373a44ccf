"""Language models, chats and encoder-decoders: against the model's own loss, token by token."""

import math

import pytest
import sacrebleu
import torch
import transformers as hf
from tests.helpers.labelled import bert, gpt2, t5, tokenizer, write_csv, write_lines

import manyheads as mh
from manyheads.common.run_batch import run

TEXTS = ["ab cd e", "f gh", "ijk l m no p", "q r"]
TEMPLATE = (
    "{% for turn in messages %}{{ turn['role'][0] + ' ' + turn['content'] + ' . ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a ' }}{% endif %}"
)


def own_loss(model, data):
    """The loss of each row as the model itself computes it, alone in its batch."""
    with torch.no_grad():
        return [model(**data.task.batch([example])).loss.item() for example in data.examples]


def loss_of(model, data):
    batch = data.task.batch(data.examples)
    with torch.no_grad():
        return data.loss(run(model, batch), batch).tolist()


def test_a_causal_model_predicts_every_next_token(tmp_path):
    model = gpt2(hf.GPT2LMHeadModel)
    data = mh.labelled(write_csv(tmp_path / "t.csv", {"text": TEXTS}), model, tokenizer())
    assert loss_of(model, data) == pytest.approx(own_loss(model, data), rel=1e-4)
    total = tokens = right = 0
    for text in TEXTS:
        ids = tokenizer()(text)["input_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        total -= sum(logits[i, ids[i + 1]].item() for i in range(len(ids) - 1))
        right += sum(int(logits[i].argmax()) == ids[i + 1] for i in range(len(ids) - 1))
        tokens += len(ids) - 1
    metrics = data.evaluate(model).metrics
    assert metrics["perplexity"].mean == pytest.approx(math.exp(total / tokens), rel=1e-4)
    assert metrics["accuracy"].mean == pytest.approx(right / tokens)
    assert metrics["perplexity"].low < metrics["perplexity"].mean < metrics["perplexity"].high


def test_long_texts_are_read_in_pieces(tmp_path):
    model = gpt2(hf.GPT2LMHeadModel)
    data = mh.labelled(write_csv(tmp_path / "t.csv", {"text": TEXTS}), model, tokenizer(), max_length=5)
    letters = sum(len(text.replace(" ", "")) for text in TEXTS)
    assert sum(len(example.inputs["input_ids"]) - 2 for example in data.examples) == letters
    assert max(data.sizes) == 5


def test_only_the_answer_of_a_chat_is_predicted(tmp_path):
    model = gpt2(hf.GPT2LMHeadModel)
    reader = tokenizer(chat_template=TEMPLATE)
    rows = [
        {"messages": [{"role": "user", "content": "bc d"}, {"role": "assistant", "content": "ef"}]},
        {"messages": [{"role": "user", "content": "g"}, {"role": "assistant", "content": "h i"}]},
    ]
    data = mh.labelled(write_lines(tmp_path / "chat.jsonl", rows), model, reader)
    assert any("chat template" in note for note in data.notes)
    example = next(example for example in data.examples if example.shown == "ef")
    tokens = reader.convert_ids_to_tokens(example.inputs["input_ids"])
    start = next(i for i, label in enumerate(example.target) if label >= 0)
    assert tokens[start : start + 3] == ["e", "##f", "."]
    assert "u" in tokens[:start]  # the user's turn is read
    assert loss_of(model, data) == pytest.approx(own_loss(model, data), rel=1e-4)


def test_prompts_and_completions_are_read_alike_with_and_without_a_template(tmp_path):
    path = write_csv(tmp_path / "p.csv", {"prompt": ["bc d", "g"], "completion": ["ef", "h i"]})
    for reader in (tokenizer(), tokenizer(chat_template=TEMPLATE)):
        data = mh.labelled(path, gpt2(hf.GPT2LMHeadModel), reader)
        for example in data.examples:
            predicted = [i for i, label in enumerate(example.target) if label >= 0]
            text = "".join(reader.convert_ids_to_tokens([example.inputs["input_ids"][i] for i in predicted]))
            assert text.replace("##", "").rstrip(".[SEP]") == example.shown.replace(" ", "")


def test_a_conversation_without_an_answer_is_refused(tmp_path):
    rows = [{"messages": [{"role": "user", "content": "bc"}]}]
    with pytest.raises(ValueError, match=r"line 1 of .* has no conversation in 'messages'"):
        mh.labelled(write_lines(tmp_path / "c.jsonl", rows), gpt2(hf.GPT2LMHeadModel), tokenizer())


def test_a_masked_model_fills_in_the_same_tokens_every_time(tmp_path):
    model = bert(hf.BertForMaskedLM)
    path = write_csv(tmp_path / "t.csv", {"text": TEXTS})
    data, again = (mh.labelled(path, model, tokenizer()) for _ in range(2))
    assert [one.target for one in data.examples] == [one.target for one in again.examples]
    for example in data.examples:
        hidden = [i for i, label in enumerate(example.target) if label >= 0]
        assert hidden
        assert all(example.inputs["input_ids"][i] == 4 for i in hidden)
        assert 4 not in [token for i, token in enumerate(example.inputs["input_ids"]) if i not in hidden]
    assert loss_of(model, data) == pytest.approx(own_loss(model, data), rel=1e-4)
    assert set(data.evaluate(model).metrics) == {"perplexity", "accuracy"}


def test_an_encoder_decoder_is_scored_by_what_it_writes(tmp_path):
    model = t5()
    targets = ["c ab", "gh", "l m", "r q q"]
    path = write_csv(tmp_path / "t.csv", {"source": TEXTS, "target": targets})
    data = mh.labelled(path, model, tokenizer())
    batch = data.task.batch(data.examples)
    assert batch["decoder_input_ids"][:, 0].tolist() == [0] * 4
    assert loss_of(model, data) == pytest.approx(own_loss(model, data), rel=1e-3)
    metrics = data.evaluate(model).metrics
    assert set(metrics) == {"bleu", "chrf", "exact_match", "perplexity", "accuracy"}
    written = []
    for example in data.examples:
        ids = torch.tensor([example.inputs["input_ids"]])
        most = len(example.target) + 8
        generated = model.generate(ids, max_new_tokens=most, num_beams=1, do_sample=False)
        written.append(tokenizer().decode(generated[0], skip_special_tokens=True).strip())
    expected = sacrebleu.corpus_chrf(written, [[example.truth for example in data.examples]]).score
    assert metrics["chrf"].mean == pytest.approx(expected)
    # only sequences of the same lengths share a batch: a padded query of the decoder would count
    for each in data:
        assert bool((each["labels"] >= 0).all())


def test_texts_without_words_are_refused(tmp_path):
    path = write_lines(tmp_path / "t.jsonl", [{"text": ""}])
    with pytest.raises(ValueError, match=r"no text of .* has two tokens"):
        mh.labelled(path, gpt2(hf.GPT2LMHeadModel), tokenizer())
