"""``resume=``: a run goes on where it was, whatever ended it, as if nothing had."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import zipfile
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from omegaconf import OmegaConf
from pytorch_lightning.callbacks import ModelCheckpoint

from hybridtrain.cli import claim, former_run
from hybridtrain.cli.former_run import FormerRun
from hybridtrain.cli.hydra_config import complete_overrides, compose_config, conf_dir
from hybridtrain.cli.resume import expanded
from hybridtrain.cli.telemetry.monitor import RunMonitor
from hybridtrain.errors import UserError
from hybridtrain.report.runs import read_run
from hybridtrain.util import files
from tests.cli.conftest import Command, in_use, summary
from tests.cli.test_interrupt import _none_left
from tests.cli.tiny import TINY, N
from tests.cli.zygote import Zygote, wait_for
from tests.lightning.checkpointing.test_resume import same
from tests.picking import by_default

RUN = [*TINY, "trainer.devices=2", "logger=both", "trainer.log_every_n_steps=1"]
EPOCHS = 8
SLOW = ["model.sleep_s=0.02", f"trainer.max_epochs={EPOCHS}"]


def last(directory: str) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(f"{directory}/checkpoints/last.ckpt", weights_only=True)
    return content


def metrics(directory: str) -> list[dict[str, str]]:
    """What the CSV logger has of the training itself."""
    with Path(directory, "csv", "metrics.csv").open(newline="") as file:
        return [
            {k: v for k, v in row.items() if k in ("step", "epoch", "train/loss", "val/size") and v}
            for row in csv.DictReader(file)
        ]


def killed(zygote: Zygote, *arguments: str) -> None:
    """All processes of the run at once, as an out-of-memory killer or a power cut would.

    In mid-epoch: a kill between a checkpoint and the last row of its epoch would lose the row.
    """
    run = zygote.start(Path.cwd(), *arguments)
    run.until("here/checkpoints/last.ckpt")
    run.until("here/csv/metrics.csv")
    wait_for(lambda: any("train/loss" in row for row in metrics("here")), run.said)
    os.killpg(run.pid, signal.SIGKILL)
    assert run.status() == -signal.SIGKILL
    assert _none_left(run.pid)


@pytest.mark.parametrize("strategy", ["hybrid", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_run_killed_with_all_its_processes_goes_on_to_the_same_bits(
    command: Command, zygote: Zygote, strategy: str
) -> None:
    arguments = [*RUN, *SLOW, f"strategy={strategy}"]
    killed(zygote, *arguments, "hydra.run.dir=here")
    assert not Path("here/summary.json").exists()
    assert Path("here/.lock").exists()
    before = last("here")["global_step"]
    assert 0 < before < 6 * EPOCHS
    again = command("resume=here")
    assert again.code == 0, again.err
    assert "here goes on from" in again.out and "resumed" in again.out
    assert not Path("here/.lock").exists() and not Path("here/.run_stats.json").exists()
    assert command(*arguments, "hydra.run.dir=whole").code == 0
    one, other = last("here"), last("whole")
    assert one["global_step"] == other["global_step"] == 6 * EPOCHS
    assert same(one["state_dict"], other["state_dict"])
    assert same(one["optimizer_states"], other["optimizer_states"])
    assert summary("here")["metrics"] == summary("whole")["metrics"]
    assert summary("here")["resumed"].endswith(".ckpt")
    assert len(rows(metrics("here"))) >= EPOCHS
    assert rows(metrics("here")) == rows(metrics("whole")), "the log was appended to"
    assert sorted(x.name for x in Path("here/checkpoints").iterdir()) == sorted(
        x.name for x in Path("whole/checkpoints").iterdir()
    )
    history = [float(row["updates"]) for row in table("here/history.csv")]
    assert history == sorted(history) and history[-1] == 6 * EPOCHS
    assert float(table("here/history.csv")[-1]["samples"]) == EPOCHS * 24
    assert summary("here")["total"] == {"updates": 6 * EPOCHS, "samples": EPOCHS * 24}
    assert summary("here")["updates"] < 6 * EPOCHS and summary("whole")["total"] == {}


STRATEGIES = sorted(path.stem for path in (conf_dir() / "strategy").glob("*.yaml"))


@pytest.mark.sampled(8)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", by_default(STRATEGIES, "local_sgd"))
def test_the_total_is_what_all_parts_have_counted(command: Command, strategy: str) -> None:
    """Whatever ``global_step`` counts under this strategy."""
    counted = {"updates": 0, "samples": 0}
    options = [*RUN, "test=false", "hydra.run.dir=here", f"strategy={strategy}"]
    for epochs in (1, 2, 4):
        assert command(*options, f"trainer.max_epochs={epochs}").code == 0
        part = summary("here")
        counted = {name: n + part[name] for name, n in counted.items()}
        assert part["total"] == ({} if epochs == 1 else counted)
        last_row = table("here/history.csv")[-1]
        assert {name: int(float(last_row[name])) for name in counted} == counted
        compared = read_run(Path("here")).numbers
        assert {name: compared[name] for name in counted} == counted
        options = ["resume=here", "resume_override=true"]
    assert counted["samples"] == 4 * N


def rows(found: list[dict[str, str]]) -> list[tuple[tuple[str, str], ...]]:
    return [tuple(sorted(row.items())) for row in found if len(row) > 2]


def table(path: str) -> list[dict[str, str]]:
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(("n", "every"), [(2, 1), (1, 3)])
def test_rows_are_counted_by_mini_batches_where_the_module_steps_itself(
    command: Command, n: int, every: int
) -> None:
    """``global_step`` counts its steps, of which there are more or fewer."""
    by_hand = ["model._target_=tests.cli.tiny.ByHand", f"model.n={n}", f"model.every={every}"]
    options = [*RUN, *by_hand, "test=false", "hydra.run.dir=here"]
    assert command(*options, "callbacks.checkpoint.save_top_k=-1").code == 0
    whole = Path("here/csv/metrics.csv").read_text()
    steps = [row["step"] for row in table("here/csv/metrics.csv") if row["train/now"]]
    assert steps == [str(step) for step in range(12)]
    say_exit("here", 143)
    files = sorted(Path("here/checkpoints").iterdir(), key=lambda x: x.stat().st_mtime_ns)
    for path in files[1:]:
        path.unlink()
    assert command("resume=here").code == 0
    again = [row["step"] for row in table("here/csv/metrics.csv") if row["train/now"]]
    assert again == steps, whole


# ---- what is resumed ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run to its end."""
    from hybridtrain.cli.entry import main

    before = dict(os.environ)
    with chdir(tmp_path_factory.mktemp("ended")):
        assert main([*RUN, "test=false", "hydra.run.dir=old"]) == 0
        directory = Path("old").absolute()
    os.environ.clear()
    os.environ.update(before)
    return directory


