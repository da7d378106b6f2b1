"""``task=parabola``: y = x^2 from noisy points, by a small tanh network and plain gradient descent.

The example of data parallelism at its smallest: every step takes the whole set, each worker a
share of it, and the mean of the workers' gradients is the gradient of the whole set. Any number of
workers follows the same path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from hybridtrain.tasks.shared_tables import MakeOptimizer
from hybridtrain.util.option_types import Natural, Positive, typed

Batch = Sequence[Tensor]  # x (B, 1) fp32, y (B, 1) fp32


class ParabolaModule(pl.LightningModule):
    """A 1 - ``hidden`` - 1 network of tanh units, trained on the mean squared error.

    Args:
        hidden: units.
        plot: draw the fit as ``fit.png`` into ``directory`` at the end (needs matplotlib).
        directory: where the plot goes; None: the trainer's ``default_root_dir``.
        optimizer: given the parameters, returns their optimizer.
    """

    @typed("model.")
    def __init__(
        self,
        hidden: Positive = 5,
        plot: bool = False,
        directory: str | None = None,
        optimizer: MakeOptimizer = SGD,
    ) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, 1))
        self.plot = plot
        self.directory = directory
        self.make_optimizer = optimizer

    def forward(self, x: Tensor) -> Tensor:
        """y (B, 1) for x (B, 1)."""
        return self.net(x)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Mean squared error of this worker's share."""
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log(
            "train/loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(x)
        )
        return loss

    def configure_optimizers(self) -> Optimizer:
        """One optimizer for all parameters."""
        return self.make_optimizer(self.parameters())

    def on_fit_end(self) -> None:
        """Draw the fit."""
        if not self.plot or not self.trainer.is_global_zero:
            return
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, ParabolaData):
            return
        try:
            draw_fit(self, data, Path(self.directory or self.trainer.default_root_dir) / "fit.png")
        except ModuleNotFoundError:
            rank_zero_info("No plot of the fit: it needs pip install 'hybridtrain[report]'.")


class ParabolaData(pl.LightningDataModule):
    """Points on y = x^2 with normal noise.

    Args:
        n_points: how many, evenly spaced from ``low`` to ``high``.
        noise: standard deviation.
        batch_size: of each worker; ``full`` divides the points among the workers.
        seed: of the noise.
    """

    @typed("data.")
    def __init__(
        self,
        n_points: Positive = 50,
        low: float = -2.0,
        high: float = 2.0,
        noise: float = 0.05,
        batch_size: Positive | Literal["full"] = "full",
        seed: Natural = 0,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.linspace(low, high, n_points).unsqueeze(1)  # (N, 1)
        noises = noise * torch.randn(n_points, 1, generator=generator)
        self.y = self.x.square() + noises  # (N, 1)

    def train_dataloader(self) -> DataLoader[Batch]:
        """The points, in another order each epoch."""
        size: int | str = self.batch_size
        if isinstance(size, str):
            workers = self.trainer.world_size if self.trainer is not None else 1
            size = math.ceil(len(self.x) / workers)
        return DataLoader(TensorDataset(self.x, self.y), batch_size=size, shuffle=True)


def draw_fit(module: ParabolaModule, data: ParabolaData, path: Path) -> None:
    """Draw the points, the parabola and the network's curve; raises without matplotlib."""
    from matplotlib.figure import Figure  # no display, no global state

    x = torch.linspace(float(data.x.min()), float(data.x.max()), 200).unsqueeze(1)
    with torch.no_grad():
        curve = module(x.to(module.device)).cpu()
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="x", ylabel="y")
    axes.plot(data.x.squeeze(), data.y.squeeze(), ".", color="0.5", label="training points")
    axes.plot(x.squeeze(), x.square().squeeze(), "--", color="0.2", lw=1, label="y = x²")
    axes.plot(x.squeeze(), curve.squeeze(), color="C1", label="network")
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
