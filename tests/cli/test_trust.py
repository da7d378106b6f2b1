"""Who can reach a run from outside, and what a file can do to who reads it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import zlib
from contextlib import chdir, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from hybridtrain.cli import claim, hydra_config
from hybridtrain.cli.commands.transcribe import load_module
from hybridtrain.cli.former_run import FormerRun, own_below
from hybridtrain.cli.hydra_config import complete_overrides
from hybridtrain.cli.resume import expanded
from hybridtrain.cli.sweep import resumed
from hybridtrain.cli.sweep.resumed import Sweep
from hybridtrain.engine.recording import find_record, read_record
from hybridtrain.engine.recording.record_file import Writer
from hybridtrain.errors import UserError
from hybridtrain.report.runs import read_run
from tests.cli.busy import BUSY
from tests.cli.conftest import Command, Replay
from tests.cli.tiny import TINY
from tests.cli.zygote import Run, Zygote
from tests.picking import by_default
from tests.support.strangers import STRANGER, give_away

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
def test_the_search_for_listening_sockets_finds_those_of_ddp(
    zygote: Zygote, tmp_path: Path
) -> None:
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


def test_the_malicious_pickle_of_these_tests_executes_code_when_it_is_unpickled() -> None:
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


@pytest.fixture(scope="module")
def broken_off(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that failed in its first epoch."""
    from hybridtrain.cli.entry import main

    before = dict(os.environ)
    with chdir(tmp_path_factory.mktemp("broken")):
        assert main([*FAILING, "hydra.run.dir=run"]) == 1
        directory = Path("run").absolute()
    os.environ.clear()
    os.environ.update(before)
    return directory


FAILING = [*TINY, "trainer.devices=1", "model.fail_at=2", "logger=none"]
SHARED = [*FAILING, "hydra.run.dir=out/${unique_id:}"]
EVIL = "+hydra.job.env_set.PYTHONPATH=/evil"


def theirs(place: Path, run: Path, patch: pytest.MonkeyPatch) -> None:
    """A stranger's directory: links to the user's own configuration, and a file of the stranger."""
    (place / ".hydra").mkdir(parents=True)
    for name in ("config.yaml", "overrides.yaml"):
        (place / ".hydra" / name).symlink_to(run / ".hydra" / name)
    said = {"overrides": {"hydra": [EVIL]}, "runtime": {"config_sources": []}}
    (place / ".hydra/hydra.yaml").write_text(json.dumps({"hydra": said}))
    for path in (*place.rglob("*"), place):
        give_away(path, patch)


