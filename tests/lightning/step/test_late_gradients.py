"""Corrections of late gradients in real processes, and what is said about them."""

from __future__ import annotations

import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from hybridtrain import HybridStrategy
from hybridtrain.engine.updates.staleness import CORRECTIONS
from hybridtrain.errors import UserError
from hybridtrain.lightning.preflight.strategy_checks import advise, advise_on_late
from tests.lightning.toys import Regression, distance, fit, make_trainer, regression_data
from tests.picking import by_default

ADAM = partial(Regression, partial(torch.optim.Adam, lr=0.02))


@pytest.mark.parametrize("correction", by_default(sorted(CORRECTIONS), sorted(CORRECTIONS)[0]))
def test_one_free_running_worker_is_never_late_and_never_corrected(correction: str) -> None:
    plain, _ = fit("async", 1, 8, ADAM)
    corrected, _ = fit(HybridStrategy("async", correction=correction), 1, 8, ADAM)
    assert distance(plain, corrected) == 0.0


@pytest.mark.parametrize("correction", by_default(sorted(CORRECTIONS), "dc_asgd_adaptive"))
def test_corrected_training_learns(correction: str) -> None:
    strategy = HybridStrategy("async", correction={"name": correction})
    trained, trainer = fit(strategy, 3, 4, ADAM, max_epochs=15)
    assert trainer.strategy.run_stats()["staleness"]["mean"] > 0.2, "there was something to correct"
    assert mean_loss(trained) < 0.5 * mean_loss(fresh())


@pytest.mark.parametrize(
    ("policy", "correction"),
    by_default(
        [
            ("softsync", "by_staleness"),
            ("softsync", "gap_aware"),
            ({"name": "k_async", "k": 2}, "dc_asgd_adaptive"),
            ({"name": "ssp", "lead": 2}, {"name": "polynomial", "exponent": 1.0}),
            ({"name": "backup", "k": 2}, "dc_asgd"),
        ],
        ({"name": "backup", "k": 2}, "dc_asgd"),
    ),
)
def test_corrections_compose_with_any_policy(policy: Any, correction: Any) -> None:
    strategy = HybridStrategy(policy, correction=correction)
    trained, _ = fit(strategy, 3, 4, ADAM, max_epochs=15)
    assert mean_loss(trained) < 0.6 * mean_loss(fresh())


def fresh() -> Regression:
    pl.seed_everything(7, verbose=False)
    return ADAM()


@torch.no_grad()
def mean_loss(module: Any) -> float:
    x, y = regression_data().tensors
    return float(torch.nn.functional.mse_loss(module.net(x), y))


def test_where_nothing_is_late_a_correction_is_said_to_change_nothing() -> None:
    plain, _ = fit("hybrid", 2, 4)
    strategy = HybridStrategy("hybrid", correction="gap_aware")
    trainer = make_trainer(strategy, 2)
    pl.seed_everything(7, verbose=False)
    module = Regression()
    loader = torch.utils.data.DataLoader(regression_data(), batch_size=4, shuffle=True)
    with pytest.warns(
        UserWarning, match=r"correction=gap_aware was given.*policy=hybrid.*changes nothing"
    ):
        trainer.fit(module, loader)
    assert distance(plain, module) == 0.0


@pytest.mark.parametrize("correction", ["gapaware", {"name": "polynomial", "exponent": -2}])
def test_impossible_corrections_are_refused_before_anything_starts(correction: Any) -> None:
    with pytest.raises(UserError, match=r"correction.* was given"):
        HybridStrategy("async", correction=correction)


# ---- implicit momentum --------------------------------------------------------------------------


def sgd(momentum: float) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=momentum)]


def test_momentum_beside_late_gradients_is_warned_of_with_the_figure_of_the_theory() -> None:
    with pytest.warns(UserWarning, match=r"3\.0 updates late .* momentum of 0\.75 on top of the 0"):
        advise(sgd(0.9), 3.0)  # four workers: 1 - 1/4


@pytest.mark.parametrize(
    ("optimizers", "staleness"),
    [(sgd(0.9), 0.0), (sgd(0.0), 3.0), ([torch.optim.Adam([torch.zeros(1)])], 3.0), ([], 3.0)],
)
def test_no_warning_of_late_gradients_comes_without_momentum_or_lateness(
    optimizers: Any, staleness: float
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        advise(optimizers, staleness)


@pytest.mark.parametrize(
    ("policy", "times"),
    [("async", 1), ({"name": "pipe_sgd", "warm_up": 0}, 0)],
    ids=["async", "one behind, which is no momentum"],
)
def test_the_warning_of_late_gradients_comes_once_from_the_first_worker(
    policy: Any, times: int, tmp_path: Path, monkeypatch: Any
) -> None:
    said = tmp_path / "said"

    def note(message: Any, *_: Any, **__: Any) -> None:
        with said.open("a") as file:
            file.write(f"{message}\n")

    said.touch()
    trainer = make_trainer(HybridStrategy(policy), 3, max_epochs=3)
    loader = torch.utils.data.DataLoader(regression_data(96), batch_size=2, shuffle=True)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", note)
        trainer.fit(Regression(partial(torch.optim.SGD, lr=0.001, momentum=0.9)), loader)
    assert said.read_text().count("updates late on average, which acts like a momentum") == times


class Slow(Regression):
    """Worker 1 is slower."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.02 if self.global_rank else 0.002)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("policy", "said"),
    by_default(
        [("backup", 1), ({"name": "backup", "k": 2}, 0), ("k_batch_sync", 1), ("async", 0)],
        ("backup", 1),
    ),
)
def test_a_worker_whose_contributions_come_too_late_is_named_once(
    policy: Any, said: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warnings, "showwarning", lambda text, *_, **__: print(text, flush=True))
    data = torch.utils.data.DataLoader(regression_data(400), 4)
    trainer = make_trainer(HybridStrategy(policy), 2, max_epochs=3)
    trainer.fit(Slow(), data)
    lines = [line for line in capfd.readouterr().out.splitlines() if "came too late" in line]
    stats = trainer.strategy.run_stats()  # type: ignore[attr-defined]
    is_late = advise_on_late(policy, stats)  # not on a busy machine, where both are slow
    assert len(lines) <= said and len(lines) >= is_late, (lines, stats)
    assert all("are of worker 1, and" in line for line in lines), lines


@pytest.mark.parametrize(
    ("samples", "dropped", "said"),
    [([123, 29], [0, 100], True), ([123, 29], [0, 3], False), ([100, 60], [20, 40], False)],
)
def test_a_worker_is_too_late_if_it_has_less_than_half_of_its_share(
    samples: list[int], dropped: list[int], said: bool
) -> None:
    stats = {"samples_per_worker": samples, "dropped": dropped}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert advise_on_late("backup", stats) is said
