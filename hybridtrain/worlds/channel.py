"""Framed messages over an inherited pair of sockets.

No port, no name, no address: only the two processes that inherited the pair can speak, which is why
reading pickles from it is no more dangerous than the ``fork`` that made them. A frame is an 8-byte
length and a pickle; a file descriptor may ride on the length.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
from collections.abc import Iterator
from typing import Any

_HEADER = struct.Struct("<Q")
_READ_BYTES = 1 << 20


class ChannelClosed(ConnectionError):
    """The other side is gone."""


class Channel:
    """One end of the pair.

    Args:
        sock: a connected stream socket; the channel owns it.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._inbox = bytearray()

    def fileno(self) -> int:
        """For ``select``."""
        return self._socket.fileno()

    def send(self, message: Any, fd: int | None = None) -> None:
        """Send one message, and a descriptor with it. Blocks while the other side's buffer is full.

        Raises:
            ChannelClosed: if nobody is there.
        """
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        header = _HEADER.pack(len(body))
        try:
            if fd is not None:
                socket.send_fds(self._socket, [header], [fd])
                self._socket.sendall(body)
            else:
                self._socket.sendall(header + body)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self) -> tuple[Any, int | None]:
        """The next message and its descriptor, if any. Blocks.

        Raises:
            ChannelClosed: if the other side is gone.
        """
        try:
            header, fds = self._read_header()
            body = self._read_exactly(*_HEADER.unpack(header))
        except OSError as error:  # a reset, if the other side has gone without listening
            raise ChannelClosed(str(error)) from error
        return pickle.loads(body), (fds[0] if fds else None)

    def _read_header(self) -> tuple[bytes, list[int]]:
        header = b""
        fds: list[int] = []
        while len(header) < _HEADER.size:
            part, more, _, _ = socket.recv_fds(self._socket, _HEADER.size - len(header), 1)
            if not part:
                raise ChannelClosed("the other side is gone")
            header, fds = header + part, fds + list(more)
        return header, fds

    def _read_exactly(self, length: int) -> bytearray:
        buffer = bytearray(length)
        view = memoryview(buffer)
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise ChannelClosed("the other side is gone")
            view = view[count:]
        return buffer

    def ready(self) -> bool:
        """Whether something has arrived."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def messages(self) -> Iterator[Any]:
        """What has arrived so far, whole messages only; never waits for the rest of one.

        Raises:
            ChannelClosed: if the other side is gone, once all its messages have been taken.
        """
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
        """Take what the kernel holds. False at the end of the stream."""
        while True:
            try:
                part = self._socket.recv(_READ_BYTES, socket.MSG_DONTWAIT)
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
        """Close this end."""
        self._socket.close()


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
