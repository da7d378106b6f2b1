"""Lock a run's directory, so that a second run gets an error before it writes anything.

Theory of operation. A run locks (``flock``) the file ``.lock`` in its directory, writes its process
id and host into it, and removes it at its end. The system frees the lock when the last process that
holds it has ended, so a killed run needs no cleaning up: a file without a lock claims nothing. The
run's own process and its workers hold the lock, so the directory stays in use while one of them
still writes a checkpoint. Their children do not hold it: programs do not inherit the descriptor,
and processes forked by a worker close it. A run claims its directory first of all, so this module
imports neither torch nor Lightning.

Hydra writes the configuration into the directory before it calls the run; ``Claiming``, a callback
of Hydra's, claims it before that.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from hybridtrain.cli.further_host import diverted
from hybridtrain.cli.validation.host_checks import check_directory, check_files, check_name
from hybridtrain.engine.monitoring.watchdog import process_state, to_stderr
from hybridtrain.errors import Lost, UserError
from hybridtrain.report.runs import CONFIG_FILE
from hybridtrain.util.files import short

LOCK_FILE = ".lock"
PATIENCE_S = 2.0  # for processes that are being killed
_MOST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ClaimedDirectory:
    """A directory claimed by a process. ``fd`` holds the lock; -1: the file system has no locks."""

    directory: Path
    fd: int
    pid: int


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that has locked a directory, as its lock file says; ``pid`` 0: unknown."""

    pid: int = 0
    host: str = ""
    since: str = ""

    def __str__(self) -> str:
        if not self.pid:
            return "by another run"
        who = f"by process {self.pid} on {self.host}, since {self.since}"
        return f"{who} (it has ended, but a process of it has not)" if self.is_gone() else who

    def is_gone(self) -> bool:
        """Whether the process is known to have ended."""
        here = self.host == socket.gethostname() and process_state(os.getpid())
        return bool(here) and process_state(self.pid) in ("", "Z", "X")


_held: list[ClaimedDirectory] = []
_made: list[Path] = []  # directories, the deepest first


def claim(directory: Path, asked: str, way_out: str) -> None:
    """Claim the directory until :func:`release_all` or the end of this process.

    Args:
        directory: exists; this process may have claimed it already.
        asked: the user's option, for the error message.
        way_out: what to do if another run uses it, for the error message.

    Raises:
        UserError: if another run uses it, or it cannot be written.
    """
    holder = attempt(directory, asked)
    if holder is not None:
        raise UserError(f"{asked}: this directory is in use {holder}; {way_out}")


def started_by_a_run() -> bool:
    """Whether this process is a rank other than 0 that Lightning has started with our command line.

    Rank 0 may have a ``LOCAL_RANK``, too, from a launcher (torchrun, a scheduler).
    """
    return os.environ.get("LOCAL_RANK", "0") != "0"


def attempt(directory: Path, asked: str) -> Holder | None:
    """Claim the directory; returns the holder if another run uses it.

    Waits up to ``PATIENCE_S`` for a run that was just killed.

    Raises:
        UserError: if the directory cannot be written.
    """
    if started_by_a_run():  # rank 0 holds it
        return None
    directory = directory.resolve()
    if any(each.directory == directory for each in _held):
        return None
    until_s = time.monotonic() + PATIENCE_S
    while isinstance(found := _lock(directory, asked), Holder):
        if (found.pid and not found.is_gone()) or time.monotonic() > until_s:
            return found
        time.sleep(0.05)
    _held.append(found)
    return None


def release_all() -> None:
    """Release all claims of this process; remove their lock files, and what it has made in vain."""
    for each in _held:
        if each.pid == os.getpid():
            _release(each)
    _held.clear()
    for directory in _made:
        with suppress(OSError):  # it is not empty
            directory.rmdir()
    _made.clear()


def release(directory: Path) -> None:
    """Release the claim to this directory."""
    for each in [x for x in _held if x.directory == directory.resolve()]:
        _held.remove(each)
        _release(each)


