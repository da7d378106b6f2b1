r"""Where in an epoch a worker is: states, and what changes them.

    a checkpoint of its middle, of a hook behind a mini-batch, or of its end
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
        └──────── the callbacks of all workers may hear of its end ────────┘

:data:`TABLE` is the same as data. :mod:`hybridtrain.lightning.checkpointing.epoch_position` applies
it. Lightning has no such state. It has four counters of epochs and four of mini-batches; what they
say about a moment is said here, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class EpochState(StrEnum):
    """Of one worker."""

    BETWEEN = "between"  # none is under way: the next one begins with its first mini-batch
    RESUMED = "resumed"  # a checkpoint was written in its middle; nothing of it was done here
    RESUMED_IN_HOOK = "resumed in hook"  # likewise, before the validation that may be due
    RESUMED_AT_END = "resumed at end"  # likewise, behind all of its mini-batches
    UNDER_WAY = "under way"
    AT_END = "at end"  # this worker has had its last mini-batch, which others may not have
    MADE_UP = "made up"  # the loaders are iterated over once more, for what lost workers have left
    OVER = "over"  # all have met behind their last mini-batch


class EpochEvent(StrEnum):
    """What happens to it."""

    RESUMES = "resumes"
    RESUMES_IN_HOOK = "resumes in hook"
    RESUMES_AT_END = "resumes at end"
    BEGINS = "begins"  # from its first mini-batch
    GOES_ON = "goes on"  # from where the checkpoint was written
    REACHES_END = "reaches its end"
    IS_CONTINUED = "is continued"  # something was left that can be made up for
    ALL_MEET = "all meet"
    CLOSES = "closes"  # all workers have come to its end, and callbacks hear of it


S, E = EpochState, EpochEvent
RESUMED = (S.RESUMED, S.RESUMED_IN_HOOK, S.RESUMED_AT_END)

# What is not listed has no effect. A search for a learning rate trains, and restores, before.
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
    """Whether no epoch (or mini-batch) is under way, but perhaps callbacks hear of its end."""
    return counts["ready"] == counts["started"] == counts["processed"]


def is_in_end_hook(counts: Mapping[str, int]) -> bool:
    """Whether callbacks hear of the end of an epoch (or mini-batch)."""
    return is_settled(counts) and counts["processed"] == counts["completed"] + 1
