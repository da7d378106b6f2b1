"""``python -m hybridtrain replay``: runs of the command line, done again."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridtrain import HybridStrategy
from hybridtrain.engine.recording import read_record
from hybridtrain.engine.recording.record_file import CELL_BYTES, Writer
from tests.cli.conftest import Command, Replay
from tests.cli.tiny import TINY
from tests.cli.zygote import Zygote
from tests.lightning.toys import fit
from tests.picking import by_default

TWO = [*TINY, "trainer.devices=2", "hydra.run.dir=run", "trainer.enable_progress_bar=false"]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("strategy", by_default(["hybrid", "async"], "async"))
def test_a_run_is_replayed_from_its_directory_which_stays_as_it_is(
    command: Command, replay: Replay, strategy: str
) -> None:
    assert command(*TWO, f"strategy={strategy}", "seed=null").code == 0
    before = contents(Path("run"))
    result = replay("run=run")
    assert (result.code, result.err) == (0, "")
    assert "result   equal to the bit" in result.out
    assert contents(Path("run")) == before


@pytest.mark.slow
@pytest.mark.parametrize("how", by_default(["resume", "ckpt"], "resume"))
def test_a_run_that_went_on_in_its_own_directory_is_replayed_and_loses_no_file(
    command: Command, replay: Replay, how: str
) -> None:
    """It has overwritten last.ckpt, from which it went on."""
    many = [*TWO, "strategy=async", "callbacks.checkpoint.monitor=train/loss"]
    more = ["resume=run", "resume_override=true"]
    if how == "ckpt":
        more = [*many, "ckpt=run/checkpoints/last.ckpt"]
    kept = Path("run/resumed_from.ckpt")
    assert command(*many).code == 0 and not kept.exists()
    for epochs in (4, 6):  # the second replaces what the first has kept
        begun_from = Path("run/checkpoints/last.ckpt").read_bytes()
        assert command(*more, f"trainer.max_epochs={epochs}").code == 0
        assert kept.read_bytes() == begun_from
        assert Path("run/checkpoints/last.ckpt").read_bytes() != begun_from
    before = contents(Path("run"))
    result = replay("run=run")
    assert (result.code, result.err) == (0, "")
    assert "equal to the bit" in result.out
    assert contents(Path("run")) == before
    kept.unlink()
    assert "last.ckpt has changed" in replay("run=run").complaint


@pytest.mark.slow
def test_a_run_that_went_on_from_a_kept_checkpoint_is_replayed(
    command: Command, replay: Replay
) -> None:
    many = [*TWO, "strategy=async", "callbacks.checkpoint.monitor=train/loss"]
    assert command(*many, "trainer.max_epochs=3").code == 0
    Path("run/checkpoints/last.ckpt").rename("kept.ckpt")
    assert command(*many, "trainer.max_epochs=6", "ckpt=kept.ckpt").code == 0
    before = contents(Path("run"))
    assert not Path("run/resumed_from.ckpt").exists(), "no run overwrites a file outside its folder"
    result = replay("run=run")
    assert (result.code, result.err) == (0, "")
    assert "equal to the bit" in result.out
    assert contents(Path("run")) == before


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", by_default(["hybrid", "async", "local_sgd"], "hybrid"))
@pytest.mark.parametrize("saves", ["true", "false"])
def test_a_run_that_failed_is_replayed_to_its_last_event(
    command: Command, replay: Replay, saves: str, strategy: str
) -> None:
    """Its last checkpoint is not written again, with or without that of Lightning's callback."""
    options = [f"strategy={strategy}", f"callbacks.checkpoint.save_on_exception={saves}"]
    assert command(*TWO, *options, "model.fail_at=7").code == 1
    result = replay("run=run")
    assert result.code == 0 and "result   equal to the bit" in result.out
    if saves == "false":
        assert "raised   RuntimeError: this module fails on purpose (as in the run)" in result.out


