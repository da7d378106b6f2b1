"""Lets commands compose their configuration in half the time, with the same outcome.

Each text of YAML is parsed once. Hydra composes a configuration once to read ``hydra.mode``, which
only a command line sets here, and once more to run.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from hydra._internal.hydra import Hydra
from omegaconf import OmegaConf

_load, _get_mode = OmegaConf.load, Hydra.get_mode
_parsed = dict[str, Any]()


def load_once(file: Any) -> Any:
    """``OmegaConf.load``; a copy of what the same text has given before."""
    if not hasattr(file, "read"):
        return _load(file)
    text = file.read()
    if text not in _parsed:
        _parsed[text] = OmegaConf.to_container(_load(io.StringIO(text)))
    return OmegaConf.create(_parsed[text])


def get_mode(hydra: Hydra, config_name: str | None, overrides: list[str]) -> Any:
    """``Hydra.get_mode``, without composing where no override is of it."""
    asked = any("hydra.mode" in each for each in overrides)
    return _get_mode(hydra, config_name, overrides) if asked else None


def parse_all(folder: Path) -> None:
    """Parse the files of a folder in advance, for processes that are forked from this one."""
    for path in folder.rglob("*.yaml"):
        with path.open() as file:
            load_once(file)
