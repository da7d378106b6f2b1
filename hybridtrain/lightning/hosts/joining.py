"""Bring the hosts of a run together before its workers start, and tell them how it has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from selectors import EVENT_READ, BaseSelector, DefaultSelector
from typing import TYPE_CHECKING, Any

from hybridtrain.engine.monitoring.watchdog import to_stderr
from hybridtrain.engine.worlds.signals import Interrupted, caught_signals
from hybridtrain.errors import Lost, UserError
from hybridtrain.hosts.connection import HostConnection, HostLost, Listener, dial
from hybridtrain.hosts.orders import Over, Signalled
from hybridtrain.hosts.other_hosts import Hosts
from hybridtrain.lightning.hosts.agreement import about_this_host, differences
from hybridtrain.lightning.hosts.cluster import (
    address_towards,
    bound_to,
    handed_over,
    key_of,
    take_key,
)
from hybridtrain.lightning.run_setup import RunSetup
from hybridtrain.util.host_place import HostPlace

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

PATIENCE_S = 600.0  # until all hosts have come
_NEWS_S = 20.0  # between two lines about who is missing


def with_other_hosts(
    setup: RunSetup,
    trainer: Trainer,
    arguments: Mapping[str, Any],
    train: Callable[[Hosts | None], list[Any]],
    whole: Callable[[list[Any]], list[Any]],
    stats: Callable[[], dict[str, Any]],
) -> list[Any]:
    """On host 0: wait for the others, train, and tell them how it has ended, with the ``stats``.

    ``whole``: gives results all that lies outside of them on this host.

    Returns:
        The results of all workers, from ``train``.

    Raises:
        UserError: if a host does not come, or does not fit.
    """
    place = setup.place
    if place.n_hosts == 1:
        return train(None)
    path, about = setup.options["hosts_key"], about_this_host(setup, trainer, arguments)
    with ExitStack() as stack:
        others = stack.enter_context(gathering(place, path, about))
        others.wait_for(setup.min_hosts)
        there, arrivals = list(others.found.values()), others.arrivals
        if not setup.scheme.on_failure.tells:  # then none may come while training runs
            stack.close()
            arrivals = list
        hosts = Hosts(there, place.n_hosts, setup.n_here, arrivals)
        try:
            results = train(hosts)
            over = Over(whole(results))
        except BaseException as error:
            over = _over_by(error)
            raise
        finally:
            late = others.last_arrivals()
            stack.close()  # or a host that has the results would take this key for its next call
            hosts.conclude(replace(over, stats=stats()), late)
        return results


def _over_by(error: BaseException) -> Over:
    if isinstance(error, Interrupted):
        return Over(signum=error.signum)
    return Over(error=f"{type(error).__name__}: {error}")


@contextmanager
def gathering(
    place: HostPlace, path: str | Path | None, about: Mapping[str, Any]
) -> Iterator[Gathering]:
    """On host 0: let other hosts come until the context ends.

    Args:
        path: the file with the key.
        about: what must agree.
    """
    key = key_of(place, path)
    address = address_towards(place) if place.store_port else place.address
    listener = Listener(bound_to(address), place.port, key, about)
    try:
        with handed_over(place, listener.port, key, path):
            yield Gathering(listener, place.n_hosts, about)
    finally:
        listener.close()


@dataclass
class Gathering:
    """Accepts the other hosts of a run, and refuses hosts that do not fit.

    Args:
        listener: of host 0.
        n_hosts: of the run.
        about: host 0.
        found: the connections to other hosts, by number, as they come.
    """

    listener: Listener
    n_hosts: int
    about: Mapping[str, Any]
    found: dict[int, HostConnection] = field(default_factory=dict)

    def wait_for(self, least: int, patience_s: float = PATIENCE_S) -> None:
        """Wait until ``least`` hosts are there, this one included.

        A host that ends while it waits for others may come again.

        Raises:
            UserError: if one does not come in time, or does not fit.
            Interrupted: at a signal, also one that another host has got.
        """
        try:
            self._wait_for(least, patience_s)
        except BaseException as error:
            for connection in self.found.values():
                connection.send(_over_by(error))
                connection.close()
            raise

    def _wait_for(self, least: int, patience_s: float) -> None:
        found = self.found
        caught: list[int] = []
        began_s = said_s = time.monotonic()
        with DefaultSelector() as selector, caught_signals(caught, selector):
            selector.register(self.listener, EVENT_READ)
            while len(found) < least - 1:
                selector.select(1.0)
                now_s = time.monotonic()
                for connection in list(found.values()):
                    caught += self._heard(connection, now_s, selector)
                if caught:
                    raise Interrupted(caught[0])
                for connection in self._came():
                    self._check(connection, found)
                    found[connection.host] = connection
                    selector.register(connection, EVENT_READ)
                missing = sorted(set(range(1, self.n_hosts)) - found.keys())
                names = ", ".join(map(str, missing))
                if now_s > began_s + patience_s:
                    raise UserError(
                        f"num_nodes={self.n_hosts} was given, but of hosts 1 to "
                        f"{self.n_hosts - 1} these have not come within {patience_s:g} s: "
                        f"{names}; start the same command there, and see that they reach port "
                        f"{self.listener.port} of this host"
                    )
                if missing and now_s > said_s + _NEWS_S:
                    said_s = now_s
                    to_stderr(
                        f"waiting at port {self.listener.port} for host {names} of {self.n_hosts}"
                    )

    def _heard(self, connection: HostConnection, now_s: float, selector: BaseSelector) -> list[int]:
        """Signals that a waiting host has got; it is forgotten if it has ended."""
        try:
            connection.look(now_s)
            messages = connection.receive()
        except HostLost as lost:
            to_stderr(f"host {connection.host} has gone, and may come again: {lost}")
            selector.unregister(connection)
            connection.close()
            del self.found[connection.host]
            return []
        return [each.signum for each in messages if isinstance(each, Signalled)]

    def _check(self, connection: HostConnection, found: Mapping[int, HostConnection]) -> None:
        if (reason := differences(self.about, connection.about)) is not None:
            raise UserError(f"host {connection.host} does not fit: {reason}")
        if connection.host in found or connection.host >= self.n_hosts:
            taken = "there already" if connection.host in found else "one too many"
            raise UserError(
                f"num_nodes={self.n_hosts} was given, and a host that says it is host "
                f"{connection.host} has come, which is {taken}; give each host a NODE_RANK of its "
                f"own, from 0 to {self.n_hosts - 1}"
            )

    def _came(self) -> list[HostConnection]:
        if (strangers := self.listener.refused()) is not None:
            to_stderr(f"turned away: {strangers}")
        return self.listener.accepted()

    def last_arrivals(self) -> list[HostConnection]:
        """Let no more come; as :meth:`arrivals`."""
        return self._fit(self.listener.stop())

    def arrivals(self) -> list[HostConnection]:
        """The hosts that have come since the last call; those that do not fit are turned away."""
        return self._fit(self._came())

    def _fit(self, came: Sequence[HostConnection]) -> list[HostConnection]:
        fit = []
        for connection in came:
            try:
                self._check(connection, {})
                fit.append(connection)
            except UserError as error:
                to_stderr(f"turned away: {error}")
                connection.close()
        return fit


def joined(
    setup: RunSetup, trainer: Trainer, arguments: Mapping[str, Any]
) -> AbstractContextManager[HostConnection]:
    """On another host: the connection to host 0 of a trainer's run, as :func:`reached`."""
    about = about_this_host(setup, trainer, arguments)
    return reached(setup.place, setup.options["hosts_key"], about)


