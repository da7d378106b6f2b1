"""Messages and rows between host 0 and one other host.

Three connections with TLS, each a stream of frames:

- *control*, in both directions: messages, and the sizes of large ones. Never more than a few
  kilobytes wait in it, so that a machine which does not answer for 12 s is known to be lost.
- *rows*, one connection for each direction: the bytes of shared memory that a message speaks of, in
  frames of 1 MiB, and the bytes of large messages. They may wait for two minutes.

A message says how many bytes of rows were sent before it; the other side hands it out when that
many have arrived. The loop that receives shows life once a second: a process that is stopped, or
whose loop hangs, is lost after a minute, though its machine answers.

A thread for each of the streams of rows encrypts and sends, or receives and decrypts, and never
touches another thread's connection. Control never blocks, and a lock guards it: in some versions of
Python a connection with TLS must not be read and written at the same time, in others one waits for
the other.
"""

from __future__ import annotations

import itertools
import os
import pickle
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hybridtrain.engine.memory.layout import FAR_BYTES
from hybridtrain.engine.worlds.channel import pickled
from hybridtrain.hosts import sockets

# Kind, bytes of rows before it, length; and, of rows, sequence number, offset in memory, length.
MESSAGE, FRAME = struct.Struct("<BQQ"), struct.Struct("<QQQ")
SMALL, LARGE, GOODBYE, ALIVE = range(4)
FRAME_BYTES = 1 << 20
SMALL_BYTES = 1 << 11  # of a message that travels on the control connection
IN_MESSAGE = 2**64 - 1  # the offset of a frame whose bytes belong to a message
_READ_BYTES = 1 << 16
_DEATH = "its process has ended"
SILENT_S = 60.0  # without a sign of life from the other side's loop: it is lost
_GAP_S = 2.0  # this side's own pause is not held against the other
_LOOK_S = 0.05
_LAST_FRAME_S = 5.0  # a frame of 1 MiB at 1.7 Mbit/s
_LAST_S = 1.0  # for what is still on its way when a connection ends


class HostLost(Exception):
    """The connection to another host is broken or was closed; the text says why."""


@dataclass
class _Arriving:
    """A message, until ``after`` bytes of rows have arrived; ``n_bytes`` of them are its own."""

    kind: int
    after: int
    n_bytes: int
    body: bytes

    @cached_property
    def content(self) -> Any:
        """The message itself."""
        return pickle.loads(self.body)


