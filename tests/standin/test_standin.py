"""The stand-in shows what CUDA shows."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import asks_for_gpus
from tests.standin import device
from tests.standin.device import Event, Stream, stream
from tests.standin.lanes import Race
from tests.standin.state import NAME, SETTINGS, Counts, lazy_init, state

pytestmark = pytest.mark.own_process

device.name_it()
HERE, THERE = torch.device(NAME, 0), torch.device(NAME, 1)


@pytest.fixture(autouse=True)
def nothing_is_done_unless_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SETTINGS, "eagerness", 0.0)


@pytest.fixture
def locked() -> torch.Tensor:
    """Four numbers, to be page-locked by who uses them."""
    return torch.arange(1.0, 5)


def lock(tensor: torch.Tensor) -> torch.Tensor:
    assert device.Runtime().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0) == 0
    return tensor


# ---- on which side -------------------------------------------------------------------------------


def test_operands_of_different_devices_are_refused() -> None:
    x = torch.ones(2)
    for one, other in ((x, x.to(HERE)), (x.to(HERE), x.to(THERE)), (x.to(THERE), x)):
        for op in (torch.add, torch.dot, torch.equal, lambda a, b: torch.stack([a, b])):
            with pytest.raises(RuntimeError, match="on the same device, but found at least two"):
                op(one, other)
        with pytest.raises(RuntimeError, match="same device"):
            torch._foreach_add_([one], [other])
    assert (x.to(HERE) * torch.tensor(3.0)).tolist() == [3.0, 3.0], "a number may lie anywhere"


def test_numpy_and_shared_memory_see_nothing_of_a_device() -> None:
    with pytest.raises(TypeError, match=r"can't convert standin:0 device type tensor to numpy"):
        torch.ones(2, device=HERE).numpy()


def test_copies_cross_whatever_the_devices() -> None:
    x = torch.arange(6.0).view(2, 3).t()
    moved = x.to(HERE).to(THERE)
    assert moved.device == THERE and moved.stride() == x.stride()
    assert torch.equal(moved.cpu(), x)
    assert torch.equal(torch.zeros(3, 2).copy_(moved), x)
    assert torch.equal(moved.double().cpu(), x.double())


def test_views_share_memory() -> None:
    x = torch.arange(12.0, device=HERE).view(3, 4)
    x[1:, 2].zero_()
    x.t()[0].add_(1)
    expected = torch.tensor([[1, 1, 2, 3], [5, 5, 0, 7], [9, 9, 0, 11.0]])
    assert torch.equal(x.cpu(), expected)
    assert x[1].untyped_storage().data_ptr() == x.data_ptr()


class Net(nn.Module):
    """A bit of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.words = nn.Embedding(5, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.gru, self.lstm = nn.GRU(4, 4, batch_first=True), nn.LSTM(4, 4, batch_first=True)
        self.out = nn.Sequential(nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 3))

    def forward(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        image = self.norm(self.conv(x)).relu().flatten(2).transpose(1, 2) + self.words(words)
        hidden = self.attention(image, image, image)[0]
        hidden = self.lstm(self.gru(hidden)[0])[0]
        return self.out(hidden).transpose(1, 2)


@pytest.mark.few(1)
@pytest.mark.parametrize("where", [HERE, THERE])
def test_a_net_computes_there_what_it_computes_here(where: torch.device) -> None:
    torch.manual_seed(0)
    nets, steps = [Net(), Net()], []
    nets[1].load_state_dict(nets[0].state_dict())
    mine = list(nets[1].parameters())
    lazy_init()
    nets[1].to(where)
    assert all(a is b for a, b in zip(mine, nets[1].parameters(), strict=True)), "as for CUDA"
    for net in nets:
        words, y = torch.arange(9) % 5, torch.arange(18).view(2, 9) % 3
        x = torch.linspace(-1, 1, 18).view(2, 1, 3, 3)
        place = next(net.parameters()).device
        for _ in range(3):
            net.zero_grad()
            loss = nn.functional.cross_entropy(net(x.to(place), words.to(place)), y.to(place))
            loss.backward()
            with torch.no_grad():
                own = list(net.parameters())
                torch._foreach_add_(own, [p.grad for p in own], alpha=-0.1)
        steps.append(loss.item())
    assert steps[0] == pytest.approx(steps[1], rel=1e-4)
    nets[1].cpu()
    assert all(a is b for a, b in zip(mine, nets[1].parameters(), strict=True)), "as for CUDA"
    for name, value in nets[0].state_dict().items():
        torch.testing.assert_close(nets[1].state_dict()[name], value, rtol=1e-3, atol=1e-4)


def test_hooks_run_on_a_thread_of_the_devices() -> None:
    import threading

    threads = []
    weight = torch.ones(2, device=HERE, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda _: threads.append(threading.get_ident()))
    (weight * 2).sum().backward()
    assert len(threads) == 1 and threads[0] != threading.get_ident()


# ---- when ----------------------------------------------------------------------------------------


def test_a_page_locked_copy_is_late_and_one_that_is_not_holds_the_host_up(
    locked: torch.Tensor,
) -> None:
    x, plain = torch.arange(5.0, 9, device=HERE), torch.zeros(4)
    side, event = Stream(HERE), Event()
    side.wait_stream(device.current_stream(HERE))
    lock(locked)
    torch.standin.take_counts()
    with stream(side):
        locked.copy_(x, non_blocking=True)
        event.record(side)
    assert locked.isnan().all() and not event.query()
    assert torch.standin.take_counts() == Counts(bytes_to_host=16, copies_to_host=1)
    event.synchronize()
    assert locked.tolist() == x.tolist()
    torch.standin.take_counts()
    with stream(side):
        plain.copy_(x, non_blocking=True)
    assert plain.tolist() == [5, 6, 7, 8]
    expected = Counts(bytes_to_host=16, copies_to_host=1, blocking=1, synchronisations=1)
    assert torch.standin.take_counts() == expected


def test_memory_that_is_asked_for_page_locked_is() -> None:
    x = torch.arange(4.0, device=HERE)
    places = [torch.empty(4, pin_memory=True), torch.ones(4).pin_memory()]
    torch.standin.take_counts()
    for place in places:
        place.copy_(x, non_blocking=True)
    assert torch.standin.take_counts().blocking == 0
    assert places[0].isnan().all() and places[1].isnan().all()
    device.synchronize(HERE)
    assert places[0].tolist() == places[1].tolist() == [0, 1, 2, 3]
    addresses = {place.data_ptr() for place in places}
    assert torch.empty(4, pin_memory=True).data_ptr() not in addresses
    del places[:], place
    assert torch.empty(4, pin_memory=True).data_ptr() in addresses
    assert torch.empty(4, pin_memory=True).is_pinned() and not torch.empty(4).is_pinned()


def test_who_changes_the_source_too_early_changes_what_arrives(locked: torch.Tensor) -> None:
    lock(locked)
    x = locked.to(HERE, non_blocking=True)
    locked.fill_(7)
    assert x.tolist() == [7, 7, 7, 7]


def test_what_another_stream_has_made_must_be_waited_for() -> None:
    x, side = torch.ones(4, device=HERE), Stream(HERE)
    with stream(side), pytest.raises(Race):
        x.mul_(2)
    side.wait_stream(device.current_stream(HERE))
    with stream(side):
        x.mul_(2)
    with pytest.raises(Race):
        x.sum()
    side.synchronize()
    assert x.tolist() == [2, 2, 2, 2]


def test_what_another_stream_still_reads_must_not_be_written() -> None:
    x, side = torch.ones(4, device=HERE), Stream(HERE)
    side.wait_stream(device.current_stream(HERE))
    with stream(side):
        y = x + 1
    with pytest.raises(Race):
        x.zero_()
    device.current_stream(HERE).wait_stream(side)
    x.zero_()
    assert y.tolist() == [2, 2, 2, 2]


def test_streams_take_turns_as_chance_has_it() -> None:
    orders = set()
    for seed in range(8):
        state().lanes.begin_again(seed, eagerness=0.0)
        done: list[int] = []
        note = done.append
        sides = [Stream(HERE) for _ in range(3)]
        for side in sides:
            state().lanes.launch(side.stream_id, partial(note, side.stream_id))
        for side in sides:
            side.synchronize()
        orders.add(tuple(n - sides[0].stream_id for n in done))
    assert len(orders) > 2


# ---- memory --------------------------------------------------------------------------------------


def on_its_way(locked: torch.Tensor, record: bool) -> Iterator[None]:
    """A copy of what nobody holds any more when it is made."""
    x, side = torch.ones(4, device=HERE), Stream(HERE)
    side.wait_stream(device.current_stream(HERE))
    with stream(side):
        lock(locked).copy_(x, non_blocking=True)
    if record:
        x.record_stream(side)
    del x
    gc.collect()
    yield
    side.synchronize()


def test_what_was_freed_is_garbage_to_a_stream_that_was_not_recorded(locked: torch.Tensor) -> None:
    for _ in on_its_way(locked, record=False):
        pass
    assert locked.isnan().all()


@pytest.mark.slow
def test_the_next_user_of_memory_freed_without_recording_its_stream_races_with_it(
    locked: torch.Tensor,
) -> None:
    for _ in on_its_way(locked, record=False):
        with pytest.raises(Race):
            torch.zeros(4, device=HERE)


@pytest.mark.slow
def test_what_was_recorded_is_kept_until_the_stream_is_done(locked: torch.Tensor) -> None:
    for _ in on_its_way(locked, record=True):
        torch.zeros(4, device=HERE)
    assert locked.tolist() == [1, 1, 1, 1]


def test_memory_is_used_again() -> None:
    x = torch.ones(4, device=HERE)
    address = x.data_ptr()
    del x
    y = torch.empty(4, device=HERE)
    assert y.data_ptr() == address and y.isnan().all()


def test_there_is_no_more_memory_than_a_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SETTINGS, "device_bytes", 4096)
    x = torch.empty(512, device=HERE)
    assert torch.standin.mem_get_info(HERE) == (2048, 4096)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        torch.empty(1024, device=HERE)
    torch.empty(1024, device=THERE)
    del x
    torch.empty(1024, device=HERE)
    device.set_per_process_memory_fraction(0.5, HERE)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1024, device=HERE)


