"""``resume=...`` and ``ckpt=last``: find an earlier run, and the overrides that continue it.

A resumed run is the same command in the same directory, from the newest whole checkpoint. So
``resume=DIR`` stands for the overrides that the run in DIR was started with, for ``hydra.run.dir``
and for ``ckpt``. Overrides typed besides must agree with the run's, unless
``resume_override=true``. All this happens before Hydra reads the command line, without importing
torch, and before any file of the former run is touched.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

import hybridtrain
from hybridtrain.cli import config_values, hydra_config
from hybridtrain.cli.claim import attempt, claim, release, started_by_a_run
from hybridtrain.cli.config_values import ABSENT, changed_keys, placed, portable, quoted
from hybridtrain.cli.further_host import place_in
from hybridtrain.cli.sweep.job_process import is_job
from hybridtrain.cli.validation.host_checks import check_files, check_owner
from hybridtrain.errors import UserError
from hybridtrain.monitoring.watchdog import to_stderr
from hybridtrain.report.runs import (
    CONFIG_FILE,
    HYDRA_FILE,
    OVERRIDES_FILE,
    SUMMARY_FILE,
    key_of,
    read_mapping,
    read_yaml,
)
from hybridtrain.util.files import fault_of, interrupted_in, write_whole
from hybridtrain.util.option_types import shown

AUTO, LAST = "auto", "last"
# Keys that may differ in a resumed run.
ASIDE = ("resume", "resume_override", "ckpt", "faults", "strategy.faults", "run_dir")
_SHOWN = 5  # differences in an error message
RUN_FILE = "run.json"
_GROUPS = ("model", "data", "optimizer", "strategy", "trainer", "callbacks", "task")
FORMAT = 1  # of the files in a run's directory


def expanded(overrides: Sequence[str]) -> list[str]:
    """Replace ``resume`` and ``ckpt=last`` by the overrides that they stand for.

    Raises:
        UserError: if there is no run or checkpoint to resume from, or other options contradict it.
    """
    found = typed_values(overrides)
    if found is None:
        return list(overrides)
    typed, values = found
    resume = values.get("resume")
    if resume is None and values.get("ckpt") != LAST:
        return list(overrides)
    if resume in (None, AUTO) and _is_beyond_host_0(typed):
        return list(_but(typed, "resume", "resume_override", "ckpt").values())
    if resume is None:
        return [*_but(typed, "ckpt").values(), quoted("ckpt", _last(typed, values))]
    del typed["resume"]
    typed.pop("resume_override", None)
    override = values.get("resume_override", False)
    if not isinstance(override, bool):
        raise UserError(f"resume_override={override}: give true or false")
    if resume == AUTO:
        return _automatic(typed, values)
    return _resumed(Path(str(resume)), typed, override)


def typed_values(overrides: Sequence[str]) -> tuple[dict[str, str], dict[str, Any]] | None:
    """The overrides' texts and values by key; None: they are not to be expanded.

    A rank of a run, and a job of a sweep, get overrides that are expanded already.
    """
    try:
        parsed = config_values.parse(overrides)
    except Exception:  # Hydra reports it
        return None
    if started_by_a_run() or is_job():
        return None
    values = {x.key_or_group: None if x.is_delete() else _value(x) for x in parsed}
    return dict(zip((x.key_or_group for x in parsed), overrides, strict=True)), values


def _value(item: Override) -> Any:
    return item.input_line if item.is_sweep_override() else item.value()


# ---- which run ----------------------------------------------------------------------------------


def output_root(values: dict[str, Any], what: str = "run") -> Path:
    """The directory in which runs (or sweeps) are made; the run's own if that is given."""
    pattern = values.get(f"hydra.{what}.dir")
    if pattern is None:
        plain = OmegaConf.load(hydra_config.conf_dir() / f"{hydra_config.CONFIG_NAME}.yaml")
        pattern = OmegaConf.to_container(plain, resolve=False)["hydra"][what]["dir"]  # type: ignore
    fixed, varies, _ = str(pattern).partition("${")
    return Path(fixed) if not varies or fixed.endswith("/") else Path(fixed).parent