@contextmanager
def _news(text: str) -> Iterator[None]:
    """Say it again and again until the context ends."""
    over = threading.Event()

    def say() -> None:
        while not over.wait(_NEWS_S):
            to_stderr(text)

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def reached(
    place: HostPlace, path: str | Path | None, about: Mapping[str, Any], wait_s: float = PATIENCE_S
) -> Iterator[HostConnection]:
    """On another host: the connection to host 0.

    Args:
        path: the file with the key.
        about: what must agree.

    Raises:
        UserError: if host 0 does not come, or does not fit.
    """
    port = place.store_port or place.port
    with _news(f"host {place.host} waits for host 0 at {place.address}, port {port}"):
        meeting = take_key(place, path, wait_s)
        connection = dial(meeting.address, meeting.port, meeting.key, place.host, about, wait_s)
    try:
        if (reason := differences(about, connection.about)) is not None:
            raise UserError(f"host 0 does not fit: {reason}")
        yield connection
    finally:
        connection.close()


def results_of(over: Over) -> list[Any]:
    """The results of all workers.

    Raises:
        Interrupted: if a signal has ended the run.
        Lost: if it has failed, which host 0 shows in full.
    """
    if over.signum:
        raise Interrupted(over.signum)
    if over.error:
        raise Lost(f"the run has ended on host 0: {over.error}")
    return over.results
