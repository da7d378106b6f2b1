"""A worker in which user code computes gradients, without Lightning's loops."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TypedDict

import numpy as np
import torch
from torch.utils.data import BatchSampler

from hybridtrain.engine.exchanges import Exchange, Requirements
from hybridtrain.engine.monitoring.hang_detector import Doing
from hybridtrain.engine.monitoring.watchdog import to_stderr
from hybridtrain.engine.recording.run_description import data_teller
from hybridtrain.engine.samplers import (
    EpochPlan,
    EpochSampler,
    QueueSampler,
    Seeded,
    ShareSampler,
)
from hybridtrain.engine.step.guard import OnFault
from hybridtrain.engine.step.session import Trained, WorkerSession
from hybridtrain.engine.step.shared_buffers import shared
from hybridtrain.engine.step.trained_parameters import sparse_slots
from hybridtrain.engine.updates.named import NamedUpdate
from hybridtrain.engine.worker.client import Client
from hybridtrain.engine.worker.inbox import StopRequested
from hybridtrain.engine.worlds.inherited import Inherited
from hybridtrain.errors import UserError
from hybridtrain.standalone.data import Data
from hybridtrain.standalone.model import Model
from hybridtrain.standalone.saved_run import SavedRun, made_by
from hybridtrain.util.option_types import Above0, Checked, Positive, allows, as_typed, shown

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
OF_MODEL: Final = object()  # in place of gradients: those that backward has made


class HowToGoThrough(TypedDict, total=False):
    """Options of :class:`Epochs`."""

    batch_size: int
    epochs: int
    seed: int | None
    drop_last: bool


@dataclass(frozen=True)
class Epochs(Checked):
    """Passes over ``data``, in mini-batches of ``batch_size`` samples.

    ``seed``: of the order, the same as that of a ``DistributedSampler``; ``None``: not shuffled.
    """

    data: Data
    batch_size: Positive = 32
    epochs: Positive = 1
    seed: int | None = 0
    drop_last: bool = False


@dataclass(frozen=True)
class BodyJob:
    """The arguments of a run, as each worker gets them.

    ``past``: former runs; ``recorded``: events are recorded, or replayed; ``survives``: workers go
    on without one that is lost.
    """

    body: Callable[[Worker], Any]
    model: Any
    make_optimizer: MakeOptimizer
    requirements: Requirements
    exchange: Exchange
    update: NamedUpdate
    on_fault: OnFault
    epochs: Epochs | None
    past: SavedRun
    recorded: bool = False
    survives: bool = False


@dataclass
class Taken:
    """Data that a body has taken; ``all``: it went through ``batches()`` to the end."""

    samples: float = 0.0
    batches: int = 0
    pushes: int = 0
    all: bool = False


@dataclass(frozen=True)
class Returned:
    """The ``result`` of a body, and from the leader the ``buffers`` of its module."""

    result: Any
    buffers: dict[str, torch.Tensor]


class _Session(WorkerSession):
    """The session of a body.

    Args:
        client: to the server.
        trained: what is trained.
        job: of this worker.
        where: says which worker this is, and where its body is.
    """

    def __init__(
        self, client: Client, trained: Trained, job: BodyJob, where: Callable[[], str]
    ) -> None:
        self._states, self._where = job.past.optimizer, where
        parts = job.requirements, job.exchange, job.update, job.on_fault
        super().__init__(client, trained, *parts)

    def where(self) -> str:
        return self._where()

    @property
    def named(self) -> Sequence[tuple[str, torch.nn.Parameter]]:
        """The parameters, as they are laid out."""
        return self._trained.named

    def _masters_of(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """With the state that an earlier run has left."""
        made = super()._masters_of(optimizer)
        for name, parameter in self._trained.named:
            if name in self._states:
                made.state[parameter] = self._states[name]
        return made


class Worker:
    """The argument of a body: gives it the model and mini-batches, and takes its gradients.

    :meth:`hybridtrain.Server.run` makes one in each process. It belongs to the thread that uses it
    first; other threads of the body are refused.
    """

    def __init__(self, client: Client, job: BodyJob) -> None:
        self._client, self._wants, self._job = client, job.requirements, job
        self._model = Model(job.model)
        self._sampler = None if job.epochs is None else self._sampler_of(job.epochs)
        self.optimizer = job.make_optimizer([p for _, p in self._model.named if p.requires_grad])
        named = self._model.ordered(self.optimizer)
        module, sparse = self._model.module, set[int]()
        if module is not None:
            if not module.training:  # else parts that the user has set to ``eval()`` stay so
                module.train()
            number_of = {id(p): number for number, (_, p) in enumerate(named)}
            sparse = sparse_slots(module, [self.optimizer], number_of)
        joint = self._wants.parameters == "masters" and client.n_workers > 1
        buffers = shared(module) if joint and module is not None else []
        trained = Trained(named, [self.optimizer], buffers, sparse, final=False)
        self._session = _Session(client, trained, job, lambda: self._where)
        self._session.begin(job.past.updates)
        visible = self._model.visible
        self._visible = _Arrays(visible) if isinstance(visible, dict) else visible
        self.epoch = self._n_epochs = job.past.epochs  # the latter: done, also in former runs
        self._copy: Model | None = None
        self._n_batches = 0  # of this epoch
        self._rows = 0.0  # since the last push
        self._has_begun = self._has_asked = False
        self._taken = Taken()
        self._thread: int | None = None

    def _sampler_of(self, epochs: Epochs) -> EpochSampler:
        client, data = self._client, epochs.data
        order = Seeded(data.length, epochs.seed)
        sizes = (epochs.batch_size,) * client.n_workers
        turns = int(self._wants.takes_turns)
        plan = EpochPlan(order, data.length, sizes, epochs.drop_last, False, lambda: turns)
        data_teller(client.note, not self._job.recorded)(0, data)
        kind = ShareSampler if self._wants.data == "shares" else QueueSampler
        return kind(plan, 0, client)

    # ---- what a body may ask --------------------------------------------------------------------

    @property
    def number(self) -> int:
        """The number of this worker, from 0 on."""
        return self._client.worker

    @property
    def n_workers(self) -> int:
        """The number of workers at the beginning of the run."""
        return self._client.n_workers

    @property
    def version(self) -> int:
        """The number of updates that this worker's parameters have."""
        return self._client.steps.version

    @property
    def model(self) -> Any:
        """The model in the form in which it was given, over this worker's parameters.

        After :meth:`push` the same arrays have the newest values.
        """
        return self._visible

    @property
    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        """This worker's parameters by name, in the order of the model."""
        return [(name, parameter.data) for name, parameter in self._model.named]

    def pull(self) -> int:
        """Bring :attr:`model` up to date; returns its version.

        Raises:
            UserError: if each worker has parameters of its own, which would be lost.
        """
        self._check_thread()
        if self._session.has_own_parameters:
            raise UserError(
                f"{self._where}: pull was called with exchange={as_typed(self._job.exchange)}, "
                "where each worker has parameters of its own, and its steps since the last "
                "exchange would be lost; leave it out: exchanges bring the model up to date"
            )
        return self._session.pull()

    def copy(self) -> Any:
        """A copy of the model as it is now, which the body may change; the same one each time.

        A module's copy has no gradients, and the buffers of ``worker.model``.
        """
        if self._copy is None:
            self._copy = self._model.apart()
        return self._copy.copied_from(self._model)

    def keep_buffers(self) -> None:
        """Write the buffers of :meth:`copy` (the running means of BatchNorm) into the model."""
        if self._copy is not None:
            self._model.take_buffers(self._copy.buffers)

    def save(self, path: str | Path) -> None:
        """Write the masters, their optimizer's state and the number of updates to a file.

        One worker does so, at any time; :meth:`hybridtrain.Server.load` reads it.

        Raises:
            UserError: if it cannot be written.
        """
        self._check_thread()
        self._client.pushes.settle()
        replica, own = self._session.replica, self._session.has_own_parameters
        if own:
            replica.hold_masters()
        else:
            self._session.pull()  # what the body has written itself goes to the masters first
        version, (saved,) = self._client.snapshots.take()
        replica.refresh(keep=own)
        names = [name for name, _ in self._session.named]
        states = {names[number]: state for number, state in saved.parameters.items()}
        kinds = made_by(self.optimizer, self._job.update, self._job.exchange)
        values, buffers = self._model.values, self._model.buffers
        SavedRun(version, values, states, self._n_epochs, kinds, buffers).write(path)
        self._session.put_back()

    def stats(self) -> dict[str, Any]:
        """Updates, samples, waiting, staleness of the run so far; see ``Server.stats``."""
        self._check_thread()
        return self._client.stats()

    def gather(self, item: Any, tag: str = "items") -> list[Any]:
        """Wait for all workers; returns the item of each, in their order."""
        self._check_thread()
        return self._client.gather(f"of the body: {tag}", item)

    def _check_thread(self) -> None:
        """A mini-batch and its push, a question and its answer follow each other in one thread."""
        me = threading.get_ident()
        self._thread = self._thread or me
        if me != self._thread:
            raise UserError(
                f"{self._where}: a second thread of the body uses the worker; take mini-batches, "
                "push and ask from one thread, and give the others their data"
            )

    # ---- mini-batches ---------------------------------------------------------------------------

    def batches(self) -> Iterator[Any]:
        """This worker's mini-batches of all epochs: each sample goes to one worker, once an epoch.

        Epochs are counted on from those of former runs.

        Raises:
            UserError: if the run has no data, it is called again, or an exchange that evaluates
                the whole loss misses the push of a mini-batch.
        """
        epochs, sampler = self._job.epochs, self._sampler
        if epochs is None or sampler is None:
            raise UserError("the body asks for mini-batches; give run(data=...) some")
        if self._has_begun:
            raise UserError("batches() gives all epochs; call it once")
        self._has_begun = True
        sampler_remembers = self._job.survives and self._wants.whole_rounds
        first = self._job.past.epochs
        for self.epoch in range(first, first + epochs.epochs):
            sampler.set_epoch(self.epoch)
            self._n_batches = 0
            yield from self._pass(epochs.data, sampler)
            while self._goes_on(sampler, sampler_remembers):
                yield from self._pass(epochs.data, sampler)
            self._end_epoch(sampler)
            self._n_epochs = self.epoch + 1
            self._session.end_epoch(self._n_epochs)
        self._taken.all = True

    def _pass(self, data: Data, sampler: EpochSampler) -> Iterator[Any]:
        """This worker's part of an epoch, or of what lost workers have left of it."""
        for positions in BatchSampler(sampler, sampler.batch_size, drop_last=False):
            self._begin_batch(sampler)
            yield data.take(positions)
            self._check_pushed()
            self._client.heartbeat.beat(Doing.BETWEEN)

    def _begin_batch(self, sampler: EpochSampler) -> None:
        self._check_thread()
        self._client.check_stop()
        self._session.put_back()
        if self._wants.takes_turns or (self._wants.asks and not self._has_asked):
            self._has_asked = True
            self._session.await_turn()
        self._client.steps.count_pushes()
        portion = sampler.next_portion()
        assert portion is not None, "the sampler has planned what it has given"
        self._rows += portion.weight or 0.0
        self._taken.samples += portion.weight or 0.0
        self._taken.batches += 1
        self._n_batches += 1
        self._client.heartbeat.beat(Doing.STEP)

    def _begin_push(self, samples: float | None) -> None:
        if self._sampler is None:  # a push is all that there is of a mini-batch
            self._client.steps.count_pushes()
        if self._rows or self._sampler is None:
            self._session.begin_samples(samples or self._rows or 1.0)
        elif samples:  # whether it counts is decided with the first push of the mini-batch
            self._session.go_on(samples)

    def _check_pushed(self) -> None:
        """The body is done with a mini-batch; without its loss, that of the pass is wrong."""
        if self._wants.evaluates and self._rows:
            raise UserError(
                f"{self._where}: nothing was pushed, and {as_typed(self._job.exchange)} needs the "
                "loss of all samples; call push(gradients, loss=...) once in each mini-batch"
            )

    def _goes_on(self, sampler: EpochSampler, remembers: bool) -> bool:
        """All meet behind their last mini-batch; whether lost workers have left some."""
        if sampler.has_nothing_next:  # too few samples were left for all
            sampler.next_portion()
            self._session.sit_out()
        self._client.pushes.settle()
        self._session.flush(ends=True)
        self._client.heartbeat.beat(Doing.EPOCH)
        self._client.gather("the end of an epoch", None)
        self._has_asked &= not self._wants.evaluates  # the next pass is at another point
        remaining = sampler.left_by(self._client.group.gone) if remembers else ()
        if not (remaining or self._client.group.remaining):
            return False
        sampler.go_on(self._client.group.there, remaining)
        return True

    def _end_epoch(self, sampler: EpochSampler) -> None:
        """All have met: see the same parameters."""
        if self._client.group.gone:  # before a question that each asks by itself
            sampler.shares_with(self._client.group.there)
        if self._wants.whole_rounds and self._session.has_own_parameters:
            self._session.replica.refresh()
        else:
            self._session.pull()

    # ---- gradients ------------------------------------------------------------------------------

    def push(
        self, gradients: Any = OF_MODEL, samples: float | None = None, loss: Any = None
    ) -> bool:
        """Hand over gradients, and wait until the policy lets this worker go on.

        Args:
            gradients: a mapping of names to arrays, dense or sparse: a pair of row numbers and
                their values, a sparse tensor or a matrix of scipy. ``None``: this mini-batch has
                none. If it is left out, those that ``backward`` has made.
            samples: what they count for in a mean; by default the samples of the mini-batches since
                the last push.
            loss: the mean over these samples, a number. ``sandblaster`` needs it, and ``switch``
                on a plateau; others do not use it.

        Returns:
            Whether they count; those that come too late may not.

        Raises:
            UserError: if names or shapes are not the model's, a gradient is not finite, ``samples``
                is no number above 0, the loss is missing, an exchange that evaluates it has one of
                this mini-batch, or another thread uses this worker.
        """
        self._check_thread()
        self._check_samples(samples)
        self._check_once(gradients)
        self._take_gradients(gradients)
        self._begin_push(samples)
        return self._push(gradients, loss)

    def push_more(self, gradients: Any, samples: float) -> bool:
        """Hand over a later update of a mini-batch of so many samples, which count only once."""
        self._take_gradients(gradients)
        self._session.begin_more(samples)
        return self._push(gradients, None)

    def _push(self, gradients: Any, loss: Any) -> bool:
        self._session.guard.begin(None, True)
        (step,) = self._session.steps
        if loss is not None or (self._wants.evaluates and gradients is not None):
            step.watch(_loss(loss, self._where))
        has_some = any(parameter.grad is not None for parameter in step.parameters)
        step() if has_some else step.skip()
        for parameter in step.parameters:
            parameter.grad = None
        self._rows = 0.0
        self._taken.pushes += 1
        if self._sampler is None:
            self._client.heartbeat.beat(Doing.BETWEEN)
        counted = self._client.steps.counted
        if self._sampler is not None and counted:
            self._sampler.commit(self._client.steps.version, self._session.has_unsent)
        elif self._sampler is not None:
            self._sampler.drop()
        return counted

    def _check_samples(self, samples: Any) -> None:
        plain = samples.item() if isinstance(samples, np.generic) else samples
        if not allows(plain, Above0 | None):
            raise UserError(
                f"{self._where}: samples={shown(samples)} was pushed; give a number above 0, or "
                "push(None) for a mini-batch that does not count"
            )

    def _check_once(self, gradients: Any) -> None:
        """Where an epoch is one evaluation, each of its samples counts exactly once."""
        if self._wants.evaluates and (gradients is None or not self._rows):
            given = "None" if gradients is None else "a second time" if self._n_batches else "early"
            raise UserError(
                f"{self._where}: push was called {'with ' * (gradients is None)}{given}, and "
                f"{as_typed(self._job.exchange)} evaluates each mini-batch once; call "
                "push(gradients, loss=...) once in each"
            )

    def _take_gradients(self, gradients: Any) -> None:
        if gradients is OF_MODEL:
            return
        try:
            self._model.set_gradients({} if gradients is None else gradients)
        except UserError as error:
            raise UserError(f"{self._where}: {error}") from None

    @property
    def _where(self) -> str:
        return f"worker {self.number}, epoch {self.epoch}, mini-batch {self._n_batches}"

    # ---- the end --------------------------------------------------------------------------------

    def end(self) -> dict[str, torch.Tensor]:
        """The body has returned; the leader returns the buffers of its module.

        Raises:
            UserError: if it has not asked for data that it was given.
        """
        if self._job.epochs is not None and not self._has_begun:
            raise UserError(
                "the body has returned and never asked for data; go through worker.batches(), or "
                "leave data out"
            )
        self._check_pushed()
        self._client.pushes.settle()
        self._session.flush(ends=True)
        self._client.heartbeat.beat(Doing.ENDING)
        early = self._job.epochs is not None and not self._taken.all
        left = " (it has left its mini-batches early)" if early else ""
        taken = self._client.gather(f"the end of the body{left}", self._taken)
        epochs, group = self._job.epochs, self._client.group
        says = group.is_leader and not group.gone
        fault = _left_undone(epochs, taken, self._wants.in_place) if says and epochs else None
        if fault is not None:
            to_stderr(fault)
        self._session.close()
        return self._model.buffers if self._client.group.is_leader else {}


