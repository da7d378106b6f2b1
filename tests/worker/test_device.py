"""Beside the computation, on a device that does everything as late and as oddly as it may.

For what that is see ``tests/standin``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from hybridtrain.engine.memory import Layout, Store, UpdateMaker
from hybridtrain.engine.worker.device import KINDS, Incoming, Outgoing, transfers
from hybridtrain.engine.worker.device.cuda import CudaStreams
from hybridtrain.engine.worker.replica_cuda import CudaReplica
from hybridtrain.engine.worker.replica_own import OwnReplica
from tests.picking import by_default
from tests.standin.device import name_it
from tests.standin.state import NAME, SETTINGS, lazy_init, state

pytestmark = pytest.mark.own_process
name_it()
HERE = torch.device(NAME, 0)

SEEDS = range(5)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "LEAST_BYTES", 64)


def numbers(n: int) -> torch.Tensor:
    return torch.arange(1.0, n + 1, device=HERE)


def open_streams(seed: int = 0, eagerness: float = 0.3) -> CudaStreams:
    state().lanes.begin_again(seed, eagerness)
    state().locked.clear()
    return CudaStreams(HERE)


def made_there(kind: Callable[[], nn.Module]) -> nn.Module:
    lazy_init()
    with HERE:
        return kind()


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.cpu(), other.cpu())


def lock(streams: CudaStreams, tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        assert streams.lock(tensor) == ""


# ---- gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", by_default(SEEDS, *SEEDS[:2]))
def test_buckets_arrive_in_their_order_and_each_is_whole(seed: int) -> None:
    streams = open_streams(seed)
    rows = [torch.zeros(10) for _ in range(9)]
    lock(streams, rows)
    going = Outgoing(streams, rows)
    arrived: list[int] = []
    for number in range(9):
        going.add(number, numbers(10) * number)
    going.close()
    while (bucket := going.arrived()) is not None:
        arrived += bucket.numbers
        assert all(same(rows[n], numbers(10) * n) for n in bucket.numbers)
    assert arrived == list(range(9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bucket_is_as_large_as_what_travels(dtype: torch.dtype) -> None:
    streams, rows = open_streams(), [torch.zeros(16, dtype=dtype) for _ in range(8)]
    lock(streams, rows)
    going, found = Outgoing(streams, rows), []
    for number in range(8):
        going.add(number, numbers(16))
    going.close()
    while (bucket := going.arrived()) is not None:
        found.append(len(bucket.numbers))
    assert found == [64 // rows[0].nbytes] * (8 * rows[0].nbytes // 64)


def test_a_narrow_row_gets_what_is_nearest() -> None:
    streams, row = open_streams(), torch.zeros(2, dtype=torch.bfloat16)
    lock(streams, [row])
    going = Outgoing(streams, [row])
    going.add(0, torch.tensor([1.0 + 2**-9, 1.0 + 3 * 2**-9], device=HERE))
    going.close()
    assert going.arrived() is not None
    assert row.tolist() == [1.0, 1.0 + 2**-7]


def test_a_gradient_that_was_sent_twice_is_as_finite_as_the_last_one() -> None:
    net = made_there(lambda: nn.Linear(4, 4, bias=False))
    store = Store(Layout.of(net.named_parameters()), 2, False)
    replica = CudaReplica([net.weight], store, 0, True, open_streams())
    replica.refresh()

    def overflow(parameter: torch.Tensor) -> None:
        parameter.grad = torch.full((4, 4), torch.inf, device=HERE)

    net.weight.register_post_accumulate_grad_hook(overflow)
    net(torch.ones(2, 4, device=HERE)).sum().backward()
    replica.collect((0,))
    assert not replica.finite
    assert store.gradient(0, store.layout.slots[0]).isinf().all()
    replica.close()


def test_a_gradient_that_does_not_count_is_not_taken_for_the_next_one() -> None:
    net = made_there(lambda: nn.Linear(4, 4, bias=False))
    store = Store(Layout.of(net.named_parameters()), 2, False)
    replica = CudaReplica([net.weight], store, 0, True, open_streams())
    replica.refresh()
    net(torch.ones(2, 4, device=HERE)).sum().backward()
    replica.leave_out((0,))
    net.weight.grad = torch.full((4, 4), 7.0, device=HERE)
    replica.collect((0,))
    assert (store.gradient(0, store.layout.slots[0]) == 7.0).all()
    replica.close()


# ---- parameters ---------------------------------------------------------------------------------


def test_a_frozen_parameter_may_hold_whole_numbers() -> None:
    net = made_there(lambda: nn.Linear(4, 4))
    net.base = nn.Parameter(torch.ones(4, dtype=torch.int8, device=HERE), requires_grad=False)
    store = Store(Layout.of(net.named_parameters()), 2, False)
    replica = CudaReplica([*net.parameters()], store, 0, True, open_streams())
    replica.refresh()
    replica.close()


class Attention(nn.Module):
    """Reads the weights of a child without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x, x)[0]


