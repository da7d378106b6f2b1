"""The remaining workers process a lost worker's samples, at the end of the epoch.

After their last mini-batch all workers meet and learn which are lost. If these left samples, the
epoch continues: the loaders iterate once more, over the rest, as if training had resumed in the
middle of the epoch. So each sample is used once, every step averages over the remaining workers,
and nothing changes before these have done their own shares. From the next epoch on they share all.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from hybridtrain.engine.protocol.spans import Spans, total
from hybridtrain.lightning.checkpointing.epoch_state import EpochEvent, EpochState
from hybridtrain.lightning.data.loaders import Loaders
from hybridtrain.lightning.failover.leader_failover import LeaderFailover, know_the_loggers
from hybridtrain.lightning.failover.rejoin import Rejoin, RejoinState
from hybridtrain.lightning.failover.rng_mailbox import RngMailbox
from hybridtrain.lightning.hooks.loop_hooks import (
    forget_group,
    is_at_last_batch,
    is_limited,
    logged_step,
    remeasure,
    set_logged_step,
    training_fetcher,
)
from hybridtrain.lightning.hooks.points import Point, around
from hybridtrain.lightning.step.session import Session
from hybridtrain.lightning.worker_context import WorkerContext


def prepare_for_losses(
    worker: WorkerContext,
    session: Session,
    loaders: Loaders,
    pages: RngMailbox | None,
    reporting: Callable[[], AbstractContextManager[None]],
    synchronize: Callable[[], None],
    back: Rejoin | None,
) -> LostSampleRedistribution | None:
    """Prepare this worker, at the start of training, for the loss of others.

    Args:
        worker: this one; its ``on_failure`` says which parts are needed.
        session: of this worker.
        loaders: of this worker.
        pages: see :class:`RejoinState`.
        reporting: see :class:`RejoinState`.
        synchronize: meets the other workers at the end of a share.
        back: if this worker has been restarted.
    """
    choice, whole_rounds = worker.on_failure.choice, worker.requirements.whole_rounds
    if choice == "stop":
        return None
    if back is None:
        know_the_loggers(session.trainer, worker.collectives)
    LeaderFailover(session.trainer, worker.client.group, worker.client.listeners)
    continues = choice == "continue"
    loaders.committed.remember(continues and whole_rounds)
    state = RejoinState(worker, session, loaders, pages, reporting, back)
    if whole_rounds and not continues:  # a restarted worker keeps its place
        return None
    return LostSampleRedistribution(session.trainer, worker, loaders, state.keep, synchronize)


class LostSampleRedistribution:
    """Continues an epoch that lost workers left unfinished.

    Args:
        trainer: of this worker.
        worker: this one.
        loaders: of this worker.
        keep: sends the parent the state of training after the last update.
        synchronize: meets the other workers at the end of a share.
    """

    def __init__(
        self,
        trainer: Any,
        worker: WorkerContext,
        loaders: Loaders,
        keep: Callable[[], None],
        synchronize: Callable[[], None],
    ) -> None:
        self._trainer, self._loaders, self._synchronize = trainer, loaders, synchronize
        self._client, self._position, self._keep = worker.client, loaders.position, keep
        self._collectives = worker.collectives
        self._whole_rounds = worker.requirements.whole_rounds
        around(Point.SCHEDULERS, trainer.fit_loop.epoch_loop, self.look)

    def look(self, proceed: Callable[..., None], interval: str, **options: Any) -> None:
        """After each mini-batch: its step is whole, and Lightning has not ended the epoch."""
        if interval != "epoch":
            proceed(interval, **options)
        if is_at_last_batch(self._trainer):
            self.end()
        if interval == "epoch" and is_at_last_batch(self._trainer):  # it is not continued
            proceed(interval, **options)

    def end(self) -> None:
        """This worker has done its last mini-batch: meet the others, once."""
        if self._position.on(EpochEvent.REACHES_END):
            self._synchronize()
            # The hooks of this mini-batch follow, which not every worker has.
            self._collectives.stay_local(not self._whole_rounds)

    def end_epoch(self) -> None:
        """Before all workers meet: one that stopped early has not met them at its end yet."""
        if not self._whole_rounds:
            self.end()

    def meet(self) -> None:
        """All workers meet, anywhere in the epoch; after its end this does nothing."""
        if self._position.state is EpochState.OVER:
            return
        client, samplers = self._client, self._loaders.samplers
        client.gather("who is there", None)
        remaining = [sampler.left_by(client.group.gone) for sampler in samplers]
        if client.group.remaining or any(remaining):
            if all(client.gather("whether to make it up", self._can)):
                self._go_on(remaining)
                return
            self._complain(remaining)
        if not self._position.on(EpochEvent.ALL_MEET):
            return
        if self._trainer.current_epoch + 1 == self._trainer.max_epochs:
            self._keep()
        if client.group.gone:
            self._position.change_lengths()
            for sampler in samplers:
                sampler.shares_with(client.group.there)

    @property
    def _can(self) -> bool:
        """Whether this worker is at the end of an epoch that can be made longer."""
        trainer, loop = self._trainer, self._trainer.fit_loop.epoch_loop
        whole = not is_limited(trainer) and not trainer.overfit_batches
        enough = loop.max_steps != -1 and loop.global_step >= loop.max_steps
        enough = enough or trainer.should_stop
        return self._is_at_end and self._loaders.are_alike and whole and not enough

    @property
    def _is_at_end(self) -> bool:
        return self._position.state is EpochState.AT_END

    def _go_on(self, remaining: list[Spans]) -> None:
        loop, fetcher = self._trainer.fit_loop.epoch_loop, training_fetcher(self._trainer)
        if forget_group(self._trainer):  # the last step was of a smaller one: its row counts
            set_logged_step(self._trainer, logged_step(self._trainer) + 1)
        # The first loader to end may have begun another pass; it alone may count a skipped step.
        laps, batches = zip(*[sampler.place for sampler in self._loaders.samplers], strict=True)
        spans, place = remaining[laps.index(min(laps))], (min(laps), max(batches))
        for sampler in self._loaders.samplers:
            sampler.go_on(self._client.group.there, spans, place)
        self._position.change_lengths()
        self._position.on(EpochEvent.IS_CONTINUED)
        loop.batch_progress.is_last_batch = False
        remeasure(self._trainer)
        iter(fetcher)
        fetcher.fetched += loop.batch_progress.current.ready

    def _complain(self, remaining: list[Spans]) -> None:
        if self._is_at_end and self._client.group.is_leader:
            n_remaining = sum(map(total, remaining))
            some = f"{n_remaining} samples" if n_remaining else "some samples"
            rank_zero_warn(
                f"{some} that workers which are gone would have done are not trained on in this "
                "epoch: a stop, max_steps or limit_train_batches ends it, or there are loaders of "
                "different lengths or batch sizes"
            )
