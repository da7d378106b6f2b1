"""Word vectors against gensim, by turns: words a second, what people say of them, loss.

    python scripts/words.py --text FILE [FILE ...] --workers 2 4 --repeats 5 --seeds 3

Both train on the same words, in the same lines, with the same vocabulary, window, rate, number of
dimensions, negative samples, epochs and workers. gensim gets the lines as lists in memory. A turn
is timed from the first mini-batch to the last; what comes before (counting, compiling, starting
processes) is in neither. Turns alternate, and ratios are those of neighbours, since the machine may
be shared; where it is, seconds of cores say more, those of all threads and processes that train.
Quality is that of ``--seeds`` trainings each: the rank correlation with WordSim-353 and SimLex-999,
which gensim brings, and the mean loss of a prediction on the text itself, which one function works
out for both. Both get the text in parts of 100 lines in random order, because gensim reads it as it
is and what comes last counts most, while ours takes its mini-batches at random. Needs gensim and
numba (extra ``benchmark``).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytorch_lightning as pl
import torch
from gensim.models import Word2Vec as Gensims
from gensim.test.utils import datapath

import hybridtrain  # noqa: F401  (registers the strategies)
from hybridtrain.cli.quiet import hush, hush_lightning
from hybridtrain.tasks.words.questions import KnownWords, Vectors
from hybridtrain.tasks.words.text_data import TextData, TextFiles, Vocabulary, count
from hybridtrain.tasks.words.word2vec import Word2Vec

RATE, MIN_RATE, WINDOW = 0.025, 1e-4, 5


class Trained(NamedTuple):
    """Seconds on the clock and of all cores; vectors in the vocabulary's order."""

    wall_s: float
    core_s: float
    inputs: Vectors
    outputs: Vectors


def compile_steps(kind: str, dim: int) -> None:
    """Here, so that workers, which are forks, find them."""
    module = Word2Vec(dim, kind)
    module._know(Vocabulary(("a", "b"), np.array([2, 1]), 3))
    module.configure_model()
    module.on_fit_start()
    module.progress = lambda: 0.0  # type: ignore[method-assign]
    module._step(np.array([0, 1], dtype=np.int32), 0)


