"""Runs on disk, to go on with: what they were told, how they ended, and their checkpoints.

What a run has left names the classes that are made when it goes on. So all of it is read at once,
by :class:`hybridtrain.util.own_directory.OwnDirectory`, which refuses what another user can have
written. Checkpoints are data.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf

import hybridtrain
from hybridtrain.cli.config_values import placed, portable
from hybridtrain.cli.validation.host_checks import check_files, check_name
from hybridtrain.engine.monitoring.watchdog import to_stderr
from hybridtrain.errors import UserError
from hybridtrain.report.runs import (
    CONFIG_FILE,
    HYDRA_FILE,
    OVERRIDES_FILE,
    SUMMARY_FILE,
    key_of,
    mapping_in,
    read_mapping,
    yaml_in,
)
from hybridtrain.util.files import fault_of, interrupted_in, read_text, write_whole
from hybridtrain.util.own_directory import Foreign, OwnDirectory, check_below, stranger_to

RUN_FILE = "run.json"
FORMAT = 1  # of the files in a run's directory
KEPT = ("hydra.job.chdir", "hydra.job.name")  # Hydra's options that go on: what paths, logs are
_GROUPS = ("model", "data", "optimizer", "strategy", "trainer", "callbacks", "task")
_FILES = (CONFIG_FILE, OVERRIDES_FILE, HYDRA_FILE, RUN_FILE, SUMMARY_FILE)
_ENVIRONMENT = ("hydra.job.env_set.", "hydra.job.env_copy")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FormerRun:
    """The files that a run has left in its directory: their texts by name."""

    directory: Path
    texts: Mapping[str, str]

    @classmethod
    def read(cls, directory: Path, asked: str) -> FormerRun:
        """Read a run that is to go on.

        Args:
            directory: of the run; another directory has none of these files.
            asked: the user's option, for messages.

        Raises:
            Foreign: if another user can have written one of them.
            UserError: if one of them cannot be read.
        """
        if not directory.is_dir():
            return cls(directory, {})
        with OwnDirectory(directory, asked) as opened:
            found = {name: opened.text(name) for name in _FILES}
        return cls(directory, {name: text for name, text in found.items() if text is not None})

    @classmethod
    def under_way(cls, directory: Path) -> FormerRun:
        """Read the run of this process, wherever it writes. Raises UserError."""
        there = [name for name in _FILES if os.path.lexists(directory / name)]
        return cls(directory, {name: read_text(directory / name, "the run's") for name in there})

    def check(self, asked: str) -> None:
        """Check that this is a run, in a format that this version reads. Raises UserError."""
        if not {CONFIG_FILE, OVERRIDES_FILE} <= self.texts.keys():
            is_folder = self.directory.is_dir()
            below = sorted(str(x) for x in runs_below(self.directory))[:3] if is_folder else []
            hint = f"; there are runs below it: {', '.join(below)}" if below else ""
            raise UserError(
                f"{asked}: this is not the directory of a run (it has no {CONFIG_FILE})"
                f"{hint}; give one that a run has written to, such as outputs/DATE/TIME-ID"
            )
        check_name(self.directory, f"{asked}: the directory")
        check_files(self.directory)
        made = self._mapping(RUN_FILE)
        if isinstance(made.get("format"), int) and made["format"] > FORMAT:
            raise UserError(
                f"{asked}: this run was made by hybridtrain {made.get('hybridtrain', '?')} "
                f"(format {made['format']}), and this is {hybridtrain.__version__}, which reads up "
                f"to format {FORMAT}; update hybridtrain"
            )

    def _mapping(self, name: str) -> dict[str, Any]:
        return mapping_in(self.texts.get(name, "{}")) or {}

    def _yaml(self, name: str) -> Any:
        return yaml_in(self.texts.get(name, ""), self.directory / name)

    @property
    def summary(self) -> dict[str, Any]:
        """``summary.json``; empty: there is none, or it is damaged."""
        return self._mapping(SUMMARY_FILE)

    @property
    def has_finished(self) -> bool:
        """Whether the run ended with exit status 0."""
        return self.summary.get("exit") == 0

    @property
    def plain_config(self) -> Any:
        """``config.yaml`` as plain values, unresolved. Raises UserError if it is damaged."""
        return self._yaml(CONFIG_FILE)

    @property
    def overrides(self) -> list[Any]:
        """The overrides that the run was started with. Raises UserError if there is no list."""
        content = self._yaml(OVERRIDES_FILE)
        if not isinstance(content, list):
            raise self.damaged(OVERRIDES_FILE, "it is no list of options")
        return content

    def damaged(self, name: str, why: str) -> UserError:
        """The error for a file of this run."""
        return UserError(
            f"{self.directory / name} is damaged: {why}; restore it, or begin a new run"
        )

    def configuration(self) -> dict[str, Any]:
        """The run's configuration, as :func:`portable` has it.

        Raises:
            UserError: if it cannot be read, or lacks a group.
        """
        content = self.plain_config
        try:
            found = comparable(OmegaConf.create(content))
        except Exception as error:  # no mapping; OmegaConf's, of what cannot be resolved
            raise UserError(
                f"{self.directory / CONFIG_FILE} is damaged and cannot be read "
                f"({type(error).__name__}); restore it, or begin a new run"
            ) from error
        missing = [group for group in _GROUPS if not isinstance(found.get(group), dict)]
        if missing:
            raise self.damaged(CONFIG_FILE, f"it lacks {', '.join(missing)}")
        return found

    def config_dirs(self) -> list[Path]:
        """The folder of --config-dir that the run was started with, if any. Raises UserError."""
        try:
            content = self._yaml(HYDRA_FILE) if HYDRA_FILE in self.texts else None
            sources = content["hydra"]["runtime"]["config_sources"] if content else []
            return [Path(each["path"]) for each in sources if each["provider"] == "command-line"]
        except (TypeError, KeyError) as error:
            raise self.damaged(HYDRA_FILE, "it has no sources of the configuration") from error

    def hydra_options(self) -> list[str]:
        """The options of Hydra's that the run was started with. Raises UserError."""
        try:
            content = self._yaml(HYDRA_FILE) if HYDRA_FILE in self.texts else None
            return list(map(str, content["hydra"]["overrides"]["hydra"] if content else []))
        except (TypeError, KeyError) as error:
            raise self.damaged(HYDRA_FILE, "it has no options of Hydra's") from error

    # ---- its checkpoints ------------------------------------------------------------------------

    def left_by_others(self) -> dict[str, Any]:
        """The times in ns of the checkpoints that the run found there, by their paths."""
        return _left_by_others(self.directory, self._mapping(RUN_FILE))

    def folders(self) -> set[Path]:
        """Where its callbacks keep checkpoints. Raises UserError if that is not known."""
        directory = self.directory.absolute()
        known = self.configuration() if CONFIG_FILE in self.texts else {}
        nodes = placed(known, directory).get("callbacks") or {}
        given = [str(x["dirpath"]) for x in nodes.values() if x and x.get("dirpath")]
        for own in ("${hydra:runtime.output_dir}", "${hydra:run.dir}"):
            given = [text.replace(own, str(directory)) for text in given]
        if unknown := [text for text in given if "${" in text]:
            raise UserError(
                f"{self.directory / CONFIG_FILE}: dirpath={unknown[0]} of a callback cannot be "
                "resolved outside of the run; name the checkpoint with ckpt=PATH"
            )
        return {*map(Path, given), directory / "checkpoints"}

    def newest(self) -> Path | None:
        """The newest whole checkpoint in the directories of the run's callbacks."""
        return newest(self.folders(), self.left_by_others(), stranger_to)

    def newest_of_any_run(self) -> Path | None:
        """The same, though an earlier run has left it there."""
        return newest(self.folders(), judge=stranger_to)

    def newest_in_usual_place(self) -> Path | None:
        """The newest whole checkpoint in ``checkpoints``, whatever the configuration says."""
        return newest([self.directory / "checkpoints"], self.left_by_others(), stranger_to)


