"""The phases of a step, and the phase of each of Lightning's profiler actions."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """A row of the profile's table."""

    FORWARD = "forward"
    BACKWARD = "backward"
    DATA = "data"
    PUSH = "push"
    WAIT = "wait"
    PULL = "pull"
    UPDATE = "update"
    HOOKS = "hooks"
    LOOP = "loop"
    VALIDATION = "validation"
    CHECKPOINT = "checkpoint"
    SERVE = "serve"


MEANINGS = {
    Phase.FORWARD: "the training step, loss included",
    Phase.BACKWARD: "backward, and copying gradients while they are hot",
    Phase.DATA: "fetching the mini-batch and moving it to the device",
    Phase.PUSH: "collecting, checking and announcing gradients",
    Phase.WAIT: "for others, for the update, for the server's answer",
    Phase.PULL: "bringing parameters up to date",
    Phase.UPDATE: "the optimizer's arithmetic",
    Phase.HOOKS: "callbacks, hooks, schedulers, loggers",
    Phase.LOOP: "Lightning's loop, and what is not measured",
    Phase.VALIDATION: "all of it",
    Phase.CHECKPOINT: "until training goes on",
    Phase.SERVE: "requests, apart from the above",
}

# Spans inside these count for them, whatever their own phase; the later one wins.
ENCLOSING = (Phase.VALIDATION, Phase.CHECKPOINT)


def phase_of(action: str) -> Phase | None:
    """The phase of an action of Lightning's profilers; ``None``: it is not measured.

    Actions that only enclose others are not measured: their own time is the loop's.
    """
    kind, _, what = action.rpartition(".")
    if what.endswith(("_next", "batch_to_device", "_batch_transfer")):
        return None if kind == "[_EvaluationLoop]" else Phase.DATA
    if action == "save_checkpoint":
        return Phase.CHECKPOINT
    if kind.startswith("[Strategy]"):
        return {
            "training_step": Phase.FORWARD,
            "backward": Phase.BACKWARD,
            "on_train_batch_start": Phase.HOOKS,
        }.get(what)
    users = kind.startswith(("[Callback]", "[LightningModule]", "[LightningDataModule]"))
    return Phase.HOOKS if users and what != "optimizer_step" else None


def short_name(action: str) -> str:
    """The action's name in a timeline: ``[Callback]A{...}.hook`` becomes ``A.hook``."""
    kind, _, what = action.rpartition(".")
    if kind.startswith("[Callback]"):
        return f"{kind.removeprefix('[Callback]').partition('{')[0]}.{what}"
    if kind.startswith("[Lightning"):
        return f"{'module' if kind.startswith('[LightningModule]') else 'data'}.{what}"
    if kind.startswith("[Strategy]"):
        return what
    return "next mini-batch" if what.endswith("_next") else action
