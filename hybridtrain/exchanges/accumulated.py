"""Downpour: each worker trains on its own, hands over what its gradients add up to, and fetches.

Dean et al., *Large Scale Distributed Deep Networks*, NIPS 2012, algorithm 1.1 of the appendix,
taken literally: step 0 pushes, so a fetch between two pushes forgets the steps since the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from hybridtrain.exchanges.compression import CodecSpec, Compressor, make_codec
from hybridtrain.exchanges.exchange import RESIDUALS, Local, Offer, Parameters
from hybridtrain.util.named_choice import BriefRepr, positive


@dataclass(repr=False)
class Accumulated(BriefRepr):
    """Hands the sum of its gradients over every ``n_push`` steps, and fetches every ``n_fetch``.

    ``compress``: how the sum is encoded, one of :data:`hybridtrain.exchanges.compression.CODECS`.
    """

    n_push: int = 1
    n_fetch: int = 1
    compress: CodecSpec = None
    parameters: ClassVar[Parameters] = "own"
    update: ClassVar[str] = "user"
    keeps: ClassVar[bool] = False
    _steps: int = field(default=0, init=False, repr=False)
    _samples: float = field(default=0.0, init=False, repr=False)
    _sums: dict[int, torch.Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        positive("exchange.n_push", self.n_push)
        positive("exchange.n_fetch", self.n_fetch)
        self.compress = make_codec(self.compress)
        self.compressor = Compressor(self.compress)

    @property
    def steps(self) -> int:
        return self.n_push

    @property
    def owes(self) -> bool:
        return bool(self._sums)

    def check(self, n_workers: int, whole_rounds: bool) -> None:
        """Any number is right."""

    def step(self, local: Local) -> Offer | None:
        for number, gradient in enumerate(local.gradients):
            if gradient is not None:
                known = self._sums.get(number)
                self._sums[number] = gradient.clone() if known is None else known + gradient
        self._samples += local.samples
        local.step()
        return self.skip(local)

    def skip(self, local: Local) -> Offer | None:
        pushes, fetches = self._steps % self.n_push == 0, (self._steps + 1) % self.n_fetch == 0
        self._steps += 1
        if pushes:
            return self._handed_over(local, fetches)
        return Offer([None] * len(local.parameters), 0.0) if fetches else None

    def take(self, local: Local, newest: Sequence[torch.Tensor]) -> None:
        torch._foreach_copy_(local.parameters, list(newest))

    def state(self) -> dict[str, Any]:
        return {"steps": self._steps, RESIDUALS: self.compressor.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._steps = state["steps"]
        self.compressor.load_state(state.get(RESIDUALS, {}))

    def flush(self, local: Local) -> Offer | None:
        return self._handed_over(local, fetches=True) if self._sums else None

    def _handed_over(self, local: Local, fetches: bool) -> Offer:
        values = [self._sums.get(number) for number in range(len(local.parameters))]
        samples, self._sums, self._samples = self._samples, {}, 0.0
        return self.compressor.offer(values, samples, fetches)
