"""``resume=...`` and ``ckpt=last``, before Hydra sees the command line.

A run that goes on is the same command in the same directory, from the newest whole checkpoint. So
``resume=DIR`` stands for the overrides that the run in DIR was started with, for ``hydra.run.dir``
and for ``ckpt``; whatever else is typed must agree with what the run had, or be asked for with
``resume_override=true``. All this is known without torch, and before anything of the former run is
touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from hybridtrain.cli import hydra_config
from hybridtrain.cli.claim import attempt, claim, release, started_by_a_run
from hybridtrain.cli.resume import kept_runs
from hybridtrain.cli.resume.config_values import changed_keys, portable
from hybridtrain.errors import UserError

AUTO, LAST = "auto", "last"
# What says how to go on, and what is to go wrong, is no part of what is trained.
_ASIDE = ("resume", "resume_override", "ckpt", "faults", "strategy.faults", "run_dir")
_SHOWN = 5  # differences


def expanded(overrides: Sequence[str], sweeps: bool) -> list[str]:
    """The overrides with ``resume`` and ``ckpt=last`` made into what they stand for.

    Args:
        sweeps: whether they are of a sweep.

    Raises:
        UserError: if there is nothing to go on with, or not like this.
    """
    try:
        parsed = hydra_config.parse(overrides)
    except Exception:  # Hydra reports it
        return list(overrides)
    values = {x.key_or_group: None if x.is_delete() else _value(x) for x in parsed}
    resume = values.get("resume")
    if started_by_a_run() or (resume is None and values.get("ckpt") != LAST):
        return list(overrides)
    typed = dict(zip((x.key_or_group for x in parsed), overrides, strict=True))
    if resume is None:
        return [*_but(typed, "ckpt").values(), _named("ckpt", _last(typed, values))]
    if sweeps:
        raise UserError(
            "resume was given with --multirun, but only one run at a time can go on; "
            "give the directory of one job, such as multirun/DATE/TIME-ID/3, without --multirun"
        )
    del typed["resume"]
    typed.pop("resume_override", None)
    override = values.get("resume_override", False)
    if not isinstance(override, bool):
        raise UserError(f"resume_override={override}: give true or false")
    if resume == AUTO:
        return _automatic(typed, values)
    return _resumed(Path(str(resume)), typed, override)


def _value(item: Override) -> Any:
    return item.input_line if item.is_sweep_override() else item.value()


def _named(key: str, value: object) -> str:
    """An override, quoted for Hydra."""
    escaped = str(value).replace("\\", "\\\\").replace("'", "\\'")
    return f"{key}='{escaped}'"


# ---- which run ----------------------------------------------------------------------------------


def _output_root(values: dict[str, Any]) -> Path:
    """The directory that runs are made in; the run's own, where that is given."""
    pattern = values.get("hydra.run.dir")
    if pattern is None:
        plain = OmegaConf.load(hydra_config.conf_dir() / f"{hydra_config.CONFIG_NAME}.yaml")
        pattern = OmegaConf.to_container(plain, resolve=False)["hydra"]["run"]["dir"]  # type: ignore
    fixed, varies, _ = str(pattern).partition("${")
    return Path(fixed) if not varies or fixed.endswith("/") else Path(fixed).parent


def _automatic(typed: dict[str, str], values: dict[str, Any]) -> list[str]:
    """The last run that did not finish and was to do the same goes on, or a new one begins."""
    root = _output_root(values)
    plain = {key: text for key, text in typed.items() if not key.startswith("hydra.")}
    for directory in kept_runs.runs_below(root):
        if kept_runs.has_finished(directory):
            continue
        try:
            kept_runs.check_run(directory)
            same = not _differences(directory, plain, list(plain.values()))
            if not same or attempt(directory, "resume=auto") is not None:
                continue
        except UserError:
            continue  # of another version, damaged, or not to be written
        if not kept_runs.has_finished(directory):  # nobody can finish it from now on
            return _resumed(directory, _but(typed, "hydra.run.dir", "ckpt"), False)
        release(directory)
    print(
        f"resume=auto: no unfinished run of this configuration in {root}; a new one begins",
        flush=True,
    )
    return list(typed.values())


