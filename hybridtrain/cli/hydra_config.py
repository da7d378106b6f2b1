"""Compose a configuration from overrides, without importing torch or Lightning.

The configuration files are in ``conf``: beside the package in a checkout, inside it in a wheel.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

import hybridtrain
from hybridtrain.cli.config_values import in_quotes, parse
from hybridtrain.errors import UserError
from hybridtrain.util.own_parts import TARGET

CONFIG_NAME = "config"
OWN = "own"  # what a part of the strategy is, until an object of the user's own takes its place
PARTS = tuple(f"strategy.{part}" for part in ("policy", "exchange", "update", "correction"))
VERSION_BASE = "1.3"
MORE_DIRS: list[Path] = []  # of the command line: --config-dir


def conf_dir() -> Path:
    """The folder that holds ``config.yaml``."""
    package = Path(hybridtrain.__path__[0]).resolve()
    places = (package / "conf", package.parent / "conf")
    for place in places:
        if (place / f"{CONFIG_NAME}.yaml").is_file():
            return place
    raise FileNotFoundError(f"the installation is incomplete: no config.yaml in {places}")


# The keys are the constructors', whose modules are not imported for each configuration: a test
# holds both to the same defaults. The launcher's: how a job starts, how many run side by side.
LAUNCHER = {
    "_target_": "hydra_plugins.hybridtrain.ProcessLauncher",
    "start_method": "auto",
    "at_once": 1,
}

_NULL = ("pruner", "direction", "n_trials", "storage", "study_name", "params")
SEARCH = {
    "_target_": "hydra_plugins.hybridtrain.OptunaSweeper",
    "sampler": "tpe",
    "seed": 0,
    **dict.fromkeys(_NULL),
}

COMPARISON = "fair_comparison"
FAIR = {"_target_": "hydra_plugins.hybridtrain.FairSweeper"}  # its options are the experiment's


def register() -> None:
    """Register our launcher and sweepers, and ``${unique_id:}`` for names of run directories."""
    nodes = {"launcher/process": LAUNCHER, "sweeper/optuna": SEARCH, "sweeper/fair": FAIR}
    for path, node in nodes.items():
        group, name = path.split("/")
        ConfigStore.instance().store(
            group=f"hydra/{group}", name=name, node=node, provider="hybridtrain"
        )
    OmegaConf.register_new_resolver(
        "unique_id", lambda: uuid.uuid4().hex[:4], use_cache=True, replace=True
    )


def groups() -> dict[str, list[str]]:
    """The choices of each group: the files in its folders."""
    found: dict[str, set[str]] = {}
    for path in (path for each in (conf_dir(), *MORE_DIRS) for path in each.glob("*/*.yaml")):
        found.setdefault(path.parent.name, set()).add(path.stem)
    return {group: sorted(found[group]) for group in sorted(found)}


def compose_config(overrides: Sequence[str] = (), with_hydra: bool = False) -> DictConfig:
    """The configuration of a run with these overrides, unresolved; raises Hydra's exceptions.

    ``with_hydra``: with Hydra's own node, which has the choices of all groups.
    """
    overrides = with_own_parts(overrides)  # also where each key is there once
    if GlobalHydra.instance().is_initialized():
        return compose(CONFIG_NAME, overrides=list(overrides), return_hydra_config=with_hydra)
    register()
    if MORE_DIRS:
        where = ",".join(json.dumps(f"file://{each.absolute()}") for each in MORE_DIRS)
        overrides = [*overrides, f"hydra.searchpath=[{where}]"]
    with initialize_config_dir(str(conf_dir()), version_base=VERSION_BASE):
        return compose_config(overrides, with_hydra)


def search_path() -> tuple[str, ...]:
    """The folders in which Hydra now looks for the configuration."""
    loader = GlobalHydra.instance().hydra and GlobalHydra.instance().config_loader()
    found = loader.get_search_path().get_path() if loader else []
    return (str(conf_dir()), *(str(each.path) for each in found))


def complete_overrides(overrides: Sequence[str]) -> list[str]:
    """Add the overrides that a user's own class implies.

    ``model._target_=my.Module model.width=64`` implies ``model=own``, so that no value of another
    model is passed on, ``task=own`` unless a task is named, and that ``model.width`` may be a new
    key. The same holds for ``data``. A part of the strategy with a ``_target_`` takes the place of
    the part that is there, without its parameters. ``trainer.num_nodes=1:4`` stands for up to 4
    hosts, of which 1 is enough to begin; a comparison's ``budget=7`` for 7 trials. Other overrides
    are unchanged.

    Raises:
        UserError: if a range of hosts is none.
    """
    if f"experiment={COMPARISON}" in overrides:
        overrides = [re.sub(r"^budget=(\d+)$", r"budget.trials=\1", x) for x in overrides]
    overrides = [_quoted_path(each) for text in overrides for each in _range_of_hosts(text)]
    try:
        parsed = parse(overrides)
    except Exception:  # Hydra reports it
        return list(overrides)
    keys = {x.key_or_group for x in parsed}
    own = [x for x in ("model", "data") if f"{x}._target_" in keys]
    chosen = [x for x in own if x not in keys]
    if "model" in chosen and "task" not in keys and "experiment" not in keys:
        chosen.append("task")
    open_keys = tuple(f"{x}." for x in own)
    result = [f"{group}=own" for group in chosen]
    for text, item in zip(overrides, parsed, strict=True):
        own_key = item.key_or_group.startswith(open_keys) and text == item.input_line
        result.append(f"++{text}" if own_key and not text.startswith(("+", "~")) else text)
    return with_own_parts(result)


def with_own_parts(overrides: Sequence[str]) -> list[str]:
    """Let an object of the user's own class take the place of a part of the strategy.

    Hydra would merge a mapping with the one that is there, so that is overridden by a word first.
    """
    keys = {text.partition("=")[0].lstrip("+") for text in overrides}
    result, own = list[str](), list[str]()
    for part in PARTS:
        made = [x for x in overrides if x.startswith(f"{part}=") and TARGET in x]
        if made or f"{part}.{TARGET}" in keys:
            own.append(part)
            result += [f"++{part}={OWN}", *(made or [f"{part}={{}}"])]  # sweepers tell both apart
    open_keys = tuple(f"{part}." for part in own)
    others = (text for text in overrides if text.partition("=")[0].lstrip("+") not in own)
    return [*result, *(f"++{x}" if x.startswith(open_keys) else x for x in others)]


def as_given(overrides: Sequence[str]) -> list[str]:
    """Remove the overrides that :func:`with_own_parts` has added, and adds again."""
    added = {text for part in PARTS for text in (f"++{part}={OWN}", f"{part}={{}}")}
    return [text for text in overrides if text not in added]


def _range_of_hosts(text: str) -> list[str]:
    found = re.fullmatch(r"trainer\.num_nodes=(\d*):(\d*)", text)
    if found is None:
        return [text]
    if "" in found.groups() or int(found[1]) > int(found[2]):
        raise UserError(f"{text} was given; a range of hosts is FROM:TO, for example 1:4")
    return [f"strategy.min_hosts={found[1]}", f"trainer.num_nodes={found[2]}"]


def _quoted_path(text: str) -> str:
    """``ckpt=run/epoch=3-step=96.ckpt``, a name of Lightning's, needs quotes for its ``=``."""
    key, _, value = text.partition("=")
    if key not in ("ckpt", "resume") or "=" not in value or value[:1] in ("'", '"'):
        return text
    each = value.split(",")
    if key == "ckpt" and all(x.endswith(".ckpt") for x in each):
        return f"ckpt={','.join(map(in_quotes, each))}"
    return f"{key}={in_quotes(value)}"
