"""Runs of earlier versions name classes by where they lay then; they can still be resumed."""

from __future__ import annotations

import pkgutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hybridtrain.cli.former_names import present_name, with_present_names
from hybridtrain.cli.resume import kept_runs
from hybridtrain.cli.validation.target_checks import check_targets
from hybridtrain.errors import UserError

# As the configurations of version 0.1.0 had them before the modules were moved.
FORMER = (
    "hybridtrain.app.claim.Claiming",
    "hybridtrain.app.ddp.lightning_ddp",
    "hybridtrain.app.monitor.RunMonitor",
    "hybridtrain.app.mute.Mute",
    "hybridtrain.app.progress.progress_bar",
    "hybridtrain.app.straggler.Straggler",
    "hybridtrain.lightning.periodic.PeriodicCheckpoint",
    "hybridtrain.HybridStrategy",
    "hybridtrain.tasks.digits.DigitsData",
    "hybridtrain.tasks.digits.DigitsModule",
    "hybridtrain.tasks.parabola.ParabolaData",
    "hybridtrain.tasks.parabola.ParabolaModule",
    "hybridtrain.tasks.speech.augment.Augment",
    "hybridtrain.tasks.speech.datamodule.csv",
    "hybridtrain.tasks.speech.datamodule.fsdd",
    "hybridtrain.tasks.speech.datamodule.librispeech",
    "hybridtrain.tasks.speech.datamodule.spoken_digits",
    "hybridtrain.tasks.speech.features.Features",
    "hybridtrain.tasks.speech.module.SpeechModule",
    "hybridtrain.tasks.speech.schedule.rise_and_fall",
)


@pytest.mark.parametrize("name", FORMER)
def test_what_an_older_configuration_names_is_found(name: str) -> None:
    assert callable(pkgutil.resolve_name(present_name(name)))


def test_the_configuration_of_an_older_run_has_present_names(tmp_path: Path) -> None:
    old = {"callbacks": {"monitor": {"_target_": FORMER[2], "every": "${x}"}, "none": None}, "x": 3}
    path = tmp_path / kept_runs.CONFIG
    path.parent.mkdir()
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(old)))
    found = kept_runs.configuration(tmp_path)
    assert found.callbacks.monitor == {"_target_": present_name(FORMER[2]), "every": 3}
    assert found.callbacks.none is None


def test_overrides_of_an_older_run_have_present_names() -> None:
    overrides = [f"+callbacks.slow._target_={FORMER[5]}", "trainer.devices=2"]
    present = [f"+callbacks.slow._target_={present_name(FORMER[5])}", "trainer.devices=2"]
    assert with_present_names(overrides) == present


def test_options_that_are_no_more_are_left_out_of_an_older_run() -> None:
    assert with_present_names({"strategy": {"overlap_update": False, "lead": 2}}) == {
        "strategy": {"lead": 2}
    }
    kept = ["overlap_update=1", "model.overlap_update=2", "seed=1"]  # of a user's own
    assert with_present_names(["strategy.overlap_update=true", *kept]) == kept
    assert with_present_names({"model": {"overlap_update": 2}}) == {"model": {"overlap_update": 2}}


def test_a_former_name_that_is_typed_is_told_its_present_one() -> None:
    cfg = OmegaConf.create({"callbacks": {"slow": {"_target_": FORMER[5]}}})
    with pytest.raises(UserError, match=r"is called hybridtrain\.cli\.straggler\.Straggler"):
        check_targets(cfg)
