"""Frames over a socket pair: whole messages, descriptors, closed ends."""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hybridtrain.engine.protocol.messages import Push
from hybridtrain.engine.worlds import channel
from hybridtrain.engine.worlds.channel import Channel, ChannelClosed, SharedBells, channel_pair


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    mine, theirs = map(Channel, channel_pair())
    yield mine, theirs
    mine.close()
    theirs.close()


def arrived(channel: Channel) -> list[Any]:
    return list(channel.messages())


def test_messages_arrive_whole_and_in_order(ends: tuple[Channel, Channel]) -> None:
    mine, theirs = ends
    assert not theirs.ready()
    for message in ("a", {"b": (1, 2.5)}, None):
        mine.send(message)
    assert theirs.ready()
    assert [theirs.receive()[0] for _ in range(3)] == ["a", {"b": (1, 2.5)}, None]
    assert not theirs.ready()


@pytest.mark.parametrize("polled", [False, True])
def test_a_message_larger_than_any_buffer_arrives(
    ends: tuple[Channel, Channel], polled: bool
) -> None:
    mine, theirs = ends
    message = os.urandom(5 << 20)
    sender = threading.Thread(target=mine.send, args=(message,))
    sender.start()
    if polled:
        found: list[Any] = []
        while not found:
            found = arrived(theirs)
    else:
        found = [theirs.receive()[0]]
    sender.join(10)
    assert found == [message]


def test_polling_never_waits_for_the_rest_of_a_message() -> None:
    sock, theirs = channel_pair()
    channel = Channel(theirs)
    body = pickle.dumps("late")
    frame = struct.pack("<Q", len(body)) + body
    for cut in (0, 3, 8, len(frame) - 1):
        sock.sendall(frame[:cut])
        assert arrived(channel) == []
        sock.sendall(frame[cut:])
        assert arrived(channel) == ["late"]
    sock.sendall(frame + frame + frame[:5])
    assert arrived(channel) == ["late", "late"]
    sock.sendall(frame[5:])
    assert arrived(channel) == ["late"]
    sock.close()
    channel.close()


def test_waiting_takes_a_message_in_pieces() -> None:
    sock, theirs = channel_pair()
    channel = Channel(theirs)
    body = pickle.dumps(list(range(100)))
    frame = struct.pack("<Q", len(body)) + body

    def trickle() -> None:
        for start in range(0, len(frame), 7):
            sock.sendall(frame[start : start + 7])

    sender = threading.Thread(target=trickle)
    sender.start()
    assert channel.receive() == (list(range(100)), None)
    sender.join()
    sock.close()
    channel.close()


def test_a_descriptor_travels_with_its_message_and_no_other(
    ends: tuple[Channel, Channel],
) -> None:
    mine, theirs = ends
    fd = os.memfd_create("test")
    os.write(fd, b"shared")
    mine.send("before")
    mine.send("with", fd)
    mine.send("after")
    os.close(fd)
    assert theirs.receive() == ("before", None)
    message, received = theirs.receive()
    assert message == "with"
    assert received is not None
    assert os.pread(received, 6, 0) == b"shared"
    assert theirs.receive() == ("after", None)
    os.close(received)


def test_the_last_words_of_a_closed_end_are_heard_before_its_silence(
    ends: tuple[Channel, Channel],
) -> None:
    mine, theirs = ends
    mine.send("farewell")
    mine.close()
    assert arrived(theirs) == ["farewell"]
    with pytest.raises(ChannelClosed):
        arrived(theirs)
    with pytest.raises(ChannelClosed):
        theirs.receive()


def test_an_end_closed_in_the_middle_of_a_message_is_closed() -> None:
    for cut in (4, 10):
        sock, theirs = channel_pair()
        sock.sendall((struct.pack("<Q", 1000) + b"x" * 500)[:cut])
        sock.close()
        with pytest.raises(ChannelClosed):
            Channel(theirs).receive()


def test_an_end_closed_without_listening_is_closed_too(ends: tuple[Channel, Channel]) -> None:
    mine, theirs = ends
    mine.send("never read")
    theirs.close()
    with pytest.raises(ChannelClosed):  # the kernel calls it a reset
        mine.receive()


def test_sending_to_nobody_says_so(ends: tuple[Channel, Channel]) -> None:
    mine, theirs = ends
    theirs.close()
    with pytest.raises(ChannelClosed):
        for _ in range(3):
            mine.send("?")
    with pytest.raises(ChannelClosed):
        mine.send("?", 0)


def test_a_message_that_cannot_be_pickled_leaves_the_line_usable(
    ends: tuple[Channel, Channel],
) -> None:
    mine, theirs = ends
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        mine.send(lambda: None)
    mine.send("fine")
    assert theirs.receive() == ("fine", None)


def test_pairs_have_no_address() -> None:
    pair = channel_pair()
    assert all(sock.family == socket.AF_UNIX and not sock.getsockname() for sock in pair)
    for sock in pair:
        sock.close()


