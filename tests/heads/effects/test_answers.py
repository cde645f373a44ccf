"""What models say, in words: every kind of model, plain and with heads silenced."""

import pytest
import torch
import transformers as hf
from tests.helpers.models import bert_config, gpt2_config, t5_config, vit_config
from torch import nn

import manyheads as mh
from manyheads.heads.effects.answer_items import token_text, with_signs
from manyheads.heads.effects.answers import Sentences, answer, kind_of
from manyheads.heads.effects.questions import ask
from manyheads.nn.transformers import Decoder, Encoder, Seq2Seq
from manyheads.tasks.language import MaskedLanguage


class Words:
    """A tokenizer of words w0, w1, ...: 0 is special, 1 is the mask, 2 starts, 3 ends."""

    mask_token_id, bos_token_id, eos_token_id = 1, 2, 3
    all_special_ids = (0,)

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(f"w{i}" for i in ids if not (skip_special_tokens and i < 4))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(5)


def test_next_tokens_after_the_last_that_is_no_padding():
    config = gpt2_config(
        vocab_size=97, n_embd=15, n_layer=2, n_head=3, n_positions=19, bos_token_id=2, eos_token_id=3
    )
    model = hf.GPT2LMHeadModel(config).eval()
    ids = torch.randint(97, (1, 7))
    said = answer(model, Words(), {"input_ids": ids})
    assert said["kind"] == "next"
    with torch.no_grad():
        p, best = model(ids).logits[0, -1].softmax(-1).topk(5)
    assert [word for word, _ in said["items"]] == [f"w{i}" for i in best.tolist()]
    torch.testing.assert_close(torch.tensor([x for _, x in said["items"]]), p, atol=1e-6, rtol=0)
    padded = {
        "input_ids": torch.cat([ids, ids[:, :2]], 1),
        "attention_mask": torch.tensor([[1] * 7 + [0] * 2]),
    }
    again = answer(model, Words(), padded)
    assert dict(again["items"]) == pytest.approx(dict(said["items"]), abs=2e-6)


@pytest.mark.parametrize("kind", ["next", "mask", "class", "neighbours"])
def test_a_model_that_has_run_is_not_run_again(kind, monkeypatch):
    makes = {
        "next": lambda: Decoder(12, heads=3, layers=1, vocabulary=101),
        "mask": lambda: hf.BertForMaskedLM(bert_config()),
        "class": lambda: hf.BertForSequenceClassification(bert_config()),
        "neighbours": lambda: hf.BertModel(bert_config()),
    }
    model = makes[kind]().eval()
    ids = torch.tensor([[0, 11, 1, 13, 17, 0]])
    others = torch.randn(3, 15)
    known = Sentences(["one", "two", "three"], [], others) if kind == "neighbours" else None
    wanted = answer(model, Words(), ids, kind=kind, sentences=known)
    with torch.no_grad():
        result = model(ids)
    monkeypatch.setattr(model, "forward", lambda *_, **__: pytest.fail("it ran again"))
    assert answer(model, Words(), ids, kind=kind, sentences=known, result=result) == wanted


def test_one_token_is_answered_when_the_kind_is_known():
    model = Decoder(12, heads=3, layers=1, vocabulary=101).eval()
    ids = torch.tensor([[5]])
    said = answer(model, Words(), ids, kind="next", top=1)
    assert said["items"][0][0] == f"w{int(model(ids)[0, -1].argmax())}"


def test_a_silenced_model_says_something_else():
    model = Decoder(12, heads=3, layers=2, vocabulary=101).eval()
    ids = torch.randint(101, (1, 7))
    before = answer(model, Words(), ids)
    with mh.silence(model, {0: [0, 1, 2], 1: [0, 1, 2]}):
        after = answer(model, Words(), ids)
        wanted = model(ids)[0, -1].softmax(-1).max().item()
    assert after["items"][0][1] == pytest.approx(wanted, abs=2e-6)
    assert after["items"] != before["items"]


def test_the_hidden_token_or_else_the_last_word_is_filled_in():
    model = hf.BertForMaskedLM(bert_config()).eval()
    ids = torch.tensor([[0, 11, 1, 13, 17, 0]])
    said = answer(model, Words(), {"input_ids": ids})
    assert (said["kind"], said["place"]) == ("mask", 2)
    with torch.no_grad():
        logits = model(ids).logits[0, 2]
    logits[1] = -torch.inf
    assert said["items"][0][0] == f"w{int(logits.argmax())}"
    ids = torch.tensor([[0, 11, 7, 13, 17, 0]])
    said = answer(model, Words(), {"input_ids": ids})
    assert said["place"] == 4
    ids[0, 4] = 1
    again = answer(model, Words(), {"input_ids": ids})
    assert said == again


def test_our_own_masked_model():
    model = MaskedLanguage(vocabulary=101, d_model=12, heads=3, layers=2).eval()
    batch = {"ids": torch.tensor([[11, 1, 13]]), "lengths": torch.tensor([3])}
    said = answer(model, Words(), batch)
    assert (said["kind"], said["place"]) == ("mask", 1)
    assert answer(model, None, batch) is None


