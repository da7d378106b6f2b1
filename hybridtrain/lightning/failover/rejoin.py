"""Restart a lost worker: another worker sends it the state of training, from which it resumes.

Parameters and optimizer states lie in host memory. Missing are Lightning's counters, callbacks,
schedulers and the rest of the epoch: a checkpoint without weights and states. Another worker makes
it while it waits in the step that the lost worker left unfinished; it is a checkpoint of the last
whole step, and the new worker repeats the unfinished one.

Until its first step the new worker skips all meetings: the others have been in them. In lock-step
it restores the lost worker's RNG states (:class:`RngMailbox`); where these are unknown, those of
the sending worker, because all draw alike from one seed as long as their mini-batches are equal.
(Worker processes of a DataLoader have their own.)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytorch_lightning as pl
import torch

from hybridtrain.engine.memory.scratch_file import as_bytes, read
from hybridtrain.engine.memory.store import checksum
from hybridtrain.engine.protocol.messages import Progress, Writes
from hybridtrain.engine.protocol.spans import split, total
from hybridtrain.engine.step.shared_buffers import lies_apart
from hybridtrain.engine.worker.client import Client
from hybridtrain.errors import UserError
from hybridtrain.lightning.checkpointing.mid_epoch import KEY
from hybridtrain.lightning.data.loaders import Loaders
from hybridtrain.lightning.failover.leader_failover import become_leader
from hybridtrain.lightning.failover.rng_mailbox import RngMailbox
from hybridtrain.lightning.hooks.loop_hooks import (
    add_to_saved_logged_step,
    reload_epochs,
    set_reload_epochs,
)
from hybridtrain.lightning.hooks.points import Point, before
from hybridtrain.lightning.hooks.trainer_hooks import CURRENT, dump_at_once
from hybridtrain.lightning.run_context import checkpoints_of
from hybridtrain.lightning.states.callback_state import give_state, standing_of
from hybridtrain.lightning.states.logger_state import identity, keep_rows
from hybridtrain.lightning.step.session import Session
from hybridtrain.lightning.update_count import set_global_step, step_schedulers
from hybridtrain.lightning.worker_context import WorkerContext
from hybridtrain.util.generators import equal, look, put

MEMORY = "the memory of this run"  # in place of a path, for the trainer's ckpt_path
_OURS = "hybridtrain_run"


def advance(checkpoint: dict[str, Any], steps: int, every: int) -> bool:
    """Count ``steps`` more steps of the epoch as done, each of ``every`` accumulated mini-batches.

    Returns:
        Whether they include the epoch's last one.

    Raises:
        UserError: if the epoch has not so many, so that samples would count twice.
    """
    if steps <= 0:
        return False
    ours = checkpoint[KEY]
    (loader,) = ours["loaders"]
    remaining = -(-total(loader["spans"]) // loader["whole"])
    if steps > -(-remaining // every):
        raise UserError(
            f"the only known state of training is {steps} updates old, and of an earlier epoch; "
            "continue from the last checkpoint"
        )
    batches = min(steps * every, remaining)
    ours["batches"] += batches
    add_to_saved_logged_step(checkpoint["loops"]["fit_loop"], steps)
    loader["batches"] += batches
    rest = split([tuple(span) for span in loader["spans"]], batches * loader["whole"])[1]
    loader["spans"] = [list(span) for span in rest]
    return not rest


class RejoinState:
    """In a training worker: sends the state of training.

    Args:
        worker: this one.
        session: of this worker.
        loaders: of this worker.
        pages: for RNG states, where a lost worker gets them back.
        reporting: a context in which the trainer makes the checkpoint that is sent.
        back: if this worker itself has been restarted.
    """

    def __init__(
        self,
        worker: WorkerContext,
        session: Session,
        loaders: Loaders,
        pages: RngMailbox | None,
        reporting: Callable[[], AbstractContextManager[None]],
        back: Rejoin | None,
    ) -> None:
        self._trainer: Any = session.trainer
        trainer = self._trainer
        self._client, self._session, self._reporting = worker.client, session, reporting
        self._whole_rounds = worker.requirements.whole_rounds
        self._loaders, self._pages, self._back = loaders, pages, back
        self._kept_in: int | None = None  # the epoch of the last state that the parent keeps
        self._begun: int | None = None  # the version at the beginning of the current step
        self._generators: dict[str, Any] = {}  # RNG states before its first mini-batch was fetched
        self._pushed: dict[str, Any] = {}  # the same at the last push
        self._at_first = _checksums(trainer) if back is None else back.checksums
        if worker.on_failure.tells:  # else the worker sends by itself
            before(Point.FETCH, trainer.fit_loop.epoch_loop, self.fetch)
            self._client.listeners.on_question(self.tell)
        if pages is not None:
            before(Point.OFFER, self._client.pushes, self.push)

    def fetch(self) -> None:
        """Before a mini-batch: write the RNG states, and once an epoch send the state."""
        client = self._client
        if self._back is not None:
            self._back.begin(client.worker, self._pages)
            self._back = None
        if self._begun != client.steps.version:
            self._begun, self._generators = client.steps.version, look()
            if self._pages is not None:
                self._pages.begin(client.worker, client.steps.version, self._generators)
        self._send_once_an_epoch()

    def _send_once_an_epoch(self) -> None:
        """In case all workers are lost at once."""
        epoch = self._trainer.current_epoch
        if epoch == self._kept_in or not self._client.group.is_leader:
            return
        if not self._whole_rounds or all(s.has_begun(epoch) for s in self._loaders.samplers):
            self._kept_in = epoch
            known = self._can_be_advanced
            self._client.note(Progress(None, self.tell() if known else b""))

    @property
    def _can_be_advanced(self) -> bool:
        """Whether a checkpoint of now can be advanced by later steps.

        In lock-step only with one loader and a fixed number of mini-batches a step.
        """
        if not self._whole_rounds:
            return True
        fixed = bool(self._trainer.lightning_module.automatic_optimization)
        return len(self._loaders.samplers) == 1 and fixed

    def keep(self) -> None:
        """After the last update: if all workers are lost now, one new process can finish."""
        if self._client.group.is_leader:
            self._client.note(Progress(None, self.tell()))

    def push(self) -> None:
        """Before a push: write the RNG states.

        The state is sent before the epoch's first push: once that update is made, the state of the
        epoch before can no longer be advanced.
        """
        self._send_once_an_epoch()
        assert self._pages is not None, "it listens only with pages"
        self._pushed = look()
        self._pages.push(self._client.worker, self._client.steps.version, self._pushed)

    def tell(self) -> bytes:
        """A checkpoint of the last whole step, from a worker in the middle of the next."""
        trainer = self._trainer
        module = trainer.lightning_module
        with self._reporting():
            checkpoint = dump_at_once(trainer)
        state = checkpoint["state_dict"]
        checkpoint = self._loaders.checkpoint.write(checkpoint, for_now=True)
        loggers, samplers = [identity(logger) for logger in trainer.loggers], self._loaders.samplers
        if self._whole_rounds and KEY in checkpoint:
            for loader, sampler in zip(checkpoint[KEY]["loaders"], samplers, strict=False):
                loader["crew"] = list(sampler.crew)
        checkpoint[_OURS] = {
            "generators": self._generators or look(),
            "drew": not equal(self._pushed, self._generators),  # behind the push, in a hook
            "loggers": loggers,
            "reload_epochs": list(reload_epochs(trainer)),
            "accumulated": int(trainer.accumulate_grad_batches),  # a callback may change it
            "should_stop": trainer.should_stop,
            "checkpoints": [standing_of(each, module) for each in checkpoints_of(trainer)],
            "unsaved": {k: v for k, v in module.named_buffers() if k not in state},
            "written": self._written(),
            **_own_of(trainer, self._at_first),
        }
        return as_bytes(checkpoint)

    def _written(self) -> Writes:
        """In lock-step: what hooks have written to parameters since the last update."""
        if not self._whole_rounds or self._session.has_own_parameters:
            return {}
        return self._session.replica.apart()


def _own_of(trainer: Any, at_first: dict[str, int]) -> dict[str, Any]:
    """A worker's own state: the members of parameter groups, values outside of optimizers."""
    named = dict(trainer.lightning_module.named_parameters())
    now = _checksums(trainer)
    changed = [name for name, found in now.items() if found != at_first.get(name)]
    return {
        "members": [_members(optimizer, named) for optimizer in trainer.optimizers],
        "trains": {name: parameter.requires_grad for name, parameter in named.items()},
        "apart": {name: named[name].detach().cpu() for name in changed},
        "checksums": at_first,
    }


