"""Hogwild!'s sparse SVM: without a lock, with one for each update, in turns; and collisions.

    python scripts/hogwild.py [files=train.vw] [epochs=5] [times=20] [workers=1,2,4] [plot=out.png]

Without files the examples are made. ``times`` repeats them, as a small set would be over before it
can be measured. Prints objective and time of strategies, of bare processes with and without locks,
of scikit-learn's SGDClassifier where it is installed; and how many examples write to a feature that
another one in flight writes to as well, in virtual time.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import pytorch_lightning as pl
import torch
from rich.console import Console
from rich.table import Table
from torch import multiprocessing

import hybridtrain  # noqa: F401  (registers the strategies)
from hybridtrain.errors import UserError
from hybridtrain.tasks.hogwild.sparse_svm import ExamplesData, SparseSvm
from hybridtrain.tasks.hogwild.text_examples import Examples
from hybridtrain.util.arguments import command
from hybridtrain.virtual.service_times import ServiceTimes

MU, RATE, DECAY = 1.0, 0.1, 0.8
Curve = list[tuple[float, float]]  # seconds since the first step, and the objective then
KNOWN = {"files": "", "epochs": "5", "times": "20", "workers": "1,2,4", "plot": ""}


def repeated(once: Examples, times: int) -> Examples:
    """All examples so many times over."""
    lengths = np.tile(np.diff(once.starts), times)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    features, values = np.tile(once.features, times), np.tile(once.values, times)
    return Examples(np.tile(once.labels, times), starts, features, values, once.n_features)


def objective(weights: np.ndarray[Any, Any], examples: Examples) -> float:
    of = np.repeat(np.arange(len(examples)), np.diff(examples.starts))
    scores = np.bincount(of, weights[examples.features] * examples.values, len(examples))
    hinge = np.maximum(0, 1 - examples.labels * scores).mean()
    return float(hinge + 0.5 * MU * np.square(weights).sum() / len(examples))


# ---- strategies ---------------------------------------------------------------------------------


class Timed(pl.Callback):
    """Seconds of training epochs, without validation."""

    def __init__(self) -> None:
        self.curve: Curve = []
        self.seconds, self._began = 0.0, 0.0

    def on_train_epoch_start(self, *_: Any) -> None:
        self._began = time.perf_counter()

    def on_validation_start(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._began

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.curve.append((self.seconds, float(trainer.callback_metrics["val/objective"])))


def trained(examples: Examples, strategy: str, workers: int, epochs: int) -> Curve:
    """By ``trainer.fit``."""
    data = ExamplesData(made=1, features=10, batch_size=500)
    data.examples = data.trained = data.validated = examples
    compiled = strategy == "hogwild" or strategy == "auto"
    lr = RATE if compiled else RATE * 500
    make = lambda parameters: torch.optim.SGD(parameters, lr=lr)  # noqa: E731
    module, timed = SparseSvm(MU, RATE, DECAY, optimizer=make), Timed()
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu", devices=workers, strategy=strategy, max_epochs=epochs, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, callbacks=[timed],
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    return timed.curve


# ---- bare processes -----------------------------------------------------------------------------


def bare(examples: Examples, lock: str, workers: int, epochs: int) -> Curve:
    """Processes that share the weights: ``none``, a lock for ``each`` update, or in ``turns``.

    All step one example in each call of the compiled function, so that only the lock differs.
    """
    weights = torch.zeros(examples.n_features).share_memory_()
    shrink = (MU / examples.degrees()).float().numpy()
    context = multiprocessing.get_context("fork")
    guard, turn = context.Lock(), torch.zeros(1, dtype=torch.int64).share_memory_()
    curve, seconds = [], 0.0
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(len(examples))
        parts = np.array_split(order, workers)
        rest = (weights.numpy(), shrink, RATE * DECAY**epoch, lock, guard, turn.zero_())
        ready, go = context.Barrier(workers + 1), context.Barrier(workers + 1)
        made = [
            context.Process(target=_epoch, args=(examples, part, n, workers, ready, go, *rest))
            for n, part in enumerate(parts)
        ]
        for process in made:
            process.start()
        ready.wait()
        began = time.perf_counter()
        go.wait()
        for process in made:
            process.join()
        seconds += time.perf_counter() - began
        curve.append((seconds, objective(weights.numpy(), examples)))
    return curve


def _epoch(
    examples: Examples, part: Any, worker: int, workers: int, ready: Any, go: Any,
    weights: Any, shrink: Any, rate: float, lock: str, guard: Any, turn: Any,
) -> None:  # fmt: skip
    from hybridtrain.tasks.hogwild.hogwild_kernels import svm

    batches = [part[n : n + 1].view(np.uint64) for n in range(len(part))]
    starts = examples.starts.view(np.uint64)
    rows = examples.labels, starts, examples.features, examples.values
    svm(weights.copy(), batches[0], rows, shrink, rate)  # it is compiled by now
    own_turn = turn.numpy()
    ready.wait()
    go.wait()
    for count, batch in enumerate(batches):
        if lock == "each":
            with guard:
                svm(weights, batch, rows, shrink, rate)
            continue
        while lock == "turns" and own_turn[0] % workers != worker and own_turn[0] >= 0:
            time.sleep(0)  # or who has the turn would not run where there are fewer cores
        svm(weights, batch, rows, shrink, rate)
        if lock == "turns":
            own_turn[0] = -1 if count == len(batches) - 1 else own_turn[0] + (own_turn[0] >= 0)


def scikit_learn(examples: Examples, epochs: int) -> Curve | None:
    """One process; its rate is constant, as it has none that falls from epoch to epoch."""
    try:
        from scipy.sparse import csr_matrix
        from sklearn.linear_model import SGDClassifier
    except ImportError:
        return None
    shape = (len(examples), examples.n_features)
    matrix = csr_matrix((examples.values, examples.features, examples.starts), shape)
    made = SGDClassifier(
        alpha=MU / len(examples), learning_rate="constant", eta0=RATE, max_iter=epochs, tol=None,
        fit_intercept=False, random_state=0,
    )  # fmt: skip
    began = time.perf_counter()
    made.fit(matrix, examples.labels)
    return [(time.perf_counter() - began, objective(made.coef_[0], examples))]


def loop(examples: Examples, epochs: int) -> Curve:
    """The task's compiled steps in one process, in another order each epoch, without a trainer."""
    data = ExamplesData(made=1, features=10)
    data.examples = data.trained = data.validated = examples
    curve: Curve = []
    for measured in (False, True):
        module = SparseSvm(MU, RATE, DECAY)
        module.know(data)
        module.configure_model()
        module.trainer = pl.Trainer(logger=False, accelerator="cpu")
        began = time.perf_counter()
        for _ in range(epochs if measured else 1):
            for batch in torch.randperm(len(examples)).split(5000):
                module.step_examples(batch)
        weights = module.weights.weight.detach().numpy()[:, 0]
        curve = [(time.perf_counter() - began, objective(weights, examples))]
    return curve


