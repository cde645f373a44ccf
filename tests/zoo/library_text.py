"""Specs of text models of transformers, beyond those that tests/heads uses."""

from __future__ import annotations

from tests.zoo.library import Spec, Stack, left, pair, text, unmasked

BERT = {
    "vocab_size": 99, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 31, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
}  # fmt: skip
LLAMA = BERT | {"num_key_value_heads": 2, "head_dim": 6}
BART = {
    "vocab_size": 99, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 31, "decoder_ffn_dim": 31,
        "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
GPT = {
    "vocab_size": 99, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PAIR = frozenset({0, 1})


def bert(prefix: str = "encoder.layer.{}", out: str = "attention.output.dense") -> tuple[Stack, ...]:
    return (Stack("attentions", f"{prefix}.attention", f"{prefix}.{out}", "self"),)


def causal(path: str = "layers.{}.self_attn", out: str = "o_proj", kind: str = "causal") -> tuple[Stack, ...]:
    return (Stack("attentions", path, f"{path}.{out}", kind),)


def two(prefix: str = "", out: str = "out_proj") -> tuple[Stack, ...]:
    layers = f"{prefix}decoder.layers.{{}}"
    encoder = f"{prefix}encoder.layers.{{}}.self_attn"
    return (
        Stack("encoder_attentions", encoder, f"{encoder}.{out}", "self"),
        Stack(
            "decoder_attentions", f"{layers}.self_attn", f"{layers}.self_attn.{out}", "causal", counts=False
        ),
        Stack(
            "cross_attentions",
            f"{layers}.encoder_attn",
            f"{layers}.encoder_attn.{out}",
            "cross",
            counts=False,
        ),
    )


def t5() -> tuple[Stack, ...]:
    stacks = []
    for field, stack, number, module, kind in (
        ("encoder_attentions", "encoder", 0, "SelfAttention", "self"),
        ("decoder_attentions", "decoder", 0, "SelfAttention", "causal"),
        ("cross_attentions", "decoder", 1, "EncDecAttention", "cross"),
    ):
        path = f"{stack}.block.{{}}.layer.{number}.{module}"
        stacks.append(Stack(field, path, f"{path}.o", kind, counts=stack == "encoder"))
    return tuple(stacks)


SPECS = (
    # encoders
    Spec("Roberta", BERT | {"pad_token_id": 1}, bert(), text),
    Spec("Electra", BERT | {"embedding_size": 17}, bert(), text),
    Spec("Ernie", BERT, bert(), text),
    Spec("MegatronBert", BERT, bert("encoder.layer.{}"), text),
    Spec("RoFormer", BERT, bert(), text),
    Spec("RemBert", BERT | {"input_embedding_size": 17}, bert(), text),
    Spec("MPNet", BERT, bert(out="attention.attn.o"), text),
    Spec("ConvBert", BERT | {"embedding_size": 24, "conv_kernel_size": 3, "head_ratio": 2},
        (Stack("attentions", "encoder.layer.{}.attention", "encoder.layer.{}.attention.output.dense",
        "self", width=6),), text),
    Spec("DistilBert", {"vocab_size": 99, "dim": 24, "n_layers": 2, "n_heads": 4, "hidden_dim": 31,
        "max_position_embeddings": 128}, (Stack("attentions", "transformer.layer.{}.attention",
        "transformer.layer.{}.attention.out_lin", "self"),), text),
    Spec("Deberta", BERT | {"type_vocab_size": 0, "relative_attention": True, "pos_att_type": ["c2p",
        "p2c"], "max_relative_positions": 32}, bert(), text),
    Spec("DebertaV2", BERT | {"type_vocab_size": 0, "relative_attention": True, "pos_att_type": ["c2p",
        "p2c"], "position_buckets": 16, "max_relative_positions": 32}, bert(), text),
    Spec("XLNet", {"vocab_size": 99, "d_model": 24, "n_layer": 2, "n_head": 4, "d_inner": 31,
        "pad_token_id": 0}, (Stack("attentions", "layer.{}.rel_attn", "layer.{}.rel_attn.o", "self"),),
        unmasked),
    Spec("BigBird", BERT | {"attention_type": "original_full"}, bert(), text),
    Spec("Esm", BERT | {"pad_token_id": 1, "mask_token_id": 3, "position_embedding_type": "rotary"},
        bert(), text),
    Spec("LayoutLM", BERT, bert(), text),
    Spec("Splinter", BERT, bert(), text),
    Spec("SqueezeBert", BERT | {"embedding_size": 24, "intermediate_size": 32}, (Stack("attentions",
        "encoder.layers.{}.attention", "encoder.layers.{}.post_attention.conv1d", "self", scores=True),),
        text),
    Spec("Xmod", BERT | {"default_language": "en_XX", "languages": ["en_XX"]}, bert(), text),
    Spec("ModernBert", BERT | {"local_attention": 6, "global_attn_every_n_layers": 2,
        "reference_compile": False}, (Stack("attentions", "layers.{}.attn", "layers.{}.attn.Wo", "self"),),
        text),
    Spec("FNet", BERT | {"tpu_short_seq_length": 11}, (), unmasked, missed="encoder.layer.0.fourier"),
    Spec("Longformer", BERT | {"attention_window": [4, 4]}, (), text, missed="encoder.layer.0.attention"),
    Spec("Yoso", BERT, (), text, missed="encoder.layer.0.attention"),
    # decoders
    Spec("Mpt", {"vocab_size": 99, "d_model": 24, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
        causal("blocks.{}.attn", "out_proj"), text),
    Spec("Falcon", BERT | {"multi_query": True}, causal("h.{}.self_attention", "dense"), unmasked),
    Spec("GPTNeoX", BERT, causal("layers.{}.attention", "dense"), text),
    Spec("GPTJ", GPT | {"rotary_dim": 4}, causal("h.{}.attn", "out_proj"), text),
    Spec("GPTNeo", {"vocab_size": 99, "hidden_size": 24, "num_layers": 2, "num_heads": 4,
        "attention_types": [[["global", "local"], 1]], "window_size": 4, "max_position_embeddings": 128},
        causal("h.{}.attn", "attention.out_proj"), text),
    Spec("CodeGen", GPT | {"rotary_dim": 4}, causal("h.{}.attn", "out_proj"), text),
    Spec("CTRL", GPT | {"dff": 31}, causal("h.{}.multi_head_attention", "dense"), text),
    Spec("GPTBigCode", GPT | {"multi_query": True}, causal("h.{}.attn", "c_proj"), text),
    Spec("OpenAIGPT", GPT, causal("h.{}.attn", "c_proj"), text),
    Spec("OPT", BERT | {"ffn_dim": 31, "word_embed_proj_dim": 24}, causal("decoder.layers.{}.self_attn",
        "out_proj"), text),
    Spec("BioGpt", BERT, causal("layers.{}.self_attn", "out_proj"), text),
    Spec("XGLM", {"vocab_size": 99, "d_model": 24, "num_layers": 2, "attention_heads": 4, "ffn_dim": 31,
        "max_position_embeddings": 128, "pad_token_id": 0}, causal("layers.{}.self_attn", "out_proj"), text),
    Spec("Mistral", LLAMA | {"sliding_window": 4}, causal(), text, cut=PAIR),
    Spec("Gemma3Text", LLAMA | {"sliding_window": 4, "query_pre_attn_scalar": 6,
        "layer_types": ["sliding_attention", "full_attention"]}, causal(), text, cut=PAIR,
        model="Gemma3TextModel"),
    Spec("Qwen2", LLAMA, causal(), text, cut=PAIR),
    Spec("Qwen3", LLAMA, causal(), text, cut=PAIR),
    Spec("Phi", BERT | {"hidden_size": 32}, causal(out="dense"), text),
    Spec("Phi3", LLAMA, causal(), text, cut=PAIR),
    Spec("DeepseekV3", BERT | {"kv_lora_rank": 7, "q_lora_rank": 9, "qk_rope_head_dim": 4, "v_head_dim": 6,
        "qk_nope_head_dim": 6, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
        "num_key_value_heads": 4}, causal(), text),
    Spec("Cohere", LLAMA, causal(), text, cut=PAIR),
    Spec("Starcoder2", LLAMA, causal(), text, cut=PAIR),
    Spec("StableLm", LLAMA, causal(), text, cut=PAIR),
    Spec("Olmo2", LLAMA, causal(), text, cut=PAIR),
    Spec("GPTNeoX", BERT, causal("layers.{}.attention", "dense"), left, label="padding left", single=True),
    Spec("Mistral", LLAMA | {"sliding_window": 4}, causal(), left, cut=PAIR, label="padding left",
        single=True),
    Spec("Qwen3", LLAMA | {"attn_implementation": "eager"}, causal(), left, cut=PAIR,
        label="eager, padding left", single=True),
    Spec("GPT2", GPT | {"attn_implementation": "eager"}, causal("h.{}.attn", "c_proj"), left,
        label="eager, padding left", single=True),
    # encoders with decoders
    Spec("Bart", BART, two(), pair),
    Spec("MBart", BART, two(), pair),
    Spec("Marian", BART, two(), pair),
    Spec("Pegasus", BART, two(), pair),
    Spec("Blenderbot", BART, two(), pair),
    Spec("M2M100", BART, two(), pair),
    Spec("UMT5", {"vocab_size": 99, "d_model": 24, "d_kv": 6, "d_ff": 31, "num_layers": 2, "num_heads": 4,
        "pad_token_id": 0, "decoder_start_token_id": 0}, t5(), pair, sharp=0.7),
    Spec("MT5", {"vocab_size": 99, "d_model": 24, "d_kv": 6, "d_ff": 31, "num_layers": 2, "num_heads": 4,
        "pad_token_id": 0, "decoder_start_token_id": 0}, t5(), pair, sharp=0.7),
)  # fmt: skip
