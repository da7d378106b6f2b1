"""Virtual time from Python: one strategy, perhaps of parts of one's own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

from hybridtrain.engine.exchanges import Requirements
from hybridtrain.engine.options.schemes import parts_of
from hybridtrain.engine.options.strategy_arguments import checked
from hybridtrain.engine.recording import service_times
from hybridtrain.engine.server.timeline import Timeline
from hybridtrain.engine.updates.staleness import CorrectionSpec
from hybridtrain.errors import UserError
from hybridtrain.report.page import write
from hybridtrain.report.timeline import picture
from hybridtrain.util.option_types import Named, Range, as_typed, check
from hybridtrain.virtual.service_times import Measured, ServiceTimes, Times
from hybridtrain.virtual.simulations import SimulationPlan, SimulationRow, StrategySpec, simulate
from hybridtrain.virtual.training_task import MakeOptimizer, Task

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
        policy: as for :class:`hybridtrain.HybridStrategy`, or a strategy's name.
        workers: W.
        exchange: with a module, as for the strategy; so ``update`` and ``correction``.
        module: a LightningModule, of which a copy is trained; ``None``: only time passes.
        data: its LightningDataModule or dataloader, unless it has one; for so many ``epochs``.
        times: of a mini-batch: :class:`hybridtrain.virtual.ServiceTimes`, each worker's, or a run.
        batch_size: samples of a mini-batch, without a module.
        mini_batches: of all workers, in place of epochs; without a module 20,000.
        seconds: of virtual time, likewise.
        seed: of the times, and of the order of samples.
        svg: where to draw when workers computed and waited.

    Raises:
        UserError: if parts contradict each other, or the module cannot be trained this way.
    """
    check("workers", workers, Annotated[int, Range(1, MOST_WORKERS)])
    own = {"exchange": exchange, "update": update, "correction": correction}
    spec, late = _spec(policy, own, module is not None)
    train = None if module is None else partial(_task, module, data, epochs, seed)
    length = mini_batches or (None if train else 20_000 if seconds == math.inf else math.inf)
    plan = SimulationPlan((spec,), times=_times(times), train=train, correction=late)
    plan = replace(plan, batch_size=batch_size, mini_batches=length, seconds=seconds, seed=seed)
    return simulate(plan, spec, workers) if svg is None else _drawn(plan, spec, workers, Path(svg))


def _spec(
    policy: Named, own: Mapping[str, Any], trains: bool
) -> tuple[StrategySpec, CorrectionSpec]:
    """The strategy and its correction, checked as those of a training."""
    named = parts_of(policy) if isinstance(policy, str) else {"policy": policy}
    parts = checked(named | {name: part for name, part in own.items() if part is not None})
    if not trains:
        _check_no_gradients({name: parts[name] for name in own})  # type: ignore[literal-required]
    spec = StrategySpec(as_typed(policy), named["policy"], parts["exchange"], parts["update"])
    return spec, parts["correction"]


def _drawn(plan: SimulationPlan, spec: StrategySpec, workers: int, svg: Path) -> SimulationRow:
    timeline = Timeline(workers)
    row = simulate(plan, spec, workers, timeline)
    write(svg, picture({f"{spec.label}, {workers:,} workers": timeline}, "virtual {}"), "svg")
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
