"""The place of this host in the run, and how host 0 hands the run's key to the others."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple

from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hybridtrain.errors import UserError
from hybridtrain.hosts import sockets
from hybridtrain.hosts.key import Key
from hybridtrain.util.host_place import HostPlace, is_loopback, place_by_variables

PATIENCE_S = 600.0  # until host 0 has published the key
_PAUSE_S = 0.2
_MOST_BYTES = 1 << 16  # of a key
_ENGINES: dict[type, str] = {
    TorchElasticEnvironment: "torchrun",
    SLURMEnvironment: "Slurm",
    LightningEnvironment: "variables",
}


def place_of(num_nodes: int, environment: ClusterEnvironment | None) -> HostPlace:
    """This process' place in a run on ``num_nodes`` hosts.

    Args:
        environment: Lightning's; ``None``: the one that the variables show.

    Raises:
        UserError: if the environment lacks something, or does not agree with ``num_nodes``.
    """
    if num_nodes == 1:
        _check_alone(environment)
        return HostPlace()
    if environment is None or type(environment) in _ENGINES:
        engine = None if environment is None else _ENGINES[type(environment)]
        return place_by_variables(num_nodes, engine)
    name = type(environment).__name__
    host, n_started = environment.node_rank(), environment.world_size()
    if environment.creates_processes_externally and n_started != num_nodes:
        raise UserError(
            f"num_nodes={num_nodes} was given, but {name} has started {n_started} processes; "
            "start one on each host, which starts the workers there (Trainer(devices=...))"
        )
    if not 0 <= host < num_nodes:
        raise UserError(
            f"num_nodes={num_nodes} was given, but {name} says that this is host {host}; its "
            f"node_rank() must be from 0 to {num_nodes - 1}"
        )
    address, port = environment.main_address, environment.main_port
    return HostPlace(host=host, n_hosts=num_nodes, address=address, port=port)


def _check_alone(environment: ClusterEnvironment | None) -> None:
    """Refuse processes started externally: each would train a model of its own."""
    if environment is None or not environment.creates_processes_externally:
        return
    try:
        n_started = environment.world_size()
    except KeyError:  # SLURM's, given by hand where there is no SLURM
        return
    if n_started > 1:
        raise UserError(
            f"this is one of {n_started} processes that {type(environment).__name__} has started, "
            "but the workers of one training are started by trainer.fit itself; start the script "
            "once (python script.py, srun --ntasks=1) and say Trainer(devices=...), or once on "
            "each host (torchrun --nproc-per-node 1, srun --ntasks-per-node=1) and say "
            "Trainer(devices=..., num_nodes=...), or use strategy='ddp'"
        )


def be_silent_beyond_host_0(place: HostPlace) -> None:
    """Let Lightning take this process for one that neither logs nor writes, if it is not host 0.

    To be called before loggers and callbacks are made: by the command line before it builds them,
    and when the trainer tells the strategy its number of hosts. Lightning reads its rank from
    ``RANK``, ``LOCAL_RANK`` and ``SLURM_PROCID`` alone, and not from ``NODE_RANK``.
    """
    if place.host > 0:
        rank_zero_only.rank = place.host  # type: ignore[attr-defined]


# ---- the key ------------------------------------------------------------------------------------


class Meeting(NamedTuple):
    """The key of a run, and where host 0 listens."""

    key: Key
    address: str
    port: int


@contextmanager
def handed_over(place: HostPlace, port: int, key: Key, path: str | Path | None) -> Iterator[None]:
    """On host 0: the other hosts can take the key of this run until the context ends.

    Args:
        port: that this host listens on already.
        key: of :func:`key_of`.
        path: the file with the key that all hosts have, as the user says.
    """
    if place.store_port:
        with _published(place, port, b"" if path is not None else key.to_bytes()):
            yield
    elif path is None:
        with _offered(port, key):
            yield
    else:
        yield


def take_key(place: HostPlace, path: str | Path | None, patience_s: float = PATIENCE_S) -> Meeting:
    """On another host: wait until host 0 has published the key, and return it.

    Raises:
        UserError: if there is no way to get one, or host 0 does not come.
    """
    given = None if path is None else key_of(place, path)
    if place.store_port:
        return _from_store(place, given, patience_s)
    if given is None:
        check_key_is_reachable(place, path)
        given = _from_offer(place.port, patience_s)
    return Meeting(given, place.address, place.port)


def check_key_is_reachable(place: HostPlace, path: str | Path | None) -> None:
    """Check that the hosts can get the same key.

    Raises:
        UserError: with the command that makes one.
    """
    if path is None and place.n_hosts > 1 and not place.store_port and not place.is_local:
        raise UserError(
            f"num_nodes={place.n_hosts} was given, with host 0 at {place.address}, but no key by "
            "which hosts know each other; make one with python -m hybridtrain key FILE, put the "
            "file on every host (chmod 600), and give strategy.hosts_key=FILE "
            "(HybridStrategy(hosts_key=FILE)); or start with torchrun, which hands one over"
        )


def key_of(place: HostPlace, path: str | Path | None) -> Key:
    """On host 0: the key in the user's file, or a new one.

    Raises:
        UserError: if there is no way to hand one over.
    """
    check_key_is_reachable(place, path)
    return Key.new() if path is None else Key.read(Path(path))


# By torchrun's store. Its values outlive a process that torchrun restarts, and each agent has a
# restart count of its own. So host 0 publishes again and again, and a value counts once it changes.


@contextmanager
def _published(place: HostPlace, port: int, key: bytes) -> Iterator[None]:
    store, over = _store(place, PATIENCE_S), Event()
    said = f"{address_towards(place)}\n{port}\n{key.hex()}"

    def publish() -> None:
        with suppress(RuntimeError):  # the store has ended: so will torchrun
            for beat in count():
                store.set(_name(place), f"{said}\n{beat}")
                if over.wait(_PAUSE_S):
                    return

    thread = Thread(target=publish, name="publish key", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _from_store(place: HostPlace, given: Key | None, patience_s: float) -> Meeting:
    until, before = time.monotonic() + patience_s, b""
    store = _store(place, patience_s)
    while time.monotonic() < until:
        now = store.get(_name(place)) if store.check([_name(place)]) else b""
        if before not in (b"", now):
            address, port, key, _ = now.decode().split("\n")
            if given is None and not key:
                raise UserError(
                    "host 0 was given strategy.hosts_key, and this host was not; give it on all"
                )
            return Meeting(given or Key.from_bytes(bytes.fromhex(key)), address, int(port))
        before = now
        time.sleep(_PAUSE_S)
    raise UserError(
        f"host 0 of {place.n_hosts} has not come within {patience_s:.0f} s; start the command on "
        "all hosts, and look at what host 0 printed"
    )


def _store(place: HostPlace, patience_s: float) -> TCPStore:
    try:
        return TCPStore(
            place.address,
            place.store_port,
            is_master=place.hosts_store,
            timeout=timedelta(seconds=patience_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:  # DistNetworkError is one
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"torchrun's store at {place.address}:{place.store_port} does not answer ({reason})"
        ) from None


def _name(place: HostPlace) -> str:
    return f"hybridtrain/{place.run}/server"


def address_towards(place: HostPlace) -> str:
    """This host's address in the network in which torchrun's store is."""
    with suppress(OSError):
        family, there = sockets.resolved(place.address, place.store_port)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(there)  # sends nothing
            own = str(probe.getsockname()[0])
        if place.is_local or not is_loopback(own):
            return own
    return place.address  # the store is on this host, whose name means loopback here


def bound_to(address: str) -> str:
    """Where host 0 listens: at all addresses (empty), if its name means loopback here.

    So it does on Debian, which has ``127.0.1.1`` for a machine's own name.
    """
    if is_loopback(address):
        return address
    try:
        found = sockets.resolved(address)
    except OSError:
        return address
    return "" if all(is_loopback(str(where[0])) for _, where in found) else address


# By a Unix socket without a file, between processes of one user on one machine. The kernel forgets
# it with host 0's process, and says whose process is at its other end.


def _name_of_offer(port: int) -> str:
    return f"\0hybridtrain-{os.getuid()}-{port}"


@contextmanager
def _offered(port: int, key: Key) -> Iterator[None]:
    try:
        server = sockets.listen_here(_name_of_offer(port))
    except OSError:
        raise UserError(
            f"another process hands over a key for port {port} of this machine; give another "
            "MASTER_PORT, or a key with strategy.hosts_key=FILE"
        ) from None
    thread = Thread(target=_offer, args=(server, key.to_bytes()), name="offer key", daemon=True)
    thread.start()
    try:
        yield
    finally:
        sockets.shut(server)
        thread.join()
        server.close()


def _offer(server: socket.socket, content: bytes) -> None:
    with suppress(OSError):  # shut
        while True:
            with sockets.accept_here(server) as sock:
                if sockets.user_of(sock) == os.getuid():
                    sock.sendall(content)


def _from_offer(port: int, patience_s: float) -> Key:
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        with socket.socket(socket.AF_UNIX) as sock, suppress(OSError):
            sock.settimeout(_PAUSE_S)
            sock.connect(_name_of_offer(port))
            if (user := sockets.user_of(sock)) != os.getuid():
                raise UserError(
                    f"a process of user {user} hands over a key for port {port} of this machine, "
                    "which counts for nothing; give another MASTER_PORT"
                )
            with sock.makefile("rb") as file:
                return Key.from_bytes(file.read(_MOST_BYTES))
        time.sleep(_PAUSE_S)
    raise UserError(
        f"host 0 has not handed over the key for port {port} of this machine within "
        f"{patience_s:.0f} s; start the command with NODE_RANK=0 on it, or give a key with "
        "strategy.hosts_key=FILE"
    )
