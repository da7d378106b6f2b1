"""A worker's own parameters, and how far they have moved from the masters."""

from __future__ import annotations

import torch

from hybridtrain.engine.memory import Layout, Store
from hybridtrain.engine.worker.replica_own import OwnReplica


def test_what_is_handed_over_is_made_where_it_is_handed_over() -> None:
    """A copy less of all parameters; what does not leave stays as it is."""
    parameters = [torch.nn.Parameter(torch.full((n, 3), float(n))) for n in (2, 4)]
    layout = Layout.of([(str(n), parameter) for n, parameter in enumerate(parameters)])
    store = Store(layout, 1, False)
    first, second = layout.slots
    store.master(second).fill_(5.0)
    store.gradient(0, first).fill_(7.0)
    replica = OwnReplica(parameters, store, 0)
    (moved,) = replica.moved([1])
    assert moved.data_ptr() == store.gradient(0, second).data_ptr()
    assert replica.hand_over([0, 1], [None, moved]) == (0,)
    assert torch.equal(store.gradient(0, second), torch.ones(4, 3))
    assert torch.equal(store.gradient(0, first), torch.full((2, 3), 7.0))