def test_runs_of_others_in_a_shared_output_directory_are_passed_over_in_one_line(
    broken_off: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(broken_off, "out/mine")
    os.utime("out/mine/.hydra/config.yaml", (1, 1))  # it is looked at last
    for name in ("a", "b\x1b[2J"):
        theirs(Path("out") / name, broken_off, monkeypatch)
    with redirect_stderr(StringIO()) as said:
        assert f"resume='{Path('out/mine').absolute()}'" in expanded(
            complete_overrides([*SHARED, "resume=auto"])
        )
    claim.release_all()
    (line,) = said.getvalue().splitlines()
    assert line.startswith(
        "hybridtrain: resume=auto: passes over 2 below out that other users can have written: out/"
    )
    assert f"belongs to another user (number {STRANGER})" in line and "\x1b" not in line
    shutil.rmtree("out/mine")
    result = command(*SHARED, "resume=auto")
    assert "no unfinished run of this configuration in out" in result.out
    assert not list(Path("out/a").glob("*.json")), "nothing was written there"


def test_a_run_of_others_is_not_resumed_whatever_its_configuration_links_to(
    broken_off: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs(Path("run"), broken_off, monkeypatch)
    assert f"run belongs to another user (number {STRANGER})" in command("resume=run").complaint
    assert sorted(x.name for x in Path("run").iterdir()) == [".hydra"], "nothing is written there"


NAMES_CODE = ["", ".hydra", ".hydra/config.yaml", ".hydra/overrides.yaml", ".hydra/hydra.yaml"]


@pytest.mark.few(2)
@pytest.mark.parametrize("how", ["stranger", "everybody", "link"])
@pytest.mark.parametrize("name", [*NAMES_CODE, "run.json", "summary.json"])
def test_no_file_of_a_run_that_others_can_have_written_is_read(
    name: str, how: str, broken_off: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(broken_off, "run")
    path, words = Path("run") / name, f"belongs to another user (number {STRANGER})"
    if how == "stranger":
        give_away(path, monkeypatch)
    elif how == "everybody":
        path.chmod(0o777)
        words = "can be written by everybody"
    elif name:
        path.rename("elsewhere")
        path.symlink_to(Path("elsewhere").absolute())
        words = "links are not followed there"
    else:  # the user's own to an output directory elsewhere
        path.rename("elsewhere")
        path.symlink_to("elsewhere")
        assert expanded(["resume=run"])
        claim.release_all()
        return
    assert words in command("resume=run").complaint


def test_variables_are_not_taken_from_the_files_of_a_run(
    broken_off: Path, command: Command
) -> None:
    shutil.copytree(broken_off, "run")
    said = {"overrides": {"hydra": [EVIL, "hydra.job.chdir=true", "hydra.callbacks.x=1"]}}
    said["runtime"] = {"config_sources": []}  # type: ignore[dict-item]
    Path("run/.hydra/hydra.yaml").write_text(json.dumps({"hydra": said}))
    with redirect_stderr(StringIO()) as err:
        found = expanded(["resume=run"])
    claim.release_all()
    assert [x for x in found if x.startswith(("hydra.job", "+hydra", "hydra.call"))] == [
        "hydra.job.chdir=true"
    ]
    assert f"resume=run: variables are not taken from its files: give {EVIL} again" in (
        err.getvalue()
    )
    with redirect_stderr(StringIO()) as err:
        assert EVIL in expanded(["resume=run", EVIL])
    claim.release_all()
    assert err.getvalue() == ""


def test_the_last_checkpoint_is_looked_for_in_own_runs_alone(
    broken_off: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(broken_off, "out/theirs")
    yaml_bomb(Path("out/theirs/.hydra/config.yaml"))
    give_away(Path("out/theirs"), monkeypatch)
    result = command(*SHARED, "ckpt=last")
    assert result.code == 2
    assert (
        "ckpt=last: passes over 1 below out that other users can have written: out/theirs "
        in result.err
    )
    assert "ckpt=last: no run of this model in out has left a whole checkpoint" in result.err


@pytest.mark.parametrize("option", ["resume=auto", "ckpt=last"])
def test_a_run_that_its_owner_has_closed_is_passed_over_in_one_line(
    option: str, broken_off: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(broken_off, "out/mine")
    shutil.copytree(broken_off, "out/theirs")
    give_away(Path("out/theirs"), monkeypatch)
    look = os.stat

    def closed(path: Any, **how: Any) -> os.stat_result:
        if "theirs/.hydra/" in str(path):  # root is kept out of nothing
            raise PermissionError(13, "Permission denied")
        return look(path, **how)

    monkeypatch.setattr(os, "stat", closed)
    with redirect_stdout(StringIO()):
        assert "out/mine" in " ".join(expanded(complete_overrides([*SHARED, option])))
    claim.release_all()
    with redirect_stderr(StringIO()) as said:
        (mine,) = own_below(Path("out"), option, FormerRun.read)
    assert mine.directory == Path("out/mine")
    (line,) = said.getvalue().splitlines()
    assert line.startswith(f"hybridtrain: {option}: passes over 1 below out that other users can")


def test_a_checkpoint_of_another_user_is_not_the_newest_of_a_run(
    broken_off: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(broken_off, "run")
    (mine,) = Path("run").rglob("*.ckpt")
    planted = Path("run/checkpoints/last.ckpt")
    planted.parent.mkdir(exist_ok=True)
    shutil.copy(mine, planted)
    os.utime(planted, (2e9, 2e9))
    give_away(planted, monkeypatch)
    with redirect_stderr(StringIO()) as said:
        found = expanded(["resume=run"])
    claim.release_all()
    assert f"ckpt='{mine.absolute()}'" in found
    assert f"last.ckpt is passed over: it belongs to another user (number {STRANGER})" in (
        said.getvalue()
    )


SWEEP = ["task=digits", "+hydra.callbacks.x._target_=os.system"]


@pytest.mark.parametrize("name", ["", "sweep.json"])
def test_a_sweep_that_others_can_have_written_does_not_go_on(
    name: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("jobs").mkdir()
    Path("jobs/sweep.json").write_text(json.dumps(asdict(Sweep(SWEEP))))
    path = Path("jobs") / name
    path.chmod(0o777)
    assert f"{path} can be written by everybody" in command("-m", "resume=jobs").complaint
    path.chmod(0o700)
    give_away(path, monkeypatch)
    assert f"{path} belongs to another user" in command("-m", "resume=jobs").complaint
    with redirect_stderr(StringIO()) as said, redirect_stdout(StringIO()):
        resumed.expanded([*SWEEP, "resume=auto", "hydra.sweep.dir=jobs"])
    assert (
        "resume=auto: passes over 1 below jobs that other users can have written: "
        in said.getvalue()
    )


def own_configuration(name: str, patch: pytest.MonkeyPatch) -> None:
    """A folder for --config-dir, in which a stranger has a part."""
    Path("conf/callbacks").mkdir(parents=True)
    Path("conf/callbacks/mine.yaml").write_text("{}")
    give_away(Path("conf") / name, patch)


CONFIGURATION = pytest.mark.parametrize("name", ["", "callbacks", "callbacks/mine.yaml"])


@CONFIGURATION
def test_a_folder_of_configurations_that_others_can_have_written_is_not_read(
    name: str, broken_off: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_configuration(name, monkeypatch)
    shutil.copytree(broken_off, "run")
    sources = [{"provider": "command-line", "path": str(Path("conf").absolute())}]
    said = {"overrides": {"hydra": []}, "runtime": {"config_sources": sources}}
    Path("run/.hydra/hydra.yaml").write_text(json.dumps({"hydra": said}))
    theirs = Path("conf").absolute() / name
    assert f"resume=run: --config-dir: {theirs} belongs to another user" in (
        command("resume=run").complaint
    )
    shutil.copytree("conf", "copy")
    with redirect_stderr(StringIO()), redirect_stdout(StringIO()):
        monkeypatch.setattr(hydra_config, "MORE_DIRS", [Path("copy")])
        assert expanded(["resume=run"])
    claim.release_all()


@CONFIGURATION
def test_a_folder_of_configurations_that_others_can_have_written_is_not_read_by_a_sweep(
    name: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_configuration(name, monkeypatch)
    Path("jobs").mkdir()
    folders = [str(Path("conf").absolute())]
    Path("jobs/sweep.json").write_text(json.dumps(asdict(Sweep(["task=digits"], [], folders))))
    assert "belongs to another user" in command("-m", "resume=jobs").complaint


@pytest.mark.parametrize("name", ["", ".hydra", ".hydra/config.yaml", "summary.json"])
def test_a_job_that_others_can_have_written_does_not_go_on(
    name: str, broken_off: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(broken_off, "jobs/0")
    give_away(Path("jobs/0") / name, monkeypatch)
    with pytest.raises(UserError, match="belongs to another user"):
        resumed.kept(Path("jobs/0"), OmegaConf.create({}))
    with pytest.raises(UserError, match="belongs to another user"):
        resumed.going_on(Path("jobs/0"))


def record_of(run: Path, at: Path, **changes: Any) -> None:
    """The record of a run, with other entries in what the command line says in it."""
    record = read_record(find_record(run))
    header = record.header | {"about": record.header["about"] | changes}
    writer = Writer(at, record.kinds)
    writer.tell({"header": header})
    writer.close()


@pytest.mark.parametrize("name", ["", "record.bin", ".hydra/config.yaml"])
def test_a_run_that_others_can_have_written_is_not_replayed(
    name: str, broken_off: Path, replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(broken_off, "run", ignore=shutil.ignore_patterns("record.bin"))
    record_of(broken_off, Path("run/record.bin"), run_dir=str(Path("run").absolute()))
    give_away(Path("run") / name, monkeypatch)
    result = replay("run=run")
    assert result.code == 2 and "belongs to another user" in result.complaint


def test_a_picture_of_another_users_record_imports_nothing_that_it_names(
    broken_off: Path, replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_record(find_record(broken_off)).header["about"]["config"]
    config["model"]["_target_"] = "exploding.Model"
    record_of(broken_off, Path("record.bin"), config=config)
    Path("exploding.py").write_text("import os; os.mkdir('exploded')")
    give_away(Path("record.bin"), monkeypatch)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    assert "another user" not in replay("run=record.bin", "report=timeline").err
    for more in ([], ["policy=async"], ["policy=async", "report=timeline"]):
        assert "belongs to another user" in replay("run=record.bin", *more).complaint
    assert not Path("exploded").exists()
