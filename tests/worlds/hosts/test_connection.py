"""Connections between hosts: what arrives, who is turned away, and how they end."""

from __future__ import annotations

import errno
import mmap
import os
import random
import select
import signal
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridtrain.errors import UserError
from hybridtrain.hosts import connection, door, sockets, transport
from hybridtrain.hosts.connection import HostConnection, HostLost, Listener, dial
from hybridtrain.hosts.key import Key

KEY, OTHER = Key.new(), Key.new()
HOME = "127.0.0.1"
PATIENCE_S = 60.0  # until a test gives up; nothing waits that long
SIZE = 8 << 20


@pytest.fixture
def listener() -> Iterator[Listener]:
    with closing(Listener(HOME, 0, KEY, {"run": "a"})) as made:
        yield made


@pytest.fixture
def ends(listener: Listener) -> Iterator[tuple[HostConnection, HostConnection]]:
    """Host 0's end and that of host 1, with 8 MiB of memory each, all of which may be written."""
    with closing(call(listener)) as theirs, closing(accepted(listener)) as ours:
        for each in (ours, theirs):
            each.attach(memory(), [(0, SIZE)])
        yield ours, theirs


def memory() -> memoryview:
    return memoryview(mmap.mmap(-1, SIZE))


def of(end: HostConnection) -> memoryview:
    assert end._memory is not None
    return end._memory


def call(listener: Listener, host: int = 1, **about: Any) -> HostConnection:
    return dial(HOME, listener.port, KEY, host, about, PATIENCE_S)


def accepted(listener: Listener) -> HostConnection:
    while True:
        assert select.select([listener], [], [], PATIENCE_S)[0]
        if made := listener.accepted():
            return made[0]


def refusal(listener: Listener) -> str:
    while True:
        assert select.select([listener], [], [], PATIENCE_S)[0]
        assert listener.accepted() == []
        if (line := listener.refused()) is not None:
            return line


def received(end: HostConnection, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        assert select.select([end], [], [], PATIENCE_S)[0], found
        found += end.receive()
    return found


def reason(end: HostConnection) -> str:
    """Why it is lost, behind all messages."""
    while select.select([end], [], [], PATIENCE_S)[0]:
        try:
            end.receive()
        except HostLost as error:
            return str(error)
    raise AssertionError("nothing has ended")


def later() -> float:
    return time.monotonic() + PATIENCE_S


def threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith(("host", "greeting"))}


