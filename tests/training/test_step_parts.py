"""Parts of a worker's step on their own: the guard, accumulation, shares of an epoch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridtrain.engine.protocol.messages import Gone
from hybridtrain.engine.samplers import EpochPlan, ShareSampler
from hybridtrain.engine.step.accumulation import Accumulation
from hybridtrain.engine.step.guard import NONFINITE, OUT_OF_MEMORY, Guard, NotFinite, OnFault
from hybridtrain.engine.worker.worker_group import WorkerGroup

NO_NUMBER = torch.tensor(float("nan"))


def guard(**chosen: str) -> Guard:
    """Of a worker whose every gradient is bad."""
    check: Any = SimpleNamespace(offender=lambda *_: 0, count=lambda _: (1, 4), forget=lambda: None)
    layout: Any = SimpleNamespace(slots=[SimpleNamespace(name="w")])
    return Guard(OnFault(**chosen), check, layout, lambda: "worker 1")


def test_a_loss_excuses_gradients_of_its_own_step_only() -> None:
    made = guard()
    made.begin(None, new_step=True)
    made.see(NO_NUMBER)
    made.begin(None, new_step=False)
    made.see(torch.tensor(1.0))
    with pytest.warns(UserWarning, match="its gradient is left out"):
        assert not made.accepts((0,), ())
    made.begin(None, new_step=True)
    made.see(torch.tensor(1.0))
    with pytest.raises(NotFinite, match=r"worker 1 .* w \(1 of 4 elements\)"):
        made.accepts((0,), ())


@pytest.mark.filterwarnings("ignore:.*left out")
def test_a_step_that_is_to_be_left_out_stays_so_whatever_follows_in_it() -> None:
    made = guard(nonfinite="drop", oom="skip_step")
    made._note(OUT_OF_MEMORY, "skip_step", "no room")
    assert not made.accepts((0,), ()) and made.pop_fault() == NONFINITE
    assert made.veto
    made.begin(None, new_step=True)
    assert not made.veto


def test_a_mini_batch_that_is_left_out_counts_with_neither_weight_nor_samples() -> None:
    gathered = Accumulation()
    for samples in (4.0, 2.0):
        gathered.begin(samples, None)
    gathered.leave_out()
    assert gathered.weight == gathered.pop_samples() == 4.0


def test_a_lost_worker_has_left_what_no_update_up_to_its_last_one_has() -> None:
    client: Any = SimpleNamespace(worker=0, group=WorkerGroup(0, 2))
    plan = EpochPlan(lambda epoch: range(8), 8, (1, 1), drop_last=False)
    sampler = ShareSampler(plan, 0, client)
    assert list(sampler) == [0, 2, 4, 6]
    for version in (1, 2, 3):
        sampler.next_portion()
        sampler.commit(version)
    assert sampler.left_by([Gone(1, 2)]) == ((5, 6), (7, 8))
