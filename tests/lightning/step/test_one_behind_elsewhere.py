"""``pipe_sgd`` replayed, in virtual time, on two hosts, and with workers that are lost."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridtrain import HybridStrategy
from tests.lightning.replay.test_module_task import Toy, assert_same, trained, virtual
from tests.lightning.toys import Regression, fit, flat
from tests.recording.test_replay import Run, check_equal
from tests.support.several_hosts import run_hosts

adamw = partial(torch.optim.AdamW, lr=0.01)


def policy(warm_up: int = 2, **options: Any) -> dict[str, Any]:
    return {"name": "pipe_sgd", "warm_up": warm_up, **options}


INT8 = {"name": "gradient", "compress": "int8"}
READS: dict[str, dict[str, Any]] = {
    "masters": {},
    "extrapolated": {"extrapolate": True},
    "int8": {"compress": "int8"},
    "both": {"extrapolate": True, "compress": "int4"},
}


@pytest.mark.parametrize("reads", READS)
def test_a_record_is_replayed_to_the_bit(reads: str, tmp_path: Path) -> None:
    run = Run(tmp_path, policy(**READS[reads]), 3, trainer={"max_epochs": 2})
    check_equal(run, run.record())


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize(("kind", "interval"), [("sgd", None), ("adam", "step"), ("groups", None)])
def test_virtual_time_has_the_bits_of_processes(
    kind: str, interval: str | None, reads: str
) -> None:
    given = policy(1, **READS[reads])
    real = trained(Toy(kind, interval), HybridStrategy(given), 2, 4)
    world = virtual(given, Toy(kind, interval))
    world.run(updates=4 * 3)
    assert_same(world.parameters(), real)


def on_a_host(folder: Path, hosts: int, given: dict[str, Any], options: dict[str, Any]) -> None:
    strategy = HybridStrategy(given, threads_per_worker=1, **options)
    made = partial(Regression, adamw)
    module, _ = fit(strategy, 2 // hosts, 6, made, num_nodes=hosts)
    if os.environ["NODE_RANK"] == "0":
        torch.save(flat(module), folder / f"of {hosts}.pt")


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("given", "options"),
    [
        (policy(), {}),
        (policy(extrapolate=True), {}),
        (policy(compress="int8"), {}),
        (
            policy(extrapolate=True, compress="int4"),
            {"exchange": {"name": "gradient", "compress": "int8"}},
        ),
        (policy(), {"transport_dtype": "bf16"}),
        (policy(), {"exchange": {"name": "gradient", "compress": "int8"}}),
        (policy(), {"host_sums": True}),
    ],
    ids=["plain", "extrapolated", "int8 down", "both ways", "bf16", "int8 up", "host_sums"],
)
def test_two_hosts_are_one(given: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    for hosts in (1, 2):
        body = partial(on_a_host, tmp_path, hosts, given, options)
        for host in run_hosts(tmp_path / str(hosts), body, hosts):
            assert host.status == 0, host.said
    one, two = (torch.load(tmp_path / f"of {hosts}.pt") for hosts in (1, 2))
    assert torch.equal(one, two)


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize(
    ("step", "kind"), [(1, "kill"), (4, "kill"), (5, "kill"), (9, "kill"), (5, "exception")]
)
def test_a_restarted_worker_leaves_no_trace(step: int, kind: str, reads: str) -> None:
    module, given = partial(Regression, adamw), policy(**READS[reads])
    whole, _ = fit(HybridStrategy(given), 2, 3, module)
    fault = [{"worker": 1, "step": step, "kind": kind}]
    strategy = HybridStrategy(given, faults=fault, on_failure="restart")
    again, trainer = fit(strategy, 2, 3, module)
    assert trainer.global_step == 3 * 8
    assert torch.equal(flat(again), flat(whole))


def test_the_others_go_on_and_train_on_every_sample_once() -> None:
    fault = [{"worker": 1, "step": 5, "kind": "kill"}]
    strategy = HybridStrategy(policy(), faults=fault, on_failure="continue")
    _, trainer = fit(strategy, 3, 2, partial(Regression, adamw))
    assert trainer.strategy.run_stats()["samples"] == 3 * 48
