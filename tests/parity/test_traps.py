"""The traps of the design, each with a test of its name.

Some lie beside what they belong to: 1 and 19 (``lightning/test_workers.py``), 7
(``lightning/test_checkpoints.py``), 16 (``app/test_sweep.py``), 17 (``core/test_world.py``), 18
(``lightning/test_averaging.py``). ``cases/traps.py`` says which do not apply.
"""

from __future__ import annotations

import pickle
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy
from hybridtrain.errors import UserError
from tests.lightning.toys import Recorder, Regression, fit, flat, make_trainer, regression_data
from tests.parity.case import Grade
from tests.parity.cases import CASES
from tests.parity.harness import Harness, Job
from tests.picking import by_default


def check(harness: Harness, name: str) -> None:
    """The case ends as expected, and equals its reference; the runs are those of test_parity."""
    case = CASES[name]
    workers = 3 if case.wide else 2
    for strategy in (case.versus, "hybrid"):
        harness.check_end(Job(case, strategy, workers))
    verdict = harness.verdict(case, "hybrid", workers, case.versus)
    assert verdict.compared > 0
    assert verdict.grade <= case.allowed(workers), verdict.explain()


class Slow(Regression):
    """Worker 1 is slow, and everybody logs with ``sync_dist`` on each step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.05 if self.global_rank == 1 else 0.001)
        loss = super().training_step(batch, batch_idx)
        self.log("step", loss, on_step=True, sync_dist=True)
        return loss


def test_trap_02_every_worker_gets_data_of_its_own() -> None:
    data = Recorder(regression_data(48))
    _, trainer = fit("hybrid", 3, 4, data=data, max_epochs=1)
    assert trainer.strategy.is_distributed
    assert data.counts.tolist() == [1] * 48


@pytest.mark.wide
def test_trap_03_torchmetrics_see_all_workers(harness: Harness) -> None:
    check(harness, "logged/torchmetrics")


def test_trap_04_fast_workers_draw_more_and_validation_is_not_skipped() -> None:
    trainer = make_trainer("async", 2, max_epochs=2)
    train = DataLoader(regression_data(96), batch_size=4, shuffle=True)
    trainer.fit(Slow(), train, DataLoader(regression_data(12), batch_size=4))
    fast, slow = trainer.strategy.run_stats()["samples_per_worker"]
    assert fast > slow and fast + slow == 2 * 96
    assert "val/loss" in trainer.callback_metrics


def test_trap_05_logging_with_sync_dist_holds_nobody_up_where_workers_run_freely() -> None:
    _, trainer = fit("async", 2, 4, Slow, regression_data(96), max_epochs=1)
    fast, slow = trainer.strategy.run_stats()["samples_per_worker"]
    assert fast > slow
    assert "step" in trainer.callback_metrics


def test_trap_06_a_workers_optimizer_holds_no_state_that_could_be_moved_to_a_gpu() -> None:
    class Holds(Regression):
        def on_train_batch_end(self, *_: Any) -> None:
            state = self.trainer.optimizers[0].state
            assert list(dict.keys(state)) == []  # nothing fetched, as nobody has looked

    fit("hybrid", 2, 6, partial(Holds, torch.optim.Adam))


def test_trap_08_a_replaced_step_leads_to_no_warning_about_the_scheduler() -> None:
    class Strict(Regression):
        def on_train_start(self) -> None:
            warnings.simplefilter("error", UserWarning)

    def schedule(optimizer: Any) -> Any:
        return {"scheduler": StepLR(optimizer, 1, 0.9), "interval": "step"}

    _, trainer = fit("hybrid", 2, 6, partial(Strict, None, schedule), max_epochs=2)
    assert trainer.global_step == 8


@pytest.mark.parametrize(
    "name",
    by_default(
        ["clipping by norm", "configure_gradient_clipping overridden"],
        "configure_gradient_clipping overridden",
    ),
)
def test_trap_09_clipping_acts_on_the_mean(harness: Harness, name: str) -> None:
    check(harness, f"steps/{name}")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["", ", gradients read", ", clipped"])
def test_trap_10_gradients_are_exchanged_without_their_scale(harness: Harness, kind: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices")
    check(harness, f"precision/16-mixed on CUDA{kind}")


@pytest.mark.wide
@pytest.mark.parametrize(
    "where", by_default(["in some steps", "in some workers"], "in some workers")
)
def test_trap_11_no_gradient_is_not_a_gradient_of_zero(harness: Harness, where: str) -> None:
    check(harness, f"modules/parameters unused {where}")
    check(harness, "modules/an unused parameter")


class Apart(Regression):
    """Each worker begins with other weights and buffers; they are brought together."""

    def configure_model(self) -> None:
        torch.manual_seed(self.global_rank)
        self.extra = torch.nn.Linear(1, 1)
        self.register_buffer("mark", torch.tensor(float(self.global_rank)))

    def on_train_start(self) -> None:
        everyone = self.all_gather(torch.cat([flat(self), self.mark.double()[None]]))
        assert torch.equal(everyone[0], everyone[-1])
        assert float(self.mark) == 0.0


def test_trap_12_all_begin_with_worker_0s_weights_and_buffers() -> None:
    fit("hybrid", 3, 4, Apart, max_epochs=1)


@pytest.mark.parametrize("name", ["BatchNorm", "a queue in a buffer"])
def test_trap_12_buffers_are_worker_0s_where_it_shows(harness: Harness, name: str) -> None:
    check(harness, f"modules/{name}")


@pytest.mark.parametrize("name", by_default(["LBFGS", "LBFGS, strong Wolfe"], "LBFGS"))
def test_trap_13_all_evaluations_of_lbfgs_are_driven_from_one_place(
    harness: Harness, name: str
) -> None:
    check(harness, f"optimizers/{name}")


def test_trap_14_an_exception_reaches_on_exception_in_its_worker(tmp_path: Path) -> None:
    class Fails(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.global_rank == 1:
                raise LookupError("here")
            return super().training_step(batch, batch_idx)

    class Listens(pl.Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            assert trainer.log_dir is not None  # a collective, when there is nobody any more
            (tmp_path / f"exception-{trainer.global_rank}").write_text(str(exception))

    with pytest.raises(LookupError, match="here"):
        fit("hybrid", 2, 6, Fails, default_root_dir=tmp_path, callbacks=[Listens()])
    assert (tmp_path / "exception-1").read_text() == "here"


def test_trap_15_a_strategy_can_be_pickled_before_it_is_used() -> None:
    assert isinstance(pickle.loads(pickle.dumps(HybridStrategy())), HybridStrategy)


def test_trap_15_fit_twice_on_one_trainer(harness: Harness) -> None:
    check(harness, "loops/fit twice on one trainer")


@pytest.mark.slow
def test_trap_18_a_compiled_module_is_compiled_inside(harness: Harness) -> None:
    check(harness, "modules/torch.compile, aot_eager")


@pytest.mark.parametrize(
    "name",
    by_default(["BackboneFinetuning", "a finetuning schedule by hand"], "BackboneFinetuning"),
)
def test_trap_20_parameters_that_join_in_mid_run_are_trained(harness: Harness, name: str) -> None:
    check(harness, f"callbacks/{name}")


def test_trap_20_parameters_that_did_not_exist_when_training_began_are_refused() -> None:
    class Grows(Regression):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.late = torch.nn.Linear(2, 2)
                group = {"params": list(self.late.parameters())}
                self.optimizers().optimizer.add_param_group(group)

    with pytest.raises(UserError):
        fit("hybrid", 2, 6, Grows)


@pytest.mark.wide
def test_trap_21_contributions_are_summed_in_the_order_of_the_workers() -> None:
    class Late(Regression):
        """In every step another worker is the last to arrive."""

        def on_after_backward(self) -> None:
            time.sleep(0.01 * ((self.global_rank + self.first + self.global_step) % 3))

    weights = []
    for first in (0, 1, 2):
        kind = type("Late", (Late,), {"first": first})
        weights.append(flat(fit("hybrid", 3, 4, kind)[0]))
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    "name",
    by_default(
        ["a user's own", "an optimizer that wraps another"], "an optimizer that wraps another"
    ),
)
def test_trap_22_an_optimizers_own_attributes_travel(harness: Harness, name: str) -> None:
    assert CASES[f"optimizers/{name}"].expect == Grade.BITWISE
    check(harness, f"optimizers/{name}")
