"""Learning-rate schedules as they were at an earlier moment, for a checkpoint of that moment."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from operator import or_
from typing import Any

from hybridtrain.engine.updates.groups import Groups, plain


@dataclass(frozen=True)
class SavedSchedules:
    """States of schedules, and their optimizers' groups without parameters, at one moment.

    ``None``, or no groups: a checkpoint has them as they are when it is written.
    """

    states: list[dict[str, Any] | None]
    groups: list[Groups]

    @classmethod
    def of(cls, trainer: Any, by_step: bool = True) -> SavedSchedules:
        """The present ones; not ``by_step``: of schedules by epoch alone."""
        configs = [x for x in trainer.lr_scheduler_configs if by_step or x.interval == "epoch"]
        changed = {id(getattr(config.scheduler, "optimizer", None)) for config in configs}
        groups = [plain(each) if id(each) in changed else () for each in trainer.optimizers]
        states = [_state(x) if x in configs else None for x in trainer.lr_scheduler_configs]
        return cls(states, groups)

    def with_changes(self, before: SavedSchedules, now: SavedSchedules) -> SavedSchedules:
        """These, and what schedules by step have changed since ``before``: they scale rates."""
        of_optimizers = zip(self.groups, before.groups, now.groups, strict=True)
        groups = [tuple(map(_scaled, *each)) for each in of_optimizers]
        return SavedSchedules(self.states, groups)

    def give(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """The checkpoint with these."""
        states = zip(checkpoint["lr_schedulers"], self.states, strict=True)
        optimizers = zip(checkpoint["optimizer_states"], self.groups, strict=True)
        return checkpoint | {
            "lr_schedulers": [now if kept is None else kept for now, kept in states],
            "optimizer_states": [
                state | {"param_groups": _replaced(state["param_groups"], kept)}
                if kept and "param_groups" in state
                else state
                for state, kept in optimizers
            ],
        }


def _state(config: Any) -> dict[str, Any]:
    """Its values are copies; a schedule within it keeps its optimizer."""
    return {name: copy(value) for name, value in config.scheduler.state_dict().items()}


def _scaled(kept: dict[str, Any], before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The group ``kept`` with its rate times what the rate has changed by since ``before``."""
    if before.get("lr") == now.get("lr") or not before.get("lr"):
        return kept
    return kept | {"lr": kept["lr"] * (now["lr"] / before["lr"])}


def _replaced(groups: list[dict[str, Any]], kept: Groups) -> list[dict[str, Any]]:
    """The optimizer may have got groups since."""
    return [*map(or_, groups, kept), *groups[len(kept) :]]