def _automatic(typed: dict[str, str], values: dict[str, Any]) -> list[str]:
    """Resume the last unfinished run with the same configuration, or begin a new run."""
    root = output_root(values)
    plain = {key: text for key, text in typed.items() if not key.startswith("hydra.")}
    for directory in runs_below(root):
        if has_finished(directory):
            continue
        try:
            check_run(directory)
            same = not _differences(directory, plain, list(plain.values()))
            if not same or _is_used(directory):
                continue
        except UserError:
            continue  # of another version, damaged, or read-only
        if not has_finished(directory):  # checked again, now that it is claimed
            return _resumed(directory, _but(typed, "hydra.run.dir", "ckpt"), False)
        release(directory)
    print(
        f"resume=auto: no unfinished run of this configuration in {root}; a new one begins",
        flush=True,
    )
    return expanded(list(typed.values()))


def _is_beyond_host_0(typed: dict[str, str]) -> bool:
    """Whether host 0 looks for the run or checkpoint, and tells this host."""
    plain = [x for key, x in typed.items() if key not in ASIDE and not key.startswith("hydra.")]
    return place_in(hydra_config.compose_config(plain)).host > 0


def _is_used(directory: Path) -> bool:
    return not _is_of_host_0(directory) and attempt(directory, "resume=auto") is not None


def _is_of_host_0(directory: Path) -> bool:
    """Whether another host than this one claims the run's directory."""
    return place_in(configuration(directory)).host > 0


def _but(typed: dict[str, str], *keys: str) -> dict[str, str]:
    return {key: text for key, text in typed.items() if key not in keys}


def _last(typed: dict[str, str], values: dict[str, Any]) -> Path:
    """The newest whole checkpoint of a run of this model in the output directory."""
    root = output_root(values)
    plain = [text for key, text in typed.items() if key != "ckpt" and not key.startswith("hydra.")]
    model = portable(hydra_config.compose_config(plain))["model"].get("_target_")
    for directory in runs_below(root):
        if configuration(directory)["model"].get("_target_") != model:
            continue
        if (path := newest(_folders(directory))) is not None:
            print(f"ckpt=last: {path}", flush=True)
            return path
    raise UserError(
        f"ckpt=last: no run of this model in {root} has left a whole checkpoint; name one with "
        "ckpt=PATH"
    )


# ---- resuming -----------------------------------------------------------------------------------


def _resumed(directory: Path, typed: dict[str, str], override: bool) -> list[str]:
    check_run(directory)
    if not _is_of_host_0(directory):
        claim(directory, f"resume={directory}", "end that run first, or wait")
    for key in ("ckpt", "hydra.run.dir"):
        if key in typed:
            raise UserError(
                f"resume={directory} was given together with {typed[key]}; it goes on from the "
                f"run's newest checkpoint, in its directory: leave {key} out"
            )
    hydra_config.MORE_DIRS[:] = hydra_config.MORE_DIRS or _own_folders(directory)
    overrides = _merged(directory, typed)
    found = _differences(directory, typed, overrides)
    if found and not override:
        raise UserError(
            f"resume={directory}: this run had another configuration: {shown_differences(found)}; "
            "leave that out to go on as it was, or say resume_override=true to go on like this"
        )
    if has_finished(directory) and not found:
        raise UserError(
            f"resume={directory}: this run has finished; to train it longer, say for example "
            "trainer.max_epochs=N resume_override=true"
        )
    path = newest_of_run(directory)
    begins = [x for x in overrides if config_values.parse([x])[0].key_or_group == "ckpt"]
    begin = path.name if path is not None else (begins or ["its beginning"])[0]
    print(f"{directory} goes on from {begin}", flush=True)
    more = [quoted("resume", directory.absolute()), quoted("hydra.run.dir", directory)]
    if path is None:
        return [*overrides, *more]
    return [*(x for x in overrides if x not in begins), *more, quoted("ckpt", path)]


def _own_folders(directory: Path) -> list[Path]:
    """The folder of --config-dir that the run was started with, if any."""
    path = directory / HYDRA_FILE
    try:
        sources = read_yaml(path)["hydra"]["runtime"]["config_sources"] if path.exists() else []
        own = [Path(each["path"]) for each in sources if each["provider"] == "command-line"]
    except (TypeError, KeyError) as error:
        raise UserError(f"{path} is damaged: it has no sources of the configuration") from error
    if gone := [each for each in own if not each.is_dir()]:
        raise UserError(f"resume={directory}: {gone[0]} is gone; give --config-dir FOLDER")
    return own


