"""Repeating a run of the command line from its record."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hybridtrain.app.quiet import hush, hush_lightning
from hybridtrain.app.recorded import hash_of_checkpoint, placed, portable
from hybridtrain.app.run import Parts, build
from hybridtrain.errors import UserError
from hybridtrain.lightning.rerun import changed_code, changed_versions, replay_fit
from hybridtrain.recording import Record
from hybridtrain.recording.player import Replayed

GO_ON = "to replay it nevertheless, say anyway=true"


def replay(record: Record, anyway: bool) -> Replayed:
    """Do the recorded run again, in a directory that is removed afterwards.

    Raises:
        UserError: if its code, data or configuration is not what it was, naming what.
    """
    with workplace(record) as folder:
        found = differences(record)
        if found and not anyway:
            raise UserError(f"{'; '.join(found)}; {GO_ON}")
        parts = rebuilt(record, folder, anyway)
        options: dict[str, Any] = {} if parts.data is None else {"datamodule": parts.data}
        if ckpt := about(record)["config"]["ckpt"]:
            options |= {"ckpt_path": ckpt, "weights_only": True}
        return replay_fit(record, parts.trainer, parts.module, anyway=True, **options)


@contextmanager
def workplace(record: Record) -> Iterator[Path]:
    """A directory in the place of the run's own."""
    about(record)
    hush()
    hush_lightning()
    with tempfile.TemporaryDirectory(prefix="hybridtrain-replay-") as folder:
        yield Path(folder)


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
            "hybridtrain.lightning.rerun.replay_fit(record, trainer, module, ...)"
        )
    return told


def rebuilt(record: Record, folder: Path, anyway: bool = False) -> Parts:
    """Trainer, module and data as the run had them, before it began; they write to ``folder``."""
    told = about(record)
    content = told["config"]
    if anyway and (edited := _edited(told)) is not None:
        content = edited
    cfg: DictConfig = OmegaConf.create(placed(content, folder))
    cfg.trainer.enable_progress_bar = False
    cfg.strategy.record = None
    mute = {"_target_": "hybridtrain.app.mute.Mute", "save_dir": str(folder)}
    cfg.logger = {name: mute for name, node in (cfg.logger or {}).items() if node is not None}
    return build(cfg, [], told.get("drawn_seed"))


# ---- is it still the same? ----------------------------------------------------------------------


def differences(record: Record) -> list[str]:
    """What is not as it was: code, versions, configuration, the checkpoint to go on from."""
    return [*changed_code(record), *changed_versions(record), *_changed_inputs(about(record))]


def _changed_inputs(told: Mapping[str, Any]) -> Iterator[str]:
    if (edited := _edited(told)) is not None:
        for key, before, now in _changed_keys(told["config"], edited):
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
    try:
        cfg = OmegaConf.load(path)
        assert isinstance(cfg, DictConfig), "it is a mapping"
        return portable(cfg)
    except Exception as error:  # YAML's, OmegaConf's
        raise UserError(f"configuration: {path} cannot be read ({type(error).__name__})") from error


def _changed_keys(then: Any, now: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(then, dict) and isinstance(now, dict):
        for key in sorted({*then, *now}):
            inner = f"{path}.{key}" if path else str(key)
            yield from _changed_keys(then.get(key), now.get(key), inner)
    elif then != now:
        yield path, then, now
