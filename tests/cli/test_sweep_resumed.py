"""``-m resume=``: finished jobs are kept, the broken one goes on, the rest runs."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hybridtrain.cli.claim import release_all
from hybridtrain.cli.config_values import ABSENT, changed_keys, resuming
from hybridtrain.cli.former_run import FormerRun
from hybridtrain.cli.sweep import resumed
from hybridtrain.cli.sweep.resumed import Sweep
from hybridtrain.errors import UserError
from hybridtrain.report.charts import number
from hybridtrain.report.runs import CONFIG_FILE
from tests.cli.conftest import Command, in_use, summary
from tests.cli.test_full_disk import UNSHARE
from tests.cli.test_interrupt import _none_left
from tests.cli.test_resume import last
from tests.cli.tiny import TINY
from tests.cli.zygote import Zygote
from tests.lightning.checkpointing.test_resume import same
from tests.picking import by_default

JOBS = [*TINY, "trainer.devices=2", "trainer.max_epochs=6", "hydra.sweep.dir=jobs"]
JOBS += ["model.width=1,2,3", "task.metric=train/loss"]


def broken_off(zygote: Zygote, ending: str, options: Sequence[str]) -> None:
    """The sweep, ended while its second job trains, behind a checkpoint of it."""
    run = zygote.start(Path.cwd(), "-m", *options)
    run.until("jobs/1/checkpoints/last.ckpt")
    os.killpg(run.pid, signal.Signals[ending])
    run.status()
    assert _none_left(run.pid)
    assert not Path("jobs/2").exists()


@pytest.mark.timeout(420)
@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("ending", by_default(["SIGKILL", "SIGINT", "SIGTERM"], "SIGKILL"))
def test_finished_jobs_are_kept_the_broken_one_goes_on_and_the_rest_runs(
    zygote: Zygote, command: Command, ending: str
) -> None:
    options = [*JOBS, "model.sleep_s=0.03"]
    broken_off(zygote, ending, options)
    first = Path("jobs/0/summary.json").stat().st_mtime_ns
    result = command("-m", *options, "resume=auto")
    assert result.code == 0, result.err
    assert "the sweep in jobs goes on" in result.out and "1 of 3 jobs have finished" in result.out
    assert Path("jobs/0/summary.json").stat().st_mtime_ns == first
    assert [summary(f"jobs/{i}")["exit"] for i in range(3)] == [0, 0, 0]
    assert summary("jobs/1")["resumed"].endswith(".ckpt") and summary("jobs/2")["resumed"] is None
    rows = [x.split() for x in result.out.splitlines() if "  model.width=" in x][-3:]
    metrics = [number(summary(f"jobs/{i}")["metrics"]["train/loss"]) for i in range(3)]
    assert rows == [[str(i), f"model.width={i + 1}", metrics[i], f"jobs/{i}"] for i in range(3)]
    alone = [x for x in JOBS if not x.startswith(("hydra", "model.width"))]
    assert command(*alone, "model.width=2", "hydra.run.dir=alone").code == 0
    assert same(last("jobs/1")["state_dict"], last("alone")["state_dict"])
    assert command("-m", "resume=jobs").complaint.endswith("all jobs of this sweep have finished")
    again = command("-m", *options, "resume=auto")
    assert "a new one begins" in again.out  # as it is for a run


@pytest.fixture
def ended(command: Command) -> Command:
    """A sweep of two short jobs; the second one has failed."""
    options = [*TINY, "hydra.sweep.dir=sweeps/1", "model.fail_at=null,3"]
    assert command("-m", *options, "trainer.max_epochs=1").code == 1
    return command


@pytest.mark.slow
def test_a_sweep_is_known_by_its_options_and_left_alone_while_it_runs(ended: Command) -> None:
    same_again = ["-m", *TINY[:2], "trainer.max_epochs=1", TINY[3], "model.fail_at=null,3"]
    new = "a new one begins"
    root = "hydra.sweep.dir='sweeps/${now:%f}'"
    other = [*same_again, "model.lr=0.02", "resume=auto", root]
    assert new in ended(*other).out
    fewer = [x for x in same_again if not x.startswith("trainer.max")]
    assert new in ended(*fewer, "trainer.max_epochs=2", "resume=auto", root).out
    with in_use("sweeps/1"):
        assert "in use by process 1" in ended("-m", "resume=sweeps/1").complaint
    differs = ended("-m", "resume=sweeps/1", "model.lr=0.5").complaint
    assert "had other options: model.lr=0.5" in differs
    again = ended("-m", "resume=sweeps/1")  # which fails again, behind what it had
    assert again.code == 1 and "1 of 2 jobs have finished before" in again.out


@pytest.mark.parametrize("damage", ["absent", "torn", "newer", "folder", "ended"])
def test_a_directory_that_is_no_sweeps_is_one_line(command: Command, damage: str) -> None:
    Path("jobs").mkdir()
    whole = asdict(Sweep(["a=1"]))
    changes = {"newer": {"format": 9}, "folder": {"config_dirs": [1]}, "ended": {"finished": "no"}}
    said = {name: json.dumps(whole | change) for name, change in changes.items()}
    said["torn"] = '{"overrides": ['
    if damage in said:
        Path("jobs/sweep.json").write_text(said[damage])
    result = command("-m", "resume=jobs")
    assert result.code == 2
    assert "not the directory of a sweep that this version can go on with" in result.complaint


def test_a_sweep_that_others_can_change_is_refused(command: Command) -> None:
    Path("jobs").mkdir()
    path = Path("jobs/sweep.json")
    path.write_text(json.dumps(asdict(Sweep(["+hydra.callbacks.x._target_=os.system"]))))
    path.chmod(0o666)
    assert f"chmod o-w {path}" in command("-m", "resume=jobs").complaint


@pytest.mark.slow
def test_a_job_that_would_be_configured_otherwise_is_named(ended: Command) -> None:
    path = Path("sweeps/1/0/.hydra/config.yaml")
    path.write_text(path.read_text().replace("max_epochs: 1", "max_epochs: 7"))
    complaint = ended("-m", "resume=sweeps/1").complaint
    assert "sweeps/1/0 had another configuration: trainer.max_epochs=1, then 7" in complaint


def test_a_value_in_place_of_null_is_another_configuration_and_a_new_key_is_not(
    tmp_path: Path,
) -> None:
    then, now = {"a": {"b": None}}, {"a": {"b": 0.01}, "c": 1}
    assert [*changed_keys(then, now)] == [("a.b", None, 0.01), ("c", ABSENT, 1)]
    path = tmp_path / ".hydra/config.yaml"
    path.parent.mkdir()
    path.write_text(json.dumps(then))
    with pytest.raises(UserError, match=r"another configuration: a\.b=0\.01, then null"):
        resumed._check_same(FormerRun.read(tmp_path, "resume"), OmegaConf.create(now))
    resumed._check_same(FormerRun.read(tmp_path, "resume"), OmegaConf.create(then | {"c": 1}))


def signed(directory: str, *own: str, hydra: Sequence[str] = (), finished: bool = False) -> None:
    Path(directory).mkdir(parents=True)
    whole = asdict(Sweep([*own], [*hydra], [], finished))
    Path(directory, "sweep.json").write_text(json.dumps(whole))


def test_a_sweep_goes_on_with_all_the_options_that_choose_its_jobs() -> None:
    own = ["task=digits", "ckpt=a.ckpt,b.ckpt", "optimizer.lr=0.1,0.01", "faults=null"]
    signed("sw,1", *own)
    shown = shlex.split(resuming("sw,1"))
    assert resumed.expanded(shown)[:4] == own
    release_all()
    typed = resumed.expanded([*own, "resume=auto", "hydra.sweep.dir='sw,1'"])
    assert typed[:4] == own and typed[-1] == "hydra.sweep.dir='sw,1'"
    release_all()
    newest = [own[0], "ckpt=last", *own[2:], "resume=auto", "hydra.sweep.dir='sw,1'"]
    assert sorted(resumed.expanded(newest)[:4]) == sorted(own), "as it was then"
    release_all()
    with pytest.raises(UserError, match=r"had other options: ckpt=c\.ckpt"):
        resumed.expanded([*shown, "ckpt=c.ckpt"])


def test_a_search_that_was_made_longer_goes_on_as_long(command: Command) -> None:
    signed("jobs", "seeds=5", hydra=["hydra.sweeper.n_trials=4"], finished=True)
    options = {"task": ["resume='jobs'", "seeds=5"], "hydra": ["hydra.sweeper.n_trials=8"]}
    config = {"resume": "jobs", "hydra": {"overrides": options}}
    resumed.sign(Path("jobs"), OmegaConf.create(config))
    now = resumed.read(Path("jobs"), "resume=jobs")
    assert now == Sweep(["seeds=5"], ["hydra.sweeper.n_trials=8"], [], False)


def test_a_job_that_goes_on_keeps_the_directory_that_its_options_name(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = "hydra.sweep.subdir='${hydra.job.override_dirname}'"
    options = [*TINY, "hydra.sweep.dir=jobs", place, "model.fail_at=null,3"]
    assert command("-m", *options, "trainer.max_epochs=1").code == 1
    before = sorted(x.name for x in Path("jobs").iterdir() if x.is_dir())
    again = command("-m", "resume=jobs")
    assert again.code == 1 and "1 of 2 jobs have finished before" in again.out
    assert sorted(x.name for x in Path("jobs").iterdir() if x.is_dir()) == before


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_sweep_goes_on_after_a_full_disk(tmp_path: Path) -> None:
    probe = [*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "disk"]
    Path("disk").mkdir()
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("no disk of our own may be made here")
    script = """
    mount -t tmpfs -o size=1500k tmpfs disk
    head -c 1240k /dev/zero > disk/other
    "$@" > first.txt 2>&1; echo $? > first
    rm disk/other
    "$@" > second.txt 2>&1; echo $? > second
    cp -r disk/jobs copy
    """
    options = [*JOBS, "callbacks.checkpoint.save_top_k=-1", "logger=both", "resume=auto"]
    options[options.index("hydra.sweep.dir=jobs")] = "hydra.sweep.dir=disk/jobs"
    command = [sys.executable, "-m", "hybridtrain", "-m", *options]
    subprocess.run(
        [*UNSHARE, "bash", "-c", script, "-", *command],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        check=True,
        timeout=200,
    )
    assert int(Path("first").read_text()) != 0, Path("first.txt").read_text()
    assert Path("second").read_text() == "0\n", Path("second.txt").read_text()
    assert [summary(f"copy/{i}")["exit"] for i in range(3)] == [0, 0, 0]
    shutil.rmtree("copy")


def test_lengths_are_compared_as_numbers() -> None:
    resumed._check_length({"seeds": "seeds=10"}, {"seeds": "seeds=9"})
    with pytest.raises(UserError, match=r"seeds=9: this sweep has seeds=10, and can only be made"):
        resumed._check_length({"seeds": "seeds=9"}, {"seeds": "seeds=10"})


@pytest.mark.parametrize(("faults", "own"), [("${faults}", False), ("[{at: 3}]", True)])
def test_a_job_that_goes_on_does_not_break_again(faults: str, own: bool, tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).parent.mkdir()
    (tmp_path / CONFIG_FILE).write_text(f"strategy:\n  faults: {faults}\n")
    found = resumed.going_on(tmp_path)
    assert "faults=null" in found and ("strategy.faults=null" in found) == own