def test_the_last_message_arrives_however_long_its_rows_take(
    ends: tuple[HostConnection, HostConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = ends
    read = sockets.read_exactly

    def slowly(sock: Any, room: memoryview, until: float | None = None) -> None:
        time.sleep(0.3 if len(room) > transport.FRAME.size else 0.0)
        read(sock, room, until)

    monkeypatch.setattr(sockets, "read_exactly", slowly)
    monkeypatch.setattr(transport, "FRAME_BYTES", 1 << 20)
    monkeypatch.setattr(transport, "_LAST_S", 2.0)
    ours.send("last", [(0, SIZE)])
    ours.close()
    assert received(theirs, 1) == ["last"]


# ---- messages and spans --------------------------------------------------------------------------


def test_both_sides_know_each_other(listener: Listener) -> None:
    with closing(call(listener, 3, gpus=2)) as theirs, closing(accepted(listener)) as ours:
        assert (ours.host, ours.about) == (3, {"gpus": 2})
        assert (theirs.host, theirs.about) == (0, {"run": "a"})


@pytest.mark.parametrize("down", [False, True])
def test_messages_and_spans_of_all_sizes_arrive_in_order(
    ends: tuple[HostConnection, HostConnection], down: bool
) -> None:
    source, sink = ends if down else ends[::-1]
    of(source)[:] = random.Random(1).randbytes(SIZE)
    spans = [(0, 0), (1, 2), (5, (3 << 20) + 6), (4 << 20, 5 << 20), (SIZE - 1, SIZE)]
    for number, span in enumerate(spans):
        source.send((number, b"x" * (number * 100_000)), [span])
    source.send("both", spans[1:3])
    source.send("none")
    found = received(sink, 7)
    assert [m[0] for m in found[:5]] == [*range(5)] and found[5:] == ["both", "none"]
    assert [len(m[1]) for m in found[:5]] == [number * 100_000 for number in range(5)]
    for first, end in spans:
        assert of(sink)[first:end] == of(source)[first:end]
    assert not any(of(sink)[6 << 20 : 7 << 20])
    assert source.stats()["sent"] == sink.stats()["received"] > 4 << 20


def test_many_messages_both_ways_at_once(ends: tuple[HostConnection, HostConnection]) -> None:
    ours, theirs = ends
    for number in range(300):
        ours.send(number, [(number * 100, number * 100 + 50)])
        theirs.send(-number, [(SIZE // 2, SIZE // 2 + number)])
    assert received(theirs, 300) == [*range(300)]
    assert received(ours, 300) == [-number for number in range(300)]


def test_a_span_lies_there_when_its_message_is_handed_out(
    ends: tuple[HostConnection, HostConnection],
) -> None:
    ours, theirs = ends
    for number in range(1, 20):
        of(theirs)[: 2 << 20] = bytes([number]) * (2 << 20)
        theirs.send(number, [(0, 2 << 20)])
        assert received(ours, 1) == [number]
        assert of(ours)[0] == of(ours)[(2 << 20) - 1] == number


def test_spans_wait_for_the_memory_but_large_messages_do_not(listener: Listener) -> None:
    with closing(call(listener)) as theirs, closing(accepted(listener)) as ours:
        theirs.attach(memory(), [])
        theirs.send(b"l" * (3 << 20))
        of(theirs)[:4] = b"rows"
        theirs.send("rows", [(0, 4)])
        assert received(ours, 1) == [b"l" * (3 << 20)]
        ours.attach(memory(), [(0, 4)])
        assert received(ours, 1) == ["rows"]
        assert of(ours)[:5] == b"rows\0"


def test_tensors_travel(ends: tuple[HostConnection, HostConnection]) -> None:
    ours, theirs = ends
    tensor = torch.arange(10_000.0)
    ours.send({"state": tensor})
    assert torch.equal(received(theirs, 1)[0]["state"], tensor)


def test_a_span_outside_the_memory_is_a_mistake_of_the_sender(
    ends: tuple[HostConnection, HostConnection],
) -> None:
    for span in ((-1, 4), (4, 3), (0, SIZE + 1)):
        with pytest.raises(ValueError, match="no part"):
            ends[0].send("x", [span])


# ---- what breaks a connection --------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize("span", [(199, 201), (99, 100), (90, 101), (0, 1), (SIZE - 1, SIZE)])
def test_a_span_outside_may_write_breaks_the_connection_and_writes_nothing(
    listener: Listener, span: tuple[int, int]
) -> None:
    with closing(call(listener)) as theirs, closing(accepted(listener)) as ours:
        ours.attach(memory(), [(100, 200), (300, 400)])
        theirs.attach(memory(), [])
        mine = of(ours)
        of(theirs)[:] = b"x" * SIZE
        theirs.send("bad", [span])
        assert "may not write" in reason(ours)
        assert "its process has ended" in reason(theirs)
        assert not any(mine)


FRAME = transport.FRAME.pack


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([FRAME(0, 0, 4) + b"rows", FRAME(0, 0, 4) + b"rows"], "frame 0 of its rows in place of"),
        ([FRAME(1, 0, 4) + b"rows"], "frame 1 of its rows in place of frame 0"),
        ([FRAME(0, 0, 1 << 40)], "more than"),
        ([FRAME(0, 2**64 - 2, 4)], "may not write"),
        ([FRAME(0, SIZE - 2, 4)], "may not write"),
    ],
)
def test_replayed_reordered_and_damaged_frames_break_the_connection(
    listener: Listener, frames: list[bytes], why: str
) -> None:
    with closing(call(listener)) as theirs, closing(accepted(listener)) as ours:
        ours.attach(memory(), [(0, SIZE)])
        theirs._outward.sendall(b"".join(frames))
        assert why in reason(ours)


@pytest.mark.parametrize("header", [(9, 0, 0), (transport.SMALL, 0, 1 << 40)])
def test_a_damaged_message_breaks_the_connection(
    ends: tuple[HostConnection, HostConnection], header: tuple[int, int, int]
) -> None:
    ours, theirs = ends
    theirs._saying += transport.MESSAGE.pack(*header)
    theirs.send("x")
    assert "damaged message" in reason(ours)


class Unreadable:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.listdir, ("/no/such/folder",)


def test_a_message_that_cannot_be_read_breaks_the_connection(
    ends: tuple[HostConnection, HostConnection],
) -> None:
    ends[1].send(Unreadable())
    assert "cannot be read" in reason(ends[0])


def test_an_exception_in_a_thread_is_the_reason(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("of a thread")

    monkeypatch.setattr(HostConnection, "_room", fails)
    with closing(call(listener)) as theirs, closing(accepted(listener)) as ours:
        theirs.attach(memory(), [])
        theirs.send("x", [(0, 1)])
        assert "ZeroDivisionError: of a thread" in reason(ours)


# ---- ends ----------------------------------------------------------------------------------------


def test_close_sends_what_is_queued_and_leaves_no_thread(listener: Listener) -> None:
    theirs, ours = call(listener), accepted(listener)
    for end in (ours, theirs):
        end.attach(memory(), [(0, SIZE)])
    for number in range(5):
        theirs.send(number, [(0, SIZE)])
    theirs.close()
    theirs.close()
    theirs.send("late")
    assert received(ours, 5) == [*range(5)]
    assert "closed the connection" in reason(ours)
    with pytest.raises(HostLost):
        theirs.receive()
    ours.close()
    listener.close()
    assert threads() == set()


def test_close_does_not_wait_for_a_host_that_takes_nothing(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is not attached, so it reads no rows."""
    monkeypatch.setattr(transport, "_LAST_S", 0.05)
    theirs, ours = call(listener), accepted(listener)
    theirs.attach(memory(), [])
    for _ in range(10):
        theirs.send("x", [(0, SIZE)])
    theirs.close()
    assert reason(ours)
    ours.close()


def mortal(port: int, ready: int, over: int) -> None:
    """A host with a forked child, which outlives it."""
    end = dial(HOME, port, KEY, 1, {}, PATIENCE_S)
    end.attach(memory(), [])
    end.send("last words", [(0, 3 << 20)])
    if os.fork() == 0:
        os.write(ready, b"c")
        os.read(over, 1)  # until the test ends
        os._exit(0)
    select.select([end], [], [])


def test_a_death_is_noticed_although_a_forked_child_lives(listener: Listener) -> None:
    is_ready, ready = os.pipe()
    over, ends_it = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ends_it)
        with suppress(BaseException):
            mortal(listener.port, ready, over)
        os._exit(1)
    os.close(over)
    try:
        with closing(accepted(listener)) as ours:
            ours.attach(memory(), [(0, SIZE)])
            assert received(ours, 1) == ["last words"]
            assert os.read(is_ready, 1) == b"c"
            os.kill(pid, signal.SIGKILL)
            assert "its process has ended" in reason(ours)
    finally:
        for fd in (is_ready, ready, ends_it):
            os.close(fd)
        os.waitpid(pid, 0)


def test_a_forked_child_keeps_no_socket(
    listener: Listener, ends: tuple[HostConnection, HostConnection]
) -> None:
    mine = [listener._socket, *(s for e in ends for s in (e._control, e._outward, e._inward))]
    fds = [sock.fileno() for sock in mine]
    assert not any(os.get_inheritable(fd) for fd in (*fds, *(e.fileno() for e in ends)))
    pid = os.fork()
    if pid == 0:
        kept = 0
        for fd in fds:
            with suppress(OSError):
                os.fstat(fd)
                kept += 1
        os._exit(kept + sum(sock.fileno() != -1 for sock in mine))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    ends[0].send("still there")
    assert received(ends[1], 1) == ["still there"]


def test_the_time_outs_are_those_of_the_kernel(ends: tuple[HostConnection, HostConnection]) -> None:
    def options(sock: socket.socket) -> list[int]:
        names = (socket.TCP_NODELAY, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)
        names += (socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        return [sock.getsockopt(socket.IPPROTO_TCP, name) for name in names]

    for end in ends:
        assert options(end._control) == [1, 3, 3, 3, 12_000]
        assert options(end._outward)[-1] == options(end._inward)[-1] == 120_000


def test_a_time_out_is_told_from_a_death() -> None:
    assert "not answered" in transport._why_lost(TimeoutError(errno.ETIMEDOUT, "timed out"))
    assert transport._why_lost(ConnectionResetError()) == "its process has ended"


def look(end: HostConnection, times: int) -> None:
    """As its loop does, once a second."""
    for _ in range(times):
        end.look(end._looked_s + 1.0)


def test_a_loop_that_shows_no_sign_of_life_for_a_minute_is_lost_though_its_kernel_answers(
    ends: tuple[HostConnection, HostConnection],
) -> None:
    ours, theirs = ends
    look(ours, 31)  # a host may be stopped for 30 s
    look(theirs, 1)
    while not ours._lives:
        time.sleep(0.001)
    look(ours, 60)
    ours.send("still there")
    assert received(theirs, 1) == ["still there"]
    look(ours, 1)
    assert "has shown no sign of life for 60 s" in reason(ours)
    assert "has ended" in reason(theirs)


def test_a_pause_of_the_judge_is_not_held_against_the_other(
    ends: tuple[HostConnection, HostConnection],
) -> None:
    ours, theirs = ends
    look(ours, 40)
    ours.look(ours._looked_s + 3600.0)
    ours.look(ours._looked_s + 3600.0, judges=False)
    look(ours, 59)
    ours.send("still there")
    assert received(theirs, 1) == ["still there"]


# ---- strangers -----------------------------------------------------------------------------------


def connect(listener: Listener) -> socket.socket:
    return socket.create_connection((HOME, listener.port), PATIENCE_S)


def secured(listener: Listener, key: Key = KEY) -> ssl.SSLSocket:
    return key.context(server_side=False).wrap_socket(connect(listener))


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\0" * 300, random.Random(7).randbytes(4096)],
    ids=["http", "zeros", "noise"],
)
def test_garbage_is_turned_away_and_disturbs_nobody(
    listener: Listener, ends: tuple[HostConnection, HostConnection], said: bytes
) -> None:
    with closing(connect(listener)) as stranger:
        stranger.sendall(said)
        assert refusal(listener).startswith("127.0.0.1:")
    ends[0].send("fine")
    assert received(ends[1], 1) == ["fine"]


def test_another_key_is_an_error_at_once_on_both_sides(listener: Listener) -> None:
    with pytest.raises(UserError, match="another key"):
        dial(HOME, listener.port, OTHER, 1, {}, PATIENCE_S)
    assert "does not have the key" in refusal(listener)


def test_a_certificate_of_another_key_is_turned_away(listener: Listener) -> None:
    context = OTHER.context(server_side=False)
    context.verify_mode = ssl.CERT_NONE  # it does not care whom it talks to
    with closing(connect(listener)) as sock, suppress(OSError):
        context.wrap_socket(sock).recv(1)
    assert "does not have the key" in refusal(listener)


@pytest.mark.parametrize(
    "said",
    [
        struct.pack("<I", 1 << 30),
        struct.pack("<I", 4) + b"\x80\x04N.",
        struct.pack("<I", 2) + b"[]",
        struct.pack("<I", 60_000) + b"[" * 60_000,
    ],
    ids=["long", "pickle", "list", "deep"],
)
def test_a_damaged_greeting_is_turned_away(listener: Listener, said: bytes) -> None:
    with closing(secured(listener)) as sock:
        sock.sendall(said)
        assert "greeting is" in refusal(listener)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"protocol": 0}, "same version of hybridtrain"),
        ({"host": 0}, "its number is 0"),
        ({"host": True}, "its number is True"),
        ({"role": "x"}, "damaged"),
        ({"id": 5}, "damaged"),
        ({"about": None}, "damaged"),
    ],
)
def test_a_greeting_that_does_not_fit_is_answered_with_the_reason(
    listener: Listener, changed: dict[str, Any], why: str
) -> None:
    greeting = {"protocol": door.PROTOCOL, "host": 1, "id": "i", "about": {}}
    with closing(secured(listener)) as sock:
        door.say(sock, greeting | {"role": "up"} | changed)
        assert why in door.hear(sock, later())["refused"]
    assert why in refusal(listener)


def test_the_dialling_host_is_told_why_it_was_turned_away(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_fault", lambda said: f"no room for host {said['host']}")
    with pytest.raises(UserError, match="turned host 4 away: no room for host 4"):
        call(listener, 4)


def test_a_flood_of_silent_strangers_does_not_keep_a_host_out(listener: Listener) -> None:
    with ExitStack() as strangers:
        for _ in range(60):
            strangers.enter_context(closing(connect(listener)))
        with closing(call(listener)), closing(accepted(listener)):
            assert len(listener._pending) <= 16
        assert "too many" in str(listener.refused())


def test_a_silent_stranger_is_turned_away_in_time(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "_GREETING_S", 0.05)
    with closing(connect(listener)):
        assert "no answer in time" in refusal(listener)


def test_a_stranger_that_does_not_greet_is_turned_away_in_time(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    hear = door.hear
    monkeypatch.setattr(door, "hear", lambda sock, until: hear(sock, 0.0))
    with closing(secured(listener)):
        assert "no answer in time" in refusal(listener)


def test_a_host_that_makes_only_one_connection_is_dropped(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_HALF_S", 0.0)
    greeting = {"protocol": door.PROTOCOL, "host": 1, "id": "i", "about": {}, "role": "up"}
    with closing(secured(listener)) as sock:
        door.say(sock, greeting)
        assert "about" in door.hear(sock, later())
        assert "did not make all" in refusal(listener)


def test_strangers_make_a_line_at_once_and_then_a_sum_per_time(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(door, "time", SimpleNamespace(monotonic=lambda: now_s))
    listener._refuse("10.0.0.7:50001", "no answer in time")
    assert listener.refused() == "10.0.0.7:50001: no answer in time"
    lines = []
    for number in range(3000):
        now_s += 1 / 32
        listener._refuse(f"10.0.0.{7 if number % 3 else number % 200}:{number}", "no key")
        lines += [line] if (line := listener.refused()) else []
    assert len(lines) == 3, "in 94 seconds"
    assert lines[0].startswith("960 connections in 30 s (6")
    assert " from 10.0.0.7, " in lines[0] and len(lines[0]) < 200
    assert lines[0].endswith(", …); the last: 10.0.0.7:959: no key")
    now_s += 40
    assert str(listener.refused()).startswith("120 connections in ")
    now_s += 40
    assert listener.refused() is None, "nobody has come since"


def test_a_flood_from_many_addresses_takes_no_memory() -> None:
    refusals = door.Refusals()
    for number in range(5000):
        refusals.add(f"2001:db8::{number:x}:1", "no key")
    assert len(refusals._numbers) == 100
    assert "5,000 connections" in refusals.take() and not refusals._numbers


def test_a_flood_wakes_host_0_for_a_line_and_not_for_each_stranger(listener: Listener) -> None:
    listener._refuse("x:1", "no key")
    assert listener.accepted() == [] and listener.refused() is not None
    for number in range(100):
        listener._refuse("x:1", str(number))
    assert not select.select([listener], [], [], 0)[0]


def test_a_listener_that_closes_leaves_nothing() -> None:
    listener = Listener(HOME, 0, KEY, {})
    with closing(connect(listener)), closing(call(listener)) as theirs:
        listener.close()
        listener.close()
        assert reason(theirs)
    assert threads() == set()


# ---- what the user has to mend -------------------------------------------------------------------


class LateGreeting(Listener):
    """A thread that has greeted a host goes on only when the listener closes."""

    def _join(self, sock: ssl.SSLSocket, said: dict[str, Any]) -> None:
        super()._join(sock, said)
        while not self._closed and said["role"] == connection.ROLES[-1]:
            time.sleep(0.001)
        time.sleep(0.05)


def test_a_listener_that_closes_leaves_the_hosts_that_it_has_handed_out() -> None:
    late = LateGreeting("127.0.0.1", 0, KEY, {})
    with closing(call(late)) as theirs, closing(accepted(late)) as ours:
        late.close()
        for sender, receiver in ((ours, theirs), (theirs, ours)):
            sender.send(bytes(2 * transport.SMALL_BYTES))  # by the connections of rows
            assert received(receiver, 1) == [bytes(2 * transport.SMALL_BYTES)]


def test_a_port_in_use_and_a_foreign_address_are_one_line(listener: Listener) -> None:
    with pytest.raises(UserError, match=f"port {listener.port} of 127.0.0.1 is in use"):
        Listener(HOME, listener.port, KEY, {})
    with pytest.raises(UserError, match=r"192.0.2.1, which is no address of this machine"):
        Listener("192.0.2.1", 0, KEY, {})


def test_where_nobody_answers_the_message_says_what_to_check() -> None:
    with closing(socket.socket()) as silent:
        silent.bind((HOME, 0))  # but it does not listen
        port = silent.getsockname()[1]
        with pytest.raises(UserError, match=rf"127.0.0.1, port {port} .* for 0.3 s .*firewall"):
            dial(HOME, port, KEY, 1, {}, 0.3)


def test_dialling_goes_on_until_host_0_answers(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    connects, refusals = sockets.connect, iter([ConnectionRefusedError(), TimeoutError()])

    def connect_later(*args: Any) -> ssl.SSLSocket:
        for refused in refusals:
            raise refused
        return connects(*args)

    monkeypatch.setattr(sockets, "connect", connect_later)
    with closing(call(listener)):
        assert next(refusals, None) is None
