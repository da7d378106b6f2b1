"""Name, ``global_step``, weights and schedules of a checkpoint are of one update."""

from __future__ import annotations

import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from tests.lightning.metamorphic import strategies
from tests.lightning.toys import Regression, fit, regression_data
from tests.picking import by_default

CHOSEN = [
    ("async", 2, "automatic"),
    ("hogwild", 3, "manual"),
    ("ssp", 2, "accumulating"),
    ("hybrid", 2, "automatic"),
]


class Slow(ModelCheckpoint):
    """Leaves other workers time for updates between a name and its file."""

    CHECKPOINT_NAME_LAST = "last-{step}"

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        time.sleep(0.01)
        super()._save_checkpoint(trainer, filepath)


class Scheduled(Regression):
    def __init__(self, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not manual

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers().step()  # type: ignore[union-attr]
        return None

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.few(2)
@pytest.mark.parametrize(("strategy", "workers", "kind"), by_default(strategies.cells(), *CHOSEN))
def test_what_a_checkpoint_is_named_and_what_it_holds_agree(
    strategy: str, workers: int, kind: str, tmp_path: Path
) -> None:
    keep = Slow(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=2, save_last=True)
    options: dict[str, Any] = {"callbacks": [keep], "enable_checkpointing": True, "max_epochs": 2}
    if kind == "accumulating":
        options["accumulate_grad_batches"] = 2
    module = partial(Scheduled, kind == "manual")
    _, trainer = fit(strategies.make(strategy, workers), workers, 2, module, **options)
    found = {path: torch.load(path, weights_only=False) for path in tmp_path.glob("*.ckpt")}
    assert found
    for path, saved in found.items():
        assert int(re.findall(r"step=(\d+)", path.name)[0]) == saved["global_step"], path.name
        (schedule,), (group,) = saved["lr_schedulers"], saved["optimizer_states"][0]["param_groups"]
        assert group["lr"] == schedule["_last_lr"][0]
        if kind != "manual" and not trainer.strategy.requirements.schedules_own_steps:
            assert schedule["last_epoch"] == saved["global_step"], path.name
    (last,) = (path for path in found if path.name.startswith("last"))
    first = tmp_path / last.name.removeprefix("last-")
    for key, weights in found[last]["state_dict"].items():
        assert torch.equal(weights, found[first]["state_dict"][key])


class Tells(ModelCheckpoint):
    """How many updates and samples each of its files is of."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.told: list[dict[str, int]] = []

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        self.told.append(dict(trainer.strategy.saved_counts()))


@pytest.mark.parametrize("strategy", by_default(["async", "hybrid", "hogwild"], "async"))
def test_samples_are_those_of_its_updates(strategy: str, tmp_path: Path) -> None:
    tells = Tells(dirpath=tmp_path, every_n_train_steps=7, save_top_k=-1)
    options: dict[str, Any] = {"callbacks": [tells], "enable_checkpointing": True}
    fit(strategy, 2, 4, Regression, regression_data(320), max_epochs=2, **options)
    size = 8 if strategy == "hybrid" else 4
    assert len(tells.told) >= 5
    assert all(each["samples"] == size * each["updates"] for each in tells.told)
