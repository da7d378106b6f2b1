"""Check the JSON of a record against a description, which its readers rely on."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from hybridtrain.recording.record_file import NOBODY
from hybridtrain.util.descriptions import EACH, Rule, misfit, real, whole

_BELOW = Rule(
    "a path below the run's directory",
    lambda x: isinstance(x, str) and not (PurePath(x).is_absolute() or ".." in PurePath(x).parts),
)
_CONFIGURED = {  # by the command line
    "config": {
        "seed": (None, whole(0, 2**32 - 1)),
        "ckpt": (None, str),
        "trainer": dict,
        "strategy": dict,
        "logger": (None, dict),
    },
    "drawn_seed": (None, whole()),
    "checkpoints": [_BELOW],
    "directory": str,
    "run_dir": str,
    "ckpt?": str,
}
_ABOUT = (Rule("", lambda x: isinstance(x, dict) and "config" not in x), _CONFIGURED)
_HEADER = {
    "kinds": [str],
    "workers": whole(1, NOBODY - 1),
    **dict.fromkeys(("threads", "server_threads"), whole(1, 2**16)),
    **dict.fromkeys(("policy", "correction?", "exchange?", "update?"), str),
    "requirements": {"parameters": str},
    "versions": {EACH: str},
    "code": {EACH: str},
    "about": _ABOUT,
}
_STATS = {
    "updates": whole(),
    "training_s": real(0),
    "samples_per_s": real(0),
    "waiting_share": [real(0)],
    "dropped": [whole()],
    "staleness": {"mean": real(0), "max": whole()},
}
_TOLD = {
    "header": _HEADER,
    "begin?": {"parameters": str},
    "end?": {"parameters": (None, str), "optimizers": str, "stats?": _STATS},
    EACH: {"kind?": str, "length?": whole(), "items?": str, "batch?": whole()},  # of data, saving
}


def misfit_of_record(told: dict[str, Any]) -> str | None:
    """The first entry that does not fit the description, and why; None if all fit."""
    return misfit(told, _TOLD, "record")