class Clock(pl.Callback):
    """When the first mini-batch began, and the last ended; what workers have used of cores."""

    def __init__(self, workers: int) -> None:
        self.began_s = self.ended_s = self.used_s = 0.0
        self.core_s = torch.zeros(workers).share_memory_()

    def on_train_batch_start(self, *_: Any) -> None:
        """The first."""
        self.began_s = self.began_s or time.perf_counter()
        self.used_s = self.used_s or time.process_time()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Perhaps the last."""
        self.ended_s = time.perf_counter()
        self.core_s[trainer.global_rank] = time.process_time() - self.used_s


def ours(given: argparse.Namespace, kind: str, workers: int, seed: int) -> Trained:
    """One training with ``hogwild``."""
    pl.seed_everything(seed, verbose=False)
    module = Word2Vec(
        given.dim,
        kind,
        window=WINDOW,
        negative=given.negative,
        rate=RATE,
        min_rate=MIN_RATE,
        seed=seed,
        compiled=True,
        save=(),
    )
    clock, served_s = Clock(workers), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        data = TextData(given.text, min_count=given.min_count, batch_words=given.batch_words)
        pl.Trainer(
            strategy="hogwild",
            accelerator="cpu",
            devices=workers,
            max_epochs=given.epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[clock],
            default_root_dir=folder,
        ).fit(module, datamodule=data)
    inputs, outputs = (table.detach().numpy() for table in module._tables())
    used_s = float(clock.core_s.sum()) + time.process_time() - served_s
    return Trained(clock.ended_s - clock.began_s, used_s, inputs, outputs)


def gensims(
    given: argparse.Namespace,
    kind: str,
    workers: int,
    seed: int,
    lines: list[list[str]],
    words: Vocabulary,
) -> Trained:
    """One training with gensim."""
    model = Gensims(
        vector_size=given.dim,
        window=WINDOW,
        negative=given.negative,
        sg=int(kind == "skip_gram"),
        min_count=given.min_count,
        sample=1e-3,
        alpha=RATE,
        min_alpha=MIN_RATE,
        seed=seed + 1,
        workers=workers,
    )
    model.build_vocab(lines)
    began_s, used_s = time.perf_counter(), time.process_time()
    model.train(lines, total_examples=len(lines), epochs=given.epochs)
    ended_s = time.perf_counter()
    rows = [model.wv.key_to_index[word] for word in words.words]
    used_s = time.process_time() - used_s
    return Trained(ended_s - began_s, used_s, model.wv.vectors[rows], model.syn1neg[rows])


def judged(
    given: argparse.Namespace, kind: str, words: Vocabulary, trained: Trained
) -> dict[str, float]:
    """Judge trained vectors by word similarity and by the loss."""
    known = KnownWords(words.words, trained.inputs)
    found = {
        name: known.similarity(datapath(file)).correlation
        for name, file in (("wordsim353", "wordsim353.tsv"), ("simlex999", "simlex999.txt"))
    }
    module = Word2Vec(given.dim, kind, window=WINDOW, negative=given.negative)
    module._know(words)
    module.configure_model()
    module.on_fit_start()
    with torch.no_grad():
        for table, values in zip(module._tables(), (trained.inputs, trained.outputs), strict=True):
            table.copy_(torch.from_numpy(values))
        random = np.random.default_rng(0)
        losses = [float(module.loss(part, random)) for part in given.sample]
    return found | {"loss": statistics.fmean(losses)}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", nargs="+", required=True, help="text files, plain or gzipped")
    parser.add_argument("--kinds", nargs="+", default=["skip_gram", "cbow"])
    parser.add_argument("--workers", type=int, nargs="+", default=[2], help="default 2")
    parser.add_argument("--dim", type=int, default=100, help="default 100")
    parser.add_argument("--negative", type=int, default=5, help="default 5")
    parser.add_argument("--min-count", type=int, default=5, help="default 5")
    parser.add_argument("--epochs", type=int, default=5, help="default 5")
    parser.add_argument("--batch-words", type=int, default=20_000, help="default 20,000")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each (default 3)")
    parser.add_argument("--seeds", type=int, default=0, help="trainings to judge (default 0)")
    parser.add_argument("--json", help="also write all figures to this file")
    return parser.parse_args()


def measured(
    given: argparse.Namespace, lines: list[list[str]], words: Vocabulary
) -> list[dict[str, Any]]:
    """A row for each kind and number of workers."""
    rows = []
    trained_on = given.epochs * int(words.counts.sum())
    for kind in given.kinds:
        for workers in given.workers:
            speeds: dict[str, list[float]] = {"ours": [], "gensim": []}
            by_core: dict[str, list[float]] = {"ours": [], "gensim": []}
            worth: dict[str, list[dict[str, float]]] = {"ours": [], "gensim": []}
            for turn in range(max(given.repeats, given.seeds)):
                for who in ("ours", "gensim") if turn % 2 else ("gensim", "ours"):
                    if who == "ours":
                        trained = ours(given, kind, workers, turn)
                    else:
                        trained = gensims(given, kind, workers, turn, lines, words)
                    speeds[who].append(trained_on / trained.wall_s)
                    by_core[who].append(trained_on / trained.core_s)
                    if turn < given.seeds:
                        worth[who].append(judged(given, kind, words, trained))
            row = {"kind": kind, "workers": workers, "speeds": speeds, "by_core": by_core}
            rows.append(row | {"worth": worth})
            show(rows[-1])
    return rows


def show(row: dict[str, Any]) -> None:
    """Print one."""
    for name, key in (("words/s", "speeds"), ("words per second of a core", "by_core")):
        speed = {who: statistics.median(each) for who, each in row[key].items()}
        ratios = [a / b for a, b in zip(row[key]["ours"], row[key]["gensim"], strict=True)]
        print(
            f"{row['kind']:9}  workers {row['workers']}  {name} {speed['ours']:,.0f}, gensim "
            f"{speed['gensim']:,.0f}, ratio {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )
    for who, judgements in row["worth"].items():
        for name in judgements[0] if judgements else ():
            values = [each[name] for each in judgements]
            print(f"    {who:6}  {name:10}  " + "  ".join(f"{value:.4f}" for value in values))


def main(arguments: Sequence[str] | None = None) -> None:
    """Mix the text, then measure."""
    hush()
    hush_lightning()
    given = parse()
    with tempfile.TemporaryDirectory() as folder:
        lines = in_random_order(given.text, Path(folder) / "text.txt")
        given.text = [str(Path(folder) / "text.txt")]
        compare(given, lines)


def in_random_order(files: list[str], path: Path) -> list[list[str]]:
    """All lines, which are also written to ``path``."""
    lines: list[list[str]] = [[]]
    for some, ends in TextFiles(files):
        lines[-1] += some
        if ends:
            lines.append([])
    order = np.random.default_rng(0).permutation(-(-len(lines) // 100))
    mixed = [line for part in order for line in lines[100 * part : 100 * part + 100] if line]
    path.write_text("\n".join(map(" ".join, mixed)))
    return mixed


def compare(given: argparse.Namespace, lines: list[list[str]]) -> None:
    """Measure, print, write."""
    words = Vocabulary.of(count(TextFiles(given.text)), given.min_count)
    numbers = words.number_of
    parts = [[numbers[word] for word in line if word in numbers] for line in lines[:2000]]
    given.sample = [np.array(part, dtype=np.int32) for part in parts if len(part) > 1]
    print(f"{words.total:,} words, {len(words):,} different ones with a vector", flush=True)
    for kind in given.kinds:
        compile_steps(kind, given.dim)
    rows = measured(given, lines, words)
    if given.json:
        Path(given.json).write_text(json.dumps({"words": words.total, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
