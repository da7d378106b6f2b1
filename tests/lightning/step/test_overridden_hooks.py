"""Overridden hooks, and nothing else, decide whether gradients are averaged before the step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl

from hybridtrain.lightning.step.overridden_hooks import gradients_are_final

OF_MODULES = ["on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "backward"]
OF_MODULES += ["configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad"]
OF_CALLBACKS = OF_MODULES[:3]


def hook(*_: Any) -> None:
    """Looks at nothing."""


def are_final(module: pl.LightningModule, *callbacks: pl.Callback) -> bool:
    plugin = pl.plugins.precision.Precision()
    trainer = SimpleNamespace(lightning_module=module, callbacks=callbacks, precision_plugin=plugin)
    return gradients_are_final(trainer)


@pytest.mark.parametrize("name", OF_MODULES)
def test_a_hook_of_the_module_lets_gradients_be_averaged_before_the_step(name: str) -> None:
    assert not are_final(type("Module", (pl.LightningModule,), {name: hook})())


@pytest.mark.parametrize("name", OF_CALLBACKS)
def test_a_hook_of_a_callback_lets_gradients_be_averaged_before_the_step(name: str) -> None:
    assert not are_final(pl.LightningModule(), type("Looking", (pl.Callback,), {name: hook})())
    assert not are_final(pl.LightningModule(), pl.callbacks.LambdaCallback(**{name: hook}))


class NamesGradients(pl.LightningModule):
    """Names gradients outside of the hooks: they are this worker's own there."""

    def training_step(self, *_: Any) -> None:
        self.norms = [p.grad for p in self.parameters()]

    def on_train_batch_end(self, *_: Any) -> None:
        self.norms = [p.grad for p in self.parameters()]


@pytest.mark.parametrize("module", [pl.LightningModule, NamesGradients])
def test_without_such_a_hook_gradients_are_handed_over_as_they_are(module: Any) -> None:
    assert are_final(module(), pl.callbacks.EarlyStopping("loss"))
