"""``task=triplet``: embeddings of a large vocabulary of which most words are rare.

The words are synthetic: each belongs to a class, and its frequency falls with its rank (Zipf's
law). A sample is a word and another one of its class. The loss is FaceNet's (Schroff et al. 2015,
arXiv:1503.03832) on vectors of length 1, with a semi-hard negative from the same mini-batch; only
words of triplets that have a loss get a gradient, so a step touches a few rows of the table.

Legend: V words, D numbers of each, B samples of a mini-batch, T triplets that have a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from hybridtrain.errors import UserError
from hybridtrain.tasks.shared_tables import MakeOptimizer, check_size
from hybridtrain.util.option_types import Natural, Positive, typed

Batch = Sequence[Tensor]
Triplets = tuple[Tensor, Tensor, Tensor]  # words (T,) each: anchors, positives, negatives
BANDS = ("common", "middle", "rare")  # a third of the words each, by how often they occur


class TripletModule(pl.LightningModule):
    """A table of vectors, trained by a triplet loss with semi-hard negatives.

    Args:
        vocabulary: V.
        dim: D.
        margin: how much farther than its positive a negative is to be, as a squared distance of
            vectors of length 1.
        optimizer: given the parameters, returns their optimizer; it must take sparse gradients.
    """

    @typed("model.")
    def __init__(
        self,
        vocabulary: Positive = 20_000,
        dim: Positive = 32,
        margin: float = 0.5,
        optimizer: MakeOptimizer = SGD,
    ) -> None:
        super().__init__()
        what = f"model.vocabulary={vocabulary} with model.dim={dim}"
        check_size(4 * vocabulary * dim, 1, what, "give fewer words or a smaller dim")
        self.table = nn.Embedding(vocabulary, dim, sparse=True)
        nn.init.normal_(self.table.weight, std=dim**-0.5)  # of length 1, or so
        self.margin = margin
        self.make_optimizer = optimizer
        self._centres, self._bands = torch.empty(0), list[int]()
        self.shares = nn.ModuleList(MeanMetric() for _ in BANDS)

    def forward(self, words: Tensor) -> Tensor:
        """Vectors (..., D) of length 1 of words (...)."""
        return F.normalize(self.table(words), dim=-1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Mean loss of the B samples: words (B,), others of their classes (B,), classes (B,)."""
        anchors, positives, classes = batch
        check_words(torch.cat([anchors, positives]), self.table.num_embeddings)
        triplets = self.mine(anchors, positives, classes)
        loss = triplet_loss(self, triplets, self.margin) / len(anchors)
        self.log("train/loss", loss, on_step=False, on_epoch=True, batch_size=len(anchors))
        return loss

    @torch.no_grad()
    def mine(self, anchors: Tensor, positives: Tensor, classes: Tensor) -> Triplets:
        """The triplets that have a loss.

        The negative is the nearest one that is farther than the positive, and if there is none,
        the farthest of all.
        """
        a, p = self(anchors), self(positives)
        near = (a - p).square().sum(1, keepdim=True)  # (B, 1)
        far = 2 - 2 * a @ p.T  # (B, B), of vectors of length 1
        same = classes[:, None] == classes[None, :]
        beyond = far.masked_fill(same | (far <= near), torch.inf)
        semi_hard, which = beyond.min(dim=1)
        farthest, fallback = far.masked_fill(same, -torch.inf).max(dim=1)
        none = torch.isinf(semi_hard)
        which, distance = torch.where(none, fallback, which), torch.where(none, farthest, semi_hard)
        active = (near[:, 0] - distance + self.margin > 0) & torch.isfinite(distance)
        return anchors[active], positives[active], positives[which[active]]

    @torch.no_grad()
    def on_validation_start(self) -> None:
        """Compute the centre of each class: the mean of its common words, or of all if none is."""
        data: TripletData = self.trainer.datamodule  # type: ignore[attr-defined]
        classes, self._bands = data.classes.to(self.device), data.bands
        n_classes, words = int(classes.max()) + 1, torch.arange(len(classes), device=self.device)
        common = words * len(BANDS) < len(classes)
        has_one = torch.zeros(n_classes, dtype=torch.bool, device=self.device)
        has_one[classes[common]] = True
        words = words[common | ~has_one[classes]]
        total = torch.zeros(n_classes, self.table.embedding_dim, device=self.device)
        self._centres = F.normalize(total.index_add_(0, classes[words], self(words)), dim=1)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the share of words whose nearest class is theirs, by how often they occur."""
        words, classes, bands = batch
        right = ((self(words) @ self._centres.T).argmax(dim=1) == classes).float()
        for number in self._bands:
            band, share = BANDS[number], cast(MeanMetric, self.shares[number])
            share.update(right[bands == number])  # perhaps of no word
            self.log(f"val/{band}", share, prog_bar=True)

    def configure_optimizers(self) -> Optimizer:
        """One optimizer, of the table."""
        return self.make_optimizer(self.parameters())


def triplet_loss(embed: Callable[[Tensor], Tensor], triplets: Triplets, margin: float) -> Tensor:
    """Σ ‖a − p‖² − ‖a − n‖² + margin of triplets for which that is above 0."""
    a, p, n = (embed(words) for words in triplets)
    return ((a - p).square().sum(1) - (a - n).square().sum(1) + margin).sum()


def check_words(words: Tensor, vocabulary: int) -> None:
    """Raises ``UserError`` if one of them has no row."""
    if len(words) and not 0 <= int(words.min()) <= int(words.max()) < vocabulary:
        bad = int(words.max()) if int(words.max()) >= vocabulary else int(words.min())
        raise UserError(
            f"id {bad} is not in the table, whose {vocabulary} rows are 0 to {vocabulary - 1}; "
            f"give model.vocabulary={max(bad + 1, 1)} or more, or leave the id out"
        )


class TripletData(pl.LightningDataModule):
    """Synthetic words: rank r occurs in proportion to (r + 10) ** -exponent.

    Args:
        vocabulary: V.
        classes: of words, dealt out at random.
        samples: of an epoch.
        exponent: of Zipf's law.
        batch_size: of each worker.
        seed: of the data.
    """

    @typed("data.")
    def __init__(
        self,
        vocabulary: Positive = 20_000,
        classes: Positive = 50,
        samples: Positive = 100_000,
        exponent: float = 1.0,
        batch_size: Positive = 250,
        seed: Natural = 0,
    ) -> None:
        super().__init__()
        if classes < 2 or vocabulary < 2 * classes:
            raise UserError(
                f"data.classes={classes} with data.vocabulary={vocabulary}: give at least 2 "
                "classes, and at least 2 words for each"
            )
        self.vocabulary, self.batch_size = vocabulary, batch_size
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(vocabulary, generator=generator)
        self.classes = order % classes  # (V,) by rank: each has as many words
        weights = (torch.arange(vocabulary) + 10.0) ** -exponent
        anchors = torch.multinomial(weights, samples, replacement=True, generator=generator)
        positives = self._partners(anchors, weights, generator)
        self.train = TensorDataset(anchors, positives, self.classes[anchors])
        rank_zero_info(f"{samples} samples of {vocabulary} words in {classes} classes were made.")

    def _partners(self, anchors: Tensor, weights: Tensor, generator: torch.Generator) -> Tensor:
        """For each word another one of its class, common ones more often."""
        partners = torch.empty_like(anchors)
        for number in range(int(self.classes.max()) + 1):
            words = (self.classes == number).nonzero().flatten()
            mine = (self.classes[anchors] == number).nonzero().flatten()
            chosen = torch.multinomial(
                weights[words], max(1, len(mine)), replacement=True, generator=generator
            )[: len(mine)]
            itself = words[chosen] == anchors[mine]
            chosen[itself] = (chosen[itself] + 1) % len(words)
            partners[mine] = words[chosen]
        return partners

    def train_dataloader(self) -> DataLoader[Batch]:
        """The samples, in another order each epoch."""
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        """Words of the samples, their classes, and their thirds."""
        words, bands = self._seen()
        return DataLoader(TensorDataset(words, self.classes[words], bands), batch_size=4096)

    def _seen(self) -> tuple[Tensor, Tensor]:
        """Words of the samples, and the numbers of their bands."""
        words = torch.cat(self.train.tensors[:2]).unique()
        return words, words * len(BANDS) // self.vocabulary

    @property
    def bands(self) -> list[int]:
        """The bands that have words to validate."""
        return self._seen()[1].unique().tolist()