class Tied(nn.Module):
    """One parameter in two modules; another that only this module's own code uses; a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(8))
        self.spare = nn.Linear(8, 8)
        self.list = [self.spare.bias]
        self.view = self.spare.weight.data[2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.linear(x, self.spare.weight) * self.scale + self.list[0] + self.view
        return self.last(self.first(hidden))


class Recurrent(nn.Module):
    """Hands a list of weights over that it keeps beside the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)[0]


class Deep(nn.Sequential):
    """As usual."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8))


class Unseen(nn.Linear):
    """A kernel that shows its arguments to nobody."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            return functional.linear(x, self.weight, self.bias)


NETS = [Attention, Tied, Recurrent, Deep, Unseen]
X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))


def coming_to(
    net: nn.Module, seed: int, eagerness: float = 0.3
) -> tuple[Incoming, list[torch.Tensor]]:
    parameters = list(net.parameters())
    sources = [torch.randn(p.shape, generator=torch.Generator().manual_seed(3)) for p in parameters]
    streams = open_streams(seed, eagerness)
    lock(streams, sources)
    return Incoming(streams, parameters, sources), sources


def as_it_should_be(kind: type[nn.Module], sources: list[torch.Tensor]) -> torch.Tensor:
    net = made_there(kind)
    with torch.no_grad():
        for parameter, source in zip(net.parameters(), sources, strict=True):
            parameter.copy_(source)
    return net(X.to(HERE))


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("seed", by_default(SEEDS, SEEDS[0]))
def test_forward_waits_for_all_copies(kind: type[nn.Module], seed: int) -> None:
    net, x = made_there(kind), X.to(HERE)
    coming, sources = coming_to(net, seed)
    for _ in range(3):
        coming.copy(range(0, len(sources), 2))
        coming.copy(range(1, len(sources), 2))
        coming.hold_compute()
        assert same(net(x), as_it_should_be(kind, sources))
        coming.settle()
        for source in sources:
            source.mul_(0.9)


READERS: list[Callable[[nn.Linear], Any]] = [
    lambda net: net.weight.sum(),
    lambda net: net.weight.data[1:].detach().clone().sum(),
    lambda net: torch.nn.utils.parameters_to_vector(net.parameters()).sum(),
    lambda net: torch.tensor(net.bias.tolist()).sum(),
]


@pytest.mark.few(2)
@pytest.mark.parametrize("read", READERS)
def test_whoever_reads_a_parameter_between_steps_waits_for_it(
    read: Callable[[nn.Linear], Any],
) -> None:
    for seed in SEEDS:
        net = made_there(lambda: nn.Linear(4, 4))
        coming, sources = coming_to(net, seed)
        coming.copy(range(2))
        coming.hold_compute()
        value = read(net)
        coming.settle()
        for parameter, source in zip(net.parameters(), sources, strict=True):
            parameter.data = source.to(HERE)
        assert same(value, read(net))


