"""task=parabola: the whole set in every step, split among the workers, whatever their number."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

import hybridtrain  # noqa: F401  (registers the strategies)
from hybridtrain.errors import UserError
from hybridtrain.tasks.parabola import ParabolaData, ParabolaModule


def train(tmp_path: Path, steps: int, devices: int = 1, **options: Any) -> ParabolaModule:
    """``steps`` full-batch steps from the same start; returns the trained module."""
    torch.manual_seed(0)
    module = ParabolaModule(optimizer=partial(torch.optim.SGD, lr=0.01), **options)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="hybrid" if devices > 1 else "auto",
        max_epochs=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, datamodule=ParabolaData())
    assert trainer.global_step == steps
    return module


@torch.no_grad()
def error(module: ParabolaModule) -> float:
    x = torch.linspace(-2, 2, 101).unsqueeze(1)
    return float((module(x) - x.square()).square().mean())


@pytest.mark.slow
def test_two_thousand_steps_of_gradient_descent_fit_the_parabola(tmp_path: Path) -> None:
    assert error(train(tmp_path, steps=2000)) < 0.1


def test_the_fit_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    train(tmp_path, steps=2, plot=True, directory=str(tmp_path))
    assert (tmp_path / "fit.png").read_bytes().startswith(b"\x89PNG")


def test_the_path_is_that_of_gradient_descent_written_by_hand(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, data = ParabolaModule(), ParabolaData()
    descent = torch.optim.SGD(module.parameters(), lr=0.01)
    for _ in range(50):
        descent.zero_grad()
        (module(data.x) - data.y).square().mean().backward()
        descent.step()
    for ours, plain in zip(
        train(tmp_path, steps=50).parameters(), module.parameters(), strict=True
    ):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.slow
def test_workers_that_share_the_batch_follow_the_path_of_one(tmp_path: Path, workers: int) -> None:
    alone, together = train(tmp_path, steps=30), train(tmp_path, steps=30, devices=workers)
    for one, many in zip(alone.parameters(), together.parameters(), strict=True):
        torch.testing.assert_close(one, many, rtol=1e-5, atol=1e-6)


def test_the_plot_is_left_out_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with caplog.at_level("INFO"):
        train(tmp_path, steps=1, plot=True)
    assert "pip install 'hybridtrain[report]'" in caplog.text
    assert not (tmp_path / "fit.png").exists()


def test_the_noise_has_the_stated_size_and_follows_its_seed() -> None:
    data = ParabolaData(n_points=5000)
    noise = data.y - data.x.square()
    assert float(noise.std()) == pytest.approx(0.05, rel=0.05)
    assert torch.equal(data.y, ParabolaData(n_points=5000).y)
    assert not torch.equal(data.y, ParabolaData(n_points=5000, seed=1).y)


@pytest.mark.parametrize(
    ("option", "value"), [("n_points", 0), ("batch_size", 0), ("batch_size", "half")]
)
def test_sizes_that_make_no_sense_are_refused(option: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"data.{option}={value!r}"):
        ParabolaData(**{option: value})
