"""Learning-rate schedules: they act on the worker's groups, the step happens in the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import lr_scheduler as lr

from tests.parity.case import Grade, Theme
from tests.parity.cases.optimizers import FUSED, adam
from tests.parity.toys import Net, even, sgd

THEME = Theme("schedulers", even)
add = partial(THEME.add, expect=Grade.BITWISE)


def schedule(name: str, make: Callable[[Any], Any], wide: bool = False, **config: Any) -> None:
    """One more schedule of the default SGD."""
    add(name, partial(Net, sgd, lambda o: {"scheduler": make(o), **config}), wide=wide)


step = {"interval": "step"}
schedule("OneCycleLR per step", lambda o: lr.OneCycleLR(o, 0.05, total_steps=13), True, **step)
schedule("StepLR per epoch", lambda o: lr.StepLR(o, 1, 0.5))
schedule("StepLR, every second step", lambda o: lr.StepLR(o, 1, 0.7), **step, frequency=2)
schedule("LambdaLR per step", lambda o: lr.LambdaLR(o, lambda n: 1 / (1 + n)), **step)
schedule("MultiplicativeLR", lambda o: lr.MultiplicativeLR(o, lambda n: 0.9), **step)
schedule("CosineAnnealingLR", lambda o: lr.CosineAnnealingLR(o, 4), **step)
schedule("CosineAnnealingWarmRestarts", lambda o: lr.CosineAnnealingWarmRestarts(o, 3), **step)
schedule("CyclicLR with momentum", lambda o: lr.CyclicLR(o, 0.001, 0.02, 3), **step)
schedule("ExponentialLR", lambda o: lr.ExponentialLR(o, 0.8))
schedule("PolynomialLR", lambda o: lr.PolynomialLR(o, 5), **step)
schedule(
    "SequentialLR",
    lambda o: lr.SequentialLR(o, [lr.LinearLR(o, 0.1, 1.0, 3), lr.ExponentialLR(o, 0.9)], [3]),
    **step,
)
schedule(
    "ChainedScheduler", lambda o: lr.ChainedScheduler([lr.ConstantLR(o), lr.ExponentialLR(o, 0.9)])
)
schedule("SWALR", lambda o: torch.optim.swa_utils.SWALR(o, 0.005, 3), **step)
plateau = partial(lr.ReduceLROnPlateau, patience=0, threshold=10.0)
schedule("ReduceLROnPlateau on validation", plateau, True, monitor="val/loss")
schedule("ReduceLROnPlateau on training", plateau, monitor="train/loss")
schedule("ReduceLROnPlateau per step", plateau, monitor="train/loss", interval="step", frequency=2)
add(
    "OneCycleLR with Adam",
    partial(Net, adam, lambda o: {"scheduler": lr.OneCycleLR(o, 0.05, total_steps=13), **step}),
    expect=Grade.ROUNDING,
    reason=FUSED,
)


class OwnSchedule(Net):
    """``lr_scheduler_step`` overridden."""

    def __init__(self) -> None:
        super().__init__(sgd, lambda o: lr.StepLR(o, 1, 0.5))

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(epoch=2 * self.current_epoch)


class Total(Net):
    """The length of the training is asked for, as warm-up schedules do."""

    def configure_optimizers(self) -> Any:
        optimizer = sgd(self.parameters())
        total = self.trainer.estimated_stepping_batches
        self.notes.append(total)
        scheduler = lr.OneCycleLR(optimizer, 0.05, total_steps=int(total))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


add("lr_scheduler_step overridden", OwnSchedule)
add("estimated_stepping_batches", Total)
add("estimated_stepping_batches, accumulating", Total, trainer={"accumulate_grad_batches": 4})
add(
    "per step while accumulating",
    partial(Net, sgd, lambda o: {"scheduler": lr.StepLR(o, 1, 0.7), **step}),
    trainer={"accumulate_grad_batches": 4},
)
