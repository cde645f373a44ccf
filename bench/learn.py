"""training: what is reached on real data, how fast the loop is, and what looking at heads costs.

    python -m bench.learn shakespeare --data DIR     2000 steps of the known laptop recipe
    python -m bench.learn best --data DIR            the same text, the best of ten minutes
    python -m bench.learn multi30k --data DIR        English to German, under 100 minutes
    python -m bench.learn cut --data DIR             the encoder heads of that model, fewer and fewer
    python -m bench.learn digits                     the pictures that come with scikit-learn, five folds
    python -m bench.learn mnist --data DIR           handwritten digits
    python -m bench.learn cifar --data DIR           photographs, within 60 minutes
    python -m bench.learn series --data DIR          ETTh1, 96 hours ahead
    python -m bench.learn dna --data DIR             splice junctions, ten folds
    python -m bench.learn spoken --data DIR          digits that are said, takes held out
    python -m bench.learn speakers --data DIR        the same, a speaker held out, for each of six
    python -m bench.learn strings --data DIR         strings of digits, by ctc and by a decoder
    python -m bench.learn picturebook --data DIR     names of emoji in four languages
    python -m bench.learn embedded                   what `manyheads train TASK` does without data
    python -m bench.learn speed                      tokens a second, our modules against the textbook's
    python -m bench.learn watching                   what looking at the heads costs

DIR holds language/tinyshakespeare.txt, translation/{train,val,test}.{en,de}, images/mnist/ (IDX files),
images/cifar10.npz, series/ETTh1.csv, dna/splice.tsv, speech/spoken_digits.zip, picturebook/ (captions.tsv,
pictures.zip). Every run is kept under --out and goes on after Ctrl-C, a crash or kill -9. With --results,
what a part printed is kept in DIR/learn.json, and DIR/learn.md is written anew from all parts there are.

Minutes are given twice: as they passed, and as the processor spent them, by all threads of all sittings
together and divided by two, which is what two cores of our own would have taken at most.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import sacrebleu
from torch import Tensor, nn

from bench import harness
from bench.learn_picturebook import picturebook
from bench.learn_speech import speakers, spoken, strings
from bench.learn_speed import speed, watching
from bench.learn_tasks import cifar, etth1, handwritten, mnist, splice
from bench.runs import run
from manyheads import tasks
from manyheads.common.whole_files import write_whole
from manyheads.data.batches import bucketed
from manyheads.data.examples import spread
from manyheads.data.readers.parallel_text import read_pairs
from manyheads.surgery.prune import prune
from manyheads.surgery.recover import recover
from manyheads.tasks.language import Language
from manyheads.tasks.translation import Translation

SHAKESPEARE = 1.88
BLEU, LONGEST = 36.0, 100.0  # at least, within so many minutes
BEAMS = 5
DEFAULTS = 2.0  # minutes
GONE = (12, 24, 32, 38)  # of 48
SENTENCES, ROUNDS, RECOVER, RATE = 2000, 2, 200, 5e-4


def shakespeare(data: Path, out: Path) -> str:
    """4 layers, 4 heads, width 128, context 64, 12 windows a step, 2000 steps, no dropout."""
    task = Language(context=64, d_model=128, heads=4, layers=4, positions="learned")
    result, cost = run(
        task,
        data / "language" / "tinyshakespeare.txt",
        out / "shakespeare",
        steps=2000,
        batch_tokens=12 * 64,
        learning_rate=1e-3,
        evaluate_every=250,
        save_every=250,
        evaluate_examples=200,
    )
    return f"{harness.targets(('validation loss', result.metrics['loss'], '<=', SHAKESPEARE))}\n\n{cost}."


def best(data: Path, out: Path) -> str:
    """Wider, with a longer context: the lowest validation loss that ten minutes of two cores give."""
    task = Language(context=256, d_model=160, heads=5, layers=4, dropout=0.05)
    result, cost = run(
        task,
        data / "language" / "tinyshakespeare.txt",
        out / "best",
        steps=2800,
        batch_tokens=8 * 256,
        learning_rate=3e-3,
        evaluate_every=200,
        save_every=200,
        evaluate_examples=200,
        watch_every=0,
    )
    goals = [("validation loss", result.metrics["loss"], "<=", SHAKESPEARE)]
    goals.append(("minutes of two cores", cost.minutes, "<=", 10.0))
    return f"{harness.targets(*goals)}\n\n{cost}. {result.metrics['bits_per_byte']:.3f} bits per byte."


def multi30k(data: Path, out: Path, minutes: float = LONGEST) -> str:
    """Captions: 6 layers that read, 3 that write, width 128, 8 heads, an average of the weights.

    The learning rate falls with the root of the steps, so that the run may end at any time.
    """
    task = Translation(
        d_model=128, heads=8, layers=6, decoder_layers=3, d_hidden=256, dropout=0.1, vocabulary=5000
    )
    folder = data / "translation"
    result, cost = run(
        task,
        folder,
        out / "multi30k",
        minutes,
        steps=20000,
        batch_tokens=2400,
        learning_rate=3e-3,
        warmup=800,
        decay="inverse",
        ema=0.999,
        evaluate_every=500,
        evaluate_examples=0,
        save_every=100,
        watch_every=500,
    )
    cased, lower = _bleu(task, result.model, folder)
    goals = harness.targets(
        (f"sacreBLEU, test, cased, {BEAMS} beams", cased, ">=", BLEU),
        ("minutes of two cores", cost.minutes, "<=", LONGEST),
    )
    return (
        f"{goals}\n\n{result.step:,} steps, the weights of step {result.best_step:,}; {cost}. "
        f"Lower-cased, as many papers count: {lower:.2f}."
    )


def cut(data: Path, out: Path) -> str:
    """The encoder's heads of that model leave, those first that the others can best stand in for."""
    loaded, model = tasks.load(out / "multi30k")
    assert isinstance(loaded, Translation)
    folder = data / "translation"
    batches = _inputs(loaded, folder, SENTENCES)
    heads, layers = loaded.heads, loaded.layers
    total = heads * (layers + 2 * (loaded.decoder_layers or layers))  # the decoder looks twice
    stay = {
        name: list(range(heads))
        for name, _ in model.named_modules()
        if name.startswith("decoder.") and name.endswith("attention")
    }
    whole = _bleu(loaded, model, folder)[0]
    rows = [["0", f"{whole:.2f}", "", ""]]
    for gone in GONE:
        gone = gone * heads * layers // 48
        small = prune(model, batches, keep=1 - gone / total, rounds=ROUNDS, protect=stay)
        fitted = _bleu(loaded, small, folder)[0]
        recover(small, batches, teacher=model, steps=RECOVER, learning_rate=RATE)
        recovered = _bleu(loaded, small, folder)[0]
        left = [block.attention.heads for block in small.encoder.blocks]
        rows.append([str(gone), f"{fitted:.2f}", f"{recovered:.2f}", " ".join(map(str, left))])
        harness.say(f"{gone} heads gone: {rows[-1][1:]}")
    header = [
        f"of {heads * layers} encoder heads gone",
        "refitted",
        f"{RECOVER} steps later",
        "left by layer",
    ]
    return (
        f"{harness.table(header, rows)}\n\nsacreBLEU (cased) of the test sentences, {BEAMS} beams. Ranked, "
        f"refitted and taught by the uncut model on {SENTENCES:,} training pairs."
    )


