"""Names of strategies that set an exchange and an update besides the policy."""

from __future__ import annotations

from typing import Any

SCHEMES: dict[str, dict[str, Any]] = {
    "local_sgd": {"policy": "hybrid", "exchange": "movement"},
    "downpour": {"policy": "async", "exchange": "accumulated"},
    "post_local_sgd": {
        "policy": "hybrid",
        "exchange": {"name": "movement", "every": {"then": 16, "at": "first_decay", "first": 1}},
    },
    "easgd": {"policy": "async", "exchange": "elastic"},
    "diloco": {
        "policy": "hybrid",
        "exchange": {"name": "movement", "every": 30},
        "update": {"name": "sgd", "lr": 0.7, "momentum": 0.9, "nesterov": True},
    },
    "streaming_diloco": {
        "policy": "hybrid",
        "exchange": "streaming",
        "update": {"name": "sgd", "lr": 0.7, "momentum": 0.9, "nesterov": True},
    },
    "async_diloco": {
        "policy": "grace",
        "exchange": {"name": "movement", "every": 30},
        "update": "delayed_nesterov",
    },
    "sign_sgd": {
        "policy": "hybrid",
        "exchange": "sign_sgd",
    },
    "power_sgd": {
        "policy": "hybrid",
        "exchange": {"name": "gradient", "compress": "power_sgd"},
    },
}


def parts_of(name: str) -> dict[str, Any]:
    """Arguments of ``HybridStrategy`` for the name of a scheme or of a policy."""
    return SCHEMES.get(name, {"policy": name})
