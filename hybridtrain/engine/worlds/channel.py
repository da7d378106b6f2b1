"""Framed messages over an inherited socket pair.

Only the two processes that inherited the pair can use it, so reading pickles from it is as safe as
``fork``. A frame is an 8-byte length and a pickle; a file descriptor may be sent with the length.

The reader does not wait for the socket but for a *bell* (an ``eventfd``), rung after the message.
Linux assumes that a process that writes to a socket is about to wait, and wakes the reader on the
writer's core; but a worker that has pushed its gradient continues, and would be delayed. A bell
wakes the reader on an idle core. Without ``eventfd`` (not Linux) the reader waits for the socket.

A worker *sends*: it blocks while the socket is full. The server *posts*: messages to a full socket
(of a worker that is stopped, or slow to read many megabytes) are queued and sent later, so that no
worker delays the others.
"""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import select
import socket
import struct
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch

from hybridtrain.engine.protocol.messages import PUSHES, Changes, Draw, Released, Row, Ticket

_HEADER, _INT = struct.Struct("<Q"), struct.Struct("i")
_READ_BYTES = 1 << 20
_QUIETLY = getattr(socket, "MSG_NOSIGNAL", 0)  # the program may end by SIGPIPE (SIG_DFL)
_SEND_BYTES = 1 << 16  # per write, less than a socket holds: the bell is rung before it is full


def _on_the_host(tensor: torch.Tensor) -> Any:
    """Pickle a tensor as one in host memory.

    Unpickling a device tensor would initialise the device in the parent, whose forked workers could
    not use it any more, or use another worker's device.
    """
    if tensor.device.type in ("cpu", "meta"):
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    here = tensor.detach().cpu()
    if isinstance(tensor, torch.nn.Parameter):
        here = torch.nn.Parameter(here, tensor.requires_grad)
    return here.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _by_arguments(kind: type[Any]) -> None:
    """Pickle as a constructor call: dataclasses with slots use a slow Python loop by default."""
    values = attrgetter(*(each.name for each in fields(kind)))
    copyreg.pickle(kind, lambda message: (kind, values(message)))


for _kind in (*PUSHES, Changes, Row, Draw, Released, Ticket):  # messages of every step
    _by_arguments(_kind)

_OF_TORCH = b"torch"  # the module that rebuilds tensors


class _Pickler(pickle.Pickler):
    dispatch_table = copyreg.dispatch_table | {
        torch.Tensor: _on_the_host,
        torch.nn.Parameter: _on_the_host,
    }


def pickled(message: Any) -> bytes:
    """The message, with all tensors in host memory."""
    plain = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    if _OF_TORCH not in plain:  # nearly all messages; the custom pickler is slow
        return plain
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(message)
    return buffer.getvalue()


class ChannelClosed(ConnectionError):
    """The other process has closed the connection."""


