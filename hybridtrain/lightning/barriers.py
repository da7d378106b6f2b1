"""Where a worker meets the others: at ends of epochs and validations, or for its turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridtrain.exchanges import Requirements
from hybridtrain.lightning.async_training.agreement import agree
from hybridtrain.lightning.hooks.loop_hooks import has_ended_epoch
from hybridtrain.lightning.results.configured_model import before_configuring
from hybridtrain.lightning.single_host import SingleHost
from hybridtrain.protocol.messages import Paused, Resumed

if TYPE_CHECKING:
    from hybridtrain.lightning.async_training.counting import UpdateCount
    from hybridtrain.lightning.data.loaders import Loaders
    from hybridtrain.lightning.failover.failure_handling import FailureHandling
    from hybridtrain.lightning.participation.absent_steps import Absence
    from hybridtrain.lightning.results.callback_state import CallbackState
    from hybridtrain.lightning.step.session import Session


class WorkerBarriers(SingleHost):
    """The part of a strategy that meets."""

    requirements: Requirements
    saves_alone = False  # this worker writes a checkpoint that the others do not know of
    _has_asked = False  # whether it may begin at all
    tells = False  # it says where training is, perhaps in the middle of a step
    _absence: Absence
    _count: UpdateCount | None
    _loaders: Loaders | None
    _losses: FailureHandling | None
    _session: Session | None
    before_configuring: CallbackState | None = None  # what the module has written down by then

    def barrier(self, name: str | None = None) -> None:
        super().barrier(name)
        if name == "post_setup" and self._client is not None:
            module = self.lightning_module  # type: ignore[attr-defined]
            self.before_configuring = before_configuring(module)

    def await_turn(self) -> None:
        """Before a mini-batch begins: wait for this worker's turn, or until it may begin at all.

        Raises:
            OthersStop: if none is to begin any more.
        """
        self._absence.stopping.begin_batch()
        if self._count is not None:
            self._count.by_hand.begin_batch()
        asks = self.requirements.takes_turns or (self.requirements.asks and not self._has_asked)
        if asks and self._session is not None and self._count is not None:
            self._has_asked = True
            self._count.reach(self._session.await_turn())

    def flush(self, ends: bool = False) -> None:
        """All hand over what their own steps have come to, unless not all come here.

        ``ends``: no step follows in this epoch, which Lightning may not know yet.
        """
        if self._session is not None and self._all_come:
            self._hand_over(self._session, ends)

    def _hand_over(self, session: Session, ends: bool = False) -> None:
        owed = session.owes
        session.flush(ends or has_ended_epoch(session.trainer))
        if owed and self._loaders is not None:
            self._loaders.commit()

    def hand_over_last(self) -> None:
        """A worker that trains freely stops: what it has come to since its last exchange counts.

        In lock-step the others would have to come, too: a resumed run does these steps again.
        """
        session, stop, wants = self._session, self.client.stop, self.requirements
        asked = stop is not None and not stop.now
        begun = self._loaders is not None and self._loaders.under_way
        if session is None or wants.whole_rounds or not asked or begun:
            return
        if session.has_own_parameters:
            self._hand_over(session, ends=True)

    def _come(self, to: str) -> None:
        """The others are to exchange, or to save, while this worker waits patiently."""
        assert self._session is not None, "it trains"
        if to == "round":
            self._hand_over(self._session)
        else:
            self._session.gather_states()

    @property
    def _all_come(self) -> bool:
        """Whether the others do what this worker does, or run freely, so that none waits."""
        stop = self.client.stop
        stopped = stop is not None and stop.behind is None
        return not (stopped or self.client.solo or self.tells) and not (
            self._alone and self.requirements.whole_rounds
        )

    @property
    def _all_meet(self) -> bool:
        """Whether they do it at the same time."""
        return self._all_come and not self.collectives.local and not self._alone

    @property
    def _alone(self) -> bool:
        return self.saves_alone or bool(self.collectives.alone)

    def validate_behind_last(self) -> None:
        """As on one device the last step is not counted yet, also if others have made it."""
        if self._count is not None:
            self._count.begin_rows()

    def align(self, ends: bool = False) -> None:
        """All workers meet, and agree. In lock-step they always do. ``ends``: see ``flush``."""
        self.client.settle()
        self.flush(ends)  # before others are asked whether anything is left
        if self._losses is not None:
            self._losses.end_epoch()
        self.meet(ends)
        self._absence.meet()

    def meet(self, ends: bool = False) -> None:
        """As in ``align``, at the end of a worker's part, which need not be the epoch's."""
        self.flush(ends)
        self.collectives.local = False
        agree(self._session, self._count, self.collectives)
        if self._count is None and self._session is not None and self._all_meet:
            self._session.catch_up()
        if self._losses is not None:
            self._losses.meet()

    def on_validation_start(self) -> None:
        if self._session is not None:
            self._session.share_buffers(self._loaders is not None and self._loaders.under_way)
        if self.is_global_zero:
            self.client.note(Paused())  # all have met: nobody trains any more

    def on_validation_end(self) -> None:
        if self.is_global_zero:
            self.client.note(Resumed())
