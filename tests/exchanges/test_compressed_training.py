"""Workers that hand over encoded bytes, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from hybridtrain.engine.exchanges import make_exchange
from hybridtrain.engine.policies import make_policy
from hybridtrain.virtual.network import Conditions, Network
from hybridtrain.virtual.script import Dies, Joins, Script
from hybridtrain.virtual.service_times import ServiceTimes
from hybridtrain.virtual.virtual_world import VirtualWorld

N, SMALL = 5000, 10
PLAIN_BYTES = 4 * (N + SMALL)
INT8_BYTES = (N + 2 * 4) + (SMALL + 4)  # two chunks, and one
TOPK_BYTES = (64 + 14) * 12 // 8 + (64 + 14 + 3) // 4 + 2 * 4 + (2 + 1 + 4)


class Valley:
    """f(w) = ½ Σ a (w - c)², where every worker has a ``c`` of its own."""

    def __init__(self, workers: int, absent: bool = False) -> None:
        drawn = torch.Generator().manual_seed(3)
        self.start = torch.randn(N, generator=drawn)
        self.scales = torch.rand(N, generator=drawn) + 0.5
        self.centres = torch.randn(workers, N, generator=drawn)
        self.absent = absent

    def parameters(self) -> list[torch.Tensor]:
        return [self.start.clone(), torch.ones(SMALL)]

    def gradient(self, worker: int, values: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        rest = None if self.absent else values[1].clone()
        return [self.scales * (values[0] - self.centres[worker]), rest]

    def loss(self, values: Sequence[torch.Tensor]) -> float:
        """At the mean of the centres it is 0."""
        return float((self.scales * (values[0] - self.centres.mean(0)) ** 2).sum())


def world(exchange: Any, workers: int = 2, policy: str = "hybrid", **rest: Any) -> VirtualWorld:
    task = rest.pop("task", None) or Valley(workers)
    return VirtualWorld(
        make_policy(policy),
        workers,
        ServiceTimes("constant"),
        task=task,
        optimizer=rest.pop("optimizer", partial(torch.optim.Adam, lr=0.05)),
        exchange=make_exchange(exchange),
        **rest,
    )


def movement(compress: Any = None, every: int = 3) -> dict[str, Any]:
    return {"name": "movement", "every": every, "compress": compress}


def handed_over(made: VirtualWorld) -> dict[str, int]:
    found: dict[str, int] = made.server.statistics.stats()["handed_over"]
    return found


def parameters_after(made: VirtualWorld, updates: int) -> list[torch.Tensor]:
    made.run(updates=updates)
    return made.parameters()


def test_all_elements_as_they_are_is_local_sgd_to_the_bit() -> None:
    everything = {"name": "topk", "density": 1, "bits": None}
    plain, encoded = world(movement(), 3), world(movement(everything), 3)
    pairs = zip(parameters_after(plain, 5), parameters_after(encoded, 5), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    sent = 5 * 3 * PLAIN_BYTES
    assert handed_over(plain) == handed_over(encoded) == {"sent_bytes": sent, "saved_bytes": 0}


@pytest.mark.parametrize(
    ("compress", "n_bytes"), [(None, PLAIN_BYTES), ("int8", INT8_BYTES), ("topk", TOPK_BYTES)]
)
def test_bytes_are_counted_exactly_and_a_run_is_the_same_again(compress: Any, n_bytes: int) -> None:
    one, other = world(movement(compress), 3), world(movement(compress), 3)
    pairs = zip(parameters_after(one, 6), parameters_after(other, 6), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    wanted = {"sent_bytes": 18 * n_bytes, "saved_bytes": 18 * (PLAIN_BYTES - n_bytes)}
    assert handed_over(one) == wanted


def test_the_groups_of_an_optimizer_may_have_any_order() -> None:
    def last_first(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": parameters[1:]}, {"params": parameters[:1]}]
        return torch.optim.Adam(groups, lr=0.05)

    one, other = world(movement("int8")), world(movement("int8"), optimizer=last_first)
    pairs = zip(parameters_after(one, 4), parameters_after(other, 4), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("compress", "factor"),
    [("int8", 1.01), ("int4", 1.01), ({"name": "topk", "density": 0.1}, 1.05)],
)
def test_encoded_movements_come_as_close_to_the_minimum_as_plain_ones(
    compress: Any, factor: float
) -> None:
    task = Valley(2)
    plain, encoded = world(movement(), task=task), world(movement(compress), task=task)
    wanted, found = (task.loss(parameters_after(made, 20)) for made in (plain, encoded))
    assert found < factor * wanted < 0.2 * task.loss(task.parameters())


def test_sums_of_gradients_are_encoded_too() -> None:
    sums = {"name": "accumulated", "n_push": 2, "n_fetch": 3}
    plain, encoded = (
        world(sums | {"compress": compress}, policy="async", task=Valley(2, absent=True))
        for compress in (None, "int8")
    )
    for made in (plain, encoded):
        made.run(until_s=12.5)
    n_bytes, pushes = INT8_BYTES - SMALL - 4, 2 * 6  # what is fetched alone brings nothing
    saved = pushes * (4 * N - n_bytes)
    assert handed_over(plain) == {"sent_bytes": pushes * 4 * N, "saved_bytes": 0}
    assert handed_over(encoded) == {"sent_bytes": pushes * n_bytes, "saved_bytes": saved}
    for one, other in zip(plain.parameters(), encoded.parameters(), strict=True):
        assert (one - other).abs().mean() < 0.01


@pytest.mark.parametrize(("compress", "n_bytes"), [(None, PLAIN_BYTES), ("int8", INT8_BYTES)])
def test_time_on_the_network_follows_the_encoded_size(compress: Any, n_bytes: int) -> None:
    """Steps that nothing follows do not travel; the release brings whole parameters."""
    network = Network(latency_s=0.5, bandwidth=10_000, size_bytes=PLAIN_BYTES)
    far = world(movement(compress), conditions=Conditions(network))
    far.run(updates=4)
    there, back = 0.5 + n_bytes / 10_000, 0.5 + PLAIN_BYTES / 10_000
    assert far.now_s == pytest.approx(4 * (3 + there) + 3 * back)
    shared = Network(server_bandwidth=10_000, size_bytes=PLAIN_BYTES)
    busy = world(movement(compress), conditions=Conditions(shared))
    busy.run(updates=1)
    assert busy.now_s == pytest.approx(3 + 2 * n_bytes / 10_000)


def test_who_takes_the_place_of_a_worker_that_died_is_owed_nothing() -> None:
    script = Script((Dies(7.5, 1), Joins(9.5, 1)))
    made = world(movement("topk"), conditions=Conditions(script=script))
    made.run(until_s=7.0)
    replicas: Any = made._replicas
    assert len(replicas._workers[1].steps.exchange.state()["residuals"]) == 2
    made.run(until_s=8.0)
    assert not replicas._workers[1].steps.exchange.state()["residuals"]
    made.run(until_s=20.0)
    assert len(replicas._workers[1].steps.exchange.state()["residuals"]) == 2
