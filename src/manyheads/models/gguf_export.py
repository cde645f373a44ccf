"""GGUF, the file format of llama.cpp, for models with the layers of Llama, each with its number of heads.

llama.cpp has two architectures of that kind whose layers may have unequal numbers of heads: "deci", which is
Llama, with biases or not, and "openelm", which also normalises queries and keys, as Qwen3 does, and whose
output weights are those of the embedding. So a model is written as one of them, by the tensors it has. What
llama.cpp computes from the file is computed here with plain tensor operations from the file as it was
written, and compared with the model.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.common.compare_outputs import relative_difference, seeded_evaluation
from manyheads.models.no_heads import NoHeads
from manyheads.models.transformers_config import is_transformers

_DECI, _OPENELM = "deci", "openelm"
_TOLERANCE = 1e-4
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_PERMUTED = re.compile(r"attn_(q|k)\.(weight|bias)$")
_PROJECTION = re.compile(r"\.(q|k|v)_proj\.weight$")


def write(
    model: nn.Module, inputs: Mapping[str, Any], folder: Path, tokenizer: Any
) -> tuple[dict[str, float], list[str]]:
    """Write ``model.gguf``, read it back, compute its logits and compare them with the model's.

    Returns
    -------
    Differences from the model by what was compared, and notes.
    """
    import gguf

    architecture, tensors, heads = _tensors(model)
    config: Any = model.config
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor):
        raise ValueError(f"to: gguf is for models that read token ids, not {', '.join(inputs)}")
    file = folder / "model.gguf"
    writer = gguf.GGUFWriter(file, architecture)
    width = _head_width(model)
    writer.add_name(str(getattr(config, "name_or_path", "") or type(model).__name__))
    writer.add_block_count(len(heads))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(_feed_forward(tensors, len(heads)))
    writer.add_head_count([count for count, _ in heads])
    writer.add_head_count_kv([count for _, count in heads])
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(_base(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    notes = _add_vocabulary(writer, tokenizer, config.vocab_size)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.contiguous().numpy())
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    ids = ids[:1]
    with seeded_evaluation(model):
        expected = model(input_ids=ids, use_cache=False).logits
    error = relative_difference([expected.double()], [_logits(file, ids)])
    if not error <= _TOLERANCE:
        raise ValueError(
            f"to: gguf cannot take {type(model).__name__}: what llama.cpp computes from these weights "
            f"differs by {error:.1e}; expected at most {_TOLERANCE:.0e}. Nothing was written"
        )
    return {"the formula of llama.cpp": error}, notes


def _refuse(model: nn.Module, why: str) -> ValueError:
    return ValueError(f"to: gguf cannot take {type(model).__name__}: {why}")


def _tensors(model: Any) -> tuple[str, dict[str, Tensor], list[tuple[int, int]]]:
    """The architecture, the weights by the names of llama.cpp, and heads and key heads of each layer."""
    import gguf

    if not is_transformers(model) or not hasattr(model, "lm_head"):
        raise _refuse(model, "it is not a language model of transformers")
    _check_config(model)
    layers = {int(match[1]) for name, _ in model.named_modules() if (match := _LAYER.search(f"{name}."))}
    state = model.state_dict()
    normed = any(name.endswith(".q_norm.weight") for name in state)
    architecture = _OPENELM if normed else _DECI
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.OPENELM if normed else gguf.MODEL_ARCH.DECI, len(layers))
    width = _head_width(model)
    heads = [_heads(model, number, width) for number in range(len(layers))]
    factors = _frequency_factors(model, width)
    output: Tensor = model.get_output_embeddings().weight
    tensors: dict[str, Tensor] = {}
    packed: dict[int, list[Tensor]] = {}
    for name, tensor in state.items():
        match = _LAYER.search(name)
        layer = int(match[1]) if match else None
        if name == "lm_head.weight":
            continue
        if normed and layer is not None and _PROJECTION.search(name):
            packed.setdefault(layer, []).append(tensor)
            continue
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        of_all_heads = name.endswith((".q_norm.weight", ".k_norm.weight")) and tensor.numel() != width
        if new is None or new == "output.bias" or (normed and (of_all_heads or new.endswith(".bias"))):
            at = "" if layer is None else f"layer {layer} has "
            raise _refuse(model, f"{at}{name}, which its architecture {architecture} does not have")
        if layer is not None and heads[layer] == (0, 0) and ".attn_" in new:
            continue  # the norm before attention that is not there
        if not normed and _PERMUTED.search(new):
            count = heads[layer or 0]["_k." in new]
            tensor = tensor.view(count, 2, width // 2, -1).transpose(1, 2).reshape(tensor.shape)
        tensors[new] = tensor
    if normed:
        _check_openelm(model, heads, factors, model.get_input_embeddings().weight is output)
        tensors |= {f"blk.{layer}.attn_qkv.weight": torch.cat(parts) for layer, parts in packed.items()}
    else:
        tensors["output.weight"] = output.detach()
        if factors is not None:
            tensors["rope_freqs.weight"] = factors
    return architecture, {name: tensor.detach().float() for name, tensor in tensors.items()}, heads


def _check_openelm(model: Any, heads: list[tuple[int, int]], factors: Tensor | None, tied: bool) -> None:
    """Refuse what the architecture that normalises queries and keys does not have."""
    if not tied:
        raise _refuse(model, "its output weights are not those of its embedding, as openelm's are")
    if (0, 0) in heads:
        raise _refuse(model, f"layer {heads.index((0, 0))} has no heads, and each of openelm's has some")
    if factors is not None:
        raise _refuse(model, "its rotary positions are scaled, and openelm's are not")


def _check_config(model: Any) -> None:
    """Refuse what the tensors do not show."""
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    used = bool(kinds - {"full_attention"}) if kinds else getattr(config, "use_sliding_window", True)
    if window is not None and used:
        raise _refuse(model, f"its layers attend to the last {window} tokens only")
    if getattr(config, "hidden_act", None) != "silu":
        raise _refuse(model, f"its layers compute {getattr(config, 'hidden_act', None)}, not silu")
    missing = [name for name in ("rms_norm_eps", "max_position_embeddings") if not hasattr(config, name)]
    if missing:
        raise _refuse(model, f"its config has no {missing[0]}")


def _head_width(model: Any) -> int:
    for module in model.modules():
        if hasattr(module, "q_proj") and hasattr(module, "head_dim"):
            return int(module.head_dim)
    raise _refuse(model, "it has no attention with a q_proj")


def _heads(model: Any, number: int, width: int) -> tuple[int, int]:
    """Heads and key heads of a layer."""
    for name, module in model.named_modules():
        if (match := _LAYER.search(f"{name}.")) and int(match[1]) == number:
            if isinstance(module, NoHeads):
                if module.bias is not None:
                    raise _refuse(model, f"layer {number} has a bias in place of attention")
                if number == 0:
                    raise _refuse(model, "layer 0 has no heads, and llama.cpp reads the width of heads there")
                return 0, 0
            if hasattr(module, "q_proj"):
                return module.q_proj.weight.shape[0] // width, module.k_proj.weight.shape[0] // width
    raise _refuse(model, f"layer {number} has no attention with a q_proj")


def _feed_forward(tensors: Mapping[str, Tensor], layers: int) -> list[int]:
    return [tensors[f"blk.{number}.ffn_up.weight"].shape[0] for number in range(layers)]


def _base(config: object) -> float:
    rope = getattr(config, "rope_parameters", None) or {}
    return float(rope.get("rope_theta", getattr(config, "rope_theta", 10000.0)))


def _frequency_factors(model: Any, width: int) -> Tensor | None:
    """By what the frequencies of the rotation are divided; None if they are those of the base."""
    rotary = next(
        (part for part in model.modules() if isinstance(getattr(part, "inv_freq", None), Tensor)), None
    )
    if rotary is None:
        raise _refuse(model, "it has no rotary positions")
    if "dynamic" in str(getattr(rotary, "rope_type", "")) or getattr(rotary, "rope_type", "") == "longrope":
        raise _refuse(model, f"its rotary positions are {rotary.rope_type}: they depend on the length")
    if getattr(rotary, "attention_scaling", 1.0) != 1.0:
        raise _refuse(model, "its rotary positions scale attention, too")
    if 2 * rotary.inv_freq.numel() != width:
        raise _refuse(model, f"it rotates {2 * rotary.inv_freq.numel()} of {width} numbers of each head")
    plain = _base(model.config) ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    factors = plain / rotary.inv_freq.double()
    return None if torch.allclose(factors, torch.ones_like(factors), rtol=1e-5) else factors


def _add_vocabulary(writer: Any, tokenizer: Any, size: int) -> list[str]:
    """Write the tokens of a byte-level tokenizer; without one, llama.cpp takes token ids."""
    kind, tokenizer_json = None, {}
    if hasattr(tokenizer, "backend_tokenizer"):
        tokenizer_json = json.loads(tokenizer.backend_tokenizer.to_str())
        kind = _splits(tokenizer_json)
    if kind is None:
        writer.add_tokenizer_model("none")
        reason = (
            "no tokenizer" if tokenizer is None else f"a {type(tokenizer).__name__} that is not byte-level"
        )
        return [f"it takes token ids: there is {reason}"]
    tokens, kinds = [f"[PAD{number}]" for number in range(size)], [5] * size
    for token, number in tokenizer_json["model"]["vocab"].items():
        tokens[number], kinds[number] = token, 1
    for added in tokenizer_json.get("added_tokens", ()):
        tokens[added["id"]], kinds[added["id"]] = added["content"], 3 if added["special"] else 4
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer_json["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    for name in ("bos", "eos"):
        number = getattr(tokenizer, f"{name}_token_id", None)
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    bos = getattr(tokenizer, "bos_token_id", None)
    writer.add_add_bos_token(bos is not None and tokenizer("a")["input_ids"][:1] == [bos])
    if isinstance(getattr(tokenizer, "chat_template", None), str):
        writer.add_chat_template(tokenizer.chat_template)
    return []


def _splits(tokenizer_json: Mapping[str, Any]) -> str | None:
    """How a byte-level tokenizer splits text first, by llama.cpp's name; None for others."""
    pre_tokenizer = tokenizer_json.get("pre_tokenizer") or {}
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    kinds = [step.get("type") for step in steps]
    if tokenizer_json.get("model", {}).get("type") != "BPE" or kinds[-1:] != ["ByteLevel"]:
        return None
    if len(steps) == 1:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"]:
        return "smollm" if steps[0].get("individual_digits") else None
    pattern = str((steps[0].get("pattern") or {}).get("Regex", ""))
    if kinds != ["Split", "ByteLevel"] or "(?i:'s|'t|'re|'ve|'m|'ll|'d)" not in pattern:
        return None
    return "llama-bpe" if r"\p{N}{1,3}" in pattern else "qwen2" if r"|\p{N}|" in pattern else None


