"""Parameters in shards that know nothing of one another, in virtual time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from hybridtrain.errors import UserError
from hybridtrain.exchanges import make_exchange
from hybridtrain.policies import make_policy
from hybridtrain.protocol.messages import Clip, Push
from hybridtrain.simulate import parse, simulate
from hybridtrain.worlds.virtual.network import Conditions, Network
from hybridtrain.worlds.virtual.script import Dies, Joins, Script
from hybridtrain.worlds.virtual.service_times import ServiceTimes
from hybridtrain.worlds.virtual.sharding import split
from hybridtrain.worlds.virtual.virtual_world import VirtualWorld
from tests.picking import by_default
from tests.worlds.test_dial_in_virtual_time import Samples, Tally

UNEQUAL = ServiceTimes("lognormal", slower={0: 3.0})
DOWNPOUR = {"name": "accumulated", "n_push": 2, "n_fetch": 3}
SGD = partial(torch.optim.SGD, lr=0.1)


class Net:
    """Four parameters, each of whose gradients depends on all."""

    def __init__(self) -> None:
        self.given: dict[int, list[list[torch.Tensor]]] = defaultdict(list)  # worker -> gradients

    def parameters(self) -> list[torch.Tensor]:
        drawn = torch.Generator().manual_seed(0)
        shapes = [(16, 8), (16,), (3, 16), (3,)]
        return [0.3 * torch.randn(*shape, generator=drawn) for shape in shapes]

    def gradient(self, worker: int, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        all_of_them = sum(float(value.mean()) for value in values)
        made = [value - worker + 0.1 * all_of_them for value in values]
        self.given[worker].append(made)
        return made


def groups(parameters: Any) -> torch.optim.Optimizer:
    """One group is in the first of two shards alone, the other in both."""
    first, *rest = parameters
    return torch.optim.Adam([{"params": [first]}, {"params": rest, "lr": 0.02}], lr=0.01)


def sharded(
    n: int | tuple[float, ...], policy: Any = "async", exchange: Any = "gradient", **rest: Any
) -> VirtualWorld:
    """Three workers, and shards with such delays."""
    shards = (0.0,) * n if isinstance(n, int) else n
    under = Conditions(
        Network(rest.pop("latency_s", 0.0), shards=shards),
        rest.pop("script", Script()),
        update_s=rest.pop("update_s", 0.0),
    )
    workers, task = rest.pop("workers", 3), rest.pop("task", None) or Net()
    return VirtualWorld(
        make_policy(policy), workers, UNEQUAL, task=task, conditions=under,
        optimizer=rest.pop("optimizer", SGD), exchange=make_exchange(exchange), **rest,
    )  # fmt: skip


WAYS = [("async", DOWNPOUR), ("async", "gradient"), ("hybrid", "gradient"), ("synchronous", None)]
WAYS += [({"name": "k_batch_async", "k": 2}, "gradient"), ({"name": "ssp", "lead": 1}, "gradient")]


@pytest.mark.parametrize("latency_s", [0.0, 0.3])
@pytest.mark.parametrize("n", by_default([2, 4], 4))
@pytest.mark.parametrize(("policy", "exchange"), WAYS, ids=str)
def test_without_delays_shards_are_one_to_the_bit(
    policy: Any, exchange: Any, n: int, latency_s: float
) -> None:
    made = []
    for shards in (1, n):
        each = sharded(
            shards, policy, exchange or "gradient", optimizer=groups, latency_s=latency_s
        )
        each.run(until_s=20.0)
        made.append(each)
    one, several = made
    for found, wanted in zip(several.parameters(), one.parameters(), strict=True):
        assert torch.equal(found, wanted)
    assert one.server.statistics.version >= 5
    whole = one.server.statistics.stats()
    sent = whole.pop("handed_over")["sent_bytes"]
    for server in several.servers:
        part = server.statistics.stats()
        sent -= part.pop("handed_over")["sent_bytes"]
        assert part == whole
    assert sent == 0  # each shard has its part
    assert (several.now_s, several.events) == (one.now_s, one.events)
    assert several.network_s == pytest.approx(one.network_s)


def test_each_shard_has_moved_by_what_it_has_applied() -> None:
    """Plain SGD: w_T - w_0 = -lr times the sum of the gradients, of each shard its own."""
    task = Net()
    made = sharded((0.0, 0.4, 3.0), "async", {"name": "accumulated", "n_push": 1}, task=task)
    made.run(until_s=40.1)
    assert made._replicas is not None
    versions = [server.statistics.version for server in made.servers]
    assert len(set(versions)) > 1, "some parts are still under way"
    begun, now = Net().parameters(), made.parameters()
    for shard, server in zip(made._replicas.shards, made.servers, strict=True):
        pushed = server.statistics.stats()["samples_per_worker"]
        assert sum(pushed) == server.statistics.version
        for number in shard.numbers:
            parts = [each[number] for w, n in enumerate(pushed) for each in task.given[w][:n]]
            moved = now[number] - begun[number]
            torch.testing.assert_close(moved, -0.1 * torch.stack(parts).sum(0))


class Versions:
    """A parameter for each shard, which counts its updates; and what has been read of them."""

    def __init__(self, n: int) -> None:
        self.n, self.read = n, list[tuple[int, ...]]()

    def parameters(self) -> list[torch.Tensor]:
        return [torch.zeros(1, dtype=torch.float64) for _ in range(self.n)]

    def gradient(self, worker: int, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.read.append(tuple(-round(float(value)) for value in values))
        return [torch.ones_like(value) for value in values]


@pytest.mark.parametrize("delay_s", [0.0, 0.5])
def test_with_delays_a_fetch_brings_shards_of_different_versions(delay_s: float) -> None:
    task = Versions(2)
    made = sharded((0.0, delay_s), task=task, optimizer=partial(torch.optim.SGD, lr=1.0))
    made.run(updates=100)
    apart = sum(near != far for near, far in task.read)
    assert (apart == 0) if delay_s == 0 else (apart > 10)
    assert made.server.statistics.version == 100


@pytest.mark.parametrize(("shards", "expected_s"), [((0.5,), 1.0), ((0.5, 0.5, 0.0), 2.75 / 2)])
def test_a_worker_goes_on_when_the_last_shard_has_answered(
    shards: tuple[float, ...], expected_s: float
) -> None:
    """There and back: the sum of two exponential times; the greater of two of these is 2.75."""
    under = Conditions(Network(0.25, shards=shards))
    made = VirtualWorld(make_policy("async"), 2, ServiceTimes("constant"), conditions=under)
    made.run(mini_batches=8000)
    assert made.now_s / 4000 == pytest.approx(1.0 + 0.5 + expected_s, rel=0.03)
    assert sum(made.server.statistics.stats()["waiting_share"]) == 0.0
    share = made.network_s / (2 * made.now_s)
    assert share == pytest.approx(1 - 1.0 / (1.5 + expected_s), abs=0.01), "the rest is computing"


def test_each_has_its_part_of_the_load() -> None:
    """Four parameters of 128, 16, 48 and 3 numbers: 128 of 195 are in the first of two shards."""
    made = sharded(2)
    assert made._replicas is not None
    assert made._replicas.shares == [128 / 195, 67 / 195]
    network = Network(1.0, bandwidth=10.0, size_bytes=1950, shards=(0.0, 0.0))
    links = network.links(made._replicas.shares, n_workers=1, seed=0)
    assert [each.loaded_s for each in links] == pytest.approx([1 + 128.0, 1 + 67.0])


@pytest.mark.parametrize("exchange", ["gradient", {"name": "accumulated", "n_push": 2}], ids=str)
@pytest.mark.parametrize("policy", ["async", "hybrid", {"name": "k_async", "k": 2}], ids=str)
def test_workers_die_and_come_back_while_parts_are_under_way(policy: Any, exchange: Any) -> None:
    script = Script(
        tuple(Dies(2.3 + 5 * n, n % 3) for n in range(6))
        + tuple(Joins(4.1 + 5 * n, n % 3) for n in range(6))
    )
    far = (0.0, 0.9, 0.2)
    made = sharded(far, policy, exchange, task=Versions(3), script=script, update_s=0.1)
    made.run(updates=60)
    for server in made.servers:
        assert server.statistics.version > 50
    for worker in range(3):
        assert made.server.statistics.stats()["samples_per_worker"][worker] > 5


@pytest.mark.parametrize("policy", ["async", "hybrid", "synchronous"])
def test_an_epoch_is_worked_off_once_and_all_shards_meet_at_its_end(policy: str) -> None:
    class Both(Tally):
        """Twice the same, in two shards."""

        def parameters(self) -> list[torch.Tensor]:
            return super().parameters() * 2

        def gradient(self, worker: int, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            return [*super().gradient(worker, values)] * 2

    sgd, task = partial(torch.optim.SGD, lr=1.0), Both(60, 4, n_workers=3)
    made = sharded((0.0, 0.7), policy, task=task, optimizer=sgd, latency_s=0.1)
    made.run(epochs=3)
    near, far = made.parameters()
    assert [server.statistics.samples for server in made.servers] == [180.0, 180.0]
    weight = 3 * 0.25 if policy != "hybrid" else 3 / 12
    torch.testing.assert_close(near, torch.full_like(near, -weight), rtol=0, atol=1e-12)
    torch.testing.assert_close(far, near, rtol=0, atol=1e-12)


class Scheduled(Samples):
    """Four parameters; the learning rate of one group changes after every update."""

    def parameters(self) -> list[torch.Tensor]:
        return Net().parameters()

    def gradient(self, worker: int, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return [value + 1 for value in values]

    def updated(self, version: int) -> Any:
        return ({"lr": 0.01 / version}, {"lr": 0.05 / version})


def test_hyper_parameters_reach_the_shards_that_have_the_group() -> None:
    made = []
    for n in (1, 3):
        each = sharded(n, "hybrid", task=Scheduled(60, 4, n_workers=3), optimizer=groups)
        each.run(epochs=2)
        made.append(each.parameters())
    for found, wanted in zip(*made, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("sizes", "n", "expected"),
    [
        ([4], 1, [1]),
        ([1, 1, 1, 1], 2, [2, 2]),
        ([100, 1, 1], 3, [1, 1, 1]),
        ([1, 1, 100], 3, [1, 1, 1]),
        ([1, 1, 100], 2, [2, 1]),
        ([5, 5, 5, 5, 5, 5], 4, [1, 2, 1, 2]),
    ],
)
def test_shards_are_about_equal_and_none_is_empty(
    sizes: list[int], n: int, expected: list[int]
) -> None:
    found = split(sizes, n)
    assert [len(numbers) for numbers in found] == expected
    assert [number for numbers in found for number in numbers] == list(range(len(sizes)))


def clipped() -> Samples:
    task = Scheduled(60, 4, n_workers=3)
    task.clip = Clip("norm", 1.0)
    return task


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: sharded(5), "5 shards were given for 4 parameters; .*choose from 1 to 4"),
        (lambda: sharded(2, "backup"), "2 shards were given with a policy that drops what is late"),
        (lambda: sharded(2, task=clipped()), "2 shards were given with clipping by norm"),
        (lambda: sharded(()), r"shards=\(\) was given"),
        (lambda: sharded((0.0, -1.0)), "a list of which each is a number from 0 on"),
    ],
)
def test_what_shards_cannot_do_is_refused(make: Any, text: str) -> None:
    with pytest.raises(UserError, match=text):
        make()


def test_clipping_in_the_worker_goes_with_shards() -> None:
    sharded(2, "async", DOWNPOUR, task=clipped(), optimizer=groups).run(updates=3)


def test_a_push_of_the_first_shard_covers_the_mini_batches() -> None:
    made = sharded(2)
    assert made._replicas is not None
    first, second = made._replicas.shards
    push = Push(0, 2.0, absent=(0, 2), covers=(("a", "b"),))  # type: ignore[arg-type]
    assert (first.part(push).absent, second.part(push).absent) == ((0,), (1,))
    assert (len(first.part(push).covers), second.part(push).covers) == (1, ())


def test_the_command_line_has_it() -> None:
    given = ["strategy=async", "workers=4", "mini_batches=400", "compute=constant"]
    plan, _ = parse([*given, "shards=3", "delay.2=0.5"])
    assert plan.conditions.network.shards == (0.0, 0.0, 0.5)
    row = simulate(plan, plan.strategies[0], 4)
    assert row.updates_per_s == pytest.approx(4 / 2.0, rel=0.08), "1 s, and half a second each way"
    with pytest.raises(
        UserError, match=r"delay\.3 was given, but 3 shards have the numbers 0 to 2"
    ):
        parse([*given, "shards=3", "delay.3=0.5"])


@pytest.mark.slow
def test_downpour_with_shards_from_the_command_line() -> None:
    given = ["strategy=async", "exchange=accumulated:n_push=2:n_fetch=2", "workers=2"]
    given += ["task=parabola", "trainer.max_epochs=1", "shards=2", "delay.1=0.5"]
    plan, _ = parse(given)
    row = simulate(plan, plan.strategies[0], 2)
    assert row.updates > 0 and row.network_share > 0


def test_an_exchange_needs_gradients() -> None:
    with pytest.raises(UserError, match="exchange=movement was given without task="):
        parse(["exchange=movement"])
