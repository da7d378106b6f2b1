"""Directories for temporary files go away with the processes that use them, however these end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from multiprocessing.util import get_temp_dir
from pathlib import Path

import pytest

from hybridtrain.util import cleanup
from hybridtrain.util.cleanup import (
    removed_in_the_end,
    vanishing_directory,
    vanishing_sockets,
)


def gone(path: Path, limit_s: float = 20.0) -> bool:
    deadline = time.monotonic() + limit_s
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not path.exists()


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_a_vanishing_directory_is_open_to_its_user_alone_and_removed_at_the_end() -> None:
    before = children()
    with vanishing_directory() as folder:
        (folder / "below").mkdir()
        (folder / "below" / "file").touch()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(children() - before) == 1
    assert not folder.exists()
    assert children() == before


def test_a_vanishing_directory_is_removed_without_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleanup, "_SHELL", "/nowhere/sh")
    with vanishing_directory() as folder:
        pass
    assert not folder.exists()


KILLED = """
    import os, sys, time
    from hybridtrain.util.cleanup import vanishing_directory
    with vanishing_directory() as folder:
        (folder / "file").touch()
        if os.fork() == 0:
            print(folder, os.getpid(), flush=True)
        time.sleep(1000)
"""


def test_a_vanishing_directory_after_kill_9_goes_when_the_last_fork_has_ended() -> None:
    line = [sys.executable, "-c", textwrap.dedent(KILLED)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    name, fork = process.stdout.readline().split()
    process.kill()
    process.wait()
    assert not gone(Path(name), 0.3), "the fork may still need it"
    os.kill(int(fork), signal.SIGKILL)
    assert gone(Path(name))
    process.stdout.close()


def test_an_existing_directory_is_removed_in_the_end_with_what_is_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "with 'quotes' and\nlines"
    folder.mkdir()
    with removed_in_the_end(folder):
        (folder / "file").touch()
    assert not folder.exists()


@pytest.fixture
def no_folder_yet(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What ``multiprocessing`` knows of this process, as if no test before had used its folder."""
    config: dict[str, object] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    monkeypatch.delitem(config, "tempdir", raising=False)
    return config


def test_sockets_are_put_into_a_vanishing_directory_and_not_into_one_that_stays(
    no_folder_yet: dict[str, object],
) -> None:
    with vanishing_sockets():
        inside = get_temp_dir()
        with vanishing_sockets():
            assert get_temp_dir() == inside
        assert Path(inside).is_dir()
    assert not Path(inside).exists()
    assert "tempdir" not in no_folder_yet


def test_a_temporary_folder_that_is_there_already_stays(
    no_folder_yet: dict[str, object], tmp_path: Path
) -> None:
    no_folder_yet["tempdir"] = str(tmp_path)
    with vanishing_sockets():
        assert get_temp_dir() == str(tmp_path)
    assert tmp_path.is_dir() and no_folder_yet.pop("tempdir") == str(tmp_path)


TWICE = """
    import multiprocessing, socket
    from multiprocessing.reduction import DupFd
    from hybridtrain.util.cleanup import vanishing_sockets

    if __name__ == "__main__":
        context = multiprocessing.get_context("forkserver")
        for _ in range(2):
            with vanishing_sockets():
                process = context.Process(target=print, args=("hi",))
                process.start()
                process.join()
                print(process.exitcode, DupFd(0).detach() > 0, flush=True)
"""


def test_servers_of_sockets_that_went_are_started_anew(tmp_path: Path) -> None:
    script = tmp_path / "twice.py"
    script.write_text(textwrap.dedent(TWICE))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    line = [sys.executable, str(script)]
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert done.stdout.split() == ["hi", "0", "True"] * 2, done.stderr


SEMAPHORE = """
    import multiprocessing, os, signal
    from hybridtrain.util.cleanup import vanishing_sockets
    from multiprocessing import resource_tracker

    with vanishing_sockets():
        lock = multiprocessing.get_context("spawn").Lock()
        print(lock._semlock.name, flush=True)
        os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not Path("/dev/shm").exists(), reason="has no /dev/shm")
def test_named_semaphores_go_though_their_tracker_was_killed() -> None:
    line = [sys.executable, "-c", textwrap.dedent(SEMAPHORE)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout.startswith("/mp-")
    assert gone(Path("/dev/shm") / f"sem.{done.stdout.strip()[1:]}")


READER = """
    import multiprocessing, os, time
    from pathlib import Path
    from hybridtrain.util.cleanup import announced_reader, vanishing_sockets

    def read():
        with announced_reader():
            segment = Path(f"/dev/shm/torch_{os.getpid()}_1_0")
            segment.touch()
            print(segment, flush=True)
            time.sleep(1000)

    with vanishing_sockets():
        reader = multiprocessing.get_context("fork").Process(target=read, daemon=True)
        reader.start()
        input()
        reader.kill()
        reader.join()
"""


@pytest.mark.parametrize("is_killed", [False, True])
def test_segments_go_whose_maker_was_killed_before_it_could_take_their_names_away(
    is_killed: bool,
) -> None:
    line, pipe = [sys.executable, "-c", textwrap.dedent(READER)], subprocess.PIPE
    process = subprocess.Popen(line, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
    assert process.stdin is not None and process.stdout is not None
    segment = Path(process.stdout.readline().strip())
    assert segment.exists()
    if is_killed:
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.stdin.write("\n")
        process.stdin.close()
    process.wait()
    assert gone(segment, 20.0 if is_killed else 0.0)
    process.stdout.close()