def sign(directory: Path, goes_on: bool) -> None:
    """Write the version and format into a run's directory, and what another run has left there.

    ``goes_on``: the run has been begun before; else all checkpoints there are another run's.
    """
    run = FormerRun.under_way(directory)
    former = run.left_by_others()
    if not goes_on:
        found = _checkpoints(run.folders())
        home = os.path.realpath(directory)
        former = {os.path.relpath(path, home): path.stat().st_mtime_ns for path in found}
    said = {"format": FORMAT, "hybridtrain": hybridtrain.__version__, "former": former}
    write_whole(directory / RUN_FILE, json.dumps(said).encode() + b"\n")


def comparable(cfg: DictConfig) -> dict[str, Any]:
    """As :func:`portable` has it, but with ``${hydra:…}``, which only a run itself can resolve."""
    return portable(OmegaConf.create(placed(OmegaConf.to_container(cfg), r"\${hydra:", "${hydra:")))


def without_environment(options: Iterable[str], asked: str) -> list[str]:
    """Options of a former run less those that set variables, which choose code (``PYTHONPATH``)."""
    options = list(options)
    dropped = [text for text in options if key_of(text).startswith(_ENVIRONMENT)]
    if dropped:
        to_stderr(
            f"{asked}: variables are not taken from its files: give {', '.join(dropped)} again"
        )
    return [text for text in options if text not in dropped]


