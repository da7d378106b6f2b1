"""Handshake and greeting, after which a connection is taken or turned away.

A greeting is a length and JSON of at most 64 KiB, read only after the handshake, in which each side
has shown that it holds the key. Nothing else is read from a stranger. Handshakes and greetings run
in threads, at most 16 at a time, 5 s each; where another one arrives, the oldest must go: an honest
peer needs milliseconds.
"""

from __future__ import annotations

import errno
import json
import math
import os
import select
import socket
import ssl
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from hybridtrain.errors import UserError
from hybridtrain.hosts import sockets
from hybridtrain.hosts.key import Key
from hybridtrain.hosts.transport import in_words

PROTOCOL = 1
T = TypeVar("T")
_LENGTH = struct.Struct("<I")
_MOST_BYTES = 1 << 16
_GREETING_S = 5.0
_MOST_PENDING = 16
_MOST_ADDRESSES, _SHOWN = 100, 3
_SUM_S = 30.0  # between two lines about connections that were turned away
_RETRY_S = 0.2


class ConnectionRefused(Exception):
    """The other side does not take part; the text says why."""


class Refusals:
    """Connections that were turned away: the first makes a line at once, later ones a sum."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}  # by address
        self._total, self._last, self._said_s = 0, "", -math.inf

    def add(self, address: str, reason: str) -> None:
        """Count a connection. ``address``: with the port, which is another one each time."""
        self._total, self._last = self._total + 1, f"{address}: {reason}"
        home = address.rpartition(":")[0] or address
        if home in self._numbers or len(self._numbers) < _MOST_ADDRESSES:
            self._numbers[home] = self._numbers.get(home, 0) + 1

    def is_due(self) -> bool:
        """Whether there is a line to be said now."""
        return bool(self._total) and time.monotonic() >= self._said_s + _SUM_S

    def take(self) -> str:
        """The line about all since the last one."""
        now_s = time.monotonic()
        several, known = self._total, math.isfinite(self._said_s)
        during = f" in {now_s - self._said_s:.0f} s" if known else ""
        most = sorted(self._numbers.items(), key=lambda each: -each[1])
        shown = ", ".join(f"{n:,} from {home}" for home, n in most[:_SHOWN])
        more = ", …" if len(most) > _SHOWN else ""
        said = f"{several:,} connections{during} ({shown}{more}); the last: {self._last}"
        line = self._last if several == 1 else said
        self._numbers, self._total, self._said_s = {}, 0, now_s
        return line


class Door(ABC):
    """Listens from the beginning; a subclass chooses whom it lets in, and keeps the connections.

    ``in_use``, ``elsewhere``: the advice where the port is in use, or the address is of another
    machine.

    Args:
        address: of this machine, or a name of it; ``""``: all of them.
        port: 0 takes a free one.
        key: of the run.
        about: what the others shall know, as JSON has it.

    Raises:
        UserError: if the port is in use or the address is not of this machine.
    """

    in_use: ClassVar[str]
    elsewhere: ClassVar[str]

    def __init__(self, address: str, port: int, key: Key, about: Mapping[str, Any]) -> None:
        self._context, self._about = key.context(server_side=True), dict(about)
        try:
            self._socket = sockets.listen(address, port)
        except OSError as error:
            raise UserError(self._not_listening(address, port, error)) from error
        self.port: int = self._socket.getsockname()[1]
        self._lock = threading.Lock()  # guards all below
        self._pending: dict[ssl.SSLSocket, str] = {}  # oldest first
        self._threads: set[threading.Thread] = set()
        self._refusals = Refusals()
        self._closed = False
        self._bell, self._wake = (os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in "bw")
        self._main = threading.Thread(target=self._serve, name="hosts", daemon=True)
        self._main.start()

    # ---- of a subclass, each called with the lock ------------------------------------------------

    @abstractmethod
    def _misfit(self, said: dict[str, Any]) -> str | None:
        """The fault of a greeting, in words; ``None``: it is right."""

    @abstractmethod
    def _keep(self, sock: ssl.SSLSocket, said: dict[str, Any]) -> None:
        """Take over the connection behind this greeting."""

    def _tidy(self) -> None:  # noqa: B027  (most have nothing to do)
        """Called now and then."""

    def _not_listening(self, address: str, port: int, error: OSError) -> str:
        if error.errno == errno.EADDRINUSE:
            return f"port {port} of {address or 'this machine'} is in use: {self.in_use}"
        if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
            return (
                f"cannot listen at {address}, which is no address of this machine: {self.elsewhere}"
            )
        return f"cannot listen at {address or 'all addresses'}, port {port}: {error.strerror}"

    # ---- who is let in --------------------------------------------------------------------------

    def fileno(self) -> int:
        """A descriptor for ``select``, readable when there are new connections or refusals."""
        return self._bell

    def _ring(self) -> None:
        os.eventfd_write(self._bell, 1)

    def refused(self) -> str | None:
        """A line about connections that were turned away; ``None``: none is due."""
        with self._lock:
            return self._refusals.take() if self._refusals.is_due() else None

    def close(self) -> None:
        """Stop listening."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.eventfd_write(self._wake, 1)
        self._main.join()
        self._socket.close()
        with self._lock:
            for sock in self._pending:
                sockets.shut(sock)
            threads = list(self._threads)
        for thread in threads:
            thread.join()
        os.close(self._bell)
        os.close(self._wake)
        self._bell = self._wake = -1

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while not self._closed:
            poll.poll(1000)
            with self._lock:
                self._tidy()
                if self._refusals.is_due():
                    self._ring()
            try:
                self._accept()
            except Exception as error:  # no descriptor, no thread, a connection that is gone
                self._refuse("a connection", in_words(error))
                time.sleep(0.05)

    def _accept(self) -> None:
        if self._closed or (found := sockets.accept(self._socket, self._context)) is None:
            return
        sock, address = found
        thread = threading.Thread(
            target=self._greet, args=(sock, address), name=f"greeting {address}", daemon=True
        )
        with self._lock:
            if len(self._pending) >= _MOST_PENDING:
                oldest = next(iter(self._pending))
                self._note(self._pending.pop(oldest), "too many others are waiting")
                sockets.shut(oldest)
            self._pending[sock] = address
            self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:
            with self._lock:
                self._pending.pop(sock, None)
                self._threads.discard(thread)
            sock.close()
            raise

    def _greet(self, sock: ssl.SSLSocket, address: str) -> None:
        """Handshake and greeting of one connection."""
        until = time.monotonic() + _GREETING_S
        let_in = False
        try:
            sock.settimeout(_GREETING_S)
            sock.do_handshake()
            said = hear(sock, until)
            fault = _speaks_another(said)
            with self._lock:
                if (fault := fault or self._misfit(said)) is None:
                    self._let_in(sock)
                    let_in = True
            reply = {"about": self._about} if fault is None else {"refused": fault}
            say(sock, {"protocol": PROTOCOL, **reply})
            if fault is not None:
                raise ConnectionRefused(fault)
            self._join(sock, said)
        except Exception as error:
            sock.close()
            with self._lock:
                known = let_in or sock in self._pending  # or its end is reported already
            if known:
                self._refuse(address, why(error))
        finally:
            with self._lock:
                self._pending.pop(sock, None)
                self._threads.discard(threading.current_thread())

    def _let_in(self, sock: ssl.SSLSocket) -> None:
        """Nobody may end the connection from here on. Raises ConnectionRefused, unanswered, if it
        is over."""
        if self._closed:
            raise ConnectionRefused("this host has stopped listening")
        if self._pending.pop(sock, None) is None:
            raise ConnectionRefused("it had to make room for others")

    def _join(self, sock: ssl.SSLSocket, said: dict[str, Any]) -> None:
        with self._lock:
            self._keep(sock, said)

    def _refuse(self, address: str, reason: str) -> None:
        with self._lock:
            self._note(address, reason)

    def _note(self, address: str, reason: str) -> None:
        self._refusals.add(address, reason)
        if self._refusals.is_due() and not self._closed:
            self._ring()


