"""How a worker hands over its contribution to a step, and waits for the release.

A push may be *offered*: the worker continues with whatever needs no parameters, and settles before
anything that does. Updates that the worker makes itself are reported in pushes, too, several
together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hybridtrain.engine.protocol.messages import Draw, Push, Released
from hybridtrain.engine.worker.inbox import Inbox, StopRequested
from hybridtrain.engine.worker.makers.in_place import AT_ONCE
from hybridtrain.engine.worker.pending_push import PendingPush, Taking, Undoing
from hybridtrain.engine.worker.schedule_calls import ScheduleCalls
from hybridtrain.engine.worker.steps import Steps
from hybridtrain.engine.worker.surroundings import Connection
from hybridtrain.engine.worker.tickets import Tickets
from hybridtrain.engine.worker.worker_group import WorkerGroup


class Pushes:
    """Offers pushes, settles them, and reports the steps that this worker makes itself.

    Args:
        line: to the server.
        inbox: receives releases.
        steps: know the version and the maker of updates, and hold the offered push.
        group: whether all workers train.
        tickets: of the mini-batches that a push covers.
        schedule_calls: are sent before a push.
    """

    def __init__(
        self,
        line: Connection,
        inbox: Inbox,
        steps: Steps,
        group: WorkerGroup,
        tickets: Tickets,
        schedule_calls: ScheduleCalls,
    ) -> None:
        self._line, self._inbox, self._steps, self._group = line, inbox, steps, group
        self._tickets, self._schedule_calls = tickets, schedule_calls

    # ---- contributions --------------------------------------------------------------------------

    def offer(
        self, push: Push, then: Taking, undo: Undoing | None = None, settles: bool = True
    ) -> None:
        """Push the gradient in the row; ``settle`` calls ``then`` once, with the release.

        ``settles``: the push covers the mini-batches drawn so far.

        Until then this worker may use neither the row nor the parameters. If the release never
        arrives, ``undo`` is called instead.
        """
        if settles and self._makes(push, then):
            return
        self.settle()
        steps = self._steps
        if settles:
            covers = tuple(self._tickets.pop_covers())
            if push.waits and (draws := self._tickets.ask()):
                push = replace(push, draws=draws)
            push = replace(push, covers=covers) if covers else push
        undoing, n_covers = [undo] if undo is not None else [], len(push.covers)
        came = steps.maker.come(push, steps.version + 1, self._group.is_whole)
        if not came:
            self._send_push(push)
        args = (then, undoing, push.draws, not push.waits, n_covers)
        steps.expect(PendingPush(*args, unsent=push if came else None))

    def make(self, step: Callable[[], object], push: Push, then: Taking) -> int:
        """Step the masters without asking the server, and report it later.

        Several steps are reported together: when few mini-batches are left, after some time, or
        before any other message. ``then`` is called with the answer.

        Returns:
            The number of steps of all workers.
        """
        step()
        version = self._steps.maker.count(push, self._tickets.pop_covers(), then)
        self._steps.make(version)
        self._report_if_due()
        return self._steps.version

    @property
    def must_ask(self) -> bool:
        """Whether only the server can make the next step."""
        return self._schedule_calls.has_called or self._tickets.is_mixed

    def _makes(self, push: Push, then: Taking) -> bool:
        """Make the update of this push alone, if possible; returns whether it was."""
        steps = self._steps
        if not steps.maker.makes_alone or self.must_ask:
            return False
        if steps.unsettled is not None:  # until then the row and the parameters are in use
            self.await_offered()
        version = steps.maker.make(push, self._tickets.pop_covers)
        if version is None:
            return False
        steps.make(version)
        self._tickets.draw_at_once(AT_ONCE)
        self._report_if_due()
        then(Released(steps.version))
        return True

    def leave(self) -> None:
        """This worker has failed: leave what it has begun to the server."""
        steps = self._steps
        steps.maker.forget()
        if steps.offered is None or steps.offered.unsent is None:
            return
        if (left := steps.maker.leave(steps.offered.unsent, steps.version + 1)) is not None:
            steps.offered.is_sent()
            self._send_push(left)

    # ---- releases -------------------------------------------------------------------------------

    def settle(self) -> None:
        """Report all steps, and wait for the release of an offered push."""
        maker = self._steps.maker
        if maker.untold and maker.log.tells(due=True):
            self._report_steps(())
        self.await_offered()

    def await_offered(self) -> None:
        """Wait for the release of an offered push, but report no steps."""
        if self._steps.offered is not None and (offered := self._steps.pop_offered()) is not None:
            lost = offered.lost and offered.unsent is None  # a push that was not sent is not lost
            offered.settle(self._give_up if lost else self.await_release)

    def await_release(self, then: Taking, push: PendingPush) -> None:
        """Wait for the release of an offered push; profiles time this."""
        released, number = None, self._steps.version + 1
        if push.unsent is not None:
            left = self._steps.maker.wait(push.unsent, number, self._inbox.disturbs)
            if left is None:
                released = Released(number)
            else:
                self._send_push(left)
        self._steps.take(released or self._inbox.answer(Released, in_step=True)[0], then, push)

    def _give_up(self, *_: Any) -> None:
        """The server has stopped instead of answering."""
        raise StopRequested

    # ---- messages -------------------------------------------------------------------------------

    def send_changes(self, made: bool) -> None:
        """Send what the server has to know before the next message of this worker.

        Hyper-parameters go in a message of their own: the push of a step that is aborted has no
        effect. ``made``: this worker makes the round; else its push carries its own.
        """
        self._schedule_calls.send()
        if (owed := self._steps.maker.owed(made)) is not None:
            self._line.send(owed)

    def _send_push(self, push: Push) -> None:
        """Let the server make this round."""
        self.send_changes(made=False)
        self._line.send(push)

    def _report_if_due(self) -> None:
        maker = self._steps.maker
        if self._tickets.wanted or maker.log.tells(due=not maker.may_wait):
            self._inbox.receive_all()
            if self._steps.offered is None or maker.must_tell:
                self._report_steps(self._tickets.ask())
            if maker.log.awaits:  # a replay repeats which mini-batches were drawn by then
                self.await_offered()

    def _report_steps(self, draws: tuple[Draw, ...]) -> None:
        self.await_offered()
        self._schedule_calls.send()
        push, pending = self._steps.maker.tell(draws)
        self._steps.expect(pending)
        self._line.send(push)