def test_a_device_that_has_failed_says_so_for_ever(locked: torch.Tensor) -> None:
    lock(locked)
    x = torch.ones(2, device=HERE)
    device.fail()
    for asks in (x.cpu, x.tolist, lambda: x + 1, lambda: Event().record(), device.mem_get_info):
        with pytest.raises(RuntimeError, match="device-side assert triggered"):
            asks()
    assert device.Runtime().cudaHostUnregister(locked.data_ptr()) == 710


# ---- processes -----------------------------------------------------------------------------------


def in_child(body: object) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            body()  # type: ignore[operator]
        except RuntimeError as error:
            os._exit(7 if "fork" in str(error) else 8)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_naming_the_stand_in_device_initialises_nothing_and_a_fork_can_use_it() -> None:
    assert not torch.standin.is_initialized()
    assert in_child(lambda: torch.ones(1, device=HERE)) == 0


def test_the_stand_in_device_beside_a_gpu_refuses_instead_of_hanging(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="hide the GPUs"):
            torch.ones(1, device=HERE)


@pytest.mark.parametrize(
    ("asked", "seen"),
    [("", False), ("slow", False), ("not gpu", False), ("gpu", True), ("gpu and not slow", True)],
)
def test_tests_see_gpus_only_where_they_are_asked_for(asked: str, seen: bool) -> None:
    config: Any = SimpleNamespace(getoption=lambda name: asked)
    assert asks_for_gpus(config) is seen


