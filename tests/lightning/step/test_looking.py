"""Code that names a gradient gets the averaged one; all other code is spared the second round."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import LambdaCallback

from hybridtrain.lightning.step.gradient_readers import names_a_gradient


def norm_of(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.grad.norm()


class Plain(pl.LightningModule):
    """Names much that is not a gradient."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.frozen = [p.requires_grad_(False) for p in self.parameters()]

    @property
    def watched(self) -> int:
        return 1


class InBatchEnd(Plain):
    def on_train_batch_end(self, *_: Any) -> None:
        self.norms = [p.grad for p in self.parameters()]


class InHelper(Plain):
    def on_train_batch_end(self, *_: Any) -> None:
        self.norms = [norm_of(p) for p in self.parameters()]


class InProperty(Plain):
    @property
    def watched(self) -> int:
        return sum(p.grad.sum() for p in self.parameters())


class InString(Plain):
    @staticmethod
    def look(parameter: torch.Tensor) -> Any:
        return getattr(parameter, "grad", None)


class InParent(InBatchEnd):
    pass


def watcher(function: Any) -> pl.Callback:
    return LambdaCallback(on_train_batch_end=lambda *_: function(torch.zeros(1)))


@pytest.mark.parametrize(
    "make", [InBatchEnd, InHelper, InProperty, InString, InParent, partial(watcher, norm_of)]
)
def test_code_that_names_a_gradient_is_recognised(make: Any) -> None:
    assert names_a_gradient([make()])


@pytest.mark.parametrize(
    "make",
    [Plain, pl.LightningModule, pl.callbacks.EarlyStopping, partial(watcher, torch.sum)],
)
def test_code_that_names_no_gradient_is_left_alone(make: Any) -> None:
    assert not names_a_gradient([make("x")] if make is pl.callbacks.EarlyStopping else [make()])
