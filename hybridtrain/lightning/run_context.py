"""The strategy as seen by the parts of a run: protocols, and functions that get it.

Lightning types ``trainer.strategy`` as its own base class. Parts get ours from the functions below,
typed by protocols, so that none imports the class that puts all of them together; mypy checks that
this class has these members.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, cast

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.strategies import Strategy

from hybridtrain.exchanges import Exchange, Requirements
from hybridtrain.lightning.checkpointing.checkpoint_io import Unsaved
from hybridtrain.lightning.collectives import Collectives
from hybridtrain.lightning.device_memory import DeviceMemory
from hybridtrain.lightning.failover.rng_mailbox import RngMailbox
from hybridtrain.lightning.fault_injection.in_parent import Faults
from hybridtrain.lightning.preflight.transport_options import Transport
from hybridtrain.lightning.replay.recording import Recording
from hybridtrain.lightning.results.callback_state import ModuleState
from hybridtrain.monitoring.hang_detector import HangTimeout
from hybridtrain.options.strategy_arguments import StrategyArguments
from hybridtrain.policies import Policy
from hybridtrain.recovery.failure_policy import OnFailure
from hybridtrain.updates.named import NamedUpdate
from hybridtrain.updates.staleness import Correction
from hybridtrain.worker.client import Client


class Keeping(Protocol):
    """Writes checkpoints; ``broken_since_s``: when a run began that failed."""

    how: str
    unsaved: Unsaved
    broken_since_s: float | None

    def listening(self, trainer: Any) -> AbstractContextManager[None]: ...

    def figures(self) -> dict[str, Any]: ...

    def forget_lost(self, trainer: Any) -> None: ...

    def take_over(self, trainer: Any, changes: bool = True) -> None: ...

    def prepare(self, trainer: Any) -> None: ...


class Rollback(Protocol):
    """Takes a worker's last step back."""

    def give_up(self) -> None: ...


class Expected(Protocol):
    """The number of updates of a training."""

    def total(self) -> int | None: ...

    def mini_batches(self) -> float: ...

    def know_end(self) -> None: ...


class Choices(Protocol):
    """The user's options for gradients that are not finite, and for out-of-memory errors."""

    @property
    def nonfinite(self) -> str: ...

    @property
    def oom(self) -> str: ...


class RunContext(Protocol):
    """In the process that starts the workers, and in each worker."""

    policy: Policy
    exchange: Exchange
    update: NamedUpdate
    correction: Correction | None
    requirements: Requirements
    recording: Recording | None
    rng_mailbox: RngMailbox | None
    transport: Transport
    on_failure: OnFailure
    data_options: StrategyArguments
    faults: Faults
    patience: HangTimeout | None
    start_method: str
    threads_per_worker: int | Literal["auto"]
    stop_grace_s: float
    interrupted_by: int | None
    parallel_devices: list[torch.device] | None
    device_memory: DeviceMemory
    workers_per_device: int

    @property
    def keeping(self) -> Keeping: ...

    @property
    def on_fault(self) -> Choices: ...

    @property
    def world_size(self) -> int:
        """W."""

    @property
    def root_device(self) -> torch.device:
        """This worker's."""

    @property
    def precision_plugin(self) -> Any:
        """Lightning's."""

    @property
    def before_configuring(self) -> ModuleState | None:
        """The module's attributes after ``setup``."""

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning's, as are the next two."""

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any: ...

    def optimizer_state(self, *args: Any, **kwargs: Any) -> Any: ...

    def change_loaded(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Let checkpoints pass through ``change`` when they are loaded, also in workers."""
        ...

    def remember_stats(self, stats: dict[str, Any]) -> None:
        """Keep the server's statistics."""

    def remember_training(self, parts: dict[str, Any], expected: Expected) -> None:
        """Keep the trained states of optimizers and schedulers."""


class WorkerContext(RunContext, Protocol):
    """In a worker."""

    saves_alone: bool
    tells: bool

    def gather_states(self) -> None:
        """All save together: the writing worker receives each worker's own state."""

    @property
    def client(self) -> Client:
        """The connection to the server."""

    @property
    def collectives(self) -> Collectives:
        """The collectives of all workers."""

    @property
    def session(self) -> Any:
        """Forward, backward, step; ``None`` before training. Untyped: parts wrap its methods."""

    @property
    def step_rollback(self) -> Rollback | None:
        """Undoes what was counted of a step that is broken off."""

    @property
    def expected_updates(self) -> Expected | None:
        """In free-running workers."""

    @property
    def callbacks_at_home(self) -> list[pl.Callback] | None:
        """Callbacks that the calling process has, too."""

    def enter_worker(self, client: Client, trainer: Any, back: Any = None) -> None:
        """Make this process a worker."""

    def before_checkpoint(self) -> None:
        """Bring parameters, moments and step to one version."""

    def decide_on_checkpoint(self) -> None:
        """``ModelCheckpoint`` is about to name a checkpoint."""

    def save_one_update(self, hook: Callable[[], None]) -> None:
        """Let a hook of ``ModelCheckpoint`` name and write checkpoints of one update."""

    def measure_device(self) -> None:
        """Measure this worker's need of its device."""

    def meet(self) -> None:
        """All workers meet, at the end of this worker's share."""

    def align(self, ends: bool = False) -> None:
        """All workers meet and agree; ``ends``: no step follows in this epoch."""

    def hand_over_last(self) -> None:
        """This worker stops: exchange its own steps."""

    def await_turn(self) -> None:
        """Wait for this worker's turn, where workers take turns."""

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Lightning's: of all workers, or of any."""

    def validate_behind_last(self) -> None:
        """A validation follows this worker's last mini-batch."""


def strategy_of(trainer: Any) -> Strategy:
    """The trainer's strategy, of any kind."""
    return cast(Strategy, trainer.strategy)


def cluster_environment(trainer: Any) -> Any:
    """Lightning's cluster environment; ``None``: none."""
    return trainer.strategy.cluster_environment


def context_of(trainer: Any) -> WorkerContext:
    """The strategy of ours; members of workers must not be read in another process."""
    return cast(WorkerContext, trainer.strategy)


def context_if_ours(trainer: Any) -> WorkerContext | None:
    """The same; ``None`` under a strategy of Lightning's own."""
    return context_of(trainer) if hasattr(trainer.strategy, "requirements") else None


def checkpoints_of(trainer: Any) -> list[ModelCheckpoint]:
    """The trainer's ``ModelCheckpoint`` callbacks."""
    return [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
