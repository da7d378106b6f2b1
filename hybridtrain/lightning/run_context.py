"""What the parts of a run may ask of its strategy, and how they come by it.

Lightning hands the strategy around as ``trainer.strategy``, which knows nothing of ours. Parts get
it from the functions below. Protocols type it, so that no part needs the class that puts all of
them together, and mypy sees that this class has what they ask for.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, cast

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.strategies import Strategy

from hybridtrain.exchanges import Exchange, Requirements
from hybridtrain.lightning.checkpointing.unsaved import Unsaved
from hybridtrain.lightning.collectives import Collectives
from hybridtrain.lightning.devices.device_memory import DeviceMemory
from hybridtrain.lightning.failover.rng_mailbox import RngMailbox
from hybridtrain.lightning.fault_injection.in_parent import Faults
from hybridtrain.lightning.preflight.transport_options import Transport
from hybridtrain.lightning.replay.recording import Recording
from hybridtrain.lightning.results.callback_state import CallbackState
from hybridtrain.monitoring.hang_detector import HangTimeout
from hybridtrain.options.strategy_arguments import DataArguments
from hybridtrain.policies import Policy
from hybridtrain.recovery.failure_policy import OnFailure
from hybridtrain.updates.named import NamedUpdate
from hybridtrain.updates.staleness import Correction
from hybridtrain.worker.client import Client


class Keeping(Protocol):
    """How checkpoints are written; ``broken_since_s``: when the run began that has failed."""

    how: str
    unsaved: Unsaved
    broken_since_s: float | None

    def listening(self, trainer: Any) -> AbstractContextManager[None]: ...

    def figures(self) -> dict[str, Any]: ...

    def forget_lost(self, trainer: Any) -> None: ...

    def take_over(self, trainer: Any, changes: bool = True) -> None: ...

    def prepare(self, trainer: Any) -> None: ...


class Rollback(Protocol):
    """What a worker has counted may be taken back."""

    def give_up(self) -> None: ...


class Expected(Protocol):
    """How many updates a training will make."""

    def total(self) -> int | None: ...

    def mini_batches(self) -> float: ...

    def know_end(self) -> None: ...


class Choices(Protocol):
    """What follows from a gradient that is not finite, and from too little memory."""

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
    data_options: DataArguments
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
        ...

    @property
    def root_device(self) -> torch.device:
        """Of this worker."""
        ...

    @property
    def precision_plugin(self) -> Any:
        """Lightning's."""
        ...

    @property
    def before_configuring(self) -> CallbackState | None:
        """What the module had written down by then."""
        ...

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning's, as the next two."""
        ...

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any: ...

    def optimizer_state(self, *args: Any, **kwargs: Any) -> Any: ...

    def remember_stats(self, stats: dict[str, Any]) -> None:
        """What the server has counted."""
        ...

    def remember_training(self, parts: dict[str, Any], expected: Expected) -> None:
        """What a checkpoint is to say of optimizers and schedulers."""
        ...


class WorkerContext(RunContext, Protocol):
    """In a worker."""

    saves_alone: bool
    tells: bool

    def gather_states(self) -> None:
        """All save together: what is each worker's own comes to the one who writes."""
        ...

    @property
    def client(self) -> Client:
        """To the server."""
        ...

    @property
    def collectives(self) -> Collectives:
        """What workers agree on."""
        ...

    @property
    def session(self) -> Any:
        """Forward, backward, step; ``None`` before training. For those who wrap its methods."""
        ...

    @property
    def step_rollback(self) -> Rollback | None:
        """Of the training under way."""
        ...

    @property
    def expected_updates(self) -> Expected | None:
        """Where workers run freely."""
        ...

    @property
    def callbacks_at_home(self) -> list[pl.Callback] | None:
        """Those that the calling process has, too."""
        ...

    def enter_worker(self, client: Client, trainer: Any, back: Any = None) -> None:
        """From now on this process is a worker."""
        ...

    def before_checkpoint(self) -> None:
        """Parameters, moments and step become those of one version."""
        ...

    def measure_device(self) -> None:
        """What this worker needs of its device is known better now."""
        ...

    def meet(self) -> None:
        """All workers are here."""
        ...

    def align(self, ends: bool = False) -> None:
        """All workers meet, and agree; ``ends``: no step follows in this epoch."""
        ...

    def hand_over_last(self) -> None:
        """This worker stops: what it has trained on its own is to count."""
        ...

    def await_turn(self) -> None:
        """Where workers take turns, wait for this one's."""
        ...

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Lightning's: of all workers, or of any."""
        ...

    def validate_behind_last(self) -> None:
        """A validation comes behind the last mini-batch of this worker."""
        ...


def strategy_of(trainer: Any) -> Strategy:
    """Whichever it is: what Lightning offers of each."""
    return cast(Strategy, trainer.strategy)


def cluster_environment(trainer: Any) -> Any:
    """Where its processes are; ``None``: here."""
    return trainer.strategy.cluster_environment


def context_of(trainer: Any) -> WorkerContext:
    """Of a trainer with a strategy of ours; what only workers have must not be asked elsewhere."""
    return cast(WorkerContext, trainer.strategy)


def context_if_ours(trainer: Any) -> WorkerContext | None:
    """The same for parts that are used under other strategies, too: ``None`` there."""
    return context_of(trainer) if hasattr(trainer.strategy, "requirements") else None


def checkpoints_of(trainer: Any) -> list[ModelCheckpoint]:
    """Those that meet the others to decide."""
    return [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
