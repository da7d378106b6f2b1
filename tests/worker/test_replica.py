"""Gradients come to the row, whenever they are copied; what has none is reported."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from hybridtrain.engine.memory import Layout, Store, unpack
from hybridtrain.engine.worker.device import transfers
from hybridtrain.engine.worker.device.cuda import CudaStreams
from hybridtrain.engine.worker.replica import HostReplica
from hybridtrain.engine.worker.replica_cuda import CudaReplica
from tests.standin.device import name_it
from tests.standin.state import NAME, state

pytestmark = pytest.mark.own_process
name_it()


class Net(nn.Module):
    """Two layers in use, one that is used on request, an embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 4, sparse=True)
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.spare = nn.Linear(4, 4)
        self.last = nn.Linear(4, 1)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, seed: int, spare: bool = False) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        where = self.frozen.device
        words = self.embedding(torch.tensor([1, seed % 10, 1], device=where)).mean(dim=0)
        image = torch.randn(2, 2, 5, 5, generator=generator).to(where)
        hidden = self.conv(image).mean(dim=(2, 3)) + words
        if spare:
            hidden = self.spare(hidden)
        return self.last(hidden).square().sum()


NAMES = [name for name, _ in Net().named_parameters()]
SPARE = tuple(n for n, name in enumerate(NAMES) if name.startswith("spare"))
FROZEN = NAMES.index("frozen")
TRAINED = [n for n in range(len(NAMES)) if n != FROZEN]


Exchange = HostReplica | CudaReplica
Make = Callable[[Net, Store], Exchange]


def host(eager: bool) -> Make:
    return lambda net, store: HostReplica(list(net.parameters()), store, 1, eager)


def cuda(eager: bool) -> Make:
    """On a device that copies late, in an order drawn by chance."""

    def open(net: Net, store: Store) -> CudaReplica:
        state().lanes.begin_again(int(eager), eagerness=0.3)
        where = torch.device(NAME, 0)
        net.to(where)
        return CudaReplica(list(net.parameters()), store, 1, eager, CudaStreams(where))

    return open


KINDS = [
    pytest.param(make(eager), id=f"{make.__name__}-{'eager' if eager else 'late'}")
    for make in (host, cuda)
    for eager in (True, False)
]


def set_up(make: Make, private: bool = False) -> tuple[Net, Store, Exchange]:
    net = Net()
    store = Store(Layout.of(net.named_parameters()), 2, private)
    for slot, parameter in zip(store.layout.slots, net.parameters(), strict=True):
        store.master(slot).copy_(parameter.detach())
        store.parameter(1, slot).copy_(parameter.detach())
    return net, store, make(net, store)


def rows(store: Store, numbers: list[int] = TRAINED) -> list[torch.Tensor]:
    return [store.gradient(1, store.layout.slots[n]).clone() for n in numbers]


def expected(net: Net, numbers: list[int] = TRAINED) -> list[torch.Tensor]:
    gradients = [list(net.parameters())[n].grad for n in numbers]
    return [(g.to_dense() if g.is_sparse else g).cpu() for g in gradients if g is not None]


USED = [n for n in TRAINED if n not in SPARE]


@pytest.mark.few(2)
@pytest.mark.parametrize("make", KINDS)
def test_gradients_arrive_in_the_row_dense_and_in_shape(make: Make) -> None:
    net, store, exchange = set_up(make)
    net(3, spare=True).backward()
    assert exchange.collect(TRAINED) == ()
    assert all(map(torch.equal, rows(store), expected(net)))
    assert store.gradient(0, store.layout.slots[0]).count_nonzero() == 0, "nobody else's row"


@pytest.mark.few(2)
@pytest.mark.parametrize("make", KINDS)
def test_what_may_stay_sparse_comes_packed_and_accumulated(make: Make) -> None:
    net, store, exchange = set_up(make)
    number = NAMES.index("embedding.weight")
    place = store.gradient(1, store.layout.slots[number])
    exchange.keep_sparse([number])
    for seed in (3, 4):
        net.zero_grad()
        net(seed, spare=True).backward()
        net(seed + 1).backward()
        assert exchange.collect(TRAINED) == ()
        (packed,) = exchange.packed
        assert packed.number == number and packed.n_rows == 3
        rest = [n for n in TRAINED if n != number]
        assert all(map(torch.equal, rows(store, rest), expected(net, rest)))
        (gradient,) = expected(net, [number])
        torch.testing.assert_close(unpack(packed, place).to_dense(), gradient)
    exchange.admit([number], sparse=False)
    exchange.collect(TRAINED)
    assert exchange.packed == ()
    assert all(map(torch.equal, rows(store), expected(net)))


@pytest.mark.few(2)
@pytest.mark.parametrize("make", KINDS)
def test_what_has_no_gradient_is_reported_and_its_place_left_alone(make: Make) -> None:
    net, store, exchange = set_up(make)
    net(1, spare=True).backward()
    exchange.collect(TRAINED)
    old = rows(store, list(SPARE))
    net.zero_grad()
    net(2).backward()
    assert exchange.collect(range(len(NAMES))) == (FROZEN, *SPARE)
    assert all(map(torch.equal, rows(store, list(SPARE)), old))
    assert all(map(torch.equal, rows(store, USED), expected(net, USED)))


