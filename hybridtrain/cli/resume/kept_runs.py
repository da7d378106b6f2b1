"""What runs have left: their directories, whether they have finished, their newest checkpoint.

Nothing heavy is imported: these questions are asked before anything begins.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

import hybridtrain
from hybridtrain.cli.resume.config_values import placed, portable
from hybridtrain.cli.validation.owner_checks import check_owner
from hybridtrain.errors import UserError
from hybridtrain.util.files import fault_of, interrupted_in
from hybridtrain.util.input_files import read_text

RUN_FILE, SUMMARY_FILE = "run.json", "summary.json"
FORMAT = 1  # of what lies in a run's directory
CONFIG = Path(".hydra") / "config.yaml"
OVERRIDES = Path(".hydra") / "overrides.yaml"


def sign(directory: Path) -> None:
    """Say which version has made a run's directory."""
    said = {"format": FORMAT, "hybridtrain": hybridtrain.__version__}
    (directory / RUN_FILE).write_text(json.dumps(said) + "\n")


def check_run(directory: Path) -> None:
    """It is a run's directory, and one that this version understands.

    Raises:
        UserError: if not.
    """
    if not (directory / CONFIG).is_file() or not (directory / OVERRIDES).is_file():
        below = sorted(str(x) for x in runs_below(directory))[:3] if directory.is_dir() else []
        hint = f"; there are runs below it: {', '.join(below)}" if below else ""
        raise UserError(
            f"resume={directory}: this is not the directory of a run (it has no {CONFIG}){hint}; "
            "give one that a run has written to, such as outputs/DATE/TIME-ID"
        )
    for name in (CONFIG, OVERRIDES):
        check_owner(directory / name, f"resume={directory}")
    made = _read(directory / RUN_FILE)
    if made.get("format", FORMAT) > FORMAT:
        raise UserError(
            f"resume={directory}: this run was made by hybridtrain {made.get('hybridtrain')} "
            f"(format {made['format']}), and this is {hybridtrain.__version__}, which reads up to "
            f"format {FORMAT}; update hybridtrain"
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_text(path, "the file"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def has_finished(directory: Path) -> bool:
    """Whether the run came to its own end."""
    return _read(directory / SUMMARY_FILE).get("exit") == 0


def runs_below(root: Path) -> Iterator[Path]:
    """Directories of runs, ``root`` among them if it is one; those begun last come first."""
    found: list[tuple[int, Path]] = []
    for folder, below, _ in os.walk(root):
        config = Path(folder) / CONFIG
        if config.is_file():
            below.clear()
            found.append((config.stat().st_mtime_ns, Path(folder)))
    return (path for _, path in sorted(found, reverse=True))


def configuration(directory: Path) -> DictConfig:
    """The run's, as it was composed.

    Raises:
        UserError: if it cannot be read.
    """
    try:
        plain = OmegaConf.to_container(OmegaConf.load(directory / CONFIG), resolve=False)
        cfg = OmegaConf.create(plain)
        assert isinstance(cfg, DictConfig), "it is a mapping"
    except Exception as error:  # YAML's, OmegaConf's, the disk's
        raise UserError(
            f"{directory / CONFIG}: the run's configuration cannot be read ({type(error).__name__})"
        ) from error
    return cfg


# ---- checkpoints --------------------------------------------------------------------------------


def newest_of_run(directory: Path) -> Path | None:
    """The newest whole checkpoint of a run, wherever its callbacks keep them."""
    nodes = placed(portable(configuration(directory)), directory.absolute()).get("callbacks") or {}
    folders = {Path(x["dirpath"]) for x in nodes.values() if x and x.get("dirpath")}
    return newest({*folders, directory.absolute() / "checkpoints"})


def newest(folders: Iterable[Path]) -> Path | None:
    """The newest whole checkpoint; what is newer and torn is named on standard error."""
    found = {
        path.resolve()
        for folder in folders
        for path in (*folder.glob("*.ckpt"), interrupted_in(folder))
    }
    times = [(path.stat().st_mtime_ns, path) for path in found if path.is_file()]
    for _, path in sorted(times, reverse=True):
        fault = fault_of(path)
        if fault is None:
            return path
        text = f"hybridtrain: the checkpoint {path} is passed over: {fault}"
        print(text, file=sys.stderr, flush=True)
    return None
