"""``Trainer(strategy="hybrid")``: parameters in host memory, devices only compute.

The process that calls ``trainer.fit`` becomes the server (see the launcher); each worker is a
process that runs Lightning's own loops on an unmodified module, with this object as its strategy. A
worker's module lives in shared memory, its optimizer's ``step`` pushes to the server and waits for
the release, its samplers and collectives send requests to the server. Under a lock-step policy the
parameters are views of the masters; under a free-running one the worker's own copy, refreshed at
every release.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from functools import partial
from typing import Any, Unpack

import pytorch_lightning as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.optim import Optimizer

from hybridtrain.engine.exchanges import Inside
from hybridtrain.engine.faults import read_faults
from hybridtrain.engine.options.exchange_options import INSIDE, InsideOptions
from hybridtrain.engine.options.strategy_arguments import StrategyArguments, checked, of_lightning
from hybridtrain.engine.protocol.messages import Paused, Resumed
from hybridtrain.engine.scheme import required
from hybridtrain.engine.step.remote_state import without_fetching
from hybridtrain.engine.worker.client import Client
from hybridtrain.lightning.async_training.agreement import agree, send_writes
from hybridtrain.lightning.async_training.counting import UpdateCount
from hybridtrain.lightning.async_training.expected_updates import (
    ExpectedUpdates,
    answer_for_all_workers,
)
from hybridtrain.lightning.checkpointing.checkpoint_sizes import check_shapes
from hybridtrain.lightning.checkpointing.checkpoint_writing import CheckpointWriting
from hybridtrain.lightning.checkpointing.saved_multiples import OneUpdate
from hybridtrain.lightning.collectives import Collectives
from hybridtrain.lightning.data.loaders import Loaders
from hybridtrain.lightning.data.prefetch import Ahead
from hybridtrain.lightning.device_memory import DeviceMemory
from hybridtrain.lightning.failover.lost_samples import LostSampleRedistribution, prepare_for_losses
from hybridtrain.lightning.failover.rejoin import Rejoin
from hybridtrain.lightning.failover.worker_end import WorkerEnd
from hybridtrain.lightning.fault_injection.in_worker import Faults
from hybridtrain.lightning.hooks.loop_hooks import has_ended_epoch, has_made_last_step
from hybridtrain.lightning.hooks.points import Point, around, before
from hybridtrain.lightning.hooks.trainer_hooks import dumper, layer_sync, plain_optimizer
from hybridtrain.lightning.host_memory_strategy import HostMemoryStrategy
from hybridtrain.lightning.hosts.agreement import compare_workers, share_buffers
from hybridtrain.lightning.launcher import HybridLauncher
from hybridtrain.lightning.participation.absent_steps import Absence
from hybridtrain.lightning.participation.evaluated_model import EvaluatedModel
from hybridtrain.lightning.participation.metrics_by_name import MetricsByName
from hybridtrain.lightning.participation.uneven_evaluation import share_evaluations
from hybridtrain.lightning.preflight.strategy_checks import check_parameters, check_renormalised
from hybridtrain.lightning.results.returned_training import before_configuring
from hybridtrain.lightning.results.worker_result import WorkersTraining
from hybridtrain.lightning.states.callback_state import ModuleState
from hybridtrain.lightning.step.session import Session
from hybridtrain.lightning.step.step_rollback import StepRollback
from hybridtrain.lightning.sync_batchnorm import synchronise
from hybridtrain.lightning.update_count import lift_dev_run_limit
from hybridtrain.lightning.worker_callback import Alignment, WorkerCallback
from hybridtrain.lightning.worker_context import WorkerContext
from hybridtrain.lightning_package import admit, is_foreign, refuse_mixture
from hybridtrain.util.attributes import temporarily
from hybridtrain.util.option_types import Named, choose


class HybridStrategy(HostMemoryStrategy):
    """Train one module with several workers and one set of parameters in host memory.

    Options of Lightning's ``ParallelStrategy`` are taken as well.

    Args:
        policy: when a gradient counts: the name of one of ``hybridtrain.engine.policies.POLICIES``
            (``"hybrid"``: wait for all, apply their mean), a mapping with its name and parameters
            (``{"name": "backup", "k": 3}``), or an object of
            :class:`hybridtrain.engine.policies.Policy`.
        exchange: what workers hand over: the name of one of
            ``hybridtrain.engine.exchanges.EXCHANGES``, a mapping with its name and parameters
            (``{"name": "movement", "every": 8}``), or an object; ``None``: gradients, or what goes
            with the policy.
        update: how the masters move: ``"user"`` (the module's own optimizer), ``"mean"``, a name of
            ``torch.optim`` or of :mod:`hybridtrain.engine.updates.delay_tolerant`, or a mapping
            with its name and arguments (``{"name": "adagrad", "lr": 0.1}``); ``"median"`` or
            another that merges gradients, or an object of
            :class:`hybridtrain.engine.exchanges.MergeRule`; ``None``: what goes with the exchange.
        correction: what is done about late gradients: nothing, or one of
            ``hybridtrain.engine.updates.staleness.CORRECTIONS``, given like a policy.
        state_dtype: ``"bf16"``: half the memory for moments, which are rounded stochastically.
        inside: what the workers of one host do together between two exchanges with other hosts, for
            an exchange whose workers make steps of their own: ``"hybrid"``: they step with the mean
            of their gradients; ``"local_sgd"``, or ``{"name": "local_sgd", "every": 8}``: they take
            the mean of their parameters. One of them hands over for all.
        workers_per_device: how many workers share one device.
        start_method: ``"fork"``, ``"spawn"``, ``"forkserver"``, or ``"auto"``: fork on Linux while
            CUDA is not initialised, else spawn; what cannot be inherited so is named.
        threads_per_worker: threads of torch and of BLAS in each worker; ``"auto"``: cores divided
            by workers.
        stop_grace_s: how long workers may take to stop after Ctrl-C or a failure, in seconds.
        device_memory_fraction: of its GPU, for each worker, above 0 and up to 1; ``None``: no limit
            for one alone, and where several workers have one, equal shares until it is measured
            what each needs, then that and an equal part of the rest.
        transport_dtype: ``"bf16"``: float32 gradients are rounded to it on their way.
        num_samples_key: the entry of a batch that tells how many samples it has (a number, or
            something with them along its first dimension), where it cannot be seen.
        batch_size_per_worker: a size for each worker's mini-batches; else the DataLoader's for all.
        iterable: what is done about streams and objects that are no DataLoader, whose samples
            cannot be shared out: ``"deal"``: each worker takes every W-th mini-batch; ``"own"``:
            they share themselves out; ``None``: as ``"own"``, with a warning.
        keep_order: go through training data that are not shuffled in their order, also with
            several workers; else they are shuffled then, as under DDP.
        data_shards: ``{"number": S, "visit": N}``: cut the epoch's order into S shards; a worker
            that draws takes N mini-batches from one, then goes to the one visited least.
        on_nonfinite: when a worker's gradient is not finite: ``"raise"`` ends the run and says
            whose, ``"drop"`` leaves that worker out of the step, ``"skip_step"`` all of it;
            ``"auto"``: raise, but drop where a ``SpikeDetection`` sees a loss that is not finite.
        on_oom: the same when a worker runs out of memory in a step.
        on_failure: when a worker fails or dies: ``"stop"`` all, ``"continue"`` without it, or
            ``"restart"`` it.
        min_workers: with fewer left, the run stops.
        max_restarts: in the whole run; ``None``: any number.
        hang_timeout_s: seconds without a sign of life after which a worker is killed, its stacks
            being printed before; ``"auto"``: from its past; ``None``: never.
        faults: what is to go wrong on purpose; see :class:`hybridtrain.engine.faults.Fault`.
        min_hosts: training begins with so many of the ``num_nodes`` hosts, and others may come
            while it runs, in lock-step at an epoch's beginning; ``None``: with all.
        hosts_key: a file with the key by which the hosts of a run over several know each other,
            made by ``python -m hybridtrain key FILE``; torchrun hands one over without it.
        host_sums: each further host hands over the mean of its workers' gradients in place of one
            row for each: fewer bytes, other rounding.
        record: a file or directory to write the order of events to, for ``hybridtrain replay``.
        checkpoint: ``"blocking"``, or ``"background"``: ``ModelCheckpoint``'s files come later.

    Raises:
        UserError: if an option is unknown, has a value that is not allowed, or contradicts another.
    """

    step_rollback: StepRollback | None = None  # of the current training
    _inside: InsideOptions | None = None
    _snapshot: list[dict[str, Any]] | None = None
    _saves_one_update = False  # the checkpoints of a hook
    _decided: dict[str, Any] | None = None  # the weights of a checkpoint that has been named
    _count: UpdateCount | None = None  # where workers run freely
    _losses: LostSampleRedistribution | None = None  # once training has begun
    _evaluated: EvaluatedModel | None = None  # where workers have models of their own
    _abstains = False
    reports_progress = False  # it sends the state of training, perhaps in the middle of a step
    before_configuring: ModuleState | None = None  # the module's attributes after setup
    _has_asked = False  # whether it may begin at all
    _absence: Absence
    _callback: WorkerCallback  # of a worker

    def __init__(self, policy: Named = "hybrid", **options: Unpack[StrategyArguments]) -> None:
        given = checked({"policy": policy, **options})
        super().__init__(**of_lightning(given))
        self.choose_parts(given)
        if (inside := given["inside"]) is not None:
            self._inside = choose("inside", inside, INSIDE, InsideOptions)
        self.workers_per_device = given["workers_per_device"]
        self.device_memory = DeviceMemory(given["device_memory_fraction"])
        self.transport = None if given["transport_dtype"] is None else torch.bfloat16
        self.data_options = given
        self.keeping = CheckpointWriting(given["checkpoint"])
        self.faults = Faults(read_faults(given["faults"]))

    @property
    def world_size(self) -> int:
        if self._abstains:
            self._abstains = False  # Lightning asks once, right after the step
            return 1  # or it refuses a training_step that returns None
        return self.local_workers * self.num_nodes

    @property
    def inside(self) -> Inside | None:
        """The scheme within a host (``strategy.inside``), if it has several workers."""
        if self._inside is None or self.local_workers == 1:
            return None
        return Inside(self.local_workers, self._inside.every)

    def _configure_launcher(self) -> None:
        if is_foreign(self.accelerator):  # so is the trainer
            raise refuse_mixture("the Trainer")
        required(self)  # contradicting parts are refused now, not when training begins
        self._launcher = HybridLauncher(self)

    # ---- a worker's life ------------------------------------------------------------------------

    def enter_worker(self, client: Client, trainer: Any, back: Rejoin | None = None) -> WorkerEnd:
        """Make this process a worker; ``back``: in place of a lost one."""
        self._client, self._back = client, back
        client.listeners.on_invitation(self._join_others)
        again = 1 if self.recording is None else self.recording.n_hosts
        self.worker = worker = WorkerContext(
            client,
            Collectives(client, self.root_device),
            self.requirements,
            self.on_failure,
            self.root_device,
            max(again, self.place.n_hosts),
            self.recording,
        )
        rank_zero_only.rank = client.worker  # type: ignore[attr-defined]
        self._loaders = Loaders(trainer, worker, self.data_options)
        share_evaluations(trainer, worker, self._loaders)
        self._absence = Absence(trainer, worker, self._loaders)
        if self.requirements.parameters != "masters":
            self._evaluated = EvaluatedModel(trainer, client)
        self.expected_updates = self._trained_updates = None
        if not self.requirements.whole_rounds:
            if client.n_workers > 1:
                lift_dev_run_limit(trainer)
            self.expected_updates = ExpectedUpdates(trainer, self.requirements, client.n_workers)
            answer_for_all_workers()
        metrics = MetricsByName(trainer, worker)
        between = Alignment(self.await_turn, self.synchronize_epoch, self.validate_behind_last)
        self._callback = WorkerCallback(
            worker, self, self._loaders.position, metrics, self.keeping, between
        )
        trainer.callbacks.insert(0, self._callback)
        around(Point.SAVE, trainer, self.save_together)
        before(Point.DUMP, dumper(trainer), self.before_checkpoint)
        if back is not None:
            back.prepare()
        elif worker.n_hosts > 1:
            around(Point.RESUME, dumper(trainer), self.resume_together)
        one_update = OneUpdate(self.decide_on_checkpoint, self.save_one_update)
        self.keeping.take_over(trainer, one_update, not self.requirements.whole_rounds)
        saved = self._loaders.checkpoint
        return WorkerEnd(
            trainer, worker, saved, self.keeping, self.before_checkpoint, self._give_up
        )

    def _give_up(self) -> None:
        """Take back a step that is under way."""
        if self.step_rollback is not None:
            self.step_rollback.give_up()

    def end_training(self) -> WorkersTraining:
        return WorkersTraining(
            self._gather_last_states,
            self.before_checkpoint,
            self.before_configuring,
            self.expected_updates,
        )

    def _gather_last_states(self) -> None:
        if self.session is not None:
            with self.session.keeping_writes():
                self.gather_states()

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.lightning_module is not None
        if trainer.state.fn == "fit":
            synchronise(self.lightning_module, layer_sync(self), self.collectives)
        super().setup(trainer)
        self.collectives.teach(self.lightning_module)
        if trainer.state.fn == "fit":
            assert self.worker is not None, "this is a worker"
            module, transport = self.lightning_module, self.transport
            check_parameters(module)  # again: configure_model may have made some
            check_renormalised(module, self.requirements, self.client.n_workers)
            self.session = Session(self.worker, module, self, transport, self.device_use)
            self._callback.begin(self.session)
            if self.session.final:
                around(Point.CLIP, self.precision_plugin, self.session.record_clip)
            if self.session.averages:
                around(Point.BACKWARD, self.precision_plugin, self.session.backward_and_average)
                before(Point.CLIP, self.precision_plugin, self.session.average_own)
            streams = self.session.replica.streams
            self._ahead = None if streams is None else Ahead(streams, self.root_device, trainer)
            if self._back is not None:
                self._back.regroup()

    def on_train_start(self) -> None:
        worker = self.worker
        if self.session is not None and self._loaders is not None and worker is not None:
            if self._back is not None:
                self._back.catch_up()
            trainer = self.session.trainer
            if worker.n_hosts > 1 and self._back is None:
                plans = [sampler.plan for sampler in self._loaders.samplers]
                compare_workers(trainer, worker, plans)
                share_buffers(trainer.lightning_module, self.client, self.session.buffers is None)
            self.session.install()
            if self._back is not None:
                self._back.restore_apart(self.session)
            if (expected := self.expected_updates) is not None:
                self._count = UpdateCount(trainer, worker, expected, self._absence)
            if self._count is not None and self.client.group.joins:
                self.client.group.rejoin(joined=True)
                self._count.join(self.session.pull())
            self.step_rollback = StepRollback(
                self.session, self.client.steps, self.client.pushes, self._loaders.committed
            )
            self._losses = prepare_for_losses(
                worker,
                self.session,
                self._loaders,
                self.rng_mailbox,
                self.reporting_progress,
                self.synchronize_workers,
                self._back,
            )
            self._absence.begin(self.session)

    def teardown(self) -> None:
        if self.session is not None:
            self.session.close()
        if self.cluster_environment is not None and self.accelerator is not None:
            super().teardown()

    # ---- one step -------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None and self.session is not None
        output = self.session.training_step(partial(super().training_step, *args, **kwargs))
        self._abstains = output is None and self.lightning_module.automatic_optimization
        if self.session.written:
            assert self.step_rollback is not None
            self.session.count_written()
            self.step_rollback.commit()
        return output

    def backward(
        self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        assert self.session is not None
        scaled = self.session.scaled(closure_loss)
        run = partial(super().backward, scaled, optimizer, *args, **kwargs)
        loss = self.session.backward(run, closure_loss)
        if self._ahead is not None:
            self._ahead.fetch()
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        assert self.session is not None and self._loaders is not None
        self._abstains = False
        samples, together = self._loaders.weigh(batch)
        weight = self.session.begin_batch(batch, samples, together)
        self.collectives.begin_batch(not self.requirements.whole_rounds, samples, weight)
        send_writes(self.session, self._count, starts=True)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        assert self.session is not None and self.step_rollback is not None
        self._snapshot = None
        gated = partial(self.session.output_of, self._absence.gated(closure))
        run = partial(super().optimizer_step, optimizer, gated, model, **kwargs)
        output = self.session.optimizer_step(self.optimizers.index(optimizer), run)
        self._abstains = False
        self.step_rollback.commit()
        return output

    # ---- meetings --------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        super().barrier(name)
        if name == "post_setup" and self._client is not None:
            assert self.lightning_module is not None
            self.before_configuring = before_configuring(self.lightning_module)

    def await_turn(self) -> None:
        """Before a mini-batch: wait for this worker's turn, or until it may begin at all.

        Raises:
            OthersStop: if training ends here.
        """
        self._absence.stopping.begin_batch()
        if self.session is not None:
            self.session.put_back()
        send_writes(self.session, self._count)
        if self._count is not None:
            self._count.by_hand.begin_batch()
        asks = self.requirements.takes_turns or (self.requirements.asks and not self._has_asked)
        if asks and self.session is not None and self._count is not None:
            self._has_asked = True
            self._count.reach(self.session.await_turn())
        if self._count is not None:
            self._count.begin_batch()

    def exchange_own_steps(self, ends: bool = False) -> None:
        """Exchange the results of own steps, if all workers do so here.

        In lock-step only where no step follows in this epoch (``ends``: Lightning may not know it
        yet): a validation within an epoch must not move the masters.
        """
        session = self.session
        if session is None or not self._may_exchange:
            return
        ends = ends or has_ended_epoch(session.trainer)
        if ends or not self.requirements.whole_rounds:
            self._exchange(session, ends)

    def _exchange(self, session: Session, ends: bool = True) -> None:
        session.flush(ends)
        if self._loaders is not None:
            self._loaders.committed.settle()

    def exchange_last_steps(self) -> None:
        """A free-running worker stops: exchange its own steps since the last exchange.

        In lock-step all would have to: a resumed run repeats these steps, or a pass of the loss.
        """
        session, stop, wants = self.session, self.client.inbox.stop, self.requirements
        asked = stop is not None and not stop.now
        begun = self._loaders is not None and self._loaders.committed.under_way
        if session is None or wants.whole_rounds or wants.evaluates or not asked or begun:
            return
        if session.has_own_parameters:
            self._exchange(session)

    def _join_others(self, to: str) -> None:
        """Take part in the other workers' exchange or checkpoint, while this worker waits."""
        assert self.session is not None, "it trains"
        if to == "round":
            self._exchange(self.session)
        else:
            self._gather_states(self.session)

    @property
    def _may_exchange(self) -> bool:
        """Whether this worker may exchange here: all workers do, or they run freely."""
        stop = self.client.inbox.stop
        stopped = stop is not None and stop.behind is None
        return not (stopped or self.client.group.solo or self.reports_progress) and not (
            self._acts_alone and self.requirements.whole_rounds
        )

    @property
    def _all_take_part(self) -> bool:
        """Whether this worker may start a collective operation here: all workers do."""
        return self._may_exchange and not self.collectives.local and not self._acts_alone

    @property
    def _acts_alone(self) -> bool:
        return self.saves_alone or bool(self.collectives.alone)

    def validate_behind_last(self) -> None:
        """As on one device, the last step is not counted yet, also if another worker made it."""
        if self._count is not None:
            self._count.begin_rows()

    def synchronize_epoch(self, ends: bool = False) -> None:
        """Synchronize all workers; they process what lost ones have left, and agree on stopping.

        ``ends``: see ``exchange_own_steps``.
        """
        self.client.pushes.settle()
        self.exchange_own_steps(ends)  # before workers are asked whether samples are left
        if self._losses is not None:
            self._losses.end_epoch()
        self.synchronize_workers(ends)
        self._absence.meet()

    def synchronize_workers(self, ends: bool = False) -> None:
        """At the end of a share: exchange own steps, agree on the version and on lost workers."""
        self.exchange_own_steps(ends)
        self.collectives.stay_local(False)
        agree(self.session, self._count, self.collectives)
        self._has_asked &= not self.requirements.evaluates  # the masters are not what is evaluated
        if self._count is None and self.session is not None and self._all_take_part:
            self.session.catch_up(ends or has_ended_epoch(self.session.trainer))
        if self._losses is not None:
            self._losses.meet()

    def on_validation_start(self) -> None:
        if self.session is not None:
            self.session.share_buffers(
                self._loaders is not None and self._loaders.committed.under_way
            )
            if self._evaluated is not None:
                self._evaluated.begin()
        if self.is_global_zero:
            self.client.note(Paused())  # all have met: no worker trains

    def on_validation_end(self) -> None:
        if self._evaluated is not None:
            self._evaluated.end()
        if self.is_global_zero:
            self.client.note(Resumed())

    def reporting_progress(self) -> AbstractContextManager[None]:
        """This worker sends the state of training, perhaps in the middle of a step."""
        return temporarily(self, reports_progress=True)

    # ---- checkpoints ----------------------------------------------------------------------------

    def save_together(self, save: Callable[..., None], *args: Any, **options: Any) -> None:
        """As Lightning, with the masters in the module meanwhile."""
        session = self.session
        shows = session is None or session.shows_masters
        self.gather_states()
        try:
            save(*args, **options)
        finally:
            if self._loaders is not None:
                self._loaders.checkpoint.restore_rng_states({})
            if session is not None:
                session.end_saving(shows)

    def gather_states(self) -> None:
        """All save together: the writing worker receives each worker's own state."""
        session = self.session
        if session is None or (self.client.n_workers == 1 and not session.has_own_state):
            return
        if self._all_take_part:
            self.client.pushes.settle()
            last = not self.requirements.whole_rounds or has_made_last_step(session.trainer)
            if last and session.has_own_parameters:
                self._exchange(session)
            self._gather_states(session)

    def _gather_states(self, session: Session) -> None:
        assert self._loaders is not None, "it trains"
        numbers = session.gather_states(self._loaders.checkpoint.rng_states(True))
        self._loaders.checkpoint.restore_rng_states(numbers)

    def save_one_update(self, hook: Callable[[], None]) -> None:
        """Let a hook of ``ModelCheckpoint`` name and write checkpoints of one update.

        It makes a name before it writes, and other workers make updates in between.
        """
        session = self.session
        shows = session is None or session.shows_masters
        self._saves_one_update = True
        try:
            hook()
        finally:
            self._saves_one_update, self._decided = False, None
            if session is not None and not shows:
                session.put_back()

    def decide_on_checkpoint(self) -> None:
        """Freeze the version before ``ModelCheckpoint`` builds the name of the file."""
        self.client.pushes.settle()
        if self._saves_one_update and self.collectives.local:
            self.before_checkpoint()
            self._decided = self.lightning_module_state_dict()

    def before_checkpoint(self) -> None:
        """Bring weights, moments, step to one version: others may train while worker 0 writes."""
        if self._decided is not None:
            return
        self.client.pushes.settle()
        self._snapshot = None  # schedulers may have stepped since
        own = self.session is not None and self.session.has_own_parameters
        if self.reports_progress and own:
            return  # own parameters must not change in the middle of a step
        between = self.collectives.local
        if not own:  # or it would exchange earlier than without a checkpoint
            self.exchange_own_steps()
        if self.session is not None and not self.reports_progress:
            self.session.show_newest()
        if self._count is not None and self.session is not None and self.is_global_zero:
            self._snapshot = self.session.snapshot(self._count.reach, between)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Copies, where others write meanwhile: a file's checksums must fit its content."""
        if self._decided is not None:
            return self._decided
        state = super().lightning_module_state_dict()
        if self.reports_progress:  # parameters lie in host memory already
            assert self.lightning_module is not None
            named = dict(self.lightning_module.named_parameters(remove_duplicate=False))
            return {name: value for name, value in state.items() if name not in named}
        return deepcopy(state) if self.requirements.in_place and self.is_global_zero else state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Moments from the server, hyper-parameters from this worker's optimizer."""
        optimizer = plain_optimizer(optimizer)
        if not optimizer.param_groups:  # Lightning's stand-in: the module steps by itself
            return {}
        session = self.session if self.is_global_zero and not self.reports_progress else None
        if session is None or not session.steps:  # only worker 0 saves it
            return without_fetching(optimizer)
        if self._snapshot is None:
            self._snapshot = session.snapshot()
        number = session.number_of(optimizer)  # none: put into the trainer since the last step
        return without_fetching(optimizer) if number is None else self._snapshot[number]

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """As in Lightning, but the state stays in host memory."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            if not state or not optimizer.param_groups:  # the module steps by itself, or did
                continue
            check_shapes(optimizer, state, "ckpt")
            if self.session is None:
                optimizer.load_state_dict(state)
            else:
                self.session.saved.load(optimizer, state)


admit(HybridStrategy)