def check_kept(directory: Path) -> None:
    """Check that the directory is the one that this process has claimed.

    Raises:
        Lost: if it was removed or moved since, with all that the run had written.
    """
    mine = [x for x in _held if x.directory == directory.resolve() and x.fd >= 0]
    gone = [x for x in mine if not _is_at(x.fd, x.directory / LOCK_FILE)]
    if gone and not (directory / CONFIG_FILE).exists():
        raise Lost(
            f"the run directory {short(directory)} was removed or moved during the run: its "
            "configuration, record, logs and checkpoints until then are not there"
        )


def _release(mine: ClaimedDirectory) -> None:
    if mine.fd < 0:
        return
    path = mine.directory / LOCK_FILE
    with suppress(OSError):  # removed, or read-only by now
        if _is_at(mine.fd, path):
            path.unlink()
    os.close(mine.fd)


def _lock(directory: Path, asked: str) -> ClaimedDirectory | Holder:
    path = directory / LOCK_FILE
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise UserError(
            f"{asked}: the directory {directory} cannot be written ({error.strerror}), and a run "
            "writes its checkpoints and logs there"
        ) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _read(fd)
        os.close(fd)
        return holder
    except OSError as error:
        os.close(fd)
        to_stderr(
            f"{asked}: the file system there has no locks ({error.strerror}); see to it yourself "
            "that no other run uses this directory"
        )
        return ClaimedDirectory(directory, -1, os.getpid())
    if not _is_at(fd, path):  # its holder has just removed it
        os.close(fd)
        return Holder()
    _sign(fd)
    return ClaimedDirectory(directory, fd, os.getpid())


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def _sign(fd: int) -> None:
    now = datetime.now().astimezone().isoformat(" ", "seconds")
    said = {"pid": os.getpid(), "host": socket.gethostname(), "since": now}
    with suppress(OSError):  # a full disk: the holder stays unknown
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(said).encode() + b"\n", 0)


def _read(fd: int) -> Holder:
    try:
        said: Any = json.loads(os.pread(fd, _MOST_BYTES, 0))
        return Holder(int(said["pid"]), str(said["host"]), str(said["since"]))
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return Holder()


def _forked() -> None:
    """After a fork: children of the run's own process keep its claims, others close them."""
    parent = os.getppid()
    for each in [x for x in _held if x.pid != parent]:
        _held.remove(each)
        with suppress(OSError):
            os.close(each.fd)


os.register_at_fork(after_in_child=_forked)


# ---- before Hydra writes ------------------------------------------------------------------------


class ClaimRefused(BaseException):
    """Carries an error past Hydra, which turns a callback's exceptions into warnings."""

    def __init__(self, error: UserError) -> None:
        self.error = error


class Claiming(Callback):
    """Hydra's callback that claims the directory of a run, or of a sweep."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Called before Hydra writes the configuration there."""
        try:
            if diverted(config):
                return
        except UserError as error:
            raise ClaimRefused(error) from None
        claim_or_refuse(Path(str(config.hydra.run.dir)), "hydra.run.dir")

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Called before the first job."""
        claim_or_refuse(Path(str(config.hydra.sweep.dir)), "hydra.sweep.dir")


def claim_or_refuse(directory: Path, key: str) -> None:
    """:func:`claim_new`, within Hydra. Raises ClaimRefused."""
    try:
        claim_new(directory, key)
    except UserError as error:
        raise ClaimRefused(error) from None


def claim_new(directory: Path, key: str) -> None:
    """Make the directory if necessary, and claim it.

    Raises:
        UserError: if it cannot be made or written, or another run uses it.
    """
    check_name(directory, f"{key}: the directory")
    _made.extend(x for x in (directory.absolute(), *directory.absolute().parents) if not x.exists())
    check_directory(directory)
    check_files(directory)
    asked = f"{key}={directory}"
    claim(directory, asked, "end that run first, wait, or choose another directory")