# ---- who knocks ----------------------------------------------------------------------------------


def knock(
    address: str, port: int, context: ssl.SSLContext, said: Mapping[str, Any], timeout_s: float
) -> tuple[ssl.SSLSocket, dict[str, Any]]:
    """Connect and greet; the connection, and what the other side says of itself.

    Raises:
        OSError: if it does not answer.
        ConnectionRefused: if it turns this side away.
    """
    until = time.monotonic() + timeout_s
    sock = sockets.connect(address, port, context, timeout_s)
    try:
        sock.do_handshake()
        say(sock, {"protocol": PROTOCOL, **said})
        reply = hear(sock, until)
        if "refused" in reply:
            raise ConnectionRefused(str(reply["refused"]))
    except BaseException:
        sock.close()
        raise
    return sock, reply.get("about", {})


def until_let_in(
    attempt: Callable[[float], T], where: str, who: str, timeout_s: float, advice: str
) -> T:
    """Knock until there is an answer.

    Args:
        attempt: knocks, with a time-out.
        where: the other side, in words.
        who: this side.
        timeout_s: until nobody answers.
        advice: what to check then.

    Raises:
        UserError: if nobody answers in time, the keys differ, or this side is turned away.
    """
    until = time.monotonic() + timeout_s
    while True:
        left = max(until - time.monotonic(), 0.1)
        try:
            return attempt(min(left, _GREETING_S))
        except ConnectionRefused as error:
            raise UserError(f"{where} has turned {who} away: {error}") from error
        except OSError as error:
            if _of_keys(error):
                raise UserError(
                    f"{where} has another key than {who}: give all hosts of the run the same key "
                    "file"
                ) from error
            if time.monotonic() + _RETRY_S >= until:
                raise UserError(
                    f"{where} has not answered {who} for {timeout_s:g} s ({why(error)}): {advice}"
                ) from error
        time.sleep(_RETRY_S)


