"""A run's configuration as plain values that do not depend on its directory, to be compared."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

RUN_DIR = "{run_dir}"  # stands for the run's directory, which is another one in a replay


def portable(cfg: DictConfig) -> dict[str, Any]:
    """Everything resolved, with a name in the place of the run's directory."""
    copy = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    OmegaConf.set_struct(copy, False)
    copy.run_dir = RUN_DIR
    content: Any = OmegaConf.to_container(copy, resolve=True)
    return {str(key): value for key, value in content.items()}


def placed(content: Any, run_dir: Path) -> Any:
    """The other way round."""
    match content:
        case dict():
            return {key: placed(value, run_dir) for key, value in content.items()}
        case list():
            return [placed(value, run_dir) for value in content]
        case str():
            return content.replace(RUN_DIR, os.fspath(run_dir))
    return content


def changed_keys(then: Any, now: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two of them differ: the key, the value then, the value now; ``None``: there is none."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in sorted({*then, *now}):
            inner = f"{path}.{key}" if path else str(key)
            yield from changed_keys(then.get(key), now.get(key), inner)
    elif then != now:
        yield path, then, now
