"""What once went wrong only where workers compute on a device."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import EarlyStopping
from pytorch_lightning.plugins import MixedPrecision
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from hybridtrain.engine.memory import Layout, Store
from hybridtrain.engine.memory.counters import ChunkProgress
from hybridtrain.engine.scheme import resolve_start_method
from hybridtrain.engine.worker.device import KINDS, transfers
from hybridtrain.engine.worker.device.cuda import CudaStreams
from hybridtrain.engine.worker.replica_cuda import CudaReplica, _norms
from hybridtrain.engine.worlds.channel import Channel, channel_pair
from hybridtrain.errors import UserError
from hybridtrain.lightning.data import prefetch as ahead_module
from hybridtrain.lightning.data.prefetch import Ahead
from tests.lightning.step.test_writes import Teacher
from tests.lightning.toys import Regression, fit, flat, regression_data
from tests.standin.device import name_it
from tests.standin.state import NAME, state
from tests.standin.training import fit_apart

name_it()
HERE = torch.device(NAME, 0)

in_a_process_of_its_own = pytest.mark.own_process


@pytest.fixture(autouse=True)
def with_small_buckets_on_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, NAME, CudaStreams)
    monkeypatch.setattr(transfers, "LEAST_BYTES", 64)


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
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(7.0)  # whoever owns them now
    exchange.refresh()
    assert exchange.writes() == {}
    assert all(bool((parameter == 7.0).all()) for parameter in net.parameters())


# ---- mixed precision -----------------------------------------------------------------------------


def half_precision() -> dict[str, Any]:
    scaler = torch.amp.GradScaler(NAME, init_scale=2.0**8)  # nothing overflows
    return {"plugins": MixedPrecision("16-mixed", NAME, scaler)}


def sgd(fused: bool) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=0.01, fused=fused)


@pytest.mark.slow
def test_a_fused_optimizer_unscales_as_any_other() -> None:
    two_steps = {"max_epochs": 1, "limit_train_batches": 2}
    plain, _ = fit_apart(2, 6, lambda: Regression(sgd(False)), **half_precision(), **two_steps)
    fused, _ = fit_apart(2, 6, lambda: Regression(sgd(True)), **half_precision(), **two_steps)
    assert torch.allclose(flat(fused), flat(plain), atol=1e-6)


# ---- mini-batches --------------------------------------------------------------------------------


@pytest.fixture
def make_ahead(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Ahead]:
    """Makes one in the test's process."""
    monkeypatch.setattr(ahead_module, "leaves_transfer_alone", lambda trainer: True)
    return lambda: Ahead(CudaStreams(HERE), HERE, SimpleNamespace())


@in_a_process_of_its_own
def test_a_packed_sequence_is_moved_ahead_of_its_turn(make_ahead: Callable[[], Ahead]) -> None:
    ahead = make_ahead()
    batch = {"words": pack_sequence([torch.ones(3, 2), torch.zeros(1, 2)]), "y": torch.ones(2)}
    ahead._send(batch)
    moved = ahead.take(batch)
    assert moved["words"].data.device == HERE
    assert torch.equal(moved["words"].data.cpu(), batch["words"].data)


