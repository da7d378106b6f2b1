"""``resume=...`` and ``ckpt=last``: find an earlier run, and the overrides that continue it.

A resumed run is the same command in the same directory, from the newest whole checkpoint. So
``resume=DIR`` stands for the overrides that the run in DIR was started with, for ``hydra.run.dir``
and for ``ckpt``. Overrides typed besides must agree with the run's, unless
``resume_override=true``. All this happens before Hydra reads the command line, without importing
torch, and before any file of the former run is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from hybridtrain.cli import config_values, hydra_config
from hybridtrain.cli.claim import attempt, claim, release, started_by_a_run
from hybridtrain.cli.config_values import ABSENT, changed_keys, portable, quoted
from hybridtrain.cli.former_run import (
    KEPT,
    FormerRun,
    comparable,
    own_below,
    own_folders,
    without_environment,
)
from hybridtrain.cli.further_host import place_in
from hybridtrain.cli.sweep.job_process import is_job
from hybridtrain.errors import UserError
from hybridtrain.report.runs import OVERRIDES_FILE, key_of
from hybridtrain.util.option_types import shown

AUTO, LAST = "auto", "last"
# Keys that may differ in a resumed run.
ASIDE = ("resume", "resume_override", "ckpt", "faults", "strategy.faults", "run_dir")
_SHOWN = 5  # differences in an error message


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
    return _resumed(FormerRun.read(Path(str(resume)), f"resume={resume}"), typed, override)


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
    root, asked = output_root(values), "resume=auto"
    plain = {key: text for key, text in typed.items() if not key.startswith("hydra.")}
    for run in own_below(root, asked, FormerRun.read):
        if run.has_finished:
            continue
        try:
            run.check(asked)
            same = not _differences(run, plain, list(plain.values()))
            if not same or _is_used(run):
                continue
            has_finished = FormerRun.read(run.directory, asked).has_finished  # since, perhaps
        except UserError:
            continue  # of another version, damaged, or read-only
        if not has_finished:
            return _resumed(run, _but(typed, "hydra.run.dir", "ckpt"), False)
        release(run.directory)
    print(
        f"resume=auto: no unfinished run of this configuration in {root}; a new one begins",
        flush=True,
    )
    return expanded(list(typed.values()))


def _is_beyond_host_0(typed: dict[str, str]) -> bool:
    """Whether host 0 looks for the run or checkpoint, and tells this host."""
    plain = [x for key, x in typed.items() if key not in ASIDE and not key.startswith("hydra.")]
    return place_in(hydra_config.compose_config(plain)).host > 0


def _is_used(run: FormerRun) -> bool:
    return not _is_of_host_0(run) and attempt(run.directory, "resume=auto") is not None


def _is_of_host_0(run: FormerRun) -> bool:
    """Whether another host than this one claims the run's directory."""
    return place_in(run.configuration()).host > 0


def _but(typed: dict[str, str], *keys: str) -> dict[str, str]:
    return {key: text for key, text in typed.items() if key not in keys}


def _last(typed: dict[str, str], values: dict[str, Any]) -> Path:
    """The newest whole checkpoint of a run of this model in the output directory."""
    root = output_root(values)
    plain = [text for key, text in typed.items() if key != "ckpt" and not key.startswith("hydra.")]
    model = portable(hydra_config.compose_config(plain))["model"].get("_target_")
    for run in own_below(root, "ckpt=last", FormerRun.read):
        try:
            is_of_model = run.configuration()["model"].get("_target_") == model
            path = run.newest_of_any_run() if is_of_model else None
        except UserError:  # damaged
            continue
        if path is not None:
            print(f"ckpt=last: {path}", flush=True)
            return path
    raise UserError(
        f"ckpt=last: no run of this model in {root} has left a whole checkpoint; name one with "
        "ckpt=PATH"
    )


# ---- resuming -----------------------------------------------------------------------------------


def _resumed(run: FormerRun, typed: dict[str, str], override: bool) -> list[str]:
    directory = run.directory
    asked = f"resume={directory}"
    run.check(asked)
    if not _is_of_host_0(run):
        claim(directory, asked, "end that run first, or wait")
        run = FormerRun.read(directory, asked)  # again, now that it is claimed
    for key in ("ckpt", "hydra.run.dir"):
        if key in typed:
            raise UserError(
                f"{asked} was given together with {typed[key]}; it goes on from the "
                f"run's newest checkpoint, in its directory: leave {key} out"
            )
    hydra_config.MORE_DIRS[:] = hydra_config.MORE_DIRS or own_folders(run.config_dirs(), asked)
    overrides = _merged(run, typed)
    found = _differences(run, typed, overrides)
    if found and not override:
        raise UserError(
            f"{asked}: this run had another configuration: {shown_differences(found)}; "
            "leave that out to go on as it was, or say resume_override=true to go on like this"
        )
    if run.has_finished and not found:
        raise UserError(
            f"{asked}: this run has finished; to train it longer, say for example "
            "trainer.max_epochs=N resume_override=true"
        )
    path = run.newest()
    begins = [x for x in overrides if config_values.parse([x])[0].key_or_group == "ckpt"]
    begin = path.name if path is not None else (begins or ["its beginning"])[0]
    print(f"{directory} goes on from {begin}", flush=True)
    more = [quoted("resume", directory.absolute()), quoted("hydra.run.dir", directory)]
    if path is None:
        return [*overrides, *more]
    return [*(x for x in overrides if x not in begins), *more, quoted("ckpt", path)]


def _merged(run: FormerRun, typed: dict[str, str]) -> list[str]:
    """The overrides that the run was started with, updated by those typed now."""
    try:
        former = {config_values.parse([text])[0].key_or_group: text for text in run.overrides}
    except UserError:
        raise
    except Exception as error:  # no texts, Hydra's
        raise run.damaged(OVERRIDES_FILE, "it is no list of options") from error
    aside = ["resume", "resume_override", "faults", "strategy.faults"]
    aside += ["ckpt"] if _is_own_checkpoint(former) else []
    plain = {key: text for key, text in former.items() if key not in aside}
    own = [x for x in run.hydra_options() if key_of(x) not in map(key_of, typed.values())]
    kept = without_environment(own, f"resume={run.directory}")
    plain |= {key_of(x): x for x in kept if key_of(x) in KEPT}
    return hydra_config.complete_overrides(list((plain | typed).values()))


def _is_own_checkpoint(former: dict[str, str]) -> bool:
    """Whether ``ckpt`` was set when the run was resumed, in a directory that may have moved."""
    given = [former[key] for key in ("resume", "ckpt") if key in former]
    paths = [Path(str(_value(each))) for each in config_values.parse(given)]
    return len(paths) == 2 and paths[1].is_relative_to(paths[0])


def _differences(
    run: FormerRun, typed: dict[str, str], overrides: Sequence[str]
) -> list[tuple[str, Any, Any]]:
    """Differences between the run's configuration and the one now; new options only if typed."""
    then = run.configuration()
    now = comparable(hydra_config.compose_config(overrides))
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
