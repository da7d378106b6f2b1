"""The trainer's metrics are those of its last call, as after a call in one process."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from tests.lightning.toys import Regression, make_trainer, regression_data


class Tells(Regression):
    """Also on the progress bar."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("count", float(batch_idx), prog_bar=True, sync_dist=True, batch_size=len(batch[0]))


def names_after(trainer: Any) -> list[list[str]]:
    """Of callbacks', loggers' and the progress bar's metrics."""
    kinds = (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)
    return [sorted(kind) for kind in kinds]


def test_metrics_are_those_of_the_last_call_only() -> None:
    seen = []
    for strategy, workers in (("auto", 1), ("hybrid", 2)):
        module, trainer = Tells(), make_trainer(strategy, workers, max_epochs=1)
        data = DataLoader(regression_data(8), batch_size=4)
        trainer.fit(module, data, data)
        fitted, held = names_after(trainer), trainer.callback_metrics
        trainer.test(module, data, verbose=False)
        seen.append((fitted, names_after(trainer), sorted(held)))
    assert seen[0] == seen[1]