@pytest.mark.few(2)
@pytest.mark.parametrize("make", KINDS)
def test_accumulated_gradients_arrive_as_their_sum(make: Make) -> None:
    net, store, exchange = set_up(make)
    net(1, spare=True).backward()  # the spare layer has a gradient from this mini-batch only
    net(2).backward()
    net(3).backward()
    assert exchange.collect(TRAINED) == ()
    assert all(map(torch.equal, rows(store), expected(net)))


@pytest.mark.few(2)
@pytest.mark.parametrize("make", KINDS)
def test_step_after_step_the_row_holds_the_latest(make: Make) -> None:
    net, store, exchange = set_up(make)
    for seed in range(4):
        net.zero_grad(set_to_none=seed % 2 == 0)
        net(seed).backward()
        exchange.collect(TRAINED)
        assert all(map(torch.equal, rows(store, USED), expected(net, USED)))


@pytest.mark.few(2)
@pytest.mark.parametrize("make", KINDS)
def test_a_gradient_given_up_does_not_come_back(make: Make) -> None:
    net, store, exchange = set_up(make)
    net(1, spare=True).backward()
    net.zero_grad()  # a step that was skipped
    net(2).backward()
    assert exchange.collect(TRAINED) == SPARE
    assert all(map(torch.equal, rows(store, USED), expected(net, USED)))


@pytest.mark.parametrize("make", [host(False), cuda(False)])
def test_late_copies_see_what_was_done_to_gradients_after_backward(make: Make) -> None:
    net, store, exchange = set_up(make)
    net(1).backward()
    for number in USED[1:]:
        gradient = list(net.parameters())[number].grad
        assert gradient is not None
        gradient.mul_(0.5)
    exchange.collect(TRAINED)
    assert all(map(torch.equal, rows(store, USED), expected(net, USED)))


def test_two_optimizers_collect_their_own_parameters() -> None:
    net, store, exchange = set_up(host(False))
    net(1, spare=True).backward()
    first, second = TRAINED[:3], TRAINED[3:]
    assert exchange.collect(second) == ()
    assert all(row.count_nonzero() == 0 for row in rows(store, first))
    assert exchange.collect(first) == ()
    assert all(map(torch.equal, rows(store), expected(net)))


# ---- on the host --------------------------------------------------------------------------------


@pytest.mark.parametrize("private", [False, True])
def test_parameters_on_the_host_become_views_of_shared_memory(private: bool) -> None:
    net, store, exchange = set_up(host(True), private)
    for slot, parameter in zip(store.layout.slots, net.parameters(), strict=True):
        assert parameter.stride() == slot.stride
        store.master(slot).fill_(0.25)
    store.refresh(1)
    assert exchange.writes() == {}
    exchange.refresh()
    assert all(bool((p == 0.25).all()) for p in net.parameters())


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()


@pytest.mark.few(2)
@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("make", [host(True), cuda(True)])
def test_what_user_code_writes_to_parameters_is_told_unless_they_do_not_follow(
    make: Make, private: bool
) -> None:
    net, store, exchange = set_up(make, private)
    exchange.refresh()
    first, second, third = TRAINED[:3]
    exchange.follow([first, second, third])
    parameters = list(net.parameters())
    parameters[first].data.mul_(0.5)
    with torch.no_grad():
        parameters[third].neg_()  # keeps every norm
    parameters[FROZEN].data.fill_(7.0)  # a frozen teacher is the worker's own business
    told = {n: bytes_of(parameters[n]) for n in (first, third)}
    assert exchange.writes() == (told if private else {}), "in lock-step worker 0 speaks for all"
    exchange.refresh()
    for number in (first, third):
        assert torch.equal(parameters[number].cpu(), store.parameter(1, store.layout.slots[number]))
    assert set(parameters[FROZEN].tolist()) == {7.0}
    assert exchange.writes() == {}


def test_eager_copies_of_what_is_not_small_are_made_while_backward_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hybridtrain.engine.worker.replica.EAGER", 1)
    net, store, _ = set_up(host(True))
    net(1).backward()
    dense = [n for n in USED if NAMES[n] != "embedding.weight"]
    assert all(map(torch.equal, rows(store, dense), expected(net, dense)))


# ---- across the bus; tests/worker/test_device.py has the rest --------------------------------


def test_buckets_leave_while_backward_runs_and_each_gradient_leaves_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfers, "LEAST_BYTES", 64)
    net, store, exchange = set_up(cuda(True))
    assert isinstance(exchange, CudaReplica)
    loss = net(1, spare=True)
    torch.standin.take_counts()
    loss.backward()
    counts = torch.standin.take_counts()
    assert counts.copies_to_host >= 2
    assert counts.synchronisations == 0, "backward is never held up"
    exchange.collect(TRAINED)
    n_bytes = counts.bytes_to_host + torch.standin.take_counts().bytes_to_host
    wanted = sum(gradient.nbytes for gradient in expected(net))
    assert wanted <= n_bytes <= wanted + 8 * len(TRAINED), "each once, and a number about it"
    assert all(map(torch.equal, rows(store), expected(net)))


@pytest.mark.parametrize("private", [False, True])
def test_refreshing_copies_parameters_to_the_device(private: bool) -> None:
    net, store, exchange = set_up(cuda(True), private)
    exchange.writes()
    for slot, parameter in zip(store.layout.slots, net.parameters(), strict=True):
        assert parameter.data_ptr() != store.parameter(1, slot).data_ptr()
        store.master(slot).fill_(0.25)
    store.refresh(1)
    assert not any(bool((p == 0.25).all()) for p in net.parameters())
    exchange.refresh()
    assert all(bool((p == 0.25).all()) for p in net.parameters())