class Channel:
    """One end of the socket pair.

    Args:
        sock: a connected stream socket, which the channel owns.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock  # a forked process must close it
        sock.set_inheritable(False)  # a spawned worker receives it inheritable
        self._inbox = bytearray()
        self._hears: int | None = None  # the bell that the other side rings
        self._rings: int | None = None
        self._kept: deque[tuple[memoryview, int | None]] = deque()  # posted, but not sent yet

    def fileno(self) -> int:
        """A descriptor for ``select``, readable when a message may have arrived."""
        return self.sock.fileno() if self._hears is None else self._hears

    def give_bells(self, beside: int | None = None) -> None:
        """Create bells and send them to the other side, which must call ``take_bells``.

        ``beside``: one more descriptor to send.
        """
        if hasattr(os, "eventfd"):
            flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
            self._hears, self._rings = os.eventfd(0, flags), os.eventfd(0, flags)
        given = (beside, self._rings, self._hears)
        self._send_fds(b"b", [fd for fd in given if fd is not None])

    def take_bells(self) -> int | None:
        """Receive the other side's bells; returns the descriptor sent with them.

        Raises:
            ChannelClosed: if the other side has closed.
        """
        try:
            said, fds = _receive(self.sock, 1, 3)
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        if not said:
            raise ChannelClosed("the other side is gone")
        if len(fds) >= 2:
            self._hears, self._rings = fds[-2:]
        return fds[0] if len(fds) % 2 else None

    def send(self, message: Any, fd: int | None = None) -> None:
        """Send one message, and a descriptor with it. Blocks while the socket is full.

        Raises:
            ChannelClosed: if the other side has closed.
        """
        body = pickled(message)
        header = _HEADER.pack(len(body))
        try:
            if fd is not None:
                self._send_fds(header, [fd])
                self._send(body)
            else:
                self._send(header + body)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def _send_fds(self, content: bytes | memoryview, fds: Sequence[int], flags: int = 0) -> int:
        """Send as many bytes as fit, descriptors with the first (``send_fds`` ignores flags)."""
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        return self.sock.sendmsg([content], beside, flags | _QUIETLY)

    def _send(self, content: bytes) -> None:
        """Send all of it; ring often enough that the other side makes room."""
        rest = memoryview(content)
        for start in range(0, len(content), _SEND_BYTES):
            self.sock.sendall(rest[start : start + _SEND_BYTES], _QUIETLY)
            if self._rings is not None:
                os.eventfd_write(self._rings, 1)

    def post(self, message: Any, fd: int | None = None) -> bool:
        """Send one message, and a descriptor with it, without blocking.

        False: ``flush`` must send the rest when ``sock`` is writable.

        Raises:
            ChannelClosed: if the other side has closed.
        """
        body = pickled(message)
        self._kept.append((memoryview(_HEADER.pack(len(body)) + body), fd))
        return self.flush()

    def flush(self) -> bool:
        """Send the queued messages without blocking. False if some are left.

        Raises:
            ChannelClosed: if the other side has closed.
        """
        total = 0
        while self._kept:
            content, fd = self._kept[0]
            if not (sent := self._send_some(content, fd)):
                break
            total += sent
            if sent < len(content):
                self._kept[0] = content[sent:], None
            else:
                self._kept.popleft()
        if total and self._rings is not None:
            os.eventfd_write(self._rings, 1)
        return not self._kept

    def _send_some(self, content: memoryview, fd: int | None) -> int:
        """Send as many bytes as fit now, the descriptor with the first; returns their number."""
        try:
            return self._send_fds(content, () if fd is None else (fd,), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self) -> tuple[Any, int | None]:
        """The next message and its descriptor, if any. Blocks.

        Raises:
            ChannelClosed: if the other side has closed.
        """
        try:
            self._wait()
            header, fds = self._read_header()
            body = self._read_exactly(*_HEADER.unpack(header))
        except OSError as error:  # a reset, if the other side has closed without reading
            raise ChannelClosed(str(error)) from error
        return pickle.loads(body), (fds[0] if fds else None)

    def _wait(self) -> None:
        """Wait for a message or the end of the stream."""
        while self._hears is not None and not self.ready():
            self._poll.poll()
            self.silence()

    @cached_property
    def _poll(self) -> select.poll:
        return self.poll_with()

    def poll_with(self, *bells: int) -> select.poll:
        """A ``poll`` object for this channel and these bells."""
        poll = select.poll()
        poll.register(self.sock, 0)  # only the end of the stream
        for fd in (self.fileno(), *bells):
            poll.register(fd, select.POLLIN)
        return poll

    def silence(self, *bells: int) -> None:
        """Reset the other side's bell, and these."""
        for bell in bells if self._hears is None else (self._hears, *bells):
            with suppress(BlockingIOError):
                os.eventfd_read(bell)

    def _read_header(self) -> tuple[bytes, list[int]]:
        header = b""
        fds: list[int] = []
        while len(header) < _HEADER.size:
            part, more = _receive(self.sock, _HEADER.size - len(header), 1)
            if not part:
                raise ChannelClosed("the other side is gone")
            header, fds = header + part, fds + more
        return header, fds

    def _read_exactly(self, length: int) -> bytearray:
        buffer = bytearray(length)
        view = memoryview(buffer)
        while view:
            count = self.sock.recv_into(view)
            if not count:
                raise ChannelClosed("the other side is gone")
            view = view[count:]
        return buffer

    def ready(self) -> bool:
        """Whether data or the end of the stream has arrived."""
        try:
            self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def messages(self) -> Iterator[Any]:
        """The complete messages that have arrived; never blocks.

        Raises:
            ChannelClosed: if the other side has closed, after its last message.
        """
        self.silence()
        closed = not self._fill()
        while len(self._inbox) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._inbox)
            end = _HEADER.size + length
            if len(self._inbox) < end:
                break
            body = bytes(memoryview(self._inbox)[_HEADER.size : end])
            del self._inbox[:end]
            yield pickle.loads(body)
        if closed:
            raise ChannelClosed("the other side is gone")

    def _fill(self) -> bool:
        """Read all that has arrived. False at the end of the stream."""
        while True:
            try:
                part = self.sock.recv(_READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not part:
                return False
            self._inbox += part
            if len(part) < _READ_BYTES:
                return True

    def close(self) -> None:
        """Close this end, in this process only."""
        self.sock.close()
        for bell in (self._hears, self._rings):
            if bell is not None:
                os.close(bell)
        self._hears = self._rings = None


class SharedBells:
    """Bells with which workers wake each other.

    Args:
        channel: the worker's channel to the server.
        worker: its number.
        bells: of all workers, by number.
    """

    def __init__(self, channel: Channel, worker: int, bells: Sequence[int]) -> None:
        self._mine = bells[worker]
        self._others = [bell for other, bell in enumerate(bells) if other != worker]
        self._channel = channel

    def ring(self) -> None:
        """Wake the other workers."""
        for bell in self._others:
            os.eventfd_write(bell, 1)

    @cached_property
    def _poll(self) -> select.poll:
        return self._channel.poll_with(self._mine)

    def wait(self, for_s: float) -> None:
        """Wait for another worker's bell or a message of the server, at most so long."""
        self._poll.poll(1000 * for_s)
        self._channel.silence(self._mine)


def _receive(sock: socket.socket, n_bytes: int, n_fds: int) -> tuple[bytes, list[int]]:
    """Receive bytes and non-inheritable descriptors (``socket.recv_fds`` ignores its flags)."""
    room = socket.CMSG_SPACE(n_fds * _INT.size)
    said, beside, _, _ = sock.recvmsg(n_bytes, room, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
    fds = array("i")
    for level, kind, content in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) // fds.itemsize * fds.itemsize])
    for fd in fds:
        os.set_inheritable(fd, False)  # on systems without the flag
    return said, fds.tolist()


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
