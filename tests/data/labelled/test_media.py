"""Images and sounds with labels: files, folders, bytes in Parquet; CTC against the model's own loss."""

import io

import numpy
import pytest
import torch
import transformers as hf
from PIL import Image
from tests.helpers.labelled import tokenizer, vit, wav2vec2, write_csv

import manyheads as mh
from manyheads.common.run_batch import run
from manyheads.data.labelled.media import sound_tokens
from manyheads.data.readers.audio import encode_wav

SIZE = {"height": 8, "width": 8}
NAMES = {0: "cat", 1: "dog"}


def extractor(mask=True):
    return hf.Wav2Vec2FeatureExtractor(sampling_rate=8000, return_attention_mask=mask, do_normalize=True)


def picture(seed):
    pixels = numpy.random.default_rng(seed).integers(0, 255, (9, 9, 3), dtype=numpy.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def sound(seed, samples):
    generator = torch.Generator().manual_seed(seed)
    return encode_wav(torch.randn(samples, generator=generator).clamp(-3, 3) / 4, 8000)


@pytest.fixture
def pictures(tmp_path):
    for number, name in enumerate(["cat", "dog", "dog", "cat", "cat"]):
        (tmp_path / "pictures" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "pictures" / name / f"{number}.png").write_bytes(picture(number))
    return tmp_path / "pictures"


def test_images_of_folders_files_and_bytes_are_the_same(tmp_path, pictures):
    import pyarrow
    import pyarrow.parquet

    model, processor = vit(id2label=NAMES), hf.ViTImageProcessor(size=SIZE)
    files = sorted(pictures.glob("*/*.png"))
    table = {
        "image": [str(file.relative_to(tmp_path)) for file in files],
        "label": [f.parent.name for f in files],
    }
    write_csv(tmp_path / "pictures.csv", table)
    rows = [
        {"image": {"bytes": file.read_bytes(), "path": None}, "label": file.parent.name} for file in files
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "pictures.parquet")
    results = []
    for data in (pictures, tmp_path / "pictures.csv", tmp_path / "pictures.parquet"):
        read = mh.labelled(data, model, processor)
        results.append({name: one.mean for name, one in read.evaluate(model).metrics.items()})
    assert results[0] == pytest.approx(results[1])
    assert results[0] == pytest.approx(results[2])
    right = 0
    for file in files:
        with Image.open(file) as image:
            inputs = processor([image.convert("RGB")], return_tensors="pt")
        right += NAMES[int(model(**inputs).logits.argmax())] == file.parent.name
    assert results[0]["accuracy"] == pytest.approx(right / 5)


def test_a_file_that_is_not_there_or_no_image_is_one_sentence(tmp_path):
    model, processor = vit(id2label=NAMES), hf.ViTImageProcessor(size=SIZE)
    path = write_csv(tmp_path / "t.csv", {"image": ["none.png"], "label": ["cat"]})
    with pytest.raises(ValueError, match=r"line 2 of .* names none.png, but there is no file"):
        mh.labelled(path, model, processor)
    (tmp_path / "none.png").write_text("no image")
    with pytest.raises(ValueError, match="is not a readable image"):
        mh.labelled(path, model, processor).evaluate(model)


def test_sounds_are_classified(tmp_path):
    model = wav2vec2(hf.Wav2Vec2ForSequenceClassification, id2label=NAMES)
    for number in range(3):
        (tmp_path / f"{number}.wav").write_bytes(sound(number, 400 + 90 * number))
    table = {"audio": [f"{n}.wav" for n in range(3)], "label": ["cat", "dog", "cat"]}
    data = mh.labelled(write_csv(tmp_path / "t.csv", table), model, extractor())
    assert data.unit == "sounds"
    alone = []
    for example in data.examples:
        inputs = extractor()(data.task.samples(example).numpy(), sampling_rate=8000, return_tensors="pt")
        logits = model(**inputs).logits[0].log_softmax(-1)
        alone.append(-logits[example.target].item())
    batch = data.task.batch(data.examples)
    with torch.no_grad():
        assert data.loss(run(model, batch), batch).tolist() == pytest.approx(alone, rel=1e-3)


@pytest.mark.parametrize("mask", [True, False])
def test_speech_is_scored_by_its_words(tmp_path, mask):
    model = wav2vec2(hf.Wav2Vec2ForCTC, ctc_loss_reduction="mean")
    texts = ["ab c", "d", "ef gh"]
    for number in range(3):
        (tmp_path / f"{number}.wav").write_bytes(sound(number, 700 + 90 * number))
    table = {"file": [f"{n}.wav" for n in range(3)], "transcription": texts}

    class Both:  # as transformers' processors have both
        feature_extractor = extractor(mask)

    Both.tokenizer = tokenizer()
    data = mh.labelled(write_csv(tmp_path / "t.csv", table), model, Both)
    if not mask:  # without a mask only equal lengths share a batch
        assert len(data) == 3
    alone = [model(**data.task.batch([example])).loss.item() for example in data.examples]
    losses = {}
    for batch in data:
        with torch.no_grad():
            values = data.loss(run(model, batch), batch).tolist()
        losses |= {one.truth: value for one, value in zip(batch.examples, values, strict=True)}
    assert [losses[one.truth] for one in data.examples] == pytest.approx(alone, rel=1e-3)
    metrics = data.evaluate(model).metrics
    assert set(metrics) == {"word_error_rate", "character_error_rate", "loss"}
    assert metrics["word_error_rate"].mean >= 0


def test_letters_are_joined_and_blanks_are_left_out(tmp_path):
    model = wav2vec2(hf.Wav2Vec2ForCTC)
    (tmp_path / "0.wav").write_bytes(sound(0, 700))

    class Both:
        feature_extractor = extractor()

    Both.tokenizer = tokenizer()
    table = {"file": ["0.wav"], "text": ["ab"]}
    data = mh.labelled(write_csv(tmp_path / "t.csv", table), model, Both)
    batch = data.task.batch(data.examples)
    letters = [5, 5, 0, 5, 6, 6, 0]  # a a _ a b b _
    logits = torch.full((1, run(model, batch).logits.shape[1], 60), -9.0)
    logits[0, range(len(letters)), letters] = 9.0
    logits[0, len(letters) :, 0] = 9.0
    assert data.task.heard({"logits": logits}, batch)[0].replace(" ", "") == "aab"
    assert data.task.scores({"logits": logits}, batch)[0, 1] == 1  # one word


def test_a_model_of_a_folder_reads_sounds_by_its_own_extractor(tmp_path):
    wav2vec2(hf.Wav2Vec2ForSequenceClassification, id2label=NAMES).save_pretrained(tmp_path / "model")
    extractor().save_pretrained(tmp_path / "model")
    for number in range(3):
        (tmp_path / f"{number}.wav").write_bytes(sound(number, 400))
    path = write_csv(tmp_path / "t.csv", {"file": [f"{n}.wav" for n in range(3)], "label": [0, 1, 1]})
    result = mh.evaluate(str(tmp_path / "model"), str(path))
    assert (result.task, result.examples) == ("audio classification", 3)
    assert set(result.intervals) == {"accuracy", "f1_macro", "loss"}


def test_an_encoder_decoder_writes_what_it_hears(tmp_path):
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 7, "decoder_ffn_dim": 7}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "d_model": 8}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    lengths = {"max_source_positions": 25, "max_target_positions": 30, "num_mel_bins": 5}
    config = hf.WhisperConfig(vocab_size=60, **lengths, **sizes, **heads, **ids)
    config.begin_suppress_tokens = config.suppress_tokens = None
    model = hf.WhisperForConditionalGeneration(config).eval()
    model.generation_config = hf.GenerationConfig(**ids, max_length=30)
    for number in range(2):
        (tmp_path / f"{number}.wav").write_bytes(sound(number, 4000 + 500 * number))

    class Both:
        feature_extractor = hf.WhisperFeatureExtractor(
            feature_size=5, sampling_rate=8000, chunk_length=1, n_fft=400
        )

    Both.tokenizer = tokenizer()
    path = write_csv(tmp_path / "t.csv", {"audio": ["0.wav", "1.wav"], "text": ["ab c", "d ef"]})
    data = mh.labelled(path, model, Both)
    assert data.task.kind == "speech recognition"
    assert len(data) == 1  # its extractor makes sounds equally long
    batch = data.task.batch(data.examples)
    with torch.no_grad():
        alone = [model(**data.task.batch([example])).loss.item() for example in data.examples]
        assert data.loss(run(model, batch), batch).tolist() == pytest.approx(alone, rel=1e-3)
    assert {"word_error_rate", "perplexity"} <= set(data.evaluate(model).metrics)


def test_a_sound_has_as_many_tokens_as_its_attention_has_queries(tmp_path):
    model = wav2vec2(hf.Wav2Vec2ForSequenceClassification)
    samples = torch.randn(1, 743)
    with torch.no_grad(), mh.watch(model) as seen:
        model(input_values=samples)
    assert sound_tokens(model, samples.shape[1]) == int(seen.table["tokens"][0])
