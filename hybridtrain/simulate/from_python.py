"""Virtual time from Python: one strategy, perhaps of parts of one's own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

from hybridtrain.errors import UserError
from hybridtrain.exchanges import Requirements
from hybridtrain.options.strategy_arguments import checked
from hybridtrain.recording import service_times
from hybridtrain.report.page import write
from hybridtrain.report.timeline import picture
from hybridtrain.schemes import parts_of
from hybridtrain.server.timeline import Timeline
from hybridtrain.simulate.simulations import SimulationPlan, SimulationRow, StrategySpec, simulate
from hybridtrain.util.option_types import Named, Range, as_typed, check
from hybridtrain.worlds.virtual.service_times import Measured, ServiceTimes, Times
from hybridtrain.worlds.virtual.training_task import MakeOptimizer, Task

MOST_WORKERS = 10_000


def simulate_strategy(
    policy: Named = "hybrid",
    workers: int = 8,
    *,
    exchange: Named | None = None,
    update: Named | None = None,
    correction: Named | None = None,
    module: Any = None,
    data: Any = None,
    epochs: int = 1,
    times: Times | Mapping[int, Sequence[float]] | str | Path | None = None,
    batch_size: int = 32,
    mini_batches: int | None = None,
    seconds: float = math.inf,
    seed: int = 0,
    svg: str | Path | None = None,
) -> SimulationRow:
    """Run a strategy in virtual time, in this process, with as many workers as wanted.

    ``simulate_strategy(MyPolicy(), workers=100).samples_per_s``

    Args:
        policy: as for :class:`hybridtrain.HybridStrategy`, or the name of a strategy.
        workers: W.
        exchange: as for :class:`hybridtrain.HybridStrategy`; with a module.
        update: the same.
        correction: the same.
        module: a LightningModule, of which a copy is trained; ``None``: only time passes.
        data: its LightningDataModule or dataloader, unless it has one itself.
        epochs: of the module's training.
        times: of a mini-batch, in virtual seconds: a distribution
            (:class:`hybridtrain.simulate.ServiceTimes`, by default exponential with a mean of 1),
            each worker's own, or the directory of a recorded run.
        batch_size: samples of a mini-batch, without a module.
        mini_batches: after so many of all workers together the run ends, in place of the epochs;
            without a module after 20,000, unless ``seconds`` is given.
        seconds: or after so many virtual seconds.
        seed: of the times, and of the order of samples.
        svg: where to draw when each worker computed, waited or was dropped.

    Raises:
        UserError: if parts contradict each other, or the module cannot be trained this way.
    """
    check("workers", workers, Annotated[int, Range(1, MOST_WORKERS)])
    named = parts_of(policy) if isinstance(policy, str) else {"policy": policy}
    given = {"exchange": exchange, "update": update, "correction": correction}
    parts = checked(named | {name: part for name, part in given.items() if part is not None})
    if module is None:
        _check_no_gradients({name: parts[name] for name in given})  # type: ignore[literal-required]
    spec = StrategySpec(as_typed(policy), named["policy"], parts["exchange"], parts["update"])
    limit = 20_000 if module is None and seconds == math.inf else math.inf
    plan = SimulationPlan(
        times=_times(times),
        batch_size=batch_size,
        mini_batches=mini_batches or (limit if module is None else None),
        seconds=seconds,
        seed=seed,
        train=None if module is None else partial(_task, module, data, epochs, seed),
        correction=parts["correction"],
    )
    timeline = None if svg is None else Timeline(workers)
    row = simulate(plan, spec, workers, timeline)
    if timeline is not None:
        drawn = {f"{spec.label}, {workers:,} workers": timeline}
        write(Path(str(svg)), picture(drawn, "virtual {}"), "svg")
    return row


def _check_no_gradients(given: Mapping[str, Any]) -> None:
    """Raises ``UserError`` if there are parts that are about gradients."""
    for name, part in given.items():
        if part is not None:
            raise UserError(
                f"{name}={as_typed(part)} was given without a module; it is about gradients, so "
                "give module=MyModule(), and data unless it has a dataloader of its own"
            )


def _times(given: Any) -> Times:
    match given:
        case None:
            return ServiceTimes()
        case str() | Path():
            return Measured(service_times(given))
        case Mapping():
            return Measured(given)
    return cast(Times, given)


def _task(
    module: Any, data: Any, epochs: int, seed: int, workers: int, requirements: Requirements
) -> tuple[Task, MakeOptimizer]:
    """A copy of the module as a task of the virtual world."""
    from hybridtrain.lightning.replay.module_task import (
        ModuleTask,
        VirtualTrainer,
        training_loader,
    )

    own, source = deepcopy((module, data))
    trainer = VirtualTrainer(workers)
    loader = training_loader(own, source, trainer)
    task = ModuleTask(own, trainer, loader, seed, None, epochs, requirements)
    return task, task.make_optimizer
