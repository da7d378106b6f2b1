"""Sandblaster's L-BFGS in figures: its loss, its speed, and what backups gain.

    python scripts/sandblaster.py loss speed straggler --data rcv1_small.train.vw --json FILE

``loss``: logistic regression on documents in Vowpal Wabbit's format (``--data``; without it, 1,000
documents made here): evaluations until the loss is within 1e-6 of the minimum, and the loss after
13, against SciPy's L-BFGS-B, scikit-learn and, where it is installed, Vowpal Wabbit's bfgs
(``pip install vowpalwabbit``). ``speed``: one pass over ``--documents`` made ones with 2 workers,
of ``hybridtrain.Server`` and of Lightning's strategy, against scikit-learn's loss and gradient on
one core, by turns. ``straggler``: 2 workers, of which
one sleeps 3 times as long in each portion: one portion for each, against many, with and without
backups. A figure holds for the machine and its load, which are printed first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy is imported

import numpy as np
import pytorch_lightning as pl
import torch
from benchmarks.jobs.loops import trainer
from benchmarks.machine import in_short, machine
from benchmarks.parts.straggler import Work, measure
from scipy.optimize import minimize
from scipy.sparse import csr_matrix
from scipy.special import expit
from sklearn._loss.loss import HalfBinomialLoss
from sklearn.linear_model import LogisticRegression
from sklearn.linear_model._linear_loss import LinearModelLoss
from torch.utils.data import DataLoader, Dataset

from hybridtrain import HybridStrategy, Server, Worker
from hybridtrain.cli.quiet import hush, hush_lightning

PASSES, CLOSE = 13, 1e-6


# ---- documents ----------------------------------------------------------------------------------


def read(path: Path) -> tuple[csr_matrix, np.ndarray[Any, Any]]:
    """Documents in Vowpal Wabbit's format, with numbered features; labels are -1 and 1."""
    labels, values, columns, ends = [], [], [], [0]
    for line in path.read_text().splitlines():
        label, _, features = line.partition("|")
        pairs = [each.split(":") for each in features.split()[1:]]
        labels.append(float(label.split()[0]))
        columns += [int(number) for number, _ in pairs]
        values += [float(value) for _, value in pairs]
        ends.append(len(columns))
    return csr_matrix((values, columns, ends)), np.array(labels)


def made(n: int, words: int = 47_236, each: int = 75) -> tuple[csr_matrix, np.ndarray[Any, Any]]:
    """Documents of the same kind: few frequent words, many rare ones, rows of length 1."""
    numbers = np.random.default_rng(0)
    columns = (words * numbers.random(n * each) ** 4).astype(np.int32)
    rows = np.repeat(np.arange(n, dtype=np.int32), each)
    counts = csr_matrix((np.ones(n * each), (rows, columns)), shape=(n, words))
    counts.data = np.log1p(counts.data) * numbers.lognormal(0.0, 0.5, counts.nnz)
    counts.data /= np.repeat(np.sqrt(counts.power(2).sum(1).A1), np.diff(counts.indptr))
    margins = counts @ numbers.standard_normal(words) * 8 + numbers.logistic(size=n)
    return counts, np.where(margins > 0, 1.0, -1.0)


class Portions(Dataset[Any]):
    """Documents, so many in each item."""

    def __init__(self, x: csr_matrix, y: np.ndarray[Any, Any], size: int) -> None:
        starts = range(0, len(y), size)
        self.items = [(torch.from_numpy(y[s : s + size]), Rows(x[s : s + size])) for s in starts]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Any:
        return self.items[number]


class Rows:
    """Keeps a sparse matrix from whoever looks for tensors in a mini-batch."""

    def __init__(self, matrix: csr_matrix) -> None:
        self.matrix, self.columns = matrix, matrix.T


class Margins(torch.autograd.Function):
    """x @ w."""

    @staticmethod
    def forward(ctx: Any, w: torch.Tensor, rows: Rows) -> torch.Tensor:  # type: ignore[override]
        """(documents,)."""
        ctx.rows = rows
        return torch.from_numpy(rows.matrix @ w.detach().numpy())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        """(words,)."""
        return torch.from_numpy(ctx.rows.columns @ gradient.numpy()), None


