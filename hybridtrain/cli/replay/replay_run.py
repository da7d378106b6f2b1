"""Repeating a run of the command line from its record."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hybridtrain.cli.explain import one_line
from hybridtrain.cli.quiet import hush, hush_lightning
from hybridtrain.cli.replay.record_header import hash_of_checkpoint
from hybridtrain.cli.resume.config_values import changed_keys, placed, portable
from hybridtrain.cli.run import Parts, build
from hybridtrain.cli.validation.owner_checks import check_owner
from hybridtrain.errors import UserError
from hybridtrain.lightning.replay.replay_fit import changed_code, changed_versions, replay_fit
from hybridtrain.lightning.run_context import context_of
from hybridtrain.lightning_package import own_name, with_present_targets
from hybridtrain.recording import Record
from hybridtrain.recording.replayer import Replayed
from hybridtrain.worlds.local.cleanup import vanishing_directory

GO_ON = "to replay it nevertheless, say anyway=true"


def replay(record: Record, anyway: bool) -> Replayed:
    """Do the recorded run again, in a directory that is removed afterwards.

    Raises:
        UserError: if its code, data or configuration is not what it was, naming what.
    """
    with workplace(record) as folder:
        check_same(record, anyway)
        parts = rebuilt(record, folder, anyway)
        return replay_fit(
            record, parts.trainer, parts.module, anyway=True, **fitting(record, parts)
        )


def fitting(record: Record, parts: Parts) -> dict[str, Any]:
    """What was given to ``fit`` beside the module."""
    options: dict[str, Any] = {} if parts.data is None else {"datamodule": parts.data}
    if ckpt := about(record)["config"]["ckpt"]:
        options |= {"ckpt_path": ckpt, "weights_only": True}
    return options


@contextmanager
def workplace(record: Record) -> Iterator[Path]:
    """A directory in the place of the run's own."""
    told = about(record)
    hush()
    hush_lightning()
    talkative = logging.getLogger(own_name("pytorch_lightning"))
    former = talkative.level
    talkative.setLevel(logging.WARNING)
    try:
        with vanishing_directory("hybridtrain-replay-") as folder:
            for name in told["checkpoints"]:  # callbacks choose names that are not taken yet
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).touch()
            yield folder
    finally:
        talkative.setLevel(former)


def about(record: Record) -> dict[str, Any]:
    """What the command line has told the record.

    Raises:
        UserError: if it was not the command line that made it.
    """
    told: dict[str, Any] = record.header["about"]
    if "config" not in told:
        raise UserError(
            f"{record.path}: this run was started from Python, so the record does not know how to "
            "make its trainer and module; make them as the script does and call "
            "hybridtrain.lightning.replay.replay_fit.replay_fit(record, trainer, module, ...)"
        )
    return told


def rebuilt(
    record: Record,
    folder: Path,
    anyway: bool = False,
    change: Callable[[DictConfig], None] = lambda cfg: None,
) -> Parts:
    """Trainer, module and data as the run had them, before it began; they write to ``folder``."""
    check_owner(record.path, "replay")
    told = about(record)
    content = told["config"]
    if anyway and (edited := _edited(told)) is not None:
        content = edited
    mute = {"_target_": "hybridtrain.cli.telemetry.mute_logger.Mute", "save_dir": str(folder)}
    try:
        cfg: DictConfig = OmegaConf.create(with_present_targets(placed(content, folder)))
        cfg.trainer.enable_progress_bar = False
        cfg.strategy.record, cfg.profile = None, False
        cfg.logger = {name: mute for name, node in (cfg.logger or {}).items() if node is not None}
        change(cfg)
        parts = build(cfg, [], told["drawn_seed"])
        context = context_of(parts.trainer)
    except UserError:
        raise
    except Exception as error:  # of whatever the record says is to be made
        raise UserError(
            f"{record.path}: the configuration in this record makes no run: {one_line(error)}"
        ) from error
    load = context.load_checkpoint
    vars(context)["load_checkpoint"] = Elsewhere(load, told["run_dir"], str(folder))
    return parts


@dataclass(frozen=True)
class Elsewhere:
    """Loads a checkpoint for a run in another directory.

    Callbacks that go on in the directory where they had begun know the files that they have written
    there, and delete them when they find better ones: in a replay these are others.
    """

    load: Callable[..., dict[str, Any]]
    run_dir: str
    folder: str

    def __call__(self, *args: Any, **options: Any) -> dict[str, Any]:
        checkpoint = self.load(*args, **options)
        return {**checkpoint, "callbacks": self._moved(checkpoint.get("callbacks", {}))}

    def _moved(self, value: Any) -> Any:
        match value:
            case dict():
                return {self._moved(key): self._moved(each) for key, each in value.items()}
            case list():
                return [self._moved(each) for each in value]
            case str() if value.startswith(self.run_dir):
                return self.folder + value.removeprefix(self.run_dir)
        return value


# ---- is it still the same? ----------------------------------------------------------------------


def check_same(record: Record, anyway: bool = False) -> None:
    """Refuse what is not as it was, unless it is to be done anyway.

    Raises:
        UserError: naming what, and how to go on.
    """
    found = differences(record)
    if found and not anyway:
        raise UserError(f"{'; '.join(found)}; {GO_ON}")


def differences(record: Record) -> list[str]:
    """What is not as it was: code, versions, configuration, the checkpoint to go on from."""
    return [*changed_code(record), *changed_versions(record), *_changed_inputs(about(record))]


def _changed_inputs(told: Mapping[str, Any]) -> Iterator[str]:
    if (edited := _edited(told)) is not None:
        for key, before, now in changed_keys(told["config"], edited):
            yield f"configuration: {key}={now} in .hydra/config.yaml, {before} in the run"
    if ckpt := told["config"]["ckpt"]:
        now = hash_of_checkpoint(Path(ckpt))
        if now != told.get("ckpt"):
            yield f"checkpoint: {ckpt} {'has changed' if now else 'is not there'}"


def _edited(told: Mapping[str, Any]) -> dict[str, Any] | None:
    """The configuration as it lies in the run's directory now, if it does."""
    path = Path(told["run_dir"]) / ".hydra" / "config.yaml"
    if not path.is_file():
        return None
    check_owner(path, "replay")
    try:
        cfg = OmegaConf.load(path)
        assert isinstance(cfg, DictConfig), "it is a mapping"
        return portable(cfg)
    except Exception as error:  # YAML's, OmegaConf's
        raise UserError(f"configuration: {path} cannot be read ({type(error).__name__})") from error
