"""Who can reach a run from outside, and what a file can do to who reads it."""

from __future__ import annotations

import os
import pickle
import subprocess
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridtrain.cli.replay_run import replay
from hybridtrain.errors import UserError
from hybridtrain.recording import find_record, read_record
from hybridtrain.report.runs import read_run
from hybridtrain.transcribe import load_module
from tests.cli.busy import BUSY
from tests.cli.conftest import Command
from tests.cli.tiny import TINY
from tests.cli.zygote import Run, Zygote
from tests.picking import by_default

LINUX = pytest.mark.skipif(not Path("/proc/self/net").exists(), reason="looks at /proc")
NOBODY = 65534


# ---- from outside --------------------------------------------------------------------------------


def sockets_of(run: Run) -> dict[str, str]:
    """The sockets of all processes of the run, by inode, as the kernel lists them.

    Of the internet: ``"tcp"``; of this host: the name, empty for one that has none.
    """
    held = set()
    for pid in run.processes():
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed since
                held.add(os.readlink(fd))  # noqa: PTH115  (no path)
    found = {}
    for kind in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6", "unix", "packet", "netlink"):
        net = Path(f"/proc/{run.pid}/net/{kind}")
        for line in net.read_text().splitlines()[1:] if net.exists() else ():
            cells = line.split()
            inode = cells[6] if kind == "unix" else cells[9] if kind != "packet" else cells[8]
            found[f"socket:[{inode}]"] = " ".join(cells[7:]) if kind == "unix" else kind
    return {name: found[name] for name in held & found.keys()}


@LINUX
@pytest.mark.parametrize("loaders", by_default([0, 2], 2))
def test_a_run_listens_to_nothing_but_what_its_processes_have_inherited(
    loaders: int, zygote: Zygote, tmp_path: Path
) -> None:
    run = zygote.start(tmp_path, *BUSY, f"data.loaders={loaders}")
    run.until("reached")
    names = [name for name in sockets_of(run).values() if name]
    private = [Path(name) for name in names if name.startswith(run.temporary)]
    assert len(sockets_of(run)) >= 4, "the pairs between parent and workers"
    assert [str(x) for x in private] == names
    assert bool(private) == bool(loaders)  # torch's data loaders hand over mini-batches so
    for path in private:
        assert path.parent.stat().st_mode & 0o777 == 0o700
    if loaders == 0:
        memory_is_private(run)
    os.kill(run.pid, 9)
    run.status()
    assert run.left() == []


@LINUX
def test_ddp_does_listen_and_that_is_seen(zygote: Zygote, tmp_path: Path) -> None:
    run = zygote.start(tmp_path, *BUSY, "data.loaders=0", "strategy=ddp")
    run.until("reached")
    assert {"tcp", "tcp6"} & set(sockets_of(run).values())
    run.kill_all()
    run.status()


def memory_is_private(run: Run) -> None:
    """What lies in nameless files may be opened by their owner, and by nobody else."""
    seen = []
    for fd in Path(f"/proc/{run.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since
            if os.readlink(fd).startswith("/memfd:hybridtrain"):  # noqa: PTH115  (no path)
                assert fd.stat().st_mode & 0o777 == 0o600
                seen.append(fd)
    assert seen
    if os.geteuid() == 0:
        reading = ["head", "-c", "1", str(seen[0])]
        assert subprocess.run(reading, check=False, capture_output=True).returncode == 0
        stranger = subprocess.run(reading, check=False, capture_output=True, user=NOBODY)
        assert b"Permission denied" in stranger.stderr


# ---- from files ----------------------------------------------------------------------------------


class Bomb:
    """What makes a folder when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


def yaml_bomb(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("a: !!python/object/apply:os.mkdir [exploded]\n")


def test_the_bomb_would_explode() -> None:
    pickle.loads(pickle.dumps(Bomb()))
    assert Path("exploded").is_dir()


def test_a_checkpoint_executes_nothing(command: Command) -> None:
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.6", "x": Bomb()}, "bomb.ckpt")
    for more in ([], ["test_only=true"]):
        result = command(*TINY, "ckpt=bomb.ckpt", *more)
        assert result.code == 2 and "bomb.ckpt" in result.complaint
    with pytest.raises(UserError, match=r"contains code or objects .* it was not loaded"):
        load_module("bomb.ckpt")
    assert not Path("exploded").exists()


@pytest.mark.parametrize("content", [pickle.dumps(Bomb()), zlib.compress(pickle.dumps(Bomb()))])
def test_a_record_executes_nothing(content: bytes) -> None:
    Path("record.bin").write_bytes(content)
    with pytest.raises(UserError):
        read_record(Path("record.bin"))
    assert not Path("exploded").exists()


@pytest.mark.parametrize("name", ["summary.json", ".run_stats.json", "profile.json"])
def test_what_a_run_has_left_executes_nothing_when_it_is_read(name: str) -> None:
    Path(name).write_bytes(pickle.dumps(Bomb()))
    yaml_bomb(Path(".hydra/config.yaml"))
    yaml_bomb(Path(".hydra/overrides.yaml"))
    read_run(Path())
    assert not Path("exploded").exists()


@pytest.mark.parametrize("name", ["config.yaml", "overrides.yaml", "hydra.yaml"])
def test_a_run_directory_executes_nothing_before_it_is_known_to_be_one(
    name: str, command: Command
) -> None:
    yaml_bomb(Path(f".hydra/{name}"))
    assert command("resume=.").code == 2
    assert not Path("exploded").exists()


# ---- what names code -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_that_others_can_change_is_neither_resumed_nor_replayed(command: Command) -> None:
    assert command(*TINY, "trainer.devices=1", "strategy=hybrid", "hydra.run.dir=run").code == 0
    config, record = Path("run/.hydra/config.yaml"), find_record(Path("run"))
    config.chmod(0o666)
    result = command("resume=run")
    assert result.code == 2
    assert "run/.hydra/config.yaml can be written by everybody" in result.complaint
    config.chmod(0o644)
    record.chmod(0o666)
    with pytest.raises(UserError, match="can be written by everybody, and names the code"):
        replay(read_record(record), anyway=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
def test_a_run_of_somebody_else_is_not_resumed(command: Command) -> None:
    Path(".hydra").mkdir()
    for name in ("config.yaml", "overrides.yaml"):
        Path(".hydra", name).write_text("{}")
        os.chown(Path(".hydra", name), NOBODY, NOBODY)
    assert f"belongs to another user (number {NOBODY})" in command("resume=.").complaint