@pytest.fixture
def rung() -> Iterator[tuple[Channel, Channel]]:
    """Two ends that wait for bells."""
    mine, theirs = map(Channel, channel_pair())
    mine.give_bells()
    theirs.take_bells()
    yield mine, theirs
    mine.close()
    theirs.close()


@pytest.mark.skipif(not hasattr(os, "eventfd"), reason="bells are eventfds, which Linux has")
def test_a_bell_tells_both_ways_and_is_silent_once_heard(rung: tuple[Channel, Channel]) -> None:
    for one, other in (rung, rung[::-1]):
        one.send("a")
        one.send("b")
        assert select.select([other], [], [], 0)[0]
        assert arrived(other) == ["a", "b"]
        assert not select.select([other], [], [], 0)[0]


def test_two_messages_with_one_bell_are_both_received(rung: tuple[Channel, Channel]) -> None:
    mine, theirs = rung
    for number in range(3):
        mine.send(number)
    assert [theirs.receive()[0] for _ in range(3)] == [0, 1, 2]
    mine.send("later")
    assert theirs.receive()[0] == "later"


@pytest.mark.parametrize("polled", [False, True])
def test_a_message_larger_than_any_buffer_arrives_by_bell(
    rung: tuple[Channel, Channel], polled: bool
) -> None:
    mine, theirs = rung
    message = os.urandom(3 << 20)
    sender = threading.Thread(target=mine.send, args=(message,))
    sender.start()
    found: list[Any] = []
    while polled and not found:
        assert select.select([theirs], [], [], 10)[0], "nobody has rung"
        found = arrived(theirs)
    found = found or [theirs.receive()[0]]
    sender.join(10)
    assert found == [message]


def test_who_waits_for_a_bell_hears_of_the_end(rung: tuple[Channel, Channel]) -> None:
    mine, theirs = rung
    closer = threading.Timer(0.1, mine.close)
    closer.start()
    with pytest.raises(ChannelClosed):
        theirs.receive()
    closer.join()


def test_an_end_that_went_before_it_gave_bells_is_closed() -> None:
    sock, theirs = channel_pair()
    sock.close()
    channel = Channel(theirs)
    with pytest.raises(ChannelClosed):
        channel.take_bells()
    channel.close()


# ---- posting: never waits -----------------------------------------------------------------------


@pytest.mark.parametrize("belled", [False, True])
def test_posting_to_a_full_line_returns_and_the_rest_follows_in_order(
    ends: tuple[Channel, Channel], rung: tuple[Channel, Channel], belled: bool
) -> None:
    mine, theirs = rung if belled else ends
    fd = os.memfd_create("test")
    os.write(fd, b"shared")
    large = os.urandom(3 << 20)
    assert mine.post("first")
    assert not mine.post(large), "nobody reads, and no socket holds that much"
    assert not mine.post("with", fd)
    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.extend(theirs.receive() for _ in range(3)))
    reader.start()
    while not mine.flush():
        assert select.select([], [mine.sock], [], 10)[1], "room must be told of"
    reader.join(10)
    os.close(fd)
    assert [message for message, _ in found] == ["first", large, "with"]
    assert found[0][1] is None and found[1][1] is None
    assert os.pread(found[2][1], 6, 0) == b"shared"
    os.close(found[2][1])


def test_posting_to_nobody_says_so(ends: tuple[Channel, Channel]) -> None:
    mine, theirs = ends
    assert not mine.post(bytes(3 << 20))
    theirs.close()
    with pytest.raises(ChannelClosed):
        mine.flush()
    with pytest.raises(ChannelClosed):
        mine.post("?")


class Kept:
    """Something of a user's own, with a tensor in it."""

    def __init__(self) -> None:
        self.inside = {"one": [torch.nn.Parameter(torch.arange(3.0))]}


@pytest.mark.parametrize(
    ("message", "anew"), [(Push(0, 32.0, (), samples=32.0), False), (Kept(), True)]
)
def test_only_messages_with_tensors_cost_a_pickler_that_looks_at_each(
    message: Any, anew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    class Counted(channel._Pickler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(channel, "_Pickler", Counted)
    again = pickle.loads(channel.pickled(message))
    assert type(again) is type(message) and bool(made) == anew


@pytest.mark.skipif(not hasattr(os, "eventfd"), reason="bells are descriptors of Linux")
def test_who_waits_beside_the_line_hears_of_both_and_of_each_once(
    ends: tuple[Channel, Channel],
) -> None:
    mine, theirs = ends
    mine.give_bells()
    theirs.take_bells()
    flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
    bells = [os.eventfd(0, flags) for _ in range(3)]
    waiting, other = SharedBells(theirs, 1, bells), SharedBells(mine, 0, bells)

    def waits() -> bool:
        """Whether it has waited for all of the time."""
        begun = time.monotonic()
        waiting.wait(0.05)
        return time.monotonic() - begun >= 0.045

    assert waits()
    other.ring()
    assert not waits() and waits()
    mine.post("said")
    assert not waits() and theirs.ready()
    assert theirs.receive()[0] == "said" and waits()
    assert [select.select([bell], [], [], 0)[0] for bell in bells] == [[], [], [bells[2]]]
    for bell in bells:
        os.close(bell)
