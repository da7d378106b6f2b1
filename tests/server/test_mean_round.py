"""The mean of all gradients, before anybody steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridtrain.engine.memory import Layout, Store
from hybridtrain.engine.protocol.events import Received, Removed, Restarted
from hybridtrain.engine.protocol.messages import Average, Averaged, Done, Gone, Install, Share
from hybridtrain.engine.server import mean_round
from hybridtrain.engine.server.mean_round import average
from hybridtrain.engine.updates.thread_pool import Pool
from tests.support.served import Served

F32, F64 = torch.float32, torch.float64


def store_of(n_workers: int) -> Store:
    """Two dtypes, and gradients in all rows; the mean holds what a step before has left."""
    tensors = {"a": torch.zeros(70, 3), "b": torch.zeros(40, dtype=F64), "c": torch.zeros(9)}
    store = Store(Layout.of(tensors.items()), n_workers, False, averaging=True)
    torch.manual_seed(0)
    for row in (*store.gradients, store.means):
        for flat in row.values():
            flat.normal_()
    return store


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("weights", [(1.0,), (0.0, 2.0), (2.0, 1.0, 4.0)])
def test_the_mean_is_summed_in_the_order_of_workers_whichever_thread_sums(
    monkeypatch: pytest.MonkeyPatch, weights: tuple[float, ...], lanes: int
) -> None:
    monkeypatch.setattr(mean_round, "_CHUNK", 32)
    store, pool = store_of(len(weights)), Pool(lanes)
    rows = [{dtype: flat.clone() for dtype, flat in row.items()} for row in store.gradients]
    asked = {worker: Average(weight) for worker, weight in enumerate(weights)}
    assert average(asked, store, pool) == Averaged(())
    pool.close()
    for dtype, mean in store.means.items():
        expected = torch.zeros_like(mean)
        for row, weight in zip(rows, weights, strict=True):
            expected.add_(row[dtype], alpha=weight / sum(weights))
        assert torch.equal(mean, expected)
        for row, before in zip(store.gradients, rows, strict=True):
            assert torch.equal(row[dtype], before[dtype])


def test_where_nobody_weighs_anything_there_is_no_mean() -> None:
    store = store_of(2)
    found = average({0: Average(0.0)}, store, Pool(1))
    assert found.absent == tuple(range(len(store.layout.slots)))


def test_what_a_lost_worker_has_brought_its_successor_brings_anew() -> None:
    served = Served(3, averaging=True)
    served.bring(0, 9.0)
    served.server.on(Removed(0, announced=True, returns=True))
    served.server.on(Restarted(0))
    assert served.bring(1, 2.0) == []
    assert served.bring(2, 3.0) == [], "the new process has not asked, and writes to this row"
    served.server.on(Received(0, Share(served.layout, averaging=True)))
    assert (0, Done()) in served.server.on(Received(0, Install()))
    assert served.bring(0, 1.0) == [(worker, Averaged(())) for worker in range(3)]
    assert served.store.means[F32][0] == 2.0


def test_nobody_waits_for_the_gradient_of_who_has_abstained_and_is_lost() -> None:
    served = Served(2, averaging=True)
    assert served.push(0, 0.0, weight=0.0) == []
    served.server.on(Removed(0, announced=True, returns=True))
    assert served.bring(1, 2.0) == [(1, Averaged(()))], "nobody comes back before the update"
    assert [worker for worker, _ in served.push(1, 2.0)] == [0, 1]


def lost(served: Served, worker: int, returns: bool) -> list[tuple[int, Any]]:
    return served.server.on(Removed(worker, announced=True, returns=returns))


@pytest.mark.parametrize("abstains", [False, True])
def test_the_samples_of_a_worker_lost_behind_the_mean_are_done(abstains: bool) -> None:
    served = Served(3, averaging=True)
    served.bring(0, 1.0)
    served.bring(1, 3.0)
    served.push(2, 0.0, weight=0.0) if abstains else served.bring(2, 5.0)
    mean = served.store.means[F32][0].item()
    news = Gone(1, version=1)  # the update to come
    assert lost(served, 1, returns=False)[:2] == [(0, news), (2, news)]
    served.push(0, mean, averaged=True)
    served.push(2, mean, averaged=True) if not abstains else None
    assert served.server.statistics.version == 1 and served.value() == -mean
    assert served.server.statistics.samples == 2.0 + (not abstains)


@pytest.mark.parametrize("abstains", [False, True])
def test_a_successor_gets_the_mean_that_the_others_have(abstains: bool) -> None:
    served = Served(3, averaging=True)
    served.bring(0, 1.0)
    served.bring(1, 3.0)
    served.push(2, 0.0, weight=0.0) if abstains else served.bring(2, 5.0)
    mean = served.store.means[F32][0].item()
    assert (0, Gone(1, 0, for_now=True)) in lost(served, 1, returns=True)
    served.server.on(Restarted(1))
    served.server.on(Received(1, Share(served.layout, averaging=True)))
    served.server.on(Received(1, Install()))
    assert served.bring(1, 9.0) == [(1, Averaged(()))]
    assert served.store.means[F32][0] == mean
