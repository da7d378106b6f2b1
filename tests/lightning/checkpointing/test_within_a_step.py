"""A state that is written within an optimizer's step holds no count below zero."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

from hybridtrain.lightning.checkpointing.checkpoint_content import check_content
from hybridtrain.lightning.hooks.trainer_hooks import dump_at_once
from hybridtrain.lightning.run_context import strategy_of
from tests.lightning.metamorphic import strategies
from tests.lightning.toys import Regression, make_trainer, regression_data
from tests.picking import by_default

FREE = ("async", "hogwild", "downpour", "easgd", "async_diloco", "switch", "k_async", "grace")


class LooksInEachStep(Regression):
    """Writes its state as for a restarted worker, before Lightning counts the step."""

    def optimizer_step(self, *args: Any, **options: Any) -> None:
        super().optimizer_step(*args, **options)
        strategy: Any = strategy_of(self.trainer)
        with strategy.reporting_progress():
            checkpoint = dump_at_once(self.trainer)
        check_content(strategy._loaders.checkpoint.write(checkpoint, for_now=True), "a step", True)


@pytest.mark.few(2)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", by_default(FREE, "easgd", "async"))
def test_a_checkpoint_made_within_a_step_holds_no_count_below_zero(
    name: str, workers: int, tmp_path: Any
) -> None:
    """The first step of the second epoch may change no version: easgd exchanges with others."""
    trainer = make_trainer(
        strategies.make(name, workers), workers, max_epochs=3, default_root_dir=tmp_path
    )
    trainer.fit(LooksInEachStep(), DataLoader(regression_data(40), 4))