def test_a_checkpoint_that_the_user_gave_is_kept_and_one_of_a_resumed_run_is_not(
    ended: Command,
) -> None:
    """Whatever their directories are called, and where they have gone since."""
    shutil.copytree("old", "old-2")
    given = f"ckpt={Path('old-2/checkpoints/last.ckpt').absolute()}"
    options, typed = Path("old/.hydra/overrides.yaml"), ["test=false", "trainer.devices=2"]
    options.write_text(options.read_text() + f"- {given}\n")
    for path in Path("old").rglob("*.ckpt"):
        path.unlink()
    with redirect_stdout(StringIO()) as said:
        begun = expanded(["resume=old", *typed])
    assert given in begun
    assert f"old goes on from {given}" in said.getvalue()
    claim.release_all()

    options.write_text("".join(f"- {each}\n" for each in begun if "hydra" not in each))
    assert given in expanded(["resume=old", *typed])
    claim.release_all()
    went_on = expanded(["resume=old-2", *typed])
    assert f"ckpt='{Path('old-2/checkpoints/last.ckpt').resolve()}'" in went_on
    Path("old-2/.hydra/overrides.yaml").write_text("".join(f"- {each}\n" for each in went_on))
    claim.release_all()
    shutil.move("old-2", "moved")
    for path in Path("moved").rglob("*.ckpt"):
        path.unlink()
    assert not [x for x in expanded(["resume=moved", *typed]) if x.startswith("ckpt")]
    claim.release_all()


@pytest.fixture
def ended(a_run: Path, command: Command) -> Command:
    """Two runs that ended early have left directories: ``old`` and, later, ``runs/1``."""
    shutil.copytree(a_run, "old")
    say_exit("old", 143)
    shutil.copytree("old", "runs/1")
    return command


