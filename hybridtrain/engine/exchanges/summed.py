"""Sandblaster: each worker adds up its portions' gradients, and hands the sum over at the end.

Dean et al., *Large Scale Distributed Deep Networks*, NIPS 2012, algorithm 1.2 of the appendix: an
epoch is one evaluation of the whole loss, at a point that the update asks for. A portion is a
mini-batch; the shared queue gives the next one to the worker that is free. Workers stand still
meanwhile, so the mean over all of them, weighted by samples, is the loss and its gradient.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from hybridtrain.engine.exchanges.exchange import Leaving, Local, Offer
from hybridtrain.engine.exchanges.own_steps import StepsOwnParameters
from hybridtrain.engine.options.exchange_options import ExchangeOptions
from hybridtrain.errors import UserError
from hybridtrain.util.option_types import BriefRepr, as_typed

_SHORT = 0.5  # the share of a portion's samples from which on another one is short
_ALIKE = 0.2  # by which share a loss may differ from a sum's


@dataclass(repr=False)
class Summed(StepsOwnParameters, ExchangeOptions, BriefRepr):
    """Hands over the mean gradient and loss of all portions of a pass, once.

    A portion that is computed for nothing (training stops within the pass) is not handed over.
    """

    update: ClassVar[str] = "lbfgs"
    evaluates: ClassVar[bool] = True
    _samples: float = field(default=0.0, init=False, repr=False)
    _loss: float = field(default=0.0, init=False, repr=False)
    _largest: float = field(default=0.0, init=False, repr=False)  # samples of a portion
    _warned: bool = field(default=False, init=False, repr=False)
    _sums: dict[int, torch.Tensor] = field(default_factory=dict, init=False, repr=False)  # float64

    @property
    def has_unsent(self) -> bool:
        return self._samples > 0

    def check(self, n_workers: int, whole_rounds: bool) -> None:
        if whole_rounds:
            raise UserError(
                f"exchange={as_typed(self)} was given with a policy under which all workers step "
                "together, but it hands over one sum for each epoch; use strategy=sandblaster"
            )

    def step(self, local: Local) -> Leaving:
        for number, gradient in enumerate(local.gradients):
            if gradient is None:
                continue
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            if number not in self._sums:
                self._sums[number] = torch.zeros_like(dense, dtype=torch.float64)
            self._sums[number].add_(dense, alpha=local.samples)
        self._compare(local)
        self._samples += local.samples
        self._loss += local.loss * local.samples
        return None

    def _compare(self, local: Local) -> None:
        """Warn, once, of a loss that is smaller the fewer samples a portion has."""
        self._largest = max(self._largest, local.samples)
        share = local.samples / self._largest
        if self._warned or not self._loss or share > _SHORT:
            return
        if abs(local.loss / (self._loss / self._samples) / share - 1) < _ALIKE:
            self._warned = True
            warnings.warn(
                f"{local.samples:g} samples of a portion have about {share:.2g} of the loss that "
                f"{self._largest:g} have, as if the loss was their sum; it must be their mean "
                '(reduction="mean"), for portions are weighted by their samples',
                stacklevel=2,
            )

    def skip(self, local: Local) -> Leaving:
        return None

    def flush(self, local: Local) -> Leaving:
        if not self._samples:
            return None
        places = range(len(local.parameters))
        means = [
            (self._sums[n] / self._samples).to(local.parameters[n].dtype)
            if n in self._sums
            else None
            for n in places
        ]
        made = Offer(means, self._samples, loss=self._loss / self._samples)
        self._samples, self._loss, self._sums = 0.0, 0.0, {}
        return made
