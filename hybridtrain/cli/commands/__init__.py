"""The commands beside training: ``hybridtrain NAME ...``, one module each.

A module is named as its command and has ``main(arguments)``, which returns the exit status; its
docstring is its help. ``COMMANDS`` lists them. No command imports another.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

TRAIN = "train"
COMMANDS = {
    TRAIN: "train, test or sweep; the word may be left out",
    "new": "make a small project of your own in a folder",
    "compare": "put any runs side by side on one page",
    "replay": "repeat a recorded run, and say where it parts",
    "simulate": "try strategies in virtual time, with thousands of workers",
    "plan": "say which strategy on how many workers is fastest, from recorded runs",
    "doctor": "check this machine, or the connection between hosts",
    "key": "make the key that the hosts of a run share",
    "ray": "train over the hosts of a Ray cluster",
    "transcribe": "put recordings into words with a trained checkpoint",
    "vectors": "look up word vectors of a trained checkpoint",
}


def run_command(name: str, arguments: Sequence[str]) -> int:
    """Run a command other than training; returns its exit status.

    Its module is imported here: some of them need torch, which takes seconds.
    """
    status: int = import_module(f"{__name__}.{name}").main(arguments)
    return status
