"""Explain a user's mistake in one readable line.

Hydra's own messages span several lines and speak of structs, defaults lists and packages. This
module parses the overrides again, one by one, until it finds the faulty one, and names the valid
alternatives and the closest of them.
"""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, InstantiationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridtrain.cli import config_values, hydra_config
from hybridtrain.engine.options import strategy_arguments
from hybridtrain.errors import AT_LIMIT, UserError
from hybridtrain.util.option_types import hint, shown

STRATEGY = "hybridtrain.HybridStrategy"

EXTRAS = {
    "soundfile": "speech",
    "soxr": "speech",
    "jiwer": "speech",
    "flashlight": "lm",
    "espeakng_loader": "synth",
    "sklearn": "vision",
    "matplotlib": "report",
    "ray": "ray",
    "optuna": "sweep",
    "scipy": "sweep",
}


def explain(error: BaseException, overrides: Sequence[str]) -> str | None:
    """The line for ``error``; None if it is not a mistake of the user's."""
    for cause in _chain(error):
        if isinstance(cause, UserError):
            return one_line(cause)
        if isinstance(cause, ModuleNotFoundError) and (line := _missing_extra(cause)):
            return line
    if type(error).__name__ == "MisconfigurationException":  # Lightning's, named to stay unimported
        return one_line(error)
    if isinstance(error, InstantiationException):
        return None
    if isinstance(error, HydraException | OmegaConfBaseException):
        return find_fault(overrides) or one_line(error).split(" Config search path:")[0]
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"{shown(error.filename)}: this is longer than names of files may be"
    if isinstance(error, OSError) and _in_hydra(error):
        return (
            f"the run directory cannot be written ({error.filename or 'a file in it'}: "
            f"{error.strerror}); choose another with hydra.run.dir=DIR, or, for a sweep, "
            "hydra.sweep.dir=DIR"
        )
    if "can't start new thread" in str(error):
        return f"no thread can be started: {AT_LIMIT}"
    return None


# Errors of Lightning's for a metric that was not logged: its name, and those that were logged.
_UNLOGGED = {
    "ModelCheckpoint": r"ModelCheckpoint\(monitor='(.+)'\)` could not find .* metrics: \[(.*)\]\.",
    "EarlyStopping": r"Early stopping conditioned on metric `(.+)` which .* following: `(.*)`",
    "ReduceLROnPlateau": r"ReduceLROnPlateau conditioned on metric (.+) which .* are: \[(.*)\]\.",
}
_TOO_LONG = r"`val_check_interval` \((\d+)\) must be less than or equal to .* batches \((\d+)\)"


@contextmanager
def naming_keys(cfg: DictConfig) -> Iterator[None]:
    """Raise UserError for what only a run's data and metrics show.

    That is a monitored metric that the run does not log, and an interval longer than an epoch.
    """
    try:
        yield
    except Exception as error:
        if found := re.search(_TOO_LONG, str(error)):
            raise UserError(
                f"trainer.val_check_interval={found[1]} was given, and an epoch has {found[2]} "
                "mini-batches of each worker; give at most so many, or a share of it (0.5)"
            ) from error
        for user, pattern in _UNLOGGED.items():
            if found := re.search(pattern, str(error)):
                metric, logged = found[1], re.sub("['`]", "", found[2])
                content = OmegaConf.to_container(cfg, resolve=False)
                key = next(_monitors(content, metric, ""), f"{user}: monitor")
                raise UserError(
                    f"{key}={metric}: the run logged no such metric"
                    f"{hint(metric, logged.split(', '))}; it logged {logged or 'none'}"
                ) from error
        raise


def _monitors(node: Any, metric: str, path: str) -> Iterator[str]:
    """The keys that name this metric, without those that refer to another key."""
    for name, value in node.items():
        if isinstance(value, dict):
            yield from _monitors(value, metric, f"{path}{name}.")
        elif name == "monitor" and value == metric:
            yield f"{path}{name}"


