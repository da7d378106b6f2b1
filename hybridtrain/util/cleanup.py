"""Temporary directories that are removed when the processes that use them end, however they end.

Nearly all shared resources of a run are anonymous, and the kernel frees them. Exceptions: the
sockets over which torch's data loaders send tensors, and the directory for callbacks of a replay.
After ``kill -9`` a process cannot remove its own files, so a shell reads from a pipe until the last
process that inherited it has ended, and then removes the directory.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_sharer
from pathlib import Path
from typing import Any

_SHELL = "/bin/sh"
_PATIENCE_S = 5.0
_SHARED_MEMORY, _READER = Path("/dev/shm"), "reader-"
# A second time after 1 s: a process that was about to end may have created a file.
_WAIT_AND_REMOVE = """
    trap "" HUP INT TERM
    read -r _
    for reader in "$0"/reader-*; do
        [ ! -e "$reader" ] || rm -f -- /dev/shm/torch_"${reader##*/reader-}"_*
    done
    rm -rf -- "$0" || { sleep 1; rm -rf -- "$0"; }
    [ -z "$1" ] || rm -f -- /dev/shm/sem."$1"-*
"""


@contextmanager
def vanishing_directory(prefix: str = "hybridtrain-") -> Iterator[Path]:
    """A new directory for temporary files, accessible to this user only."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    with removed_in_the_end(folder):
        yield folder


@contextmanager
def removed_in_the_end(folder: Path, semaphores: str = "") -> Iterator[None]:
    """Remove a directory afterwards, or when this process and its forks have been killed.

    ``semaphores``: prefix of the names of semaphores to remove in the second case.
    """
    shell = _waiting_shell(folder, semaphores)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if shell is not None:
            assert shell.stdin is not None
            shell.kill()  # forks may still hold the write end of its pipe
            shell.wait()
            shell.stdin.close()


def _waiting_shell(folder: Path, semaphores: str) -> subprocess.Popen[bytes] | None:
    """Start the shell, in its own session, so that signals to the run do not reach it."""
    nowhere = subprocess.DEVNULL
    with suppress(OSError):  # without a shell, nothing is removed after a kill
        return subprocess.Popen(
            [_SHELL, "-c", _WAIT_AND_REMOVE, str(folder.absolute()), semaphores],
            stdin=subprocess.PIPE,
            stdout=nowhere,
            stderr=nowhere,
            cwd="/",
            env={"PATH": os.defpath},
            start_new_session=True,
        )
    return None


@contextmanager
def vanishing_sockets() -> Iterator[None]:
    """Remove the named sockets and semaphores of processes that are started inside.

    ``multiprocessing`` creates them, and does not remove them if a process is killed.
    """
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if config.get("tempdir") is not None:  # it exists, and may be used later
        yield
        return
    # Named as in multiprocessing.util.get_temp_dir: a socket's path must be short.
    folder = Path(tempfile.mkdtemp(prefix="pymp-"))
    prefix, former = f"mp-{folder.name[-8:]}", dict(config)
    with removed_in_the_end(folder, prefix):
        # multiprocessing's tracker removes semaphores of spawned processes, unless it is killed.
        config |= {"tempdir": str(folder), "semprefix": f"/{prefix}"}
        try:
            yield
        finally:
            config.pop("tempdir", None)
            config |= former
            _stop_servers(str(folder))
            _remove_segments(folder)


@contextmanager
def announced_reader() -> Iterator[None]:
    """Mark this process as one that sends tensors in shared memory.

    Torch unlinks each segment at once; if the process is killed in between, the mark tells the
    cleanup which segments are left.
    """
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    folder = config.get("tempdir")
    if folder is None:
        yield
        return
    mark = Path(folder) / f"{_READER}{os.getpid()}"
    with suppress(OSError):  # the run has ended
        mark.touch()
    yield
    with suppress(OSError):
        mark.unlink()


def _remove_segments(folder: Path) -> None:
    """Remove segments of readers that have ended."""
    for reader in folder.glob(f"{_READER}*"):
        number = reader.name.removeprefix(_READER)
        if not Path(f"/proc/{number}").exists():
            for segment in _SHARED_MEMORY.glob(f"torch_{number}_*"):
                segment.unlink(missing_ok=True)


def _stop_servers(folder: str) -> None:
    """Stop this process' servers in the directory; they are restarted when needed."""
    fork_server: Any = forkserver._forkserver
    if str(fork_server._forkserver_address or "").startswith(folder):
        fork_server._stop()
    sharer = resource_sharer._resource_sharer  # type: ignore[attr-defined]
    if str(sharer._address or "").startswith(folder):
        resource_sharer.stop(timeout=_PATIENCE_S)
