"""Every event of a run is written down: small, at once, and readable however the run ended."""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from hybridtrain import HybridStrategy
from hybridtrain.engine.policies import make_policy
from hybridtrain.engine.protocol.events import Received, Removed
from hybridtrain.engine.protocol.messages import (
    Begin,
    Gather,
    Gathered,
    Gone,
    MadeStep,
    Push,
    Released,
    Resumed,
)
from hybridtrain.engine.recording import Record, find_record, read_record, service_times
from hybridtrain.engine.recording.record_file import CELL_BYTES, Writer
from hybridtrain.engine.recording.recorder import KINDS, OwnTime, RecordingServer
from hybridtrain.engine.server.server import ParameterServer
from hybridtrain.errors import UserError
from tests.lightning.toys import Regression, fit, make_trainer, regression_data
from tests.support.headers import header


def recorded(folder: Path, policy: Any = "async", **options: Any) -> Record:
    """The record of a small run with two workers."""
    fit(HybridStrategy(policy, record=folder), 2, 4, **options)
    return read_record(find_record(folder))


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["hybrid", "async"])
def test_a_record_holds_every_push_in_its_order_with_its_time(tmp_path: Path, policy: str) -> None:
    record = recorded(tmp_path, policy)
    kinds = Counter(event.kind for event in record.events())
    samples = record.of_kind("Push")["samples"]
    assert samples.sum() == 3 * 48
    assert kinds["Push"] == len(samples) == 3 * 12
    assert kinds["Finished"] == kinds["Lost"] == 2
    times = [event.at_s for event in record.events()]
    assert times == sorted(times)
    assert record.whole and record.told["end"]["stats"]["samples"] == 3 * 48


@pytest.mark.slow
def test_an_event_takes_28_bytes_and_a_run_of_a_thousand_pushes_less_than_36_each(
    tmp_path: Path,
) -> None:
    record = recorded(tmp_path, "async", data=regression_data(400), max_epochs=10)
    assert len(record.of_kind("Push")) == 1000
    assert record.cells.nbytes == CELL_BYTES * len(record.cells)
    assert record.path.stat().st_size < 36 * len(record.cells)


def test_the_record_ends_with_the_parameters_that_training_has_come_to(tmp_path: Path) -> None:
    one, other = recorded(tmp_path / "one", "hybrid"), recorded(tmp_path / "two", "hybrid")
    assert one.told["end"]["parameters"] == other.told["end"]["parameters"]
    assert one.told["end"]["optimizers"] == other.told["end"]["optimizers"]
    assert one.told["begin"] == other.told["begin"]
    assert one.told["begin"]["parameters"] != one.told["end"]["parameters"]
    assert one.told["data 0"] == other.told["data 0"]
    seen = [[(e.worker, e.print) for e in r.events() if e.kind == "Push"] for r in (one, other)]
    assert sorted(seen[0]) == sorted(seen[1])


@pytest.mark.wide
def test_python_does_not_record_unless_asked_and_never_a_validation(tmp_path: Path) -> None:
    strategy = HybridStrategy("hybrid", record=tmp_path)
    _, trainer = fit(strategy, 2, 4, max_epochs=1)
    trainer.validate(Regression(), torch.utils.data.DataLoader(regression_data()), verbose=False)
    assert [path.name for path in tmp_path.iterdir()] == ["record.bin"]
    assert HybridStrategy("hybrid").recording is None


@pytest.mark.wide
def test_a_second_run_in_the_same_directory_leaves_the_first_ones_record(tmp_path: Path) -> None:
    first = recorded(tmp_path, "hybrid", max_epochs=1)
    content = first.path.read_bytes()
    second = recorded(tmp_path, "hybrid", max_epochs=1)
    assert [first.path.name, second.path.name] == ["record.bin", "record-2.bin"]
    assert first.path.read_bytes() == content


@pytest.mark.slow
def test_a_directory_may_have_a_dot_in_its_name_and_a_file_any_ending(tmp_path: Path) -> None:
    folder = tmp_path / "lr0.1"
    folder.mkdir()
    assert recorded(folder, "hybrid", max_epochs=1).path == folder / "record.bin"
    assert recorded(tmp_path / "mine.rec", "hybrid", max_epochs=1).path == tmp_path / "mine.rec"
    assert {path.name for path in tmp_path.iterdir()} == {"lr0.1", "mine.rec"}


