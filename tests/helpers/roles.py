"""A model whose heads have known roles, and a tokenizer."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece
from torch import Tensor, nn


class Known(nn.Module):
    """A language model of one layer whose heads were told what to do, by scores from positions and tokens."""

    NAMES = ("previous", "everything", "first", "same", "after same", "after same, written with a minus")

    def __init__(self, vocabulary: int = 131) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 24)
        torch.nn.init.normal_(self.embedding.weight, generator=torch.Generator().manual_seed(3))
        self.output = nn.Linear(6 * 24, 24, bias=False)
        signs = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, -1.0])
        self.output.weight = nn.Parameter((signs[:, None, None] * torch.eye(24)).flatten(0, 1).T)
        self.norm = nn.LayerNorm(24)
        nn.init.constant_(self.norm.bias, 5.0)
        self.head = nn.Linear(24, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        length = ids.shape[1]
        i, j = torch.arange(length)[:, None], torch.arange(length)
        same = (ids[:, :, None] == ids[:, None, :]) & (j < i)
        after = torch.cat([torch.zeros_like(same[..., :1]), same[..., :-1]], -1)
        everyone = torch.ones_like(same)
        wanted = [(j == i - 1) & everyone, everyone * 0, (j == 0) & everyone, same, after, after]
        scores = 20.0 * torch.stack([part.to(x.dtype) for part in wanted], 1)
        scores = scores.masked_fill(j > i, -torch.inf)
        values = x.unsqueeze(1).expand(-1, 6, -1, -1)
        nothing = torch.zeros_like(values)
        heads = nn.functional.scaled_dot_product_attention(nothing, nothing, values, attn_mask=scores)
        return self.head(self.norm(x + self.output(heads.transpose(1, 2).flatten(2))))


def tokenizer(**changes: Any) -> Any:
    known = "[PAD] [UNK] [CLS] [SEP] we did n ' t see the cats play ##ing . dog sees ##es im ##s cat"
    pieces = {piece: n for n, piece in enumerate(known.split(" "))}
    inner = Tokenizer(WordPiece(pieces, unk_token="[UNK]"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=inner, **names | changes)
