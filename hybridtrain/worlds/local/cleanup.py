"""Directories that go away with the processes that use them, however these end.

Nearly all that a run shares has no name, and the kernel frees it. Some things must have one: the
sockets over which torch's data loaders hand over what they have made, a place for callbacks of a
replay. Nobody can remove what he owns after ``kill -9``, so somebody else waits to do it: a shell
that does nothing but read from a pipe. The kernel closes the pipe when the last process that has
inherited it has ended, and then the shell removes the directory, and ends.
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
# Once more after a second: a process that was about to end may have put something there.
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
    """A new directory for temporary files, for this user's eyes only."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    with removed_in_the_end(folder):
        yield folder


@contextmanager
def removed_in_the_end(folder: Path, semaphores: str = "") -> Iterator[None]:
    """Remove a directory afterwards, or when this process and its forks have been killed.

    ``semaphores``: how the names of those begin that are to go with it in the second case.
    """
    shell = _waiting_shell(folder, semaphores)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if shell is not None:
            assert shell.stdin is not None
            shell.kill()  # forks may still hold the other end of its pipe
            shell.wait()
            shell.stdin.close()


def _waiting_shell(folder: Path, semaphores: str) -> subprocess.Popen[bytes] | None:
    """It is in a session of its own, where no signal meant for the run reaches it."""
    nowhere = subprocess.DEVNULL
    with suppress(OSError):  # no shell: then only what ends by itself is tidied up
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
    """Let processes started inside have named sockets, and semaphores, that go away.

    ``multiprocessing`` makes one for each process that needs it, and removes it if it can.
    """
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if config.get("tempdir") is not None:  # there is one, and somebody may use it later
        yield
        return
    # Named as multiprocessing.util.get_temp_dir does it: a socket's path must not be long.
    folder = Path(tempfile.mkdtemp(prefix="pymp-"))
    prefix, former = f"mp-{folder.name[-8:]}", dict(config)
    with removed_in_the_end(folder, prefix):
        # Of semaphores for spawned processes multiprocessing's tracker takes care, while it lives.
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
    """This process hands over tensors in shared memory; for a moment each segment has a name.

    Torch takes it away at once, but who is killed between the two calls leaves it.
    """
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    folder = config.get("tempdir")
    if folder is None:
        yield
        return
    mark = Path(folder) / f"{_READER}{os.getpid()}"
    with suppress(OSError):  # the run has ended meanwhile
        mark.touch()
    yield
    with suppress(OSError):
        mark.unlink()


def _remove_segments(folder: Path) -> None:
    """Those of readers that have ended."""
    for reader in folder.glob(f"{_READER}*"):
        number = reader.name.removeprefix(_READER)
        if not Path(f"/proc/{number}").exists():
            for segment in _SHARED_MEMORY.glob(f"torch_{number}_*"):
                segment.unlink(missing_ok=True)


def _stop_servers(folder: str) -> None:
    """Those of this process whose socket is about to go: they are started anew when needed."""
    fork_server: Any = forkserver._forkserver
    if str(fork_server._forkserver_address or "").startswith(folder):
        fork_server._stop()
    sharer = resource_sharer._resource_sharer  # type: ignore[attr-defined]
    if str(sharer._address or "").startswith(folder):
        resource_sharer.stop(timeout=_PATIENCE_S)
