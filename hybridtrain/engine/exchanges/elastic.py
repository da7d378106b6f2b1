"""Elastic averaging: workers explore on their own, tied to a centre by an elastic force.

Zhang, Choromanska, LeCun, *Deep learning with Elastic Averaging SGD*, NIPS 2015 (arXiv:1412.6651):
algorithm 1, and with all workers at once its synchronous form. The masters are the centre x̃::

    d = α (x_i - x̃);  x_i ← x_i - η g(x_i) - d;  x̃ ← x̃ + d

``d`` is that of the parameters before the step. EAMSGD is the same with a Nesterov momentum in the
module's own optimizer. Where an epoch ends, each worker and the centre move towards each other once
more, without a step, if the worker has made steps since the last time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from hybridtrain.engine.exchanges.exchange import Local, Offer
from hybridtrain.engine.exchanges.own_steps import StepsOwnParameters
from hybridtrain.engine.options.exchange_options import ElasticOptions


@dataclass
class Elastic(StepsOwnParameters, ElasticOptions):
    """Every ``every`` steps a worker and the centre move towards each other."""

    update: ClassVar[str] = "sum"
    keeps: ClassVar[bool] = True
    remembers: ClassVar[tuple[str, ...]] = ("steps", "since", "samples")
    _steps: int = field(default=0, init=False, repr=False)
    _since: int = field(default=0, init=False, repr=False)  # steps since the last offer
    _samples: float = field(default=0.0, init=False, repr=False)
    _asks: bool = field(default=False, init=False, repr=False)  # for the centre ...
    _steps_then: bool = field(default=False, init=False, repr=False)  # ... before a step

    @property
    def steps(self) -> int:
        return self.every

    @property
    def has_unsent(self) -> bool:
        """Never: a worker does not hand over what it has come to, and goes on from there itself."""
        return False

    def step(self, local: Local) -> Offer | None:
        self._steps, self._since = self._steps + 1, self._since + 1
        self._samples += local.samples
        if self._steps % self.every:
            local.step()
            return None
        return self._drawn(local, steps=True)

    def _drawn(self, local: Local, steps: bool) -> Offer:
        """The worker and the centre move towards each other, once it knows where that is."""
        self._steps_then = steps
        if local.fresh:
            return self._pulled(local, local.masters)
        self._asks = True
        return Offer([None] * len(local.parameters), 0.0)

    def skip(self, local: Local) -> Offer | None:
        """Offer a force though there was no step, if the worker has made one since the last."""
        self._steps, self._since = self._steps + 1, self._since + 1
        if self._steps % self.every or not local.fresh:
            return None
        if self._samples:
            return self._drawn(local, steps=False)
        self._since = 0
        return Offer([None] * len(local.parameters), 0.0)

    def take(self, local: Local, newest: Sequence[torch.Tensor]) -> Offer | None:
        if not self._asks:
            return None
        self._asks = False
        return self._pulled(local, newest)

    def _pulled(self, local: Local, centre: Sequence[torch.Tensor]) -> Offer:
        alpha = self.beta / local.workers if self.alpha is None else self.alpha
        force = torch._foreach_sub(list(centre), local.parameters)
        torch._foreach_mul_(force, alpha)
        if self._steps_then:
            local.step()
        torch._foreach_add_(local.parameters, force)
        samples, self._samples, self._since = self._samples, 0.0, 0
        return Offer(force, samples, fetch=local.fresh)

    def flush(self, local: Local) -> Offer | None:
        """Where all meet in mid-epoch, each stays where it is; only what it has used is told."""
        if not self._since:
            return None
        if local.ends and self._samples:
            return self._drawn(local, steps=False)
        samples, self._samples, self._since = self._samples, 0.0, 0
        others_moved = local.ends and local.fresh  # also on a host where nobody has had samples
        return Offer([None] * len(local.parameters), 0.0, fetch=others_moved, samples=samples)
