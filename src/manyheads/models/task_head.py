"""What the output layer of a transformers model is for, read off its class; and the names of its classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from torch import nn

TaskKind = Literal[
    "sequence-classification",
    "token-classification",
    "question-answering",
    "seq2seq",
    "causal-lm",
    "masked-lm",
    "image-classification",
    "audio-classification",
    "ctc",
    "speech-seq2seq",
]
# In which of transformers' tables a class of each kind is listed, and how the names of such classes end. A
# class that stands in several tables (BART fills in masks, too) is of the first kind.
_TABLES: dict[TaskKind, tuple[str, str]] = {
    "sequence-classification": ("SEQUENCE_CLASSIFICATION", "ForSequenceClassification"),
    "token-classification": ("TOKEN_CLASSIFICATION", "ForTokenClassification"),
    "question-answering": ("QUESTION_ANSWERING", "ForQuestionAnswering"),
    "seq2seq": ("SEQ_TO_SEQ_CAUSAL_LM", "ForSeq2SeqLM"),
    "causal-lm": ("CAUSAL_LM", "ForCausalLM"),
    "masked-lm": ("MASKED_LM", "ForMaskedLM"),
    "image-classification": ("IMAGE_CLASSIFICATION", "ForImageClassification"),
    "audio-classification": ("AUDIO_CLASSIFICATION", "ForAudioClassification"),
    "ctc": ("CTC", "ForCTC"),
    "speech-seq2seq": ("SPEECH_SEQ_2_SEQ", "ForSpeechSeq2Seq"),
}


def task_kind(model: nn.Module) -> TaskKind | None:
    """What a model was trained to answer, by the tables in which transformers lists its class.

    A class of the user's counts as the transformers class that it inherits from, or as what its name ends in.
    None for a model without a task head, and for a task that has no labels here.

    >>> from transformers import BertConfig, BertForTokenClassification, BertModel
    >>> sizes = {"hidden_size": 6, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 5}
    >>> config = BertConfig(vocab_size=11, **sizes)
    >>> task_kind(BertForTokenClassification(config)), task_kind(BertModel(config))
    ('token-classification', None)
    """
    if not hasattr(model, "config"):
        return None
    from transformers.models.auto import modeling_auto

    names = [kind.__name__ for kind in type(model).__mro__]
    for name in names:
        fitting: list[TaskKind] = []
        for kind, (table, _) in _TABLES.items():
            classes = getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES", {}).values()
            if any(name == one or (isinstance(one, tuple) and name in one) for one in classes):
                fitting.append(kind)
        if fitting == ["causal-lm", "masked-lm"] and not _reads_forwards(model):
            return "masked-lm"
        if fitting:
            return fitting[0]
    endings = (kind for name in names for kind, (_, ending) in _TABLES.items() if name.endswith(ending))
    return next(endings, None)


def _reads_forwards(model: nn.Module) -> bool:
    """Whether a class that can be either kind of language model was configured as a causal one."""
    config = getattr(model, "config", None)
    return bool(getattr(config, "is_decoder", False) or getattr(config, "causal", False))


def kinds() -> tuple[str, ...]:
    """The tasks whose labels can be read.

    >>> len(kinds())
    10
    """
    return get_args(TaskKind)


def class_names(model: nn.Module) -> dict[int, str]:
    """The names of the classes that a model knows, by number: as transformers keeps them, or our classifiers.

    >>> from manyheads.nn.transformers import Encoder
    >>> class_names(Encoder(d_model=4, heads=2, layers=1, vocabulary=7))
    {}
    """
    named: Mapping[int, str] | None = getattr(getattr(model, "config", None), "id2label", None)
    if named:
        return {int(number): str(name) for number, name in named.items()}
    return {number: str(name) for number, name in enumerate(getattr(model, "labels", None) or [])}
