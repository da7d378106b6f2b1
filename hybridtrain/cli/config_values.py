"""Values of a configuration: as overrides, which Hydra reads back, and as plain data."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

RUN_DIR = "{run_dir}"  # stands for the run's directory, which is another one in a replay

# ---- overrides ----------------------------------------------------------------------------------


def parse(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides by Hydra's grammar; raises Hydra's OverrideParseException."""
    return OverridesParser.create().parse_overrides(list(overrides))


def overrides_of(job: Any) -> list[str]:
    """The overrides of a job (Hydra's node), in whose texts OmegaConf sees interpolations."""
    content: Any = OmegaConf.to_container(job.overrides.task, resolve=False)
    return [str(text) for text in content]


def quoted(key: str, value: object) -> str:
    """An override, its value quoted for Hydra, and no ``${`` in it resolved."""
    return f"{key}={in_quotes(literal(str(value)))}"


def in_quotes(text: str) -> str:
    """Hydra takes a backslash for one, but in front of a quote."""
    escaped = re.sub(r"(\\*)('|$)", lambda x: 2 * x[1] + ("\\'" if x[2] else ""), text)
    return f"'{escaped}'"


def assignments(values: Mapping[str, object]) -> list[str]:
    """Overrides that give each key its value, which is not quoted."""
    return [f"{key}={value}" for key, value in values.items()]


def resuming(directory: str) -> str:
    """The option, as it is typed in a shell."""
    plain = f"resume={directory}"
    try:
        (read,) = parse([plain])
        if not read.is_sweep_override() and read.value() == directory == shlex.quote(directory):
            return plain
    except Exception:  # Hydra's
        pass
    return shlex.quote(f"resume={in_quotes(directory)}")


# ---- plain data ---------------------------------------------------------------------------------


def portable(cfg: DictConfig) -> dict[str, Any]:
    """The resolved configuration, with a placeholder for the run's directory."""
    copy = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    OmegaConf.set_struct(copy, False)
    copy.run_dir = RUN_DIR
    content: Any = OmegaConf.to_container(copy, resolve=True)
    return {str(key): value for key, value in content.items()}


def placed(content: Any, run_dir: str | Path, former: str = RUN_DIR) -> Any:
    """Keys and values with ``run_dir`` for the placeholder, or for what it was called before."""
    match content:
        case dict():
            pairs = content.items()
            return {placed(k, run_dir, former): placed(v, run_dir, former) for k, v in pairs}
        case list():
            return [placed(value, run_dir, former) for value in content]
        case str():
            return content.replace(former, os.fspath(run_dir))
    return content


def literal(content: Any) -> Any:
    """Plain values in which OmegaConf resolves nothing: a ``${`` is one."""
    match content:
        case dict():
            return {key: literal(value) for key, value in content.items()}
        case list():
            return [literal(value) for value in content]
        case str():
            return re.sub(r"(\\*)\$\{", lambda x: 2 * x[1] + "\\${", content)
    return content


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()


def changed_keys(then: Any, now: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two configurations differ: key, value then, value now; ``ABSENT``: there is none."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in sorted({*then, *now}):
            inner = f"{path}.{key}" if path else str(key)
            yield from changed_keys(then.get(key, ABSENT), now.get(key, ABSENT), inner)
    elif then != now:
        yield path, then, now