def say_exit(directory: str, status: int) -> None:
    path = Path(directory, "summary.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"exit": status}))


ELSEWHERE = "hydra.run.dir=runs/${unique_id:}"


def test_auto_takes_up_the_last_run_that_did_not_finish_and_was_to_do_the_same(
    ended: Command,
) -> None:
    same_again = [*RUN, "test=false", ELSEWHERE, "resume=auto"]
    done = ended(*same_again)
    assert done.code == 0, done.err
    assert "runs/1 goes on from last.ckpt" in done.out
    assert summary("runs/1")["exit"] == 0 and summary("runs/1")["updates"] == 0, "it was done"
    assert summary("runs/1")["total"] == {"updates": 12, "samples": 2 * N}
    assert [x.name for x in Path("runs").iterdir()] == ["1"]
    done = ended(*same_again)
    assert "no unfinished run" in done.out, "a run that has finished is not taken up"
    assert len(list(Path("runs").iterdir())) == 2


def test_auto_leaves_alone_what_is_another_configuration_or_at_work(ended: Command) -> None:
    same_again = complete_overrides([*RUN, "test=false", ELSEWHERE, "resume=auto"])
    new = [x for x in same_again if not x.startswith("resume")]
    assert expanded([*same_again, "++model.lr=0.02"]) == [*new, "++model.lr=0.02"]
    with in_use("runs/1"):
        assert expanded(same_again) == new
    assert f"resume='{Path('runs/1').absolute()}'" in expanded(same_again)
    claim.release_all()


@pytest.mark.slow
def test_the_checksums_of_a_checkpoint_are_compared_once_until_it_is_kept(
    ended: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    tested, test = [], zipfile.ZipFile.testzip

    def count(archive: zipfile.ZipFile) -> str | None:
        tested.append(archive.filename)
        return test(archive)

    monkeypatch.setattr(zipfile.ZipFile, "testzip", count)
    monkeypatch.setattr(files, "SETTLED_S", -1.0)
    assert ended("resume=old").code == 0
    newest = str(Path("old/checkpoints/last.ckpt").resolve())
    assert tested == [newest] * 2, "and again where the run is begun, once it is kept for a replay"


@pytest.mark.slow
def test_a_run_that_left_no_checkpoint_begins_again_in_its_directory(ended: Command) -> None:
    for path in Path("old/checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:1000])
    done = ended("resume=old")
    assert done.code == 0 and "old goes on from its beginning" in done.out
    assert "last.ckpt is passed over: it is cut short" in done.err
    assert re.search(r"resumed +from the beginning, there was no whole checkpoint", done.out)
    assert summary("old")["updates"] == 12 and summary("old")["resumed"] == ""


def test_a_torn_checkpoint_is_passed_over_by_name_and_the_one_before_is_taken(
    ended: Command,
) -> None:
    newest = Path("runs/1/checkpoints/last.ckpt")
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    done = ended("resume=runs/1")
    assert done.code == 0, done.err
    assert "last.ckpt is passed over: the checksum of" in done.err
    assert "runs/1 goes on from epoch=1-step=12.ckpt" in done.out
    done = ended(*RUN, ELSEWHERE, "test_only=true", "ckpt=last")
    assert done.code == 0, done.err
    assert summary_of_newest()["checkpoint"].endswith("runs/1/checkpoints/epoch=1-step=12.ckpt")
    assert ended(*RUN, "ckpt=old/checkpoints/last.ckpt", "trainer.max_epochs=3").code == 0


def summary_of_newest() -> dict[str, Any]:
    return summary(next(iter(former_run.runs_below(Path("runs")))))


def test_options_that_differ_are_shown_and_can_be_insisted_on(ended: Command) -> None:
    refused = ended("resume=old", "trainer.max_epochs=3", "model.lr=0.5")
    assert refused.code == 2
    assert "trainer.max_epochs=3, then 2" in refused.complaint
    assert "model.lr=0.5" in refused.complaint and "resume_override=true" in refused.complaint
    assert summary("old")["exit"] == 143, "nothing was touched"
    assert ended("resume=old", "trainer.max_epochs=2", *TINY, "test=false").code == 0, "no change"
    say_exit("old", 143)
    done = ended("resume=old", "trainer.max_epochs=3", "resume_override=true")
    assert done.code == 0, done.err
    assert summary("old")["updates"] == 6
    assert summary("old")["total"] == {"updates": 18, "samples": 72}
    assert "updates      6 (in all 18)" in done.out and "24 (in all 72), " in done.out


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("arguments", "fragments"),
    by_default(
        [
            ("resume=nowhere", ["resume=nowhere", "not the directory of a run"]),
            ("resume=runs", ["not the directory of a run", "below it: runs/1"]),
            ("resume=old ckpt=some.ckpt", ["together with ckpt=some.ckpt", "leave ckpt out"]),
            ("resume=old hydra.run.dir=new", ["together with hydra.run.dir=new"]),
            ("-m resume=old,runs/1", ["one run at a time"]),
            ("-m resume=old model.lr=1,2", ["not the directory of a sweep"]),
            ("resume=old resume_override=maybe", ["resume_override=maybe", "true or false"]),
        ],
        ("resume=runs", ["not the directory of a run", "below it: runs/1"]),
        ("resume=old hydra.run.dir=new", ["together with hydra.run.dir=new"]),
        ("-m resume=old,runs/1", ["one run at a time"]),
    ),
)
def test_what_cannot_be_resumed_is_one_line(
    command: Command, arguments: str, fragments: list[str]
) -> None:
    for directory in ("old", "runs/1"):
        make_up_a_run(directory)
    result = command(*arguments.split())
    assert result.code == 2
    for fragment in fragments:
        assert fragment in result.complaint


def make_up_a_run(directory: str) -> None:
    folder = Path(directory, ".hydra")
    folder.mkdir(parents=True)
    OmegaConf.save(compose_config(["task=digits"]), folder / "config.yaml")
    OmegaConf.save(OmegaConf.create(["task=digits"]), folder / "overrides.yaml")


def test_a_run_that_has_finished_is_running_or_is_of_a_newer_version_is_refused(
    command: Command,
) -> None:
    make_up_a_run("old")
    former_run.sign(Path("old"), goes_on=True)
    Path("old/summary.json").write_text('{"exit": 0}')
    assert "has finished" in command("resume=old").complaint
    with in_use("old"):
        assert "resume=old: this directory is in use by process" in command("resume=old").complaint
    Path("old/run.json").write_text('{"format": 99, "hybridtrain": "9.0"}')
    line = command("resume=old").complaint
    assert "made by hybridtrain 9.0 (format 99)" in line and "update hybridtrain" in line


def test_a_checkpoint_of_a_newer_version_is_refused_before_anything_starts(
    command: Command,
) -> None:
    from tests.cli.tiny import TinyModule

    content = {"state_dict": TinyModule().state_dict(), "hybridtrain": {"format": 99}}
    torch.save(content, "new.ckpt")
    assert "format 99" in command(*TINY, "ckpt=new.ckpt").complaint


def test_ckpt_last_without_any_run_says_that_there_is_none(command: Command) -> None:
    assert "no run of this model in outputs" in command("task=digits", "ckpt=last").complaint


def newest_of(directory: Path) -> Path | None:
    return FormerRun.read(directory, "resume").newest()


@pytest.mark.parametrize("place", ["interrupted.ckpt", "checkpoints/interrupted.ckpt"])
def test_the_checkpoint_of_an_early_end_is_found_where_it_is_and_where_it_was(place: str) -> None:
    for step, name in enumerate(("checkpoints/last.ckpt", place)):
        path = Path("run") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"global_step": step}, path)
        os.utime(path, (step, step))
    assert former_run.newest([Path("run/checkpoints")]) == (Path("run") / place).resolve()


