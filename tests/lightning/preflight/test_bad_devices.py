"""Devices that are not what was asked for: said in one line, or put right."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import nn

from hybridtrain import HybridStrategy
from hybridtrain.engine.memory import limits
from hybridtrain.engine.memory.limits import Gpu
from hybridtrain.lightning.preflight import machine_checks
from tests.standin.device import name_it
from tests.standin.state import NAME, state

name_it()
LARGE, SMALL, OLD = Gpu(80 * 2**30, 9), Gpu(24 * 2**30, 8), Gpu(80 * 2**30, 7)


def told(n: int, batch_sizes: Any = None, precision: str = "32-true") -> list[str]:
    """What is said of the first n devices."""
    setup: Any = SimpleNamespace(
        devices=[torch.device("cuda", number) for number in range(n)],
        options={"batch_size_per_worker": batch_sizes},
        precision=precision,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        machine_checks.check_devices(setup)
    return [str(each.message) for each in caught]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``machine(gpu, ..., visible=...)``: one that has these."""
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)

    def have(*gpus: Gpu, visible: str | None = None, by_place: bool = True) -> None:
        monkeypatch.setattr(machine_checks, "gpus", lambda: list(gpus))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID" if by_place else "FASTEST_FIRST")
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return have


def test_devices_of_unequal_size_are_told_of_once(machine: Any) -> None:
    machine(LARGE, SMALL, SMALL)
    (said,) = told(3)
    assert "they have 24, 24, 80 GiB" in said and "batch_size_per_worker" in said
    assert told(1) == [], "the others are not used"
    assert told(3, batch_sizes=(32, 8, 8)) == [], "somebody knows"
    machine(LARGE, LARGE)
    assert told(2) == []


def test_visible_devices_are_those_that_are_looked_at(machine: Any) -> None:
    machine(LARGE, SMALL, SMALL, visible="2, 1")
    assert told(2) == []
    machine(LARGE, SMALL, SMALL, visible="1,0")
    assert "they have 24, 80 GiB" in told(2)[0]


def test_where_cuda_numbers_devices_by_speed_only_all_of_them_are_judged(machine: Any) -> None:
    machine(LARGE, SMALL, SMALL, by_place=False)
    assert told(2) == []
    assert "they have 24, 24, 80 GiB" in told(3)[0]


@pytest.mark.parametrize("visible", ["MIG-1f2e", "GPU-8932f937-d72c", "0,7", "", "-1"])
def test_devices_whose_names_only_cuda_knows_are_not_judged(machine: Any, visible: str) -> None:
    machine(LARGE, OLD, visible=visible)
    assert told(2, precision="bf16-mixed") == []


def test_a_precision_that_a_device_can_only_imitate_is_named(machine: Any) -> None:
    machine(LARGE, OLD)
    (said,) = told(2, precision="bf16-mixed")
    assert "precision='bf16-mixed' was given, which 1 of the 2 devices can only imitate" in said
    assert told(2, precision="16-mixed") == told(1, precision="bf16-mixed") == []


def test_where_nobody_tells_of_devices_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", absent)
    assert limits.gpus() == [] and limits.largest_device_bytes() is None
    assert told(2, precision="bf16-mixed") == []


def test_more_devices_than_there_are_is_lightnings_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("lightning_fabric.accelerators.cuda.num_cuda_devices", lambda: 1)
    monkeypatch.setattr("pytorch_lightning.accelerators.cuda.num_cuda_devices", lambda: 1)
    with pytest.raises(MisconfigurationException, match=r"(?s)requested gpu: .0, 1.*only has: .0"):
        pl.Trainer(strategy=HybridStrategy(), accelerator="cuda", devices=2, logger=False)


@pytest.mark.own_process
def test_a_module_on_another_device_is_moved_to_its_workers() -> None:
    state()
    strategy = HybridStrategy()
    strategy.parallel_devices = [torch.device(NAME, 0)]
    module = pl.LightningModule()
    module.net = nn.Linear(2, 2).to(torch.device(NAME, 1))
    strategy._lightning_module = module
    strategy.model_to_device()
    assert {parameter.device for parameter in module.parameters()} == {torch.device(NAME, 0)}
