"""What a model's config says about text: the size of its vocabulary, and how many positions it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Where configs keep how many positions a model has, by different names.
_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length")


def text_config(model: nn.Module) -> PretrainedConfig | None:
    """The config of a transformers model, or of the part that reads text; None for models that have none."""
    config: PretrainedConfig | None = getattr(model, "config", None)
    return config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config


def vocabulary_of(model: nn.Module) -> int | None:
    """The size of a model's vocabulary; None for a model without an embedding table.

    >>> vocabulary_of(nn.Sequential(nn.Embedding(7, 3))), vocabulary_of(nn.Linear(2, 3))
    (7, None)
    """
    if isinstance(size := getattr(text_config(model), "vocab_size", None), int):
        return size
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    return max(tables, default=None)


def positions_of(model: nn.Module) -> int | None:
    """The longest sequence that a model was made for; None when its config does not say.

    >>> from transformers import BertConfig, BertModel
    >>> sizes = {"hidden_size": 6, "num_attention_heads": 2, "num_hidden_layers": 1}
    >>> model = BertModel(BertConfig(max_position_embeddings=23, **sizes))
    >>> positions_of(model), positions_of(nn.Linear(2, 3))
    (23, None)
    """
    sizes = (getattr(text_config(model), name, None) for name in _POSITIONS)
    return next((size for size in sizes if isinstance(size, int) and size > 0), None)