def test_classes_by_their_names():
    config = bert_config(num_labels=3, id2label={0: "bad", 1: "fair", 2: "good"})
    model = hf.BertForSequenceClassification(config).eval()
    ids = torch.randint(97, (1, 5))
    said = answer(model, Words(), {"input_ids": ids})
    with torch.no_grad():
        p = model(ids).logits[0].softmax(-1)
    assert said["kind"] == "class"
    assert dict(said["items"]) == pytest.approx(
        dict(zip(["bad", "fair", "good"], p.tolist(), strict=True)), abs=1e-6
    )
    assert [x for _, x in said["items"]] == sorted((x for _, x in said["items"]), reverse=True)


def test_a_single_score_is_said_as_it_is():
    model = hf.BertForSequenceClassification(bert_config(num_labels=1)).eval()
    ids = torch.randint(97, (1, 5))
    said = answer(model, Words(), {"input_ids": ids})
    assert said == {
        "kind": "amount",
        "items": [["LABEL_0", pytest.approx(model(ids).logits.item(), abs=1e-6)]],
    }


def test_labels_of_tokens_that_stand_out():
    config = bert_config(num_labels=2, id2label={0: "O", 1: "NAME"})
    model = hf.BertForTokenClassification(config).eval()
    ids = torch.randint(97, (1, 11))
    with torch.no_grad():
        model.classifier.bias.copy_(-model(ids).logits[0].mean(0))  # both classes occur
    said = answer(model, Words(), {"input_ids": ids}, top=11)
    chosen = model(ids).logits[0].argmax(-1).tolist()
    usual = max(set(chosen), key=chosen.count)
    wanted = [f"w{ids[0, i]}: {config.id2label[c]}" for i, c in enumerate(chosen) if c != usual]
    assert wanted
    assert [name for name, _ in said["items"]] == wanted


def test_classes_of_tokens_are_asked_again_without_a_head():
    config = bert_config(num_labels=3, id2label={0: "O", 1: "NAME", 2: "DATE"})
    model = hf.BertForTokenClassification(config).eval()
    with torch.no_grad():
        model.classifier.weight.mul_(50)
    batch = {"input_ids": torch.randint(4, 97, (1, 11))}
    reply, question = ask(model, batch, Words())
    chosen = model(**batch).logits[0].argmax(-1).tolist()
    usual = max(set(chosen), key=chosen.count)
    told = [i for i, one in enumerate(chosen) if one != usual][:5] or list(range(5))
    with mh.silence(model, {0: [1], 1: [0, 2]}), torch.no_grad():
        result = model(**question.batch)
    best = result.logits[0].softmax(-1).max(-1)
    wanted = [f"w{batch['input_ids'][0, i]}: {config.id2label[best.indices[i].item()]}" for i in told]
    assert [name for name, _ in question.answer(result)] == wanted
    assert [p for _, p in question.answer(result)] == pytest.approx(best.values[told].tolist(), abs=1e-6)
    assert len(reply["items"]) == len(told)


def test_tokens_that_all_have_one_class_are_still_named():
    model = hf.BertForTokenClassification(bert_config(num_labels=2)).eval()
    with torch.no_grad():
        model.classifier.bias.copy_(torch.tensor([50.0, 0.0]))
    reply, _ = ask(model, {"input_ids": torch.tensor([[0, 11, 13, 17]])}, Words())  # 0 is special
    assert [name for name, _ in reply["items"]] == ["w11: LABEL_0", "w13: LABEL_0", "w17: LABEL_0"]


def test_a_recogniser_of_speech_answers_with_what_it_hears():
    from tests.helpers.labelled import LETTERS, VOCABULARY, tokenizer, wav2vec2

    model, batch = wav2vec2(hf.Wav2Vec2ForCTC), {"input_values": torch.zeros(1, 500)}
    assert kind_of(model, batch) == "transcript"
    a, b = (VOCABULARY.index(letter) for letter in LETTERS[:2])
    logits = torch.zeros(1, 6, len(VOCABULARY))
    for frame, letter in enumerate([a, a, 0, a, b, 0]):  # 0 is no letter
        logits[0, frame, letter] = 9.0
    said = answer(model, tokenizer(), batch, kind="transcript", result={"logits": logits})
    p = logits[0, 0].softmax(-1)[a].item()
    assert said["items"] == [["a a b", pytest.approx(p, abs=1e-6)]]


def test_pictures_have_classes_and_no_neighbours():
    config = vit_config(image_size=8, patch_size=4, num_labels=3)
    picture = {"pixel_values": torch.randn(1, 3, 8, 8)}
    said = answer(hf.ViTForImageClassification(config).eval(), None, picture)
    assert (said["kind"], len(said["items"])) == ("class", 3)
    assert answer(hf.ViTModel(config).eval(), None, picture) is None


