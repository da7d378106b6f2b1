"""All strategies, with such parameters that a few steps show what they do."""

from __future__ import annotations

from typing import Any

from hybridtrain.engine.options.schemes import parts_of
from hybridtrain.lightning.strategy import HybridStrategy

_SLOWLY: dict[str, dict[str, Any]] = {
    "post_local_sgd": {"exchange": {"name": "movement", "every": {"then": 3, "at": 2}}},
    "local_sgd": {"exchange": {"name": "movement", "every": 3}},
    "diloco": {"exchange": {"name": "movement", "every": 3}},
    "async_diloco": {"exchange": {"name": "movement", "every": 3}},
    "easgd": {"exchange": {"name": "elastic", "every": 2}},
    "streaming_diloco": {
        "exchange": {"name": "streaming", "every": 4, "fragments": 2, "overlap": 1}
    },
    "grace": {"policy": {"name": "grace", "window_s": 0.01}},
    "switch": {"policy": {"name": "switch", "first": "hybrid", "then": "async", "at_update": 4}},
}
# Their limits that all step together, and what else a worker may keep between two steps.
_OTHERS: dict[str, dict[str, Any]] = {
    "backup, k=W": {"policy": {"name": "backup", "k": -1}},
    "ssp, lead=0": {"policy": {"name": "ssp", "lead": 0}},
    "async, not late": {"policy": {"name": "async", "max_staleness": 0}},
    "easgd, hybrid": {"policy": "hybrid", "exchange": {"name": "elastic", "every": 2}},
    "local_sgd, int8": {
        "policy": "hybrid",
        "exchange": {"name": "movement", "every": 3, "compress": "int8"},
    },
    "downpour, every 3": {
        "policy": "async",
        "exchange": {"name": "accumulated", "n_push": 3, "n_fetch": 2},
    },
    "hogwild, private": {
        "policy": "hogwild",
        "exchange": {"name": "in_place", "optimizer_state": "private"},
    },
}
NAMES = (
    *("hybrid", "synchronous", "backup", "k_async", "k_batch_sync", "k_batch_async", "softsync"),
    *("ssp", "async", "grace", "switch", "hogwild", "local_sgd", "downpour", "post_local_sgd"),
    *("easgd", "diloco", "streaming_diloco", "async_diloco"),
)
ALL = (*NAMES, *_OTHERS)
OBSERVED = (*ALL, "sandblaster")  # whose modules are others
_LOCAL = {"local_sgd", "downpour", "post_local_sgd", "easgd", "diloco", "streaming_diloco"}
_LOCAL |= {"downpour, every 3", "async_diloco", "easgd, hybrid", "local_sgd, int8"}
# Whoever these wait for is always the same, so that a run repeats to the bit.
_LOCK_STEP = {"hybrid", "synchronous", "local_sgd", "post_local_sgd", "diloco"}
_LOCK_STEP |= {"streaming_diloco", "backup, k=W", "ssp, lead=0", "easgd, hybrid"}
_LOCK_STEP |= {"local_sgd, int8"}
_EACH_IS_AN_UPDATE = {"async", "hogwild", "hogwild, private", "downpour", "grace"}
_EACH_IS_AN_UPDATE |= {"sandblaster"}  # each epoch


def make(name: str, workers: int, **options: Any) -> Any:
    """The strategy; ``auto`` is Lightning's own on one device."""
    if name == "auto":
        return "auto"
    parts = _OTHERS.get(name) or parts_of(name) | _SLOWLY.get(name, {})
    policy = parts["policy"]
    if isinstance(policy, dict) and policy.get("k") == -1:
        parts = parts | {"policy": policy | {"k": workers}}
    return HybridStrategy(**parts, **options)


def kinds(name: str, workers: int) -> tuple[str, ...]:
    """How optimizers may be stepped; see ``subjects.KINDS``."""
    if name == "sandblaster":
        return ("whole",)
    found = ["automatic", "accumulating"]
    if name not in _LOCAL:
        found += ["manual", "two"]
    if workers > 1 and name in {"async", "downpour", "grace"}:
        found += ["sums"]
    return tuple(found)


def cells() -> list[tuple[str, int, str]]:
    """Every strategy with 1, 2, 3 workers, and one optimizer that is stepped each way."""
    return [
        (name, workers, kind)
        for name in ALL
        for workers in (1, 2, 3)
        for kind in kinds(name, workers)
        if kind in ("automatic", "accumulating", "manual")
    ]


def repeats(name: str, workers: int) -> bool:
    """Whether two runs are the same to the bit."""
    return workers == 1 or name in _LOCK_STEP


def is_lock_step(name: str) -> bool:
    """Whether all workers are at the same step, so that all may do something in mid-epoch."""
    return name in _LOCK_STEP - {"synchronous"} or name == "auto"


def counts_exactly(name: str, workers: int) -> bool:
    """Whether the number of updates is known beforehand."""
    return repeats(name, workers) or name in _EACH_IS_AN_UPDATE


def drops(name: str) -> bool:
    """Whether a mini-batch may be done twice, as one that came late is."""
    return name in {"backup", "k_batch_sync", "async, not late", "sandblaster"}


def tells_late(name: str) -> bool:
    """Whether the samples since the last exchange are not part of the statistics."""
    return name == "easgd, hybrid"


def may_lose(name: str) -> bool:
    """Whether workers that are lost may be replaced."""
    return name != "auto" and not (name in _LOCAL and name in _LOCK_STEP)
