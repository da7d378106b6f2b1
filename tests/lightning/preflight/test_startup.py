"""What this machine lacks for a run is said before a process is started, in one line each."""

from __future__ import annotations

import gc
import os
import resource
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hybridtrain import HybridStrategy
from hybridtrain.engine.exchanges import begin_policy, exchange_of
from hybridtrain.engine.memory import limits
from hybridtrain.engine.policies.registry import make_policy
from hybridtrain.engine.worlds.process_world import ProcessWorld
from hybridtrain.errors import UserError
from hybridtrain.lightning.preflight import machine_checks
from hybridtrain.lightning.preflight.machine_checks import MIB, Load, load_of
from tests.lightning.spawnable import SpawnRegression
from tests.lightning.toys import Regression, fit, make_trainer, regression_data

NOTHING_STARTS = "a process was started"


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody comes to start a process, or the test fails."""

    def run(*_: Any) -> None:
        raise AssertionError(NOTHING_STARTS)

    monkeypatch.setattr(ProcessWorld, "run", run)


def told(check: Callable[..., Any], *args: Any) -> str:
    """The one line of warning; nothing, if there is none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(*args)
    assert len(caught) <= 1
    text = str(caught[0].message) if caught else ""
    assert "\n" not in text
    return text


def have(monkeypatch: pytest.MonkeyPatch, **bytes_of: int | None) -> None:
    """A machine that has so much."""
    for name, n_bytes in bytes_of.items():
        monkeypatch.setattr(machine_checks, name, lambda n_bytes=n_bytes: n_bytes)


# ---- memory --------------------------------------------------------------------------------------


class Large(Regression):
    """A million parameters more, 4 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.large = torch.nn.Parameter(torch.zeros(2**20))


@pytest.mark.parametrize(
    ("strategy", "needed"), [("hybrid", 1 + 3), ("async", 1 + 3 + 3), ("pipe_sgd", 1 + 6 + 2)]
)
@pytest.mark.usefixtures("nothing_starts")
def test_parameters_that_do_not_fit_into_host_memory_are_refused(
    strategy: str, needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = DataLoader(regression_data())
    have(monkeypatch, available_bytes=4 * needed * MIB)
    with pytest.raises(UserError, match=rf"{4 * needed} MiB of host memory .* 3 workers"):
        make_trainer(strategy, 3).fit(Large(), data)
    have(monkeypatch, available_bytes=4 * needed * MIB + MIB)
    with pytest.raises(AssertionError, match=NOTHING_STARTS), pytest.warns(match="such as Adam"):
        make_trainer(strategy, 3).fit(Large(), data)


@pytest.mark.usefixtures("nothing_starts")
def test_one_update_behind_says_how_much_more_memory_it_takes_than_lock_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    have(monkeypatch, available_bytes=20 * MIB)
    told = (
        r"^36 MiB of host memory .*3 workers compute, twice, and two copies of the parameters "
        r"\(20 MiB more than hybrid\), and 20 MiB are available; use policy=hybrid, fewer[^\n]*$"
    )
    with pytest.raises(UserError, match=told):
        make_trainer("pipe_sgd", 3).fit(Large(), DataLoader(regression_data()))


@pytest.mark.usefixtures("nothing_starts")
def test_a_further_host_has_memory_for_its_own_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    for name, value in {"NODE_RANK": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 2345}.items():
        monkeypatch.setenv(name, str(value))
    have(monkeypatch, available_bytes=16 * MIB)
    with pytest.raises(UserError, match=r"^16 MiB of host memory .* 3 workers"):
        make_trainer("hybrid", 3, num_nodes=2).fit(Large(), DataLoader(regression_data()))


class Table(Regression):
    """An embedding of 4 MB beside it, whose gradients are rows."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(2**14, 64, sparse=True)
        if tied:
            self.out = torch.nn.Linear(64, 2**14, bias=False)
            self.out.weight = self.table.weight  # its gradient is dense


