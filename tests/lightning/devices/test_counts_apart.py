"""What a step costs a worker on a device, in exact numbers: who changes one says why."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from pytorch_lightning.plugins import MixedPrecision
from torch import nn

from hybridtrain.engine.worker.device import KINDS
from hybridtrain.engine.worker.device.cuda import CudaStreams
from tests.lightning.toys import Regression
from tests.standin.device import name_it
from tests.standin.state import NAME, Counts
from tests.standin.training import fit_apart

name_it()


PARAMETERS = 4 * (4 * 16 + 16 + 16 + 1)  # bytes, in four tensors
BATCH = 4 * 6 * (4 + 1)  # of six samples, in two tensors
NORMED = 4 * (16 + 16)  # two tensors more
BUFFERS = 3 * 64  # of BatchNorm, each at an address of its own, in one copy


def looked_at(tensors: int) -> int:
    """Bytes: the largest magnitude of each gradient, and whether each parameter was written to."""
    return tensors * 8 + tensors


class Counted(Regression):
    """Tells what each of its steps has done since the one before."""

    def __init__(self, *hidden: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), *hidden, nn.Linear(16, 1))
        self.steps: list[dict[str, int]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps.append(asdict(torch.standin.take_counts()))
        assert self.net is not None, "who looks at parameters has waited for the release"


def counted(*hidden: nn.Module, **options: Any) -> tuple[Counts, Counts]:
    """Of the second and the third of worker 0's four mini-batches; two workers."""
    steps = fit_apart(2, 6, Counted(*hidden), max_epochs=1, **options)[0].steps
    assert len(steps) == 4
    return Counts(**steps[1]), Counts(**steps[2])


@pytest.fixture(autouse=True)
def with_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, NAME, CudaStreams)


EACH = Counts(
    bytes_to_device=PARAMETERS + BATCH,
    copies_to_device=4 + 2,
    bytes_to_host=PARAMETERS + looked_at(4),
    copies_to_host=4 + 2,
    blocking=3,  # the mini-batch's two, which a loader without workers brings, and "written to"
    synchronisations=5,  # those, the gradients, and the parameters, all of them at once
    launches=26,
)


def test_a_step_crosses_the_bus_once_each_way() -> None:
    assert counted() == (EACH, EACH)


def test_in_bf16_gradients_take_half_the_bytes() -> None:
    each = replace(EACH, bytes_to_host=PARAMETERS // 2 + looked_at(4), launches=30)
    assert counted(strategy={"transport_dtype": "bf16"}) == (each, each)


def test_all_buffers_of_a_batch_norm_take_one_copy() -> None:
    each = Counts(
        bytes_to_device=PARAMETERS + NORMED + BATCH,
        copies_to_device=6 + 2,
        bytes_to_host=PARAMETERS + NORMED + looked_at(6) + BUFFERS,
        copies_to_host=6 + 2 + 1,
        blocking=4,
        synchronisations=6,
        launches=34,
    )
    assert counted(nn.BatchNorm1d(16)) == (each, each)


def test_in_half_precision_the_means_come_back_and_go_out_again_unscaled() -> None:
    scaler = torch.amp.GradScaler(NAME, init_scale=2.0**8)
    each = Counts(
        bytes_to_device=2 * PARAMETERS + BATCH,
        copies_to_device=4 + 4 + 2,
        bytes_to_host=2 * PARAMETERS + looked_at(4) + 4 * 8,  # magnitudes of both
        copies_to_host=2 * 4 + 3,
        blocking=3,
        synchronisations=8,
        launches=48,
    )
    found = counted(plugins=MixedPrecision("16-mixed", NAME, scaler))
    assert found == (each, each)


def test_a_mini_batch_that_is_only_added_brings_nothing_but_itself() -> None:
    steps, adds = counted(accumulate_grad_batches=2)
    assert steps == replace(EACH, launches=30)
    assert adds == Counts(
        bytes_to_device=BATCH, copies_to_device=2, blocking=2, synchronisations=2, launches=15
    )


def test_a_module_in_bf16_crosses_the_bus_in_bf16_both_ways() -> None:
    each = replace(
        EACH,
        bytes_to_device=(PARAMETERS + BATCH) // 2,
        bytes_to_host=PARAMETERS // 2 + looked_at(4),
        launches=27,
    )
    assert counted(precision="bf16-true") == (each, each)


def test_a_free_worker_pays_for_a_step_what_one_in_rounds_pays() -> None:
    """One alone: of several, each takes as many mini-batches as it can."""
    module, _ = fit_apart(1, 12, Counted(), max_epochs=1, strategy={"policy": "async"})
    each = replace(EACH, bytes_to_device=PARAMETERS + 2 * BATCH)
    assert [Counts(**step) for step in module.steps[1:3]] == [each, each]


@pytest.mark.parametrize(
    ("exchange", "ups", "launches"),
    [
        ("movement", 2, 27),  # the masters, to know how far it has moved, and their mean
        ("elastic", 1, 31),  # the centre
    ],
)
def test_own_steps_bring_only_mini_batches_until_an_exchange(
    exchange: str, ups: int, launches: int
) -> None:
    options = {"exchange": {"name": exchange, "every": 2}}
    alone, exchanged = counted(strategy=options)[::-1]
    assert alone == Counts(
        bytes_to_device=BATCH, copies_to_device=2, blocking=2, synchronisations=2, launches=19
    )
    copies = 2 + 4 * (ups + 1)
    assert exchanged == Counts(
        bytes_to_device=ups * PARAMETERS + BATCH,
        copies_to_device=ups * 4 + 2,
        bytes_to_host=PARAMETERS,
        copies_to_host=4,
        blocking=copies,
        synchronisations=copies,
        launches=launches,
    )
