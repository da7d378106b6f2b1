"""The later a gradient, the shorter its step."""

from __future__ import annotations

from dataclasses import dataclass

from hybridtrain.updates.staleness.correction import Correction
from hybridtrain.util.option_types import NotNegative


@dataclass
class ByStaleness(Correction):
    """The learning rate divided by the staleness: alpha_0 / max(1, tau).

    Zhang, Gupta, Lian, Liu, *Staleness-aware Async-SGD for Distributed Deep Learning*, IJCAI 2016
    (arXiv:1511.05950), section 3.2. With W workers nearly every gradient is W - 1 updates late, so
    a rate that is good for one worker stays stable for any number of them.
    """

    def factor(self, staleness: int) -> float:
        return 1.0 / max(1, staleness)


@dataclass
class Polynomial(Correction):
    """The learning rate times (1 + tau) ** -exponent.

    Xie, Koyejo, Gupta, *Asynchronous Federated Optimization*, 2019 (arXiv:1903.03934), section 5.2,
    where the exponent is 0.5.

    Args:
        exponent: from 0 on; 0 changes nothing.
    """

    exponent: NotNegative = 0.5

    def factor(self, staleness: int) -> float:
        return float((1 + staleness) ** -self.exponent)