def test_an_optimizer_that_cannot_tell_its_state_ends_the_record_only(tmp_path: Path) -> None:
    def state() -> Any:
        raise RuntimeError("I shall not tell")

    server = RecordingServer(Writer(tmp_path / "record.bin", KINDS), make_policy("async"), 1)
    does = lambda *_: None  # noqa: E731
    parts = {"updates": [SimpleNamespace(state=state)], "correct_by": does, "close": does}
    secretive = SimpleNamespace(**parts)
    server.adopt(None, cast(Any, secretive))
    with pytest.warns(UserWarning, match="incomplete: I shall not tell"):
        server.close()


def test_a_restart_ends_the_record_and_is_said(tmp_path: Path) -> None:
    path = tmp_path / "record.bin"
    server = RecordingServer(Writer(path, KINDS), make_policy("async"), 2)
    server.on(Removed(1, announced=True, returns=True))
    n_bytes = path.stat().st_size
    server.on(Removed(0))
    with pytest.warns(UserWarning, match="incomplete: worker 1 was restarted"):
        server.close()
    assert path.stat().st_size == n_bytes


# ---- cut short ----------------------------------------------------------------------------------


@pytest.mark.wide
def test_a_record_cut_short_anywhere_is_a_record_of_the_beginning(tmp_path: Path) -> None:
    record = recorded(tmp_path, "async", max_epochs=1)
    content, whole = record.path.read_bytes(), list(record.events())
    cut = tmp_path / "cut.bin"
    said = False  # what was run; a long text, where many modules are imported
    for n_bytes in range(CELL_BYTES, len(content) - CELL_BYTES, 331):
        cut.write_bytes(content[:n_bytes])
        try:
            part = read_record(cut)
        except UserError as error:
            assert not said and "before it has said what was run" in str(error)
            continue
        said = True
        assert list(part.events()) == whole[: len(part.cells)]
        assert not part.whole
    assert said and len(part.cells) > 10


class Killed(Regression):
    """Kills the process that started it, as ``kill -9`` does, in the middle of its training."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            time.sleep(0.2)
            os.kill(os.getppid(), 9)


@pytest.mark.wide
def test_what_a_killed_run_has_written_is_there(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        fit(HybridStrategy("async", record=tmp_path), 2, 4, module=Killed)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == 9
    record = read_record(find_record(tmp_path))
    assert not record.whole
    assert len(record.of_kind("Push")) >= 3


@pytest.mark.wide
def test_a_full_disk_ends_the_record_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, left = os.write, [40]

    def refuse(fd: int, content: bytes) -> int:
        if Path(f"/proc/self/fd/{fd}").resolve().name == "record.bin":
            left[0] -= 1
            if left[0] <= 0:
                raise OSError(28, "No space left on device")
        return write(fd, content)

    monkeypatch.setattr(os, "write", refuse)
    with pytest.warns(UserWarning, match="incomplete.*No space left"):
        trainer = make_trainer(HybridStrategy("async", record=tmp_path), 2, max_epochs=1)
        trainer.fit(Regression(), torch.utils.data.DataLoader(regression_data(), batch_size=4))
    assert trainer.global_step == 12
    assert 0 < len(read_record(tmp_path / "record.bin").cells) < 40


# ---- service times ------------------------------------------------------------------------------


class Slow(Regression):
    """Worker 1 takes 60 ms more; validating takes long."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.06 * self.trainer.global_rank)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.3)


@pytest.mark.wide
def test_service_times_are_what_each_worker_computes_without_waiting(tmp_path: Path) -> None:
    recorded(tmp_path, "hybrid", module=Slow, max_epochs=2)
    times = service_times(tmp_path)
    assert {worker: len(found) for worker, found in times.items()} == {0: 12, 1: 12}
    fast, slow = (float(np.median(times[worker])) for worker in (0, 1))
    assert slow > 0.06 and slow - fast > 0.03, "worker 0 waits for worker 1, but does not compute"


def test_own_time_leaves_out_waiting_and_validation() -> None:
    own = OwnTime(2)
    own.goes_on(0, 1.0, fresh=True)
    assert own.stops(0, 3.0) == 2.0  # asks for the next mini-batch, say
    own.goes_on(0, 10.0, fresh=False)
    own.pause(11.0)
    own.resume(20.0)
    assert own.stops(0, 20.5) == 2.0 + 1.0 + 0.5
    own.goes_on(0, 21.0, fresh=True)
    assert own.stops(0, 21.25) == 0.25
    assert own.stops(1, 30.0) == 0.0


