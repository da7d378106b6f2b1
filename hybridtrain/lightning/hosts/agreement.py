"""Compare the hosts of a run before it trains: versions, sources, options, configuration."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hybridtrain
from hybridtrain.lightning_package import decide
from hybridtrain.options.strategy_arguments import LightningArguments
from hybridtrain.util.option_types import hints

if TYPE_CHECKING:
    from hybridtrain.lightning.host_memory_strategy import HostMemoryStrategy

# A host may have its own: where files lie, and how its processes are started.
_OWN = {"record", "hosts_key", "start_method", "threads_per_worker", *hints(LightningArguments)}
_OWN_KEYS = {"run_dir", "logger", *(f"strategy.{name}" for name in _OWN)}
_SHOWN = 3  # differences in a message
_LONGEST = 60  # letters of a value
_configuration: dict[str, str] = {}  # of the command line


def about_this_host(strategy: HostMemoryStrategy) -> dict[str, Any]:
    """The values that must agree on all hosts, and the host's name; plain, for JSON."""
    given: Any = vars(strategy)
    options = {k: v for k, v in given.get("data_options", {}).items() if k not in _OWN}
    options["policy"] = given.get("policy")
    return {
        "name": socket.gethostname(),
        "versions": _versions(),
        "source": _digest_of_source(),
        "seed": os.environ.get("PL_GLOBAL_SEED", "not given"),
        "num_nodes": strategy.num_nodes,
        "workers": len(strategy.parallel_devices or [None]) * strategy.workers_per_device,
        "options": {name: described(value) for name, value in options.items()},
        "configuration": dict(_configuration),
    }


def compare_configuration(content: Mapping[str, Any]) -> None:
    """Let the hosts of the following run compare this configuration, which is not resolved."""
    _configuration.clear()
    _configuration.update(
        {
            key: described(value)
            for key, value in _flat(content)
            if not any(key == own or key.startswith(f"{own}.") for own in _OWN_KEYS)
        }
    )


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """The first things in which another host differs from this one, and what to do.

    Args:
        mine: :func:`about_this_host`.
        theirs: of the other host.
    """
    there = f"on {theirs.get('name', 'it')}"
    for part, advice in _ADVICE.items():
        a, b = mine.get(part), theirs.get(part)
        pairs = [(part, a, b)]
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            pairs = [(name, a.get(name), b.get(name)) for name in {**a, **b}]
        if found := [f"{name} is {y} {there} and {x} here" for name, x, y in pairs if x != y]:
            more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            return f"{', '.join(found[:_SHOWN])}{more}; {advice}"
    return None


_ADVICE = {
    "versions": "install the same on all hosts",
    "source": "install the same hybridtrain on all hosts (the digest of its files differs)",
    "seed": "call seed_everything with the same number on all hosts, or seed=NUMBER",
    "num_nodes": "give all hosts the same num_nodes",
    "workers": "give all hosts the same trainer.devices and workers_per_device",
    "options": "give all hosts the same options of the strategy",
    "configuration": "start the same command on all hosts",
}


def described(value: Any) -> str:
    """A short text that is equal on two hosts where the values are."""
    try:
        text = json.dumps(value, sort_keys=True, default=_plain)
    except (TypeError, ValueError, RecursionError):
        return _name(value)
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - 12]}… ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


def _plain(value: Any) -> Any:
    if isinstance(value, type) or callable(value) or not hasattr(value, "__dict__"):
        return _name(value)
    return {_name(value): {str(k): v for k, v in vars(value).items()}}


def _name(value: Any) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _flat(content: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(content, Mapping) and content:
        for name, value in content.items():
            yield from _flat(value, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, content


def _versions() -> dict[str, str]:
    names = ("hybridtrain", "torch", decide().replace("_", "-"))
    return {"Python": platform.python_version(), **{name: _version(name) for name in names}}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # a checkout on the path
        return "not installed"


@cache
def _digest_of_source() -> str:
    """Of the package's files."""
    root, found = Path(hybridtrain.__path__[0]), hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:16]