class _Arrays(dict[str, Any]):
    """The parameters of a model by name, which the worker goes on to look at."""

    def __setitem__(self, name: str, value: Any) -> None:
        if value is not self.get(name):
            raise UserError(
                f"worker.model[{name!r}] was given another array, which no worker would see; write "
                f"into the one that is there: worker.model[{name!r}][...] = ..."
            )

    # The methods of ``dict`` write past ``__setitem__``.

    def update(self, *given: Any, **named: Any) -> None:
        for name, value in dict(*given, **named).items():
            self[name] = value

    def __ior__(self, given: Any) -> Self:  # type: ignore[override, misc]
        self.update(given)
        return self

    def setdefault(self, name: str, default: Any = None) -> Any:
        self[name] = self.get(name, default)
        return self[name]

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, or what has travelled, is a plain dict."""
        return dict, (dict(self),)


def _left_undone(epochs: Epochs, taken: Sequence[Taken], writes: bool) -> str | None:
    """A warning, if the bodies of all workers have left samples out, or pushed nothing.

    ``writes``: what they write to the model is in the masters without a push.
    """
    wanted = epochs.data.length * epochs.epochs
    rest = wanted - round(sum(each.samples for each in taken))
    if rest > 0 and not epochs.drop_last and not all(each.all for each in taken):
        return f"the bodies returned with {rest} of {wanted} samples not done"
    batches = sum(each.batches for each in taken)
    if not batches:
        return f"no mini-batch in {wanted} samples: too few for a full one, and drop_last=True"
    if not (writes or any(each.pushes for each in taken)):
        return f"no push in {batches} mini-batches: the model is as it was"
    return None


def _loss(given: Any, where: str) -> torch.Tensor:
    try:
        loss = float(given.detach() if isinstance(given, torch.Tensor) else given)
        if loss == loss:
            return torch.tensor(loss, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise UserError(
        f"{where}: loss={shown(given)} was pushed; give push(gradients, loss=...) a number, the "
        "mean over the samples of the mini-batch"
    )


def in_process(inherited: Inherited, job: BodyJob, client: Client) -> Returned:
    """:func:`work`, in a process of its own."""
    with inherited.owned():
        return work(job, client)


def work(job: BodyJob, client: Client) -> Returned:
    """Run the body in a worker; returns its result, and the buffers of the leader's module."""
    try:
        worker = Worker(client, job)
        return Returned(job.body(worker), worker.end())
    except StopRequested:
        raise
    except BaseException:
        client.pushes.leave()
        raise
