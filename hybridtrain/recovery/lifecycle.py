r"""A worker's life in a run, from its first process to its last: states, and what changes them.

                 first step           answered
    STARTING ────────────────▶ WAITING ◀──────▶ COMPUTING ◀──────▶ MEETING
        │                         ▲  │               │                │
        │              first step │  └──── fails, to come back ───────┘
        └─────────────────────┐   │                  │
                              │  RESTARTING ───────┐ │
                              │   ▲                ▼ ▼
              told, and       │   └─── CALLED ◀── FAILED   its process has ended, its time has come
              started again       │        └───────▶ │     no process can be started

    the run ends:  all of them ──▶ STOPPED ──▶ SAVING ──▶ ENDED ──▶ GONE

:data:`TABLE` is the same as data; what follows from it is decided by the roster
(:mod:`hybridtrain.recovery.roster`).
"""

from __future__ import annotations

from enum import StrEnum


class WorkerState(StrEnum):
    """Of a worker."""

    STARTING = "starting"  # its first process, which has made no step yet
    COMPUTING = "computing"
    WAITING = "waiting"  # in the middle of a step: for a release, its turn, a mean
    MEETING = "meeting"  # until all are there
    FAILED = "failed"  # and is to come back
    CALLED = "called"  # to come back as soon as somebody has told where training is
    RESTARTING = "restarting"  # another process, which has come to no step yet
    STOPPED = "stopped"  # and waits to be told whether to write the last checkpoint
    SAVING = "saving"  # writes it
    ENDED = "ended"  # and does nothing any more
    GONE = "gone"  # without a process, for good


class LifecycleEvent(StrEnum):
    """What happens to one."""

    WAITS = "waits"  # in the middle of a step
    MEETS = "meets"
    GOES_ON = "goes on"  # it has been answered
    BREAKS = "breaks"  # it has failed, and is to come back
    CALL = "call"  # its time has come
    START = "start"  # another process has been started
    REFUSE = "refuse"  # it could not be
    STOPS = "stops"
    NAME = "name"  # it is to write the last checkpoint
    ENDS = "ends"  # it has done its job, failed for good, or may go
    DIES = "dies"  # its process has ended, and none will follow


S, E = WorkerState, LifecycleEvent
TRAINING = (S.COMPUTING, S.WAITING, S.MEETING)
THERE = (S.STARTING, *TRAINING, S.RESTARTING)
AWAY = (S.FAILED, S.CALLED)
LAST = (S.STOPPED, S.SAVING)

# What is not listed has no effect: it comes too late.
TABLE: dict[tuple[WorkerState, LifecycleEvent], WorkerState] = {
    **{(state, E.WAITS): S.WAITING for state in (S.STARTING, S.COMPUTING, S.MEETING)},
    (S.RESTARTING, E.WAITS): S.WAITING,  # where it can say where training is
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
