"""How hosts meet: host 0 listens, the others dial, both show the run's key and greet.

A greeting is a length and JSON of at most 64 KiB, read only after the handshake, in which each side
has shown that it holds the key. Nothing else is read from a stranger. Handshakes and greetings run
in threads, at most 16 at a time, 5 s each; where another one arrives, the oldest must go: an honest
host needs milliseconds.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hybridtrain.errors import UserError
from hybridtrain.worlds.hosts import sockets
from hybridtrain.worlds.hosts.key import Key
from hybridtrain.worlds.hosts.transport import HostConnection, HostLost, in_words

__all__ = ["HostConnection", "HostLost", "Listener", "dial"]

PROTOCOL = 1
CONTROL, UP, DOWN = ROLES = ("control", "up", "down")  # "up": rows from another host to host 0
_LENGTH = struct.Struct("<I")
_MOST_BYTES = 1 << 16
_GREETING_S = 5.0
_HALF_S = 10.0  # between the first and the last connection of a host
_MOST_PENDING = 16
_MOST_REASONS = 100
_RETRY_S = 0.2


class _Refused(Exception):
    """The other side does not take part; the text says why."""


@dataclass
class _Half:
    """Connections of a host that has not made all of them yet."""

    host: int
    about: dict[str, Any]
    until: float
    made: dict[str, ssl.SSLSocket] = field(default_factory=dict)


class Listener:
    """Where host 0 awaits the others. Listens from the beginning.

    Args:
        address: of this machine, or a name of it; ``""``: all of them.
        port: 0 takes a free one.
        key: of the run.
        about: what the others shall know, as JSON has it.

    Raises:
        UserError: if the port is in use or the address is not of this machine.
    """

    def __init__(self, address: str, port: int, key: Key, about: Mapping[str, Any]) -> None:
        self._context, self._about = key.context(server_side=True), dict(about)
        try:
            self._socket = sockets.listen(address, port)
        except OSError as error:
            raise UserError(_not_listening(address, port, error)) from error
        self.port: int = self._socket.getsockname()[1]
        self._lock = threading.Lock()  # guards all below
        self._pending: dict[ssl.SSLSocket, str] = {}  # oldest first
        self._threads: set[threading.Thread] = set()
        self._halves: dict[str, _Half] = {}
        self._done: list[HostConnection] = []
        self._reasons: list[str] = []
        self._unsaid = 0
        self._closed = False
        self._bell, self._wake = (os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in "bw")
        self._main = threading.Thread(target=self._serve, name="hosts", daemon=True)
        self._main.start()

    def fileno(self) -> int:
        """A descriptor for ``select``, readable when ``accepted`` or ``refused`` has news."""
        return self._bell

    def accepted(self) -> list[HostConnection]:
        """The hosts that have arrived since the last call; never blocks."""
        with self._lock:
            with suppress(OSError):  # nothing rang; closed
                os.eventfd_read(self._bell)
            done, self._done = self._done, []
        return done

    def refused(self) -> list[str]:
        """Address and reason of each that was turned away since the last call."""
        with self._lock:
            reasons, self._reasons = self._reasons, []
            if self._unsaid:
                reasons.append(f"and {self._unsaid} more")
            self._unsaid = 0
        return reasons

    def close(self) -> None:
        """Stop listening; hosts that ``accepted`` has not returned are lost."""
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
        for half in self._halves.values():
            _close(half)
        for connection in self._done:
            connection.close()
        self._done = []
        os.close(self._bell)
        os.close(self._wake)
        self._bell = self._wake = -1

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while not self._closed:
            poll.poll(1000)
            self._drop_halves()
            try:
                self._accept()
            except Exception as error:  # no descriptor, no thread, a connection that is gone
                self._refuse("a connection", in_words(error))
                time.sleep(0.05)

    def _drop_halves(self) -> None:
        with self._lock:
            late = [x for x, half in self._halves.items() if time.monotonic() > half.until]
            for identity in late:
                half = self._halves.pop(identity)
                _close(half)
                self._note(f"host {half.host}: it did not make all of its connections")

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
                self._note(f"{self._pending.pop(oldest)}: too many others are waiting")
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
        try:
            sock.settimeout(_GREETING_S)
            sock.do_handshake()
            said = _hear(sock, until)
            fault = _fault(said)
            with self._lock:
                fault = fault or self._misfit(said)
            reply = {"about": self._about} if fault is None else {"refused": fault}
            _say(sock, {"protocol": PROTOCOL, **reply})
            if fault is not None:
                raise _Refused(fault)
            self._join(sock, said)
        except Exception as error:
            sock.close()
            with self._lock:
                known = sock in self._pending  # or its end is reported already
            if known:
                self._refuse(address, _why(error))
        finally:
            with self._lock:
                self._pending.pop(sock, None)
                self._threads.discard(threading.current_thread())

    def _misfit(self, said: dict[str, Any]) -> str | None:
        half = self._halves.get(said["id"])
        if half is not None and (half.host != said["host"] or said["role"] in half.made):
            return f"it has made the connection {said['role']} already, or by another number"
        return None

    def _join(self, sock: ssl.SSLSocket, said: dict[str, Any]) -> None:
        """Keep the connection until its host has made all of them."""
        identity, host = said["id"], said["host"]
        with self._lock:
            if self._closed:
                raise _Refused("this host has stopped listening")
            if self._pending.pop(sock, None) is None:
                raise _Refused("it had to make room for others")
            # From here on it is its host's, and nobody but the connection may end it.
            half = self._halves.setdefault(
                identity, _Half(host, said["about"], time.monotonic() + _HALF_S)
            )
            half.made[said["role"]] = sock
            if len(half.made) < len(ROLES):
                return
            del self._halves[identity]
            made = half.made
            connection = HostConnection(host, half.about, made[CONTROL], made[DOWN], made[UP])
            self._done.append(connection)
            os.eventfd_write(self._bell, 1)

    def _refuse(self, address: str, reason: str) -> None:
        with self._lock:
            self._note(f"{address}: {reason}")

    def _note(self, reason: str) -> None:
        if len(self._reasons) < _MOST_REASONS:
            self._reasons.append(reason)
        else:
            self._unsaid += 1
        if not self._closed:
            os.eventfd_write(self._bell, 1)


def dial(
    address: str, port: int, key: Key, host: int, about: Mapping[str, Any], timeout_s: float
) -> HostConnection:
    """Connect to host 0 as host ``host``; try again until it answers.

    Raises:
        UserError: if nobody answers in time, the keys differ, or host 0 turns this host away.
    """
    where, until = f"host 0 at {address}, port {port}", time.monotonic() + timeout_s
    context = key.context(server_side=False)
    while True:
        left = max(until - time.monotonic(), 0.1)
        try:
            return _dial(address, port, context, host, about, min(left, _GREETING_S))
        except _Refused as error:
            raise UserError(f"{where} has turned host {host} away: {error}") from error
        except OSError as error:
            if _of_keys(error):
                raise UserError(
                    f"{where} has another key than host {host}: give all hosts of the run the "
                    "same key file"
                ) from error
            if time.monotonic() + _RETRY_S >= until:
                raise UserError(
                    f"{where} has not answered host {host} for {timeout_s:g} s ({_why(error)}): "
                    "check that host 0 runs, that address and port are those it listens to, and "
                    "that no firewall is between"
                ) from error
        time.sleep(_RETRY_S)


def _dial(
    address: str,
    port: int,
    context: ssl.SSLContext,
    host: int,
    about: Mapping[str, Any],
    timeout_s: float,
) -> HostConnection:
    greeting = {"protocol": PROTOCOL, "host": host, "id": secrets.token_hex(16), "about": {**about}}
    made, reply = {}, dict[str, Any]()
    try:
        for role in ROLES:
            until = time.monotonic() + timeout_s
            sock = made[role] = sockets.connect(address, port, context, timeout_s)
            sock.do_handshake()
            _say(sock, {**greeting, "role": role})
            reply = _hear(sock, until)
            if "refused" in reply:
                raise _Refused(str(reply["refused"]))
        return HostConnection(0, reply.get("about", {}), made[CONTROL], made[UP], made[DOWN])
    except BaseException:
        for sock in made.values():
            sock.close()
        raise


def _say(sock: ssl.SSLSocket, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    if len(body) > _MOST_BYTES:
        raise ValueError(f"a greeting may have {_MOST_BYTES} bytes, this one has {len(body)}")
    sock.sendall(_LENGTH.pack(len(body)) + body)


def _hear(sock: ssl.SSLSocket, until: float) -> dict[str, Any]:
    """The other side's greeting.

    Raises:
        OSError: if it does not arrive.
        _Refused: if it is none.
    """
    header = bytearray(_LENGTH.size)
    sockets.read_exactly(sock, memoryview(header), until)
    (length,) = _LENGTH.unpack(header)
    if length > _MOST_BYTES:
        raise _Refused("its greeting is too long")
    body = bytearray(length)
    sockets.read_exactly(sock, memoryview(body), until)
    try:
        said = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _Refused("its greeting is damaged") from error
    if not isinstance(said, dict):
        raise _Refused("its greeting is damaged")
    return said


def _fault(said: dict[str, Any]) -> str | None:
    """The fault of another host's greeting, in words; ``None``: it is right."""
    if said.get("protocol") != PROTOCOL:
        return (
            f"it speaks protocol {said.get('protocol')}, host 0 speaks {PROTOCOL}: install the "
            "same version of hybridtrain on all hosts"
        )
    host, about = said.get("host"), said.get("about")
    if type(host) is not int or host < 1:
        return f"its number is {host}, and has to be 1 or more"
    if said.get("role") not in ROLES or not isinstance(said.get("id"), str):
        return "its greeting is damaged"
    return None if isinstance(about, dict) else "its greeting is damaged"


def _why(error: Exception) -> str:
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


def _close(half: _Half) -> None:
    for sock in half.made.values():
        sock.close()


def _not_listening(address: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} of {address or 'this machine'} is in use: choose another MASTER_PORT, "
            "or see that NODE_RANK=0 is given to one host"
        )
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return (
            f"cannot listen at {address}, which is no address of this machine: give the address "
            "by which the other hosts reach host 0"
        )
    return f"cannot listen at {address or 'all addresses'}, port {port}: {error.strerror}"
