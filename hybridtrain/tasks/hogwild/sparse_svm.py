"""``task=hogwild``: a sparse support vector machine, on text files or on examples that are made.

The objective is Σ max(0, 1 − y⟨w, x⟩) / N + μ ‖w‖² / (2 N): as in Hogwild!'s code, each example
has the share of the regularization that its features have, μ / (number of examples with it).

Legend: B examples of a mini-batch, N features in it that are not 0, F features.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
import torch
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hybridtrain.tasks.hogwild.text_examples import (
    Examples,
    InPlaceData,
    Rows,
    planted_examples,
    read_examples,
)
from hybridtrain.tasks.shared_tables import InPlaceModule, MakeOptimizer, array
from hybridtrain.util.option_types import Natural, NotNegative, Positive, Range, typed


class SparseSvm(InPlaceModule):
    """One weight for each feature.

    Args:
        mu: strength of the regularization, μ.
        rate, decay, compiled, optimizer: see :class:`InPlaceModule`.
    """

    reads = "examples"
    weights: nn.Embedding  # made by configure_model
    examples: Examples  # read by know
    test: Examples | None

    @typed("model.")
    def __init__(
        self,
        mu: NotNegative = 1.0,
        rate: float = 0.1,
        decay: float = 0.8,
        compiled: bool | Literal["auto"] = "auto",
        optimizer: MakeOptimizer | None = None,
    ) -> None:
        super().__init__(rate, decay, compiled, optimizer)
        self.mu = mu
        self._shrink = torch.empty(0)  # (F,)
        self.n_features, self.n_examples = 0, 1

    def know(self, data: ExamplesData) -> None:
        self.examples, self.test = data.examples, data.test
        self.n_features, self.n_examples = data.examples.n_features, len(data.examples)
        self.check_size(self.n_features, 1)
        self._shrink = self.mu / data.examples.degrees().float()

    def configure_model(self) -> None:
        """As many weights as the data have features."""
        if not hasattr(self, "weights"):
            self.weights = nn.Embedding(self.n_features, 1, sparse=True)
            nn.init.zeros_(self.weights.weight)

    def _margins(self, rows: Rows) -> Tensor:
        """(B,): how far examples are on the right side, below 0 on the wrong one."""
        labels, starts, features, values = rows
        return labels * sums(self.weights(features)[:, 0] * values, starts)

    def loss(self, batch: Tensor) -> Tensor:
        """Mean of the examples' (B,) shares of the objective."""
        labels, starts, features, values = self.examples.rows(batch)
        own = self.weights(features)[:, 0]  # (N,)
        hinge = (1 - labels * sums(own * values, starts)).clamp(min=0).sum()
        shrink = self._shrink.to(features.device)[features]
        return (hinge + 0.5 * (shrink * own.square()).sum()) / len(labels)

    def step_examples(self, batch: Tensor) -> None:
        from hybridtrain.tasks.hogwild import hogwild_kernels

        table, shrink = array(self.weights.weight)[:, 0], array(self._shrink)
        all_of = self.examples
        rows = all_of.labels, all_of.starts.view(np.uint64), all_of.features, all_of.values
        places = batch.numpy().view(np.uint64)
        hogwild_kernels.svm(table, places, rows, shrink, self.rate_now)

    @torch.no_grad()
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log ``val/objective`` of the examples trained on."""
        margins = self._margins(self.examples.rows(batch))
        hinge, wrong = (1 - margins).clamp(min=0).mean(), (margins <= 0).float().mean()
        size = 0.5 * self.mu * float(self.weights.weight.square().sum()) / self.n_examples
        found = {"val/objective": hinge + size, "val/error": wrong}
        self.log_dict(found, prog_bar=True, sync_dist=True, batch_size=len(batch))

    @torch.no_grad()
    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log ``test/error``: the share of examples on the wrong side."""
        assert self.test is not None, "the data give no mini-batches otherwise"
        wrong = (self._margins(self.test.rows(batch)) <= 0).float()
        self.log("test/error", wrong.mean(), sync_dist=True, batch_size=len(batch))


def sums(values: Tensor, starts: Tensor) -> Tensor:
    """Sums (B,) of the values (N,) of each example."""
    of = torch.repeat_interleave(torch.arange(len(starts) - 1, device=starts.device), starts.diff())
    return values.new_zeros(len(starts) - 1).index_add(0, of, values)


class ExamplesData(InPlaceData):
    """Examples from text files, or made.

    Args:
        files: libsvm or vowpal wabbit text to train on; None: examples are made.
        test_files: the same, to test on; features that training did not have weigh nothing.
        made: number of synthetic examples.
        features: of synthetic examples.
        batch_size: of each worker; a compiled step goes through it example by example.
        seed: of synthetic examples.
    """

    kind = "examples"

    @typed("data.")
    def __init__(
        self,
        files: str | list[str] | None = None,
        test_files: str | list[str] | None = None,
        made: Positive = 50_000,
        features: Annotated[int, Range(10)] = 10_000,
        batch_size: Positive = 500,
        seed: Natural = 0,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.test: Examples | None = None
        if files is None:
            whole = planted_examples(made + made // 5, features, seed)
            self.examples = _part(whole, 0, made)
            self.test = _part(whole, made, len(whole))
            rank_zero_info(f"{made} examples of {features} features were made; data.files=... else")
        else:
            self.examples = read_examples(files)
        if test_files is not None:
            self.test = read_examples(test_files)
            self.examples.n_features = max(self.examples.n_features, self.test.n_features)
        self.trained = self.validated = self.examples

    def test_dataloader(self) -> DataLoader[Any]:
        """Examples that were not trained on; none if there are none."""
        none: Any = []
        return DataLoader(none) if self.test is None else self.large_batches(self.test)


def _part(whole: Examples, first: int, last: int) -> Examples:
    begin, end = whole.starts[first], whole.starts[last]
    starts = whole.starts[first : last + 1] - begin
    features, values = whole.features[begin:end], whole.values[begin:end]
    return Examples(whole.labels[first:last], starts, features, values, whole.n_features)
