"""Every exchange of own parameters goes on from its state, and tells of each sample once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch

from hybridtrain.engine.exchanges import make_exchange
from hybridtrain.engine.exchanges.exchange import Await, Leaving, Offer

EXCHANGES: dict[str, dict[str, Any]] = {
    "movement": {"name": "movement", "every": 3},
    "encoded": {"name": "movement", "every": 3, "compress": "int4"},
    "later": {"name": "movement", "every": {"then": 3, "at": 4}},
    "streaming": {"name": "streaming", "every": 6, "fragments": 2},
    "overlap": {"name": "streaming", "every": 6, "fragments": 2, "overlap": 1, "mix": 0.5},
    "accumulated": {"name": "accumulated", "n_push": 3, "n_fetch": 2},
    "fetched": {"name": "accumulated", "n_push": 2, "n_fetch": 3, "fetch": "overlapped"},
    "elastic": {"name": "elastic", "every": 3},
}
SAMPLES = (4.0, 4.0, 0.0, 4.0, 2.0, 4.0, 4.0, 0.0, 4.0, 4.0, 1.0, 4.0, 4.0, 2.0)


class Worker:
    """Its gradients lie where the last ones lay; what it hands over moves the masters."""

    def __init__(self, fresh: bool) -> None:
        self.parameters = [torch.ones(3, 2), torch.ones(3), torch.ones(2, 2)]
        self.masters = [torch.ones_like(each) for each in self.parameters]
        self.gradients = [torch.zeros_like(each) for each in self.parameters]
        self.fresh, self.worker, self.workers, self.ends = fresh, 0, 2, False
        self.samples, self.loss, self.rate, self._n = 0.0, 0.0, 0.1, 0
        self.said: list[Any] = []

    def step(self) -> None:
        torch._foreach_sub_(self.parameters, self.gradients)

    def moved(self, places: Sequence[int] | None = None) -> list[torch.Tensor]:
        chosen = range(len(self.parameters)) if places is None else places
        return [self.masters[place] - self.parameters[place] for place in chosen]

    def advance(self, exchange: Any, samples: float) -> None:
        self.samples, self._n = samples, self._n + 1
        for number, gradient in enumerate(self.gradients):
            gradient.fill_(0.1 * (self._n + number))
        self._leaves(exchange, exchange.step if samples else exchange.skip)

    def end(self, exchange: Any) -> None:
        self.ends = True
        self._leaves(exchange, exchange.flush)

    def _leaves(self, exchange: Any, begin: Callable[[Worker], Leaving]) -> None:
        leaving = begin(self)
        while leaving is not None:
            if isinstance(leaving, Offer):
                values = [None if each is None else each.tolist() for each in leaving.values]
                told = leaving.weight if leaving.samples is None else leaving.samples
                self.said.append((self._n, values, leaving.weight, told, leaving.fetch))
                if leaving.later:
                    return
            else:
                self.said.append((self._n, "awaits", 0.0, 0.0, True))
            torch._foreach_mul_(self.masters, 0.9)
            fetched = isinstance(leaving, Await) or leaving.fetch
            leaving = exchange.take(self, self.masters) if fetched else None


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("fresh", [True, False])
def test_an_exchange_goes_on_from_its_saved_state(name: str, fresh: bool) -> None:
    exchange, worker = make_exchange(EXCHANGES[name]), Worker(fresh)
    going_on = []
    for n in range(len(SAMPLES) + 1):
        other: Any = make_exchange(EXCHANGES[name])
        other.load_state(deepcopy(exchange.state()))  # type: ignore[attr-defined]
        going_on.append((n, other, deepcopy(worker)))
        for samples in SAMPLES[n : n + 1]:
            worker.advance(exchange, samples)
    worker.end(exchange)
    for n, other, its in going_on:
        for samples in SAMPLES[n:]:
            its.advance(other, samples)
        its.end(other)
        assert its.said == worker.said


@pytest.mark.parametrize("name", EXCHANGES)
def test_an_exchange_tells_of_all_samples_once_and_then_of_nothing_more(name: str) -> None:
    exchange, worker = make_exchange(EXCHANGES[name]), Worker(fresh=True)
    for samples in SAMPLES:
        worker.advance(exchange, samples)
    worker.end(exchange)
    assert sum(told for *_, told, _ in worker.said) == sum(SAMPLES)
    n = len(worker.said)
    worker.end(exchange)
    assert len(worker.said) == n


@pytest.mark.parametrize("name", ["movement", "encoded", "elastic"])
def test_an_exchange_that_has_just_handed_over_has_nothing_left_at_the_end(name: str) -> None:
    exchange, worker = make_exchange(EXCHANGES[name]), Worker(fresh=True)
    for samples in SAMPLES[:3]:
        worker.advance(exchange, samples)
    n = len(worker.said)
    worker.end(exchange)
    assert len(worker.said) == n > 0
