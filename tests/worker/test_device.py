"""Beside the computation, on a device that does everything as late and as oddly as it may.

For what that is see ``tests/standin``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from hybridtrain.memory import Layout, Store
from hybridtrain.worker.device import Incoming, Outgoing, incoming, outgoing
from hybridtrain.worker.device.cuda import CudaStreams
from hybridtrain.worker.device.incoming import ForwardWait, await_in_forward
from hybridtrain.worker.replica_cuda import CudaReplica
from tests.picking import by_default
from tests.standin.device import name_it
from tests.standin.state import NAME, SETTINGS, lazy_init, state

pytestmark = pytest.mark.own_process
name_it()
HERE = torch.device(NAME, 0)

SEEDS = range(5)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (incoming, outgoing):
        monkeypatch.setattr(module, "BUCKET_BYTES", 64)


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


@pytest.mark.parametrize("seed", SEEDS)
def test_buckets_arrive_in_their_order_and_each_is_whole(seed: int) -> None:
    streams = open_streams(seed)
    rows = [torch.zeros(10) for _ in range(9)]
    lock(streams, rows)
    going = Outgoing(streams, rows)
    arrived: list[int] = []
    for number in range(9):
        going.add(number, numbers(10) * number)
        while (bucket := going.arrived()) is not None:
            arrived += bucket.numbers
            assert all(same(rows[n], numbers(10) * n) for n in bucket.numbers)
    going.close()
    while (bucket := going.arrived(wait=True)) is not None:
        arrived += bucket.numbers
        assert all(same(rows[n], numbers(10) * n) for n in bucket.numbers)
    assert arrived == list(range(9))


def test_a_narrow_row_gets_what_is_nearest() -> None:
    streams, row = open_streams(), torch.zeros(2, dtype=torch.bfloat16)
    lock(streams, [row])
    going = Outgoing(streams, [row])
    going.add(0, torch.tensor([1.0 + 2**-9, 1.0 + 3 * 2**-9], device=HERE))
    going.close()
    assert going.arrived(wait=True) is not None
    assert row.tolist() == [1.0, 1.0 + 2**-7]


# ---- parameters ---------------------------------------------------------------------------------


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


@contextmanager
def lazily(net: nn.Module, coming: Incoming) -> Iterator[None]:
    coming.lazily = True
    hooks = await_in_forward(net, coming)
    try:
        with ForwardWait(coming):
            yield
    finally:
        for hook in hooks:
            hook.remove()
        coming.settle()  # or the parameters could be freed while they are written


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


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("seed", by_default(SEEDS, SEEDS[0]))
def test_forward_waits_for_each_parameter_before_it_reads_it(
    kind: type[nn.Module], seed: int
) -> None:
    net, x = made_there(kind), X.to(HERE)
    coming, sources = coming_to(net, seed)
    with lazily(net, coming):
        for _ in range(3):
            coming.start(range(len(sources)))
            assert same(net(x), as_it_should_be(kind, sources))
            coming.settle()
            for source in sources:
                source.mul_(0.9)


READERS: list[Callable[[nn.Linear], Any]] = [
    lambda net: net.weight.sum(),
    lambda net: torch.stack([net.bias, net.bias]).sum(),
    lambda net: net.weight.data[1:].detach().clone().sum(),
    lambda net: torch.nn.utils.parameters_to_vector(net.parameters()).sum(),
    lambda net: sum(value.sum() for value in net.state_dict().values()),
    lambda net: torch.tensor(net.bias.tolist()).sum(),
    lambda net: torch._foreach_add([net.weight], 1.0)[0].sum(),
    lambda net: torch.add(input=net.bias, other=0.0).sum(),
]


@pytest.mark.parametrize("read", READERS)
def test_whoever_reads_a_parameter_between_steps_waits_for_it(
    read: Callable[[nn.Linear], Any],
) -> None:
    for seed in SEEDS:
        net = made_there(lambda: nn.Linear(4, 4))
        coming, sources = coming_to(net, seed)
        with lazily(net, coming):
            coming.start(range(2))
            value = read(net)
        coming.settle()
        for parameter, source in zip(net.parameters(), sources, strict=True):
            parameter.data = source.to(HERE)
        assert same(value, read(net))


def test_the_first_layer_does_not_wait_for_the_last_and_the_next_time_comes_first() -> None:
    net, x = made_there(lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])), X.to(HERE)
    net_in_use = nn.Sequential(*reversed(net))  # used in the other order than laid out
    coming, _ = coming_to(net, 0, eagerness=0.0)
    lanes = state().lanes
    with lazily(net, coming):
        coming.start(range(12))
        net_in_use[0](x)
        assert lanes.n_queued == 0, "it was laid out last"
        net_in_use[1:](x)
        coming.start(range(12))
        net_in_use[0](x)
        assert lanes.n_queued > 12, "now it has come first, and the others are still coming"
        assert coming.pending
        net_in_use[1:](x)
        assert not coming.pending


def test_sources_may_change_once_it_has_settled() -> None:
    for seed in SEEDS:
        net = made_there(Deep)
        coming, sources = coming_to(net, seed)
        coming.lazily = True
        coming.start(range(len(sources)))
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
        with lazily(net, exchange.incoming):
            exchange.refresh()
            exchange.writes()  # part of every push; nothing has been used so far
            for master in masters:
                master.fill_(0.5)
            assert all(bool((p == 0.25).all()) for p in net.parameters())


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


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("seed", by_default(SEEDS, SEEDS[0]))
def test_many_steps_equal_those_of_one_process(seed: int, set_to_none: bool, lazy: bool) -> None:
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
        if not lazy:
            train()
        else:
            with lazily(net, exchange.incoming):
                train()
    exchange.close()
