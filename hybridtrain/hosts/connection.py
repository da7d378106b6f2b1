"""How hosts meet: host 0 listens, the others dial, each with one connection for each role."""

from __future__ import annotations

import os
import secrets
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hybridtrain.hosts.door import Door, knock, until_let_in
from hybridtrain.hosts.key import Key
from hybridtrain.hosts.transport import HostConnection, HostLost

__all__ = ["HostConnection", "HostLost", "Listener", "dial"]

CONTROL, UP, DOWN = ROLES = ("control", "up", "down")  # "up": rows from another host to host 0
_HALF_S = 10.0  # between the first and the last connection of a host


@dataclass
class _Half:
    """Connections of a host that has not made all of them yet."""

    host: int
    about: dict[str, Any]
    until: float
    made: dict[str, ssl.SSLSocket] = field(default_factory=dict)


class Listener(Door):
    """Accepts the other hosts, on host 0; arguments are those of :class:`Door`."""

    in_use = "choose another MASTER_PORT, or see that NODE_RANK=0 is given to one host"
    elsewhere = "give the address by which the other hosts reach host 0"

    def __init__(self, address: str, port: int, key: Key, about: Mapping[str, Any]) -> None:
        self._halves: dict[str, _Half] = {}
        self._done: list[HostConnection] = []
        super().__init__(address, port, key, about)

    def accepted(self) -> list[HostConnection]:
        """The hosts that have arrived since the last call; never blocks."""
        with self._lock:
            with suppress(OSError):  # nothing rang; closed
                os.eventfd_read(self._bell)
            done, self._done = self._done, []
        return done

    def stop(self) -> list[HostConnection]:
        """Stop listening; the hosts that ``accepted`` has not returned."""
        super().close()
        for half in self._halves.values():
            _close(half)
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Stop listening; hosts that ``accepted`` has not returned are lost."""
        for connection in self.stop():
            connection.close()

    def _tidy(self) -> None:
        late = [x for x, half in self._halves.items() if time.monotonic() > half.until]
        for identity in late:
            half = self._halves.pop(identity)
            _close(half)
            self._note(f"host {half.host}", "it did not make all of its connections")

    def _misfit(self, said: dict[str, Any]) -> str | None:
        if (fault := _fault(said)) is not None:
            return fault
        half = self._halves.get(said["id"])
        if half is not None and (half.host != said["host"] or said["role"] in half.made):
            return f"it has made the connection {said['role']} already, or by another number"
        return None

    def _keep(self, sock: ssl.SSLSocket, said: dict[str, Any]) -> None:
        """Keep the connection until its host has made all of them."""
        identity, host = said["id"], said["host"]
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
        self._ring()


def dial(
    address: str, port: int, key: Key, host: int, about: Mapping[str, Any], timeout_s: float
) -> HostConnection:
    """Connect to host 0 as host ``host``; try again until it answers.

    Raises:
        UserError: if nobody answers in time, the keys differ, or host 0 turns this host away.
    """
    context = key.context(server_side=False)

    def attempt(within_s: float) -> HostConnection:
        said = {"host": host, "id": secrets.token_hex(16), "about": {**about}}
        made, theirs = dict[str, ssl.SSLSocket](), dict[str, Any]()
        try:
            for role in ROLES:
                greeting = {**said, "role": role}
                made[role], theirs = knock(address, port, context, greeting, within_s)
            return HostConnection(0, theirs, made[CONTROL], made[UP], made[DOWN])
        except BaseException:
            for sock in made.values():
                sock.close()
            raise

    return until_let_in(
        attempt,
        f"host 0 at {address}, port {port}",
        f"host {host}",
        timeout_s,
        "check that host 0 runs, that address and port are those it listens to, and that no "
        "firewall is between",
    )


def _fault(said: dict[str, Any]) -> str | None:
    """The fault of another host's greeting, in words; ``None``: it is right."""
    host, about = said.get("host"), said.get("about")
    if type(host) is not int or host < 1:
        return f"its number is {host}, and has to be 1 or more"
    whole = said.get("role") in ROLES and isinstance(said.get("id"), str)
    return None if whole and isinstance(about, dict) else "its greeting is damaged"


def _close(half: _Half) -> None:
    for sock in half.made.values():
        sock.close()
