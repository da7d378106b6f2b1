"""Where workers run freely, the end of an epoch comes to each at another mini-batch, or without."""

from __future__ import annotations

import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy
from tests.lightning.toys import Regression, fit, regression_data
from tests.picking import but_slow, by_default

FREE = ["async", "hogwild", "ssp", "synchronous"]


class Waiting(Regression):
    """One worker is late, at an epoch's start or in its first step; an epoch may be cancelled."""

    def __init__(
        self, late: int | None = None, before_any: bool = False, n: int = 8, cancels: int = -1
    ) -> None:
        super().__init__()
        self.late, self.before_any, self.n, self.cancels = late, before_any, n, cancels
        self.validations = self.trained_in = 0

    def val_dataloader(self) -> Any:
        return DataLoader(regression_data(self.n), batch_size=4)

    def _wait(self, here: bool) -> None:
        if here and self.global_rank == self.late:
            time.sleep(0.3)

    def on_train_epoch_start(self) -> None:
        self._wait(self.before_any)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        self.trained_in = self.trainer.current_epoch + 1
        here = batch_idx == 2 if self.late is None else self.global_rank == self.late
        return -1 if here and self.current_epoch == self.cancels else None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self._wait(batch_idx == 0 and not self.before_any)
        return super().training_step(batch, batch_idx)

    def on_validation_end(self) -> None:
        self.validations += 1


CASES = list(
    product(
        ["async", "hogwild"], [10, 11, 12, 23], [0, 1], [False, True], [1, 8], ["stop", "restart"]
    )
)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("policy", "max_steps", "late", "before_any", "n", "on_failure"),
    but_slow(CASES, lambda _, number: number % 40 > 0),
)
def test_max_steps_in_mid_epoch_ends_all_free_running_workers(
    policy: str, max_steps: int, late: int, before_any: bool, n: int, on_failure: str
) -> None:
    strategy = HybridStrategy(policy, on_failure=on_failure)
    _, trainer = fit(strategy, 2, 4, Waiting(late, before_any, n), max_steps=max_steps)
    assert trainer.global_step >= max_steps and trainer.current_epoch == -(-max_steps // 12)


@pytest.mark.parametrize("policy", by_default(FREE, "synchronous", "hogwild"))
def test_epochs_with_fewer_mini_batches_than_workers_are_each_validated(policy: str) -> None:
    module, trainer = fit(policy, 3, 4, Waiting, data=regression_data(8))
    assert (trainer.global_step, trainer.current_epoch) == (6, 3)
    assert module.validations == 3


@pytest.mark.parametrize(
    ("policy", "on_failure"),
    by_default([*product(FREE[:3], ["stop"]), ("async", "restart")], ("async", "stop")),
)
def test_a_resumed_epoch_with_fewer_mini_batches_left_than_workers_is_validated(
    policy: str, on_failure: str, tmp_path: Path
) -> None:
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    fit("synchronous", 2, 4, Waiting, callbacks=[keep], enable_checkpointing=True, max_epochs=1)
    for step in (9, 11):  # worker 0's last two
        strategy = HybridStrategy(policy, on_failure=on_failure)
        path = str(tmp_path / f"step={step}.ckpt")
        module, trainer = fit(strategy, 3, 4, Waiting, ckpt_path=path, max_epochs=2)
        assert trainer.current_epoch == 2 and module.validations == 2


@pytest.mark.parametrize(
    ("policy", "on_failure"),
    by_default(
        [*product(FREE, ["stop"]), ("async", "restart")], ("hogwild", "stop"), ("async", "restart")
    ),
)
def test_an_epoch_that_the_module_cancels_is_not_validated(policy: str, on_failure: str) -> None:
    strategy = HybridStrategy(policy, on_failure=on_failure)
    module, trainer = fit(strategy, 2, 4, Waiting(cancels=1))
    assert trainer.current_epoch == module.trained_in == 3
    assert module.validations == 2  # as under Lightning's own strategies


@pytest.mark.few(1)
@pytest.mark.parametrize("who", by_default([0, 1], 1))
@pytest.mark.parametrize(
    ("policy", "on_failure"),
    by_default(
        [*product(FREE, ["stop"]), ("async", "restart")], ("hogwild", "stop"), ("async", "restart")
    ),
)
def test_all_workers_validate_an_epoch_that_one_of_them_cancels(
    policy: str, on_failure: str, who: int
) -> None:
    strategy = HybridStrategy(policy, on_failure=on_failure)
    module, trainer = fit(strategy, 2, 4, Waiting(who, before_any=True, cancels=1))
    assert trainer.current_epoch == module.validations == 3
