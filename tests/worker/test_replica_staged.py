"""Parameters of the next step come to a device while it computes, and wait for the release."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import nn

from hybridtrain.engine.memory import Layout, Store, Turns
from hybridtrain.engine.memory.counters import ChunkProgress
from hybridtrain.engine.memory.turns import Turning
from hybridtrain.engine.worker.device import Lane, Staged, transfers
from hybridtrain.engine.worker.device.cuda import CudaStreams
from hybridtrain.engine.worker.replica_staged import StagedReplica
from hybridtrain.errors import UserError
from tests.standin.device import name_it, take_counts
from tests.standin.state import NAME, state

pytestmark = pytest.mark.own_process
name_it()
HERE = torch.device(NAME, 0)
LAYERS = 4


@pytest.fixture(autouse=True)
def with_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "LEAST_BYTES", 64)


class Pair(NamedTuple):
    """A server and one worker, over the same memory."""

    net: nn.Module
    store: Store
    turns: Turns  # the server's
    replica: StagedReplica

    def release_ahead(self) -> None:
        self.turns.begin()
        self.replica.refresh()

    def begin_update(self) -> ChunkProgress:
        return ChunkProgress(self.store.progress, self.stops)

    @property
    def stops(self) -> list[int]:
        return [slot.offset + slot.numel for slot in self.store.layout.slots]

    def step(self, update: ChunkProgress, chunk: int, value: float) -> None:
        self.store.master(self.store.layout.slots[chunk]).fill_(value)
        update.ended(chunk)

    def make_update(self, value: float) -> None:
        update = self.begin_update()
        for chunk in range(LAYERS):
            self.step(update, chunk, value)
        self.turns.end()

    def values(self) -> set[float]:
        return {float(each) for p in self.net.parameters() for each in p.detach().cpu().flatten()}


def made(eagerness: float = 0.3, seed: int = 0) -> Pair:
    """All parameters and masters are 0; 16 x 16 each.

    ``eagerness``: of copies that nobody waits for; ``seed``: of their order.
    """
    state().lanes.begin_again(seed, eagerness)
    net = nn.ParameterList([nn.Parameter(torch.zeros(16, 16)) for _ in range(LAYERS)])
    layout = Layout.of(net.named_parameters())
    store = Store(layout, 1, False, turning=Turning(on_devices=True))
    own = Store(layout, 1, False, arena=store.arena, turning=Turning(on_devices=True))
    net.to(HERE)
    replica = StagedReplica(list(net.parameters()), own, 0, False, CudaStreams(HERE))
    replica.follow(range(LAYERS))
    assert store.turns is not None
    return Pair(net, store, store.turns, replica)


def test_host_memory_has_no_buffers_beside_the_masters() -> None:
    pair = made()
    assert pair.store.copies == []
    plain = Store(pair.store.layout, 1, False, turning=Turning())
    spared = 2 * sum(each.nbytes for each in pair.store.masters.values())
    assert len(plain.arena.memory) - len(pair.store.arena.memory) >= spared


def test_parameters_stay_as_they_are_until_the_next_release() -> None:
    pair = made()
    pair.release_ahead()
    assert pair.values() == {0.0}, "the first release ahead brings nothing new"
    for update in (1.0, 2.0, 3.0):
        pair.make_update(update)
        assert pair.replica.writes() == {}
        assert pair.values() == {update - 1}
        pair.release_ahead()
        assert pair.values() == {update}


def test_what_is_stepped_comes_to_the_device_while_the_rest_is_stepped() -> None:
    pair = made()
    pair.release_ahead()
    update = pair.begin_update()
    take_counts()
    for chunk in range(LAYERS - 1):
        pair.step(update, chunk, 1.0)
        assert pair.replica.take_stepped() is not None
        assert take_counts().bytes_to_device == 16 * 16 * 4
    pair.step(update, LAYERS - 1, 1.0)
    pair.turns.end()
    assert pair.replica.writes() == {}
    assert take_counts().bytes_to_device == 16 * 16 * 4, "each is copied once"
    assert pair.values() == {0.0}
    pair.release_ahead()
    assert take_counts().bytes_to_device == 0
    assert pair.values() == {1.0}


@pytest.mark.parametrize("seed", range(4))
def test_what_the_next_update_writes_before_the_release_arrives_is_not_seen(seed: int) -> None:
    pair = made(eagerness=0.0, seed=seed)
    pair.release_ahead()
    pair.make_update(1.0)
    assert pair.replica.writes() == {}  # the push follows
    pair.turns.begin()
    pair.make_update(2.0)
    pair.replica.refresh()
    assert pair.values() == {1.0}


def test_what_has_come_of_an_update_that_begins_anew_comes_again() -> None:
    pair = made(eagerness=1.0)
    pair.release_ahead()
    pair.step(pair.begin_update(), 0, 1.0)
    assert pair.replica.take_stepped() is not None
    pair.make_update(2.0)
    assert pair.replica.writes() == {}
    pair.release_ahead()
    assert pair.values() == {2.0}


def test_an_update_behind_a_release_that_has_not_arrived_is_not_taken() -> None:
    pair = made()
    pair.turns.begin()  # the worker still waits
    update = pair.begin_update()
    pair.step(update, 0, 1.0)
    assert pair.replica.take_stepped() is None
    pair.replica.refresh()
    assert pair.values() == {0.0}


def test_an_update_that_was_left_out_changes_nothing() -> None:
    pair = made()
    pair.release_ahead()
    pair.make_update(1.0)
    assert pair.replica.writes() == {}
    pair.release_ahead()
    pair.turns.end()  # an overflow: no update has begun
    assert pair.replica.writes() == {}
    pair.release_ahead()
    assert pair.values() == {1.0}


def test_in_lock_step_and_behind_an_epoch_the_parameters_are_the_masters() -> None:
    pair = made()
    pair.release_ahead()
    pair.make_update(1.0)
    pair.replica.take_stepped()
    assert pair.replica.writes() == {}
    pair.turns.show_newest()
    pair.replica.refresh()
    assert pair.values() == {1.0}
    update = pair.begin_update()
    for chunk in range(LAYERS):
        pair.step(update, chunk, 2.0)
    assert pair.replica.take_stepped() is None, "all is taken"
    pair.turns.show_newest()
    take_counts()
    pair.replica.refresh()
    assert take_counts().bytes_to_device == 0, "it lies in place, as no older ones were awaited"
    assert pair.values() == {2.0}
    pair.release_ahead()
    assert pair.values() == {2.0}


def test_the_masters_are_shown_and_put_away_again() -> None:
    pair = made()
    pair.release_ahead()
    pair.make_update(1.0)
    for _ in range(2):
        pair.replica.show_masters()
        pair.replica.show_masters()
        assert pair.replica.shows_masters and pair.values() == {1.0}
        (read,) = pair.replica.read_behind(0)
        assert read.device.type == "cpu" and bool((read == 0.0).all())
        pair.replica.put_back()
        assert not pair.replica.shows_masters and pair.values() == {0.0}
    assert pair.replica.writes() == {}
    pair.release_ahead()
    assert pair.values() == {1.0}


def test_a_write_is_found_before_the_push() -> None:
    pair = made()
    pair.release_ahead()
    pair.make_update(1.0)
    next(pair.net.parameters()).data.fill_(7.0)
    with pytest.raises(UserError, match="in the middle of an epoch"):
        pair.replica.writes()


def test_copies_to_spare_memory_do_not_wait_for_the_computation() -> None:
    state()
    streams = CudaStreams(HERE)
    parameter, source = torch.zeros(64, device=HERE), torch.ones(64)
    streams.lock(source)
    staged = Staged(streams, [parameter], [source])
    staged.reserve([0])
    known = streams.record(Lane.COMPUTE).mark.after[HERE.index]
    busy = parameter * 2
    staged.bring([0])
    assert streams.record(Lane.BACK).mark.after[HERE.index] == known
    staged.take([0])
    assert bool((parameter.cpu() == 1.0).all()) and bool((busy.cpu() == 0.0).all())
