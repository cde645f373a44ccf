"""The recipe of the small model in src/manyheads/models/files/small, which reads Chinese and English.

    apt-get download manpages-zh manpages libreoffice-help-zh-cn libreoffice-help-en-us fortunes-zh
    for package in *.deb; do dpkg -x "$package" packages; done
    python tools/small_model.py packages --out src/manyheads/models/files/small

The text, all of it from Debian: manual pages (free licences, most of them the GPL and the GFDL), the help of
LibreOffice (MPL-2.0), and the 300 poems of Tang and 100 of Song in fortunes-zh, which are about a thousand
years old. Tokens are Chinese characters and pieces of words in Latin letters. The model predicts the next
token: a BertLMHeadModel of 4 layers with 8 heads, trained from a fixed seed on one thread and saved in
float16: about 3.3 MB. The hashes that models/embedded.py pins are printed at the end.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import math
import re
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import BertConfig, BertLMHeadModel, BertTokenizerFast

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CONTEXT = 128
RATE = 1.5e-3
POEMS = 8  # the poems are a hundredth of the text: they are read this many times as often


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packages", type=Path, help="where the packages were unpacked")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--batch", type=int, default=1024, help="tokens of a step")
    parser.add_argument("--vocabulary", type=int, default=6000)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    chinese = [line for line in prose(options.packages, "zh-CN", "zh_CN/") if is_chinese(line)]
    english = [line for line in prose(options.packages, "en-US", "") if is_english(line)]
    poems = verses(options.packages)
    for name, lines in (("Chinese", chinese), ("English", english), ("poems", poems)):
        print(f"{name}: {sum(map(len, lines)):,} characters", flush=True)
    tokenizer = learn([*chinese, *poems, *english], options.vocabulary)
    streams = [
        encode(tokenizer, [line for number, line in enumerate(chinese) if number % 50] + poems * POEMS),
        encode(tokenizer, [line for number, line in enumerate(english) if number % 50]),
    ]
    held_out = [encode(tokenizer, lines[::50]) for lines in (chinese, english)]
    print(f"tokens to learn from: {', '.join(f'{len(ids):,}' for ids in streams)}", flush=True)
    model = train(streams, held_out, tokenizer.get_vocab_size(), options.steps, options.batch)
    save(model, tokenizer, options.out)


def prose(packages: Path, help_language: str, manual_folder: str) -> list[str]:
    """The paragraphs of the manual pages and of LibreOffice's help in a language, each once."""
    lines: dict[str, None] = {}
    for file in sorted(packages.glob(f"usr/share/man/{manual_folder}man*/*.gz")):
        page = gzip.decompress(file.read_bytes()).decode("utf-8", "ignore")
        page = re.sub(r"^[.'].*$", "\n", page, flags=re.M)  # requests of roff
        page = re.sub(r"\\f.|\\f\(..|\\[,/&|^~:%]", "", page)
        page = re.sub(r"\\\((..)|\\\[\w+\]", " ", page).replace(r"\-", "-").replace("\\e", "\\")
        paragraphs = re.split(r"\n\s*\n", page)
        lines |= dict.fromkeys(clean(part) for part in paragraphs)
    for file in sorted(packages.glob(f"usr/share/libreoffice/help/{help_language}/text/**/*.html")):
        page = re.sub(r"(?s)<(script|style|head|header|nav)\b.*?</\1>", " ", file.read_text(encoding="utf-8"))
        for part in re.split(r"</?(?:p|h\d|li|td|div|br|title)\b[^>]*>", page):
            lines[clean(html.unescape(re.sub(r"<[^>]+>", "", part)))] = None
    return list(lines)


def verses(packages: Path) -> list[str]:
    """The poems, one a line, with title and author."""
    folder = packages / "usr/share/games/fortunes"
    text = "%".join((folder / name).read_text(encoding="utf-8") for name in ("tang300", "song100"))
    poems = (clean(re.sub(r"\x1b\[\d*m", "", poem)) for poem in text.split("%"))
    return [poem for poem in poems if is_chinese(poem)]


