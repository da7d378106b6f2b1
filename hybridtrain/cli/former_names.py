"""What a configuration of an earlier version calls things that have another name now.

The directory of an older run holds its configuration, and its record a copy of it; both name
classes of this package by ``_target_``. Such a run can still be resumed and repeated.
"""

from __future__ import annotations

from typing import Any

# Only what a configuration could name; the modules of tasks are where they were.
_MODULES = {
    "hybridtrain.app.claim": "hybridtrain.cli.claim",
    "hybridtrain.app.ddp": "hybridtrain.cli.lightning_ddp",
    "hybridtrain.app.monitor": "hybridtrain.cli.telemetry.monitor",
    "hybridtrain.app.mute": "hybridtrain.cli.telemetry.mute_logger",
    "hybridtrain.app.progress": "hybridtrain.cli.telemetry.progress",
    "hybridtrain.app.straggler": "hybridtrain.cli.straggler",
    "hybridtrain.lightning.periodic": "hybridtrain.lightning.checkpointing.periodic",
}

# Options of strategies that are no more, and changed no bit.
_GONE = ("overlap_update",)


def present_name(name: str) -> str:
    """The name under which ``name`` is found in this version."""
    module, dot, attribute = name.rpartition(".")
    return _MODULES.get(module, module) + dot + attribute


def with_present_names(value: Any) -> Any:
    """A configuration as plain values, or an override, with every target under its present name."""
    match value:
        case dict():
            return {
                key: present_name(each)
                if key == "_target_" and isinstance(each, str)
                else with_present_names(_without_gone(each) if key == "strategy" else each)
                for key, each in value.items()
            }
        case list():
            return [with_present_names(each) for each in value if not _is_gone(each)]
        case str() if "_target_=" in value:
            key, _, name = value.partition("_target_=")
            return f"{key}_target_={present_name(name)}"
    return value


def _without_gone(strategy: Any) -> Any:
    if not isinstance(strategy, dict):
        return strategy
    return {key: each for key, each in strategy.items() if key not in _GONE}


def _is_gone(override: Any) -> bool:
    name = override.partition("=")[0].lstrip("+") if isinstance(override, str) else ""
    return name in {f"strategy.{each}" for each in _GONE}
