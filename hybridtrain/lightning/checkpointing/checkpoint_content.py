"""What a Lightning checkpoint may say, checked before anything is restored from it.

Lightning and torch take what they find: a count of −5, a learning rate of NaN, a text for an epoch.
What this describes is theirs, and what this package adds; states of callbacks, of schedulers and of
users' own parts are for these to judge.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hybridtrain.errors import UserError
from hybridtrain.lightning.checkpointing.mid_epoch import read_format
from hybridtrain.util.descriptions import EACH, Rule, misfit, real, whole

_VERSION = Rule(
    "a version such as 2.6.1",
    lambda x: isinstance(x, str) and re.match(r"\d{1,9}(\.\d{1,9}){1,3}", x) is not None,
)
_COUNTS = {EACH: whole()}
_PROGRESS = {"total": _COUNTS, "current": _COUNTS}
_BATCHES = {**_PROGRESS, "is_last_batch": bool}
_FIT_LOOP = {
    "epoch_progress": _PROGRESS,
    "epoch_loop.batch_progress": _BATCHES,
    "epoch_loop.state_dict?": {"_batches_that_stepped?": whole()},
    "epoch_loop.scheduler_progress?": _PROGRESS,
    "epoch_loop.automatic_optimization.optim_progress?": {
        "optimizer": {"step": _PROGRESS, "zero_grad": _PROGRESS}
    },
    "epoch_loop.manual_optimization.optim_step_progress?": _PROGRESS,
    "epoch_loop.val_loop.batch_progress?": _BATCHES,
}
_GROUP = {
    "params": [whole()],
    **dict.fromkeys(("lr?", "initial_lr?", "momentum?", "eps?"), (Tensor, real(0))),
    "weight_decay?": (Tensor, real()),
    "betas?": [(Tensor, real(0))],
}
_VALUE = (Tensor, None, bool, real(), str, list, dict)  # of a state; a text may name a method
_OPTIMIZER = {"state?": {EACH: {EACH: _VALUE}}, "param_groups?": [_GROUP]}
_SCHEDULER = {"last_epoch?": whole(-1), "_step_count?": whole(), "base_lrs?": [(Tensor, real())]}
_LOADER = {
    **dict.fromkeys(("lap", "batches", "length"), whole()),
    "spans": [Rule("two positions", lambda x: misfit(x, [whole()], "") is None and len(x) == 2)],
    "seed": (None, whole()),
    "indices": (None, Tensor),
    "sizes?": (None, [whole()]),
}
_DICE = {"torch": Tensor}
_OURS = {
    "format": whole(1),
    "epoch": whole(),
    "batches": whole(),
    "loaders": [_LOADER],
    "over?": bool,
    "dice?": (None, _DICE),
    "metrics?": {EACH: Tensor},
}
_WEIGHTS = {
    "state_dict": {EACH: object},
    "epoch?": whole(),
    "global_step?": whole(),
    "pytorch-lightning_version": _VERSION,
    "hybridtrain?": _OURS,
}
_FULL = {
    "loops?": {"fit_loop": _FIT_LOOP},
    "optimizer_states": [_OPTIMIZER],
    "lr_schedulers": [_SCHEDULER],
    "callbacks?": {EACH: object},
}


def check_content(content: Any, source: str, resumes: bool) -> None:
    """Refuse what no run can have written.

    Args:
        content: of the checkpoint.
        source: what the user has given, for the complaint: ``ckpt=last.ckpt``.
        resumes: training is to go on from it; else only its weights are wanted.

    Raises:
        UserError: naming the entry, and what it may be.
    """
    if not isinstance(content, Mapping) or not isinstance(content.get("state_dict"), Mapping):
        raise UserError(f"{source}: this file holds no Lightning checkpoint (no state_dict)")
    read_format(content)
    if resumes and "optimizer_states" not in content:
        raise UserError(
            f"{source}: this checkpoint holds weights only (save_weights_only=True wrote it), and "
            "training cannot go on without the optimizer's state; give a full checkpoint; to begin "
            "anew with these weights load them in your module, to test them say test_only=true"
        )
    described = {**_WEIGHTS, **_FULL} if resumes else _WEIGHTS
    if (fault := misfit(content, described, "checkpoint")) is not None:
        raise UserError(f"{source}: the file was changed or is damaged: {fault}")