def _merged(directory: Path, typed: dict[str, str]) -> list[str]:
    """The overrides that the run was started with, updated by those typed now."""
    path = directory / OVERRIDES_FILE
    content = read_yaml(path)
    try:
        if not isinstance(content, list):
            raise TypeError("it is empty, or a mapping")
        former = {config_values.parse([text])[0].key_or_group: text for text in content}
    except Exception as error:  # no list, no texts, Hydra's
        raise UserError(
            f"{path} is damaged: it is no list of options; restore it, or begin a new run"
        ) from error
    aside = ["resume", "resume_override", "faults", "strategy.faults"]
    aside += ["ckpt"] if _is_own_checkpoint(former) else []
    plain = {key: text for key, text in former.items() if key not in aside}
    plain |= _own_job_options(directory)
    return hydra_config.complete_overrides(list((plain | typed).values()))


def _own_job_options(directory: Path) -> dict[str, str]:
    """The options ``hydra.job.…`` of the run by their key: ``chdir`` decides what paths mean."""
    path = directory / HYDRA_FILE
    try:
        texts = read_yaml(path)["hydra"]["overrides"]["hydra"] if path.exists() else []
        return {key: x for x in texts if (key := key_of(x)).startswith("hydra.job.")}
    except (TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is damaged: it has no options of Hydra's") from error


def _is_own_checkpoint(former: dict[str, str]) -> bool:
    """Whether ``ckpt`` was set when the run was resumed, in a directory that may have moved."""
    given = [former[key] for key in ("resume", "ckpt") if key in former]
    paths = [Path(str(_value(each))) for each in config_values.parse(given)]
    return len(paths) == 2 and paths[1].is_relative_to(paths[0])


def _differences(
    directory: Path, typed: dict[str, str], overrides: Sequence[str]
) -> list[tuple[str, Any, Any]]:
    """Differences between the run's configuration and the one now; new options only if typed."""
    then = configuration(directory)
    now = _comparable(hydra_config.compose_config(overrides))
    keys = tuple(key.lstrip("+~") for key in typed)
    return [
        (key, before, after)
        for key, before, after in changed_keys(then, now)
        if not any(key == x or key.startswith(f"{x}.") for x in ASIDE)
        and (before is not ABSENT or key.startswith(keys))
    ]


def shown_differences(found: Sequence[tuple[str, Any, Any]]) -> str:
    """The first few of them, in words."""
    keys = {key for key, _, _ in found}  # model.optimizer.lr is but optimizer.lr
    own = [each for each in found if not any(each[0].endswith(f".{key}") for key in keys)]
    texts = [f"{k}={shown(now, True)}, then {shown(then, True)}" for k, then, now in own[:_SHOWN]]
    more = f", and {len(own) - _SHOWN} more" if len(own) > _SHOWN else ""
    return "; ".join(texts) + more


# ---- runs on disk -------------------------------------------------------------------------------


def sign(directory: Path, goes_on: bool) -> None:
    """Write the version and format into a run's directory, and what another run has left there.

    ``goes_on``: the run has been begun before; else all checkpoints there are another run's.
    """
    former = _former(directory)
    if not goes_on:
        found = _checkpoints(_folders(directory))
        home = os.path.realpath(directory)
        former = {os.path.relpath(path, home): path.stat().st_mtime_ns for path in found}
    said = {"format": FORMAT, "hybridtrain": hybridtrain.__version__, "former": former}
    write_whole(directory / RUN_FILE, json.dumps(said).encode() + b"\n")


def _former(directory: Path) -> dict[str, Any]:
    """The times in ns of the checkpoints that a run found in its directory, by their paths."""
    found = read_mapping(directory / RUN_FILE, []).get("former")
    known = found if isinstance(found, dict) else {}
    return {os.path.realpath(directory / name): time_ns for name, time_ns in known.items()}


def check_run(directory: Path) -> None:
    """Check that this is a run's directory in a format that this version reads.

    Raises:
        UserError: if it is not.
    """
    if not all(os.path.lexists(directory / name) for name in (CONFIG_FILE, OVERRIDES_FILE)):
        below = sorted(str(x) for x in runs_below(directory))[:3] if directory.is_dir() else []
        hint = f"; there are runs below it: {', '.join(below)}" if below else ""
        raise UserError(
            f"resume={directory}: this is not the directory of a run (it has no {CONFIG_FILE})"
            f"{hint}; give one that a run has written to, such as outputs/DATE/TIME-ID"
        )
    check_files(directory)
    for name in (CONFIG_FILE, OVERRIDES_FILE):
        check_owner(directory / name, f"resume={directory}")
    made = read_mapping(directory / RUN_FILE, [])
    if isinstance(made.get("format"), int) and made["format"] > FORMAT:
        raise UserError(
            f"resume={directory}: this run was made by hybridtrain {made.get('hybridtrain', '?')} "
            f"(format {made['format']}), and this is {hybridtrain.__version__}, which reads up to "
            f"format {FORMAT}; update hybridtrain"
        )


def has_finished(directory: Path) -> bool:
    """Whether the run ended with exit status 0."""
    return read_mapping(directory / SUMMARY_FILE, []).get("exit") == 0


def runs_below(root: Path, name: str = CONFIG_FILE) -> Iterator[Path]:
    """Directories of runs in and below ``root`` (which have this file), the latest first."""
    found: list[tuple[int, Path]] = []
    for folder, below, _ in os.walk(root):
        config = Path(folder) / name
        if config.is_file():
            below.clear()
            found.append((config.stat().st_mtime_ns, Path(folder)))
    return (path for _, path in sorted(found, reverse=True))


def configuration(directory: Path) -> dict[str, Any]:
    """The run's configuration, as :func:`portable` has it.

    Raises:
        UserError: if it cannot be read, or lacks a group.
    """
    path = directory / CONFIG_FILE
    content = read_yaml(path)
    try:
        found = _comparable(OmegaConf.create(content))
    except Exception as error:  # no mapping; OmegaConf's, of what cannot be resolved
        raise UserError(
            f"{path} is damaged and cannot be read ({type(error).__name__}); restore it, or begin "
            "a new run"
        ) from error
    missing = [group for group in _GROUPS if not isinstance(found.get(group), dict)]
    if missing:
        raise UserError(
            f"{path} is damaged: it lacks {', '.join(missing)}; restore it, or begin a new run"
        )
    return found


def _comparable(cfg: DictConfig) -> dict[str, Any]:
    """As :func:`portable` has it, but with ``${hydra:…}``, which only a run itself can resolve."""
    return portable(OmegaConf.create(placed(OmegaConf.to_container(cfg), r"\${hydra:", "${hydra:")))


# ---- checkpoints --------------------------------------------------------------------------------


def newest_of_run(directory: Path) -> Path | None:
    """The newest whole checkpoint in the directories of the run's callbacks."""
    return newest(_folders(directory), _former(directory))


def newest_in(directory: Path) -> Path | None:
    """The newest whole checkpoint in the usual place, whatever the configuration says."""
    return newest([directory / "checkpoints"], _former(directory))


def _folders(directory: Path) -> set[Path]:
    known = configuration(directory) if (directory / CONFIG_FILE).exists() else {}
    nodes = placed(known, directory.absolute()).get("callbacks") or {}
    given = [str(x["dirpath"]) for x in nodes.values() if x and x.get("dirpath")]
    for own in ("${hydra:runtime.output_dir}", "${hydra:run.dir}"):
        given = [text.replace(own, str(directory.absolute())) for text in given]
    if unknown := [text for text in given if "${" in text]:
        raise UserError(
            f"{directory / CONFIG_FILE}: dirpath={unknown[0]} of a callback cannot be resolved "
            "outside of the run; name the checkpoint with ckpt=PATH"
        )
    return {*map(Path, given), directory.absolute() / "checkpoints"}


def _checkpoints(folders: Iterable[Path]) -> set[Path]:
    found = {
        Path(os.path.realpath(path))  # which raises nothing for a link to itself
        for folder in folders
        for path in (*folder.glob("*.ckpt"), interrupted_in(folder))
    }
    return {path for path in found if path.is_file()}


def newest(folders: Iterable[Path], former: Mapping[str, int] | None = None) -> Path | None:
    """The newest whole checkpoint; newer ones that are damaged are named on standard error.

    ``former``: files of another run, by their paths, with their times of change in ns.
    """
    times = [(path.stat().st_mtime_ns, path) for path in _checkpoints(folders)]
    for time_ns, path in sorted(times, reverse=True):
        if former and former.get(str(path)) == time_ns:
            to_stderr(f"the checkpoint {path} is passed over: an earlier run has left it there")
            continue
        fault = fault_of(path)
        if fault is None:
            return path
        to_stderr(f"the checkpoint {path} is passed over: {fault}")
    return None