def own_folders(folders: Sequence[Path], asked: str) -> list[Path]:
    """The folders of --config-dir that a run or sweep was started with; they name code, too.

    Raises:
        Foreign: if another user can have written a configuration in them.
        UserError: if one is gone.
    """
    for each in folders:
        if not os.path.isdir(each):  # noqa: PTH112  (raises nothing)
            raise UserError(f"{asked}: {each} is gone; give --config-dir FOLDER")
        check_below(each, f"{asked}: --config-dir", ".yaml")
    return [*folders]


# ---- below an output directory ------------------------------------------------------------------


def runs_below(root: Path, name: str = CONFIG_FILE) -> Iterator[Path]:
    """Directories of runs in and below ``root`` (which have this file), the latest first."""
    found: list[tuple[int, Path]] = []
    for folder, below, _ in os.walk(root):
        time_ns = 0
        try:
            status = (Path(folder) / name).stat()
            is_run, time_ns = stat.S_ISREG(status.st_mode), status.st_mtime_ns
        except PermissionError:  # closed by its owner, whom its reader will name
            is_run = True
        except OSError:
            is_run = False
        if is_run:
            below.clear()
            found.append((time_ns, Path(folder)))
    return (path for _, path in sorted(found, reverse=True))


def own_below(
    root: Path, asked: str, read: Callable[[Path, str], T], name: str = CONFIG_FILE
) -> Iterator[T]:
    """Yield what ``read`` returns for runs or sweeps below ``root``, the latest first.

    Those that cannot be read are passed over. So are other users', which are counted in one line.
    """
    foreign: list[Foreign] = []
    try:
        for directory in runs_below(root, name):
            try:
                found = read(directory, asked)
            except Foreign as error:
                foreign.append(error)
                continue
            except UserError:  # damaged, or gone
                continue
            yield found
    finally:
        if foreign:
            first = str(foreign[0]).removeprefix(f"{asked}: ").partition(", and names")[0]
            to_stderr(
                f"{asked}: passes over {len(foreign)} below {root} that other users can have "
                f"written: {first}"
            )


# ---- checkpoints --------------------------------------------------------------------------------


def newest_in(directory: Path) -> Path | None:
    """The newest whole checkpoint in the usual place of the run of this process."""
    made = read_mapping(directory / RUN_FILE, [])
    return newest([directory / "checkpoints"], _left_by_others(directory, made))


def _left_by_others(directory: Path, made: Mapping[str, Any]) -> dict[str, Any]:
    found = made.get("former")
    known = found if isinstance(found, dict) else {}
    return {os.path.realpath(directory / name): time_ns for name, time_ns in known.items()}


def _checkpoints(folders: Iterable[Path]) -> set[Path]:
    found = {
        Path(os.path.realpath(path))  # which raises nothing for a link to itself
        for folder in folders
        for path in (*folder.glob("*.ckpt"), interrupted_in(folder))
    }
    return {path for path in found if os.path.isfile(path)}  # noqa: PTH113  (raises nothing)


def newest(
    folders: Iterable[Path],
    former: Mapping[str, int] | None = None,
    judge: Callable[[Path], str | None] = lambda path: None,
) -> Path | None:
    """The newest whole checkpoint; newer ones that are damaged are named on standard error.

    Args:
        folders: to look in.
        former: files of another run, by their paths, with their times of change in ns.
        judge: says why a file is not to be taken.
    """
    times = [(path.stat().st_mtime_ns, path) for path in _checkpoints(folders)]
    for time_ns, path in sorted(times, reverse=True):
        if former and former.get(str(path)) == time_ns:
            to_stderr(f"the checkpoint {path} is passed over: an earlier run has left it there")
            continue
        fault = judge(path) or fault_of(path)
        if fault is None:
            return path
        to_stderr(f"the checkpoint {path} is passed over: {fault}")
    return None