class Logistic(pl.LightningModule):
    """The mean of log(1 + exp(-y x w)), and l2 / 2 |w|²."""

    def __init__(self, words: int, l2: float) -> None:
        super().__init__()
        self.w, self.l2 = torch.nn.Parameter(torch.zeros(words, dtype=torch.float64)), l2

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """One portion."""
        margins = Margins.apply(self.w, batch[1]) * batch[0]  # type: ignore[no-untyped-call]
        return torch.nn.functional.softplus(-margins).mean() + self.l2 / 2 * self.w @ self.w

    def configure_optimizers(self) -> Any:
        """Not used."""
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Watch(pl.Callback):
    """When each pass of worker 0 has ended, and where the masters were then."""

    def __init__(self, passes: int, words: int, workers: int) -> None:
        self.points = torch.zeros(passes, words, dtype=torch.float64).share_memory_()
        self.ended_s = torch.zeros(passes, dtype=torch.float64).share_memory_()
        self.core_s = torch.zeros(workers, passes, dtype=torch.float64).share_memory_()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """All have met."""
        self.core_s[trainer.global_rank, trainer.current_epoch] = time.process_time()
        if trainer.global_rank == 0:
            self.points[trainer.current_epoch] = next(pl_module.parameters()).detach()
            self.ended_s[trainer.current_epoch] = time.perf_counter()


def trained(
    x: csr_matrix, y: np.ndarray[Any, Any], workers: int, size: int, passes: int, l2: float
) -> Watch:
    """So many passes in portions of this size."""
    watch = Watch(passes, x.shape[1], workers)
    loader = DataLoader(Portions(x, y, size), batch_size=None, shuffle=True)
    with tempfile.TemporaryDirectory() as folder:
        options = {"max_epochs": passes, "default_root_dir": folder}
        fitting = trainer(HybridStrategy("sandblaster"), workers, watch, **options)
        fitting.fit(Logistic(x.shape[1], l2), loader)
    return watch


def evaluate_portions(worker: Worker, l2: float) -> list[float]:
    """The body of a worker of ``Server``; returns when each pass has begun."""
    began_s = list[float]()
    for ((labels, rows),) in worker.batches():
        if worker.epoch == len(began_s):
            began_s.append(time.perf_counter())
        w, y = worker.model["w"], labels.numpy()
        margins = (rows.matrix @ w) * y
        gradient = rows.columns @ (-y * expit(-margins) / len(y)) + l2 * w
        loss = np.logaddexp(0.0, -margins).mean() + l2 / 2 * w @ w
        worker.push({"w": gradient}, samples=len(y), loss=loss)
    return began_s


def served(
    x: csr_matrix, y: np.ndarray[Any, Any], size: int, passes: int, l2: float
) -> tuple[float, float]:
    """Seconds of a pass of 2 workers, and the loss at the last accepted point."""
    server = Server({"w": np.zeros(x.shape[1])}, "sandblaster", threads_per_worker=1)
    data, body = Portions(x, y, size), partial(evaluate_portions, l2=l2)
    began_s = server.run(body, 2, data, batch_size=1, epochs=passes)[0]
    loss = evaluation(x, y, l2)(server.model["w"])[0]
    return float(np.median(np.diff(began_s)[1:])), float(loss)


# ---- the loss -----------------------------------------------------------------------------------


def evaluation(x: csr_matrix, y: np.ndarray[Any, Any], l2: float) -> Any:
    """scikit-learn's loss and gradient, on one core."""
    model = LinearModelLoss(HalfBinomialLoss(), fit_intercept=False)
    targets = (y > 0).astype(np.float64)
    return lambda w: model.loss_gradient(w, x, targets, l2_reg_strength=l2, n_threads=1)


def first_close(losses: Sequence[float], least: float) -> int:
    """The number of the first evaluation that is close enough to the minimum."""
    return next(n for n, loss in enumerate(losses, 1) if loss - least <= CLOSE)


def loss(given: argparse.Namespace) -> Any:
    """Evaluations, and the loss after some."""
    x, y = read(given.data) if given.data else made(1000)
    l2 = 1 / len(y)
    evaluate, losses = evaluation(x, y, l2), list[float]()

    def watched(w: Any) -> Any:
        found = evaluate(w)
        losses.append(found[0])
        return found

    options = {"gtol": 1e-9, "ftol": 0.0, "maxcor": 10}
    least = minimize(watched, np.zeros(x.shape[1]), jac=True, method="L-BFGS-B", options=options)
    near = first_close(losses, least.fun)
    found: dict[str, Any] = {"minimum": float(least.fun)}
    found["scipy"] = {"evaluations": near, "after 13": losses[PASSES - 1]}
    sk = LogisticRegression(C=1.0, fit_intercept=False, tol=1e-9).fit(x, y)
    found["scikit-learn"] = {"minimum": float(evaluate(sk.coef_[0])[0])}
    found["vowpal wabbit"] = vowpal(given.data) if given.data else {}
    for workers, size in ((1, 37), (2, 37), (2, 100), (3, 100), (3, 334)):
        points = trained(x, y, workers, size, 30, l2).points.numpy()
        values = [float(evaluate(w)[0]) for w in points]
        found[f"sandblaster, {workers} workers, portions of {size}"] = {
            "evaluations": first_close(values, least.fun),
            "after 13": values[PASSES - 1],
        }
    return found