def _chain(error: BaseException | None) -> Iterable[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _in_hydra(error: BaseException) -> bool:
    """Whether Hydra raised this while it prepared the run, before our code ran."""
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    return bool({"run_job", "multirun"} & set(names)) and "execute" not in names


def one_line(error: BaseException) -> str:
    """The message of ``error`` without its line breaks."""
    return " ".join(str(error).split())


def _missing_extra(error: ModuleNotFoundError) -> str | None:
    name = (error.name or "").split(".")[0]
    if name not in EXTRAS:
        return None
    return f"this needs the package {name}: pip install 'hybridtrain[{EXTRAS[name]}]'"


def find_fault(overrides: Sequence[str]) -> str | None:
    """Describe the fault of the first faulty override; None: each alone is valid."""
    try:
        check_groups(overrides)
    except UserError as error:
        return str(error)
    parsed = _parsed(overrides)
    choices = hydra_config.groups()
    base = base_config(parsed)
    for item in parsed:
        if line := _key_fault(item, base, parsed, choices):
            return _other_choice(item, parsed, choices) or line
    return None


def _parsed(overrides: Sequence[str]) -> list[Override]:
    """Parse the overrides one by one; raises UserError for one that Hydra cannot parse."""
    parsed: list[Override] = []
    for text in overrides:
        try:
            parsed += config_values.parse([text])
        except HydraException:
            raise UserError(f"cannot read {shown(text)}: {_as_hydra_reads(text)}") from None
    return parsed


def _as_hydra_reads(text: str) -> str:
    key, separator, value = text.partition("=")
    if separator and not value.isascii() and not set(text) & set("'\"$`!\\"):
        return f"put quotes around other letters than a to z: \"{key}='{value}'\""
    return "write key=value, for example trainer.devices=4"


def values(item: Override) -> list[str]:
    """The value of an override as text; all values of a sweep."""
    if item.is_sweep_override():
        if item.is_choice_sweep():
            return [str(x) for x in item.sweep_string_iterator()]
        return []
    return [item.get_value_element_as_str()]


def base_config(parsed: Sequence[Override]) -> DictConfig:
    """The configuration with the overrides' group choices but not their values; read-only.

    It is cached: composing takes 0.15 s, and most jobs of a sweep share it.
    """
    return _composed(tuple(_chosen(parsed)), hydra_config.search_path())


@lru_cache(maxsize=16)
def _composed(choices: tuple[str, ...], search_path: tuple[str, ...]) -> DictConfig:
    base = hydra_config.compose_config(choices)
    OmegaConf.set_readonly(base, True)
    return base


def _chosen(parsed: Sequence[Override]) -> list[str]:
    known = hydra_config.groups()
    chosen = {x.key_or_group: values(x)[0] for x in parsed if x.key_or_group in known and values(x)}
    return [f"{group}={name}" for group, name in chosen.items()]


def check_groups(overrides: Sequence[str]) -> None:
    """Check that all choices of groups exist; raises UserError, which is shorter than Hydra's."""
    choices = hydra_config.groups()
    for item in _parsed(overrides):
        if item.key_or_group in choices and (line := _group_fault(item, choices)):
            raise UserError(line)


def _group_fault(item: Override, choices: dict[str, list[str]]) -> str | None:
    group = item.key_or_group
    known = [*choices[group], *["null"] * (group == "experiment")]
    if item.is_delete():
        return f"~{group}: every run has this group. Choose one of {', '.join(known)}."
    given = item.value()
    several = given if isinstance(given, list) and given else values(item)
    for value in several:
        if value not in known:
            said = shown(value) if isinstance(value, str) else repr(value)
            return (
                f"{group}={value if said == repr(value) else said}: there is no {group} "
                f"{said}{hint(str(value), known)}. Choose one of {', '.join(known)}."
            )
    return None


def _key_fault(
    item: Override, base: DictConfig, parsed: Sequence[Override], choices: dict[str, list[str]]
) -> str | None:
    key = item.key_or_group
    if item.is_add() or item.is_force_add() or key in choices or key.startswith("hydra"):
        return None
    *parents, leaf = key.split(".")
    node, above = _deepest(base, parents)
    wanted = [*parents, leaf][len(above)]
    if isinstance(node, DictConfig) and wanted in node:
        return None
    if special := _SPECIAL.get(key):
        return f"{key}: {special}"
    if above == ["strategy"] and node.get("_target_") == STRATEGY:
        given: Any = OmegaConf.to_container(node, resolve=False)
        single = [x for x in parsed if not x.is_sweep_override()]
        given |= {x.key_or_group.removeprefix("strategy."): x.value() for x in single}
        return strategy_arguments.unknown(wanted, given, "strategy.")
    if not isinstance(node, DictConfig):
        return f"{key}: {'.'.join(above)} is a single value and has no key {wanted!r}"
    names = [str(x) for x in node if not str(x).startswith("_")] + ([] if above else list(choices))
    where = f"in {'.'.join(above)}" if above else "at the top"
    meant = _elsewhere(base, leaf) or hint(wanted, names)
    valid = ", ".join(sorted(set(names)))
    known = f"Valid are {valid}." if valid else "There are none."
    return f"{key}: there is no key {wanted!r} {where}{meant}. {known}"


def _other_choice(
    item: Override, parsed: Sequence[Override], choices: dict[str, list[str]]
) -> str | None:
    """The line for a key that only other choices of its group have: ``k`` of ``backup``."""
    group, _, path = item.key_or_group.partition(".")
    others = [name for name in choices.get(group, ()) if path and _has(group, name, path)]
    if not others:
        return None
    item = [x for x in parsed if x.key_or_group == item.key_or_group][-1]
    composed = hydra_config.compose_config(_chosen(parsed), with_hydra=True)
    now = composed.hydra.runtime.choices[group]
    text = f"{item.key_or_group}={','.join(values(item))}"
    return (
        f"{text}: {group}={now} takes no {path}; {', '.join(others)} "
        f"{'do' if others[1:] else 'does'}, as in {group}={others[0]} {text}"
    )


def _has(group: str, name: str, path: str) -> bool:
    """Whether this choice's file has the key."""
    folders = (hydra_config.conf_dir(), *hydra_config.MORE_DIRS)
    files = [folder / group / f"{name}.yaml" for folder in folders]
    node: Any = OmegaConf.load(next(file for file in files if file.is_file()))
    for part in path.split("."):
        if not isinstance(node, DictConfig) or part not in node:
            return False
        node = node._get_node(part)
    return True


_SPECIAL = {
    "compare": "it belongs to -m experiment=fair_comparison",
    "trainer.strategy": "the strategy is a group of its own; write strategy=hybrid, async or ddp",
    "trainer.logger": "loggers are a group of their own; write logger=tensorboard, csv or none",
    "trainer.callbacks": "callbacks are a group of their own; write callbacks.NAME.KEY=…",
}


def _deepest(node: Any, path: Sequence[str]) -> tuple[Any, list[str]]:
    """The deepest existing node on ``path``, and the part of the path to it."""
    above: list[str] = []
    for name in path:
        if not isinstance(node, DictConfig) or name not in node:
            break
        if OmegaConf.is_missing(node, name) or OmegaConf.is_interpolation(node, name):
            child: Any = OmegaConf.select(node, name, throw_on_missing=False)
        else:
            child = node._get_node(name)
        node, above = child, [*above, name]
    return node, above


def _elsewhere(base: DictConfig, leaf: str) -> str:
    """A hint for a key typed without its group, such as ``devices`` for ``trainer.devices``."""
    parts = ("strategy.policy", "strategy.exchange")
    for group in ("trainer", "optimizer", "strategy", "model", "data", "task", *parts):
        node = OmegaConf.select(base, group, throw_on_missing=False)
        if isinstance(node, DictConfig) and leaf in node:
            return f" (did you mean {group}.{leaf}?)"
    return ""