def embedded() -> str:
    """`manyheads train TASK` with its defaults, in a folder that is thrown away."""
    rows, goals = [], []
    for name in tasks.TASKS:
        with tempfile.TemporaryDirectory() as folder:
            task = tasks.find(name)()
            result, cost = run(task, None, Path(folder) / name)
        rows.append([name, task.metric, f"{result.metrics[task.metric]:.3f}", f"{cost.minutes:.2f}"])
        goals.append((f"{name}: minutes of two cores", cost.minutes, "<=", DEFAULTS))
    return f"{harness.table(['task', 'metric', 'reached', 'minutes'], rows)}\n\n{harness.targets(*goals)}"


def _bleu(task: Translation, model: nn.Module, folder: Path) -> tuple[float, float]:
    """sacreBLEU of the test sentences as they are written, cased and lower-cased."""
    pairs, _ = read_pairs(str(folder), task.source, task.target, "test")
    pairs.sort(key=lambda pair: len(pair[0]))
    written: list[str] = []
    for start in range(0, len(pairs), 50):
        written += task.predict(model, [pair[0] for pair in pairs[start : start + 50]], beams=BEAMS)
    wanted = [pair[1] for pair in pairs]
    cased, lower = (sacrebleu.corpus_bleu(written, [wanted], lowercase=each).score for each in (False, True))
    return cased, lower


