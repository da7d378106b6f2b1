"""Modules as the documentation of Lightning and of torchmetrics has them, in our own typing."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.foreign.strangers import alone, apart, same_bits, seeded, train, union


def pictures(n: int = 48) -> TensorDataset:
    """Smooth random pictures of 8 by 8, and which quarter is the brightest."""
    coarse = torch.rand(n, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    x = nn.functional.interpolate(coarse, size=(8, 8), mode="bilinear")
    return TensorDataset(x, coarse.flatten(1).argmax(1))


class LitAutoEncoder(pl.LightningModule):
    """The autoencoder of Lightning's README."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, _ = batch
        x = x.view(x.size(0), -1)
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x = batch[0].flatten(1)
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("val_loss", loss, sync_dist=True, batch_size=len(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def test_the_autoencoder_of_the_readme_equals_one_process() -> None:
    data = pictures()
    module, reference = seeded(LitAutoEncoder), seeded(LitAutoEncoder)
    trainer, losses = train(module, train_dataloaders=DataLoader(data, 4), max_epochs=4)
    expected, _ = alone(reference, train_dataloaders=union(data, 8), max_epochs=4)
    assert apart(module, reference) < 1e-4
    assert losses.fell()
    loader = DataLoader(data, 4)
    (ours,), (theirs,) = (
        t.validate(m, loader, verbose=False) for t, m in [(trainer, module), (expected, reference)]
    )
    assert ours["val_loss"] == pytest.approx(theirs["val_loss"], rel=1e-4)


class GAN(pl.LightningModule):
    """The GAN of Lightning's documentation: manual optimization, two optimizers toggled."""

    def __init__(self, latent: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(latent, 32),
            nn.BatchNorm1d(32),
            nn.LeakyReLU(0.2),
            nn.Linear(32, 64),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1), nn.Sigmoid()
        )

    def adversarial_loss(self, guess: torch.Tensor, truth: float) -> torch.Tensor:
        return nn.functional.binary_cross_entropy(guess, torch.full_like(guess, truth))

    def training_step(self, batch: Any) -> Any:
        images = batch[0].flatten(1)
        for_generator, for_discriminator = self.optimizers()  # type: ignore[misc]
        noise = torch.randn(images.shape[0], self.hparams["latent"]).type_as(images)

        self.toggle_optimizer(for_generator)
        made = self.generator(noise)
        g_loss = self.adversarial_loss(self.discriminator(made), 1.0)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        for_generator.step()
        for_generator.zero_grad()
        self.untoggle_optimizer(for_generator)

        self.toggle_optimizer(for_discriminator)
        real = self.adversarial_loss(self.discriminator(images), 1.0)
        fake = self.adversarial_loss(self.discriminator(self.generator(noise).detach()), 0.0)
        d_loss = (real + fake) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        for_discriminator.step()
        for_discriminator.zero_grad()
        self.untoggle_optimizer(for_discriminator)
        return d_loss

    def configure_optimizers(self) -> Any:
        make = torch.optim.Adam
        return [
            make(self.generator.parameters(), lr=2e-3, betas=(0.5, 0.999)),
            make(self.discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999)),
        ], []


def test_the_gan_of_the_documentation_equals_one_process() -> None:
    """Noise is drawn in the step, so every worker gets the same batches and the same noise."""
    data = pictures()
    options: dict[str, Any] = {"use_distributed_sampler": False, "precision": "64-true"}
    trainer, losses = train(
        module := seeded(GAN), train_dataloaders=DataLoader(data, 8, shuffle=True), **options
    )
    expected, _ = alone(
        reference := seeded(GAN), train_dataloaders=DataLoader(data, 8, shuffle=True), **options
    )
    assert apart(module, reference) < 1e-9
    assert trainer.global_step == expected.global_step == 36  # two optimizers
    assert losses.fell()
    for name in ("g_loss", "d_loss"):
        ours, theirs = trainer.callback_metrics[name], expected.callback_metrics[name]
        assert float(ours) == pytest.approx(float(theirs), rel=1e-6)


class Classifier(pl.LightningModule):
    """As torchmetrics' page on Lightning has it: objects in ``__init__``, logged as objects."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4))
        options = {"task": "multiclass", "num_classes": 4}
        metrics = torchmetrics.MetricCollection(
            {
                "accuracy": torchmetrics.Accuracy(**options),
                "f1": torchmetrics.F1Score(**options, average="macro"),
                "confusion": torchmetrics.CohenKappa(**options),
            }
        )
        self.train_metrics = metrics.clone(prefix="train/")
        self.valid_metrics = metrics.clone(prefix="val/")
        self.auroc = torchmetrics.AUROC(**options)  # its state is a list that grows

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        guess = self.net(batch[0])
        self.train_metrics.update(guess.softmax(-1), batch[1])
        self.log_dict(self.train_metrics, on_step=False, on_epoch=True)
        return nn.functional.cross_entropy(guess, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        guess = self.net(batch[0]).softmax(-1)
        self.valid_metrics.update(guess, batch[1])
        self.auroc.update(guess, batch[1])

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.valid_metrics.compute())
        self.log("val/auroc", self.auroc.compute())
        self.valid_metrics.reset()
        self.auroc.reset()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Both(Classifier):
    """With the loaders inside."""

    def val_dataloader(self) -> Any:
        return DataLoader(pictures(31), 4)


def test_the_metrics_of_torchmetrics_are_those_of_one_process_on_all_the_data() -> None:
    data = pictures()
    module, reference = seeded(Both), seeded(Both)
    trainer, losses = train(module, train_dataloaders=DataLoader(data, 4), max_epochs=4)
    expected, _ = alone(reference, train_dataloaders=union(data, 8), max_epochs=4)
    assert apart(module, reference) < 1e-4
    assert losses.fell()
    ours, theirs = trainer.callback_metrics, expected.callback_metrics
    assert ours.keys() == theirs.keys() and len(ours) == 7
    for name, value in theirs.items():
        assert float(ours[name]) == pytest.approx(float(value), rel=1e-4), name


class Generation(pl.LightningModule):
    """The transfer-learning page: a frozen backbone in eval mode, a head that is trained."""

    def __init__(self) -> None:
        super().__init__()
        backbone = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.feature_extractor = backbone.requires_grad_(False)
        self.classifier = nn.Linear(4 * 36, 4)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.feature_extractor.eval()
        with torch.no_grad():
            features = self.feature_extractor(batch[0])
        return nn.functional.cross_entropy(self.classifier(features), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)  # the frozen ones too, as many do


def test_a_frozen_backbone_as_in_the_page_on_transfer_learning_stays_as_it_is() -> None:
    data = pictures()
    module, reference = seeded(Generation), seeded(Generation)
    before = {k: v.clone() for k, v in module.feature_extractor.state_dict().items()}
    _, losses = train(module, train_dataloaders=DataLoader(data, 4))
    alone(reference, train_dataloaders=union(data, 8))
    assert apart(module, reference) < 1e-4
    assert losses.fell()
    after = module.feature_extractor.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert not same_bits(module.classifier, seeded(Generation).classifier)