def test_a_process_forked_after_initialisation_cannot_use_the_stand_in_device() -> None:
    x = torch.ones(1, device=HERE)
    assert torch.standin.is_initialized()
    for body in (lambda: torch.ones(1, device=HERE), x.cpu, lambda: x + 1, lambda: x.item()):
        assert in_child(body) == 7
    weight = torch.ones(1, requires_grad=True)
    assert in_child(lambda: weight.sum().backward()) == 7, "nor compute any gradient"


def test_a_pickled_tensor_initialises_whoever_reads_it() -> None:
    reader, writer = os.pipe()
    in_child(lambda: os.write(writer, pickle.dumps({"x": torch.ones(2, device=THERE)})))
    payload = os.read(reader, 1 << 16)
    assert not torch.standin.is_initialized()
    found = pickle.loads(payload)["x"]
    assert torch.standin.is_initialized()
    assert found.device == THERE and found.tolist() == [1, 1]


def test_saved_tensors_come_back_where_they_are_wanted() -> None:
    for where, expected in ((None, THERE), ("cpu", torch.device("cpu")), (HERE, HERE)):
        buffer = io.BytesIO()
        torch.save({"x": torch.arange(3.0, device=THERE)}, buffer)
        buffer.seek(0)
        found = torch.load(buffer, map_location=where)["x"]
        assert found.device == expected and found.tolist() == [0, 1, 2]


def test_random_numbers_are_the_devices_own() -> None:
    torch.manual_seed(3)
    host = torch.get_rng_state()
    one = torch.randn(4, device=HERE)
    assert torch.equal(host, torch.get_rng_state())
    torch.manual_seed(3)
    assert torch.equal(torch.randn(4, device=HERE), one)
    assert not torch.equal(torch.randn(4, device=HERE), one)


def test_what_is_copied_deeply_lies_where_it_lay() -> None:
    x = torch.arange(4.0, device=THERE)
    found = copy.deepcopy({"x": x[1:], "y": x})
    assert found["x"].device == THERE and found["x"].tolist() == [1, 2, 3]
    assert found["x"].untyped_storage().data_ptr() == found["y"].untyped_storage().data_ptr()
    x.zero_()
    assert found["y"].tolist() == [0, 1, 2, 3]


def test_memory_of_inference_is_spoilt_outside() -> None:
    with torch.inference_mode():
        x = torch.ones(4, device=HERE)
    del x
    assert torch.empty(4, device=HERE).isnan().all()


def test_norms_of_what_has_no_elements_are_none() -> None:
    nothing, one = torch.ones(0, device=HERE), torch.ones(1, device=HERE)
    assert [float(norm) for norm in torch._foreach_norm([nothing, one], 2.0)] == [0.0, 1.0]
    assert [float(norm) for norm in torch._foreach_norm([one], float("inf"))] == [1.0]
