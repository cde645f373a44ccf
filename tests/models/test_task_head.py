"""What a head is for, read off classes of transformers."""

import pytest
import transformers as hf
from tests.helpers.labelled import bert, gpt2, t5, vit, wav2vec2
from torch import nn

from manyheads.models.task_head import class_names, task_kind


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: bert(hf.BertForSequenceClassification), "sequence-classification"),
        (lambda: bert(hf.BertForTokenClassification), "token-classification"),
        (lambda: bert(hf.BertForQuestionAnswering), "question-answering"),
        (lambda: bert(hf.BertForMaskedLM), "masked-lm"),
        (lambda: bert(hf.BertModel), None),
        (lambda: bert(hf.BertForNextSentencePrediction), None),
        (lambda: gpt2(hf.GPT2LMHeadModel), "causal-lm"),
        (lambda: gpt2(hf.GPT2ForSequenceClassification), "sequence-classification"),
        (t5, "seq2seq"),
        (vit, "image-classification"),
        (lambda: wav2vec2(hf.Wav2Vec2ForCTC), "ctc"),
        (lambda: wav2vec2(hf.Wav2Vec2ForSequenceClassification), "audio-classification"),
        (lambda: nn.Linear(2, 2), None),
    ],
)
def test_the_task_is_read_off_the_class(make, kind):
    assert task_kind(make()) == kind


def test_a_class_that_fills_in_masks_and_writes_texts_writes_texts():
    sizes = {"d_model": 6, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    config = hf.BartConfig(vocab_size=11, decoder_attention_heads=2, **sizes)
    assert task_kind(hf.BartForConditionalGeneration(config)) == "seq2seq"


def test_a_class_of_ones_own_counts_as_what_it_inherits_from_or_is_called():
    class Mine(hf.BertForTokenClassification):
        pass

    class ThingForSequenceClassification(hf.BertModel):
        pass

    assert task_kind(bert(Mine)) == "token-classification"
    assert task_kind(bert(ThingForSequenceClassification)) == "sequence-classification"


def test_names_of_classes():
    assert class_names(bert(hf.BertForSequenceClassification, id2label={0: "a", 1: "b"})) == {0: "a", 1: "b"}