def test_what_an_earlier_run_has_left_in_the_directory_is_not_gone_on_from(
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_up_a_run("run")
    for name in ("last.ckpt", "epoch=1.ckpt"):
        path = Path("run/checkpoints") / name
        path.parent.mkdir(exist_ok=True)
        torch.save({"n": 1}, path)
    former_run.sign(Path("run"), goes_on=False)
    assert newest_of(Path("run")) is None
    assert "last.ckpt is passed over: an earlier run has left it there" in capsys.readouterr().err
    torch.save({"n": 2}, "run/checkpoints/last.ckpt")
    former_run.sign(Path("run"), goes_on=True)
    assert newest_of(Path("run")) == Path("run/checkpoints/last.ckpt").absolute()


def test_a_checkpoint_of_an_earlier_run_is_recognised_after_its_directory_has_moved() -> None:
    make_up_a_run("run")
    path = Path("run/checkpoints/last.ckpt")
    path.parent.mkdir()
    torch.save({"n": 1}, path)
    former_run.sign(Path("run"), goes_on=False)
    Path("run").rename("moved")
    assert newest_of(Path("moved")) is None
    model = ["task=digits", "ckpt=last", "hydra.run.dir=moved"]
    last_one = expanded(model)[-1]
    assert last_one == f"ckpt='{Path('moved/checkpoints/last.ckpt').absolute()}'", "of any run"


def test_checkpoints_are_found_where_hydra_has_put_them() -> None:
    make_up_a_run("run")
    config = OmegaConf.load("run/.hydra/config.yaml")
    for place, found in (("${hydra:runtime.output_dir}/ck", True), ("${hydra:job.name}/ck", False)):
        config.callbacks.checkpoint.dirpath = place
        OmegaConf.save(config, "run/.hydra/config.yaml")
        path = Path("run/ck/last.ckpt")
        path.parent.mkdir(exist_ok=True)
        torch.save({"n": 1}, path)
        if found:
            assert newest_of(Path("run")) == path.absolute()
        else:
            with pytest.raises(UserError, match="cannot be resolved outside of the run"):
                newest_of(Path("run"))


def test_paths_in_a_run_mean_what_they_meant_when_it_began(command: Command) -> None:
    make_up_a_run("old")
    hydra = {"hydra": {"overrides": {"hydra": ["hydra.job.chdir=true", "hydra.run.dir=old"]}}}
    hydra["hydra"]["runtime"] = {"config_sources": []}
    Path("old/.hydra/hydra.yaml").write_text(json.dumps(hydra))
    assert "hydra.job.chdir=true" in expanded(["resume=old"])
    claim.release_all()


def test_a_value_that_only_hydra_resolves_is_compared_as_it_is_written() -> None:
    make_up_a_run("old")
    given = ["task=speech", "data=csv", 'data.train="${hydra:runtime.cwd}/t.csv"']
    OmegaConf.save(OmegaConf.create(given), "old/.hydra/overrides.yaml")
    OmegaConf.save(compose_config(given), "old/.hydra/config.yaml")
    assert given[2] in expanded(["resume=old"])
    claim.release_all()
    with pytest.raises(UserError, match=r"data\.train=other\.csv, then .*hydra:"):
        expanded(["resume=old", "data.train=other.csv"])
    claim.release_all()


def test_a_run_that_has_moved_keeps_its_best_checkpoint(tmp_path: Path) -> None:
    monitor, saving = RunMonitor(tmp_path / "new"), ModelCheckpoint(tmp_path / "new/checkpoints")
    monitor.resume()
    trainer = pl.Trainer(callbacks=[monitor, saving], logger=False, enable_progress_bar=False)
    state = {"dirpath": "/old/checkpoints", "best_model_path": "/old/checkpoints/a.ckpt"}
    content = {"callbacks": {saving.state_key: state, "Own": {"dirpath": "/other"}}}
    monitor.on_load_checkpoint(trainer, pl.LightningModule(), content)
    moved = content["callbacks"][saving.state_key]
    assert moved["best_model_path"] == str(tmp_path / "new/checkpoints/a.ckpt")
    assert content["callbacks"]["Own"] == {"dirpath": "/other"}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["config", "overrides", "hydra"])