def test_a_run_is_drawn_from_its_record_and_another_policy_below(
    replay: Replay, run_once: Path
) -> None:
    before = contents(run_once)
    result = replay(f"run={run_once}", "report=timeline")
    assert (result.code, result.out) == (0, "drawn: timeline.svg\n")
    alone = Path("timeline.svg").read_text()
    assert "2 workers, as recorded" in alone and "worker 1" in alone
    result = replay(f"run={run_once}", "report=timeline", "svg=both.svg", "policy=ssp", "at_s=0")
    assert result.code == 0 and "simulated" in result.out
    both = Path("both.svg").read_text()
    assert "as recorded" in both and ">policy=ssp, in virtual time<" in both
    assert contents(run_once) == before


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["report=gantt"], "report=gantt was given; it must be timeline"),
        (["svg=x.svg"], "svg=x.svg was given without report=timeline"),
        (["at_s=3"], "at_s=3 was given without report=timeline"),
        (["report=timeline", "at_s=-1"], "at_s=-1 was given; it must be a number from 0 on"),
        (["report=timeline", "at_s=1e6"], "no worker has handed over anything from second 1e+06"),
        (["report=timeline", "svg=none/x.svg"], "svg=none/x.svg could not be written"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_one_line(
    replay: Replay, run_once: Path, arguments: list[str], line: str
) -> None:
    result = replay(f"run={run_once}", *arguments)
    assert result.code == 2 and line in result.complaint


def test_a_run_without_a_record_cannot_be_drawn(replay: Replay) -> None:
    Path("empty").mkdir()
    result = replay("run=empty", "report=timeline")
    assert result.code == 2 and "there is no record in it" in result.complaint


def test_a_record_that_was_cut_short_is_replayed_as_far_as_it_goes(
    command: Command, replay: Replay
) -> None:
    assert command(*TWO, "strategy=async").code == 0
    path = Path("run/record.bin")
    path.write_bytes(path.read_bytes()[: -60 * CELL_BYTES - 7])
    left = len(read_record(path).cells)
    result = replay("run=run")
    assert result.code == 0
    assert f"events   {left} of {left}\n" in result.out
    assert "it ends before the run does" in result.out


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        ("header.about.checkpoints", ["../outside.ckpt"], "a path below the run's directory"),
        ("header.about.run_dir", 5, "record.header.about.run_dir is 5"),
        ("header.about.config.trainer", 5, "config.trainer is 5"),
        ("header.about.config.model", {"x": 1}, "configuration: model._target_="),
        (
            "header.threads",
            -1,
            "record.header.threads is -1, and must be a whole number from 1 to",
        ),
        ("header.code", {"/dev/zero": "0"}, "/dev/zero is not there"),
        ("end.stats.training_s", float("nan"), "must be a number from 0 on"),
        ("begin", {}, "record.begin.parameters is missing"),
        ("data 0", {"kind": 7}, "kind is 7"),
    ],
)
def test_a_record_that_makes_no_sense_is_refused_in_one_line(
    command: Command, replay: Replay, path: str, value: Any, line: str, run_once: Path
) -> None:
    record = read_record(run_once / "record.bin")
    told = json.loads(json.dumps(record.told))
    *above, last = path.split(".")
    node = told
    for name in above:
        node = node[name]
    node[last] = value
    writer = Writer(Path("record.bin"), record.kinds)
    for name, said in told.items():
        writer.tell({name: said})
    writer.close()
    result = replay(
        "run=record.bin", *([] if "code" in path or "model" in path else ["anyway=true"])
    )
    assert result.code == 2 and line in result.complaint
    assert not Path("../outside.ckpt").exists()


@pytest.fixture(scope="module")
def run_once(tmp_path_factory: pytest.TempPathFactory, zygotes: list[Zygote]) -> Path:
    """The directory of a run that several tests look at."""
    folder = tmp_path_factory.mktemp("once")
    if not zygotes:
        zygotes.append(Zygote())
    assert zygotes[-1].start(folder, *TWO, "strategy=hybrid").status() == 0
    return folder / "run"


# ---- differences --------------------------------------------------------------------------------


