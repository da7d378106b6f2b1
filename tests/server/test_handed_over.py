"""The bytes that workers hand over, counted by the server."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridtrain.engine.exchanges.compression import Compressor, make_codec
from hybridtrain.engine.memory import Layout, Store, pack
from hybridtrain.engine.worker.finite import FiniteCheck
from hybridtrain.engine.worker.replica_own import OwnReplica
from tests.support.served import Served

TABLE, WIDE = torch.zeros(50, 4), torch.zeros(3, dtype=torch.float64)


@pytest.mark.parametrize(
    ("told", "n_bytes"),
    [
        ({}, 50 * 4 * 4 + 3 * 8),
        ({"absent": (1,)}, 50 * 4 * 4),
        ({"absent": (0, 1)}, 0),
        ({"weight": 0.0}, 0),
    ],
)
def test_a_gradient_is_as_large_as_its_part_of_the_row(told: dict[str, Any], n_bytes: int) -> None:
    served = Served(1, parameters=(TABLE, WIDE))
    served.push(0, 1.0, **told)
    served.push(0, 1.0, **told)
    wanted = {"sent_bytes": 2 * n_bytes, "saved_bytes": 0}
    assert served.server.statistics.stats()["handed_over"] == wanted


def test_the_bytes_of_a_sparse_gradient_are_those_of_its_values_and_indices() -> None:
    served = Served(1, parameters=(TABLE, WIDE))
    rows = torch.tensor([[3, 17]])
    gradient = torch.sparse_coo_tensor(rows, torch.ones(2, 4), TABLE.shape, check_invariants=True)
    place = served.store.gradient(0, served.layout.slots[0])
    served.push(0, 1.0, packed=(pack(0, gradient, place),))
    found = served.server.statistics.stats()["handed_over"]
    assert found["sent_bytes"] == 2 * 4 * 4 + 2 * 8 + 3 * 8


def test_each_optimizer_hands_its_own_parameters_over() -> None:
    def first(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters[:1], lr=1.0)

    def second(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters[1:], lr=1.0)

    served = Served(1, parameters=(TABLE, WIDE), optimizers=(first, second))
    served.push(0, 1.0, optimizer=1)
    assert served.server.statistics.sent_bytes == 3 * 8
    served.push(0, 1.0, optimizer=0)
    assert served.server.statistics.sent_bytes == 3 * 8 + 50 * 4 * 4


def test_a_worker_writes_what_is_encoded_and_nothing_else_to_its_row() -> None:
    named = [("table", torch.nn.Parameter(TABLE)), ("wide", torch.nn.Parameter(WIDE))]
    store = Store(Layout.of(named), 2, private_parameters=False)
    replica = OwnReplica([parameter for _, parameter in named], store, 1)
    compressor, check = Compressor(make_codec("int8")), FiniteCheck(store, 1)
    values = [torch.randn(50, 4), torch.zeros(3, dtype=torch.float64)]
    offer = compressor.offer(values, 1.0)
    assert offer.encoded is not None and len(offer.encoded) == 204 + (8 + 3)
    assert replica.hand_over((0, 1), offer.values, offer.encoded) == ()
    front = store.front(1)
    assert torch.equal(front[:215], offer.encoded) and not front[215:].any()
    values[0][7, 1] = torch.inf  # what is not finite is judged as it is everywhere
    offer = compressor.offer(values, 1.0)
    absent = replica.hand_over((0, 1), offer.values, offer.encoded)
    assert check.offender((0, 1), absent) == 0 and check.count(0) == (1, 200)
    assert not any(row.any() for row in store.gradients[0].values())