def test_neighbours_are_those_of_the_model_in_hand():
    model = Encoder(d_model=12, heads=3, layers=2, vocabulary=101).eval()
    texts = ["a", "b", "c", "d"]
    ids, lengths = torch.randint(101, (4, 7)), torch.tensor([7, 5, 3, 2])
    known = Sentences(texts, [{"x": ids[:3], "lengths": lengths[:3]}, ids[3:, :2]])
    own = torch.randint(101, (1, 5))
    said = answer(model, Words(), own, sentences=known)
    assert said["kind"] == "neighbours"

    def wanted():
        with torch.no_grad():
            one = model(own).mean(1)
            each = [model(ids[i : i + 1, :n]).mean(1) for i, n in enumerate(lengths.tolist())]
        cosines = nn.functional.cosine_similarity(one, torch.cat(each))
        return sorted(zip(texts, cosines.tolist(), strict=True), key=lambda pair: -pair[1])

    for (text, cosine), (expected, value) in zip(said["items"], wanted(), strict=True):
        assert (text, cosine) == (expected, pytest.approx(value, abs=2e-6))
    with mh.silence(model, {1: [0, 2]}):
        after, expected = answer(model, Words(), own, sentences=known), wanted()
    assert [x for _, x in after["items"]] == pytest.approx([x for _, x in expected], abs=2e-6)
    itself = answer(model, Words(), ids[:1], sentences=known)
    assert "a" not in [text for text, _ in itself["items"]]
    assert answer(model, Words(), own) is None


def test_translations_of_transformers_models():
    config = t5_config(
        vocab_size=97, d_model=12, d_kv=5, d_ff=11, num_layers=2, num_heads=3, decoder_start_token_id=0
    )
    model = hf.T5ForConditionalGeneration(config).eval()
    ids = torch.randint(4, 97, (1, 7))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": ids}
    said = answer(model, Words(), batch)
    assert said["kind"] == "translation"
    target, total = [0], []
    with torch.no_grad():
        while len(target) < 49 and not (len(target) > 1 and target[-1] == 1):
            steps = (
                model(input_ids=ids, decoder_input_ids=torch.tensor([target])).logits[0, -1].log_softmax(-1)
            )
            target.append(int(steps.argmax()))
            total.append(steps.max())
    text = Words().decode(target[1:], skip_special_tokens=True)
    assert said["items"] == [[text, pytest.approx(torch.stack(total).mean().exp().item(), rel=1e-4)]]
    with mh.silence(model, {f"decoder.block.{i}.layer.1.EncDecAttention": [0, 1, 2] for i in range(2)}):
        assert answer(model, Words(), batch, kind="translation")["items"] != said["items"]


def test_translations_of_our_own():
    model = Seq2Seq(12, heads=3, layers=1, vocabulary=101).eval()
    batch = {
        "source": torch.randint(4, 101, (1, 5)),
        "target": torch.tensor([[2, 7, 9]]),
        "source_lengths": torch.tensor([5]),
    }
    assert kind_of(model, batch) == "translation"
    [[text, p]] = answer(model, Words(), batch)["items"]
    ids = mh.generate(model, batch["source"], start=2, end=3, new_tokens=48)
    assert text == Words().decode(ids[0].tolist(), skip_special_tokens=True)
    assert 0 < p <= 1


def test_tokens_that_nobody_sees_get_a_sign():
    assert [with_signs(text) for text in ("\t", "  ", " a b", "")] == ["⇥", "␣␣", " a b", ""]
    assert token_text(object(), 13) == "13"


def test_answers_to_questions_are_parts_of_the_context():
    from tests.helpers.labelled import bert, tokenizer

    model, reader = bert(hf.BertForQuestionAnswering), tokenizer()
    batch = dict(reader("ab c", "de fg h", return_tensors="pt"))
    assert kind_of(model, batch) == "answer"
    reply = answer(model, reader, batch)
    assert reply["kind"] == "answer"
    with torch.no_grad():
        result = model(**batch)
    start, end = result.start_logits[0].softmax(-1).tolist(), result.end_logits[0].softmax(-1).tolist()
    context = range(5, 10)  # [CLS] a ##b c [SEP] d ##e f ##g h [SEP]
    pairs = {(i, j): start[i] * end[j] for i in context for j in context if i <= j}
    best = max(pairs, key=pairs.get)
    text = reader.decode(batch["input_ids"][0, best[0] : best[1] + 1])
    assert reply["items"][0] == [text, pytest.approx(pairs[best], abs=1e-6)]


def test_a_regression_answers_with_its_amount():
    from tests.helpers.labelled import bert, tokenizer

    model = bert(hf.BertForSequenceClassification, num_labels=1)
    batch = dict(tokenizer()("ab c", return_tensors="pt"))
    with torch.no_grad():
        amount = model(**batch).logits.item()
    assert answer(model, tokenizer(), batch)["items"] == [["LABEL_0", pytest.approx(amount, abs=1e-5)]]
