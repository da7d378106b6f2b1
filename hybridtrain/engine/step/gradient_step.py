"""A worker's step that hands the gradient over: the server steps the masters, with its own state.

The worker waits for the release, which brings the newest parameters. Where nobody looks at them
before the next mini-batch, it goes on to the end of the mini-batch first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from hybridtrain.engine.exchanges.exchange import RESIDUALS
from hybridtrain.engine.memory.scratch_file import as_bytes
from hybridtrain.engine.profiling import Phase
from hybridtrain.engine.protocol.messages import (
    Changes,
    GradientPush,
    Push,
    Released,
    Row,
    StepRequest,
)
from hybridtrain.engine.step.remote_state import RemoteState, moved, without_fetching
from hybridtrain.engine.step.trained_parameters import slot_numbers
from hybridtrain.engine.step.worker_step import (
    Closure,
    StepParts,
    WorkerStep,
    as_float,
    is_empty,
    is_unwatched,
    run,
)
from hybridtrain.engine.updates import SavedOptimizer
from hybridtrain.engine.updates.groups import calls_closure


class GradientStep(WorkerStep):
    """Offers the gradient of each step to the server.

    Args:
        optimizer, number, parts: see :class:`~hybridtrain.engine.step.worker_step.WorkerStep`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, number: int, parts: StepParts) -> None:
        super().__init__(optimizer, number, parts)
        requirements = parts.requirements
        self._whole_rounds = requirements.whole_rounds
        joint = requirements.whole_rounds and not requirements.steps_in_worker
        self._driven = joint and calls_closure(optimizer)
        self.state = RemoteState(self._fetch_state)
        self._released: Released | None = None  # the last
        optimizer.state = self.state  # the server's now

    def _step(self, closure: Closure | None) -> Any:
        if self._driven and closure is not None and not is_empty(closure, self._parts.nothing):
            return self._step_driven(closure)
        loss = run(closure) if closure is not None else None
        will_count = self._offer(self._gathered.weight)
        waits = not (self._parts.goes_ahead and will_count and is_unwatched(self.optimizer))
        if waits and self._client.steps.unsettled is not None:
            self._client.pushes.settle()
        return loss

    def skip(self) -> None:
        self._push(0.0)

    def _step_driven(self, closure: Closure) -> Any:
        """Evaluate as often as the one optimizer in the server asks.

        Gradients that are there already (of a backward before ``step(closure)``) go first, without
        a loss; else the first evaluation is made unasked, as nearly every optimizer begins with it.
        """
        first = None
        if self._parts.manual and any(p.grad is not None for p in self.parameters):
            released = self._push(self._gathered.weight, repeatable=True)
        else:
            first = run(closure)
            released = self._push(self._gathered.weight, first, repeatable=True)
        while self.trying:
            if released.cleared:
                for parameter in self.parameters:
                    parameter.grad = None
            loss = run(closure)
            first = loss if first is None else first
            released = self._push(self._gathered.weight, loss, repeatable=True)
        return first

    def _push(self, weight: float, loss: Any = None, repeatable: bool = False) -> Released:
        """Offer the gradients with this weight, and wait until the server releases this worker.

        0 abstains, so that nobody waits in vain.
        """
        self._offer(weight, loss, repeatable)
        self._client.pushes.settle()
        assert self._released is not None, "settled"
        return self._released

    def _offer(self, weight: float, loss: Any = None, repeatable: bool = False) -> bool:
        """Offer the gradients with this weight; the client settles when the release is needed.

        Returns whether the push will be counted as a step, whatever becomes of it. A mini-batch
        whose first step was dropped is done again with all of its steps, so the later ones are
        passed over.
        """
        if self._gathered.stepped and not self._client.steps.counted:
            self._end_step()
            return False
        kept: Any = self.optimizer.state  # the user's, perhaps
        if not self._parts.update.is_users:
            self._check_members()
        members, state = self._changed_members(), self._changed_state()
        own = weight > 0 and members is None and state is None and self._can_step()
        row = self._collect(weight, own)
        looks = weight > 0 and not self.trying and not own and row.encoded is None
        finite = self._replica.finite
        if looks and not self._guard.accepts(self.numbers, row.absent, row.packed, finite):
            weight, row = 0.0, Row(averaged=row.averaged)
            if self._parts.buffers is not None:  # its statistics may be no numbers either
                self._parts.buffers.put_back(self._client.steps.version)
        push = self._kind_of_push(own, repeatable)(
            self.number,
            weight,
            row,
            Changes(self._told_groups(whole=members is not None), members, state),
            samples=self._gathered.pop_samples() if weight > 0 else 0.0,
            writes=self._replica.writes(),
            fault=self._guard.pop_fault(),
            loss=as_float(loss if self._driven else self._loss),
        )
        if self._parts.buffers is not None:
            self._parts.buffers.publish()
        self._send(push, partial(self._put_back, kept))
        self._end_step()
        return self._whole_rounds or weight > 0

    def _kind_of_push(self, own: bool, repeatable: bool) -> Callable[..., Push]:
        if own:
            return StepRequest
        return partial(
            GradientPush,
            clip=self._clip,
            veto=self._guard.veto,
            repeatable=repeatable,
            follows=self._gathered.stepped,
        )

    def _send(self, push: Push, undo: Any) -> None:
        self._client.pushes.offer(push, self._take, undo)

    def _take(self, released: Released) -> None:
        """The server has released this worker: parameters, and all that follows them, are new."""
        self._replica.refresh()
        self.state.forget()
        if self._parts.buffers is not None:
            self._parts.buffers.adopt()
        self.hyper_parameters.confirm(released.groups)
        self.trying, self.version = released.again, released.version
        self._parts.released(released.version)
        self._released = released

    def _put_back(self, state: Any) -> None:
        """The step was broken off: the optimizer is as it was in it."""
        self.optimizer.state = state
        self.hyper_parameters.put_back()

    def _collect(self, weight: float, own: bool) -> Row:
        """Write the gradients to the row."""
        averaged, replica = self._parts.averaged, self._replica
        if weight <= 0:
            replica.leave_out(self.numbers)
            return Row(averaged=averaged)
        self._parts.complete(self.numbers)
        absent = replica.collect(self.numbers, as_they_are=averaged)
        return Row(absent, replica.packed, replica.encoded, averaged)

    def _can_step(self) -> bool:
        """Whether this worker makes the step itself."""
        return False

    def catch_up(self, version: int) -> None:
        super().catch_up(version)
        self.state.forget()

    # ---- state ----------------------------------------------------------------------------------

    def _changed_state(self) -> bytes | None:
        """The optimizer state that user code changed since the last push; worker 0 sends it."""
        own = self.optimizer.state
        if (own is self.state and not self.state.changed) or self.trying:
            return None
        self.optimizer.state = self.state
        return self._told_state(own)

    def _told_state(self, own: Mapping[Any, Any]) -> bytes | None:
        numbers = dict(zip(map(id, self.parameters), self.numbers, strict=True))
        states = {numbers.get(id(key), key): value for key, value in own.items()}
        if self._whole_rounds and self._client.worker != 0:
            return None
        return as_bytes(states)

    def _fetch_state(self) -> dict[Any, Any]:
        """The server's, with this worker's parameters as keys and on their devices."""
        saved = self._client.snapshots.take(refresh=False)[1][self.number]
        parameters = dict(zip(self.numbers, self.parameters, strict=True))
        states = {
            parameters[number]: moved(state, parameters[number].device)
            for number, state in saved.parameters.items()
            if number in parameters
        }
        return states | saved.others

    def _newest(self, here: dict[Any, Any], there: dict[Any, Any]) -> dict[Any, Any]:
        """The server's state, unless user code has made another one that it has not heard of."""
        if self.optimizer.state is not self.state:
            return here
        return there | here if self.state.changed else here | there

    def state_dict(self, saved: SavedOptimizer) -> dict[str, Any]:
        """State and whatever else the optimizer keeps come from the server; of the hyper-parameters
        those that were changed here since the last push that was heard.
        """
        if not self._parts.update.is_users:
            own = without_fetching(self.optimizer) | {"state": {}}  # it has never stepped
            return own | self._of_masters(saved)
        with self.state.left_alone():
            mine: dict[str, Any] = {**self.optimizer.state_dict(), **saved.own}
        if "state" in mine:
            numbers = slot_numbers(self.optimizer, self._parts.number_of)
            states = {
                index: saved.parameters[number]
                for index, number in enumerate(numbers)
                if number in saved.parameters
            }
            mine["state"] = self._newest(mine["state"], states | saved.others)
        if "param_groups" in mine:
            groups = self.hyper_parameters.newest(mine["param_groups"], saved.groups)
            mine["param_groups"] = groups
        return mine

    def own_state(self) -> dict[str, Any]:
        encoder = self._replica.encoder
        if encoder is None:
            return {}
        known = encoder.state(self.numbers)
        residuals = {place: known[n] for place, n in enumerate(self.numbers) if n in known}
        return {"exchange": {RESIDUALS: residuals}}

    def load_own_state(self, saved: Mapping[str, Any]) -> None:
        if (encoder := self._replica.encoder) is not None:
            residuals = saved["exchange"].get(RESIDUALS, {})
            encoder.load_state({self.numbers[place]: each for place, each in residuals.items()})

    def timed(self) -> list[tuple[Phase, object, str, str]]:
        return [(Phase.PUSH, self, "_offer", "push")]

    def close(self) -> None:
        self.state.close()
