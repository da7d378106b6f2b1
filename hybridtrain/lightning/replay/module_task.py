"""A LightningModule and its data as a task of the virtual world.

One module in one process computes all workers' gradients: its parameters point to the worker's
values, ``training_step`` takes the worker's mini-batch, and logged values are dropped. All workers
share buffers (batch normalisation) and random numbers (dropout). Hooks and callbacks are not run.
Orders, weights and mini-batches are those of a real run.
"""

from __future__ import annotations

import inspect
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
)

from hybridtrain.engine.exchanges import Requirements
from hybridtrain.engine.protocol.messages import Clip
from hybridtrain.engine.samplers import Order, Seeded
from hybridtrain.engine.updates.groups import Groups, differences, plain
from hybridtrain.engine.updates.serialize import dump, load
from hybridtrain.errors import UserError
from hybridtrain.lightning.async_training.expected_updates import expected_in
from hybridtrain.lightning.data.batch_size import Scales, keeps_all
from hybridtrain.lightning.data.user_loaders import is_plain, plan_of, sampler_of
from hybridtrain.lightning.hooks.trainer_hooks import configured_optimizers, give_module
from hybridtrain.lightning.run_context import strategy_of
from hybridtrain.lightning_package import own_name
from hybridtrain.virtual.training_task import Timetable


