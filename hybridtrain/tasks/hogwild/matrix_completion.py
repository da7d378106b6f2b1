"""``task=hogwild model=completion data=ratings``: a matrix of which few entries are known.

The objective is Σ ((⟨l_u, r_i⟩ + mean − rating)² / 2) / N + μ (‖L‖² + ‖R‖²) / (2 N).

Legend: U users, I items, D numbers of each, B ratings of a mini-batch, N in all.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import torch
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor, nn

from hybridtrain.errors import UserError
from hybridtrain.tasks.hogwild.text_examples import Batch, InPlaceData, Triples, read_triples
from hybridtrain.tasks.shared_tables import InPlaceModule, MakeOptimizer, array
from hybridtrain.util.option_types import Natural, NotNegative, Positive, Range, typed


class MatrixCompletion(InPlaceModule):
    """A vector for each user and for each item, whose product is the rating.

    Args:
        dim: D.
        mu: strength of the regularization, μ, for one row.
        rate, decay, compiled, optimizer: see :class:`InPlaceModule`.
        seed: of the first vectors.
    """

    reads = "ratings"
    left: nn.Embedding  # of the users; made by configure_model, as the items'
    right: nn.Embedding

    @typed("model.")
    def __init__(
        self,
        dim: Positive = 10,
        mu: NotNegative = 0.1,
        rate: float = 0.05,
        decay: float = 0.9,
        compiled: bool | Literal["auto"] = "auto",
        optimizer: MakeOptimizer | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(rate, decay, compiled, optimizer)
        self.dim, self.mu, self.seed = dim, mu, seed
        self.users, self.items, self.mean = 0, 0, 0.0
        self._shrink = (torch.empty(0), torch.empty(0))

    def know(self, data: RatingsData) -> None:
        self.users, self.items = data.users, data.items
        self.check_size(self.users + self.items, self.dim, 2 * len(data.ratings))
        self.mean = float(data.ratings.values.mean())
        sides = ((data.ratings.ones, data.users), (data.ratings.others, data.items))
        counts = [np.maximum(np.bincount(rows, minlength=n), 1) for rows, n in sides]
        one, other = (self.mu / torch.from_numpy(each).float() for each in counts)
        self._shrink = (one, other)

    def configure_model(self) -> None:
        """As many rows as the data have users and items."""
        if hasattr(self, "left"):
            return
        generator = torch.Generator().manual_seed(self.seed)
        self.left = nn.Embedding(self.users, self.dim, sparse=True)
        self.right = nn.Embedding(self.items, self.dim, sparse=True)
        for table in (self.left, self.right):
            nn.init.normal_(table.weight, std=self.dim**-0.5, generator=generator)

    def errors(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Errors of the ratings (B,), and the rows (B, D) of their products."""
        left, right = self.left(batch[1]), self.right(batch[2])
        return (left * right).sum(1) + self.mean - batch[0], left, right

    def loss(self, batch: Batch) -> Tensor:
        """Mean of the ratings' shares of the objective."""
        error, left, right = self.errors(batch)
        pairs = zip(self._shrink, batch[1:], strict=True)
        shrink = (each.to(rows.device)[rows] for each, rows in pairs)
        sizes = sum(s * t.square().sum(1) for s, t in zip(shrink, (left, right), strict=True))
        return 0.5 * (error.square() + sizes).mean()

    def step_examples(self, batch: Batch) -> None:
        from hybridtrain.tasks.hogwild import hogwild_kernels

        ratings, users, items = (each.numpy() for each in batch)
        left, right = array(self.left.weight), array(self.right.weight)
        one, other = (array(each) for each in self._shrink)
        centred = ratings - np.float32(self.mean)
        kernel = hogwild_kernels.completion
        kernel(left, right, users, items, centred, one, other, self.rate_now)

    @torch.no_grad()
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log ``val/mse``: of ratings that were not trained on."""
        mse = self.errors(batch)[0].square().mean()
        self.log("val/mse", mse, prog_bar=True, sync_dist=True, batch_size=len(batch[0]))


class RatingsData(InPlaceData):
    """``user item rating`` from text files, or made: a matrix of rank 3 with some noise.

    Args:
        files: text; None: ratings are made.
        users, items: rows of the tables; None: one more than the largest of the files, or 500.
        known: share of the entries of a synthetic matrix that are given.
        held_out: the share of the ratings to validate on.
        batch_size: of each worker.
        seed: of synthetic ratings, and of those held out.
    """

    kind = "ratings"

    @typed("data.")
    def __init__(
        self,
        files: str | list[str] | None = None,
        users: Positive | None = None,
        items: Positive | None = None,
        known: Annotated[float, Range(0, 1, "(")] = 0.1,
        held_out: Annotated[float, Range(0, 1, "()")] = 0.1,
        batch_size: Positive = 1000,
        seed: Natural = 0,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        if files is None:
            users, items = users or 500, items or 500
            whole = made_ratings(users, items, known, seed)
            rank_zero_info(f"{len(whole)} ratings were made; data.files=... reads yours")
        else:
            whole = read_triples(files, ("user", "item", "rating"), (users, items))
        self.users = users or int(whole.ones.max()) + 1
        self.items = items or int(whole.others.max()) + 1
        order = np.random.default_rng(seed).permutation(len(whole))
        cut = max(1, int(held_out * len(whole)))
        if cut >= len(whole):
            raise UserError(f"data.files: {len(whole)} ratings are too few to hold some out")
        self.trained = self.ratings = whole.part(order[cut:])
        self.validated = self.held_out = whole.part(order[:cut])


def made_ratings(users: int, items: int, known: float, seed: int) -> Triples:
    """Some entries of a matrix of rank 3, with noise of 0.1."""
    random = np.random.default_rng(seed)
    left, right = random.standard_normal((users, 3)), random.standard_normal((items, 3))
    places = random.choice(users * items, max(2, int(known * users * items)), replace=False)
    ones, others = np.divmod(places, items)
    values = (left[ones] * right[others]).sum(1) + 0.1 * random.standard_normal(len(places)) + 3
    return Triples(values.astype(np.float32), ones, others)
