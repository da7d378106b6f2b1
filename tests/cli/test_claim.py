"""One run in a directory at a time, told by real processes that begin together."""

from __future__ import annotations

import csv
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from hybridtrain.cli import claim
from hybridtrain.errors import UserError
from tests.cli.conftest import Command, in_use
from tests.cli.tiny import TINY
from tests.cli.zygote import Zygote, wait_for

RUN = [*TINY, "logger=csv", "trainer.log_every_n_steps=1", "test=false"]


def cut_short(directory: str) -> None:
    """As if the run in it had been ended early."""
    path = Path(directory, "summary.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"exit": 143}))


def steps_logged(directory: str) -> list[str]:
    with Path(directory, "csv", "metrics.csv").open(newline="") as file:
        return [row["step"] for row in csv.DictReader(file) if row.get("samples_per_s")]


@pytest.mark.parametrize(
    "rounds", [1, pytest.param(8, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
def test_exactly_one_of_two_runs_that_resume_one_directory_together_trains(
    command: Command, zygote: Zygote, rounds: int
) -> None:
    assert command(*RUN, "hydra.run.dir=old", "trainer.max_epochs=1").code == 0
    for number in range(rounds):
        cut_short("old")
        more = [f"trainer.max_epochs={number + 2}", "resume_override=true", "model.sleep_s=0.1"]
        runs = []
        for name in ("one", "other"):
            Path(name).mkdir(exist_ok=True)
            runs.append(zygote.start(Path(name), f"resume={Path('old').absolute()}", *more))
        ends = sorted(run.status() for run in runs)
        said = "".join(run.said() for run in runs)
        assert ends == [0, 2], said
        assert "resume=" in said and "is in use by process" in said and ", since 2" in said
        assert not [x for x in Path("old/checkpoints").iterdir() if "-v" in x.name]
        assert len(steps_logged("old")) == len(set(steps_logged("old")))


# ---- without runs -------------------------------------------------------------------------------


@pytest.fixture
def here() -> Iterator[Path]:
    Path("here").mkdir()
    yield Path("here")
    claim.release_all()
    for pid in list(SAID):
        kill(pid)


def take(directory: Path) -> None:
    claim.claim(directory, f"resume={directory}", "wait")


def child(body: Callable[[], Any]) -> int:
    """Fork a process that does this, and stays; returns when it has done it."""
    ready, done = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(ready)
        try:
            said = body() or b"done"
        except BaseException as error:
            said = str(error).encode()
        os.write(done, said)
        time.sleep(100)
        os._exit(0)
    os.close(done)
    SAID[pid] = os.read(ready, 1000)
    os.close(ready)
    return pid


SAID: dict[int, bytes] = {}


def kill(pid: int) -> None:
    del SAID[pid]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_directory_is_one_process_at_a_time_and_free_when_that_is_killed(here: Path) -> None:
    other = child(lambda: take(here))
    with pytest.raises(UserError, match=rf"resume=here: .*in use by process {other} on .*, since"):
        take(here)
    kill(other)
    assert (here / claim.LOCK_FILE).exists(), "what a killed process leaves is no claim"
    take(here)
    take(here)  # it is its own
    claim.release(here)
    assert list(here.iterdir()) == [], "nothing is left"


def attempt_and_leave(directory: Path, go: Path, tried: Path, number: int) -> NoReturn:
    """Nobody leaves before all four have tried, as the claim of one that has left is over."""
    status = 1
    try:
        while not go.exists():
            pass
        found = claim.attempt(directory, "resume=here")
        (tried / str(number)).touch()
        wait_for(lambda: len(list(tried.iterdir())) == 4, lambda: "not all have tried", 30)
        claim.release_all()
        status = 0 if found is None else 2
    finally:
        os._exit(status)


def test_exactly_one_of_many_processes_that_claim_a_directory_at_once_succeeds(here: Path) -> None:
    for turn in range(5):
        claimants = []
        (tried := Path(f"tried-{turn}")).mkdir()
        for number in range(4):
            if (pid := os.fork()) == 0:
                attempt_and_leave(here, Path(f"go-{turn}"), tried, number)
            claimants.append(pid)
        Path(f"go-{turn}").touch()
        ends = sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in claimants)
        assert ends == [0, 2, 2, 2]


def test_workers_hold_what_the_run_holds_and_nobody_else_does(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's own process, a worker forked from it, and what both have started besides."""
    monkeypatch.setattr(claim, "PATIENCE_S", 0.3)

    def worker() -> bytes:
        program = subprocess.Popen(["sleep", "100"])
        return b"%d %d %d" % (os.getpid(), program.pid, child(lambda: None))

    def run() -> bytes:
        take(here)
        program = subprocess.Popen(["sleep", "100"])
        return b"%d " % program.pid + SAID[child(worker)]

    main = child(run)
    program, its_worker, *theirs = map(int, SAID[main].split())
    try:
        kill(main)
        with pytest.raises(UserError, match="it has ended, but a process of it has not"):
            take(here)
        os.kill(its_worker, signal.SIGKILL)
        take(here)
    finally:
        for pid in (program, *theirs):
            os.kill(pid, signal.SIGKILL)


def test_what_took_the_place_of_a_deleted_directory_is_left_alone(here: Path) -> None:
    take(here)
    here.rename("away")
    here.mkdir()

    def stranger() -> None:
        claim._held.clear()  # it is no child of the run
        take(here)

    other = child(stranger)
    claim.release_all()
    with pytest.raises(UserError, match=f"process {other}"):
        take(here)
    kill(other)


def test_a_file_system_without_locks_is_told_and_no_obstacle(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    take(here)
    line = capsys.readouterr().err.strip()
    assert "resume=here" in line and "no locks (No locks available)" in line and "\n" not in line


def test_a_directory_that_cannot_be_written_is_one_line(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UserError, match=r"cannot be written .Read-only file system."):
        take(here)


@pytest.mark.parametrize("more", [[], ["~hydra.callbacks.one_run_per_directory"]])
def test_a_fresh_run_in_a_directory_in_use_is_refused_and_writes_nothing(
    command: Command, more: list[str]
) -> None:
    Path("here").mkdir()
    with in_use("here"):
        refused = command(*RUN, "hydra.run.dir=here", *more)
        assert refused.code == 2
        assert "here: this directory is in use by process 1" in refused.complaint
        assert more or sorted(x.name for x in Path("here").iterdir()) == [".lock"]


def test_a_run_whose_directory_is_removed_ends_with_one_line(command: Command) -> None:
    removal = ["+callbacks.removal._target_=tests.cli.tiny.Removal"]
    removal += ["+callbacks.removal.directory=here", "hydra.run.dir=here", "trainer.devices=1"]
    ended = command(*RUN, *removal)
    assert ended.code == 1
    assert "the run directory here was removed or moved during the run" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.slow
def test_a_sweep_leaves_directories_in_use_alone(command: Command) -> None:
    Path("jobs/1").mkdir(parents=True)
    with in_use("jobs"):
        refused = command("-m", *RUN, "model.lr=1,2", "hydra.sweep.dir=jobs")
        assert "hydra.sweep.dir=jobs: this directory is in use" in refused.complaint
    with in_use("jobs/1"):
        done = command("-m", *RUN, "model.lr=0.1,0.2", "hydra.sweep.dir=jobs")
    assert done.code == 1 and "in use by process 1" in done.out
    assert [x.name for x in Path("jobs/1").iterdir()] == [".lock"]
    assert Path("jobs/0/summary.json").is_file() and not Path("jobs/0/.lock").exists()


def test_a_directory_is_claimed_before_anything_heavy_is_imported() -> None:
    Path("here").mkdir()
    code = (
        "import sys; from hybridtrain.cli.entry import main; status = main(sys.argv[1:]);"
        "print(status, {'torch', 'pytorch_lightning'} & set(sys.modules))"
    )
    with in_use("here"):
        done = subprocess.run(
            [sys.executable, "-c", code, "task=digits", "hydra.run.dir=here"],
            capture_output=True,
            text=True,
            check=True,
        )
    assert done.stdout.strip() == "2 set()" and "in use" in done.stderr


@pytest.mark.parametrize(("rank", "claims"), [(None, True), ("0", True), ("1", False)])
def test_only_further_ranks_leave_the_claim_to_the_run_that_has_started_them(
    rank: str | None, claims: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    assert claim.attempt(tmp_path, "run") is None
    try:
        assert (tmp_path / claim.LOCK_FILE).exists() == claims
    finally:
        claim.release(tmp_path)
