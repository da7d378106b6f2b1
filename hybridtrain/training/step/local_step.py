"""A worker's step on parameters of its own, which its exchange hands over now and then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hybridtrain.exchanges import Await, Leaving, LocalExchange, Offer
from hybridtrain.protocol.messages import Changes, ExchangePush, Released, Row
from hybridtrain.training.step.remote_state import without_fetching
from hybridtrain.training.step.worker_step import Closure, StepParts, WorkerStep, as_float, run
from hybridtrain.updates import Saved
from hybridtrain.worker.local_steps import LocalSteps
from hybridtrain.worker.replica_own import OwnReplica


class LocalStep(WorkerStep):
    """Steps parameters of the worker's own, and hands over what the exchange says, when it says.

    Args:
        optimizer, number, parts: see :class:`~hybridtrain.training.step.worker_step.WorkerStep`.
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
        place, self._own = (client.worker, client.n_workers), replica
        self._local = LocalSteps(optimizer, self.numbers, replica, exchange, fresh, *place)

    def _step(self, closure: Closure | None) -> Any:
        loss = run(closure) if closure is not None else None
        self._advance(self._gathered.weight)
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
        weight, encoded = offer.weight, offer.encoded
        absent = self._own.hand_over(self.numbers, offer.values, encoded)
        looks = weight > 0 and encoded is None  # only what is finite is encoded
        if looks and not self._guard.accepts(self.numbers, absent):
            weight = 0.0
        n_bytes = None if encoded is None else len(encoded)
        push = ExchangePush(
            self.number,
            weight,
            Row(absent, encoded=n_bytes),
            Changes(self._told_groups(whole=False)),
            samples=weight if offer.samples is None else offer.samples,
            fault=self._guard.pop_fault(),
            loss=as_float(self._loss),
            fetch=offer.fetch,
            later=offer.later,
            calls=calls,
        )
        self._client.offer(push, self._take, settles=not offer.only_fetches)

    def _take(self, released: Released) -> None:
        self.version = released.version
        self.hyper_parameters.confirm(None)

    def state_dict(self, saved: Saved) -> dict[str, Any]:
        return without_fetching(self.optimizer) | self._of_masters(saved)

    def own_state(self) -> dict[str, Any]:
        return {
            "state": without_fetching(self.optimizer)["state"],
            "exchange": self._local.exchange.state(),
            "parameters": self._own.kept(self.numbers),
        }

    def load_own_state(self, saved: Mapping[str, Any]) -> None:
        if "state" in saved:
            now = self.optimizer.state_dict()
            self.optimizer.load_state_dict(now | {"state": saved["state"]})
        self._local.exchange.load_state(saved["exchange"])
        if own := saved.get("parameters"):
            self._own.keep(self.numbers, own)
