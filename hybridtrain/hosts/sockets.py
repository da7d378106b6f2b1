"""TCP sockets with TLS that a forked child does not keep.

A forked child inherits all descriptors. If it kept a connection of its parent, the other host would
not see the end of the parent before the end of the child. So each fork closes them in the child.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import struct
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

CONTROL_TIMEOUT_S = 12  # until a silent host is lost
ROWS_TIMEOUT_S = 120  # a stopped host reads nothing, and its rows wait

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_making = threading.Lock()  # no fork between a socket's making and its entry in the list


def _forked() -> None:
    for sock in list(_open):
        fd = socket.socket.detach(sock)
        if fd >= 0:
            os.close(fd)
    _open.clear()
    _making.release()


os.register_at_fork(before=_making.acquire, after_in_parent=_making.release, after_in_child=_forked)


def listen(address: str, port: int) -> socket.socket:
    """A listening socket that does not block; an address may be a name.

    Raises:
        OSError: if the address is not of this machine or the port is in use.
    """
    family, where = resolved(address, port, socket.AI_PASSIVE)[0]
    with _making:
        sock = socket.create_server(where, family=family, backlog=128)
        _open.add(sock)
    sock.setblocking(False)
    return sock


def resolved(address: str, port: int = 0, flags: int = 0) -> list[tuple[int, tuple[Any, ...]]]:
    """Families and addresses of a name, which may be empty.

    Raises:
        OSError: if there is no such name.
    """
    try:
        found = socket.getaddrinfo(address or None, port, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError:  # a label that is empty or too long
        raise OSError(errno.EINVAL, f"{address!r} is no name of a host") from None
    return [(family, where) for family, _, _, _, where in found]


def free_port(address: str = "") -> int:
    """A port that nothing listens at now."""
    with listen(address, 0) as sock:
        return int(sock.getsockname()[1])


def listen_here(name: str) -> socket.socket:
    """A listening Unix socket without a file; ``name`` begins with a zero byte.

    Raises:
        OSError: if the name is in use.
    """
    with _making:
        sock = socket.socket(socket.AF_UNIX)
        _open.add(sock)
    try:
        sock.bind(name)
        sock.listen()
    except BaseException:
        sock.close()
        raise
    return sock


def accept_here(listening: socket.socket) -> socket.socket:
    """Wait for the next connection; it may keep nobody waiting.

    Raises:
        OSError: if the listening socket was shut.
    """
    select.select([listening], [], [])
    with _making:
        sock, _ = listening.accept()
        _open.add(sock)
    sock.setblocking(False)  # a key fits into its buffer
    return sock


def user_of(sock: socket.socket) -> int:
    """The user of the process at the other end of a Unix socket."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", found)[1])


def accept(listening: socket.socket, context: ssl.SSLContext) -> tuple[ssl.SSLSocket, str] | None:
    """The next connection, before its handshake, and its address; ``None`` if there is none.

    Raises:
        OSError: if it cannot be accepted.
    """
    with _making:
        try:
            sock, where = listening.accept()
        except BlockingIOError:
            return None
        secured = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        _open.add(secured)
    return secured, f"{where[0]}:{where[1]}"


def connect(address: str, port: int, context: ssl.SSLContext, timeout_s: float) -> ssl.SSLSocket:
    """Connect, before the handshake, to the first of the name's addresses that answers.

    Raises:
        OSError: if nobody answers within ``timeout_s``, of which each has its part.
    """
    found = resolved(address, port)
    *others, (family, where) = found
    for other, elsewhere in others:
        with suppress(OSError):
            return _connect(other, elsewhere, context, timeout_s / len(found))
    return _connect(family, where, context, timeout_s / len(found))


def _connect(
    family: int, where: tuple[Any, ...], context: ssl.SSLContext, timeout_s: float
) -> ssl.SSLSocket:
    with _making:
        sock = socket.socket(family, socket.SOCK_STREAM)
        _open.add(sock)
    try:
        sock.settimeout(timeout_s)
        sock.connect(where)
        with _making:
            secured = context.wrap_socket(sock, do_handshake_on_connect=False)
            _open.add(secured)
    except BaseException:
        sock.close()
        raise
    return secured


def set_options(sock: socket.socket, timeout_s: int) -> None:
    """Send small messages at once; notice within ``timeout_s`` that the other host is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, timeout_s // 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, timeout_s // 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * timeout_s)


def read_exactly(sock: socket.socket, room: memoryview, until: float | None = None) -> None:
    """Fill ``room``; ``until``: a time of ``time.monotonic``.

    Raises:
        OSError: if the stream ends before, or the time is over.
    """
    done = 0
    while done < len(room):
        if until is not None:
            sock.settimeout(max(until - time.monotonic(), 0.001))
        count = sock.recv_into(room[done:])
        if not count:
            raise ConnectionError("it ended the connection")
        done += count


def shut(sock: socket.socket) -> None:
    """End the connection, and what other threads wait for at it."""
    with suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # that of SSLSocket would race with them
