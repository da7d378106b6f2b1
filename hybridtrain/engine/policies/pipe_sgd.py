"""Lock-step, one update behind: workers compute the next gradient while the update is made.

    w(t+1) = w(t) - u(gradient at w(t-1))

Li et al., *Pipe-SGD: A Decentralized Pipelined SGD Framework for Distributed Deep Net Training*,
NeurIPS 2018 (arXiv:1811.03619), with a pipeline width of 2; the *delayed parameter update* of
Ren et al., *ZeRO-Offload*, USENIX ATC 2021, section 5.2, which begins after a warm-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hybridtrain.engine.policies.basic import WaitForAll
from hybridtrain.engine.policies.policy import Needs
from hybridtrain.engine.protocol.facts import Apply, Began, Fact, Order, Release, ReleaseThenApply
from hybridtrain.errors import UserError
from hybridtrain.util.option_types import Checked, Natural


@dataclass
class PipeSGD(Checked, WaitForAll):
    """As ``WaitForAll``, but a round's workers are released before its update is made.

    Every gradient is computed with the parameters of one update before, but the first one of an
    epoch: where all workers meet at its end, they continue from the newest parameters.

    Args:
        delay: updates that gradients are behind: 1, or 0 (``hybrid``).
        warm_up: so many updates are made in lock-step first. (Ren et al. take 40.)
        extrapolate: workers read the masters and their last movement once more, which is where they
            will be, about, when the gradient is applied; else the masters.
        compress: what workers read moves by encoded steps, a quarter or an eighth of the bytes to
            other hosts; what is left out of one is in the next.

    Raises:
        UserError: if ``delay`` is neither 0 nor 1.
    """

    delay: Natural = 1
    warm_up: Natural = 40
    extrapolate: bool = False
    compress: Literal["int8", "int4"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delay > 1:
            raise UserError(
                f"pipe_sgd: delay={self.delay} was given; it is 1 (the update is made beside the "
                "next gradient) or 0 (hybrid): with a larger delay no device would wait less, and "
                "gradients would be later; use 1, or policy=ssp for workers that run ahead"
            )

    def begin(self, n_workers: int) -> Needs:
        needs, self._updates = super().begin(n_workers), 0
        if not self.delay:
            return needs
        needs = replace(needs, everyone=False, delay=self.delay, encodes=self.compress)
        return replace(needs, extrapolates=self.extrapolate, delay_from=self.warm_up)

    def on(self, fact: Fact) -> Sequence[Order]:
        if isinstance(fact, Began):
            self._updates = fact.version
        orders = super().on(fact)
        if not orders or not self.delay:
            return orders
        late = self._updates >= self.warm_up
        self._updates += 1
        apply, _ = orders
        assert isinstance(apply, Apply), "a round ends with an update"
        return (ReleaseThenApply(apply.workers),) if late else (apply, Release(apply.workers))