def test_news_that_nobody_has_asked_for_change_no_service_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who computes goes on computing, and who waits goes on waiting."""
    at_s, writer = [0.0], Writer(tmp_path / "record.bin", KINDS)
    server = RecordingServer(writer, make_policy("async"), 2, clock=lambda: at_s[0])

    def happens(now_s: float, worker: int, said: Any, reply: Any = None) -> None:
        at_s[0], replies = now_s, [] if reply is None else [(0, reply)]
        monkeypatch.setattr(ParameterServer, "_on", lambda self, event: replies)
        server.on(Received(worker, said))

    writer.tell({"header": header(2)})
    happens(1.0, 0, Begin(), Released(0))
    happens(3.0, 1, Resumed(), Gone(1, 0))
    happens(5.0, 0, Gather("epoch", b""))
    happens(7.0, 1, Resumed(), Gone(1, 0))
    happens(9.0, 1, Gather("epoch", b""), Gathered((), (0,)))
    happens(10.0, 0, Push(0, 4.0), Released(1))
    writer.close()
    pushes = read_record(tmp_path / "record.bin").of_kind("Push")
    assert pushes["own_s"].tolist() == [(5.0 - 1.0) + (10.0 - 9.0)]


def test_steps_that_are_told_of_together_share_their_time_and_all_their_samples_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_s, writer = [1.0], Writer(tmp_path / "record.bin", KINDS)
    server = RecordingServer(writer, make_policy("hogwild"), 1, clock=lambda: at_s[0])
    writer.tell({"header": header(1)})
    monkeypatch.setattr(ParameterServer, "_on", lambda self, event: [(0, Released(0))])
    made = tuple(MadeStep(0, 4.0) for _ in range(3))
    for push in (made[0], replace(made[0], former=made)):
        server.on(Received(0, push))
        at_s[0] += 8.0
    writer.close()
    pushes = read_record(tmp_path / "record.bin").of_kind("Push")
    assert pushes["own_s"].tolist() == [0.0, *[8.0 / 4] * 4]
    assert pushes["samples"].tolist() == [4.0] * 5


# ---- bad input ----------------------------------------------------------------------------------


def complaint(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_record(path)
    return str(caught.value)


def test_what_is_no_record_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"")
    assert "no record of a run" in complaint(path)
    path.write_bytes(os.urandom(4096))
    assert "no record of a run" in complaint(path)
    title = b"hybridtrain record  99\n\n"
    path.write_bytes(title + struct.pack("<I", zlib.crc32(title)) + bytes(56))
    assert "version 99" in complaint(path)
    path.unlink()
    Writer(path, KINDS).close()
    assert "ends before it has said" in complaint(path)


def test_a_damaged_record_is_named_and_never_executed(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "x.bin", KINDS)
    writer.tell({"header": header(1, ["Push"])})
    writer.event("Gather", 0, 0, 0.0, 0.0, 0.0)
    writer.close()
    assert "unknown kind" in complaint(tmp_path / "x.bin")
    content = bytearray((tmp_path / "x.bin").read_bytes())
    content[2 * CELL_BYTES : 3 * CELL_BYTES] = bytes(CELL_BYTES)
    (tmp_path / "x.bin").write_bytes(content)
    assert f"x.bin: the record is damaged at byte {2 * CELL_BYTES}" in complaint(tmp_path / "x.bin")


def test_a_directory_without_a_record_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no record in it"):
        find_record(tmp_path)
    with pytest.raises(UserError, match="there is no such directory"):
        find_record(tmp_path / "nowhere")


def test_where_nothing_can_be_written_is_said_before_a_process_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        fit(HybridStrategy("hybrid", record=tmp_path / "file" / "below"), 2, 4)
    with pytest.raises(UserError, match="record=7 was given"):
        HybridStrategy("hybrid", record=7)  # type: ignore[arg-type]


def test_service_times_of_a_worker_that_has_done_nothing_are_refused(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "record.bin", KINDS)
    writer.tell({"header": header(2)})
    writer.event("Push", 0, 0, 0.0, 1.5, 4.0)
    writer.close()
    with pytest.raises(UserError, match="worker 1 has pushed nothing"):
        service_times(tmp_path)
