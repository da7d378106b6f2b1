"""``resume=auto`` and ``resume=DIR`` of a sweep: its finished jobs are kept, the others go on.

A sweep writes ``sweep.json`` into its directory before its first job, and changes it only where it
is made longer, and for ``finished`` at its end: so a kill or a full disk leaves it whole. How far a
job has come is what ``resume=`` of a single run goes by: its own ``summary.json`` and checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hybridtrain.cli import config_values, hydra_config
from hybridtrain.cli.claim import attempt, claim, release
from hybridtrain.cli.config_values import ABSENT, changed_keys, quoted
from hybridtrain.cli.exit_status import CommandOutcome
from hybridtrain.cli.former_run import (
    FORMAT,
    FormerRun,
    own_below,
    own_folders,
    without_environment,
)
from hybridtrain.cli.resume import (
    ASIDE,
    AUTO,
    LAST,
    output_root,
    shown_differences,
    typed_values,
)
from hybridtrain.cli.resume import expanded as expanded_run
from hybridtrain.errors import UserError
from hybridtrain.report.runs import CONFIG_FILE, key_of, mapping_in, read_mapping
from hybridtrain.util.files import short, write_whole
from hybridtrain.util.option_types import is_number, misfit
from hybridtrain.util.own_directory import Foreign, OwnDirectory

SWEEP_FILE = "sweep.json"
_SEARCH = ("hydra/sweeper", "hydra.sweeper")
_LENGTHS = ("hydra.sweeper.n_trials", "seeds")  # a search, a comparison may be made longer
_CONTENT = {
    **{key: [str] for key in ("overrides", "hydra", "config_dirs")},
    "finished": bool,
    "format": int,
}
_RESUMING = ("resume", "resume_override")
_PLACES = ("hydra.mode", "hydra.sweep.dir", "hydra.run.dir")


@dataclass(frozen=True, slots=True)
class Sweep:
    """``sweep.json``: the options of the command, and whether all jobs have finished."""

    overrides: list[str] = field(default_factory=list)
    hydra: list[str] = field(default_factory=list)
    config_dirs: list[str] = field(default_factory=list)
    finished: bool = False
    format: int = FORMAT

    def by_key(self) -> dict[str, str]:
        """All options by their key, without those that name directories."""
        return {k: x for x in (*self.overrides, *self.hydra) if (k := key_of(x)) not in _PLACES}

    def lengthened(self, lengths: dict[str, str]) -> Sweep:
        """The same, unfinished, with these options by their key."""
        own, hydra = ({key_of(x): x for x in each} for each in (self.overrides, self.hydra))
        for key, text in lengths.items():
            (hydra if key.startswith("hydra.") else own)[key] = text
        return replace(self, overrides=[*own.values()], hydra=[*hydra.values()], finished=False)


def read(directory: Path, asked: str) -> Sweep:
    """Read a sweep that is to go on: it names classes, and folders with configurations.

    Args:
        directory: of the sweep.
        asked: the user's option, for messages.

    Raises:
        Foreign: if another user can have written it.
        UserError: if this is no directory of a sweep, or a newer version's.
    """
    content: dict[str, Any] = {}
    if directory.is_dir():
        with OwnDirectory(directory, asked) as opened:
            content = mapping_in(opened.text(SWEEP_FILE) or "") or {}
    found = _sweep_of(content)
    if found.format > FORMAT or not found.by_key():
        raise UserError(
            f"{asked}: this is not the directory of a sweep that this version can go on "
            f"with (it has no whole {SWEEP_FILE}); give one such as multirun/DATE/TIME-ID, or a "
            "job's without --multirun"
        )
    return found


def _sweep_of(content: dict[str, Any]) -> Sweep:
    """An empty one if the content does not fit."""
    fits = bool(content) and misfit(content, _CONTENT, SWEEP_FILE) is None
    return Sweep(**{key: content[key] for key in _CONTENT}) if fits else Sweep()


def sign(directory: Path, config: DictConfig) -> None:
    """Write ``sweep.json``; of a sweep that goes on, only how long it is now. Raises UserError."""
    given: Any = OmegaConf.to_container(config.hydra.overrides, resolve=False)
    if config.get("resume") is not None:
        former = read(directory, f"resume={directory}")
        now = {key_of(x): x for x in (*given["task"], *given["hydra"]) if key_of(x) in _LENGTHS}
        if not now.items() <= former.by_key().items():
            _write(directory, former.lengthened(now))
        return
    folders = [str(each.absolute()) for each in hydra_config.MORE_DIRS]
    _write(directory, Sweep(given["task"], given["hydra"], folders))


def finish(directory: Path) -> None:
    """Note that there is nothing left to go on with, in the sweep of this process."""
    _write(directory, replace(_sweep_of(read_mapping(directory / SWEEP_FILE, [])), finished=True))


def _write(directory: Path, sweep: Sweep) -> None:
    path = directory / SWEEP_FILE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(sweep), indent=2).encode() + b"\n")
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}); choose another directory with "
            "hydra.sweep.dir=DIR"
        ) from None


# ---- which sweep --------------------------------------------------------------------------------


def expanded(overrides: Sequence[str]) -> list[str]:
    """Replace ``resume`` of a sweep by the options that it stands for. Raises UserError."""
    found = typed_values(overrides)
    if found is None or found[1].get("resume") is None:
        return expanded_run(overrides)
    typed, values = found
    text = typed.pop("resume")
    if "resume_override" in typed:
        raise UserError("resume_override: a sweep goes on only with the options that it had")
    if config_values.parse([text])[0].is_sweep_override():
        raise UserError(f"{text}: only one sweep, or one run at a time, can go on")
    if values["resume"] != AUTO:
        directory = Path(str(values["resume"]))
        former = read(directory, f"resume={directory}")
        known = former.by_key()
        if other := [x for key, x in _choosing(typed).items() if known.get(key) != x]:
            raise UserError(
                f"resume={directory}: this sweep had other options: {', '.join(other[:5])}; leave "
                "them out to go on as it was"
            )
        _check_length(typed, known)
        if former.finished and typed.keys().isdisjoint(_LENGTHS):
            raise UserError(f"resume={directory}: all jobs of this sweep have finished")
        claim(directory, f"resume={directory}", "end that sweep first, or wait")
        return _going_on(directory, former, typed)
    return _automatic(typed, values)


def _automatic(typed: dict[str, str], values: dict[str, Any]) -> list[str]:
    """Go on with the last unfinished sweep of the same jobs, or begin a new one."""
    root, asked = output_root(values, "sweep"), "resume=auto"

    def each(directory: Path, asked: str) -> tuple[Path, Sweep]:
        return directory, read(directory, asked)

    for directory, former in own_below(root, asked, each, SWEEP_FILE):
        known = former.by_key()
        # ckpt=last: it began with what was the last one then.
        chosen = typed | ({"ckpt": known.get("ckpt", "")} if values.get("ckpt") == LAST else {})
        if former.finished or _choosing(known) != _choosing(chosen):
            continue
        try:
            if attempt(directory, asked) is not None:
                continue
            finished = read(directory, asked).finished  # again, now that it is claimed
        except UserError:
            continue  # read-only, or gone
        if not finished:
            return _going_on(directory, former, chosen)
        release(directory)
    print(f"resume=auto: no unfinished sweep of these jobs in {root}; a new one begins", flush=True)
    return expanded_run(list(typed.values()))


def _check_length(typed: dict[str, str], known: dict[str, str]) -> None:
    """Raises UserError if the sweep is to be shorter than it was."""
    for key in _LENGTHS:
        now, before = (x.get(key, "").partition("=")[2] for x in (typed, known))
        if now.isdecimal() and before.isdecimal() and int(now) < int(before):
            raise UserError(
                f"{typed[key]}: this sweep has {known[key]}, and can only be made longer"
            )


def _choosing(options: dict[str, str]) -> dict[str, str]:
    """The options that decide which jobs there are."""
    return {
        key.lstrip("+~"): text
        for key, text in options.items()
        if key not in (*_RESUMING, *_PLACES, *_LENGTHS)
        and (not key.startswith("hydra") or key.startswith(_SEARCH))
    }


def _going_on(directory: Path, former: Sweep, typed: dict[str, str]) -> list[str]:
    hydra_config.MORE_DIRS[:] = hydra_config.MORE_DIRS or own_folders(
        [Path(x) for x in former.config_dirs], f"resume={directory}"
    )
    print(f"the sweep in {directory} goes on", flush=True)
    known, now = former.by_key(), {key.lstrip("+~"): text for key, text in typed.items()}
    own = without_environment(
        (text for key, text in known.items() if key not in now), f"resume={directory}"
    )
    options = {key: x for key, x in (known | now).items() if key in now or x in own}
    kept = [text for key, text in options.items() if key not in (*_RESUMING, *_PLACES)]
    return [*kept, quoted("resume", directory), quoted("hydra.sweep.dir", directory)]


# ---- its jobs -----------------------------------------------------------------------------------


def kept(directory: Path, cfg: DictConfig) -> CommandOutcome | None:
    """The outcome of a job that has finished before; None: it has not.

    Raises:
        UserError: if the job was configured otherwise, for example by another version of a file.
    """
    run = FormerRun.read(directory, "resume")
    _check_same(run, cfg)
    if not run.has_finished:
        return None
    metrics = run.summary.get("metrics", {})
    metric = metrics.get(cfg.task.metric) if isinstance(metrics, dict) else None
    return CommandOutcome(metric=metric if is_number(metric) else None, directory=short(directory))


def _check_same(run: FormerRun, cfg: DictConfig) -> None:
    try:
        then = run.plain_config
    except UserError:  # it was killed or had no room while it began
        return
    if CONFIG_FILE not in run.texts:  # it has not begun
        return
    now = OmegaConf.to_container(cfg, resolve=False)
    found = [
        (key, before, after)
        for key, before, after in changed_keys(then, now)
        if before is not ABSENT and not any(key == x or key.startswith(f"{x}.") for x in ASIDE)
    ]
    if found:
        raise UserError(
            f"resume: the job in {run.directory} had another configuration: "
            f"{shown_differences(found)}; begin another sweep"
        )


def going_on(directory: Path) -> list[str]:
    """Overrides with which the job continues, or begins if it has not yet.

    Raises:
        Foreign: if another user can have written its directory.
    """
    try:
        run = FormerRun.read(directory, f"resume={directory}")
    except Foreign:
        raise
    except UserError:  # no file, or no text
        run = FormerRun(directory, {})
    if CONFIG_FILE not in run.texts:
        return ["resume=null"]
    try:
        path = run.newest()
    except UserError:  # its configuration is damaged, or has values that only the job knows
        path = run.newest_in_usual_place()
    name = path.name if path else "its beginning"
    print(f"{directory} goes on from {name}", flush=True)
    own = [] if path is None else [quoted("ckpt", path)]
    own += ["strategy.faults=null"] if _has_own_faults(run) else []
    return [quoted("resume", directory), "faults=null", *own]  # what went wrong has been tried


def _has_own_faults(run: FormerRun) -> bool:
    try:
        strategy = run.plain_config["strategy"]
        return isinstance(strategy["faults"], list)  # else ${faults}, or Lightning's have no such
    except (UserError, LookupError, TypeError):
        return False