def test_a_fifo_in_the_directory_of_a_run_is_one_line(command: Command, name: str) -> None:
    make_up_a_run("old")
    fifo = Path(f"old/.hydra/{name}.yaml")
    fifo.unlink(missing_ok=True)
    os.mkfifo(fifo)
    for asked in (["resume=old"], ["task=digits", "hydra.run.dir=old"]):
        said = command(*asked)
        assert said.code == 2 and f"{fifo} is a FIFO or a device" in said.complaint


@pytest.mark.few(5)
@pytest.mark.parametrize("text", ["[[[", "- 3", "- '[[['", "", "a: 3", "3", "- \udcff"])
@pytest.mark.parametrize("name", ["config", "overrides"])
def test_damaged_files_of_a_run_are_one_line_that_names_them(
    command: Command, name: str, text: str
) -> None:
    make_up_a_run("old")
    path = Path(f"old/.hydra/{name}.yaml")
    path.write_bytes(text.encode(errors="surrogateescape"))
    said = command("resume=old")
    assert said.code == 2 and str(path) in said.complaint


def test_a_configuration_cut_short_is_named(command: Command) -> None:
    make_up_a_run("old")
    path = Path("old/.hydra/config.yaml")
    path.write_text(path.read_text()[: path.stat().st_size // 2])
    said = command("resume=old")
    assert said.code == 2 and str(path) in said.complaint


def test_a_checkpoint_that_links_to_itself_is_passed_over() -> None:
    Path("run").mkdir()
    Path("run/last.ckpt").symlink_to("last.ckpt")
    assert former_run.newest([Path("run")]) is None
