"""Where the configuration lies, and how a list of overrides becomes one; nothing heavy is imported.

In a checkout the configuration is the folder ``conf`` beside the package; in an installed wheel it
lies inside the package.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

import hybridtrain

CONFIG_NAME = "config"
VERSION_BASE = "1.3"
OWN = {"model": "own", "data": "own", "task": "own"}


def conf_dir() -> Path:
    """The folder that holds ``config.yaml``."""
    package = Path(hybridtrain.__path__[0]).resolve()
    places = (package / "conf", package.parent / "conf")
    for place in places:
        if (place / f"{CONFIG_NAME}.yaml").is_file():
            return place
    raise FileNotFoundError(f"the installation is incomplete: no config.yaml in {places}")


@dataclass
class ProcessLauncherConf:
    """``hydra.launcher``: how a job's process is made (auto: fork without a GPU, else popen)."""

    _target_: str = "hydra_plugins.hybridtrain.ProcessLauncher"
    start_method: str = "auto"


def register() -> None:
    """Tell Hydra of ``hydra/launcher=process`` and of ``${unique_id:}``, which keeps runs apart."""
    ConfigStore.instance().store(
        group="hydra/launcher", name="process", node=ProcessLauncherConf, provider="hybridtrain"
    )
    OmegaConf.register_new_resolver(
        "unique_id", lambda: uuid.uuid4().hex[:4], use_cache=True, replace=True
    )


def parse(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides by Hydra's grammar; raises Hydra's OverrideParseException."""
    return OverridesParser.create().parse_overrides(list(overrides))


def groups() -> dict[str, list[str]]:
    """The choices of each group, from the files of the configuration folder."""
    folders = sorted(x for x in conf_dir().iterdir() if x.is_dir() and x.name != "hydra")
    return {x.name: sorted(y.stem for y in x.glob("*.yaml")) for x in folders}


@contextmanager
def composer() -> Iterator[None]:
    """Make ``compose`` usable: inside a Hydra run it is, elsewhere our folder is opened for it."""
    if GlobalHydra.instance().is_initialized():
        yield
        return
    register()
    with initialize_config_dir(str(conf_dir()), version_base=VERSION_BASE):
        yield


def compose_config(overrides: Sequence[str] = (), with_hydra: bool = False) -> DictConfig:
    """The configuration of a run with these overrides, unresolved; raises Hydra's exceptions.

    ``with_hydra``: with Hydra's own part, which knows the choices of all groups.
    """
    with composer():
        return compose(CONFIG_NAME, overrides=list(overrides), return_hydra_config=with_hydra)


def search_path() -> tuple[str, ...]:
    """Where Hydra looks for the configuration at present."""
    loader = GlobalHydra.instance().hydra and GlobalHydra.instance().config_loader()
    found = loader.get_search_path().get_path() if loader else []
    return (str(conf_dir()), *(str(each.path) for each in found))


def complete_overrides(overrides: Sequence[str]) -> list[str]:
    """Add what a user's own class implies, so that naming it is enough.

    ``model._target_=my.Module model.width=64`` means the group choice ``model=own`` (no value of
    another model is passed on), ``task=own`` when no task is named, and that ``model.width`` may
    be a new key. The same holds for ``data``. Everything else passes unchanged.
    """
    overrides = [_quoted_path(text) for text in overrides]
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
    result = [f"{group}={OWN[group]}" for group in chosen]
    for text, item in zip(overrides, parsed, strict=True):
        new = item.key_or_group.startswith(open_keys) and text == item.input_line
        plain = new and not text.startswith(("+", "~"))
        result.append(f"++{text}" if plain and open_keys else text)
    return result


def _quoted_path(text: str) -> str:
    """``ckpt=run/epoch=3-step=96.ckpt``: Hydra wants quotes around a value with ``=`` in it.

    That is how Lightning names its checkpoints, and the shell has taken the user's quotes away.
    """
    key, _, value = text.partition("=")
    if key not in ("ckpt", "resume") or "=" not in value or value[:1] in ("'", '"'):
        return text
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"{key}='{escaped}'"
