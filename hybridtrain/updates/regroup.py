"""An optimizer whose parameter groups have changed in mid-run: unfrozen layers, added groups."""

from __future__ import annotations

import io
from typing import Any

import torch

from hybridtrain.memory import Store
from hybridtrain.updates.base import Update
from hybridtrain.updates.factory import build_update
from hybridtrain.updates.groups import Groups, Members
from hybridtrain.updates.thread_pool import Pool

States = dict[int, dict[str, Any]]  # by slot number


def regroup(
    update: Update, groups: Groups, members: Members, left: States, store: Store, pool: Pool
) -> Update:
    """The same optimizer over other groups; each parameter's state stays with it.

    Args:
        update: the one to be replaced.
        groups: all hyper-parameters of the new groups.
        members: their parameters' slot numbers.
        left: the states of parameters that have left the optimizer; kept for their return, as
            torch keeps them. Changed in place.
        store: where the masters lie.
        pool: who does the arithmetic.
    """
    optimizer, parameters = update.hand_over()
    update.close()
    for number, parameter in parameters.items():
        if parameter in optimizer.state:
            left[number] = optimizer.state.pop(parameter)
    numbers = [number for group in members for number in group]
    for number in numbers:
        if number not in parameters:
            master = store.master(store.layout.slots[number])
            parameters[number] = torch.nn.Parameter(master)
        if number in left:
            optimizer.state[parameters[number]] = left.pop(number)
    # The dictionaries stay the same objects: an optimizer that wraps another shares them with it.
    known = {id(g["params"][0]): g for g in optimizer.param_groups if g["params"]}
    optimizer.param_groups[:] = [
        _filled(known, [parameters[number] for number in inside], group)
        for group, inside in zip(groups, members, strict=True)
    ]
    return build_update(optimizer, numbers, store, pool)


def with_state(update: Update, payload: bytes, store: Store, pool: Pool) -> Update:
    """The same optimizer with another state: ``payload`` holds it by slot number."""
    optimizer, parameters = update.hand_over()
    update.close()
    states = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=False)
    optimizer.state.clear()
    optimizer.state.update({parameters.get(key, key): state for key, state in states.items()})
    return build_update(optimizer, [n for group in update.members for n in group], store, pool)


def _filled(
    known: dict[int, dict[str, Any]], inside: list[torch.nn.Parameter], group: dict[str, Any]
) -> dict[str, Any]:
    filled = known.pop(id(inside[0]), {}) if inside else {}
    filled.clear()
    filled.update({"params": inside} | group)
    return filled
