"""Local SGD: each worker trains on its own for some steps, then all take the mean.

Stich, *Local SGD Converges Fast and Communicates Little*, ICLR 2019 (arXiv:1805.09767), algorithm
1; McMahan et al., AISTATS 2017 (arXiv:1602.05629), who weigh by samples, as here. With an outer
optimizer over the masters it is DiLoCo (Douillard et al. 2023, arXiv:2311.08105).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from hybridtrain.engine.exchanges.compression import Compressor, make_codec
from hybridtrain.engine.exchanges.exchange import Local, Offer
from hybridtrain.engine.exchanges.own_steps import StepsOwnParameters
from hybridtrain.engine.options.exchange_options import Every, MovementOptions
from hybridtrain.errors import UserError
from hybridtrain.util.option_types import BriefRepr

# ---- how many steps of its own a worker makes between two exchanges -----------------------------


@dataclass
class Fixed:
    """So many steps for each worker, or one number for all.

    ``said``: what the user has given for each worker, option and value; ``None``: it is for all.
    """

    lengths: tuple[int, ...]
    said: str | None = None

    @property
    def usual(self) -> int:
        """Steps between two exchanges, of an average worker, in the end."""
        return max(round(sum(self.lengths) / len(self.lengths)), 1)

    def check(self, n_workers: int, whole_rounds: bool) -> None:
        """Raises ``UserError`` if it makes no sense for so many workers under such a policy."""
        if self.said is not None and len(self.lengths) != n_workers:
            raise UserError(
                f"{self.said} was given, but there are {n_workers} workers; give a number for "
                "each, or exchange.every=N for all"
            )
        if whole_rounds and len(set(self.lengths)) > 1:
            raise UserError(
                f"{self.said} was given, but all workers step equally often under this policy, and "
                "would wait for the one with the most steps; give exchange.every=N, or use "
                "policy=async or grace"
            )

    def length(self, local: Local) -> int:
        """Asked once after each step of this worker: steps between its exchanges, as of now."""
        return self.lengths[0 if self.said is None else local.worker]

    def state(self) -> dict[str, Any]:
        """Nothing is kept for a checkpoint."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing is remembered."""


@dataclass
class Later:
    """``first`` steps until step ``at``, or until the learning rate first falls, ``then`` more.

    Post-local SGD: Lin, Stich, Patel, Jaggi, *Don't Use Large Mini-Batches, Use Local SGD*, ICLR
    2020 (arXiv:1808.07217). A rate that rises (a warm-up) has not fallen.
    """

    then: int
    at: int | Literal["first_decay"]
    first: int = 1
    _steps: int = field(default=0, init=False, repr=False)
    _highest: float = field(default=0.0, init=False, repr=False)
    _over: bool = field(default=False, init=False, repr=False)

    @property
    def usual(self) -> int:
        return self.then

    def check(self, n_workers: int, whole_rounds: bool) -> None:
        """Every number of workers will do."""

    def length(self, local: Local) -> int:
        now = self.then if self._over else self.first
        self._steps += 1
        if isinstance(self.at, int):
            self._over = self._steps >= self.at
        else:
            self._over = self._over or local.rate < self._highest
            self._highest = local.rate  # they have not fallen before
        return now

    def state(self) -> dict[str, Any]:
        return {"steps": self._steps, "highest": self._highest, "over": self._over}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._steps, self._highest = state["steps"], state["highest"]
        self._over = state["over"]


Interval = Fixed | Later


def interval(given: Every) -> Interval:
    """From a number, one for each worker, or what changes them.

    ``{then: 16, at: 1000}``: every step (or every ``first`` steps) until step 1,000, then every 16;
    ``at: first_decay``: until the learning rate falls. ``{longest: 32, seconds_per_step: [1, 2]}``:
    as many steps as each worker makes while the fastest makes 32 (DyLU: Liu et al. 2024,
    arXiv:2401.09135, section 5).
    """
    if isinstance(given, int):
        return Fixed((given,))
    if not isinstance(given, Mapping):
        return Fixed(tuple(given), f"exchange.every={list(given)}")
    return Later(**given) if "then" in given else _by_speed(**given)


def _by_speed(longest: int, seconds_per_step: Sequence[float]) -> Fixed:
    """The slower a worker, the fewer steps, so that all come at about the same time."""
    fastest = min(seconds_per_step)
    lengths = tuple(max(int(fastest / time * longest), 1) for time in seconds_per_step)
    return Fixed(lengths, f"exchange.every.seconds_per_step={list(seconds_per_step)}")


@dataclass(repr=False)
class Movement(StepsOwnParameters, MovementOptions, BriefRepr):
    """Every ``every`` steps a worker hands over how far it has moved from the masters."""

    remembers: ClassVar[tuple[str, ...]] = ("since", "samples")
    _interval: Interval = field(init=False, repr=False)
    _since: int = field(default=0, init=False, repr=False)
    _samples: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._interval = interval(self.every)
        self.by_rate = isinstance(self._interval, Later) and self._interval.at == "first_decay"
        self.compress = codec = make_codec(self.compress)
        self.compressor = Compressor(codec)

    @property
    def steps(self) -> int:
        return self._interval.usual

    @property
    def has_unsent(self) -> bool:
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