def test_sources_of_copies_may_change_once_the_copies_have_settled() -> None:
    for seed in SEEDS:
        net = made_there(Deep)
        coming, sources = coming_to(net, seed)
        coming.copy(range(len(sources)))
        values = [source.clone() for source in sources]
        coming.settle()
        for source in sources:
            source.zero_()
        assert all(map(same, net.parameters(), values))


def test_after_a_push_a_worker_reads_what_it_had_though_the_masters_move() -> None:
    for seed in SEEDS:
        net, streams = made_there(Deep), open_streams(seed, 0.0)
        store = Store(Layout.of(net.named_parameters()), 2, False)
        exchange = CudaReplica(list(net.parameters()), store, 1, True, streams)
        masters = [store.master(slot) for slot in store.layout.slots]
        for master in masters:
            master.fill_(0.25)
        exchange.refresh()
        exchange.writes()  # part of every push; nothing has been used so far
        for master in masters:
            master.fill_(0.5)
        assert all(bool((p == 0.25).all()) for p in net.parameters())


# ---- parameters that come while the update still runs -------------------------------------------


class Update:
    """A replica of four layers, and what the server does with the masters behind it."""

    def __init__(self, seed: int, **shape: Any) -> None:
        self.net = made_there(lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]))
        self.store = Store(Layout.of(self.net.named_parameters()), 2, **shape)
        parameters = list(self.net.parameters())
        self.replica = CudaReplica(parameters, self.store, 1, True, open_streams(seed, 0.0))
        self.slots = self.store.layout.slots
        self.stops = [slot.offset + slot.numel for slot in self.slots]

    def step(self, value: float, upto: int, begins: bool = True) -> None:
        """The masters of the first ``upto`` parameters are stepped."""
        if begins:
            self.store.progress.begin()
        for slot in self.slots[:upto]:
            self.store.master(slot).fill_(value)
        self.store.progress.reach(self.stops[upto - 1] if upto else 0)

    def copies(self, ask: Callable[[], Any]) -> int:
        """To the device, that this queues."""
        torch.standin.take_counts()
        ask()
        return torch.standin.take_counts().copies_to_device

    def is_(self, value: float) -> bool:
        return all(bool((p == value).all()) for p in self.net.parameters())


@pytest.mark.parametrize("seed", by_default(SEEDS, *SEEDS[:2]))
def test_each_parameter_comes_once_however_far_the_update_was(seed: int) -> None:
    update = Update(seed, private_parameters=False)
    replica = update.replica
    assert replica.writes() == {}
    for value in (0.5, 0.25):
        assert update.copies(replica.take_stepped) == 0, "no update is under way"
        update.step(value, 3)
        assert update.copies(replica.take_stepped) == 3
        assert update.copies(replica.take_stepped) == 0
        update.step(value, 6, begins=False)
        assert update.copies(replica.take_stepped) == 3
        update.step(value, 8, begins=False)
        assert update.copies(replica.refresh) == 2
        assert update.is_(value)
        assert replica.writes() == {}, "what has come was written by nobody"
    replica.close()


def test_take_stepped_says_whether_it_is_to_be_asked_again() -> None:
    update = Update(0, private_parameters=False)
    before = update.replica.take_stepped()
    update.step(0.5, 4)
    during = update.replica.take_stepped()
    assert before is not None and during is not None and 0 < during < before
    update.step(0.5, 8, begins=False)
    assert update.replica.take_stepped() is None
    update.replica.close()
    assert update.replica.take_stepped() is None


@pytest.mark.parametrize("seed", by_default(SEEDS, *SEEDS[:2]))
def test_what_came_of_an_earlier_update_comes_again(seed: int) -> None:
    update = Update(seed, private_parameters=False)
    update.step(0.5, 8)
    update.replica.take_stepped()
    update.step(0.25, 8)  # that of another worker, whose turn it is
    update.replica.refresh()
    assert update.is_(0.25)
    update.replica.close()


def test_nothing_is_taken_where_masters_move_while_workers_compute() -> None:
    for shape in (
        {"private_parameters": True},
        {"private_parameters": False, "maker": UpdateMaker.IN_PLACE},
    ):
        update = Update(0, **shape)
        update.step(0.5, 8)
        assert not update.store.progress.watched
        assert update.replica.take_stepped() is None
        update.replica.close()


