"""What a forked worker inherits: open files, finalizers, pools, threads, locks, connections."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import queue
import random
import signal
import socket
import sqlite3
import subprocess
import tarfile
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, closing
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

from hybridtrain.engine.policies import WaitForAll
from hybridtrain.engine.server.server import ParameterServer
from hybridtrain.engine.worker.client import Client
from hybridtrain.engine.worlds import inherited
from hybridtrain.engine.worlds.channel import Channel, ChannelClosed, channel_pair
from hybridtrain.engine.worlds.inherited import look_through
from hybridtrain.engine.worlds.process_world import ProcessWorld

N_LINES = 3000


def run(body: Callable[[Client], Any], n_workers: int = 2, method: str = "fork") -> list[Any]:
    return ProcessWorld(ParameterServer(WaitForAll(), n_workers), n_workers, method).run(body)


# ---- files --------------------------------------------------------------------------------------


def line(number: int) -> bytes:
    return b"%07d\n" % number


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    path = tmp_path / "numbers"
    path.write_bytes(b"".join(map(line, range(N_LINES))))
    return path


def by_a_file(path: Path) -> Callable[[int], int]:
    file = path.open("rb")

    def read(index: int) -> int:
        file.seek(8 * index)
        return int(file.read(8))

    return read


def by_a_descriptor(path: Path) -> Callable[[int], int]:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)

    def read(index: int) -> int:
        os.lseek(fd, 8 * index, os.SEEK_SET)
        return int(os.read(fd, 8))

    return read


def by_a_file_without_name(path: Path) -> Callable[[int], int]:
    file = tempfile.TemporaryFile()  # noqa: SIM115
    file.write(path.read_bytes())

    def read(index: int) -> int:
        file.seek(8 * index)
        return int(file.read(8))

    return read


def by_a_zip(path: Path) -> Callable[[int], int]:
    with zipfile.ZipFile(path.with_suffix(".zip"), "w") as made:
        for number in range(300):
            made.writestr(str(number), line(number))
    archive = zipfile.ZipFile(path.with_suffix(".zip"))
    return lambda index: index - index % 300 + int(archive.read(str(index % 300)))


def by_a_tar(path: Path) -> Callable[[int], int]:
    with tarfile.open(path.with_suffix(".tar"), "w") as made:
        made.add(path, "numbers")
    archive = tarfile.open(path.with_suffix(".tar"))  # noqa: SIM115
    member = archive.extractfile("numbers")
    assert member is not None

    def read(index: int) -> int:
        member.seek(8 * index)
        return int(member.read(8))

    return read


@pytest.mark.few(3)
@pytest.mark.parametrize("n_workers", [3, 1])
@pytest.mark.parametrize(
    "opened", [by_a_file, by_a_descriptor, by_a_file_without_name, by_a_zip, by_a_tar]
)
def test_workers_read_what_they_look_for_in_a_file_that_was_opened_before_them(
    numbers: Path, opened: Callable[[Path], Callable[[int], int]], n_workers: int
) -> None:
    read = opened(numbers)

    def body(client: Client) -> int:
        client.gather("all are there", None)
        indices = np.random.default_rng(client.worker).integers(0, N_LINES, 4000).tolist()
        return sum(read(index) != index for index in indices)

    assert run(body, n_workers) == [0] * n_workers


def test_a_worker_begins_where_its_parent_was_and_does_not_move_it(numbers: Path) -> None:
    with numbers.open("rb", buffering=0) as file:
        file.seek(80)

        def body(client: Client) -> tuple[int, bool]:
            read = int(file.read(8 * (client.worker + 1))[-8:])
            return read, os.get_inheritable(file.fileno())

        assert run(body) == [(10, False), (11, False)]
        assert file.tell() == 80


def test_what_workers_write_to_a_common_file_lies_one_behind_the_other(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log, (tmp_path / "rows").open("a+") as rows:
        log.write("head\n")
        found = look_through({"callbacks[0]": [log, rows]}, (), 2, forked=True)

        def body(client: Client) -> None:
            with found.owned():
                for file in (log, rows):
                    file.write(f"worker {client.worker}\n")

        run(body)
        log.write("tail\n")
        assert found.lines == []
    ours = ["worker 0", "worker 1"]
    first, *middle, last = (tmp_path / "log").read_text().splitlines()
    assert (first, sorted(middle), last) == ("head", ours, "tail")
    assert sorted((tmp_path / "rows").read_text().splitlines()) == ours


def test_a_lock_on_a_file_is_the_workers_too_until_the_last_of_them_has_ended(
    tmp_path: Path,
) -> None:
    path = tmp_path / "lock"
    file = path.open("w+")
    fcntl.flock(file, fcntl.LOCK_EX)

    def body(client: Client) -> bool:
        client.gather("the parent has closed it", None)
        with path.open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        client.gather("all have looked", None)
        return True

    class Parent(ParameterServer):
        def on(self, event: Any) -> Any:
            file.close()
            return super().on(event)

    assert ProcessWorld(Parent(WaitForAll(), 2), 2).run(body) == [True, True]


def test_a_file_that_may_not_be_opened_again_is_one_line(
    numbers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with numbers.open("rb"):
        assert look_through({}, (), 2, True).lines == []
        monkeypatch.setattr(os, "access", lambda *_, **__: False)
        (said,) = [each for each in look_through({}, (), 2, True).lines if str(numbers) in each]
        assert "may not be opened a second time by this user" in said
        assert look_through({}, (), 1, True).lines == []


def test_locks_of_the_calling_process_on_a_file_stay(numbers: Path) -> None:
    with numbers.open("r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        look_through({"data": SimpleNamespace(file=file)}, {"data"}, 2, forked=True)

        def body(client: Client) -> bool:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False

        assert run(body) == [True, True]


def test_without_proc_an_open_file_is_named(numbers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inherited, "_DESCRIPTORS", Path("/there/is/none"))
    with numbers.open() as file, numbers.with_suffix(".log").open("w") as log:
        parts = {"train_dataloaders": SimpleNamespace(file=file, log=log)}
        (said,) = look_through(parts, parts, 2, True).lines
        assert said.startswith("train_dataloaders.file is an open file that cannot be opened a ")
        inherited.own_files()


# ---- finalizers and ends ------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_workers_end_removes_its_own_temporary_files_and_not_its_parents(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile() as file:
        made = run(_make_a_directory, 2, method)
        assert Path(folder).is_dir() and Path(file.name).is_file()
        assert [Path(each).exists() for each in made] == [False, False]


KEPT: list[Any] = []


def _make_a_directory(client: Client) -> str:
    KEPT.append(tempfile.TemporaryDirectory())
    return str(KEPT[-1].name)


def test_a_worker_ends_though_nobody_has_shut_its_process_pool_down() -> None:
    def body(client: Client) -> int:
        KEPT.append(ProcessPoolExecutor(1))
        return int(KEPT[-1].submit(abs, -client.worker).result())

    assert run(body) == [0, 1]


# ---- pools --------------------------------------------------------------------------------------

POOLS: dict[str, tuple[Callable[[], Any], Callable[[Any, int], Any]]] = {
    "threads": (lambda: ThreadPoolExecutor(2), lambda pool, x: pool.submit(abs, x).result()),
    "processes": (lambda: ProcessPoolExecutor(1), lambda pool, x: pool.submit(abs, x).result()),
    "a thread pool": (lambda: ThreadPool(2), lambda pool, x: pool.map(abs, [x])[0]),
    "a process pool": (lambda: multiprocessing.Pool(1), lambda pool, x: pool.apply(abs, [x])),
}


@pytest.mark.parametrize("kind", POOLS)
def test_a_pool_that_was_used_before_works_in_each_worker_and_in_the_parent(kind: str) -> None:
    make, use = POOLS[kind]
    pool = make()
    assert use(pool, -7) == 7
    found = look_through({"data": [pool]}, {"data"}, 2, forked=True)

    def body(client: Client) -> int:
        with found.owned():
            return int(use(pool, -client.worker))

    assert run(body) == [0, 1]
    assert use(pool, -5) == 5
    assert found.lines == []
    pool.terminate() if hasattr(pool, "terminate") else pool.shutdown()


def test_a_pool_that_was_shut_down_stays_so() -> None:
    pools = [ThreadPoolExecutor(1), ProcessPoolExecutor(1), ThreadPool(1)]
    pools[0].shutdown()  # type: ignore[union-attr]
    pools[1].shutdown()  # type: ignore[union-attr]
    pools[2].terminate()  # type: ignore[union-attr]
    assert look_through({"data": pools}, (), 2, True).pools == []


def test_a_pool_that_cannot_be_made_anew_is_one_line() -> None:
    class Others(ThreadPoolExecutor):
        def __init__(self) -> None:
            pass

    found = look_through({"data": Others()}, (), 1, True)
    assert found.pools == []
    assert found.lines[0].startswith("data is a pool whose threads forked workers do not have")


def test_arguments_of_a_pool_are_kept() -> None:
    marked: list[str] = []
    pool = ThreadPoolExecutor(3, "mine", marked.append, ("begun",))
    pool.submit(abs, 1).result()
    found = look_through({"data": pool}, (), 1, True)
    with found.owned():
        name = pool.submit(lambda: threading.current_thread().name).result()
    assert (name, marked, pool._max_workers) == ("mine_0", ["begun", "begun"], 3)
    pool.shutdown()


# ---- lines --------------------------------------------------------------------------------------


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def feeder(ends: ExitStack) -> Any:
    over = threading.Event()

    class Feeding:
        def __init__(self) -> None:
            self.queue: queue.Queue[int] = queue.Queue(1)
            thread = threading.Thread(target=self.feed, daemon=True)
            thread.start()
            ends.callback(thread.join)
            ends.callback(over.set)

        def feed(self) -> None:
            over.wait()

    return Feeding()


def feeder_of_a_queue(ends: ExitStack) -> Any:
    """The thread's function is none of the data's."""
    over, filled = threading.Event(), queue.Queue[int]()
    thread = threading.Thread(target=lambda _: over.wait(), args=(filled,), name="filler")
    thread.start()
    ends.callback(thread.join)
    ends.callback(over.set)
    return SimpleNamespace(queue=filled)


def timer(ends: ExitStack) -> Any:
    made = threading.Timer(1000, print)
    made.start()
    ends.callback(made.cancel)
    return SimpleNamespace(timer=made)


def held(lock: Any) -> Callable[[ExitStack], Any]:
    def make(ends: ExitStack) -> Any:
        lock.acquire()
        ends.callback(lock.release)
        return SimpleNamespace(lock=lock)

    return make


def held_by_a_thread(ends: ExitStack) -> Any:
    lock, has, over = threading.RLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            has.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    has.wait()
    ends.callback(thread.join)
    ends.callback(over.set)
    return SimpleNamespace(lock=lock)


def connected(ends: ExitStack) -> Any:
    one, other = socket.socketpair()
    ends.enter_context(one)
    ends.enter_context(other)
    return SimpleNamespace(client=SimpleNamespace(sock=one))


def database(ends: ExitStack) -> Any:
    return SimpleNamespace(db=ends.enter_context(closing(sqlite3.connect(":memory:"))))


def decoder(ends: ExitStack) -> Any:
    pipe = subprocess.PIPE
    process = ends.enter_context(subprocess.Popen(["cat"], stdin=pipe, stdout=pipe))
    ends.callback(process.kill)
    return SimpleNamespace(decoder=process)


def generator(made: Any) -> Callable[[ExitStack], Any]:
    return lambda ends: SimpleNamespace(rng=made)


Fault = tuple[Callable[[ExitStack], Any], str, str]
FAULTS: list[Fault] = [
    (feeder, "Thread-", "is a running thread, and forked workers do not have it"),
    (feeder_of_a_queue, "filler (", "is a running thread"),
    (timer, "data.timer", "is a running thread"),
    (held(threading.Lock()), "data.lock", "is a lock that is held while training starts"),
    (held(threading.RLock()), "data.lock", "is a lock that is held while training starts"),
    (held(threading.Condition()), "data.lock._lock", "is a lock that is held"),
    (held_by_a_thread, "data.lock", "is a lock that is held while training starts"),
    (generator(Future()), "data.rng", "is a result that a thread of this process has still to"),
    (connected, "data.client.sock", "is a connection that all 2 workers would write to and read"),
    (database, "data.db", "is a connection that was opened here, and its library does not allow"),
    (decoder, "data.decoder", "is a process that all 2 workers would write to and read from"),
    (generator(random.Random(1)), "data.rng", "all draw the same numbers (as under ddp)"),
    (generator(np.random.default_rng()), "data.rng", "all draw the same numbers"),
    (generator(np.random.RandomState(0)), "data.rng", "all draw the same numbers"),
    (generator(torch.Generator()), "data.rng", "all draw the same numbers"),
]


@pytest.mark.parametrize(("make", "name", "said"), FAULTS)
def test_what_workers_cannot_use_is_one_line_that_names_it_and_the_way_out(
    ends: ExitStack, make: Callable[[ExitStack], Any], name: str, said: str
) -> None:
    (text,) = look_through({"data": make(ends)}, {"data"}, 2, forked=True).lines
    assert text.startswith(name) and said in text and "\n" not in text
    assert any(way in text for way in ("setup hook", "on first use"))


@pytest.mark.parametrize(
    ("module", "name", "said"),
    [
        ("h5py._hl.files", "File", "is a file that is open for writing"),
        ("psycopg2.extensions", "connection", "its library does not allow"),
        ("builtins", "Environment", "its library does not allow"),  # of lmdb
    ],
)
def test_objects_of_packages_that_are_not_imported_are_known_by_the_names_of_their_classes(
    module: str, name: str, said: str
) -> None:
    kind = type(name, (), {"__module__": module, "mode": "r+"})
    (text,) = look_through({"data": [kind()]}, {"data"}, 2, True).lines
    assert text.startswith("data[0] is a ") and said in text
    kind.mode = "r"  # type: ignore[attr-defined]
    assert bool(look_through({"data": [kind()]}, {"data"}, 2, True).lines) == (name != "File")


def test_several_objects_with_one_fault_are_one_line() -> None:
    data = [random.Random(number) for number in range(20)]
    (text,) = look_through({"data": data}, {"data"}, 2, True).lines
    assert text.startswith("data[0] is a random generator")
    assert text.endswith("the same holds for data[1], data[2], data[3] and 16 others")


class Drawn(Dataset[int]):
    def __init__(self) -> None:
        self.rng = random.Random(0)

    def __len__(self) -> int:
        return 8


def harmless(ends: ExitStack) -> Any:
    """Everything of the kinds above that is all right."""
    seeded = torch.Generator()
    ended = subprocess.Popen(["true"])
    ended.wait()
    silent = ends.enter_context(subprocess.Popen(["sleep", "60"]))
    ends.callback(silent.kill)
    done: Future[int] = Future()
    done.set_result(1)
    return {
        "locks": [threading.Lock(), threading.RLock(), threading.Condition(), threading.Event()],
        "queues": [queue.Queue(), queue.SimpleQueue(), multiprocessing.get_context().Queue()],
        "thread": threading.Thread(target=print),
        "future": done,
        "sockets": [ends.enter_context(socket.socket())],
        "processes": [ended, silent],
        "loader": DataLoader(range(8), generator=seeded),  # type: ignore[arg-type]
        "sampler": RandomSampler(range(8), generator=seeded),
        "random": [random.SystemRandom(), random.random, np.random.rand, torch.default_generator],
    }


def test_what_workers_can_use_is_not_spoken_of(ends: ExitStack) -> None:
    parts = {"data": harmless(ends), "model": SimpleNamespace(rng=random.Random(0))}
    assert look_through(parts, {"data"}, 2, True).lines == []


def test_one_worker_alone_has_connections_and_generators_for_itself(ends: ExitStack) -> None:
    for make in (connected, decoder, generator(random.Random(0))):
        assert look_through({"data": make(ends)}, {"data"}, 1, True).lines == []


def test_a_data_set_of_the_model_has_generators_of_data() -> None:
    (text,) = look_through({"model": SimpleNamespace(own=Drawn())}, (), 2, True).lines
    assert text.startswith("model.own.rng is a random generator")


def test_spawned_workers_have_copies_of_generators_and_nothing_else(ends: ExitStack) -> None:
    parts = {"data": [Drawn(), connected(ends)]}
    found = look_through(parts, parts, 2, forked=False)
    assert [each.partition(" is")[0] for each in found.lines] == ["data[0].rng"]
    assert (found.pools, found.parts) == ([], {})


def test_a_file_for_reading_and_writing_that_workers_would_write_over_is_one_line(
    tmp_path: Path,
) -> None:
    with (tmp_path / "log").open("w+") as log:
        parts = {"callbacks[0]": SimpleNamespace(log=log)}
        (text,) = look_through(parts, (), 2, True).lines
        assert text.startswith("callbacks[0].log is a file that is open for reading and writing")
        assert look_through(parts, (), 1, True).lines == []


# ---- a program that reaps children itself -------------------------------------------------------


def _reap(*_: Any) -> None:
    while True:
        try:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                return
        except ChildProcessError:
            return


@pytest.fixture(params=["ignored", "handler", pytest.param("thread", marks=pytest.mark.slow)])
def reaping(request: pytest.FixtureRequest) -> Iterator[None]:
    """SIGCHLD is ignored, has a handler that reaps, or a thread reaps."""
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(0.005):
            _reap()

    thread = threading.Thread(target=go_on)
    handlers = {"ignored": signal.SIG_IGN, "handler": _reap}
    former = signal.signal(signal.SIGCHLD, handlers.get(request.param, signal.SIG_DFL))
    if request.param == "thread":
        thread.start()
    yield
    over.set()
    if request.param == "thread":
        thread.join()
    signal.signal(signal.SIGCHLD, former)


@pytest.mark.usefixtures("reaping")
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_come_to_their_end_though_the_program_reaps_children_itself(method: str) -> None:
    before = multiprocessing.active_children()
    assert run(_number_of, 2, method) == [0, 1]
    assert multiprocessing.active_children() == before


def _number_of(client: Client) -> int:
    return client.worker


@pytest.mark.usefixtures("reaping")
def test_a_death_is_noticed_though_nobody_knows_how_it_was() -> None:
    def body(client: Client) -> None:
        if client.worker == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        client.gather("never", None)

    with pytest.raises(RuntimeError, match=r"^worker 1 \(process \d+\) (ended|was killed)"):
        run(body)


def _send_to_nobody() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for send in (
        lambda channel: channel.send("a message"),
        lambda channel: channel.send("a message", 0),
        lambda channel: channel.post("a message"),
        lambda channel: channel.give_bells(),
    ):
        ours, theirs = channel_pair()
        theirs.close()
        with pytest.raises((ChannelClosed, OSError)):
            send(Channel(ours))


def test_a_program_with_the_default_sigpipe_is_not_ended_by_a_message_to_a_lost_worker() -> None:
    process = multiprocessing.get_context("fork").Process(target=_send_to_nobody)
    process.start()
    process.join()
    assert process.exitcode == 0
