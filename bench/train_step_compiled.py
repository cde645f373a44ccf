"""the same updates as train_step through torch.compile, where there is a compiler."""

import shutil

from bench.decoders import BIASED, GPT2, NANO, OURS, Shape
from bench.train_step import RATES, compare


def run(quick: bool) -> str:
    if not (shutil.which("c++") or shutil.which("g++")):
        return "No compiler on this machine."
    rates = RATES[:1] if quick else RATES
    cells = [(Shape(128, 4, 1 if quick else 4, 64, dropout=rate), 12) for rate in rates]
    return compare(cells, (OURS, BIASED, NANO, GPT2), quick, compiled=True)
