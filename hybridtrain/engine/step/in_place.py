"""The worker's optimizer where workers write the shared parameters themselves, without a lock.

The first gradient of a parameter goes to the server; from then on the optimizer's state lies where
all workers see it (:mod:`hybridtrain.engine.updates.shared_state`), and the user's own optimizer
steps, here, on views of what all share, while others may do the same. Nothing is copied and nobody
waits; now and then an element loses one of two steps that were made at the same moment.

The number of a step in the order of all, which an optimizer may need, is what all have counted in
shared memory, and the server is told later (:mod:`hybridtrain.engine.worker.makers.in_place`).
Where that does not say it (several optimizers, parameters without a gradient) or no step may be too
many (``max_steps``), the worker asks the server first, with a push that carries no gradient. Either
way the parent sees how many mini-batches are behind a worker's steps: the others are done again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch

from hybridtrain.engine.memory import Arena
from hybridtrain.engine.memory.arena import SharedState, TensorPlace
from hybridtrain.engine.profiling import Phase
from hybridtrain.engine.protocol.messages import GetState, Push, Released, Row, StepRequest
from hybridtrain.engine.step.gradient_step import GradientStep
from hybridtrain.engine.step.worker_step import StepParts
from hybridtrain.engine.updates import SavedOptimizer
from hybridtrain.engine.updates.groups import puts_off, takes_sparse
from hybridtrain.engine.updates.kernels.choice import own_step, step_of
from hybridtrain.engine.updates.shared_state import STEP
from hybridtrain.engine.worker.client import Client
from hybridtrain.engine.worker.finite import has_finite_sum
from hybridtrain.engine.worker.makers.in_place import AT_ONCE


class InPlaceOptimizer:
    """Steps one optimizer on parameters and state that all workers share.

    Args:
        optimizer: the user's; its parameters are views of the masters.
        client: to the server.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, client: Client) -> None:
        self._optimizer, self._client = optimizer, client
        self._takes_sparse = takes_sparse(optimizer)
        self._lent = SharedState()
        self._begun: set[int] = set()  # slot numbers of what can be stepped here
        self._arenas: dict[int, Arena] = {}
        self._state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        self._views: dict[tuple[int, str], torch.Tensor] = {}
        self._numbered: dict[int, torch.nn.Parameter] = {}  # of this step
        self._goes_first = False  # a step whose number is known here is made before it is told
        self._is_old = False  # what is lent: the next release says what is new

    def step_unasked(self) -> None:
        """From now on, where the number of the step is known here."""
        self._goes_first = True
        self._client.tickets.draw_at_once(AT_ONCE)

    def ask(self) -> None:
        """From now on: there is another optimizer, whose steps are counted as well."""
        self._goes_first = False

    def can_step(self, numbers: Sequence[int], parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Whether all that the gradients need is here, and they are finite."""
        self._numbered = dict(zip(numbers, parameters, strict=True))
        present = {n: p.grad for n, p in self._numbered.items() if p.grad is not None}
        if not present or not present.keys() <= self._begun:
            return False
        # Large ones may be doubted without reason.
        return all(has_finite_sum(g._values() if g.is_sparse else g) for g in present.values())

    def absent(self) -> tuple[int, ...]:
        """The slot numbers of the parameters that have no gradient."""
        return tuple(n for n, p in self._numbered.items() if p.grad is None)

    def released(self, released: Released, number: int) -> None:
        """The server has answered a push for optimizer ``number``: step, if that is left to do."""
        step = released.step_number
        if step is not None and step.steps is not None:
            self._step(step.steps)
        if step is not None and step.generation != self._lent.generation:
            self._borrow(number)
            self._is_old = False

    def unasked(self) -> Callable[[], object] | None:
        """Return a function that steps without asking the server; ``None`` if it must be asked."""
        client, offset = self._client, self._lent.offset
        knows = self._goes_first and not self._is_old and client.steps.maker.counts
        if offset is None or not knows or client.pushes.must_ask or self.absent():
            return None
        return lambda: self._step(offset + client.steps.maker.total)

    def heard(self, released: Released) -> None:
        """The server knows of steps that were made without asking."""
        step = released.step_number
        self._is_old |= step is not None and step.generation != self._lent.generation

    @torch.no_grad()
    def _step(self, steps: int | dict[int, int]) -> None:
        """One step, which is number ``steps`` + 1 (of each parameter, where they differ)."""
        for parameter in self._numbered.values():
            if parameter.grad is not None and parameter.grad.is_sparse and not self._takes_sparse:
                parameter.grad = parameter.grad.to_dense()
        self._ready(steps)
        with self._holding_state():
            self._make(self._optimizer)
        self._keep_in_place()

    def _ready(self, steps: int | dict[int, int]) -> None:
        """Tell each parameter's state the number of the step."""
        for number, parameter in self._numbered.items():
            if parameter.grad is not None:
                count = steps if isinstance(steps, int) else steps.get(number, 0)
                _set_count(self._state_of(number, parameter), count)

    @contextmanager
    def _holding_state(self) -> Iterator[None]:
        """The user's optimizer has the state that is stepped here."""
        optimizer: Any = self._optimizer
        others, optimizer.state = optimizer.state, self._state
        try:
            yield
        finally:
            optimizer.state = others

    def _make(self, optimizer: torch.optim.Optimizer) -> None:
        """Alone it is plain training to the bit; among others no bits are to be kept."""
        own_step(optimizer) if self._client.n_workers > 1 else step_of(optimizer)(optimizer)

    def _keep_in_place(self) -> None:
        """Copy tensors that the optimizer has replaced in its state into the shared ones."""
        for number, parameter in self._numbered.items():
            if parameter.grad is None:
                continue
            state, places = self._state[parameter], self._lent.places.get(number, {})
            for key in places:
                view, value = self._views[number, key], state.get(key)
                if value is not view:
                    state[key] = view if value is None else view.copy_(value)
            known = places.keys() | self._lent.plain.get(number, {}).keys() | {STEP}
            if not state.keys() <= known:  # it keeps something new: the server makes the next step
                self._begun.discard(number)

    def _borrow(self, number: int) -> None:
        """Map what the server has lent since."""
        self._lent = lent = self._client.memory.borrow(number)
        self._begun = set(lent.plain)
        self._state.clear()

    def _state_of(self, number: int, parameter: torch.nn.Parameter) -> dict[str, Any]:
        """The parameter's part of the state, as the optimizer will find it."""
        if parameter not in self._state:
            lent = self._lent
            views = {k: self._view(place) for k, place in lent.places.get(number, {}).items()}
            self._views |= {(number, key): view for key, view in views.items()}
            self._state[parameter] = views | lent.plain[number]
            if number in lent.steps:
                self._state[parameter][STEP] = deepcopy(lent.steps[number])
        return self._state[parameter]

    def _view(self, place: TensorPlace) -> torch.Tensor:
        if place.arena not in self._arenas:
            self._arenas[place.arena] = self._client.memory.map(GetState(arena=place.arena))
        return place.view(self._arenas)


class PrivateState(InPlaceOptimizer):
    """Where each worker's optimizer has moments of its own: they begin with what it has."""

    def __init__(self, optimizer: torch.optim.Optimizer, client: Client) -> None:
        super().__init__(optimizer, client)
        self._state.update(optimizer.state)

    def can_step(self, numbers: Sequence[int], parameters: Sequence[torch.nn.Parameter]) -> bool:
        self._begun = set(numbers)
        return super().can_step(numbers, parameters)

    def _ready(self, steps: int | dict[int, int]) -> None:
        """Steps are counted by the optimizer itself."""

    def _keep_in_place(self) -> None:
        """Do nothing: this optimizer's state is its own, not shared."""

    def _borrow(self, number: int) -> None:
        """There is nothing but the number of steps."""
        self._lent = self._client.memory.borrow(number)

    def states(self) -> dict[Any, Any]:
        """By parameter."""
        return dict(self._state)

    def replace(self, states: Mapping[Any, Any]) -> None:
        """User code has made something else of them."""
        kept = dict(states)
        self._state.clear()
        self._state.update(kept)

    def state_dict(self) -> dict[str, Any]:
        """As the optimizer would save it."""
        with self._holding_state():
            return dict(self._optimizer.state_dict())

    def catch_up(self) -> None:
        """Move what was put off."""
        if puts_off(self._optimizer):
            with self._holding_state():
                behind: Any = self._optimizer
                behind.catch_up()


class WrittenInPlace(InPlaceOptimizer):
    """Where the module has written to the parameters: of a step there is only its count."""

    def can_step(self, numbers: Sequence[int], parameters: Sequence[torch.nn.Parameter]) -> bool:
        return True

    def absent(self) -> tuple[int, ...]:
        return ()

    def _step(self, steps: int | dict[int, int]) -> None:
        """Nothing: it is made."""


class InPlaceStep(GradientStep):
    """Steps the masters in the worker where the gradients allow it, and else hands them over.

    Args:
        optimizer, number, parts: see :class:`~hybridtrain.engine.step.worker_step.WorkerStep`.
        stepper: steps parameters and state that all workers share.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        number: int,
        parts: StepParts,
        stepper: InPlaceOptimizer,
    ) -> None:
        super().__init__(optimizer, number, parts)
        self._stepper = stepper

    def renumber(self, number: int, only: bool) -> None:
        super().renumber(number, only)
        if not only:
            self._stepper.ask()

    def _can_step(self) -> bool:
        return self._stepper.can_step(self.numbers, self.parameters)

    def _collect(self, weight: float, own: bool) -> Row:
        return Row(self._stepper.absent()) if own else super()._collect(weight, own)

    def _send(self, push: Push, undo: Callable[[], object]) -> None:
        step = self._stepper.unasked() if isinstance(push, StepRequest) else None
        if step is None:
            super()._send(push, undo)
        else:
            super()._take(Released(self._client.pushes.make(step, push, self._stepper.heard)))

    def timed(self) -> list[tuple[Phase, object, str, str]]:
        return [*super().timed(), (Phase.UPDATE, self._stepper, "_step", "own step")]

    def _take(self, released: Released) -> None:
        self._stepper.released(released, self.number)
        super()._take(released)


class PrivateStateStep(InPlaceStep):
    """The same, with optimizer state of the worker's own."""

    _stepper: PrivateState

    def flush(self, ends: bool) -> None:
        self._stepper.catch_up()

    def _told_state(self, own: Mapping[Any, Any]) -> bytes | None:
        self._stepper.replace(own)
        self.state.forget()
        return None

    def _fetch_state(self) -> dict[Any, Any]:
        return self._stepper.states()

    def state_dict(self, saved: SavedOptimizer) -> dict[str, Any]:
        return self._stepper.state_dict()


def in_place_step(
    written: bool,
    private_state: bool,
    optimizer: torch.optim.Optimizer,
    number: int,
    parts: StepParts,
) -> InPlaceStep:
    """A step on the masters. ``written``: the module writes to them, without an optimizer."""
    kind = WrittenInPlace if written else PrivateState if private_state else InPlaceOptimizer
    stepper = kind(optimizer, parts.client)
    if parts.only and parts.endless and parts.requirements.steps_unasked:
        stepper.step_unasked()
    if isinstance(stepper, PrivateState):
        return PrivateStateStep(optimizer, number, parts, stepper)
    return InPlaceStep(optimizer, number, parts, stepper)


def _set_count(state: dict[str, Any], count: int) -> None:
    if isinstance(old := state.get(STEP), torch.Tensor):
        old.fill_(count)
    elif old is not None:
        state[STEP] = type(old)(count)
