"""The worker's side of an optimizer that steps in the server.

The user's optimizer object stays where schedulers, monitors and hooks expect it, but its ``step``
sends the gradient to the server, where the masters and the optimizer's state live.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import is_
from typing import Any

import torch
from pytorch_lightning.core.optimizer import do_nothing_closure

from hybridtrain.errors import UserError
from hybridtrain.exchanges import Await, Leaving, Offer, Requirements
from hybridtrain.lightning.step.gradient_guard import GradientGuard
from hybridtrain.lightning.step.hyper_parameters import HyperParameters
from hybridtrain.lightning.step.in_place import InPlace, PrivateState
from hybridtrain.lightning.step.local_steps import LocalSteps
from hybridtrain.lightning.step.parameter_readers import is_unwatched
from hybridtrain.lightning.step.remote_state import RemoteState, moved, without_fetching
from hybridtrain.lightning.step.shared_buffers import SharedBuffers
from hybridtrain.lightning.step.trained_parameters import parameters_of, slot_numbers
from hybridtrain.memory import Packed
from hybridtrain.memory.scratch_file import as_bytes
from hybridtrain.protocol.messages import Clip, Push, Released
from hybridtrain.updates import Saved
from hybridtrain.updates.groups import Groups, Members, members_of
from hybridtrain.updates.named import NamedUpdate
from hybridtrain.updates.optimizer_traits import calls_closure, takes_sparse
from hybridtrain.worker.client import Client
from hybridtrain.worker.replica import Replica

MASTERS = "masters"  # in an optimizer's saved state: that of the masters' own optimizer


Closure = Callable[[], Any]


def is_empty(closure: Closure) -> bool:
    """Whether the closure is the empty one that Lightning passes if the user passes none."""
    while isinstance(closure, partial):  # how precision plugins wrap it: the last argument
        closure = closure.args[-1]
    return closure is do_nothing_closure


def run(closure: Closure) -> Any:
    """With gradients, wherever it is called from."""
    with torch.enable_grad():
        return closure()


def as_float(loss: Any) -> float | None:
    """A loss as a number, if it is one."""
    if isinstance(loss, torch.Tensor):
        return float(loss.detach()) if loss.numel() == 1 else None
    return float(loss) if isinstance(loss, int | float) else None


class RemoteOptimizer:
    """Replaces ``optimizer.step``.

    Args:
        optimizer: the user's; its ``param_groups`` are read at every step.
        number_of: slot numbers by ``id(parameter)``, of all that the module has.
        replica: brings gradients out and parameters in.
        client: to the server.
        guard: whether what is brought out may count.
        requirements: in lock-step the optimizer may drive the evaluation, for all wait for it.
        update: how the masters move.
    """

    # Schedulers look for this mark and warn of a step that was replaced after they were made.
    _wrapped_by_lr_sched = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        number_of: Mapping[int, int],
        replica: Replica,
        client: Client,
        guard: GradientGuard,
        requirements: Requirements,
        update: NamedUpdate,
    ) -> None:
        self._update = update
        self._optimizer, self._number_of = optimizer, number_of
        self._replica, self._client, self._guard = replica, client, guard
        joint = requirements.whole_rounds and not requirements.steps_in_worker
        self._driven = joint and calls_closure(optimizer)
        self._parameters = parameters_of(optimizer)
        self._sizes = [len(group["params"]) for group in optimizer.param_groups]
        self.numbers = slot_numbers(optimizer, number_of)
        self.hyper_parameters = HyperParameters(optimizer)
        self._whole_rounds = requirements.whole_rounds
        self.loss: Any = None  # of the last backward, where the policy watches it
        self.state = RemoteState(self._fetch_state)
        self.number = 0  # which of the module's optimizers
        self.trying = False  # a point that the optimizer only tries, where infinity is an answer
        self.manual = False  # the user calls backward, perhaps before ``step(closure)``
        self.weight = 0.0  # what the gradients gathered so far count for, in samples
        self.samples = 0.0  # behind them
        self.clip: Clip | None = None
        self.buffers: SharedBuffers | None = None
        self.in_place: InPlace | None = None  # where workers step the masters themselves
        self.local: LocalSteps | None = None  # where they step parameters of their own
        self.version = 0
        self.averaged = False  # the gradients are the mean of all already
        self.pushed = False  # since the mini-batch began
        self.count = 0  # pushes so far
        self.lazy = False  # nobody looks at parameters before the next mini-batch begins
        self.told: Callable[[int], object] = lambda version: None  # the version of each release
        self._released: Released | None = None  # the last

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's."""
        return self._optimizer

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Those that the server knows of, group by group."""
        return self._parameters

    def __call__(self, closure: Closure | None = None) -> Any:
        """Run the closure, push, wait for the release; with the optimizer's own step hooks."""
        optimizer: Any = self._optimizer
        for hook in list(optimizer._optimizer_step_pre_hooks.values()):
            hook(optimizer, (closure,), {})
        loss = self._step(closure)
        for hook in list(optimizer._optimizer_step_post_hooks.values()):
            hook(optimizer, (closure,), {})
        return loss

    def _step(self, closure: Closure | None) -> Any:
        if self._driven and closure is not None and not is_empty(closure):
            return self._step_driven(closure)
        loss = run(closure) if closure is not None else None
        if self.local is not None:
            self._step_locally(self.local, self.weight)
            return loss
        will_count = self.offer(self.weight)
        waits = not (self.lazy and will_count and is_unwatched(self._optimizer))
        if waits and self._client.unsettled is not None:
            self._client.settle()
        return loss

    def step_without_data(self) -> None:
        """The others make a step for which this worker has nothing; nobody is to wait for it."""
        if self.local is None:
            self.push(0.0)
        else:
            self._step_locally(self.local, 0.0)

    def flush(self, ends: bool) -> None:
        """Hand over what this worker's own steps have come to, where all workers do so."""
        if isinstance(self.in_place, PrivateState):
            self.in_place.catch_up()
        if self.local is not None:
            self._hand_over(self.local, self.local.flush(ends), calls=self._whole_rounds)

    def _step_locally(self, local: LocalSteps, samples: float) -> None:
        """One step of the worker's own; with no samples, the others make it."""
        self._check_members()
        self.count += 1
        self.pushed, self.clip = True, None
        vars(self._optimizer)["_opt_called"] = True  # or schedulers warn about the order
        self._hand_over(local, local.advance(samples))

    def _hand_over(self, local: LocalSteps, leaving: Leaving, calls: bool = False) -> None:
        """Push what the worker's own steps have come to, if that is due, and wait for the release
        where the exchange does. ``calls``: those who have nothing to do meanwhile do so, too.
        """
        while leaving is not None:
            if isinstance(leaving, Offer):
                self._push_own(local, leaving, calls)
                if leaving.later:
                    return
            self._client.settle()
            fetched = isinstance(leaving, Await) or leaving.fetch
            leaving = local.take() if fetched else None

    def _push_own(self, local: LocalSteps, offer: Offer, calls: bool) -> None:
        absent, weight, encoded = local.hand_over(offer), offer.weight, offer.encoded
        looks = weight > 0 and encoded is None  # only what is finite is encoded
        if looks and not self._guard.accepts(self.numbers, absent):
            weight = 0.0
        push = Push(
            self.number,
            weight,
            absent,
            self._told_groups(whole=False),
            samples=weight if offer.samples is None else offer.samples,
            fault=self._guard.pop_fault(),
            loss=self._told_loss(None),
            fetch=offer.fetch,
            encoded=None if encoded is None else len(encoded),
            later=offer.later,
            calls=calls,
        )
        self._client.offer(push, self._taken_back, settles=not offer.only_fetches)

    def _taken_back(self, released: Released) -> None:
        self.version, self._released = released.version, released
        self.hyper_parameters.confirm(None)

    def _told_groups(self, whole: bool) -> Groups | None:
        """What has changed of the hyper-parameters that the update of the masters follows."""
        changed = self.hyper_parameters.changed(whole=whole)
        return self._update.told(self._optimizer, changed)

    def _check_members(self) -> None:
        """The masters' own optimizer, if they have one, has the parameters that it began with."""
        if self._changed_members() is not None:
            raise UserError(
                f"{type(self._optimizer).__name__} was given other parameters in mid-training, "
                f"but update={self._update.name} has an optimizer of its own in host memory, over "
                "those that training began with; use update=user with exchange=gradient, or give "
                "the optimizer all parameters from the start (frozen ones have no gradient)"
            )

    def push(self, weight: float, loss: Any = None, repeatable: bool = False) -> Released:
        """Offer the gradients with this weight, and wait until the server lets this worker go on.

        0 abstains, so that nobody waits in vain.
        """
        self.offer(weight, loss, repeatable)
        self._client.settle()
        assert self._released is not None, "settled"
        return self._released

    def offer(self, weight: float, loss: Any = None, repeatable: bool = False) -> bool:
        """Offer the gradients with this weight; the client settles when the release is needed.

        Returns whether the push will be counted as a step, whatever becomes of it.
        """
        kept: Any = self._optimizer.state  # the user's, perhaps
        if not self._update.is_users:
            self._check_members()
        members, state = self._changed_members(), self._changed_state()
        own = weight > 0 and members is None and state is None and self._can_step()
        absent, packed = self._gathered(weight, own)
        looks = weight > 0 and not self.trying and not own
        finite = self._replica.finite
        if looks and not self._guard.accepts(self.numbers, absent, packed, finite):
            weight, absent, packed = 0.0, (), ()
        push = Push(
            self.number,
            weight,
            absent,
            self._told_groups(whole=members is not None),
            self.clip,
            self.averaged,
            samples=self.samples if weight > 0 else 0.0,
            writes=self._replica.writes(),
            fault=self._guard.pop_fault(),
            veto=self._guard.veto,
            packed=packed,
            members=members,
            loss=self._told_loss(loss),
            repeatable=repeatable,
            state=state,
            own=own,
        )
        if self.buffers is not None:
            self.buffers.publish()
        if self.in_place is not None and own and (step := self.in_place.unasked()) is not None:
            version = self._client.make(step, push, self.in_place.heard)
            self._follow(Released(version))
        else:
            self._client.offer(push, self._take, partial(self._put_back, kept))
        self.pushed, self.clip = True, None
        self.count += 1
        vars(self._optimizer)["_opt_called"] = True  # or schedulers warn about the order
        return self._whole_rounds or weight > 0

    def _take(self, released: Released) -> None:
        """The server has let this worker go on: parameters, and all that follows them, are new."""
        if self.in_place is not None:
            self.in_place.released(released, self.number)
        self._follow(released)

    def _follow(self, released: Released) -> None:
        self._replica.refresh()
        self.state.forget()
        if self.buffers is not None:
            self.buffers.adopt()
        self.hyper_parameters.confirm(released.groups)
        self.trying, self.version = released.again, released.version
        self.told(released.version)
        self._released = released

    def _put_back(self, state: Any) -> None:
        """The step was broken off: the optimizer is as it was in it."""
        self._optimizer.state = state
        self.hyper_parameters.put_back()

    def _told_loss(self, evaluated: Any) -> float | None:
        """What the optimizer, or else the policy, is to know of the loss."""
        return as_float(evaluated if self._driven else self.loss)

    def _gathered(self, weight: float, own: bool) -> tuple[tuple[int, ...], tuple[Packed, ...]]:
        """Who has no gradient, and which are sparse, once the others lie in the row."""
        if own and self.in_place is not None:
            return self.in_place.absent(), ()
        if weight <= 0:
            return (), ()
        return self._replica.collect(self.numbers), self._replica.packed

    def _can_step(self) -> bool:
        """Whether this worker makes the step itself. What is unusual the server does."""
        return self.in_place is not None and self.in_place.can_step(self.numbers, self._parameters)

    # ---- optimizers that drive the evaluation ---------------------------------------------------

    def _step_driven(self, closure: Closure) -> Any:
        """Evaluate as often as the one optimizer in the server asks.

        Gradients that are there already (of a backward before ``step(closure)``) go first, without
        a loss; else the first evaluation is made unasked, as nearly every optimizer begins with it.
        """
        first = None
        if self.manual and any(p.grad is not None for p in self._parameters):
            released = self.push(self.weight, repeatable=True)
        else:
            first = run(closure)
            released = self.push(self.weight, first, repeatable=True)
        while self.trying:
            if released.cleared:
                for parameter in self._parameters:
                    parameter.grad = None
            loss = run(closure)
            first = loss if first is None else first
            released = self.push(self.weight, loss, repeatable=True)
        return first

    # ---- groups ---------------------------------------------------------------------------------

    def _changed_members(self) -> Members | None:
        """The slot numbers of each group, if anything about them has changed."""
        now = parameters_of(self._optimizer)
        sizes = [len(group["params"]) for group in self._optimizer.param_groups]
        if sizes == self._sizes and all(map(is_, now, self._parameters)):
            return None
        self.numbers = slot_numbers(self._optimizer, self._number_of)
        self._parameters, self._sizes = now, sizes
        self._replica.admit(self.numbers, takes_sparse(self._optimizer))
        return members_of(self._optimizer, self.numbers)

    def _changed_state(self) -> bytes | None:
        """What user code has made of the state since the last push; worker 0 speaks for all."""
        own = self._optimizer.state
        if (own is self.state and not self.state.changed) or self.trying:
            return None
        if isinstance(self.in_place, PrivateState):
            self.in_place.replace(own)
            self._optimizer.state = self.state
            self.state.forget()
            return None
        numbers = dict(zip(map(id, self._parameters), self.numbers, strict=True))
        states = {numbers.get(id(key), key): value for key, value in own.items()}
        self._optimizer.state = self.state
        if self._whole_rounds and self._client.worker != 0:
            return None
        return as_bytes(states)

    # ---- state ----------------------------------------------------------------------------------

    def _newest(self, here: dict[Any, Any], there: dict[Any, Any]) -> dict[Any, Any]:
        """The server's state, unless user code has made another one that it has not heard of."""
        if self._optimizer.state is not self.state:
            return here
        return there | here if self.state.changed else here | there

    def _fetch_state(self) -> dict[Any, Any]:
        """The server's, with this worker's parameters as keys and on their devices."""
        if isinstance(self.in_place, PrivateState):
            return self.in_place.states()
        saved = self._client.snapshot(refresh=False)[1][self.number]
        parameters = dict(zip(self.numbers, self._parameters, strict=True))
        states = {
            parameters[number]: moved(state, parameters[number].device)
            for number, state in saved.parameters.items()
            if number in parameters
        }
        return states | saved.others

    def state_dict(self, saved: Saved) -> dict[str, Any]:
        """What ``optimizer.state_dict()`` would be in one process.

        State and whatever else the optimizer keeps come from the server; of the hyper-parameters
        those that were changed here since the last push that was heard.
        """
        if self.local is not None or not self._update.is_users:
            numbered = enumerate(self.numbers)
            states = {n: saved.parameters[x] for n, x in numbered if x in saved.parameters}
            own = without_fetching(self._optimizer)
            own |= {} if self.local is not None else {"state": {}}  # it has never stepped
            return own | {MASTERS: {"update": self._update.name, "state": states}}
        if isinstance(self.in_place, PrivateState):
            return self.in_place.state_dict()
        with self.state.left_alone():
            mine: dict[str, Any] = {**self._optimizer.state_dict(), **saved.own}
        if "state" in mine:
            numbers = slot_numbers(self._optimizer, self._number_of)
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
