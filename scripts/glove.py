"""GloVe against a loop in C: entries a second, and the cost that is reached. By turns, in one run.

    python scripts/glove.py --text FILE [FILE ...] --workers 2 --repeats 3

Both make the same steps (AdaGrad on the weighted squared error) on the same entries, without locks,
and begin with numbers drawn alike. C is compiled here with ``cc -O3 -march=native -ffast-math`` and
runs in as many threads as there are workers, each on a part of the entries, in their order; without
a compiler only ours is measured. A turn is timed from the first mini-batch to the last. The cost is
that of all entries after the last epoch, also of one worker alone. Needs numba (extra ``sparse``).
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from words import Clock

import hybridtrain  # noqa: F401  (registers the strategies)
from hybridtrain.cli.quiet import hush, hush_lightning
from hybridtrain.tasks.words.glove import ENTRY, Cooccurrences, Entries, GloVe, count_cooccurrences
from hybridtrain.tasks.words.word_kernels import glove_steps

X_MAX, ALPHA, RATE = 100.0, 0.75, 0.05
LOOP = """
#include <math.h>
typedef struct { int row, column; float count; } entry;
void steps(float **t, float **s, const entry *e, long n, int dim, float x_max, float alpha) {
  for (long i = 0; i < n; i++) {
    long r = e[i].row, c = e[i].column;
    float *w = t[0] + r * dim, *v = t[1] + c * dim, *sw = s[0] + r * dim, *sv = s[1] + c * dim;
    float gap = t[2][r] + t[3][c] - logf(e[i].count);
    for (int k = 0; k < dim; k++) gap += w[k] * v[k];
    float pull = gap * (e[i].count < x_max ? powf(e[i].count / x_max, alpha) : 1.0f);
    for (int k = 0; k < dim; k++) {
      float a = pull * v[k], b = pull * w[k];
      sw[k] += a * a; sv[k] += b * b;
      w[k] -= a / sqrtf(sw[k]); v[k] -= b / sqrtf(sv[k]);
    }
    s[2][r] += pull * pull; s[3][c] += pull * pull;
    t[2][r] -= pull / sqrtf(s[2][r]); t[3][c] -= pull / sqrtf(s[3][c]);
  }
}
"""


def in_c(folder: Path) -> Any:
    """The loop, ``None`` without a compiler."""
    if (compiler := shutil.which("cc")) is None:
        return None
    (folder / "loop.c").write_text(LOOP)
    options = ["-O3", "-march=native", "-ffast-math", "-shared", "-fPIC"]
    line = [compiler, *options, "-o", str(folder / "loop.so"), str(folder / "loop.c"), "-lm"]
    subprocess.run(line, check=True)
    return ctypes.CDLL(str(folder / "loop.so")).steps


def run_c(loop: Any, entries: Path, n_words: int, given: argparse.Namespace) -> tuple[float, Any]:
    """Seconds and tables."""
    random, kept = np.random.default_rng(0), np.fromfile(entries, dtype=ENTRY)
    shapes = [(n_words, given.dim)] * 2 + [(n_words, 1)] * 2
    tables = [((random.random(shape) - 0.5) / given.dim).astype(np.float32) for shape in shapes]
    squares = [np.full(shape, RATE**-2, dtype=np.float32) for shape in shapes]
    pointers = [
        (ctypes.c_void_p * 4)(*(each.ctypes.data for each in some)) for some in (tables, squares)
    ]
    parts = np.array_split(kept, given.workers)
    began_s = time.perf_counter()
    for _ in range(given.epochs):
        threads = [
            threading.Thread(
                target=loop,
                args=(
                    *pointers,
                    ctypes.c_void_p(part.ctypes.data),
                    ctypes.c_long(len(part)),
                    given.dim,
                    ctypes.c_float(X_MAX),
                    ctypes.c_float(ALPHA),
                ),
            )
            for part in parts
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return time.perf_counter() - began_s, tables


def run_ours(given: argparse.Namespace, workers: int) -> tuple[float, Any, int]:
    """Seconds, tables, and how many words there are."""
    pl.seed_everything(0, verbose=False)
    module, clock = GloVe(given.dim, RATE, X_MAX, ALPHA, compiled=True, save=()), Clock(workers)
    with tempfile.TemporaryDirectory() as folder:
        data = Cooccurrences(given.text, min_count=given.min_count)
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
    tables = [each.detach().numpy() for each in module.tables.parameters()]
    return clock.ended_s - clock.began_s, tables, len(module.vocabulary)


def cost(tables: Any, entries: Path) -> float:
    """Return the mean cost of all entries."""
    module = GloVe(tables[0].shape[1], RATE, X_MAX, ALPHA)
    for table in tables:
        module.tables.append(torch.nn.Embedding.from_pretrained(torch.from_numpy(table)))
    n, total = 0, 0.0
    data = Entries(entries, 200_000)
    with torch.no_grad():
        for part in (data[at] for at in range(len(data))):
            total += float(module.loss(*part))
            n += len(part[0])
    return total / n


def compile_steps() -> None:
    """Here, so that workers, which are forks, find them."""
    tables = tuple(np.ones((1, width), dtype=np.float32) for width in (2, 2, 1, 1))
    entry = (np.zeros(1, np.int32), np.zeros(1, np.int32), np.ones(1, np.float32))
    glove_steps(tables, tuple(each.copy() for each in tables), entry, X_MAX, ALPHA)


def write_entries(given: argparse.Namespace, folder: Path) -> tuple[Path, int]:
    """As ours makes them; and how many words there are."""
    data = Cooccurrences(given.text, min_count=given.min_count, cache=str(folder))
    data.trainer = pl.Trainer(logger=False, accelerator="cpu", default_root_dir=folder)
    data.prepare_data()
    data.setup()
    numbers = np.memmap(data.folder / "numbers.int32", dtype=np.int32, mode="r")
    count_cooccurrences(numbers, len(data.vocabulary), data.window, folder / "all")
    return folder / "all", len(data.vocabulary)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", nargs="+", required=True, help="text files, plain or gzipped")
    parser.add_argument("--workers", type=int, default=2, help="default 2")
    parser.add_argument("--dim", type=int, default=50, help="default 50")
    parser.add_argument("--min-count", type=int, default=5, help="default 5")
    parser.add_argument("--epochs", type=int, default=5, help="default 5")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each (default 3)")
    return parser.parse_args()


def main() -> None:
    """Measure, print."""
    hush()
    hush_lightning()
    given = parse()
    compile_steps()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        entries, n_words = write_entries(given, folder)
        n, loop = len(Entries(entries, 1)), in_c(folder)
        print(f"{n:,} entries, {n_words:,} words", flush=True)
        costs = {"one worker": cost(run_ours(given, 1)[1], entries)}
        speeds: dict[str, list[float]] = {"ours": [], "C": []}
        for turn in range(given.repeats):
            for who in ("ours", "C") if turn % 2 else ("C", "ours"):
                if who == "C" and loop is None:
                    continue
                if who == "C":
                    seconds, tables = run_c(loop, entries, n_words, given)
                else:
                    seconds, tables, _ = run_ours(given, given.workers)
                speeds[who].append(given.epochs * n / seconds)
                costs[who] = cost(tables, entries)
    for who, each in speeds.items():
        if each:
            print(f"{who:5} {statistics.median(each):,.0f} entries/s")
    ratios = [a / b for a, b in zip(speeds["ours"], speeds["C"], strict=bool(speeds["C"]))]
    if ratios:
        print(f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    print("cost  " + "  ".join(f"{who} {value:.5f}" for who, value in costs.items()))


if __name__ == "__main__":
    main()
