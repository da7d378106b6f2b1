"""The part of the strategy with ranks, devices, collectives and optimizers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from pytorch_lightning.strategies import ParallelStrategy, Strategy

from hybridtrain.engine.options.strategy_arguments import StrategyArguments
from hybridtrain.engine.recording.run_description import Recording
from hybridtrain.engine.scheme import Scheme, required
from hybridtrain.engine.worker.client import Client
from hybridtrain.lightning.async_training.expected_updates import (
    ExpectsUpdates,
    answer_for_all_workers,
)
from hybridtrain.lightning.checkpointing.checkpoint_io import WholeCheckpointIO
from hybridtrain.lightning.checkpointing.checkpoint_writing import CheckpointWriting
from hybridtrain.lightning.collectives import Collectives
from hybridtrain.lightning.data.loaders import Loaders
from hybridtrain.lightning.data.prefetch import Ahead
from hybridtrain.lightning.device_memory import DeviceMemory, DeviceUse, out_of_memory
from hybridtrain.lightning.failover.rejoin import Rejoin
from hybridtrain.lightning.failover.rng_mailbox import RngMailbox
from hybridtrain.lightning.failover.worker_end import WorkerEnd
from hybridtrain.lightning.fault_injection.in_worker import Faults
from hybridtrain.lightning.hooks.trainer_hooks import MODULE, forget_compiler
from hybridtrain.lightning.hosts.agreement import checkpoint_of_host_0
from hybridtrain.lightning.hosts.cluster import be_silent_beyond_host_0, place_of
from hybridtrain.lightning.preflight.machine_checks import check_loader
from hybridtrain.lightning.results.returned_optimizers import TrainedOptimizers
from hybridtrain.lightning.results.worker_result import WorkersTraining
from hybridtrain.lightning.run_setup import RunSetup
from hybridtrain.lightning.states.held_objects import HeldObjects
from hybridtrain.lightning.step.session import Session
from hybridtrain.lightning.worker_context import WorkerContext
from hybridtrain.util.attributes import temporarily
from hybridtrain.util.host_place import HostPlace

_OPTIMIZERS: Any = Strategy.optimizers


class HostMemoryStrategy(ParallelStrategy, Scheme, ExpectsUpdates):
    """A strategy whose workers have one server, and the same number on each host.

    A worker's number is its global rank; workers of host 0 come first. The launcher knows this part
    alone.
    """

    strategy_name = "hybrid"
    data_options: StrategyArguments
    keeping: CheckpointWriting
    faults: Faults
    device_memory: DeviceMemory
    workers_per_device: int
    _trained: TrainedOptimizers | None = None  # in the calling process, after training
    _client: Client | None = None  # of a worker
    _final_stats: dict[str, Any] | None = None
    _loaders: Loaders | None = None  # of a worker
    _change: Callable[[dict[str, Any]], dict[str, Any]] | None = None  # of loaded checkpoints
    _back: Rejoin | None = None  # of a restarted worker
    _copy: str | None = None  # the path of a copy of host 0's checkpoint, to be loaded instead
    _schedules: list[Any]
    _lacks_optimizers = False  # in the calling process, after training
    worker: WorkerContext | None = None  # of a worker
    rng_mailbox: RngMailbox | None = None  # of the current run
    session: Session | None = None  # forward, backward and steps of the current training
    saves_alone = False  # this worker writes a checkpoint that the others do not know of
    interrupted_by: int | None = None  # the signal that ended the last run
    _num_nodes = 1
    _place: HostPlace | None = None  # once it has been asked for
    _ahead: Ahead | None = None  # where workers compute on devices of their own

    def __setattr__(self, name: str, value: Any) -> None:
        """Accept a module given as ``torch.compile(module)``.

        Its steps are compiled already and work under any strategy that calls them. But Lightning
        marks the module and refuses all strategies but its own, because some wrap modules.
        """
        if name == MODULE and value is not None:
            forget_compiler(value)
        super().__setattr__(name, value)

    @property
    def client(self) -> Client:
        assert self._client is not None, "only workers have a client"
        return self._client

    @property
    def global_rank(self) -> int:
        return self.first_worker if self._client is None else self._client.worker

    @property
    def local_workers(self) -> int:
        """The number of workers on each host."""
        return len(self.parallel_devices or [None]) * self.workers_per_device

    @property
    def first_worker(self) -> int:
        """The number of this host's first worker."""
        return self.node_rank * self.local_workers

    @property
    def numbers_here(self) -> range:
        """The numbers of this host's workers."""
        return range(self.first_worker, self.first_worker + self.local_workers)

    @property
    def run_setup(self) -> RunSetup:
        """The parts and sizes of the run, for those that check them."""
        return RunSetup(
            self,
            self.data_options,
            self.place,
            self.world_size,
            self.local_workers,
            tuple(self.parallel_devices or ()),
            self.workers_per_device,
            str(getattr(self.precision_plugin, "precision", "")),
        )

    # ---- a run, in the calling process ----------------------------------------------------------

    def begin_run(self) -> None:
        """Derive what policy and exchange require of this number of workers."""
        self.requirements, self.interrupted_by = required(self), None

    def interrupt(self, signum: int) -> None:
        """This signal has ended the run."""
        self.interrupted_by = signum

    def exchanging_rng(self, mailbox: RngMailbox) -> AbstractContextManager[None]:
        """Workers leave their RNG states there, as one may be replaced."""
        return temporarily(self, rng_mailbox=mailbox)

    def playing(self, recording: Recording) -> AbstractContextManager[None]:
        """Let its runner take the place of processes."""
        return temporarily(self, recording=recording)

    # ---- a worker's life ------------------------------------------------------------------------

    @abstractmethod
    def enter_worker(self, client: Client, trainer: Any, back: Rejoin | None = None) -> WorkerEnd:
        """Make this process a worker; ``back``: in place of a lost one."""

    @abstractmethod
    def end_training(self) -> WorkersTraining:
        """Return the parts of this worker's training that its result is made of."""

    @abstractmethod
    def exchange_last_steps(self) -> None:
        """Exchange this worker's own steps since the last exchange, where it stops alone."""

    def saving_alone(self) -> AbstractContextManager[None]:
        """This worker writes a checkpoint that the others do not know of."""
        return temporarily(self, saves_alone=True)

    def current_session(self) -> Session | None:
        """The session of the current training, if there is one."""
        return self.session

    @property
    def device_use(self) -> DeviceUse:
        """This worker's use of its device."""
        module = self.lightning_module
        assert module is not None, "Lightning has set it"
        return DeviceUse(
            self.device_memory,
            self.root_device,
            self.workers_per_device,
            self.local_rank,
            str(getattr(self.precision_plugin, "precision", "")),
            module,
        )

    @property
    def place(self) -> HostPlace:
        """This host among those of the run.

        Raises:
            UserError: if the engine that started this process does not agree with ``num_nodes``.
        """
        if self._place is None:
            self._place = place_of(self._num_nodes, self.cluster_environment)
        return self._place

    def model_to_device(self) -> None:
        """Move the module; limit this worker to its share of the device."""
        use = self.device_use
        try:
            use.hold()
            use.module.to(use.device)
        except torch.OutOfMemoryError as error:
            error.add_note(f"The parameters do not fit. {out_of_memory(error, use)}")
            raise

    def remember_training(
        self, trained: TrainedOptimizers, updates: float | None, held: HeldObjects
    ) -> None:
        """In the calling process: keep what was trained for its checkpoints and optimizers.

        ``updates``: that worker 0 has expected, for ``trainer.estimated_stepping_batches``.
        """
        self._trained, self._trained_updates = trained, updates
        answer_for_all_workers()
        made = trained.come_home(self.lightning_module, held)
        self._lacks_optimizers = made is None
        self.optimizers, self._schedules = made or ([], [])

    def change_loaded(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Let checkpoints pass through ``change`` when they are loaded, also in workers."""
        self._change = change

    def resume_together(
        self, proceed: Callable[..., None], path: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """On several hosts, in all workers: load host 0's file.

        Not in :meth:`load_checkpoint`, around which Lightning holds a lock: the workers of a replay
        are threads.
        """
        if not path:
            proceed(path, *args, **kwargs)
            return
        if isinstance(self.checkpoint_io, WholeCheckpointIO):
            self.checkpoint_io.wait()  # the run itself may be writing it
        assert self.worker is not None, "only workers resume"
        loading = checkpoint_of_host_0(self.client, path, self.worker.n_hosts)
        with loading as copy, temporarily(self, _copy=copy):
            proceed(path, *args, **kwargs)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in Lightning, with the position in the epoch; or the state of a restarted worker."""
        if self._back is not None:
            checkpoint = self._back.load()
        else:
            found = self._copy or checkpoint_path
            checkpoint = super().load_checkpoint(found, *args, **kwargs)
        if self._change is not None:
            checkpoint = self._change(checkpoint)
        if self._loaders is None:
            return checkpoint
        return self._loaders.checkpoint.restore(checkpoint, f"ckpt_path={checkpoint_path}")

    def _make_returned_optimizers(self) -> None:
        """In the calling process, if they could not be made where training ended: warn of it."""
        if self._lacks_optimizers and self._client is None and self._trained is not None:
            self._lacks_optimizers = False  # before the user's hook runs
            self.optimizers, self._schedules = self._trained.made_here(self.lightning_module)

    @property
    def optimizers(self) -> list[Any]:
        """Lightning's."""
        self._make_returned_optimizers()
        return list(_OPTIMIZERS.fget(self))

    @optimizers.setter
    def optimizers(self, optimizers: list[Any]) -> None:
        _OPTIMIZERS.fset(self, optimizers)

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """Lightning's."""
        self._make_returned_optimizers()
        return self._schedules

    @lr_scheduler_configs.setter
    def lr_scheduler_configs(self, configs: list[Any]) -> None:
        self._schedules = configs

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """As in Lightning; in the calling process only after a training that did not fail."""
        if self._client is None and self.keeping.refuses(filepath):
            return
        if self._loaders is not None:
            checkpoint = self._loaders.checkpoint.write(checkpoint)
        if self._client is None and self._trained is not None and "optimizer_states" in checkpoint:
            checkpoint = self._trained.into(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @property
    def root_device(self) -> torch.device:
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[self.local_rank % len(devices)]

    @property
    def is_global_zero(self) -> bool:
        """Worker 0, or while it is lost, the remaining worker with the lowest number."""
        return self.node_rank == 0 if self._client is None else self._client.group.is_leader

    @property
    def is_distributed(self) -> bool:
        """True, or Lightning would give all workers the same data."""
        return True

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes, self._place = num_nodes, None
        if num_nodes > 1:
            be_silent_beyond_host_0(self.place)

    @property
    def local_rank(self) -> int:
        return self.global_rank - self.first_worker

    @property
    def node_rank(self) -> int:
        return self.place.host if self._num_nodes > 1 else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def process_dataloader(self, dataloader: Any) -> Any:
        """As in Lightning, after a check of the shared memory for mini-batches."""
        if self.local_rank == 0:
            check_loader(dataloader, self.local_workers)
        return super().process_dataloader(dataloader)

    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """As in Lightning, unless the mini-batch has been prefetched."""
        moved = None if self._ahead is None else self._ahead.take(batch)
        if moved is not None:
            return moved
        return super().batch_to_device(batch, *args, **kwargs)

    # ---- collectives ----------------------------------------------------------------------------

    @property
    def collectives(self) -> Collectives:
        assert self.worker is not None, "only workers meet"
        return self.worker.collectives

    def barrier(self, name: str | None = None) -> None:
        if self.worker is not None:
            self.worker.collectives.barrier(name or "")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self.worker is None else self.worker.collectives.broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        worker = self.worker
        return tensor if worker is None else worker.collectives.reduce(tensor, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        worker = self.worker
        return decision if worker is None else worker.collectives.decide(decision, all)

    def all_gather(
        self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False
    ) -> torch.Tensor:
        return self.collectives.all_gather(tensor, sync_grads)

    # ---- figures --------------------------------------------------------------------------------

    def run_stats(self) -> dict[str, Any]:
        """Updates, samples, throughput, waiting shares, staleness: so far, or of the last run.

        On devices also ``device_memory``: each worker's need and its device's size, in bytes. After
        a run also ``unsaved``: missing checkpoints, with the reason.
        """
        if self._client is not None:
            return self._client.stats() | self.device_memory.figures()
        return self._final_stats or {}

    def saved_counts(self) -> dict[str, int]:
        """Updates and samples of this run in the checkpoint being written."""
        # There is no snapshot once training is over, or without an optimizer.
        return (self._client and self._client.snapshots.counts) or self.run_stats()

    def remember_stats(self, stats: dict[str, Any]) -> None:
        """Keep the statistics of a run that has ended."""
        self._final_stats = stats
