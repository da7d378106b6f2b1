"""Elastic averaging in virtual time: the algorithm of the paper, to the last digit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from theory.local import pulled

from hybridtrain.engine.exchanges import begin_policy, make_exchange
from hybridtrain.engine.policies import make_policy
from hybridtrain.errors import UserError
from hybridtrain.virtual.network import Conditions
from hybridtrain.virtual.script import Dies, Joins, Script
from tests.exchanges.test_own_parameters import Two, adam, momentum, world


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def nesterov(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)


class Pulling:
    """Algorithm 1 of Zhang et al. 2015, written down again: one step of one worker at a time."""

    def __init__(self, task: Two, workers: int, make: Any, every: int, alpha: float) -> None:
        self.task, self.every, self.alpha = task, every, alpha
        self.centre = task.parameters()
        self.own = [[torch.nn.Parameter(c.clone()) for c in self.centre] for _ in range(workers)]
        self.optimizers = [make(parameters) for parameters in self.own]
        self.clocks = [0] * workers

    def forces(self, worker: int) -> list[torch.Tensor]:
        """α (x - x̃), where it is time for one."""
        self.clocks[worker] += 1
        due = self.clocks[worker] % self.every == 0
        pairs = zip(self.own[worker], self.centre, strict=True)
        return [self.alpha * (x.detach() - centre) if due else 0 * centre for x, centre in pairs]

    def step(self, worker: int, forces: list[torch.Tensor]) -> None:
        found = self.task.gradient(worker, [p.detach() for p in self.own[worker]])
        for parameter, gradient in zip(self.own[worker], found, strict=True):
            parameter.grad = gradient
        self.optimizers[worker].step()
        for parameter, force in zip(self.own[worker], forces, strict=True):
            parameter.data.sub_(force)

    def attract(self, forces: list[torch.Tensor]) -> None:
        for centre, force in zip(self.centre, forces, strict=True):
            centre.add_(force)


@pytest.mark.parametrize("make", [sgd, nesterov, adam])
@pytest.mark.parametrize(("workers", "every"), [(1, 1), (2, 3), (4, 2)])
def test_elastic_averaging_of_one_worker_after_another_is_the_algorithm_of_the_paper(
    workers: int, every: int, make: Any
) -> None:
    task, alpha = Two(workers), 0.9 / workers
    made = world(task, workers, make, {"name": "elastic", "every": every}, policy="async")
    made.run(until_s=12.5)  # all make 12 steps, one behind the other
    expected = Pulling(task, workers, make, every, alpha)
    for _ in range(12):
        for worker in range(workers):
            forces = expected.forces(worker)
            expected.step(worker, forces)
            expected.attract(forces)
    for found, wanted in zip(made.parameters(), expected.centre, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("workers", "every"), [(1, 2), (3, 1), (3, 4)])
def test_elastic_averaging_of_all_workers_at_once_is_its_synchronous_form(
    workers: int, every: int
) -> None:
    task, alpha = Two(workers), 0.2
    exchange = {"name": "elastic", "every": every, "alpha": alpha}
    made = world(task, workers, momentum, exchange)
    made.run(updates=5)
    expected = Pulling(task, workers, momentum, every, alpha)
    for _ in range(5 * every):
        forces = [expected.forces(worker) for worker in range(workers)]
        for worker in range(workers):
            expected.step(worker, forces[worker])
        for each in forces:
            expected.attract(each)
    for found, wanted in zip(made.parameters(), expected.centre, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_elastic_averaging_with_alpha_0_keeps_the_centre_and_each_worker_trains_alone() -> None:
    task = Two(2)
    made = world(task, 2, momentum, {"name": "elastic", "every": 2, "alpha": 0.0}, policy="async")
    made.run(until_s=10.5)
    assert all(map(torch.equal, made.parameters(), task.parameters()))
    assert made._replicas is not None
    alone = Pulling(task, 2, momentum, 2, 0.0)
    for _ in range(10):
        for worker in range(2):
            alone.step(worker, alone.forces(worker))
    for worker in range(2):
        found = made._replicas._workers[worker].steps.parameters
        assert all(map(torch.equal, found, alone.own[worker]))


def test_forces_only_move_workers_and_centre_towards_each_other() -> None:
    """With a learning rate of 0 what one gives the other gets."""

    def still(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0)

    made = world(Two(3), 3, still, {"name": "elastic", "every": 1}, policy="async")
    assert made._replicas is not None
    workers = made._replicas._workers
    for number, worker in enumerate(workers):
        worker.steps.parameters[0].add_(number + 1.0)
    before = sum(worker.steps.parameters[0] for worker in workers) + made.parameters()[0]
    made.run(until_s=7.5)
    after = sum(worker.steps.parameters[0] for worker in workers) + made.parameters()[0]
    torch.testing.assert_close(after, before, rtol=0, atol=1e-13)
    assert float((workers[2].steps.parameters[0] - workers[0].steps.parameters[0]).abs().max()) < 1


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("rate", "alpha", "stable"),
    [
        (1.0, 0.65, True),  # the edge is (4 - 2 η) / (4 - η) = 2 / 3
        (1.0, 0.69, False),
        (0.5, 0.84, True),  # 6 / 7
        (0.5, 0.88, False),
    ],
)
def test_round_robin_is_stable_up_to_the_edge_of_the_paper(
    rate: float, alpha: float, stable: bool
) -> None:
    """Three workers in turn on ½ x², section 4.1 of the paper."""
    assert (pulled(rate, alpha, workers=3) < 1.0) == stable


@pytest.mark.parametrize(
    ("given", "fragments"),
    [
        ({"every": 0}, ["exchange.every=0", "from 1 on"]),
        ({"alpha": 1.5}, ["exchange.alpha=1.5", "from 0 to 1"]),
        ({"beta": float("nan")}, ["exchange.beta=nan", "from 0 to 1"]),
        ({"tau": 4}, ["exchange.tau", "elastic takes every, alpha, beta"]),
    ],
)
def test_elastic_options_that_make_no_sense_are_refused(
    given: dict[str, Any], fragments: list[str]
) -> None:
    with pytest.raises(UserError) as error:
        make_exchange({"name": "elastic", **given})
    for fragment in fragments:
        assert fragment in str(error.value)


def test_elastic_averaging_is_refused_under_a_policy_that_puts_contributions_aside() -> None:
    policy = make_policy({"name": "k_batch_async", "k": 2})
    with pytest.raises(UserError, match=r"exchange=elastic.*put aside.*averaged"):
        begin_policy(policy, make_exchange("elastic"), 3)


def test_who_takes_the_place_of_a_worker_that_died_begins_at_the_centre() -> None:
    script = Script((Dies(7.5, 1), Joins(30.5, 1)))
    made = world(
        Two(2),
        2,
        momentum,
        {"name": "elastic", "every": 2},
        policy="async",
        conditions=Conditions(script=script),
    )
    made.run(until_s=30.6)
    assert made._replicas is not None
    joined = made._replicas._workers[1]
    assert all(map(torch.equal, joined.steps.parameters, made.parameters()))
    assert not joined.optimizer.state
    made.run(until_s=40.5)
    assert joined.optimizer.state
