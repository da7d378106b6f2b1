"""A worker's own steps between two exchanges: what an exchange sees of one optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch

from hybridtrain.errors import UserError
from hybridtrain.exchanges import Await, Leaving, LocalExchange, Offer
from hybridtrain.lightning.step.remote_state import without_fetching
from hybridtrain.lightning.step.trained_parameters import parameters_of
from hybridtrain.lightning.step.worker_step import Closure, StepParts, WorkerStep, as_float, run
from hybridtrain.protocol.messages import Push, Released
from hybridtrain.updates import Saved
from hybridtrain.updates.kernels.own_step import own_step
from hybridtrain.updates.optimizer_traits import needs_closure, puts_off
from hybridtrain.worker.replica_own import OwnReplica


class LocalSteps:
    """Of one optimizer, whose state is this worker's own.

    Args:
        optimizer: the user's.
        numbers: the slot number of each of its parameters, group by group.
        replica: the worker's parameters.
        exchange: decides when something leaves; a copy of its own is made.
        fresh: nobody moves the masters while this worker computes.
        worker: its number.
        workers: how many train.

    Raises:
        UserError: if the optimizer evaluates its closure as it pleases.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        numbers: tuple[int, ...],
        replica: OwnReplica,
        exchange: LocalExchange,
        fresh: bool,
        worker: int,
        workers: int,
    ) -> None:
        if needs_closure(optimizer):
            raise UserError(
                f"{type(optimizer).__name__} was given with exchange={exchange}, but it evaluates "
                "its closure several times in a step, and a worker's own step has one gradient; "
                "use SGD or Adam, or exchange=gradient with policy=hybrid"
            )
        self._optimizer, self._numbers, self._replica = optimizer, numbers, replica
        self._exchange = deepcopy(exchange)
        self._trained = parameters_of(optimizer)
        self.parameters = replica.parameters(numbers)
        self._masters = replica.masters(numbers)
        self.samples, self.ends = 0.0, False
        self.fresh, self.worker, self.workers = fresh, worker, workers

    @property
    def masters(self) -> Sequence[torch.Tensor]:
        """As this worker has read them last, where its parameters are."""
        return _Brought(self._masters, self.parameters)

    @property
    def rate(self) -> float:
        return max(float(group["lr"]) for group in self._optimizer.param_groups)

    @property
    def gradients(self) -> list[torch.Tensor | None]:
        return [parameter.grad for parameter in self._trained]

    def step(self) -> None:
        own_step(self._optimizer)

    def moved(self, places: Sequence[int] | None = None) -> list[torch.Tensor]:
        numbers = self._numbers
        return self._replica.moved(numbers if places is None else [numbers[p] for p in places])

    def advance(self, samples: float) -> Leaving:
        """One step with the gradients of so many samples; with none, the others make it."""
        self.samples = samples
        with torch.no_grad():
            if samples > 0:
                return self._exchange.step(self)
            return self._exchange.skip(self)

    def flush(self, ends: bool) -> Leaving:
        """Hand over the steps since the last exchange; ``ends``: the epoch or training ends."""
        self.ends = ends
        if self.owes and puts_off(self._optimizer):
            behind: Any = self._optimizer
            behind.catch_up()
        with torch.no_grad():
            return self._exchange.flush(self)

    @property
    def owes(self) -> bool:
        """Whether steps have been made that nothing has been handed over of."""
        return self._exchange.owes

    def hand_over(self, offer: Offer) -> tuple[int, ...]:
        """Into the worker's row; returns the slot numbers of what is not part of it."""
        return self._replica.hand_over(self._numbers, offer.values, offer.encoded)

    def take(self) -> Leaving:
        """The release has brought the newest masters; perhaps something follows."""
        with torch.no_grad():
            return self._exchange.take(self, self.masters)

    def state(self) -> dict[str, Any]:
        """What is this worker's alone: its optimizer's state, its exchange's, its parameters."""
        return {
            "state": without_fetching(self._optimizer)["state"],
            "exchange": self._exchange.state(),
            "parameters": self._replica.kept(self._numbers),
        }

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Go on from there; what is not there stays as it is."""
        if "state" in saved:
            now = self._optimizer.state_dict()
            self._optimizer.load_state_dict(now | {"state": saved["state"]})
        self._exchange.load_state(saved["exchange"])
        if own := saved.get("parameters"):
            self._replica.keep(self._numbers, own)


class _Brought(Sequence[torch.Tensor]):
    """Tensors of the host, each brought to where another one is when it is looked at."""

    def __init__(self, tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
        self._tensors, self._others = tensors, others

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, place: Any) -> Any:
        return self._tensors[place].to(self._others[place].device)


class LocalStep(WorkerStep):
    """Steps parameters of the worker's own, and hands over what the exchange says, when it says.

    Args:
        optimizer, number, parts: see :class:`~hybridtrain.lightning.step.worker_step.WorkerStep`.
        replica: the worker's parameters.
        exchange: decides when something leaves.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        number: int,
        parts: StepParts,
        replica: OwnReplica,
        exchange: LocalExchange,
    ) -> None:
        super().__init__(optimizer, number, parts)
        client, fresh = parts.client, parts.requirements.whole_rounds
        place = client.worker, client.n_workers
        self._local = LocalSteps(optimizer, self.numbers, replica, exchange, fresh, *place)

    def _step(self, closure: Closure | None) -> Any:
        loss = run(closure) if closure is not None else None
        self._advance(self.weight)
        return loss

    def skip(self) -> None:
        self._advance(0.0)

    def flush(self, ends: bool) -> None:
        calls = self._parts.requirements.whole_rounds
        self._hand_over(self._local.flush(ends), calls)

    @property
    def owes(self) -> bool:
        return self._local.owes

    def _advance(self, samples: float) -> None:
        """One step with the gradients of so many samples; with none, the others make it."""
        self._check_members()
        self._end_step()
        self._hand_over(self._local.advance(samples))

    def _hand_over(self, leaving: Leaving, calls: bool = False) -> None:
        """Push what leaves the worker, and wait for the release where the exchange does.

        ``calls``: workers that wait patiently hand over theirs, too.
        """
        while leaving is not None:
            if isinstance(leaving, Offer):
                self._push(leaving, calls)
                if leaving.later:
                    return
            self._client.settle()
            fetched = isinstance(leaving, Await) or leaving.fetch
            leaving = self._local.take() if fetched else None

    def _push(self, offer: Offer, calls: bool) -> None:
        absent, weight, encoded = self._local.hand_over(offer), offer.weight, offer.encoded
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
            loss=as_float(self._loss),
            fetch=offer.fetch,
            encoded=None if encoded is None else len(encoded),
            later=offer.later,
            calls=calls,
        )
        self._client.offer(push, self._take, settles=not offer.only_fetches)

    def _take(self, released: Released) -> None:
        self.version = released.version
        self.hyper_parameters.confirm(None)

    def state_dict(self, saved: Saved) -> dict[str, Any]:
        return without_fetching(self._optimizer) | self._of_masters(saved)

    def own_state(self) -> dict[str, Any]:
        return self._local.state()

    def load_own_state(self, saved: Mapping[str, Any]) -> None:
        self._local.load_state(saved)