class VirtualTrainer(pl.Trainer):
    """The trainer that the module sees, with W workers; it runs no loop."""

    def __init__(self, workers: int) -> None:
        told = logging.getLogger(own_name("pytorch_lightning.utilities.rank_zero"))
        before = told.level
        told.setLevel(logging.WARNING)  # hides messages about this machine's devices
        super().__init__(
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        told.setLevel(before)
        self._workers, self.epoch, self.version = workers, 0, 0
        self._expected = math.inf

    @property
    def world_size(self) -> int:
        return self._workers

    @property
    def current_epoch(self) -> int:
        return self.epoch

    @property
    def global_step(self) -> int:
        return self.version

    @property
    def estimated_stepping_batches(self) -> float:
        return self._expected

    def expect(self, steps: float) -> None:
        """Schedules will make so many steps in all."""
        self._expected = steps


def training_loader(module: pl.LightningModule, data: Any, trainer: VirtualTrainer) -> Any:
    """The training dataloader, after the hooks that Lightning calls before it.

    Args:
        data: a LightningDataModule or a dataloader; ``None``: the module has one.
    """
    module.trainer = trainer
    give_module(strategy_of(trainer), module)
    hooked = data is not None and hasattr(data, "train_dataloader")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for part in [data, module] if hooked else [module]:
            part.trainer = trainer
            part.prepare_data()
            part.setup("fit")
        if data is not None and not hooked:
            return data
        return (data if hooked else module).train_dataloader()


class ModuleTask:
    """Computes all workers' gradients.

    Args:
        module: its ``training_step`` gives the loss.
        trainer: seen by module and data.
        loader: of the training data.
        seed: of the order of an epoch.
        clip: clipping of the merged gradient.
        epochs: of the training.
        requirements: of policy and exchange, for the length of schedules.

    Raises:
        UserError: if the module cannot be trained this way.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        trainer: VirtualTrainer,
        loader: Any,
        seed: int,
        clip: Clip | None = None,
        epochs: float = math.inf,
        requirements: Requirements | None = None,
    ) -> None:
        _check(module, loader)
        self.clip, self.loss, self.epochs = clip, 0.0, epochs
        self._module, self._trainer = module, trainer
        module.trainer = trainer
        vars(module)["log"] = _ignore
        self._parameters = list(module.parameters())
        self._loader, self._scales = loader, Scales(module)
        self.timetable, self._order = _timetable(loader, trainer.world_size, seed)
        self._orders: dict[int, Sequence[int]] = {}
        self._batches: dict[int, Any] = {}  # of each worker
        self._takes_index = len(inspect.signature(module.training_step).parameters) > 1
        if requirements is not None and math.isfinite(epochs):
            trainer.expect(expected_in(self.timetable, int(epochs), requirements))
        optimizers, schedules = configured_optimizers(module)
        if len(optimizers) != 1:
            raise UserError("in virtual time a module has one optimizer; configure_optimizers gave "
                            f"{len(optimizers)}")  # fmt: skip
        self._optimizer = optimizers[0]
        _check_schedules(schedules)
        shared = (module, trainer, loader, *self._parameters)
        self._schedules = OptimizerSchedules(self._optimizer, schedules, shared)
        module.train()

    def parameters(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self._parameters]

    def make_optimizer(self, masters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The module's own optimizer, over these masters."""
        number_of = {id(p): number for number, p in enumerate(self._parameters)}
        return load(dump(self._optimizer, number_of), lambda number: masters[number])[0]

    # ---- mini-batches ---------------------------------------------------------------------------

    def study(self, worker: int, epoch: int, positions: Sequence[int]) -> float:
        """Fetch the mini-batch; return its weight."""
        if epoch not in self._orders:
            self._orders = {epoch: self._order(epoch)}
        self._trainer.epoch = epoch
        indices = [self._orders[epoch][position] for position in positions]
        batch = self._fetch(indices)
        self._batches[worker] = batch
        known = None if self._loader.batch_sampler is None else float(len(indices))
        return self._scales.weigh(batch, known, keeps_all(self._loader))

    def _fetch(self, indices: Sequence[int]) -> Any:
        data, collate = self._loader.dataset, self._loader.collate_fn
        if self._loader.batch_sampler is None:
            return collate(data[indices[0]])
        if hasattr(data, "__getitems__"):
            return collate(data.__getitems__(indices))
        return collate([data[index] for index in indices])

    def gradient(
        self, worker: int, values: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor | None]:
        """The gradient of the module's loss on the worker's mini-batch."""
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.data, parameter.grad = value, None
        batch = self._batches[worker]
        with torch.enable_grad():
            arguments = (batch, 0) if self._takes_index else (batch,)
            loss: Any = self._module.training_step(*arguments)
            loss = loss["loss"] if isinstance(loss, dict) else loss
            if loss is None:
                raise UserError("training_step returned None; in virtual time it must give a loss")
            loss.backward()
        self.loss = float(loss.detach())
        found = [parameter.grad for parameter in self._parameters]
        return [g.to_dense() if g is not None and g.is_sparse else g for g in found]

    # ---- schedules ------------------------------------------------------------------------------

    def updated(self, version: int) -> Groups | None:
        """Advance schedulers in steps after an update."""
        self._trainer.version = version
        return self._schedules.updated(version)

    def epoch_ended(self) -> Groups | None:
        """Advance schedulers in epochs."""
        return self._schedules.epoch_ended()

    def groups(self) -> Groups:
        return self._schedules.groups()

    def own_schedules(self) -> OptimizerSchedules:
        return self._schedules.own_schedules()


class OptimizerSchedules:
    """An optimizer's schedulers, and the hyper-parameters that they change.

    Args:
        optimizer: is not stepped.
        schedules: Lightning's, in steps or epochs.
        shared: which copies have in common.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, schedules: Sequence[Any], shared: Sequence[Any] = ()
    ) -> None:
        self._optimizer, self._schedules, self._shared = optimizer, schedules, shared
        self._told: Groups = plain(optimizer)
        self._version = self._epoch = self._epoch_began = 0  # the last: after so many updates

    def updated(self, version: int) -> Groups | None:
        """Advance schedulers in steps; as in Lightning, each epoch counts anew."""
        for each in range(self._version + 1, version + 1):
            self._advance("step", each - self._epoch_began)
        self._version = version
        return self._news()

    def epoch_ended(self) -> Groups | None:
        """Advance schedulers in epochs."""
        self._epoch, self._epoch_began = self._epoch + 1, self._version
        self._advance("epoch", self._epoch)
        return self._news()

    def groups(self) -> Groups:
        """All hyper-parameters as they are now."""
        return plain(self._optimizer)

    def own_schedules(self) -> OptimizerSchedules:
        """A copy, as they are now."""
        return deepcopy(self, {id(each): each for each in (self._shared, *self._shared)})

    def _advance(self, interval: str, count: int) -> None:
        with warnings.catch_warnings():  # the optimizer steps in the server
            for message in ("Detected call of `lr_scheduler.step", "Seems like `optimizer.step"):
                warnings.filterwarnings("ignore", message=message)
            for each in self._schedules:
                if each.interval == interval and count % each.frequency == 0:
                    each.scheduler.step()

    def _news(self) -> Groups | None:
        now = plain(self._optimizer)
        news, self._told = differences(self._told, now), now
        return news


def _ignore(*args: Any, **rest: Any) -> None:
    """In place of the module's ``log``."""


def _check(module: pl.LightningModule, loader: Any) -> None:
    if not module.automatic_optimization:
        raise UserError(
            f"{type(module).__name__} optimizes manually; in virtual time only modules whose "
            "training_step returns the loss can be trained"
        )
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise UserError(
            "in virtual time a module is trained on one DataLoader over a data set that can be "
            f"indexed; train_dataloader gave {type(loader).__name__}"
        )


def _check_schedules(schedules: Sequence[Any]) -> None:
    if any(schedule.reduce_on_plateau for schedule in schedules):
        raise UserError(
            "a schedule that follows a metric was configured; in virtual time nothing is validated "
            "on the way, so only schedules in steps or epochs can be followed"
        )


def _timetable(
    loader: DataLoader[Any], workers: int, seed: int
) -> tuple[Timetable, Callable[[int], Sequence[int]]]:
    """The mini-batches and the order of an epoch."""
    batches = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        raise UserError(
            f"the DataLoader has a {type(batches).__name__}; in virtual time mini-batches are "
            "those of a plain DataLoader, or items of the data set"
        )
    sampler: Any = sampler_of(loader)
    in_order = workers == 1 and isinstance(sampler, SequentialSampler)  # as a real run has it
    seeded = Seeded(len(loader.dataset), None if in_order else seed)  # type: ignore[arg-type]
    order: Order = seeded if is_plain(loader) else lambda epoch: list(sampler)
    plan = plan_of(loader, order, None, workers)
    return Timetable(plan.length, plan.sizes, plan.drop_last), order
