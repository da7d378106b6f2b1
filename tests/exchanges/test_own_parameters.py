"""Workers that train on their own, in virtual time: equal to plain torch, to the last digit."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from theory.local import Bowls

from hybridtrain.engine.exchanges import LocalExchange, begin_policy, make_exchange
from hybridtrain.engine.policies import make_policy
from hybridtrain.engine.updates.named import make_update, update_of
from hybridtrain.errors import UserError
from hybridtrain.virtual.network import Conditions, Network
from hybridtrain.virtual.service_times import ServiceTimes
from hybridtrain.virtual.virtual_world import VirtualWorld

CONSTANT = ServiceTimes("constant")


class Two(Bowls):
    """With one more, which pulls every worker the same way."""

    def parameters(self) -> list[torch.Tensor]:
        return [*super().parameters(), torch.ones(1, dtype=torch.float64)]

    def gradient(self, worker: int, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [*super().gradient(worker, values), values[1].clone()]


def world(task: Any, workers: int, optimizer: Any, exchange: Any, **rest: Any) -> VirtualWorld:
    policy = rest.pop("policy", "hybrid")
    made = make_exchange(exchange)
    return VirtualWorld(
        make_policy(policy),
        workers,
        CONSTANT,
        task=task,
        optimizer=optimizer,
        exchange=made,
        **rest,
    )


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


# ---- local SGD ----------------------------------------------------------------------------------


def averaged_now_and_then(task: Two, workers: int, make: Any, every: int, rounds: int) -> Any:
    """Algorithm 1 of Stich 2019, written down again."""
    masters = task.parameters()
    own = [[torch.nn.Parameter(m.clone()) for m in masters] for _ in range(workers)]
    optimizers = [make(parameters) for parameters in own]
    for _ in range(rounds):
        for worker, (parameters, optimizer) in enumerate(zip(own, optimizers, strict=True)):
            for _ in range(every):
                found = task.gradient(worker, [p.detach() for p in parameters])
                for parameter, gradient in zip(parameters, found, strict=True):
                    parameter.grad = gradient
                optimizer.step()
        masters = [
            torch.stack([p.detach() for p in each]).mean(0) for each in zip(*own, strict=True)
        ]
        for parameters in own:
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.data.copy_(master)
    return masters


@pytest.mark.parametrize("make", [momentum, adam])
@pytest.mark.parametrize(("workers", "every"), [(1, 3), (2, 1), (3, 4)])
def test_local_sgd_is_what_plain_torch_does(workers: int, every: int, make: Any) -> None:
    task = Two(workers)
    made = world(task, workers, make, {"name": "movement", "every": every})
    made.run(updates=6)
    expected = averaged_now_and_then(task, workers, make, every, 6)
    for found, wanted in zip(made.parameters(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    assert made.now_s == 6 * every  # a second for each step


@pytest.mark.parametrize(
    ("name", "options"), [("movement", {"every": 2}), ("accumulated", {"n_push": 2, "n_fetch": 2})]
)
def test_what_is_handed_over_weighs_the_samples_behind_it(
    name: str, options: dict[str, int]
) -> None:
    exchange: Any = make_exchange({"name": name, **options})
    local: Any = SimpleNamespace(
        parameters=[torch.ones(2)], masters=[torch.zeros(2)], gradients=[torch.ones(2)]
    )
    local.step, local.moved = lambda: None, lambda: local.masters
    weights = []
    for local.samples in (3.0, 1.0, 5.0, 7.0):
        offer = exchange.step(local)
        weights += [offer.weight] if offer is not None else []
    assert weights == ([4.0, 12.0] if name == "movement" else [3.0, 0.0, 6.0, 0.0])


def test_one_step_of_plain_sgd_between_means_is_the_mean_gradient() -> None:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    task = Two(4)
    local, hybrid = (
        world(task, 4, sgd, {"name": "movement", "every": 1}),
        world(task, 4, sgd, "gradient"),
    )
    for each in (local, hybrid):
        each.run(updates=10)
    for found, wanted in zip(local.parameters(), hybrid.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_an_outer_optimizer_with_momentum_is_diloco() -> None:
    """Douillard et al. 2023: the movement is the gradient of an outer Nesterov SGD."""
    task, outer = Two(2), {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    update = make_update({"name": "sgd", **outer})
    made = world(task, 2, adam, {"name": "movement", "every": 3}, update=update)
    made.run(updates=5)
    masters = [torch.nn.Parameter(p) for p in task.parameters()]
    optimizer = torch.optim.SGD(masters, **outer)
    own = [[torch.nn.Parameter(m.detach().clone()) for m in masters] for _ in range(2)]
    inner = [adam(parameters) for parameters in own]
    for _ in range(5):
        for worker in range(2):
            for _ in range(3):
                found = task.gradient(worker, [p.detach() for p in own[worker]])
                for parameter, gradient in zip(own[worker], found, strict=True):
                    parameter.grad = gradient
                inner[worker].step()
        for number, master in enumerate(masters):
            master.grad = torch.stack([master - each[number] for each in own]).mean(0).detach()
        optimizer.step()
        for each in own:
            for parameter, master in zip(each, masters, strict=True):
                parameter.data.copy_(master)
    for found, wanted in zip(made.parameters(), masters, strict=True):
        torch.testing.assert_close(found, wanted.detach(), rtol=0, atol=1e-12)


def test_a_quorum_of_all_is_diloco_and_one_of_some_waits_for_no_more() -> None:
    """What comes later counts in the next update, weighted by its samples."""
    task, update = Two(3), make_update({"name": "sgd", "lr": 0.7, "momentum": 0.9})
    exchange = {"name": "movement", "every": 2}
    ends = []
    for policy in ("hybrid", {"name": "k_async", "k": 3}):
        made = world(task, 3, adam, exchange, policy=policy, update=update)
        made.run(updates=5)
        ends.append(made.parameters())
    assert all(map(torch.equal, *ends))
    some = world(task, 3, adam, exchange, policy={"name": "k_async", "k": 2}, update=update)
    some.run(until_s=10.5)  # an update every two seconds; one movement waits for the next
    stats = some.server.statistics.stats()
    assert (stats["updates"], stats["samples"]) == (5, 5 * 2 * 2 + 2)


# ---- Downpour -----------------------------------------------------------------------------------


class Parabola:
    """f(w) = ½ w², from w = 1."""

    def parameters(self) -> list[torch.Tensor]:
        return [torch.ones(1, dtype=torch.float64)]

    def gradient(self, worker: int, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [values[0].clone()]


@pytest.mark.parametrize(
    ("n_fetch", "n_push", "expected"),
    [
        (1, 1, [0.9, 0.81, 0.729, 0.6561, 0.59049, 0.531441, 0.478297, 0.430467]),
        (3, 1, [0.9, 0.81, 0.729, 0.6561, 0.59049, 0.531441, 0.478297, 0.430467]),
        (1, 3, [0.9, 0.9, 0.9, 0.63, 0.63, 0.63, 0.441, 0.441]),
        (3, 3, [0.9, 0.9, 0.9, 0.639, 0.639, 0.639, 0.4212, 0.4212]),
        (2, 2, [0.9, 0.9, 0.72, 0.72, 0.567, 0.567, 0.4455, 0.4455]),
    ],
)
def test_downpour_is_the_algorithm_of_the_paper(
    n_fetch: int, n_push: int, expected: list[float]
) -> None:
    """One replica, by hand; a fetch between two pushes forgets the steps since the last."""
    exchange = {"name": "accumulated", "n_push": n_push, "n_fetch": n_fetch}
    made = world(Parabola(), 1, lambda p: torch.optim.SGD(p, lr=0.1), exchange, policy="async")
    values = []
    for step in range(1, 9):
        made.run(until_s=step + 0.5)
        values.append(float(made.parameters()[0]))
    assert values == pytest.approx(expected, abs=1e-6)


def pushed_and_fetched(
    task: Two,
    workers: int,
    n_push: int,
    n_fetch: int,
    steps: int,
    overlapped: bool = False,
) -> Any:
    """All workers compute side by side, and reach the server in the order of their numbers.

    Overlapped, what is fetched comes between the next gradient and the step with it.
    """
    masters = [torch.nn.Parameter(p) for p in task.parameters()]
    server = momentum(masters)
    own = [[torch.nn.Parameter(m.detach().clone()) for m in masters] for _ in range(workers)]
    optimizers = [momentum(parameters) for parameters in own]
    sums: list[list[torch.Tensor] | None] = [None] * workers
    under_way: dict[int, list[torch.Tensor]] = {}
    for step in range(steps):
        for worker, (parameters, optimizer) in enumerate(zip(own, optimizers, strict=True)):
            found = task.gradient(worker, [p.detach() for p in parameters])
            known = sums[worker] or [torch.zeros_like(g) for g in found]
            sums[worker] = [a + b for a, b in zip(known, found, strict=True)]
            for parameter, gradient in zip(parameters, found, strict=True):
                parameter.grad = gradient
            for parameter, fetched in zip(parameters, under_way.pop(worker, []), strict=False):
                parameter.data.copy_(fetched)
            optimizer.step()
            if step % n_push == 0:
                for master, value in zip(masters, sums[worker] or [], strict=True):
                    master.grad = value
                server.step()
                sums[worker] = None
            if (step + 1) % n_fetch == 0 and overlapped:
                under_way[worker] = [master.detach().clone() for master in masters]
            elif (step + 1) % n_fetch == 0:
                for parameter, master in zip(parameters, masters, strict=True):
                    parameter.data.copy_(master.detach())
    return [master.detach() for master in masters]


@pytest.mark.parametrize("fetch", [None, "overlapped"])
@pytest.mark.parametrize(("n_push", "n_fetch"), [(1, 1), (3, 2), (2, 5)])
def test_several_replicas_equal_plain_torch(n_push: int, n_fetch: int, fetch: str | None) -> None:
    task = Two(3)
    exchange = {"name": "accumulated", "n_push": n_push, "n_fetch": n_fetch, "fetch": fetch}
    made = world(task, 3, momentum, exchange, policy="async")
    made.run(until_s=12.5)
    expected = pushed_and_fetched(task, 3, n_push, n_fetch, 12, fetch is not None)
    for found, wanted in zip(made.parameters(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_an_overlapped_fetch_costs_no_time_and_one_replica_no_accuracy() -> None:
    """There and back is 0.8 s: less than a mini-batch."""
    conditions = Conditions(network=Network(latency_s=0.4))
    ends = {}
    for fetch in (None, "overlapped"):
        exchange = {"name": "accumulated", "fetch": fetch}
        made = world(
            *(Parabola(), 1, lambda p: torch.optim.SGD(p, lr=0.1), exchange),
            policy="async",
            conditions=conditions,
        )
        made.run(updates=8)
        ends[fetch] = made.now_s
        assert float(made.parameters()[0]) == pytest.approx(0.9**8)  # what it has is what it reads
    assert ends == {None: pytest.approx(8 + 7 * 0.8 + 0.4), "overlapped": 8.4}


def test_an_unknown_value_of_exchange_fetch_is_refused() -> None:
    with pytest.raises(UserError, match=r"exchange.fetch='later'.*overlapped.*or null"):
        make_exchange({"name": "accumulated", "fetch": "later"})


def test_who_does_not_fetch_computes_with_what_it_has_read() -> None:
    exchange = {"name": "accumulated", "n_push": 1, "n_fetch": 3}
    made = world(Parabola(), 1, lambda p: torch.optim.SGD(p, lr=0.1), exchange, policy="async")
    made.run(updates=2)
    assert made._replicas is not None
    store = made._replicas._store
    assert float(store.parameter(0, store.layout.slots[0])) == 1.0
    assert made.server.statistics.ages == {0: 1, 1: 1}
    made.run(updates=4)
    assert float(store.parameter(0, store.layout.slots[0])) == pytest.approx(0.729)
    assert made.server.statistics.ages == {0: 2, 1: 1, 2: 1}


def test_the_update_of_the_masters_can_be_chosen() -> None:
    """Adagrad on the server, as in the paper, under any policy."""
    task = Two(1)
    update = make_update({"name": "adagrad", "lr": 0.3})
    made = world(task, 1, momentum, "gradient", policy="async", update=update)
    made.run(updates=7)
    masters = [torch.nn.Parameter(p) for p in task.parameters()]
    adagrad = torch.optim.Adagrad(masters, lr=0.3)
    for _ in range(7):
        for master, g in zip(masters, task.gradient(0, [m.detach() for m in masters]), strict=True):
            master.grad = g
        adagrad.step()
    for found, wanted in zip(made.parameters(), masters, strict=True):
        torch.testing.assert_close(found, wanted.detach(), rtol=0, atol=1e-12)


def test_sums_of_sparse_gradients_are_those_of_dense_ones() -> None:
    dense = torch.zeros(6, 2)
    dense[4], dense[1] = 3.0, -1.0
    offers = []
    for gradient in (dense, dense.to_sparse(1)):
        exchange = make_exchange({"name": "accumulated", "n_push": 3})
        assert isinstance(exchange, LocalExchange)
        local: Any = SimpleNamespace(
            gradients=[gradient], parameters=[dense], samples=2.0, step=lambda: None
        )
        made = [exchange.step(local) for _ in range(4)]
        offers += [each for each in made if each is not None and each.weight]
    first, then, sparse_first, sparse_then = (offer.values[0] for offer in offers)
    assert first is not None and then is not None
    assert sparse_first is not None and sparse_then is not None
    assert torch.equal(first, sparse_first.to_dense()) and torch.equal(first, dense)
    assert torch.equal(then, sparse_then.to_dense()) and torch.equal(then, 3 * dense)


def test_what_was_given_to_an_update_is_fixed_and_the_rest_follows() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, weight_decay=0.2)
    changed = ({"lr": 0.05, "weight_decay": 0.3, "momentum": 0.9},)
    gradient, movement = make_exchange("gradient"), make_exchange("movement")
    fixed = update_of(gradient, {"name": "adagrad", "lr": 0.3})
    (group,) = fixed.over(optimizer).param_groups
    assert (group["lr"], group["weight_decay"]) == (0.3, 0.2)
    assert fixed.told(optimizer, changed) == ({"weight_decay": 0.3},)
    assert update_of(gradient, "adagrad").told(optimizer, changed) == (
        {"lr": 0.05, "weight_decay": 0.3},
    )
    assert update_of(gradient).told(optimizer, changed) == changed
    # Workers step with the module's own: the masters' learning rate is another matter.
    outer = update_of(movement, "sgd")
    assert outer.over(optimizer).param_groups[0]["weight_decay"] == 0
    assert outer.told(optimizer, changed) is None and update_of(movement).name == "mean"


# ---- what does not fit --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "exchange", "fragments"),
    [
        (
            "hybrid",
            "in_place",
            ["exchange=in_place", "policy=hybrid", "cannot wait", "policy=hogwild"],
        ),
        (
            "synchronous",
            "movement",
            ["exchange=movement", "policy=synchronous", "one worker computes at a time"],
        ),
        (
            "backup",
            "accumulated",
            ["exchange=accumulated", "policy=backup", "what comes late is dropped"],
        ),
        (
            "hogwild",
            "movement",
            ["exchange=movement", "policy=hogwild", "write to the masters", "policy=async"],
        ),
        (
            "hogwild",
            "gradient",
            ["exchange=gradient", "policy=hogwild", "write to the masters", "in_place"],
        ),
        (
            {"name": "k_batch_async", "k": 2},
            "in_place",
            ["exchange=in_place", "nothing is handed over"],
        ),
    ],
)
def test_parts_that_contradict_each_other_are_named(
    policy: Any, exchange: str, fragments: list[str]
) -> None:
    with pytest.raises(UserError) as error:
        begin_policy(make_policy(policy), make_exchange(exchange), 3)
    for fragment in fragments:
        assert fragment in str(error.value)


@pytest.mark.parametrize(
    ("given", "fragments"),
    [
        ("mean_gradient", ["exchange='mean_gradient'", "known are accumulated, elastic"]),
        ({"name": "movement", "evry": 3}, ["exchange.evry", "did you mean every?"]),
        ({"name": "movement", "every": 0}, ["exchange.every=0", "from 1 on"]),
        ({"name": "accumulated", "n_push": 1.5}, ["exchange.n_push=1.5", "a whole number"]),
    ],
)
def test_an_exchange_that_makes_no_sense_is_refused(given: Any, fragments: list[str]) -> None:
    with pytest.raises(UserError) as error:
        make_exchange(given)
    for fragment in fragments:
        assert fragment in str(error.value)


@pytest.mark.parametrize(
    ("given", "fragments"),
    [
        ("adagard", ["update='adagard'", "did you mean adagrad?", "known are user"]),
        ({"name": "sgd", "lrr": 1.0}, ["update.lrr", "did you mean lr?"]),
        ({"lr": 1.0}, ["update={'lr': 1.0}", "known are user"]),
        ("lbfgs", ["update=lbfgs", "evaluates the loss", "handed over", "exchange=gradient"]),
        ({"name": "LBFGS", "lr": 1}, ["evaluates the loss"]),
    ],
)
def test_an_update_that_makes_no_sense_is_refused(given: Any, fragments: list[str]) -> None:
    with pytest.raises(UserError) as error:
        update_of(make_exchange("movement"), given)
    for fragment in fragments:
        assert fragment in str(error.value)


def test_where_workers_step_the_masters_their_own_optimizer_does() -> None:
    with pytest.raises(UserError, match=r"update=adagrad was given with exchange=in_place"):
        update_of(make_exchange("in_place"), "adagrad")


def test_arguments_that_an_update_refuses_are_named() -> None:
    update = make_update({"name": "sgd", "lr": -1.0})
    assert update is not None
    optimizer = momentum([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(UserError, match=r"update=sgd.*SGD refuses that"):
        update.over(optimizer)


def test_a_policy_of_ones_own_must_say_what_it_needs() -> None:
    class Silent:
        def begin(self, n_workers: int) -> None: ...

        def on(self, fact: object) -> tuple[()]:
            return ()

    with pytest.raises(UserError, match=r"begin\(\) returned None; it must return a .*Needs"):
        begin_policy(Silent(), make_exchange("gradient"), 2)  # type: ignore[arg-type]
