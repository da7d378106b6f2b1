"""Embeddings with a long tail: what each optimizer makes of rare words, against updates and time.

    python scripts/triplet.py [epochs=2] [workers=1,2,4] [strategy=hogwild] [plot=out.png]

Each optimizer has the best of three rates for one worker; momentum also has plain SGD's rate, as
somebody who only adds it would leave it. Prints the share of rare words whose nearest class is
theirs after every quarter of an epoch, and the updates until plain SGD's last quality.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytorch_lightning as pl
import torch
from rich.console import Console
from rich.table import Table

from hybridtrain import HybridStrategy
from hybridtrain.engine.options.schemes import parts_of
from hybridtrain.engine.updates.sparse.row_optimizers import RowAdam, SparseMomentum
from hybridtrain.errors import UserError
from hybridtrain.tasks.triplet import TripletData, TripletModule
from hybridtrain.util.arguments import command

KNOWN = {"epochs": "2", "workers": "1,2,4", "strategy": "hogwild", "plot": ""}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD, rate 10": partial(torch.optim.SGD, lr=10.0),
    "lazy momentum, rate 10": partial(SparseMomentum, lr=10.0, idle="lazy"),
    "deferred momentum, rate 10": partial(SparseMomentum, lr=10.0),
    "SGD, rate 100": partial(torch.optim.SGD, lr=100.0),
    "deferred momentum, rate 20": partial(SparseMomentum, lr=20.0),
    "Adagrad, rate 0.3": partial(torch.optim.Adagrad, lr=0.3),
    "SparseAdam, rate 0.1": partial(torch.optim.SparseAdam, lr=0.1),
    "RowAdam, rate 0.1": partial(RowAdam, lr=0.1),
}


class Curve(pl.Callback):
    """Seconds and updates so far, and the quality of rare words then."""

    def __init__(self) -> None:
        self.points: list[tuple[float, int, float]] = []
        self.seconds, self._since = 0.0, 0.0

    def on_train_start(self, *_: Any) -> None:
        self._since = time.perf_counter()

    def on_validation_start(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._since

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        rare = float(trainer.callback_metrics["val/rare"])
        self.points.append((self.seconds, trainer.global_step, rare))
        self._since = time.perf_counter()


def trained(
    make: Callable[..., torch.optim.Optimizer], strategy: str, workers: int, epochs: int
) -> list[tuple[float, int, float]]:
    """One run; what was validated on the way."""
    data, curve = TripletData(), Curve()  # workers that run freely meet at ends of epochs alone
    quarter = len(data.train) // data.batch_size // 4 // workers  # of an epoch, for each worker
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu", devices=workers, logger=False,
        strategy=HybridStrategy(**parts_of(strategy), threads_per_worker=1),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, callbacks=[curve], max_epochs=4 * epochs,
        limit_train_batches=quarter,
    )  # fmt: skip
    trainer.fit(TripletModule(optimizer=make), datamodule=data)
    return curve.points


def updates_to(points: Sequence[tuple[float, int, float]], quality: float) -> str:
    """The first validation that was as good."""
    return next((str(updates) for _, updates, rare in points if rare >= quality), "never")


def show(found: dict[tuple[str, int], list[tuple[float, int, float]]]) -> Table:
    made = Table(box=None, header_style="bold")
    for head in ("optimizer", "workers", "seconds", "rare words, every quarter of an epoch",
                 "updates to SGD's"):  # fmt: skip
        made.add_column(head)
    for (name, workers), points in found.items():
        rate = name.rpartition(" ")[2]
        base = found.get((f"SGD, rate {rate}", workers), found["SGD, rate 100", workers])
        rare = " ".join(f"{each:.2f}" for _, _, each in points)
        made.add_row(
            name, str(workers), f"{points[-1][0]:.1f}", rare, updates_to(points, base[-1][2])
        )
    return made


def draw(found: dict[tuple[str, int], list[tuple[float, int, float]]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    counts = sorted({workers for _, workers in found})
    figure = Figure(figsize=(4 * len(counts) + 2, 6.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, len(counts), sharey=True, squeeze=False)
    for column, workers in enumerate(counts):
        above, below = panels[:, column]
        for name in OPTIMIZERS:
            seconds, updates, rare = zip(*found[name, workers], strict=True)
            above.plot(updates, rare, "o-", ms=3, label=name)
            below.plot(seconds, rare, "o-", ms=3)
        above.set(title=f"workers: {workers}", xlabel="updates", xlim=0, ylim=(0, 1))
        below.set(xlabel="seconds of training", xlim=0)
    figure.supylabel("share of rare words whose nearest class is theirs")
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(), loc="outside right center", frameon=False
    )
    figure.savefig(path, dpi=110)


def run(arguments: Sequence[str]) -> None:
    given = KNOWN | dict(argument.partition("=")[::2] for argument in arguments)
    if unknown := given.keys() - KNOWN.keys():
        raise UserError(f"{min(unknown)} was given; known are {', '.join(KNOWN)}")
    if not all(n.isdecimal() and int(n) for n in (given["epochs"], *given["workers"].split(","))):
        raise UserError("epochs and workers are whole numbers from 1 on: workers=1,2,4")
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    found = {}
    for count in map(int, given["workers"].split(",")):
        for name, make in OPTIMIZERS.items():
            found[name, count] = trained(make, given["strategy"], count, int(given["epochs"]))
            print(f"{name}, {count}: {found[name, count][-1]}", file=sys.stderr, flush=True)
    Console(width=140).print(show(found))
    if given["plot"]:
        draw(found, Path(given["plot"]))


if __name__ == "__main__":
    sys.exit(command(run, __doc__, None))
