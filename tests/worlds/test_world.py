"""Real processes, tiny bodies: results, failures, signals, and nothing left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import selectors
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from hybridtrain.engine.policies import OnArrival, WaitForAll
from hybridtrain.engine.server.server import ParameterServer
from hybridtrain.engine.worker.client import Client
from hybridtrain.engine.worlds.process_world import ProcessWorld
from hybridtrain.engine.worlds.signals import Interrupted, caught_signals
from hybridtrain.engine.worlds.worker_exit import Failed, WorkerDied, WorkerError
from tests.picking import by_default
from tests.support import bodies
from tests.support.ends import gone, wait_until


def world(n_workers: int, **options: Any) -> ProcessWorld:
    return ProcessWorld(ParameterServer(WaitForAll(), n_workers), n_workers, **options)


def traces() -> tuple[set[str], list[Any], set[str]]:
    """Open descriptors, child processes, threads."""
    gc.collect()
    descriptors = {path.name for path in Path("/proc/self/fd").iterdir() if path.exists()}
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return descriptors, children, {thread.name for thread in threading.enumerate()}


@contextmanager
def within(seconds: float) -> Iterator[None]:
    begun_s = time.monotonic()
    yield
    assert time.monotonic() - begun_s < seconds


# ---- results ------------------------------------------------------------------------------------


def test_results_come_in_the_order_of_the_workers() -> None:
    def body(client: Client) -> tuple[int, bytes]:
        time.sleep(0.05 * (2 - client.worker))  # the last one is first
        return client.worker, bytes(1 << 20)

    assert world(3).run(body) == [(n, bytes(1 << 20)) for n in range(3)]


def test_workers_meet_through_the_server() -> None:
    assert world(3).run(bodies.meet) == [[0, 1, 4]] * 3


@pytest.mark.parametrize("policy", [WaitForAll, OnArrival])
def test_gradients_in_shared_memory_move_parameters_in_shared_memory(policy: Any) -> None:
    if policy is OnArrival:
        server = ParameterServer(policy(), 1)
        (result,) = ProcessWorld(server, 1).run(partial(bodies.descend, n_steps=0))
        assert result == [4.0] * 20
        return
    w = torch.nn.Parameter(torch.full((20,), 4.0))
    optimizer = torch.optim.SGD([w], lr=0.25, momentum=0.5)
    for _ in range(3):
        w.grad = w.detach() - 0.5  # the mean over the workers 0 and 1
        optimizer.step()
    assert world(2).run(bodies.descend) == [w.tolist()] * 2


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "method", by_default(["fork", "spawn", "forkserver"], "fork", "forkserver")
)
def test_however_it_was_started_a_worker_hands_nothing_of_the_run_on(method: str) -> None:
    assert world(1, start_method=method).run(bodies.inheritable) == [[]]


def test_a_worker_has_its_number_of_threads_and_flushes_denormals() -> None:
    def body(client: Client) -> tuple[int, float]:
        return torch.get_num_threads(), float(torch.tensor(1e-40) * 0.5)

    assert world(1, threads_per_worker=2).run(body) == [(2, 0.0)]


def test_forking_after_torch_has_used_its_threads_does_not_hang() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        bodies.multiply(None)  # type: ignore[arg-type]
        with within(20):
            results = world(2, threads_per_worker=2).run(bodies.multiply)
        assert results == [400.0, 400.0]
        assert torch.get_num_threads() == 2, "the parent's own setting comes back"
    finally:
        torch.set_num_threads(threads)


def test_a_world_may_run_beside_the_main_thread() -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(world(2).run(bodies.meet)))
    thread.start()
    thread.join(30)
    assert results == [[0, 1], [0, 1]]


# ---- failures -----------------------------------------------------------------------------------


def failure(kind: str) -> BaseException:
    """What the parent raises; the worker that waits is set free at once."""
    with within(10), pytest.raises(BaseException) as caught:
        world(2).run(partial(bodies.fail, kind=kind))
    return caught.value


def test_a_workers_exception_appears_with_its_type_number_and_traceback() -> None:
    error = failure("zero")
    assert type(error) is ZeroDivisionError
    (note,) = error.__notes__
    assert note.startswith("This happened in worker 1, starting up:")
    assert "return 1 / 0" in note
    assert "ZeroDivisionError: division by zero" in note


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("picky", "Picky: ab"),
        ("local", "LocalError: made here"),
        ("exit", "SystemExit: 0"),
        ("generator", "GeneratorExit: of the user"),
        ("local group", "ExceptionGroup: several (1 sub-exception)"),
        ("unreadable", "Unreadable: <exception str() failed>"),
        ("interrupting", "Pickled: made here"),
        ("no exception", "Pickled: made here"),
        ("no notes", "NoNotes: made here"),
    ],
)
def test_an_exception_that_cannot_travel_is_told_in_words(kind: str, words: str) -> None:
    error = failure(kind)
    assert type(error) is WorkerError
    assert str(error).startswith("worker 1 failed: ")
    assert str(error).endswith(words)
    assert "bodies.py" in error.__notes__[0]


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit("of the user")])
def test_what_would_end_this_process_in_silence_is_told_in_words(error: BaseException) -> None:
    assert type(Failed.of(error).rebuild(1)) is WorkerError


def test_signals_wake_what_they_have_woken_before() -> None:
    before = signal.set_wakeup_fd(-1)
    try:
        with selectors.DefaultSelector() as selector, caught_signals([], selector):
            pass
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.set_wakeup_fd(before)


def test_a_handler_that_python_does_not_know_becomes_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_ = Mock(return_value=None)  # as signal.signal returns it where another language has set it
    monkeypatch.setattr(signal, "signal", set_)
    with selectors.DefaultSelector() as selector, caught_signals([], selector):
        pass
    assert call(signal.SIGTERM, signal.SIG_DFL) in set_.mock_calls
    assert call(signal.SIGTERM, None) not in set_.mock_calls


def test_a_group_of_exceptions_arrives_whole() -> None:
    error = failure("group")
    assert isinstance(error, ExceptionGroup)
    assert [type(each) for each in error.exceptions] == [ValueError, KeyError]


def test_a_keyboard_interrupt_of_the_users_own_code_is_no_silent_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = failure("ctrl-c")
    assert type(error) is KeyboardInterrupt
    told = capsys.readouterr().err
    assert "worker 1" in told and "bodies.py" in told and "KeyboardInterrupt" in told


def test_a_result_that_cannot_travel_is_an_error_of_that_worker() -> None:
    error = failure("unpicklable")
    assert "pickle" in str(error)
    assert "worker 1" in error.__notes__[0]


def test_a_worker_that_exits_without_a_word_is_named_with_its_code() -> None:
    error = failure("code 3")
    assert type(error) is WorkerDied
    assert "worker 1 (process " in str(error)
    assert str(error).endswith("exited with code 3, starting up")


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGUSR1])
def test_a_worker_that_is_killed_is_named_within_a_second(signum: signal.Signals) -> None:
    begun_s = time.monotonic()
    with pytest.raises(WorkerDied, match=rf"worker 1 \(process \d+\) was killed by {signum.name}"):
        world(3).run(partial(bodies.die, signum=signum))
    assert time.monotonic() - begun_s < 3, "starting three processes included"


def test_the_children_of_a_dead_worker_do_not_keep_its_line_alive() -> None:
    def body(client: Client) -> None:
        if client.worker == 1:
            if os.fork() == 0:  # as a data loader does; it holds the socket
                time.sleep(2)
                os._exit(0)
            os._exit(3)
        client.gather("never", None)

    with within(1.5), pytest.raises(WorkerDied, match=r"worker 1 .* exited with code 3"):
        world(2).run(body)


def test_a_worker_that_does_not_stop_is_killed_after_its_grace(tmp_path: Path) -> None:
    def body(client: Client) -> None:
        if client.worker == 0:
            bodies.hang(client, tmp_path)
        while not (tmp_path / "0.pid").exists():
            time.sleep(0.01)
        raise ArithmeticError

    with within(5), pytest.raises(ArithmeticError):
        world(2, grace_s=0.3).run(body)
    assert gone(int((tmp_path / "0.pid").read_text()))


def test_the_first_failure_is_the_one_reported() -> None:
    def body(client: Client) -> None:
        try:
            if client.worker == 1:
                raise ArithmeticError("first")
            client.gather("never", None)
        finally:
            if client.worker == 0:
                raise OSError("second, while ending")

    with pytest.raises(ArithmeticError, match="first"):
        world(2).run(body)


@pytest.mark.slow
def test_what_cannot_be_sent_to_a_spawned_worker_starts_none() -> None:
    before = traces()
    with pytest.raises((AttributeError, TypeError, OSError), match=r"pickle|local"):
        world(2, start_method="spawn").run(lambda client: None)
    after = traces()
    # multiprocessing keeps a tracker process for spawned children, with a pipe to it.
    assert len(after[1]) <= len(before[1]) + 1
    assert len(after[0]) <= len(before[0]) + 1


# ---- nothing is left behind ---------------------------------------------------------------------


@pytest.mark.wide
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "body",
    [bodies.descend, partial(bodies.fail, kind="zero"), bodies.die],
    ids=["success", "failure", "death"],
)
def test_no_descriptor_process_or_thread_outlives_a_run(body: Callable[[Client], Any]) -> None:
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    before = traces()
    kept = world(2)  # even while somebody keeps the world
    try:
        kept.run(body)
    except (ZeroDivisionError, WorkerDied) as error:
        del error
    kept.server = None  # type: ignore[assignment]  # the server owns the parameters
    assert traces() == before
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert multiprocessing.active_children() == []


# ---- signals: in a process of their own ---------------------------------------------------------


class Parent:
    """A forked process that runs a world of two workers, and exits with what ended it."""

    def __init__(self, body: Any, folder: Path, grace_s: float) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the child makes its own threads
            self.pid = os.fork()
        if self.pid == 0:
            os._exit(self._run(body, folder, grace_s))
        files = [folder / f"{n}.pid" for n in range(2)]
        wait_until(lambda: all(f.exists() and f.read_text() for f in files))
        self.workers = [int(f.read_text()) for f in files]

    @staticmethod
    def _run(body: Any, folder: Path, grace_s: float) -> int:
        torch.set_num_threads(1)
        try:
            world(2, grace_s=grace_s).run(partial(body, folder=folder))
        except Interrupted as interruption:
            return 100 + interruption.signum
        except BaseException:
            return 99
        return 0

    def kill(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def wait(self) -> int:
        """How it ended; by then no worker may be left."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        wait_until(lambda: all(map(gone, self.workers)), 2.0)
        return code


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_at_the_next_boundary(tmp_path: Path, signum: int) -> None:
    parent = Parent(bodies.wait_for_stop, tmp_path, grace_s=60)
    with within(5):
        parent.kill(signum)
        assert parent.wait() == 100 + signum


def test_a_signal_repeated_at_once_is_the_same_signal_later_it_means_now(tmp_path: Path) -> None:
    parent = Parent(bodies.hang, tmp_path, grace_s=60)
    parent.kill(signal.SIGTERM)
    time.sleep(0.2)
    parent.kill(signal.SIGTERM)  # as timeout(1) does
    time.sleep(1.0)
    assert not gone(parent.pid)
    with within(5):
        parent.kill(signal.SIGINT)
        assert parent.wait() == 100 + signal.SIGTERM


def test_workers_leave_signals_to_their_parent(tmp_path: Path) -> None:
    parent = Parent(bodies.wait_for_stop, tmp_path, grace_s=60)
    for pid in parent.workers:  # as a terminal does with Ctrl-C: the whole group gets it
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    time.sleep(0.2)
    assert not any(map(gone, parent.workers))
    parent.kill(signal.SIGINT)
    assert parent.wait() == 100 + signal.SIGINT


@pytest.mark.wide
def test_trap_17_no_worker_survives_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent = Parent(bodies.hang, tmp_path, grace_s=60)
    parent.kill(signal.SIGKILL)
    assert parent.wait() == -signal.SIGKILL