def test_a_small_model_does_not_wait_for_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "LEAST_BYTES", 2**20)
    update = Update(0, private_parameters=False)
    assert not update.store.progress.watched
    assert update.replica.take_stepped() is None
    update.replica.close()


# ---- page-locked memory -------------------------------------------------------------------------


def open_one(private: bool = False) -> tuple[CudaReplica, Store, nn.Module]:
    streams = open_streams()
    net = made_there(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double()))
    store = Store(Layout.of(net.named_parameters()), 2, private)
    return CudaReplica(list(net.parameters()), store, 1, True, streams), store, net


@pytest.mark.parametrize("private", [False, True])
def test_what_crosses_the_bus_is_page_locked_once_and_let_go_at_the_end(private: bool) -> None:
    exchange, store, _ = open_one(private)
    is_locked, locked = state().is_locked, state().locked
    sources = store.copies[1] if private else store.masters
    for flat in (*store.gradients[1].values(), *sources.values()):
        assert is_locked(flat)
    assert not any(is_locked(flat) for flat in store.gradients[0].values())
    assert all(a + locked[a] <= b for a, b in pairwise(sorted(locked))), "none twice"
    assert len(locked) == 2
    exchange.close()
    assert locked == {}
    exchange.close()


def test_workers_with_parameters_of_their_own_lock_what_they_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(KINDS, NAME, CudaStreams)
    open_streams()
    net = made_there(lambda: nn.Linear(4, 4))
    store = Store(Layout.of(net.named_parameters()), 2, True)
    replica = OwnReplica(list(net.parameters()), store, 1)
    for flat in (*store.gradients[1].values(), *store.copies[1].values()):
        assert state().is_locked(flat)
    replica.close()
    assert state().locked == {}


def test_where_memory_cannot_be_page_locked_it_is_said_and_works_all_the_same() -> None:
    SETTINGS.lockable_bytes = 1.0
    with pytest.warns(
        UserWarning, match=r"could not be page-locked.*CUDA error 2.*several times.*ulimit"
    ):
        exchange, store, net = open_one()
    x = torch.ones(1, 4, device=HERE)
    net[1](net[0](x).double()).sum().backward()
    assert exchange.collect(range(4)) == ()
    for slot, parameter in zip(store.layout.slots, net.parameters(), strict=True):
        assert same(store.gradient(1, slot), parameter.grad)
    exchange.close()


# ---- a worker's steps ---------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("seed", by_default(SEEDS, SEEDS[0]))
def test_many_steps_equal_those_of_one_process(seed: int, set_to_none: bool) -> None:
    torch.manual_seed(0)
    net, alone = made_there(Tied), Tied()
    alone.load_state_dict(net.state_dict())
    alone.list, alone.view = [alone.spare.bias], alone.spare.weight.data[2]
    store = Store(Layout.of(net.named_parameters()), 1, False)
    for slot, parameter in zip(store.layout.slots, net.parameters(), strict=True):
        store.master(slot).copy_(parameter.detach())
    exchange = CudaReplica(list(net.parameters()), store, 0, True, open_streams(seed))
    exchange.writes()
    masters = [store.master(slot) for slot in store.layout.slots]
    rows = [store.gradient(0, slot) for slot in store.layout.slots]
    weights = list(alone.parameters())

    def train() -> None:
        for step in range(4):
            for each in (net, alone):
                each.zero_grad(set_to_none=set_to_none)
                each((X + step).to(each.scale.device)).square().mean().backward()
            assert exchange.collect(range(len(rows))) == ()
            assert exchange.writes() == {}, "nobody has written to a parameter"
            gradients = [weight.grad for weight in weights]
            torch._foreach_add_([weight.data for weight in weights], gradients, alpha=-0.1)
            torch._foreach_add_(masters, rows, alpha=-0.1)
            exchange.refresh()
            assert all(map(same, net.parameters(), alone.parameters()))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train()
    exchange.close()
