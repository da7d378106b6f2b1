"""What once went wrong only where workers compute on a device."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import EarlyStopping
from pytorch_lightning.plugins import MixedPrecision
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from hybridtrain.lightning.data import prefetch as ahead_module
from hybridtrain.lightning.data.prefetch import Ahead
from hybridtrain.lightning.launcher import resolve_start_method
from hybridtrain.memory import Layout, Store
from hybridtrain.worker.device import KINDS, Incoming, incoming, outgoing
from hybridtrain.worker.device.cuda import CudaStreams
from hybridtrain.worker.device.incoming import ForwardWait
from hybridtrain.worker.replica_cuda import CudaReplica
from tests.lightning.toys import Regression, flat
from tests.standin.device import name_it
from tests.standin.state import NAME, state
from tests.standin.training import fit_apart

name_it()
HERE = torch.device(NAME, 0)

in_a_process_of_its_own = pytest.mark.own_process


@pytest.fixture(autouse=True)
def with_small_buckets_on_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, NAME, CudaStreams)
    for module in (incoming, outgoing):
        monkeypatch.setattr(module, "BUCKET_BYTES", 64)


# ---- the end of fit ------------------------------------------------------------------------------


def open_exchange(net: nn.Module) -> CudaReplica:
    store = Store(Layout.of(net.named_parameters()), 2, False)
    for slot, parameter in zip(store.layout.slots, net.parameters(), strict=True):
        store.master(slot).copy_(parameter.detach())
    net.to(HERE)
    exchange = CudaReplica(list(net.parameters()), store, 0, True, CudaStreams(HERE))
    exchange.refresh()
    return exchange


@in_a_process_of_its_own
def test_an_exchange_that_is_closed_has_nothing_to_do_with_parameters_that_have_moved() -> None:
    state()
    net = nn.Linear(4, 4)
    exchange = open_exchange(net)
    assert exchange.writes() == {}
    exchange.close()
    net.cpu()  # as Lightning does at teardown
    exchange.refresh()
    assert exchange.writes() == {}


# ---- mixed precision -----------------------------------------------------------------------------


def half_precision() -> dict[str, Any]:
    scaler = torch.amp.GradScaler(NAME, init_scale=2.0**8)  # nothing overflows
    return {"plugins": MixedPrecision("16-mixed", NAME, scaler)}


def sgd(fused: bool) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=0.01, fused=fused)


def test_a_fused_optimizer_unscales_as_any_other() -> None:
    two_steps = {"max_epochs": 1, "limit_train_batches": 2}
    plain, _ = fit_apart(2, 6, lambda: Regression(sgd(False)), **half_precision(), **two_steps)
    fused, _ = fit_apart(2, 6, lambda: Regression(sgd(True)), **half_precision(), **two_steps)
    assert torch.allclose(flat(fused), flat(plain), atol=1e-6)


# ---- who needs a parameter -----------------------------------------------------------------------


def per_sample(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(net)(x)


def derivative(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    weights = dict(net.named_parameters())
    loss = lambda given: torch.func.functional_call(net, given, x).sum()  # noqa: E731
    return torch.func.grad(loss)(weights)["weight"]


def along(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.func.jvp(net, (x,), (x,))[1]


@pytest.mark.parametrize("transform", [per_sample, derivative, along])
@in_a_process_of_its_own
def test_transforms_wait_for_the_parameters_that_they_use(
    transform: Callable[[nn.Module, torch.Tensor], torch.Tensor],
) -> None:
    state()
    net, x = nn.Linear(4, 4).to(HERE), torch.ones(2, 4, device=HERE)
    sources = [torch.full(p.shape, 0.5) for p in net.parameters()]
    streams = CudaStreams(HERE)
    for source in sources:
        streams.lock(source)
    coming = Incoming(streams, list(net.parameters()), sources)
    coming.lazily = True
    with ForwardWait(coming):
        coming.start(range(2))
        found = transform(net, x)
    coming.settle()
    assert torch.equal(found, transform(net, x)) and not found.isnan().any()


# ---- mini-batches --------------------------------------------------------------------------------


@in_a_process_of_its_own
def test_a_packed_sequence_is_moved_ahead_of_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_module, "leaves_transfer_alone", lambda trainer: True)
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=HERE))
    ahead = Ahead(CudaStreams(HERE), trainer)
    batch = {"words": pack_sequence([torch.ones(3, 2), torch.zeros(1, 2)]), "y": torch.ones(2)}
    ahead._send(batch)
    moved = ahead.take(batch)
    assert moved["words"].data.device == HERE
    assert torch.equal(moved["words"].data.cpu(), batch["words"].data)


# ---- what crosses a process ----------------------------------------------------------------------


@in_a_process_of_its_own
def test_a_fit_initialises_no_device_in_the_calling_process() -> None:
    stopping = EarlyStopping("train/loss", patience=9)
    _, trainer = fit_apart(2, 6, Regression, max_epochs=1, callbacks=[stopping])
    assert not torch.standin.is_initialized()
    assert trainer.callbacks[0].best_score < 100


class Broadcasts(Regression):
    def on_train_start(self) -> None:
        told = {"x": torch.full((2,), float(self.global_rank), device=self.device)}
        found = self.trainer.strategy.broadcast(told)["x"]
        assert found.tolist() == [0.0, 0.0]
        assert found.device in (torch.device("cpu"), self.device)


def test_what_is_broadcast_lands_on_no_other_workers_device() -> None:
    fit_apart(2, 6, Broadcasts, max_epochs=1)


# ---- starting workers ----------------------------------------------------------------------------


def hide(monkeypatch: pytest.MonkeyPatch, bad_fork: Callable[[], bool]) -> None:
    """Nothing that can be asked without a fork says that CUDA was initialised."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(
        "hybridtrain.worker.device.cuda._maps", lambda: ["libcuda.so"], raising=False
    )
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", bad_fork)