def _logits(file: Path, ids: Tensor) -> Tensor:
    """What llama.cpp computes from a file, in float64: (batch, length, vocabulary)."""
    import gguf

    reader = gguf.GGUFReader(file)
    tensors = {x.name: torch.from_numpy(x.data.copy()).double() for x in reader.tensors}
    architecture = reader.fields["general.architecture"].contents()

    def value(name: str) -> Any:
        return reader.fields[f"{architecture}.{name}"].contents()

    eps, width = value("attention.layer_norm_rms_epsilon"), value("attention.key_length")
    step = torch.arange(0, width, 2, dtype=torch.float64)
    angles = value("rope.freq_base") ** (-step / width) / tensors.get("rope_freqs.weight", 1.0)
    phases = torch.arange(ids.shape[1], dtype=torch.float64)[:, None] * angles  # (length, width / 2)

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], tensors[f"{name}.weight"], eps)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def rotate(x: Tensor) -> Tensor:
        """Pairs are neighbours in deci, and half a head apart in openelm."""
        cos, sin = phases.cos(), phases.sin()
        if architecture == _DECI:
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
        a, b = x[..., : width // 2], x[..., width // 2 :]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def attend(y: Tensor, prefix: str, heads: int, key_heads: int) -> Tensor:
        counts = [heads, key_heads, key_heads]
        if architecture == _DECI:
            parts = [linear(y, f"{prefix}.attn_{part}") for part in "qkv"]
        else:
            parts = list(linear(y, f"{prefix}.attn_qkv").split([count * width for count in counts], -1))
        q, k, v = (
            part.reshape(*y.shape[:-1], count, width).transpose(1, 2)
            for part, count in zip(parts, counts, strict=True)
        )
        if architecture == _OPENELM:
            q, k = norm(q, f"{prefix}.attn_q_norm"), norm(k, f"{prefix}.attn_k_norm")
        k, v = (part.repeat_interleave(heads // key_heads, 1) for part in (rotate(k), v))
        scores = rotate(q) @ k.transpose(-1, -2) / math.sqrt(width)
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        return linear((weights @ v).transpose(1, 2).flatten(-2), f"{prefix}.attn_output")

    x: Tensor = tensors["token_embd.weight"][ids]
    head_counts = zip(value("attention.head_count"), value("attention.head_count_kv"), strict=True)
    for number, (heads, key_heads) in enumerate(head_counts):
        prefix = f"blk.{number}"
        if heads:
            x = x + attend(norm(x, f"{prefix}.attn_norm"), prefix, heads, key_heads)
        y = norm(x, f"{prefix}.ffn_norm")
        y = F.silu(linear(y, f"{prefix}.ffn_gate")) * linear(y, f"{prefix}.ffn_up")
        x = x + linear(y, f"{prefix}.ffn_down")
    return linear(norm(x, "output_norm"), "output" if "output.weight" in tensors else "token_embd")
