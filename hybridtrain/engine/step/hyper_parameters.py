"""Compare an optimizer's hyper-parameters with those that the server has."""

from __future__ import annotations

from collections.abc import Sequence
from operator import or_
from typing import Any

import torch

from hybridtrain.engine.step.remote_state import is_theirs
from hybridtrain.engine.updates.groups import Groups, differences, plain, untouched


class HyperParameters:
    """A worker's record of the hyper-parameters that the server has of one optimizer.

    Args:
        optimizer: the user's, whose ``param_groups`` schedulers and hooks change.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._sent = self._known = plain(optimizer)  # a push may be broken off, and not be heard

    def changed(self, whole: bool, scheduled: bool = False) -> Groups | None:
        """Hyper-parameters that differ from the last ones sent; they count as sent now.

        ``whole``: all of them; ``scheduled``: those that a schedule moves, too.
        """
        now = self._optimizer.param_groups
        if not (whole or scheduled) and len(now) == len(self._sent) and untouched(now, self._sent):
            return None
        groups = plain(self._optimizer)
        changed = groups if whole else differences(self._sent, groups)
        if scheduled:
            moved = [
                {name: each[name] for name in _scheduled(group)}
                for each, group in zip(groups, now, strict=True)
            ]
            told = tuple(map(or_, moved, changed or [{}] * len(moved)))
            changed = told if any(told) else None
        self._sent = groups
        return changed

    def confirm(self, news: Groups | None) -> None:
        """The push was heard; ``news``: what the optimizer itself has changed in the server."""
        if news is not None and len(news) == len(self._sent):
            for group, changed in zip(self._optimizer.param_groups, news, strict=True):
                group.update(changed)
            own = zip(self._sent, plain(self._optimizer), news, strict=True)
            self._sent = tuple(old | {k: now[k] for k in changed} for old, now, changed in own)
        self._known = self._sent

    def put_back(self) -> None:
        """The push was not heard: they are again what they were in it."""
        for group, values in zip(self._optimizer.param_groups, self._sent, strict=False):
            group.update(values)

    def newest(self, mine: list[dict[str, Any]], theirs: Sequence[Any]) -> list[dict[str, Any]]:
        """Merge the hyper-parameters that are here with the server's, group by group."""
        if len(mine) != len(theirs):
            return mine
        known = self._known if len(self._known) == len(theirs) else theirs
        return [
            group | {k: v for k, v in there.items() if is_theirs(k, group, old) and k not in own}
            for group, old, there in zip(mine, known, theirs, strict=True)
            for own in [_scheduled(group)]
        ]


def _scheduled(group: dict[str, Any]) -> set[str]:
    """Names of the hyper-parameters that a schedule moves, by the marks torch leaves in a group."""
    own = {"lr"} if "initial_lr" in group else set()
    return own | ({"momentum", "betas"} if "max_momentum" in group else set())