def _members(optimizer: torch.optim.Optimizer, named: dict[str, torch.Tensor]) -> list[list[str]]:
    """The names of the parameters in each group."""
    name_of = {id(parameter): name for name, parameter in named.items()}
    return [[name_of.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]


def _checksums(trainer: Any) -> dict[str, int]:
    """Checksums of parameters in no optimizer; empty if none is in one, as then all are trained."""
    groups = (group for each in trainer.optimizers for group in each.param_groups)
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    named = trainer.lightning_module.named_parameters() if trained else ()
    return {name: checksum(p.detach()) for name, p in named if id(p) not in trained}


class Rejoin:
    """In a restarted worker: lets Lightning resume from the state it was sent.

    Args:
        progress: the state, of :class:`RejoinState`.
        version: updates so far; more than in ``progress`` if that is older.
        trainer: of this worker.
        client: to the server.
        whole_rounds: whether all workers take the same steps.
    """

    def __init__(
        self,
        progress: bytes,
        version: int,
        trainer: pl.Trainer,
        client: Client,
        whole_rounds: bool,
    ) -> None:
        self._checkpoint = read("", progress)
        self._ours = self._checkpoint.pop(_OURS)
        for known in ("dice", "dice_of"):  # `generators` are those of this moment
            self._checkpoint.get(KEY, {}).pop(known, None)
        self._trainer: Any = trainer
        self._version, self._drew = version, self._ours["drew"]
        self.checksums: dict[str, int] = self._ours["checksums"]
        self._ends_epoch, self._whole_rounds = False, whole_rounds
        if whole_rounds:
            steps = version - self._checkpoint["global_step"]
            self._ends_epoch = advance(self._checkpoint, steps, self._ours["accumulated"])
            if steps > 0:  # later updates have them
                self._ours["written"], self._drew = {}, False
        client.group.rejoin()
        before(Point.FIT, trainer.fit_loop, self.agree)

    def prepare(self) -> None:
        """Let loggers continue their files; called before they are opened."""
        for logger, content in zip(self._trainer.loggers, self._ours["loggers"], strict=True):
            vars(logger).update(content)
            if self._trainer.is_global_zero:
                keep_rows(logger)

    def regroup(self) -> None:
        """Give optimizers the parameter groups that user code has made since training began.

        Called once the optimizers are made, before their hyper-parameters are restored.
        """
        named = dict(self._trainer.lightning_module.named_parameters())
        for name in named.keys() & self._ours["trains"].keys():
            named[name].requires_grad_(self._ours["trains"][name])
        for optimizer, groups in zip(self._trainer.optimizers, self._ours["members"], strict=False):
            known = all(name in named for names in groups for name in names)
            if not known or groups == _members(optimizer, named):
                continue
            own = [*optimizer.param_groups, *({**optimizer.param_groups[0]} for _ in groups)]
            for group, names in zip(own, groups, strict=False):
                group["params"] = [named[name] for name in names]
            optimizer.param_groups[:] = own[: len(groups)]

    @torch.no_grad()
    def restore_apart(self, session: Session) -> None:
        """Restore parameters outside of optimizers, which are each worker's own.

        And what hooks have written behind the last update: the masters get it with the next one.
        """
        session.repeat(self._ours["written"])
        named = dict(self._trainer.lightning_module.named_parameters())
        for name in named.keys() & self._ours["apart"].keys():  # user code may make some later
            named[name].copy_(self._ours["apart"][name])

    def load(self) -> dict[str, Any]:
        """The state as a checkpoint, for Lightning."""
        self._take_unsaved_buffers()
        weights, found = self._trainer.lightning_module.state_dict(), self._checkpoint  # not used
        kept = {name: weights | found[name] for name in ("state_dict", CURRENT) if name in found}
        return {**found, **kept}

    def agree(self) -> None:
        """Let callbacks of this new process decide as those of the others.

        A clock has perhaps stopped it alone, and a ``ModelCheckpoint`` on another host has another
        directory, so Lightning does not restore it.
        """
        trainer = self._trainer
        trainer.should_stop = self._ours["should_stop"]
        states = self._ours["checkpoints"]
        for callback, state in zip(checkpoints_of(trainer), states, strict=True):
            give_state(callback, trainer.lightning_module, state)

    def catch_up(self) -> None:
        """Bring counters and schedulers to the current version, before training begins.

        Loaders are made again when those of the others are, with whom it meets there.
        """
        set_reload_epochs(self._trainer, *self._ours["reload_epochs"])
        if self._trainer.is_global_zero:
            become_leader(self._trainer)
        if self._whole_rounds:
            before, epoch = self._checkpoint["global_step"], self._trainer.num_training_batches
            step_schedulers(self._trainer, before, self._version, epoch)
            set_global_step(self._trainer, self._version)
        if self._ends_epoch:  # Lightning goes on with the next one
            loop = self._trainer.fit_loop.epoch_loop
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)

    def _take_unsaved_buffers(self) -> None:
        """Restore buffers outside of checkpoints; caches may have grown since the start."""
        for name, value in self._ours["unsaved"].items():
            path, _, last = name.rpartition(".")
            buffers = self._trainer.lightning_module.get_submodule(path)._buffers
            mine = buffers.get(last)
            fits = mine is not None and mine.shape == value.shape and mine.dtype == value.dtype
            if mine is not None and fits and lies_apart(mine):
                mine.copy_(value)
            else:  # also an expanded one, which stays as the others have it
                buffers[last] = value.to(self._trainer.lightning_module.device)

    def begin(self, worker: int, pages: RngMailbox | None) -> None:
        """Before the first mini-batch is fetched: restore this worker's RNG states."""
        known = None if pages is None else pages.find(worker, self._version, not self._drew)
        put(known or self._ours["generators"])