def say(sock: ssl.SSLSocket, content: dict[str, Any]) -> None:
    """Send a greeting."""
    body = json.dumps(content).encode()
    if len(body) > _MOST_BYTES:
        raise ValueError(f"a greeting may have {_MOST_BYTES} bytes, this one has {len(body)}")
    sock.sendall(_LENGTH.pack(len(body)) + body)


def hear(sock: ssl.SSLSocket, until: float | None) -> dict[str, Any]:
    """The other side's greeting.

    Raises:
        OSError: if it does not arrive.
        ConnectionRefused: if it is none.
    """
    header = bytearray(_LENGTH.size)
    sockets.read_exactly(sock, memoryview(header), until)
    (length,) = _LENGTH.unpack(header)
    if length > _MOST_BYTES:
        raise ConnectionRefused("its greeting is too long")
    body = bytearray(length)
    sockets.read_exactly(sock, memoryview(body), until)
    try:
        said = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ConnectionRefused("its greeting is damaged") from error
    if not isinstance(said, dict):
        raise ConnectionRefused("its greeting is damaged")
    return said


def _speaks_another(said: dict[str, Any]) -> str | None:
    if said.get("protocol") == PROTOCOL:
        return None
    return (
        f"it speaks protocol {said.get('protocol')}, host 0 speaks {PROTOCOL}: install the same "
        "version of hybridtrain on all hosts"
    )


def why(error: Exception) -> str:
    """The error of a handshake or greeting, in words."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    reason = getattr(error, "reason", None)
    if reason in ("HTTP_REQUEST", "WRONG_VERSION_NUMBER", "UNSUPPORTED_PROTOCOL"):
        return "the other side speaks no TLS 1.3"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE" or _of_keys(error):
        return "it does not have the key of this run"
    return in_words(error)


def _of_keys(error: Exception) -> bool:
    """Whether one side does not accept the other's certificate."""
    reason = str(getattr(error, "reason", None))
    alert = "ALERT" in reason and ("_CA" in reason or "CERT" in reason or "DECRYPT" in reason)
    return isinstance(error, ssl.SSLCertVerificationError) or alert
