"""A program as users write it, with every public name; mypy holds it to its types."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytorch_lightning as pl

import hybridtrain
from hybridtrain import (
    DeepDist,
    HybridStrategy,
    PlainProgress,
    Server,
    StepProfiler,
    Worker,
    rehearse_fit,
    replay_fit,
    simulate_strategy,
)
from hybridtrain.engine.exchanges import Await, Exchange, Leaving, Local, LocalExchange, Offer
from hybridtrain.engine.policies import (
    Accumulate,
    Apply,
    Began,
    Drop,
    Fact,
    Joined,
    Left,
    Needs,
    Order,
    Policy,
    Pushed,
    Ready,
    Release,
    SetTimer,
    TimerFired,
    Waiting,
    make_policy,
)


class EachAtOnce:
    """Applies each gradient on arrival."""

    def begin(self, n_workers: int) -> Needs:
        """Workers may be ahead of one another."""
        return Needs(whole_rounds=False)

    def on(self, fact: Fact) -> Sequence[Order]:
        """Apply what was pushed, release its worker."""
        match fact:
            case Pushed(worker):
                return [Apply((worker,)), Release((worker,))]
            case Joined() | Left() | Waiting() | Ready() | Began() | TimerFired():
                return []
        return []


POLICIES: list[Policy] = [EachAtOnce(), make_policy({"name": "backup", "k": 2})]
ORDERS: list[Order] = [Accumulate((0,)), Drop((0,)), SetTimer(1.0)]
PARTS: list[type[Exchange] | type[LocalExchange] | type[Local]] = []
LEAVING: list[Leaving] = [None]
KINDS: tuple[type[Offer], type[Await]] = (Offer, Await)


def body(worker: Worker) -> int:
    """Gradients without Lightning."""
    for rows in worker.batches():
        worker.push({"w": rows.mean(0)}, samples=float(len(rows)))
    return worker.version


def without_lightning() -> list[int]:
    """Train arrays by a body, and by DeepDist's two functions."""
    server = Server({"w": np.zeros(2)}, "async", update={"name": "sgd", "lr": 0.1})
    versions: list[int] = server.run(body, workers=2, data=np.ones((8, 2)), batch_size=2)
    with DeepDist(np.zeros(2), min_updates=2, workers=2) as dd:
        dd.train([1.0, 2.0], lambda model, rows: model + len(rows), lambda model, update: None)
    return versions


def again(trainer: pl.Trainer, other: pl.Trainer, module: pl.LightningModule) -> str:
    """Repeat a recorded run, try another policy with it, and one with a hundred workers."""
    equal: bool = replay_fit("record.bin", trainer, module).equal
    updates: object = rehearse_fit("record.bin", other, module)["updates"]
    speed: float = simulate_strategy(EachAtOnce(), workers=100, svg="100.svg").samples_per_s
    return f"{equal} {updates} {speed}"


def main() -> str:
    """Make a trainer with a policy of one's own."""
    strategy = HybridStrategy(policy=EachAtOnce(), record="record.bin", start_method="fork")
    trainer = pl.Trainer(
        strategy=strategy, devices=2, profiler=StepProfiler(), callbacks=[PlainProgress(5.0)]
    )
    updates: object = strategy.run_stats()["updates"]
    return f"{hybridtrain.__version__} {trainer.global_step} {updates}"