@pytest.mark.parametrize(
    ("strategy", "tied", "needed"),
    [("hybrid", False, 2), ("hogwild", False, 2), ("async", False, 2 + 3), ("hybrid", True, 1 + 3)],
)
@pytest.mark.usefixtures("nothing_starts")
def test_tables_with_sparse_gradients_count_as_rows(
    strategy: str, tied: bool, needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for all, once on the way home, and once for each worker that has a copy."""
    data = DataLoader(regression_data())
    have(monkeypatch, available_bytes=4 * needed * MIB)
    with pytest.raises(
        UserError, match=rf"^{4 * needed}\S* MiB of host memory .* use fewer [^\n]*$"
    ):
        make_trainer(strategy, 3).fit(Table(tied), data)
    have(monkeypatch, available_bytes=4 * needed * MIB + MIB)
    with pytest.raises(AssertionError, match=NOTHING_STARTS), pytest.warns(match="such as Adam"):
        make_trainer(strategy, 3).fit(Table(tied), data)


def test_parameters_that_do_not_fit_into_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, largest_device_bytes=25 * MIB)
    machine_checks.check_device_memory(Large(), 3)
    with pytest.raises(
        UserError, match=r"^36\S* MiB are .*next parameters.*use policy=hybrid, few"
    ):
        machine_checks.check_device_memory(Large(), 3, behind=True)
    with pytest.raises(UserError, match=r"32 MiB .* workers_per_device=4, .* has 25 MiB"):
        machine_checks.check_device_memory(Large(), 4)
    have(monkeypatch, largest_device_bytes=None)  # nobody to be asked
    machine_checks.check_device_memory(Large(), 4)


@pytest.mark.parametrize(
    ("given", "staged"),
    [
        ({}, True),
        ({"extrapolate": True}, False),
        ({"compress": "int8"}, False),
        ({"delay": 0}, False),
    ],
)
def test_one_update_behind_needs_no_copies_in_host_memory_beside_devices(
    given: dict[str, Any], staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_policy({"name": "pipe_sgd", **given})
    wants = begin_policy(policy, exchange_of(policy), 3)
    stages = wants.stages_on_device(on_device=True, comes=False)
    assert stages is staged
    assert not wants.stages_on_device(on_device=True, comes=True)
    assert not wants.stages_on_device(on_device=False, comes=False)
    rows = 2 if wants.delay else 1
    copies = 0 if staged or not wants.delay else 2
    needed = 4 * (1 + 3 * rows + copies)
    have(monkeypatch, available_bytes=needed * MIB)
    with pytest.raises(UserError, match=rf"^{needed} MiB of host memory"):
        machine_checks.check_memory(Large(), 3, wants, on_device=True, stages=stages)


def test_the_memory_of_gpus_is_not_asked_of_cuda() -> None:
    limits.largest_device_bytes()
    assert not torch.cuda.is_initialized()


# ---- cores and descriptors -----------------------------------------------------------------------


def test_more_threads_than_cores_are_warned_of() -> None:
    check = machine_checks.check_threads
    assert told(check, 2, 2, 4, True) == told(check, 1, 8, 8, False) == ""
    assert "give threads_per_worker=2, or auto" in told(check, 2, 4, 4, False)
    warned = told(check, 8, 1, 2, True)
    assert "8 workers with 1 thread each share 2 cores, so they wait for cores: 2" in warned


def test_a_limit_of_descriptors_is_raised_as_far_as_it_may_be() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    n_open = limits.open_descriptors()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (n_open + 70, hard))
        machine_checks.check_descriptors(4)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= n_open + 4 * 8
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if hard != resource.RLIM_INFINITY:
        with pytest.raises(UserError, match=rf"{hard} workers .* limit is {soft}; say ulimit -n"):
            machine_checks.check_descriptors(hard)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts in /proc")
def test_a_run_opens_no_more_descriptors_than_are_asked_for_and_closes_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most: list[int] = []
    turn = ProcessWorld._turn

    def counting(*args: Any) -> Any:
        most.append(limits.open_descriptors())
        return turn(*args)

    monkeypatch.setattr(ProcessWorld, "_turn", counting)
    fit("hybrid", 1, 8, max_epochs=1)  # what is imported and opened once
    gc.collect()  # and what is left of other tests
    before = limits.open_descriptors()
    gc.disable()  # the memory of a run must not wait for whoever looks for cycles
    try:
        fit("hybrid", 4, 8, max_epochs=1)
        assert limits.open_descriptors() == before
    finally:
        gc.enable()
    assert max(most) <= before + 4 * machine_checks._PER_WORKER + machine_checks._OTHERS


# ---- data ----------------------------------------------------------------------------------------


class Listed(Dataset[Any]):
    """Data that is not in tensors."""

    def __init__(self, n_bytes: int) -> None:
        self.rows = [os.urandom(n_bytes)]
        self.x, self.y = regression_data().tensors

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


def spawned(data: Dataset[Any], workers: int = 4) -> None:
    trainer = make_trainer(HybridStrategy(start_method="spawn"), workers)
    trainer.fit(SpawnRegression(), DataLoader(data))


def test_what_is_sent_is_counted_in_bytes_and_tensors_once() -> None:
    tensor = torch.zeros(1000)
    load = load_of({"a": tensor, "b": tensor[500:], "c": b"x" * 5000})
    assert load.shared == 4000
    assert 5000 <= load.own < 5500


@pytest.mark.usefixtures("nothing_starts")
def test_data_that_is_copied_to_every_spawned_worker_is_warned_of_or_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine_checks, "_MUCH_BYTES", 3 * MIB)
    message = "each of 4 gets its own copy of 1.0 MiB .train_dataloaders above all., 4.1 MiB"
    with pytest.raises(AssertionError, match=NOTHING_STARTS), pytest.warns(match=message):
        spawned(Listed(MIB))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(AssertionError, match=NOTHING_STARTS):
            spawned(Listed(MIB), workers=2)
    have(monkeypatch, available_bytes=3 * MIB)
    with pytest.raises(UserError, match=message):
        spawned(Listed(MIB))


@pytest.mark.usefixtures("nothing_starts")
def test_tensors_for_spawned_workers_must_fit_into_shared_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    have(monkeypatch, shared_memory_bytes=MIB)
    with pytest.raises(UserError, match=r"2.0 MiB of tensors .of train_dataloaders.*shm"):
        spawned(TensorDataset(torch.zeros(2**19)))


def test_forked_workers_are_sent_nothing() -> None:
    machine_checks.check_load(Load(), 1000, "fork", {})


def test_mini_batches_that_do_not_fit_into_shared_memory_are_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    have(monkeypatch, shared_memory_bytes=64 * MIB)
    known = TensorDataset(torch.zeros(8, 2**18))  # samples of 1 MiB
    text = told(machine_checks.check_loader, DataLoader(known, batch_size=4, num_workers=2), 4)
    assert "up to 24 mini-batches are in /dev/shm" in text and "more than 2.7 MiB each" in text
    assert not told(machine_checks.check_loader, DataLoader(known, batch_size=2, num_workers=2), 4)
    assert not told(machine_checks.check_loader, DataLoader(known, batch_size=4), 4)
    assert "SIGBUS" in told(machine_checks.check_loader, DataLoader(Listed(1), num_workers=2), 4)
    assert not told(machine_checks.check_loader, DataLoader(Listed(1), num_workers=2), 1)


def test_a_loader_of_another_kind_may_call_anything_num_workers() -> None:
    class Stream:
        num_workers = 2

        def __iter__(self) -> Iterator[Any]:
            return iter(DataLoader(regression_data(), 8))

    assert not told(machine_checks.check_loader, Stream(), 4)
    trainer = make_trainer("hybrid", 1, max_epochs=1)
    trainer.fit(Regression(), Stream())
    assert trainer.global_step == 6


def test_workers_that_are_spawned_because_of_cuda_are_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert "let nothing touch CUDA" in told(machine_checks.check_spawning, "auto", "spawn")
    assert not told(machine_checks.check_spawning, "spawn", "spawn")


def test_a_limit_of_processes_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def start(process: Any) -> None:
        if started:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(process)
        process.start()

    monkeypatch.setattr("hybridtrain.engine.worlds.start_workers._start", start)
    with pytest.raises(UserError, match=r"2 workers cannot be started.*ulimit -u.*fewer workers"):
        make_trainer("hybrid", 2, max_epochs=1).fit(Regression(), DataLoader(regression_data(8), 2))
    started[0].join(10)
    assert not started[0].is_alive()
