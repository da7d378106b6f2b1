"""Makers apply updates for a worker, or leave them to the server: one contract.

``maker.py`` has the contract, ``made_maker`` here chooses the maker by the choice that server and
workers have made for the run. The server's part is in
:mod:`hybridtrain.engine.server.workers_updates`.
"""

from __future__ import annotations

from collections.abc import Callable

from hybridtrain.engine.memory import Store, UpdateMaker
from hybridtrain.engine.server.shared_parameters import round_of, step_log_of
from hybridtrain.engine.worker.makers.borrowed_update import (
    BorrowedUpdate,
    Found,
    SteppedOptimizers,
)
from hybridtrain.engine.worker.makers.in_place import InPlaceMaker
from hybridtrain.engine.worker.makers.last_worker import LastWorkerMaker
from hybridtrain.engine.worker.makers.logged_steps import LoggedSteps, StepWriter
from hybridtrain.engine.worker.makers.maker import Maker
from hybridtrain.engine.worker.makers.one_by_one import OneByOneMaker
from hybridtrain.engine.worker.surroundings import Bells


def made_maker(
    worker: int,
    store: Store,
    bells: Bells | None,
    log: LoggedSteps | None,
    stepped: SteppedOptimizers,
    found: Found,
    catch_up: Callable[[], object],
) -> Maker:
    """The maker of this worker.

    Args:
        worker: its number.
        store: the shared rows; :attr:`Store.maker` decides.
        bells: wake the other workers.
        log: of a replay; a recorded run gets one here.
        stepped: returns the optimizers, each with the slot numbers of its parameters.
        found: requests the places of an optimizer's state.
        catch_up: returns when the server has read all that is logged and noted.
    """
    if store.maker is UpdateMaker.SERVER:
        return Maker()
    if store.maker is UpdateMaker.IN_PLACE:
        return InPlaceMaker(worker, store)
    if log is None and (steps := step_log_of(store)).is_on:
        log = StepWriter(worker, store, steps, catch_up)
    borrowed = BorrowedUpdate(store, stepped, found)
    if store.maker is UpdateMaker.ONE_BY_ONE:
        return OneByOneMaker(worker, store, borrowed, log)
    assert bells is not None, "workers without bells send each push"
    return LastWorkerMaker(worker, round_of(store), bells, borrowed, log)