def test_workers_are_not_forked_where_a_fork_could_not_use_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = os.getpid()
    hide(monkeypatch, lambda: os.getpid() != own)
    assert resolve_start_method("auto") == "spawn"


# ---- what user code writes -----------------------------------------------------------------------


def mixed() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40).double(), nn.Linear(40, 40))


def not_dense() -> nn.Module:
    net = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 40))
    net[1].weight = nn.Parameter(torch.randn(40, 80)[:, ::2])
    return net


@pytest.mark.parametrize("make", [mixed, not_dense])
@in_a_process_of_its_own
def test_who_writes_nothing_is_told_to_have_written_nothing(make: Callable[[], nn.Module]) -> None:
    state()
    torch.manual_seed(0)
    with HERE:
        net = make()
    exchange = open_exchange(net)
    assert exchange.writes() == {}
    with torch.no_grad():
        next(net.parameters()).mul_(2)
    assert list(exchange.writes()) == [0]


@in_a_process_of_its_own
def test_a_parameter_whose_data_is_replaced_is_refreshed_in_its_new_place() -> None:
    state()
    net = nn.Linear(4, 4)
    exchange = open_exchange(net)
    for factor in (0.5, 3.0):
        net.weight.data = net.weight.data * factor  # as pruning and the tying of weights do
        assert list(exchange.writes()) == [0]
        exchange.incoming._sources[0].fill_(factor)
        exchange.refresh()
        assert (net.weight == factor).all()
        assert exchange.writes() == {}


# ---- what a step costs ---------------------------------------------------------------------------


class Counted(Regression):
    """Tells how often the host has waited for a copy in its last step."""

    blocking: int = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.blocking = torch.standin.take_counts().blocking

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["blocking"] = self.blocking


class Normed(Counted):
    """``n`` layers with buffers."""

    def __init__(self, n: int) -> None:
        super().__init__()
        norms = [nn.BatchNorm1d(16) for _ in range(n)]
        self.net = nn.Sequential(nn.Linear(4, 16), *norms, nn.Linear(16, 1))


class Deep(Counted):
    """``n`` layers."""

    def __init__(self, n: int) -> None:
        super().__init__()
        layers = [nn.Linear(16, 16) for _ in range(n)]
        self.net = nn.Sequential(nn.Linear(4, 16), *layers, nn.Linear(16, 1))


def blocking(module: Counted, **options: Any) -> int:
    return fit_apart(2, 6, module, max_epochs=1, limit_train_batches=2, **options)[0].blocking


def test_the_host_waits_for_no_more_copies_where_there_are_more_buffers() -> None:
    assert blocking(Normed(1)) == blocking(Normed(3))


def test_the_host_waits_for_no_more_means_where_there_are_more_parameters() -> None:
    assert blocking(Deep(1), **half_precision()) == blocking(Deep(2), **half_precision())


@in_a_process_of_its_own
def test_of_weights_that_share_storage_the_first_does_not_wait_for_the_last() -> None:
    flat = torch.zeros(64, device=HERE)  # as cuDNN wants an LSTM's
    weights = [part.view(4, 4) for part in flat.split(16)]
    sources = [torch.ones(4, 4) for _ in weights]
    streams = CudaStreams(HERE)
    for source in sources:
        streams.lock(source)
    coming = Incoming(streams, weights, sources)
    coming.lazily = True
    coming.start(range(4))
    coming.need(weights[0])
    assert coming.pending, "the others may still be on their way"
    with ForwardWait(coming):
        assert flat.sum().item() == 64, "whoever uses all of it waits for all"
    assert not coming.pending
