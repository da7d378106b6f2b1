"""A mean that is one worker's alone is said to be, as under all-reduce."""

from __future__ import annotations

import warnings
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils.data import DataLoader

from hybridtrain.lightning.collectives import Collectives
from tests.lightning.toys import Regression, make_trainer, regression_data


class Alone(Regression):
    """Logs means of its own, in training and validation, and one that all share."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train/mean", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("val/own", batch[1].mean())
        self.log("val/first", batch[1].mean(), rank_zero_only=True)


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_logged_on_epoch_level_without_sync_dist_is_named_once(
    workers: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warnings, "showwarning", lambda text, *_, **__: print(text, flush=True))
    data = DataLoader(regression_data(), 12)
    make_trainer("hybrid", workers, max_epochs=2).fit(Alone(), data, data)
    said = capfd.readouterr().out
    found = [name for name in ("train/mean", "val/own", "val/first", "val/loss") if name in said]
    assert found == ([] if workers == 1 else ["train/mean", "val/own"])
    assert said.count("recommended to use") == len(found)


@pytest.mark.parametrize(
    ("mine", "theirs", "mean"), [(1 + 2j, 3 + 4j, 2 + 3j), (1, 2, 1.5), (True, False, 0.5)]
)
def test_a_mean_has_the_dtype_that_it_needs(mine: Any, theirs: Any, mean: Any) -> None:
    client = Mock(gather=lambda tag, item: [item, torch.tensor([theirs])])
    reduced = Collectives(client).reduce(torch.tensor([mine]), "mean")
    assert reduced.tolist() == [mean]  # type: ignore[attr-defined]
