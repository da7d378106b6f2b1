"""Random runs of :class:`hybridtrain.Server`: each sample counts once an epoch.

Drawn are strategy, feature, form of the data, sizes, number of workers, who is lost where, and how
long a step takes. A sample's gradient is that of one element, so a sum counts the samples.
"""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridtrain import Server, Worker
from hybridtrain.virtual.service_times import ServiceTimes
from tests.picking import but_slow

COUNTING = ("hybrid", "synchronous", "backup", "k_async", "k_batch_sync", "k_batch_async", "ssp")
COUNTING += ("softsync", "async", "grace", "downpour")
OWN = ("local_sgd", "post_local_sgd", "easgd", "diloco", "async_diloco", "downpour")  # parameters
FEATURES = ("plain", "abstains", "rows", "two runs", "saved", "recorded", "simulated")
FEATURES += ("saves inside", "pulls", "holds back", "pushes twice", "pushes parts")
SGD = {"name": "sgd", "lr": 1.0}


@dataclass(frozen=True)
class Case:
    """One run; worker ``lost`` ends in its mini-batch number ``at``, ``before`` its push or not."""

    strategy: str
    feature: str
    data: str
    workers: int
    n: int
    size: int
    epochs: int
    drop_last: bool
    seed: int | None
    lost: int | None
    at: int
    before: bool
    step_s: float

    def __str__(self) -> str:
        return "-".join(map(str, vars(self).values()))

    @property
    def how(self) -> dict[str, Any]:
        return {
            "batch_size": self.size,
            "epochs": self.epochs,
            "drop_last": self.drop_last,
            "seed": self.seed,
        }


def drawn(seed: int) -> Case:
    """The same for the same seed."""
    rng = random.Random(seed)
    strategy, feature = rng.choice([*COUNTING, *OWN]), rng.choice(FEATURES)
    workers, epochs = rng.choice([1, 2, 2, 3, 4]), rng.choice([1, 2, 3])
    survives = workers > 1 and (strategy not in OWN or strategy in ("easgd", "downpour"))
    survives &= feature not in ("simulated", "two runs", "saved")
    lost = rng.choice([None, 0, 1, workers - 1]) if survives else None
    if feature == "holds back":  # docs/worker.md: what is held over the end of an epoch
        feature = "plain" if strategy in ("backup", "k_batch_sync") else feature
        epochs = epochs if lost is None else 1
    if feature == "pulls" and strategy in OWN:  # is refused
        feature = "plain"
    return Case(
        strategy,
        feature,
        rng.choice(["number", "array", "tuple", "dict", "list", "iterator"]),
        workers,
        rng.choice([7, 24, 25, 31, 40]),
        rng.choice([1, 2, 3, 5]),
        epochs,
        rng.random() < 0.2,
        rng.choice([0, 0, None, 7]),
        lost,
        rng.choice([0, 1, 2, 3, 5]),
        rng.random() < 0.5,
        rng.choice([0.0, 0.0, 0.003]),
    )


def data_of(case: Case) -> Any:
    """Each sample is its number."""
    numbers = np.arange(case.n)
    forms = {"number": case.n, "array": numbers, "tuple": (numbers, -numbers)}
    forms |= {"dict": {"a": numbers, "b": [*range(case.n)]}, "list": [*range(case.n)]}
    return forms.get(case.data, iter(range(case.n)))


def numbers_in(batch: Any) -> np.ndarray[Any, Any]:
    """The samples of a mini-batch, the same in each column."""
    if isinstance(batch, tuple):
        assert (batch[0] == -batch[1]).all()
        batch = batch[0]
    if isinstance(batch, dict):
        assert [*batch["a"]] == [*batch["b"]]
        batch = batch["a"]
    return np.asarray(batch)


