"""Lightning's counters in a checkpoint: read them, and set them back to the last step.

A checkpoint holds no accumulated gradients, so mini-batches count up to the last step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridtrain.lightning.checkpointing.epoch_state import is_in_end_hook, is_settled
from hybridtrain.lightning.hooks.loop_hooks import add_to_saved_logged_step, saved_logged_step


def reopen(loops: dict[str, Any]) -> None:
    """Let the resumed run end this epoch again."""
    for counts in loops["epoch_progress"].values():
        counts["processed"] -= 1


def count_from_zero(checkpoint: dict[str, Any]) -> None:
    """Set this epoch's count of updates that are not in Lightning's counters yet to zero.

    Within a step Lightning's count is one short of the server's version until Lightning adds this
    step; in an epoch's first step it is -1 if the version did not change.
    """
    for counts in _step_counts(checkpoint["loops"]["fit_loop"]):
        missing = max(-counts["current"]["completed"], 0)
        for each in (counts["total"], counts["current"]):
            each.update({key: each[key] + missing for key in ("ready", "completed")})
        checkpoint["global_step"] += missing
    loops = checkpoint["loops"]["fit_loop"]
    add_to_saved_logged_step(loops, max(-saved_logged_step(loops), 0))


def take_off_steps(checkpoint: dict[str, Any], steps: int, logged: int) -> None:
    """Count so many steps less, which the resumed run makes again; ``logged``: rows before them."""
    loops = checkpoint["loops"]["fit_loop"]
    automatic, _ = _step_counts(loops)
    for each in (automatic["total"], automatic["current"]):
        each.update({key: each[key] - steps for key in ("ready", "completed")})
    checkpoint["global_step"] -= steps
    add_to_saved_logged_step(loops, logged - saved_logged_step(loops))


def _step_counts(loops: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Saved counts of updates, of automatic and of manual optimization."""
    automatic = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
    return automatic, loops["epoch_loop.manual_optimization.optim_step_progress"]


def validate_again(loops: dict[str, Any], before: int) -> None:
    """Let the resumed run repeat the validation from its beginning.

    With counters of its first mini-batch, Lightning resumes in the validation.

    Args:
        loops: saved counters.
        before: mini-batches of earlier validations in this epoch.
    """
    progress = loops["epoch_loop.val_loop.batch_progress"]
    for counts, done in ((progress["total"], before), (progress["current"], 0)):
        counts.update(ready=done + 1, started=done + 1, processed=done, completed=done)
    progress["is_last_batch"] = False


def next_row(checkpoint: Mapping[str, Any]) -> int:
    """The number of the loggers' next row in a run that resumes from it; 0: unknown.

    Rows count mini-batches under manual optimization, which may make any number of steps in each.
    """
    try:
        loops = checkpoint["loops"]["fit_loop"]
        if _step_counts(loops)[1]["total"]["completed"] > 0:
            batches, epoch = loops["epoch_loop.batch_progress"]["total"], loops["epoch_progress"]
            under_way = epoch["current"]["started"] > epoch["current"]["processed"]
            return saved_logged_step(loops) + (is_settled(batches) and under_way)
    except (KeyError, TypeError):  # of another program
        pass
    return int(checkpoint.get("global_step", 0))


def is_epoch_beginning(epoch: Mapping[str, int]) -> bool:
    """Whether the hooks of an epoch's beginning run."""
    return epoch["ready"] - 1 == epoch["started"] == epoch["processed"]


def batches_done(progress: dict[str, Any]) -> int:
    """Mini-batches of the epoch that Lightning will count as done when it resumes."""
    return int(progress["current"]["processed" if is_in_batch_hook(progress) else "completed"])


def is_in_batch_hook(progress: dict[str, Any]) -> bool:
    """Whether a callback wrote it at the end of a mini-batch, which Lightning then counts."""
    return is_in_end_hook(progress["total"])


def leave_batch_hook(loops: dict[str, Any]) -> int:
    """Count the mini-batch; return the number of mini-batches with a step."""
    progress = loops["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        counts["completed"] = counts["processed"]
    return saved_logged_step(loops) + 1


def set_back(loops: dict[str, Any], batches: int) -> int | None:
    """Let ``batches`` mini-batches of the epoch be done; return those with a step, of all epochs.

    If a validation followed the last of them, Lightning would take the file for one written
    then, before it counted that mini-batch.
    """
    progress = loops["epoch_loop.batch_progress"]
    if batches_done(progress) == batches and is_settled(progress["total"]):
        return None
    begins = is_epoch_beginning(loops["epoch_progress"]["current"])  # those are of the epoch before
    before = progress["total"]["completed"] - (0 if begins else progress["current"]["completed"])
    progress["current"] = dict.fromkeys(progress["current"], batches)
    progress["total"] = dict.fromkeys(progress["total"], before + batches)
    progress["is_last_batch"] = False
    if batches == 0:  # the epoch has not begun
        epoch = loops["epoch_progress"]
        for counts in (epoch["total"], epoch["current"]):
            counts.update(dict.fromkeys(("ready", "started"), counts["processed"]))
    for steps in _step_counts(loops):
        steps["total"]["ready"] = steps["total"]["completed"]  # a step was under way
    return saved_logged_step(loops)