class Own:
    """A batch that is moved by a method of its own, so that nobody sees its tensor."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device, **_: Any) -> Own:
        return Own(self.x.to(device))


@pytest.mark.parametrize("wrap", [torch.Tensor.contiguous, Own])
@in_a_process_of_its_own
def test_memory_of_a_mini_batch_is_given_out_again_when_it_was_computed_with(
    make_ahead: Callable[[], Ahead], wrap: Callable[[torch.Tensor], Any]
) -> None:
    state()
    ahead, sums = make_ahead(), []
    for number in range(8):
        batch = [wrap(torch.full((256,), float(number)))]
        ahead._send(batch)
        (moved,) = ahead.take(batch)
        sums.append(getattr(moved, "x", moved).sum())  # queued; nobody waits for it
        del moved
    assert [float(each) for each in sums] == [256.0 * number for number in range(8)]


# ---- what crosses a process ----------------------------------------------------------------------


@in_a_process_of_its_own
def test_a_fit_initialises_no_device_in_the_calling_process() -> None:
    stopping = EarlyStopping("train/loss", patience=9)
    _, trainer = fit_apart(2, 6, Regression, max_epochs=1, callbacks=[stopping])
    assert not torch.standin.is_initialized()
    assert trainer.callbacks[0].best_score < 100


@in_a_process_of_its_own
def test_a_message_carries_no_tensor_of_a_device() -> None:
    state()
    mine, theirs = map(Channel, channel_pair())
    sent = {"x": torch.ones(3, device=HERE), "w": nn.Parameter(torch.zeros(2, device=HERE))}
    mine.send(SimpleNamespace(**sent))
    mine.post([SimpleNamespace(**sent)])
    first, (second,) = theirs.messages()
    for found in (first, second):
        assert found.x.device == found.w.device == torch.device("cpu")
        assert found.x.tolist() == [1.0] * 3 and isinstance(found.w, nn.Parameter)
    mine.close()
    theirs.close()


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
        "hybridtrain.engine.worker.device.cuda._maps", lambda: ["libcuda.so"], raising=False
    )
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", bad_fork)


def test_workers_are_not_forked_where_a_fork_could_not_use_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = os.getpid()
    hide(monkeypatch, lambda: os.getpid() != own)
    assert resolve_start_method("auto") == "spawn"
    with pytest.raises(UserError, match=r"start_method=fork was given, but CUDA is already init"):
        resolve_start_method("fork")


# ---- what user code writes -----------------------------------------------------------------------


def mixed() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40).double(), nn.Linear(40, 40))


def not_dense() -> nn.Module:
    net = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 40))
    net[1].weight = nn.Parameter(torch.randn(40, 80)[:, ::2])
    return net


@pytest.mark.parametrize("make", [mixed, not_dense])
@in_a_process_of_its_own
def test_a_worker_that_has_written_no_parameter_tells_of_no_writes(
    make: Callable[[], nn.Module],
) -> None:
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
def test_frozen_parameters_that_were_written_are_known_for_workers_without_data() -> None:
    state()
    with HERE:
        net = mixed()
    exchange = open_exchange(net)
    exchange.follow([0, 1])
    net[2].weight.data.mul_(2)  # norms show it: ``.data`` evades torch's count
    with torch.no_grad():
        net[0].weight.mul_(2)
    assert list(exchange.writes()) == [0]
    assert list(exchange.apart()) == [0, 4]


def test_workers_on_devices_without_data_in_the_last_step_have_its_writes() -> None:
    one, _ = fit_apart(1, 12, Teacher, regression_data(25), max_epochs=2)
    two, _ = fit_apart(2, 6, Teacher, regression_data(25), max_epochs=2)
    torch.testing.assert_close(flat(two), flat(one), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("make", [mixed, not_dense])
@in_a_process_of_its_own
def test_a_norm_does_not_depend_on_what_it_is_taken_with(make: Callable[[], nn.Module]) -> None:
    state()
    torch.manual_seed(0)
    with HERE:
        parameters = list(make().parameters())
    alone = [_norms([parameter])[0].item() for parameter in parameters]
    assert [norm.item() for norm in _norms(parameters)] == alone


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
        assert self.net is not None, "who looks at parameters has waited for the release"

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


@pytest.mark.slow
def test_the_host_waits_for_no_more_copies_where_there_are_more_buffers() -> None:
    assert blocking(Normed(1)) == blocking(Normed(3))


@pytest.mark.slow
def test_the_host_waits_for_no_more_means_where_there_are_more_parameters() -> None:
    assert blocking(Deep(1), **half_precision()) == blocking(Deep(2), **half_precision())


# ---- parameters that come while the server still steps -------------------------------------------


class Early(Regression):
    """Large enough for several chunks; tells what had come before each release."""

    def __init__(self) -> None:
        super().__init__(partial(torch.optim.AdamW, lr=0.01))
        self.net = nn.Sequential(nn.Linear(4, 2**16), nn.Linear(2**16, 8), nn.Linear(8, 1))
        self.came: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.came = list(CAME)
        assert self.net is not None, "who looks at parameters has waited for the release"


CAME: list[int] = []  # of this worker, parameters


def test_parameters_already_stepped_are_copied_while_the_rest_is_stepped_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    once = {"max_epochs": 1, "limit_train_batches": 3}
    plain, _ = fit("hybrid", 2, 6, Early, **once)
    refresh, ended = CudaReplica.refresh, ChunkProgress.ended

    def counting(self: CudaReplica, keep: bool = False) -> None:
        CAME.append(len(self._taken))
        refresh(self, keep)

    def slow(self: ChunkProgress, chunk: int) -> None:
        ended(self, chunk)
        time.sleep(0.02)  # or it would be over before a worker looks

    monkeypatch.setattr(CudaReplica, "refresh", counting)
    monkeypatch.setattr(ChunkProgress, "ended", slow)
    apart, _ = fit_apart(2, 6, Early, **once)
    assert min(apart.came[-3:]) > 0
    assert torch.equal(flat(apart), flat(plain))