# ---- collisions ---------------------------------------------------------------------------------


def collisions(examples: Examples, workers: int, n: int = 4000) -> tuple[float, float]:
    """Shares of examples, and of writes, that meet another one in flight: in virtual time."""
    draws = [ServiceTimes("exponential").stream(w, 0) for w in range(workers)]
    random, touched = np.random.default_rng(0), []
    now, ends = 0.0, [draw() for draw in draws]
    flying = [set(_features(examples, random)) for _ in range(workers)]
    met: list[set[int]] = [set() for _ in range(workers)]
    for _ in range(n):
        worker = int(np.argmin(ends))
        now = ends[worker]
        touched.append((len(met[worker]), len(flying[worker])))
        flying[worker], met[worker] = set(_features(examples, random)), set()
        for other in range(workers):
            both = flying[worker] & flying[other] if other != worker else set()
            met[worker] |= both
            met[other] |= both
        ends[worker] = now + draws[worker]()
    hit, all_of = np.array(touched).T
    return float((hit > 0).mean()), float(hit.sum() / all_of.sum())


def _features(examples: Examples, random: Any) -> Iterator[int]:
    place = int(random.integers(len(examples)))
    yield from examples.features[examples.starts[place] : examples.starts[place + 1]].tolist()


# ---- all of it ----------------------------------------------------------------------------------


def measure(examples: Examples, workers: Sequence[int], epochs: int) -> dict[str, Curve]:
    found: dict[str, Curve] = {}
    if (theirs := scikit_learn(examples, epochs)) is not None:
        found["scikit-learn, 1 process"] = theirs
    found["compiled steps, 1 process"] = loop(examples, epochs)
    for count in workers:
        found[f"hogwild, {count} workers"] = trained(examples, "hogwild", count, epochs)
    for name in ("async", "hybrid", "synchronous"):
        found[f"{name}, 2 workers"] = trained(examples, name, 2, epochs)
    for lock, about in (("none", "no lock"), ("each", "a lock per update"), ("turns", "turns")):
        for count in (1, 2):
            found[f"bare, {about}, {count}"] = bare(examples, lock, count, epochs)
    return found


def draw(found: dict[str, Curve], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="seconds of training", ylabel="objective", xscale="log")
    for name, curve in found.items():
        axes.plot(*zip(*curve, strict=True), "o-", ms=3, label=name)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def run(arguments: Sequence[str]) -> None:
    given = KNOWN | dict(argument.partition("=")[::2] for argument in arguments)
    if unknown := given.keys() - KNOWN.keys():
        raise UserError(f"{min(unknown)} was given; known are {', '.join(KNOWN)}")
    try:
        epochs, times = int(given["epochs"]), int(given["times"])
        workers = [int(each) for each in given["workers"].split(",")]
    except ValueError as error:
        raise UserError(f"epochs, times and workers are whole numbers: {error}") from error
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    data = ExamplesData(given["files"] or None, made=10_000)
    examples = repeated(data.examples, times)
    found = measure(examples, workers, epochs)
    made = Table(box=None, header_style="bold")
    for head in ("way", "objective", "seconds", "examples/s"):
        made.add_column(head, justify="left" if head == "way" else "right")
    for name, curve in found.items():
        n = len(examples) * epochs
        seconds, value = curve[-1]
        made.add_row(name, f"{value:.4f}", f"{seconds:.3f}", f"{n / seconds:,.0f}")
    Console().print(made)
    for w in (2, 4, 16):
        ofexamples, ofwrites = collisions(examples, w)
        print(f"{w} workers in virtual time: {100 * ofexamples:.1f} % of the examples share a "
              f"feature with one in flight, {100 * ofwrites:.2f} % of the writes")  # fmt: skip
    if given["plot"]:
        draw(found, Path(given["plot"]))


if __name__ == "__main__":
    sys.exit(command(run, __doc__, None))
