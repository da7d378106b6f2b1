"""Downpour: each worker trains on its own, hands over what its gradients add up to, and fetches.

Dean et al., *Large Scale Distributed Deep Networks*, NIPS 2012, algorithm 1.1 of the appendix,
taken literally: step 0 pushes, so a fetch between two pushes forgets the steps since the last.

Overlapped, a fetch is asked for behind one step and taken over within the next: while it is under
way the worker computes a gradient at what it has, and steps what has come with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from hybridtrain.engine.exchanges.compression import Compressor, make_codec
from hybridtrain.engine.exchanges.exchange import Await, Leaving, Local, Offer
from hybridtrain.engine.exchanges.own_steps import StepsOwnParameters
from hybridtrain.engine.options.exchange_options import AccumulatedOptions
from hybridtrain.util.option_types import BriefRepr


@dataclass(repr=False)
class Accumulated(StepsOwnParameters, AccumulatedOptions, BriefRepr):
    """Hands the sum of its gradients over every ``n_push`` steps, and fetches every ``n_fetch``."""

    update: ClassVar[str] = "user"
    remembers: ClassVar[tuple[str, ...]] = ("steps", "since", "samples", "asked", "sums")
    _steps: int = field(default=0, init=False, repr=False)
    _since: int = field(default=0, init=False, repr=False)  # steps since the last push and fetch
    _samples: float = field(default=0.0, init=False, repr=False)
    _asked: bool = field(default=False, init=False, repr=False)  # a fetch is under way
    _awaits: bool = field(default=False, init=False, repr=False)  # in the middle of a step ...
    _has_data: bool = field(default=False, init=False, repr=False)  # ... of its own
    _sums: dict[int, torch.Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.compress = codec = make_codec(self.compress)
        self.compressor = Compressor(codec)

    @property
    def steps(self) -> int:
        return self.n_push

    @property
    def has_unsent(self) -> bool:
        return bool(self._sums)

    def step(self, local: Local) -> Leaving:
        for number, gradient in enumerate(local.gradients):
            if gradient is not None:
                known = self._sums.get(number)
                more = gradient.clone() if known is None else known.to(gradient) + gradient
                self._sums[number] = more
        self._samples += local.samples
        return self._advance(local, has_data=True)

    def skip(self, local: Local) -> Leaving:
        return self._advance(local, has_data=False)

    def _advance(self, local: Local, has_data: bool) -> Leaving:
        if self._asked:
            self._awaits, self._has_data = True, has_data
            return Await()
        if has_data:
            local.step()
        pushes, fetches = self._steps % self.n_push == 0, (self._steps + 1) % self.n_fetch == 0
        self._steps, self._since = self._steps + 1, self._since + 1
        self._asked = fetches and self.fetch is not None
        if pushes:
            return self._handed_over(local, fetches, self._asked)
        nothing = [None] * len(local.parameters)
        return Offer(nothing, 0.0, later=self._asked) if fetches else None

    def take(self, local: Local, newest: Sequence[torch.Tensor]) -> Leaving:
        super().take(local, newest)
        asked, self._asked = self._asked, False
        if self._awaits:
            self._awaits = False
            return self._advance(local, self._has_data)
        return self.flush(local) if asked else None

    def flush(self, local: Local) -> Leaving:
        if self._asked:
            return Await()
        # In lock-step also without a sample since the last push: all go on from the same masters.
        has_unsent = self._since if local.fresh else self._sums
        return self._handed_over(local, fetches=True, later=False) if has_unsent else None

    def _handed_over(self, local: Local, fetches: bool, later: bool) -> Offer:
        values = [self._sums.get(number) for number in range(len(local.parameters))]
        samples, self._sums, self._samples = self._samples, {}, 0.0
        self._since = 0 if fetches else self._since
        return replace(self.compressor.offer(values, samples, fetches), later=later)
