"""Local SGD: each worker trains on its own for some steps, then all take the mean.

Stich, *Local SGD Converges Fast and Communicates Little*, ICLR 2019 (arXiv:1805.09767), algorithm
1; McMahan et al., AISTATS 2017 (arXiv:1602.05629), who weigh by samples, as here. With an outer
optimizer over the masters it is DiLoCo (Douillard et al. 2023, arXiv:2311.08105).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from hybridtrain.exchanges.compression import Compressor, make_codec
from hybridtrain.exchanges.exchange import Local, Offer, StepsOwnParameters
from hybridtrain.exchanges.intervals import Interval, interval
from hybridtrain.exchanges.remembering import Remembering
from hybridtrain.options.exchange_options import MovementOptions
from hybridtrain.util.named_choice import BriefRepr


@dataclass(repr=False)
class Movement(Remembering, StepsOwnParameters, MovementOptions, BriefRepr):
    """Every ``every`` steps a worker hands over how far it has moved from the masters."""

    update: ClassVar[str] = "mean"
    keeps: ClassVar[bool] = False
    remembers: ClassVar[tuple[str, ...]] = ("since", "samples")
    _interval: Interval = field(init=False, repr=False)
    _since: int = field(default=0, init=False, repr=False)
    _samples: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._interval = interval(self.every)
        self.compress = codec = make_codec(self.compress)
        self.compressor = Compressor(codec)

    @property
    def steps(self) -> int:
        return self._interval.usual

    @property
    def owes(self) -> bool:
        return self._since > 0

    def check(self, n_workers: int, whole_rounds: bool) -> None:
        self._interval.check(n_workers, whole_rounds)

    def step(self, local: Local) -> Offer | None:
        local.step()
        self._samples += local.samples
        return self.skip(local)

    def skip(self, local: Local) -> Offer | None:
        self._since += 1
        return self.flush(local) if self._since >= self._interval.length(local) else None

    def take(self, local: Local, newest: Sequence[torch.Tensor]) -> None:
        torch._foreach_copy_(local.parameters, list(newest))

    def flush(self, local: Local) -> Offer | None:
        if not self._since:
            return None
        samples, self._since, self._samples = self._samples, 0, 0.0
        return self.compressor.offer(local.moved(), samples)

    def state(self) -> dict[str, Any]:
        return {**self._interval.state(), **super().state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._interval.load_state(state)
        super().load_state(state)
