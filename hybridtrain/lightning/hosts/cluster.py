"""The place of this host in the run, and how host 0 hands the run's key to the others."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import tempfile
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
from hybridtrain.util.host_place import Place, is_loopback, place_by_variables
from hybridtrain.worlds.hosts.key import Key

PATIENCE_S = 600.0  # until host 0 has published the key
_PAUSE_S = 0.2
_ENGINES: dict[type, str] = {
    TorchElasticEnvironment: "torchrun",
    SLURMEnvironment: "Slurm",
    LightningEnvironment: "variables",
}


def place_of(num_nodes: int, environment: ClusterEnvironment | None) -> Place:
    """This process' place in a run on ``num_nodes`` hosts.

    Args:
        environment: Lightning's; ``None``: the one that the variables show.

    Raises:
        UserError: if the environment lacks something, or does not agree with ``num_nodes``.
    """
    if num_nodes == 1:
        _check_alone(environment)
        return Place()
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
    return Place(host=host, n_hosts=num_nodes, address=address, port=port, engine=name)


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


def be_silent_beyond_host_0(place: Place) -> None:
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
def handed_over(place: Place, port: int, key: Key, path: str | Path | None) -> Iterator[None]:
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
        with _left_in_file(port, key):
            yield
    else:
        yield


def take_key(place: Place, path: str | Path | None, patience_s: float = PATIENCE_S) -> Meeting:
    """On another host: wait until host 0 has published the key, and return it.

    Raises:
        UserError: if there is no way to get one, or host 0 does not come.
    """
    given = None if path is None else key_of(place, path)
    if place.store_port:
        return _from_store(place, given, patience_s)
    if given is None:
        check_key_is_reachable(place, path)
        given = _from_file(place.port, patience_s)
    return Meeting(given, place.address, place.port)


def check_key_is_reachable(place: Place, path: str | Path | None) -> None:
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


def key_of(place: Place, path: str | Path | None) -> Key:
    """On host 0: the key in the user's file, or a new one.

    Raises:
        UserError: if there is no way to hand one over.
    """
    check_key_is_reachable(place, path)
    return Key.new() if path is None else Key.read(Path(path))


# By torchrun's store. Its values outlive a process that torchrun restarts, and each agent has a
# restart count of its own. So host 0 publishes again and again, and a value counts once it changes.


@contextmanager
def _published(place: Place, port: int, key: bytes) -> Iterator[None]:
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


def _from_store(place: Place, given: Key | None, patience_s: float) -> Meeting:
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


def _store(place: Place, patience_s: float) -> TCPStore:
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


def _name(place: Place) -> str:
    return f"hybridtrain/{place.run}/server"


def address_towards(place: Place) -> str:
    """This host's address in the network in which torchrun's store is."""
    with suppress(OSError):
        family, kind, protocol, _, there = socket.getaddrinfo(
            place.address, place.store_port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(there)  # sends nothing
            own = str(probe.getsockname()[0])
        if place.is_local or not is_loopback(own):
            return own
    return place.address  # the store is on this host, whose name means loopback here


# By a file in the temporary directory, between processes of one user on one host. Host 0 holds a
# lock on it, so that a killed run's file counts for nothing.


def key_file(port: int) -> Path:
    """Where host 0 leaves the key for processes of this user on this host."""
    return Path(tempfile.gettempdir()) / f"hybridtrain-{os.getuid()}-{port}.key"


@contextmanager
def _left_in_file(port: int, key: Key) -> Iterator[None]:
    path, pid = key_file(port), os.getpid()
    fd = _made(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.write(fd, key.to_bytes())
        yield
    finally:
        if os.getpid() == pid:
            path.unlink(missing_ok=True)
            os.close(fd)


def _made(path: Path) -> int:
    """Make the file, in place of one that a killed run has left."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    for attempt in range(2):
        try:
            return os.open(path, flags, 0o600)
        except FileExistsError:
            if attempt:
                break
            with suppress(OSError):  # another user's
                path.unlink()  # its run has ended: this one has the port
    raise UserError(
        f"{path} is there and cannot be replaced; remove it, or give another MASTER_PORT, or a key "
        "with strategy.hosts_key=FILE"
    )


def _from_file(port: int, patience_s: float) -> Key:
    until, path = time.monotonic() + patience_s, key_file(port)
    while time.monotonic() < until:
        with suppress(FileNotFoundError), _opened(path) as fd:
            if content := _of_living(fd):
                return Key.from_bytes(content)
        time.sleep(_PAUSE_S)
    raise UserError(
        f"host 0 has not left the key in {path} within {patience_s:.0f} s; start the command with "
        "NODE_RANK=0 on this machine, or give a key with strategy.hosts_key=FILE"
    )


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A descriptor of the file, which only this user can read."""
    fd = None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PermissionError
        yield fd
    except FileNotFoundError:
        raise
    except OSError:
        raise UserError(
            f"{path} is not a file of this user's that nobody else can read, so the key in it "
            "counts for nothing; remove it, or give another MASTER_PORT"
        ) from None
    finally:
        if fd is not None:
            os.close(fd)


def _of_living(fd: int) -> bytes:
    """The content, if a process holds the file; else empty."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.read(fd, 1 << 16)
    return b""
