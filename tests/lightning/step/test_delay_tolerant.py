"""Updates that are told how late a gradient is, in real processes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hybridtrain import HybridStrategy
from hybridtrain.engine.updates.delay_tolerant import AdaptiveRevision
from hybridtrain.errors import UserError
from tests.lightning.toys import Regression, distance, fit, flat, make_trainer, regression_data

ADAGRAD = partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=1.0, eps=0.0)
REVISION = {"name": "adaptive_revision", "lr": 0.1}
IN_64 = {"precision": "64-true", "max_epochs": 3}


@pytest.mark.few(1)
@pytest.mark.parametrize(("strategy", "workers", "batch"), [("async", 1, 8), ("synchronous", 2, 4)])
def test_adaptive_revision_is_adagrad_where_no_gradient_is_late(
    strategy: str, workers: int, batch: int
) -> None:
    data = regression_data(48, torch.float64)
    plain, _ = fit(strategy, workers, batch, partial(Regression, ADAGRAD), data, **IN_64)
    told, _ = fit(
        HybridStrategy(strategy, update=REVISION), workers, batch, Regression, data, **IN_64
    )
    own, _ = fit(
        strategy,
        workers,
        batch,
        partial(Regression, partial(AdaptiveRevision, lr=0.1)),
        data,
        **IN_64,
    )
    assert distance(told, plain) < 1e-12
    assert torch.equal(flat(own), flat(told)), "named, or given by the module"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("adaptive_revision", "async"),
        pytest.param("adadelay", "softsync", marks=pytest.mark.slow),
        ("async_ada_da", {"name": "k_async", "k": 2}),
    ],
)
def test_free_running_workers_learn_with_delay_tolerant_updates(name: str, policy: Any) -> None:
    strategy = HybridStrategy(policy, update={"name": name, "lr": 0.1})
    trained, _ = fit(strategy, 3, 4, Regression, max_epochs=30)
    with torch.no_grad():
        x, y = regression_data().tensors
        before = float(torch.nn.functional.mse_loss(Regression().net(x), y))
        after = float(torch.nn.functional.mse_loss(trained.net(x), y))
    assert after < 0.8 * before


def test_a_run_with_adaptive_revision_resumes_to_the_bit(tmp_path: Path) -> None:
    def run(epochs: int, ckpt: Path | None = None) -> tuple[Any, Any]:
        strategy = HybridStrategy("async", update=REVISION)
        trainer = make_trainer(strategy, 1, max_epochs=epochs, default_root_dir=tmp_path)
        torch.manual_seed(5)
        module = Regression()
        trainer.fit(module, DataLoader(regression_data(48), 8), ckpt_path=ckpt, weights_only=True)
        return module, trainer

    whole, _ = run(3)
    _, trainer = run(2)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    resumed, _ = run(3, tmp_path / "two.ckpt")
    assert torch.equal(flat(resumed), flat(whole))


@pytest.mark.parametrize(
    ("update", "named"),
    [
        ("adaptive_revison", ["mean adaptive_revision?", "adadelay", "of torch.optim"]),
        ({"name": "adadelay", "smooth": 1}, ["update.smooth", "smoothness"]),
        ({"name": "adaptive_revision", "lr": -1.0}, ["update=adaptive_revision", "from 0 on"]),
    ],
)
def test_bad_options_of_delay_tolerant_updates_are_named(update: Any, named: list[str]) -> None:
    with pytest.raises(UserError) as error:
        fit(HybridStrategy("async", update=update), 1, 8)
    for fragment in named:
        assert fragment in str(error.value)
