r"""A worker's position in an epoch: states, events, and the table of transitions.

    a checkpoint of its middle, of the hook after a mini-batch, or of its end
        │
        ▼                  first mini-batch
    RESUMED ───────────────────────┐
    RESUMED_IN_HOOK ───────────────┤
    RESUMED_AT_END ────────────────┤
                                   ▼    last one            all have met
    BETWEEN ──────────────────▶ UNDER_WAY ─────▶ AT_END ────────────────▶ OVER
        ▲        begins                          │    ▲                    │
        │                   lost samples are left│    │last one            │
        │                                        ▼    │                    │
        │                                       MADE_UP                    │
        └──────── closes: callbacks of the epoch's end may follow ─────────┘

:data:`TABLE` is the same as data; :class:`EpochPosition` of the
checkpoints applies it. Lightning has no such state, but four counters of epochs and four of
mini-batches, which the functions below read.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class EpochState(StrEnum):
    """The state of one worker."""

    BETWEEN = "between"  # no epoch has begun: the next one begins with its first mini-batch
    RESUMED = "resumed"  # from a checkpoint of its middle; nothing has been trained here
    RESUMED_IN_HOOK = "resumed in hook"  # likewise, before the validation that may be due
    RESUMED_AT_END = "resumed at end"  # likewise, after its last mini-batch
    UNDER_WAY = "under way"
    AT_END = "at end"  # this worker has done its last mini-batch; others may not have
    MADE_UP = "made up"  # the loaders iterate once more, over the samples of lost workers
    OVER = "over"  # all workers have met after their last mini-batch


class EpochEvent(StrEnum):
    """An event of the epoch."""

    RESUMES = "resumes"
    RESUMES_IN_HOOK = "resumes in hook"
    RESUMES_AT_END = "resumes at end"
    BEGINS = "begins"  # from its first mini-batch
    GOES_ON = "goes on"  # from where the checkpoint was written
    REACHES_END = "reaches its end"
    IS_CONTINUED = "is continued"  # lost workers have left samples that can be trained on
    ALL_MEET = "all meet"
    CLOSES = "closes"  # all workers have reached its end; callbacks follow


S, E = EpochState, EpochEvent
RESUMED = (S.RESUMED, S.RESUMED_IN_HOOK, S.RESUMED_AT_END)

# Other events have no effect. A search for a learning rate trains and restores before.
TABLE: dict[tuple[EpochState, EpochEvent], EpochState] = {
    **{(state, E.RESUMES): S.RESUMED for state in S},
    **{(state, E.RESUMES_IN_HOOK): S.RESUMED_IN_HOOK for state in S},
    **{(state, E.RESUMES_AT_END): S.RESUMED_AT_END for state in S},
    **{(state, E.BEGINS): S.UNDER_WAY for state in S},
    **{(state, E.GOES_ON): S.UNDER_WAY for state in RESUMED},
    # A resumed epoch may have no mini-batch left.
    **{(state, E.REACHES_END): S.AT_END for state in (*RESUMED, S.UNDER_WAY, S.MADE_UP)},
    (S.AT_END, E.IS_CONTINUED): S.MADE_UP,
    (S.AT_END, E.ALL_MEET): S.OVER,
    **{(state, E.CLOSES): S.BETWEEN for state in S},  # a stop may end it anywhere
}


# ---- Lightning's four counters ------------------------------------------------------------------


def is_settled(counts: Mapping[str, int]) -> bool:
    """Whether no epoch (or mini-batch) is under way, except for the callbacks of its end."""
    return counts["ready"] == counts["started"] == counts["processed"]


def is_in_end_hook(counts: Mapping[str, int]) -> bool:
    """Whether the callbacks of an epoch's (or mini-batch's) end run."""
    return is_settled(counts) and counts["processed"] == counts["completed"] + 1