class HostConnection:
    """One end of the connection; only one thread may call ``receive``.

    Args:
        host: the number of the other host.
        about: what it has said of itself.
        control, outward, inward: connected sockets after their handshakes, which this owns.
    """

    def __init__(
        self,
        host: int,
        about: dict[str, Any],
        control: ssl.SSLSocket,
        outward: ssl.SSLSocket,
        inward: ssl.SSLSocket,
    ) -> None:
        self.host, self.about = host, about
        self._control, self._outward, self._inward = control, outward, inward
        self._changed = threading.Condition()  # guards all below
        self._memory: memoryview | None = None
        self._may_write: list[tuple[int, int]] = []
        # To send: bytes of control; rows with their offsets, in order; how many rows there were.
        self._saying = bytearray()
        self._rows: deque[tuple[int, memoryview]] = deque()
        self._n_rows_sent = self._n_rows_arrived = 0
        self._heard = bytearray()
        self._arriving: deque[_Arriving] = deque()
        self._parts: deque[bytearray] = deque()  # of large messages
        self._arrived: list[_Arriving] = []
        self._counts = {"sent": 0, "received": 0, "sending_s": 0.0, "receiving_s": 0.0}
        self._lives, self._silent_s, self._looked_s = True, 0.0, time.monotonic()
        # How it ends: closed here, closed there, no more rows; and why: a stream failed, whose
        # end the thread of control waits for; broken; over.
        self._closed = self._dismissed = self._no_rows = False
        self._failing: str | None = None
        self._broken: str | None = None
        self._lost: str | None = None
        self._bell, self._wake = (os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in "bw")
        for sock in (control, outward, inward):
            timeout_s = sockets.CONTROL_TIMEOUT_S if sock is control else sockets.ROWS_TIMEOUT_S
            sockets.set_options(sock, timeout_s)
            sock.setblocking(sock is not control)
        self._threads = [
            threading.Thread(target=self._guarded, args=(body,), name=f"host {host}", daemon=True)
            for body in (self._send_rows, self._receive_rows)
        ]
        self._main = threading.Thread(target=self._serve, name=f"host {host}", daemon=True)
        for thread in (*self._threads, self._main):
            thread.start()

    def fileno(self) -> int:
        """A descriptor for ``select``, readable when ``receive`` has something to say."""
        return self._bell

    def attach(self, memory: memoryview, may_write: Sequence[tuple[int, int]]) -> None:
        """Name the shared memory that spans are sent from and arrive in.

        ``may_write``: first byte and end of the parts that the other side may write to. Spans that
        arrive before this call wait for it.
        """
        with self._changed:
            self._memory, self._may_write = memory.cast("B"), list(may_write)
            self._changed.notify_all()

    def send(self, message: Any, spans: Sequence[tuple[int, int]] = ()) -> None:
        """Send a message behind these spans (first byte, end) of the memory; never blocks.

        The bytes must not change until the other side has received the message. Nothing is sent
        once the connection is lost or closed; ``receive`` tells of it.
        """
        body = pickled(message)
        with self._changed:
            if self._closed or self._broken is not None:
                return
            self._queue_rows(spans)
            if len(body) > SMALL_BYTES:
                self._queue(IN_MESSAGE, memoryview(body))
                self._say(LARGE, len(body))
            else:
                self._say(SMALL, len(body), body)

    def send_rows(self, spans: Sequence[tuple[int, int]]) -> None:
        """Send spans of the memory that a later message speaks of; may be called by any thread."""
        with self._changed:
            if not self._closed and self._broken is None:
                self._queue_rows(spans)

    def _queue_rows(self, spans: Sequence[tuple[int, int]]) -> None:
        memory = self._memory
        for start, end in spans:
            if memory is None or not 0 <= start <= end <= len(memory):
                raise ValueError(f"{start} to {end} is no part of the attached memory")
        for start, end in spans:
            assert memory is not None
            self._queue(start, memory[start:end])

    def _queue(self, offset: int, content: memoryview) -> None:
        if content:
            self._rows.append((offset, content))
            self._n_rows_sent += len(content)
            self._changed.notify_all()

    def _say(self, kind: int, n_bytes: int, body: bytes = b"") -> None:
        self._saying += MESSAGE.pack(kind, self._n_rows_sent, n_bytes) + body
        self._counts["sent"] += len(body)
        self._write()
        if self._saying:
            os.eventfd_write(self._wake, 1)

    def receive(self) -> list[Any]:
        """The messages that have arrived with their spans, in the order sent; never blocks.

        Raises:
            HostLost: after the last message, if the connection is broken or was closed.
        """
        with self._changed:
            if self._bell >= 0:
                _silence(self._bell)
            messages, self._arrived = self._arrived, []
            lost = self._lost
            if lost is not None and messages:
                self._ring()
        if lost is not None and not messages:
            raise HostLost(lost)
        try:
            return [each.content for each in messages]
        except Exception as error:
            self._break(f"a message cannot be read ({type(error).__name__}: {error})")
            raise HostLost(f"a message of host {self.host} cannot be read: {error}") from error

    def look(self, now_s: float, judges: bool = True) -> None:
        """Show life; to be called once a second by the loop that receives.

        ``judges``: the connection ends if the other side has shown none for ``SILENT_S``.
        """
        with self._changed:
            if not self._closed and self._broken is None:
                self._say(ALIVE, 0)
            waited_s = min(now_s - self._looked_s, _GAP_S)
            self._silent_s = 0.0 if self._lives or not judges else self._silent_s + waited_s
            self._lives, self._looked_s = False, now_s
        if self._silent_s >= SILENT_S:
            self._break(f"it has shown no sign of life for {SILENT_S:g} s: it is stopped, or hangs")

    def announced(self) -> list[tuple[Any, int]]:
        """Messages whose rows are still arriving: each with the bytes of rows up to its last one.

        Large messages are left out. ``receive`` will return the same objects.
        """
        with self._changed:
            waiting = [each for each in self._arriving if each.kind == SMALL]
        try:
            return [(each.content, each.after) for each in waiting]
        except Exception:  # ``receive`` will break the connection
            return []

    def wait_for_rows(self, n_bytes: int, is_over: Callable[[], bool]) -> bool:
        """Wait until so many bytes of rows have arrived in all; by any thread.

        Returns:
            False if they will not, or ``is_over``.
        """
        with self._changed:
            while self._n_rows_arrived < n_bytes:
                if self._broken is not None or self._no_rows or is_over():
                    return False
                self._changed.wait(_LOOK_S)
        return True

    def stats(self) -> dict[str, float]:
        """Bytes ``sent`` and ``received``, of rows and messages; seconds that rows took."""
        with self._changed:
            return dict(self._counts)

    def close(self) -> None:
        """Send what is queued, until no frame is sent for some time; may be called again."""
        with self._changed:
            if not self._closed and self._broken is None:
                self._say(GOODBYE, 0)
            self._closed = True
            self._changed.notify_all()
        moved = -1.0
        while self._main.is_alive() and moved < self.stats()["sent"]:
            moved = self.stats()["sent"]
            self._main.join(_LAST_FRAME_S)  # it ends when the other side has heard the goodbye
        self._break("this host has closed the connection")
        self._main.join()
        with self._changed:
            if self._bell >= 0:
                os.close(self._bell)
                os.close(self._wake)
            self._bell = self._wake = -1

    # ---- the thread of control ------------------------------------------------------------------

    def _serve(self) -> None:
        """Send and receive messages until the end; then end the other threads and say why."""
        try:
            reason = self._converse()
        except _Foul as error:
            reason = str(error)
        except OSError as error:
            reason = _why_lost(error)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        with self._changed:
            reason = self._broken or reason
            self._broken = reason  # nobody sends from here on
            self._changed.notify_all()
        for sock in (self._control, self._outward, self._inward):
            sockets.shut(sock)
        for thread in self._threads:
            thread.join()
        for sock in (self._control, self._outward, self._inward):
            sock.close()
        with self._changed:
            self._rows.clear()
            self._memory = None
            self._lost = f"host {self.host}: {reason}"
            self._ring()

    def _converse(self) -> str:
        """Until the end; returns the reason."""
        poll, until = select.poll(), None
        poll.register(self._wake, select.POLLIN)
        while True:
            with self._changed:
                if self._saying:
                    self._write()
                there = self._read()
                self._hand_out()
                if self._broken is not None:
                    return self._broken
                if self._dismissed:
                    return "it has closed the connection"
                if not there:
                    self._take_the_rest()
                    return self._broken or self._failing or _DEATH
                if self._failing is not None and until is None:
                    until = time.monotonic() + _LAST_S  # control may have ended, too: read its last
                sending = select.POLLOUT if self._saying else 0
            if until is not None and time.monotonic() > until:
                return self._failing or ""
            poll.register(self._control, select.POLLIN | sending)
            wait_ms = None if until is None else max(1000 * (until - time.monotonic()), 0)
            events = dict(poll.poll(wait_ms))
            _silence(self._wake)
            if events.get(self._control.fileno(), 0) & select.POLLERR:
                self._ask_for_error()

    def _ask_for_error(self) -> None:
        """Note the kernel's error: some versions of Python make a time-out the end of a stream."""
        number = self._control.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        with self._changed:
            if number:
                self._fail(OSError(number, os.strerror(number)))

    def _take_the_rest(self) -> None:
        """Wait for rows of the messages that have arrived, until none has moved for a second."""
        moved = -1.0
        while not self._nothing_comes() and moved < self._n_rows_arrived:
            moved = self._n_rows_arrived
            self._changed.wait_for(self._nothing_comes, _LAST_S)

    def _nothing_comes(self) -> bool:
        self._hand_out()
        return not self._arriving or self._no_rows or self._broken is not None

    def _write(self) -> None:
        """Send queued messages as far as the connection takes them."""
        try:
            while self._saying:
                del self._saying[: self._control.send(self._saying)]
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError as error:
            self._saying.clear()
            self._fail(error)

    def _read(self) -> bool:
        """Read what has arrived. False at the end of the stream."""
        with suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
            while part := self._control.recv(_READ_BYTES):
                self._heard += part
                self._arriving += self._parsed()
                if self._arriving and self._arriving[-1].after >= self._n_rows_arrived + FAR_BYTES:
                    self._ring()  # ``announced`` has news
            return False
        return True

    def _parsed(self) -> Iterator[_Arriving]:
        while len(self._heard) >= MESSAGE.size:
            kind, after, n_bytes = MESSAGE.unpack_from(self._heard)
            inside = n_bytes if kind == SMALL else 0
            if kind > ALIVE or inside > SMALL_BYTES:
                raise _Foul(f"it sent a damaged message (kind {kind}, {n_bytes} bytes)")
            end = MESSAGE.size + inside
            if len(self._heard) < end:
                return
            body = bytes(self._heard[MESSAGE.size : end])
            del self._heard[:end]
            self._counts["received"] += inside
            self._lives = True
            if kind == ALIVE:
                continue
            yield _Arriving(kind, after, n_bytes - inside, body)

    def _hand_out(self) -> None:
        """Make the next messages ready whose rows have arrived."""
        before = len(self._arrived)
        while self._arriving and self._arriving[0].after <= self._n_rows_arrived:
            message = self._arriving.popleft()
            if message.kind == GOODBYE:
                self._dismissed = True
                os.eventfd_write(self._wake, 1)
            else:
                if message.kind == LARGE:
                    message.body = self._large(message.n_bytes)
                self._arrived.append(message)
        if len(self._arrived) > before:
            self._ring()

    def _large(self, n_bytes: int) -> bytes:
        parts = []
        while self._parts and n_bytes > 0:
            parts.append(self._parts.popleft())
            n_bytes -= len(parts[-1])
        if n_bytes:
            raise _Foul("the parts of a message do not make a whole")
        return b"".join(parts)

    def _ring(self) -> None:
        if self._bell >= 0:
            os.eventfd_write(self._bell, 1)

    def _fail(self, error: OSError) -> None:
        self._failing = self._failing or _why_lost(error)
        self._changed.notify_all()
        os.eventfd_write(self._wake, 1)

    def _break(self, reason: str) -> None:
        with self._changed:
            self._broken = self._broken or reason
            self._changed.notify_all()
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    # ---- the threads of rows --------------------------------------------------------------------

    def _guarded(self, body: Callable[[], None]) -> None:
        """Run ``body``; tell the thread of control why it ended."""
        try:
            body()
        except _Foul as error:
            self._break(str(error))
        except OSError as error:
            with self._changed:
                self._no_rows = self._no_rows or body == self._receive_rows
                self._fail(error)
        except BaseException as error:
            self._break(f"{type(error).__name__}: {error}")

    def _send_rows(self) -> None:
        sequence = itertools.count()
        while (row := self._next_row()) is not None:
            offset, content = row
            for start in range(0, len(content), FRAME_BYTES):
                part = content[start : start + FRAME_BYTES]
                at = offset if offset == IN_MESSAGE else offset + start
                begun_s = time.monotonic()
                self._outward.sendall(FRAME.pack(next(sequence), at, len(part)))
                self._outward.sendall(part)
                with self._changed:
                    self._counts["sent"] += len(part)
                    self._counts["sending_s"] += time.monotonic() - begun_s

    def _next_row(self) -> tuple[int, memoryview] | None:
        """The next row to send; ``None`` at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._rows or self._closed or self._broken is not None)
            return self._rows.popleft() if self._rows and self._broken is None else None

    def _receive_rows(self) -> None:
        header = memoryview(bytearray(FRAME.size))
        for number in itertools.count():
            sockets.read_exactly(self._inward, header)
            sequence, offset, n_bytes = FRAME.unpack(header)
            if sequence != number:
                raise _Foul(f"it sent frame {sequence} of its rows in place of frame {number}")
            if n_bytes > FRAME_BYTES:
                raise _Foul(f"it sent a frame of {n_bytes} bytes, more than {FRAME_BYTES}")
            inside = bytearray(n_bytes) if offset == IN_MESSAGE else None
            room = self._room(offset, n_bytes) if inside is None else memoryview(inside)
            begun_s = time.monotonic()
            sockets.read_exactly(self._inward, room)
            with self._changed:
                self._n_rows_arrived += n_bytes
                self._counts["received"] += n_bytes
                self._counts["receiving_s"] += time.monotonic() - begun_s
                if inside is not None:
                    self._parts.append(inside)
                self._hand_out()
                self._changed.notify_all()

    def _room(self, offset: int, n_bytes: int) -> memoryview:
        """The part of the memory that a frame is for, if the other side may write to it."""
        with self._changed:
            self._changed.wait_for(lambda: self._memory is not None or self._broken is not None)
            if self._memory is None or self._broken is not None:
                raise ConnectionError("it was closed")
            end = offset + n_bytes
            if end <= len(self._memory) and any(
                a <= offset <= end <= b for a, b in self._may_write
            ):
                return self._memory[offset:end]
        raise _Foul(f"it sent bytes {offset} to {end} of the memory, which it may not write to")


class _Foul(Exception):
    """The other side does not keep to the protocol."""


def _why_lost(error: OSError) -> str:
    if isinstance(error, ConnectionError | ssl.SSLEOFError):  # killed: its kernel ends the streams
        return _DEATH
    if isinstance(error, TimeoutError):
        return "it has not answered in time: its machine or the network between is down"
    return f"the connection failed: {in_words(error)}"


def _silence(bell: int) -> None:
    with suppress(BlockingIOError):
        os.eventfd_read(bell)


def in_words(error: Exception) -> str:
    """Why a connection failed, without numbers and names of C functions."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return "it has another key"
    if isinstance(error, ssl.SSLError):
        return "TLS: " + (error.reason or str(error)).lower().replace("_", " ")
    return (isinstance(error, OSError) and error.strerror) or str(error)
