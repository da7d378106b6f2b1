r"""The states of a worker over all its processes in a run, and the events that change them.

                 first step           answered
    STARTING ────────────────▶ WAITING ◀──────▶ COMPUTING ◀──────▶ MEETING
        │                         ▲  │               │                │
        │              first step │  └──── fails, to come back ───────┘
        └─────────────────────┐   │                  │
                              │  RESTARTING ───────┐ │
                              │   ▲                ▼ ▼
              progress known, │   └─── CALLED ◀── FAILED   its process has ended, its delay is over
              started again       │        └───────▶ │     no process can be started

    the run ends:  all of them ──▶ STOPPED ──▶ SAVING ──▶ ENDED ──▶ GONE

:data:`TABLE` is the same as data; :mod:`hybridtrain.recovery.roster` decides what follows.
"""

from __future__ import annotations

from enum import StrEnum


class WorkerState(StrEnum):
    """The state of one worker."""

    STARTING = "starting"  # first process, no step yet
    COMPUTING = "computing"
    WAITING = "waiting"  # in a step: for a release, its turn or a mean
    MEETING = "meeting"  # in a barrier or reduction
    FAILED = "failed"  # to be restarted
    CALLED = "called"  # to be restarted once another worker has reported the progress
    RESTARTING = "restarting"  # a later process, no step yet
    STOPPED = "stopped"  # waits for the permission to write the last checkpoint
    SAVING = "saving"  # writes it
    ENDED = "ended"  # has nothing left to do
    GONE = "gone"  # no process, and none will follow


class LifecycleEvent(StrEnum):
    """An event that changes the state of one worker."""

    WAITS = "waits"  # in a step
    MEETS = "meets"
    GOES_ON = "goes on"  # the server has answered
    BREAKS = "breaks"  # it has failed, and will be restarted
    CALL = "call"  # its process has ended and its delay is over
    START = "start"  # a new process runs
    REFUSE = "refuse"  # the system could not start one
    STOPS = "stops"
    NAME = "name"  # the roster lets it write the last checkpoint
    ENDS = "ends"  # it has finished, failed for good, or is dismissed
    DIES = "dies"  # its process has ended, and none will follow


S, E = WorkerState, LifecycleEvent
TRAINING = (S.COMPUTING, S.WAITING, S.MEETING)
THERE = (S.STARTING, *TRAINING, S.RESTARTING)
AWAY = (S.FAILED, S.CALLED)
LAST = (S.STOPPED, S.SAVING)

# An event that is not listed for a state comes too late and has no effect.
TABLE: dict[tuple[WorkerState, LifecycleEvent], WorkerState] = {
    **{(state, E.WAITS): S.WAITING for state in (S.STARTING, S.COMPUTING, S.MEETING)},
    (S.RESTARTING, E.WAITS): S.WAITING,  # from here on it can report the progress
    **{(state, E.MEETS): S.MEETING for state in (S.COMPUTING, S.WAITING)},
    **{(state, E.GOES_ON): S.COMPUTING for state in (S.WAITING, S.MEETING)},
    **{(state, E.BREAKS): S.FAILED for state in THERE},
    (S.FAILED, E.CALL): S.CALLED,
    **{(state, E.START): S.RESTARTING for state in (S.CALLED, S.FAILED, S.GONE)},
    (S.CALLED, E.REFUSE): S.FAILED,
    **{(state, E.STOPS): S.STOPPED for state in THERE},
    (S.STOPPED, E.NAME): S.SAVING,
    **{(state, E.ENDS): S.ENDED for state in (*THERE, *AWAY, *LAST)},
    **{(state, E.DIES): S.GONE for state in (*THERE, *AWAY, *LAST, S.ENDED)},
}