def _inputs(task: Translation, folder: Path, sentences: int) -> list[dict[str, Tensor]]:
    """Training pairs as the model takes them, sentences of like lengths together."""
    examples = task.open(str(folder)).train
    chosen = spread(len(examples), sentences)
    batches = []
    for places in bucketed([examples.sizes[i] for i in chosen], 2000):
        batches.append(task.inputs(task.collate(examples.take([chosen[i] for i in places]))))
    return batches


def keep(part: str, report: str, machine: str, results: Path) -> str:
    """Put what a part printed on record, and write the page of all parts anew."""
    record = results / "learn.json"
    known = json.loads(record.read_text()) if record.exists() else {}
    known[part] = {"report": report, "machine": machine}
    results.mkdir(parents=True, exist_ok=True)
    write_whole(record, json.dumps(known, indent=1) + "\n")
    page = [f"## learn: {(__doc__ or '').splitlines()[0]}"]
    for name, function in PARTS.items():
        if name in known:
            about = (function.__doc__ or "").splitlines()[0]
            page += [f"### {name}", about, known[name]["report"], known[name]["machine"]]
    text = "\n\n".join(page) + "\n"
    write_whole(results / "learn.md", text)
    return text


PARTS: dict[str, Callable[..., str]] = {
    "multi30k": multi30k,
    "cut": cut,
    "shakespeare": shakespeare,
    "best": best,
    "digits": handwritten,
    "mnist": mnist,
    "cifar": cifar,
    "series": etth1,
    "dna": splice,
    "spoken": spoken,
    "speakers": speakers,
    "strings": strings,
    "picturebook": picturebook,
    "embedded": embedded,
    "speed": speed,
    "watching": watching,
}
WITH_DATA = (
    *("shakespeare", "best", "multi30k", "cut", "mnist", "cifar", "series", "dna"),
    *("spoken", "speakers", "strings", "picturebook"),
)
WITHOUT_DATA = ("digits",)  # of those that keep runs


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.learn", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--data", type=Path, help="the folder with the data")
    parser.add_argument("--out", type=Path, default=Path("out/learn"), help="where runs are kept")
    parser.add_argument("--results", type=Path, metavar="DIR", help="keep the figures there: bench/results")
    parser.add_argument("--minutes", type=float, default=LONGEST, help="when multi30k ends, of two cores")
    options = parser.parse_args()
    if options.part in WITH_DATA and options.data is None:
        parser.error("--data: expected the folder with the data, see --help")
    machine = harness.machine(f"python -m bench.learn {options.part}")
    print(machine, flush=True)
    given = (options.data, options.out) if options.part in WITH_DATA else ()
    given += (options.out,) if options.part in WITHOUT_DATA else ()
    given += (options.minutes,) if options.part == "multi30k" else ()
    report = PARTS[options.part](*given)
    print(report)
    if options.results is not None:
        keep(options.part, report, machine, options.results)
        harness.say(f"written to {options.results / 'learn.md'}")


if __name__ == "__main__":
    main()