def test_an_edited_configuration_is_named_by_its_keys(command: Command, replay: Replay) -> None:
    assert command(*TWO, "strategy=hybrid").code == 0
    path = Path("run/.hydra/config.yaml")
    path.write_text(path.read_text().replace("seed: 0", "seed: 1"))
    complaint = replay("run=run").complaint
    assert "configuration: seed=1 in .hydra/config.yaml, 0 in the run" in complaint
    assert "anyway=true" in complaint
    result = replay("run=run", "anyway=true")
    assert result.code == 1
    assert "result   parted at event " in result.out
    path.write_text("seed: [")
    assert "cannot be read" in replay("run=run").complaint


@pytest.fixture
def own_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module of the user's, in the working directory."""
    path = Path("my_own_model.py")
    path.write_text("from tests.cli.tiny import TinyModule\nclass Mine(TinyModule): ...\n")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    yield path
    sys.modules.pop("my_own_model", None)


def test_changed_code_is_named_by_its_file(
    command: Command, replay: Replay, own_module: Path
) -> None:
    mine = [x.replace("tests.cli.tiny.TinyModule", "my_own_model.Mine") for x in TWO]
    assert command(*mine, "strategy=hybrid").code == 0
    own_module.write_text(own_module.read_text() + "# another line\n")
    assert "code: my_own_model.py has changed" in replay("run=run").complaint
    own_module.unlink()
    assert "code: my_own_model.py is not there" in replay("run=run").complaint


# ---- another policy -----------------------------------------------------------------------------


def test_another_policy_is_tried_with_the_same_workers(command: Command, replay: Replay) -> None:
    slow = "model.sleep_s=0.002"
    assert command(*TWO, slow, "strategy=hybrid", "trainer.devices=3").code == 0
    before = contents(Path("run"))
    result = replay("run=run", "policy=backup", "policy.k=2")
    assert (result.code, result.err) == (0, "")
    lines = {line.split("  ")[0]: line.split()[-3:] for line in result.out.splitlines()}
    assert lines["updates"][:2] == ["8", "8"] and int(lines["updates"][2]) >= 12
    assert lines["train/loss"][0] == lines["train/loss"][1], "the same policy, the same bits"
    assert {"seconds of training", "samples/s", "waiting", "staleness", "dropped"} <= lines.keys()
    assert contents(Path("run")) == before
    assert replay("run=run", "strategy=async").code == 0


def test_what_cannot_be_simulated_is_refused(command: Command, replay: Replay) -> None:
    assert command(*TWO, "strategy=hybrid").code == 0
    assert "k=9 was given for 2 workers" in replay("run=run", "policy=backup", "policy.k=9").err
    assert "Lightning's own" in replay("run=run", "strategy=ddp").complaint
    assert "a time for each push" in replay("run=run", "strategy=local_sgd").complaint
    assert "known are" in replay("run=run", "strategy=nonsense").complaint
    assert "known are" in replay("run=run", "policy=nonsense").complaint
    assert "without policy=NAME" in replay("run=run", "policy.k=3").complaint


# ---- bad input ----------------------------------------------------------------------------------


def test_what_is_no_recorded_run_is_refused(command: Command, replay: Replay) -> None:
    assert "no run was given" in replay().complaint
    assert "did you mean run?" in replay("rum=x").complaint
    assert "must be true or false" in replay("run=x", "anyway=perhaps").complaint
    assert "there is no such directory" in replay("run=nowhere").complaint
    assert command(*TINY, "strategy=ddp", "trainer.devices=2", "hydra.run.dir=ddp").code == 0
    assert "no record in it" in replay("run=ddp").complaint
    assert "not under strategy=ddp" in replay("run=ddp").complaint
    unrecorded = ["hydra.run.dir=unrecorded", "strategy.record=null"]
    assert command(*TINY, *unrecorded).code == 0
    assert "strategy.record=null" in replay("run=unrecorded").complaint
    Path("junk.bin").write_bytes(b"junk" * 100)
    assert "no record of a run" in replay("run=junk.bin").complaint


def test_a_run_started_from_python_is_to_be_replayed_from_python(replay: Replay) -> None:
    fit(HybridStrategy("async", record="here"), 2, 4, max_epochs=1)
    assert "replay_fit(record, trainer, module" in replay("run=here").complaint


def test_help_comes_at_once(replay: Replay) -> None:
    result = replay("--help")
    assert result.code == 0 and "run=DIR" in result.out