def count(case: Case, folder: Path, worker: Worker) -> None:
    held, rng = np.zeros(case.n), random.Random(worker.number)
    for step, batch in enumerate(worker.batches()):
        numbers = numbers_in(batch)
        time.sleep(case.step_s * (3 if worker.number == 0 else 1))
        ends = worker.number == case.lost and step == case.at and not (folder / "lost").exists()
        if ends and case.before:
            end(folder)
        held -= np.bincount(numbers, minlength=case.n)
        if case.feature == "rows":
            worker.push({"seen": (numbers, -np.ones(len(numbers)))})
        elif case.feature == "abstains" and rng.random() < 0.4:
            worker.push(None)
            held[:] = 0
        elif case.feature == "pushes parts":
            for part in (numbers[:1], numbers[1:]):
                gradient = -np.bincount(part, minlength=case.n)
                worker.push({"seen": gradient}, samples=len(part) or None)
            held[:] = 0
        elif case.feature != "holds back" or step % 2:
            worker.push({"seen": held})
            held = np.zeros(case.n)
        if case.feature == "pushes twice":
            worker.push({"seen": np.zeros(case.n)})
        if case.feature == "pulls":
            worker.pull()
        if case.feature == "saves inside" and worker.number == worker.n_workers - 1 and step == 2:
            worker.save(folder / "inside.pt")
        if ends:
            end(folder)
    if case.feature == "holds back" and held.any():
        worker.push({"seen": held})


def end(folder: Path) -> None:
    (folder / "lost").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def server_of(case: Case, **options: Any) -> Server:
    model = {name: np.zeros(case.n if name == "seen" else 2) for name in ("seen", "a", "b")}
    chosen: dict[str, Any] = {"update": "sum"}
    if case.strategy in OWN:
        chosen = {"optimizer": SGD if case.strategy == "downpour" else {"name": "sgd", "lr": 0.1}}
    options |= {} if case.lost is None else {"on_failure": "continue"}
    return Server(model, case.strategy, **chosen, **options)


FOUND = (  # by a longer search
    # What a worker held was given to it again, as it went on with the samples of a lost one.
    Case("synchronous", "holds back", "number", 2, 40, 3, 1, False, 0, 0, 2, True, 0.01),
    # The samples of a mini-batch counted with each of its pushes.
    Case("downpour", "pushes twice", "array", 2, 40, 5, 3, False, 7, None, 0, True, 0.0),
    # Each part of a dropped mini-batch that was pushed with ``samples`` was judged by itself.
    Case("backup", "pushes parts", "array", 3, 40, 3, 2, False, 0, None, 0, True, 0.0),
    Case("k_batch_sync", "pushes parts", "array", 3, 40, 3, 2, False, 0, None, 0, True, 0.003),
)
CASES = [*FOUND, *(drawn(seed) for seed in range(150))]


@pytest.mark.parametrize("case", but_slow([(c,) for c in CASES], lambda _, n: n > 5), ids=str)
def test_each_sample_counts_once_an_epoch(case: Case, tmp_path: Path) -> None:
    body = partial(count, case, tmp_path)
    record = {"record": tmp_path / "run.bin"} if case.feature == "recorded" else {}
    server, runs = server_of(case, **record), 1
    if case.feature == "simulated":
        times = ServiceTimes("exponential", 1.0)
        server.simulate(body, case.workers, data_of(case), times, **case.how)
    else:
        server.run(body, case.workers, data_of(case), **case.how)
    samples = server.stats()["samples"]
    if case.feature in ("two runs", "saved"):
        if case.feature == "saved":
            server.save(tmp_path / "run.pt")
            server = server_of(case)
            server.load(tmp_path / "run.pt")
        server.run(body, case.workers + 1, data_of(case), **case.how)
        samples, runs = samples + server.stats()["samples"], 2
    is_exact(case, server.model["seen"], samples, case.epochs * runs)
    if case.feature == "recorded":
        again = server_of(case)
        assert again.replay(tmp_path / "run.bin", body, data_of(case), **case.how).equal
        assert (again.model["seen"] == server.model["seen"]).all()


def is_exact(case: Case, seen: np.ndarray[Any, Any], samples: float, epochs: int) -> None:
    """``seen``: how often each sample has counted, unless workers average their parameters."""
    counts = case.strategy in COUNTING
    if case.feature == "abstains" or case.drop_last:
        assert samples <= case.n * epochs
        assert not counts or (seen.min() >= 0 and seen.max() <= epochs)
    else:
        assert samples == case.n * epochs
        assert not counts or set(seen) == {epochs}
    assert np.isfinite(seen).all()
