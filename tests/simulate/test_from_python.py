"""``hybridtrain.simulate_strategy``: virtual time from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hybridtrain import simulate_strategy
from hybridtrain.errors import UserError
from hybridtrain.virtual import ServiceTimes, SimulationPlan, StrategySpec, simulate
from tests.lightning.toys import Regression, regression_data
from tests.support.own_parts import Every, Largest, Quorum


def data() -> DataLoader[Any]:
    return DataLoader(regression_data(48), 4)


def test_the_figures_are_those_of_the_command() -> None:
    row = simulate_strategy({"name": "backup", "k": 3}, 4, mini_batches=400)
    spec = StrategySpec("{name: backup, k: 3}", {"name": "backup", "k": 3})
    expected = simulate(SimulationPlan(mini_batches=400), spec, 4)
    assert row.strategy == spec.label and row.updates == expected.updates
    assert (row.samples_per_s, row.waiting_share) == (
        expected.samples_per_s,
        expected.waiting_share,
    )


def test_a_hundred_workers_of_a_policy_of_ones_own_are_drawn_and_it_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    policy = Quorum(80)
    row = simulate_strategy(policy, 100, seconds=10, svg="picture.svg")
    assert row.workers == 100 and row.updates > 0 and vars(policy) == {"least": 80}
    assert row.strategy == "tests.support.own_parts.Quorum(least=80)"
    assert f"{row.strategy}, 100 workers" in Path("picture.svg").read_text()


@pytest.mark.parametrize(
    "parts",
    [
        {"policy": Quorum(2)},
        {"policy": "hybrid", "exchange": Every(2)},
        {"policy": "hybrid", "update": Largest()},
        {"policy": "diloco", "exchange": {"name": "movement", "every": 4}},
        {"policy": "async", "correction": "by_staleness"},
    ],
    ids=["policy", "exchange", "update", "a strategy's name", "correction"],
)
def test_a_copy_of_a_module_is_trained(parts: dict[str, Any]) -> None:
    module = Regression()
    before = [each.clone() for each in module.parameters()]
    row = simulate_strategy(workers=4, module=module, data=data(), epochs=2, **parts)
    assert row.samples == 96 and row.loss
    assert all(map(torch.equal, before, module.parameters()))
    again = simulate_strategy(workers=4, module=module, data=data(), epochs=2, **parts)
    assert again.loss == row.loss


def test_times_are_a_distribution_each_workers_own_or_of_a_run() -> None:
    length: dict[str, Any] = {"seconds": 12.0}
    constant = simulate_strategy("hybrid", 2, times=ServiceTimes("constant", 2.0), **length)
    own = simulate_strategy("hybrid", 2, times={0: [2.0], 1: [2.0]}, **length)
    assert constant.updates == own.updates == 6


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"policy": Quorum}, "policy=Quorum was given, which is a class; write Quorum"),
        ({"policy": "diloco"}, "exchange={name: movement, every: 30} was given without a module"),
        ({"update": Largest()}, "update=tests.*Largest.* was given without a module"),
        ({"workers": 0}, "workers=0 was given"),
        ({"policy": "maybe"}, "policy='?maybe'? was given"),
        ({"times": {1: [1.0]}}, "workers are numbered from 0"),
        ({"times": "nowhere"}, "there is no such directory"),
    ],
    ids=["class", "strategy", "update", "workers", "name", "times", "run"],
)
def test_what_cannot_be_simulated_is_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        simulate_strategy(**options)
