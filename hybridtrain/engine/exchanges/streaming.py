"""Streaming DiLoCo: as local SGD, but one fragment at a time, while computing goes on.

Douillard et al., *Streaming DiLoCo with overlapping communication*, 2025 (arXiv:2501.18512),
algorithm 2. Every H steps each of P fragments p has its turn, H / P steps after the one before it;
what comes back is taken over τ steps later. With the masters w and a worker's own x::

    at its step t:      Δ_p = w_p - x_p, handed over;  w_p ← outer(w_p, mean Δ_p)
    behind step t + τ:  x_p ← α x_p + (1 - α) w_p

Where an epoch ends, each fragment is handed over, and all go on from the masters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from hybridtrain.engine.exchanges.compression import Compressor, make_codec
from hybridtrain.engine.exchanges.exchange import Await, Leaving, Local, Offer
from hybridtrain.engine.exchanges.own_steps import StepsOwnParameters
from hybridtrain.engine.options.exchange_options import StreamingOptions
from hybridtrain.errors import UserError
from hybridtrain.util.option_types import BriefRepr, as_typed

# ---- which parameters travel together, where they do not all travel at once ---------------------


def fragments_of(tensors: Sequence[torch.Tensor], number: int) -> list[list[int]]:
    """The places of each of so many fragments: layer i is part of fragment i mod ``number``.

    A layer is a tensor of two dimensions or more, and the smaller ones behind it. If there are
    fewer layers than fragments, each tensor is one.

    Raises:
        UserError: if there are fewer tensors than fragments.
    """
    check_tensors(len(tensors), number)
    layers: list[list[int]] = []
    for place, tensor in enumerate(tensors):
        if tensor.ndim > 1 or not layers:
            layers.append([])
        layers[-1].append(place)
    if len(layers) < number:
        layers = [[place] for place in range(len(tensors))]
    return [[p for layer in layers[first::number] for p in layer] for first in range(number)]


def check_tensors(n_tensors: int, number: int) -> None:
    """Each fragment has whole tensors, one at least.

    Raises:
        UserError: if there are too few.
    """
    if n_tensors < number:
        raise UserError(
            f"exchange.fragments={number} was given, but only {n_tensors} "
            f"parameter{'s are' if n_tensors != 1 else ' is'} trained, and a fragment has whole "
            f"ones; give from 1 to {n_tensors}"
        )


def check_fragments(every: int, number: int, overlap: int) -> None:
    """Check the options that need no parameters.

    Raises:
        UserError: naming the option that makes no sense.
    """
    if number > every:
        raise UserError(
            f"exchange.fragments={number} was given with every={every}, but each fragment has a "
            f"step of its own among these; give from 1 to {every}, or a larger every"
        )
    apart = every // number
    if overlap >= apart:
        raise UserError(
            f"exchange.overlap={overlap!r} was given; it must be a whole number from 0 to "
            f"{apart - 1}, for the next fragment travels after every / fragments = {every} / "
            f"{number} steps"
        )


@dataclass(repr=False)
class Streaming(StepsOwnParameters, StreamingOptions, BriefRepr):
    """Each fragment travels every ``every`` steps, one behind the other."""

    remembers: ClassVar[tuple[str, ...]] = ("steps", "sent", "samples", "flight")
    _steps: int = field(default=0, init=False, repr=False)  # since all have met
    _flight: int | None = field(default=None, init=False, repr=False)  # which fragment
    _meets: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fragments(self.every, self.fragments, self.overlap)
        self.compress = codec = make_codec(self.compress)
        self.compressor = Compressor(codec)
        turns = [(p + 1) * self.every // self.fragments for p in range(self.fragments)]
        self._turns = {turn % self.every: p for p, turn in enumerate(turns)}
        self._sent = [0] * self.fragments  # the step of each one's last offer
        self._samples = [0.0] * self.fragments  # used since then

    @property
    def steps(self) -> int:
        return self.every // self.fragments

    @property
    def has_unsent(self) -> bool:
        return self._steps > max(self._sent)

    def check(self, n_workers: int, whole_rounds: bool) -> None:
        if not whole_rounds:
            raise UserError(
                f"exchange={as_typed(self)} was given with a policy under which workers run "
                "freely, but the fragments that a worker does not exchange would move meanwhile; "
                "use policy=hybrid"
            )

    def check_tensors(self, n_tensors: int) -> None:
        """Raises ``UserError`` if so many parameters are too few."""
        check_tensors(n_tensors, self.fragments)

    def step(self, local: Local) -> Leaving:
        local.step()
        self._samples = [samples + local.samples for samples in self._samples]
        return self.skip(local)

    def skip(self, local: Local) -> Leaving:
        self._steps += 1
        if (due := self._turns.get(self._steps % self.every)) is not None:
            return self._handed_over(local, due, later=self.overlap > 0)
        waited = self._flight is not None and self._steps - self._sent[self._flight]
        return Await() if waited == self.overlap and self.overlap else None

    def take(self, local: Local, newest: Sequence[torch.Tensor]) -> Leaving:
        if self._flight is None:  # after all have met
            return None
        fragment, self._flight = self._flight, None
        for place in fragments_of(local.parameters, self.fragments)[fragment]:
            own = local.parameters[place]
            own.copy_(torch.lerp(newest[place], own, self.mix) if self.mix else newest[place])
        return self.flush(local) if self._meets else None

    def flush(self, local: Local) -> Leaving:
        if not self._steps:
            return None
        self._meets = True
        if self._flight is not None:
            return Await()
        for fragment, step in enumerate(self._sent):
            if step < self._steps:
                return self._handed_over(local, fragment, later=False)
        torch._foreach_copy_(local.parameters, list(local.masters))
        self._steps, self._sent, self._meets = 0, [0] * self.fragments, False
        return None

    def _handed_over(self, local: Local, fragment: int, later: bool) -> Offer:
        """A fragment's turn: it weighs the samples since its last one."""
        places = fragments_of(local.parameters, self.fragments)[fragment]
        values: list[torch.Tensor | None] = [None] * len(local.parameters)
        for place, moved in zip(places, local.moved(places), strict=True):
            values[place] = moved
        weight, told = self._samples[fragment], min(self._samples)  # since any was offered
        self._samples[fragment], self._sent[fragment] = 0.0, self._steps
        self._flight = fragment
        return replace(self.compressor.offer(values, weight), samples=told, later=later)