def _but(typed: dict[str, str], *keys: str) -> dict[str, str]:
    return {key: text for key, text in typed.items() if key not in keys}


def _last(typed: dict[str, str], values: dict[str, Any]) -> Path:
    """The newest whole checkpoint of the runs in the output directory that have this model."""
    root = _output_root(values)
    plain = [text for key, text in typed.items() if key != "ckpt" and not key.startswith("hydra.")]
    model = portable(hydra_config.compose_config(plain))["model"].get("_target_")
    for directory in kept_runs.runs_below(root):
        if kept_runs.configuration(directory).model.get("_target_") != model:
            continue
        if (path := kept_runs.newest_of_run(directory)) is not None:
            print(f"ckpt=last: {path}", flush=True)
            return path
    raise UserError(
        f"ckpt=last: no run of this model in {root} has left a whole checkpoint; name one with "
        "ckpt=PATH"
    )


# ---- going on -----------------------------------------------------------------------------------


def _resumed(directory: Path, typed: dict[str, str], override: bool) -> list[str]:
    kept_runs.check_run(directory)
    claim(directory, f"resume={directory}", "end that run first, or wait")
    for key in ("ckpt", "hydra.run.dir"):
        if key in typed:
            raise UserError(
                f"resume={directory} was given together with {typed[key]}; it goes on from the "
                f"run's newest checkpoint, in its directory: leave {key} out"
            )
    overrides = _merged(directory, typed)
    found = _differences(directory, typed, overrides)
    if found and not override:
        raise UserError(
            f"resume={directory}: this run had another configuration: {_shown(found)}; leave that "
            "out to go on as it was, or say resume_override=true to go on like this"
        )
    if kept_runs.has_finished(directory) and not found:
        raise UserError(
            f"resume={directory}: this run has finished; to train it longer, say for example "
            "trainer.max_epochs=N resume_override=true"
        )
    path = kept_runs.newest_of_run(directory)
    print(f"{directory} goes on from {path.name if path else 'its beginning'}", flush=True)
    more = [_named("resume", directory), _named("hydra.run.dir", directory)]
    if path is None:
        return [*overrides, *more]
    plain = [x for x in overrides if hydra_config.parse([x])[0].key_or_group != "ckpt"]
    return [*plain, *more, _named("ckpt", path)]


def _merged(directory: Path, typed: dict[str, str]) -> list[str]:
    """The overrides that the run was started with, and what is typed now."""
    content: Any = OmegaConf.to_container(OmegaConf.load(directory / kept_runs.OVERRIDES))
    former = {hydra_config.parse([text])[0].key_or_group: text for text in content}
    inside = str(directory.absolute())
    plain = {
        key: text
        for key, text in former.items()
        if key not in ("resume", "resume_override", "faults", "strategy.faults")
        and not (key == "ckpt" and inside in text)  # of an earlier time that it went on
    }
    return hydra_config.complete_overrides(list((plain | typed).values()))


def _differences(
    directory: Path, typed: dict[str, str], overrides: Sequence[str]
) -> list[tuple[str, Any, Any]]:
    """What the run had and would have now. Options that there were not are none, unless typed."""
    then = portable(kept_runs.configuration(directory))
    now = portable(hydra_config.compose_config(overrides))
    keys = tuple(key.lstrip("+~") for key in typed)
    return [
        (key, before, after)
        for key, before, after in changed_keys(then, now)
        if not any(key == x or key.startswith(f"{x}.") for x in _ASIDE)
        and (before is not None or key.startswith(keys))
    ]


def _shown(found: Sequence[tuple[str, Any, Any]]) -> str:
    keys = {key for key, _, _ in found}  # model.optimizer.lr is but optimizer.lr
    own = [each for each in found if not any(each[0].endswith(f".{key}") for key in keys)]
    texts = [f"{key}={after}, then {before}" for key, before, after in own[:_SHOWN]]
    more = f", and {len(own) - _SHOWN} more" if len(own) > _SHOWN else ""
    return "; ".join(texts) + more
