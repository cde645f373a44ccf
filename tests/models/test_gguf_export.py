"""GGUF: what llama.cpp computes from the file is what the model computes; what it cannot is named."""

from __future__ import annotations

import gguf
import pytest
import tokenizers
import torch
import transformers as hf
from tests.helpers import cut_models, models
from tests.helpers.models import VOCABULARY, sharpen, tokens

import manyheads as mh

THREE = {"num_hidden_layers": 3}
SCALED = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip


def like_llama(cls, config, **options):
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6}
    sizes |= {"num_key_value_heads": 3, "intermediate_size": 11} | options
    model = sharpen(cls(config(**sizes)), scale=0.3)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases and norms that do something
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def qwen2():
    return like_llama(hf.Qwen2ForCausalLM, hf.Qwen2Config, tie_word_embeddings=True)


def qwen3(**options):
    sizes = {"head_dim": 8, "tie_word_embeddings": True} | options
    return like_llama(hf.Qwen3ForCausalLM, hf.Qwen3Config, **sizes)


def biased():
    return like_llama(hf.LlamaForCausalLM, hf.LlamaConfig, attention_bias=True, mlp_bias=True)


CASES = {
    "uneven": (lambda: models.llama(**THREE), {0: [2, 3], 1: [0, 2, 4]}),
    "a layer without heads": (lambda: models.llama(**THREE), {0: [2, 3], 1: range(6)}),
    "scaled positions": (lambda: models.llama(rope_parameters=SCALED), {1: [0, 1]}),
    "biases of three, tied": (qwen2, {0: [2, 3]}),
    "biases of all": (biased, {0: [2, 3]}),
    "normalised queries": (qwen3, {0: [2, 3]}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_file_computes_what_the_model_computes(name, tmp_path):
    make, heads = CASES[name]
    small = mh.cut(make(), heads, tokens()).eval()
    done = mh.export(small, to="gguf", out=tmp_path / "out")
    assert done.files == ["model.gguf"]
    assert max(done.differences.values()) < 1e-4
    assert done.notes == ["it takes token ids: there is no tokenizer"]
    fields = gguf.GGUFReader(tmp_path / "out" / "model.gguf").fields
    architecture = "openelm" if name == "normalised queries" else "deci"
    assert fields["general.architecture"].contents() == architecture
    counts = fields[f"{architecture}.attention.head_count"].contents()
    assert counts == [6 - len(heads.get(layer, ())) for layer in range(len(counts))]


@pytest.mark.parametrize("name", CASES)
def test_llama_cpp_writes_the_same_tokens(name, tmp_path):
    llama = pytest.importorskip("cyllama.llama.llama_cpp", exc_type=ImportError)
    make, heads = CASES[name]
    small = mh.cut(make(), heads, tokens()).eval()
    mh.export(small, to="gguf", out=tmp_path / "out")
    file = str(tmp_path / "out" / "model.gguf")
    context = llama.LlamaContext(llama.LlamaModel(file, llama.LlamaModelParams()), llama.LlamaContextParams())
    sampler = llama.LlamaSampler(llama.LlamaSamplerChainParams())
    sampler.add_greedy()
    ids = tokens()["input_ids"][:1]
    read = new = ids[0].tolist()
    for _ in range(9):
        context.decode(llama.llama_batch_get_one(new, len(read) - len(new)))
        new = [sampler.sample(context, -1)]
        read = read + new
    assert read == small.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=None)[0].tolist()


def mistral():
    return like_llama(hf.MistralForCausalLM, hf.MistralConfig, sliding_window=8)


def scaled_embedding():
    return like_llama(
        hf.GraniteForCausalLM, hf.GraniteConfig, embedding_multiplier=3.0, attention_multiplier=0.5
    )


@pytest.mark.parametrize(
    ("make", "heads", "message"),
    [
        (models.llama, {0: range(6)}, "layer 0 has no heads, and llama.cpp reads"),
        (cut_models.qwen3, {0: [2, 3]}, "its output weights are not those of its embedding"),
        (qwen3, {1: range(6)}, "layer 1 has no heads, and each of openelm's has some"),
        (
            lambda: qwen3(attention_bias=True),
            {0: [2, 3]},
            r"layer 0 has .*proj\.bias, which .* openelm does not",
        ),
        (lambda: qwen3(rope_parameters=SCALED), {0: [2, 3]}, "its rotary positions are scaled"),
        (models.gpt2, {0: [1]}, "cannot take GPT2LMHeadModel: its layers compute None, not silu"),
        (models.bert, {0: [1]}, "cannot take BertModel: it is not a language model"),
        (mistral, {0: [2, 3]}, "attend to the last 8 tokens only"),
        (scaled_embedding, {0: [2, 3]}, "what llama.cpp computes from these weights differs by"),
    ],
)
def test_what_llama_cpp_has_not_is_refused(make, heads, message, tmp_path):
    small = mh.cut(make(), heads, tokens())
    with pytest.raises(ValueError, match=message):
        mh.export(small, to="gguf", out=tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_byte_level_tokenizer_is_written(tmp_path):
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = tokenizers.pre_tokenizers
    inner.pre_tokenizer = split.Sequence([split.Digits(True), split.ByteLevel(add_prefix_space=False)])
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=60, special_tokens=["<end>"], show_progress=False)
    inner.train_from_iterator(["the cat and the hat", "the hat and that"], trainer)
    small = mh.cut(models.llama(), {0: [2, 3]}, tokens())
    small.tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
    done = mh.export(small, to="gguf", out=tmp_path / "out")
    assert not done.notes
    fields = gguf.GGUFReader(tmp_path / "out" / "model.gguf").fields
    written = fields["tokenizer.ggml.tokens"].contents()
    assert len(written) == VOCABULARY
    assert [written[number] for number in small.tokenizer("the hat")["input_ids"]] == inner.encode(
        "the hat"
    ).tokens
    assert fields["tokenizer.ggml.pre"].contents() == "smollm"
    assert fields["tokenizer.ggml.eos_token_id"].contents() == written.index("<end>")
    assert fields["tokenizer.ggml.token_type"].contents()[written.index("<end>")] == 3
    assert not fields["tokenizer.ggml.add_bos_token"].contents()
