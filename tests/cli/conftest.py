"""Running the command line inside the test process."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.hydra import Hydra
from omegaconf import OmegaConf

from tests.cli.composing import get_mode, load_once
from tests.cli.zygote import Zygote


@dataclass
class Result:
    """What a command printed and how it ended."""

    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The one line of stderr; fails when there are more or none."""
        lines = self.err.strip().splitlines()
        assert len(lines) == 1, f"expected one line, got:\n{self.err}"
        return lines[0]

    @property
    def complaints(self) -> list[str]:
        """The lines of stderr, but for warnings."""
        return [x for x in self.err.splitlines() if not x.startswith("warning: ")]


Command = Callable[..., Result]
Replay = Callable[..., Result]

CAP_DAC_OVERRIDE = 1 << 1


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs write below the working directory and change the environment; both are put back."""
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session", autouse=True)
def configurations_are_composed_quickly() -> Iterator[None]:
    """Each command composes its configuration, some of them thrice, and all read the same files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OmegaConf, "load", load_once)
        patch.setattr(Hydra, "get_mode", get_mode)
        yield


@pytest.fixture(scope="session")
def zygotes() -> Iterator[list[Zygote]]:
    """The one in use, once there is one."""
    made: list[Zygote] = []
    yield made
    for zygote in made:
        zygote.close()


@pytest.fixture
def zygote(zygotes: list[Zygote]) -> Iterator[Zygote]:
    """Forks command lines as processes; nothing of a test that has failed stays for the next.

    Another one if a test was cut off while it waited.
    """
    if zygotes and zygotes[-1].busy:
        zygotes.pop().close()
    if not zygotes:
        zygotes.append(Zygote())
    yield zygotes[-1]
    zygotes[-1].clear()


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Command:
    """``command("task=digits", ...)`` runs the command line and returns what came of it."""
    from hybridtrain.cli.entry import main

    def run(*arguments: str) -> Result:
        capfd.readouterr()
        code = main(list(arguments))
        out, err = capfd.readouterr()
        return Result(code, out, err)

    return run


@pytest.fixture
def replay(capfd: pytest.CaptureFixture[str]) -> Replay:
    """``replay("run=run", ...)`` runs the command line and returns what came of it."""
    from hybridtrain.cli.commands.replay import main

    def run(*arguments: str) -> Result:
        capfd.readouterr()
        try:
            code = main(list(arguments))
        except SystemExit as stop:
            code = int(str(stop.code))
        out, err = capfd.readouterr()
        return Result(code, out, err)

    return run


@pytest.fixture
def ordinary_user() -> Iterator[None]:
    """For root nothing is read-only: it gives its privilege away for the time being."""
    libc, header = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint32 * 2)(0x20080522, 0)
    had = (
        ctypes.c_uint32 * 6
    )()  # effective, permitted, inheritable, and these for the higher half
    assert libc.capget(header, had) == 0
    less = (ctypes.c_uint32 * 6)(had[0] & ~CAP_DAC_OVERRIDE, *had[1:])
    assert libc.capset(header, less) == 0
    yield
    assert libc.capset(header, had) == 0
    for each, _, _ in os.walk("here"):
        Path(each).chmod(0o755)


@contextmanager
def in_use(directory: str | Path) -> Iterator[None]:
    """As if another run were in it."""
    fd = os.open(Path(directory, ".lock"), os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    said = {"pid": 1, "host": socket.gethostname(), "since": "2026-11-22 20:00:00+00:00"}
    os.write(fd, json.dumps(said).encode())
    try:
        yield
    finally:
        os.close(fd)


def summary(directory: str | Path) -> dict[str, Any]:
    """The summary that a run left in ``directory``."""
    content: dict[str, Any] = json.loads((Path(directory) / "summary.json").read_text())
    return content
