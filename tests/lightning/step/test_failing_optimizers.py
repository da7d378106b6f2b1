"""What an optimizer raises where it steps ends the run, with its name and its traceback."""

from __future__ import annotations

import traceback
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from tests.lightning.toys import Regression, fit


class Fragile(torch.optim.SGD):
    """Raises in its third step, half-way through."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.calls += 1
        if self.calls == 3:
            raise ZeroDivisionError("the third step is one too many")
        return loss


FRAGILE = partial(Regression, partial(Fragile, lr=0.01))


@pytest.mark.parametrize("strategy", ["hybrid", "async"])
def test_an_optimizer_that_raises_is_named_and_its_traceback_kept(strategy: str) -> None:
    with pytest.raises(ZeroDivisionError, match="one too many") as caught:
        fit(strategy, 2, 6, FRAGILE)
    shown = "".join(traceback.format_exception(caught.value))
    assert "optimizer 0 (Fragile)" in shown
    assert "in step\n    raise ZeroDivisionError" in shown


def test_what_torch_refuses_ends_the_run_with_torchs_own_error() -> None:
    kind = partial(torch.optim.Adam, lr=0.01, foreach=False, fused=False, differentiable=True)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        fit("hybrid", 2, 6, partial(Regression, kind))


@pytest.mark.parametrize("strategy", ["hybrid", "async"])
def test_no_checkpoint_is_made_of_half_a_step(strategy: str, tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, save_top_k=0)
    with pytest.raises(ZeroDivisionError):
        fit(strategy, 2, 6, FRAGILE, callbacks=[checkpoint], enable_checkpointing=True)
    assert not list(tmp_path.iterdir())