def vowpal(path: Path) -> dict[str, float]:
    """Its objective after 13 passes, as it prints it; nothing where it is not installed."""
    with tempfile.TemporaryDirectory() as folder:
        said = (
            f"-d {path} --bfgs --passes {PASSES} --cache_file {folder}/cache --l2 1 --noconstant "
            "--holdout_off --loss_function logistic --mem 10 -b 20 --termination 0"
        )
        code = f"import vowpalwabbit; vowpalwabbit.Workspace({said!r}).finish()"
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    rows = re.findall(r"^ *(\d+) (\d\.\d+) ", ran.stderr, re.MULTILINE)
    return {"passes": int(rows[-1][0]), "loss": float(rows[-1][1])} if rows else {}


# ---- the speed ----------------------------------------------------------------------------------


def speed(given: argparse.Namespace) -> Any:
    """Seconds of a pass, by turns."""
    x, y = made(given.documents)
    l2, zeros = 1 / len(y), np.zeros(x.shape[1])
    evaluate, turns = evaluation(x, y, l2), list[tuple[float, ...]]()
    for _ in range(given.repeats):
        began_s, used_s = time.perf_counter(), time.process_time()
        for _ in range(5):
            evaluate(zeros)
        theirs = (time.perf_counter() - began_s) / 5, (time.process_time() - used_s) / 5
        watch = trained(x, y, 2, len(y) // given.portions, 8, l2)
        used = watch.core_s.diff()[:, 1:].median(1).values
        server_s, loss = served(x, y, len(y) // given.portions, 8, l2)
        assert abs(loss / evaluate(watch.points[-1].numpy())[0] - 1) < 1e-9, "they train the same"
        pass_s = float(watch.ended_s.diff()[1:].median())
        turns.append((*theirs, pass_s, float(used.max()), server_s))
    names = (
        *("scikit-learn, s", "its core, s"),
        *("2 workers, s", "core of the busier worker, s", "2 workers of Server, s"),
    )
    columns = zip(names, zip(*turns, strict=True), strict=True)
    found = {name: statistics.median(each) for name, each in columns}
    ratios = {
        "ratio": [turn[0] / turn[2] for turn in turns],
        "ratio of Server": [turn[0] / turn[4] for turn in turns],
    }
    medians = {name: statistics.median(each) for name, each in ratios.items()}
    sizes = {"documents": len(y), "values": int(x.nnz)}
    return {**sizes, **found, **medians, "all": ratios}


# ---- a slow worker ------------------------------------------------------------------------------


def straggler(given: argparse.Namespace) -> Any:
    """Seconds of a pass."""
    n, seconds, found = 3840, given.seconds, dict[str, Any]()
    for portions, backs in ((2, False), (20, False), (20, True), (60, False), (60, True)):
        times = []
        for _ in range(given.repeats):
            step_s = seconds * (1 + 1 / 3) / portions
            work = Work(step_s, 3.0, seconds, 2, n // portions, 64)
            option = f"strategy.policy.backups={str(backs).lower()}"
            rate = measure("sandblaster", 2, work, option).samples_per_s
            times.append(n / rate)
        name = f"{portions} portions, {'with' if backs else 'without'} backups"
        found[name] = {"seconds": statistics.median(times), "all": times}
    whole = found["2 portions, without backups"]["seconds"]
    for each in found.values():
        each["ratio"] = whole / each["seconds"]
    return found


PARTS = {"loss": loss, "speed": speed, "straggler": straggler}


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--data", type=Path, help="documents in Vowpal Wabbit's format")
    parser.add_argument("--documents", type=int, default=200_000, help="for speed")
    parser.add_argument("--portions", type=int, default=12, help="of all documents, for speed")
    parser.add_argument("--seconds", type=float, default=4.0, help="of an ideal pass; straggler")
    parser.add_argument("--repeats", type=int, default=3, help="turns (default 3)")
    parser.add_argument("--json", type=Path, help="also write all to this file")
    given = parser.parse_args()
    hush()
    hush_lightning()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"machine": machine()}
    print(in_short(machine()))
    for part in given.parts:
        before = os.getloadavg()[0]
        found[part] = {"load": [before], **PARTS[part](given)}
        found[part]["load"].append(os.getloadavg()[0])
        print(part, json.dumps(found[part], indent=1), flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
