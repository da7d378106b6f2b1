"""The memory of a run, once all workers have said what their parameters are."""

from __future__ import annotations

from collections.abc import Mapping

from hybridtrain.errors import UserError
from hybridtrain.memory import Store
from hybridtrain.messages import Share
from hybridtrain.policies import Regime


def shared_store(shares: Mapping[int, Share], n_workers: int, regime: Regime) -> Store:
    """What everybody's parameters need, with the rows that the policy asks for.

    Raises:
        UserError: if workers have different parameters.
    """
    first, share = next(iter(shares.items()))
    for worker, other in shares.items():
        if other != share:
            raise UserError(
                f"worker {worker} has other parameters than worker {first}; every worker must "
                "build the same module (same code, same seed, same configuration)"
            )
    private = not regime.lockstep
    return Store(share.layout, n_workers, private, None, share.averaging, regime.holds)