def clean(text: str) -> str:
    text = re.sub(r"\s+", " ", text)
    return re.sub(r"(?<=[^\x00-\x7f]) (?=[^\x00-\x7f])", "", text).strip()  # lines break between characters


def is_chinese(line: str) -> bool:
    return len(line) >= 8 and len(re.findall(r"[\u4e00-\u9fff]", line)) >= 0.4 * len(line.replace(" ", ""))


def is_english(line: str) -> bool:
    return len(line) >= 40 and len(re.findall(r"[a-z ]", line)) >= 0.85 * len(line)


def learn(lines: list[str], size: int) -> Tokenizer:
    """Characters, and pieces of the words in Latin letters, as BERT's Chinese models have them."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True, handle_chinese_chars=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        special_tokens=SPECIAL,
        limit_alphabet=size - 2500,
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    start, end = (tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", start), ("[SEP]", end)],
    )  # fmt: skip
    return tokenizer


def encode(tokenizer: Tokenizer, lines: list[str]) -> Tensor:
    """One stream of ids; a separator ends each line."""
    end = SPECIAL.index("[SEP]")
    encoded = tokenizer.encode_batch_fast(lines, add_special_tokens=False)
    return torch.tensor([number for line in encoded for number in [*line.ids, end]])


def windows(ids: Tensor, length: int, count: int, random: torch.Generator) -> Tensor:
    """(count, length) ids: pieces of the stream between [CLS] and [SEP]."""
    starts = torch.randint(len(ids) - length, (count,), generator=random)
    pieces = ids[starts[:, None] + torch.arange(length - 2)]
    edge = pieces.new_ones(count, 1)
    return torch.cat([edge * SPECIAL.index("[CLS]"), pieces, edge * SPECIAL.index("[SEP]")], 1)


def loss(model: BertLMHeadModel, ids: Tensor) -> Tensor:
    """Cross-entropy of the next token, in nats."""
    states = model.bert(ids[:, :-1]).last_hidden_state
    return F.cross_entropy(model.cls(states).flatten(0, 1), ids[:, 1:].flatten())


def train(
    streams: list[Tensor], held_out: list[Tensor], size: int, steps: int, tokens: int
) -> BertLMHeadModel:
    """AdamW with warm-up and cosine decay; languages, and windows of 32 and of 128 tokens, in turn."""
    config = BertConfig(
        vocab_size=size, hidden_size=128, num_hidden_layers=4, num_attention_heads=8, intermediate_size=512,
        max_position_embeddings=CONTEXT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        is_decoder=True, use_cache=False,
    )  # fmt: skip
    model = BertLMHeadModel(config)
    random, fixed = torch.Generator().manual_seed(1), torch.Generator()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.98))
    warm, started, total = min(100, steps // 10 + 1), time.process_time(), 0.0
    for step in range(steps):
        share = (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = RATE * share
        length = CONTEXT if step % 2 else CONTEXT // 4
        ids = streams[step // 2 % len(streams)]
        value = loss(model, windows(ids, length, tokens // length, random))
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += value.item()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            with torch.no_grad():
                fixed.manual_seed(2)
                judged = [loss(model, windows(ids, CONTEXT, 32, fixed)) for ids in held_out]
            spent, mean, total = time.process_time() - started, total / (step % 50 + 1), 0.0
            losses = ", ".join(f"{value:.3f}" for value in judged)
            print(f"step {step + 1}: loss {mean:.3f}, held out {losses}, {spent:.0f} s", flush=True)
    return model.eval()


def save(model: BertLMHeadModel, tokenizer: Tokenizer, out: Path) -> None:
    """The folder as transformers writes it, weights in float16; prints what models/embedded.py pins."""
    out.mkdir(parents=True, exist_ok=True)
    model.half().save_pretrained(out)
    BertTokenizerFast(tokenizer_object=tokenizer, model_max_length=CONTEXT).save_pretrained(out)
    for file in sorted(out.iterdir()):
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        print(f'    "{file.name}": "{digest}",  # {file.stat().st_size:,}')


if __name__ == "__main__":
    main()
