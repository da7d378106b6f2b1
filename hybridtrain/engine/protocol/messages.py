"""Messages between workers and the server.

A worker sends requests, each answered exactly once, and notes, which are not answered. The server
sends replies, and notices without a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

from hybridtrain.engine.memory.arena import LentState, SharedState
from hybridtrain.engine.memory.layout import Layout
from hybridtrain.engine.memory.sparse_rows import Packed
from hybridtrain.engine.protocol.spans import Spans

Writes = Mapping[int, bytes]  # slot number -> elements, in the order of the slot's shape
# Number of a learning-rate schedule, arguments of its ``step``, and if only one worker may call it
# for an update: the updates that this call may be for.
ScheduleCall = tuple[int, tuple[Any, ...], dict[str, Any], tuple[int, ...]]

# ---- requests -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Share:
    """Request the shared memory for these parameters; ``Shared`` once all workers have.

    ``averaging``: gradients are averaged before they are pushed (one more row). ``worker_updates``:
    this worker can make updates itself. ``on_device``: see ``Turning``."""

    layout: Layout
    averaging: bool = False
    worker_updates: bool = False
    on_device: bool = False


@dataclass(frozen=True, slots=True)
class Install:
    """The optimizers as the user configured them (worker 0), or nothing (the others).

    Each is the output of :func:`hybridtrain.engine.updates.serialize.dump`, or the number of an
    optimizer to keep (if others are replaced in mid-run). ``version``: updates already made;
    ``last``: the largest version, if the server enforces one. ``Done`` once all workers have asked,
    so that none pushes too early.
    """

    optimizers: tuple[bytes | int, ...] = ()
    version: int = 0
    last: int | None = None


@dataclass(frozen=True, slots=True)
class Clip:
    """Clip the merged gradient by ``algorithm``: ``norm`` or ``value``."""

    algorithm: str
    limit: float


@dataclass(frozen=True, slots=True)
class Row:
    """The content of the worker's row.

    ``absent``: numbers of the parameters without a gradient; their places hold zeros or nothing.
    ``packed``: the sparse gradients. ``encoded``: so many bytes at the front of the row stand for
    all others, as their codec writes them. ``averaged``: the gradient is already the mean of all
    workers, so one row stands for all. ``within``: the row of this worker holds the gradient, in
    the weighted mean of all that are within it.
    """

    absent: tuple[int, ...] = ()
    packed: tuple[Packed, ...] = ()
    encoded: int | None = None
    averaged: bool = False
    within: int | None = None


@dataclass(frozen=True, slots=True)
class Average:
    """Request the mean of all workers' gradients; the worker's row holds one of ``weight`` samples.

    ``Averaged`` once no other worker can ask in this step any more.
    """

    weight: float
    row: Row = Row()


class LoaderPass(NamedTuple):
    """One pass over one loader; ``number`` counts the passes within the epoch."""

    loader: int
    epoch: int
    number: int = 0


class Visits(NamedTuple):
    """The epoch's order is cut into ``shards``.

    A worker draws ``mini_batches`` from one shard, then moves to the one visited least.
    """

    shards: int
    mini_batches: int


class DrawnBatch(NamedTuple):
    """One mini-batch drawn from the shared queue."""

    lap: LoaderPass
    spans: Spans


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes of one optimizer by user code since the worker's last push.

    ``groups``: hyper-parameters of each group that have changed; ``members``: the slot numbers of
    each group, only when they have changed; then ``groups`` is whole. ``state``: the state by slot
    number, as ``torch.save`` writes it.
    """

    groups: tuple[dict[str, Any], ...] | None = None
    members: tuple[tuple[int, ...], ...] | None = None
    state: bytes | None = None


@dataclass(frozen=True, slots=True)
class Push:
    """Step optimizer number ``optimizer`` with the content of the worker's ``row``.

    The kinds of push below add what only they need.

    - ``weight``: what the contribution counts for, in samples (0 abstains); ``samples``: how many
      are behind it, if that is another number.
    - ``writes``: parameters that user code has changed itself since the last release.
    - ``covers``: the mini-batches from the shared queue that are done with this push.
    - ``loss``: of the evaluation, for optimizers and policies that compare losses.
    - ``fault``: why there is no contribution where there should be one.
    - ``draws``: requests to the shared queue, answered with the release.
    - ``waited_s``: the worker has waited for others before it sent this to the server.
    """

    optimizer: int
    weight: float
    row: Row = Row()
    changes: Changes = Changes()
    samples: float | None = None
    writes: Writes = field(default_factory=dict)
    fault: str = ""
    covers: tuple[DrawnBatch, ...] = ()
    loss: float | None = None
    draws: tuple[Draw, ...] = ()
    waited_s: float = 0.0

    @property
    def waits(self) -> bool:
        """Whether the worker waits for its release."""
        return True


@dataclass(frozen=True, slots=True)
class GradientPush(Push):
    """The row holds the gradient of one step.

    ``clip``: how the merged gradient is clipped. ``veto``: because of the ``fault``, the whole step
    is left out. ``repeatable``: the worker can evaluate again. ``follows``: an earlier push has
    begun the same mini-batch, and counts its samples; so this one may not be dropped alone.
    """

    clip: Clip | None = None
    veto: bool = False
    repeatable: bool = False
    follows: bool = False


@dataclass(frozen=True, slots=True)
class ExchangePush(Push):
    """The row holds values of an exchange whose workers step their own parameters.

    ``fetch``: the release brings the newest parameters. ``step``: the worker's last one, if a rate
    decides when it pushes. ``later``: it computes on. ``invites``: patient workers push, too.
    """

    fetch: bool = True
    step: int = 0
    later: bool = False
    invites: bool = False

    @property
    def waits(self) -> bool:
        return not self.later


@dataclass(frozen=True, slots=True)
class StepRequest(Push):
    """The worker will make the step itself, on shared parameters; the release has its number."""


@dataclass(frozen=True, slots=True)
class MadeStep(Push):
    """The worker has made the step itself, on shared parameters.

    ``age``: the number of steps of others since it had read the parameters. ``former``: its earlier
    steps that it has not reported.
    """

    age: int = 0
    former: tuple[MadeStep, ...] = ()

    @property
    def waits(self) -> bool:
        return False


OWN_STEPS = (StepRequest, MadeStep)
PUSHES = (Push, GradientPush, ExchangePush, *OWN_STEPS)


@dataclass(frozen=True, slots=True)
class Gather:
    """Exchange payloads with all workers. ``tag``: names the meeting, to detect mismatches;
    ``names``: what it is of; ``patient``: others may meet without this worker until all have come;
    ``invites``: patient ones must join; ``wish``: to end training (``stop_requests.py``). In
    lock-step ``admits`` takes in workers of late hosts; ``in_step``: before the next step."""

    tag: str
    payload: bytes
    patient: bool = False
    wish: bool = False
    invites: bool = False
    admits: bool = False
    names: str = ""
    in_step: bool = False


@dataclass(frozen=True, slots=True)
class Draw:
    """Request the positions of the worker's next mini-batch from the shared queue.

    ``spans``: this pass's part of the epoch's order, which has ``length`` positions; ``sizes``: the
    batch size of each worker; ``drop_last``: full mini-batches only; ``begins``: begin the pass
    (if anew, what was drawn and not trained on returns to the queue, unless it ``continues`` a pass
    that the worker has finished). ``batches_per_turn``: 0: first come, first served. ``fills``: if
    none is left, return one that does not count. ``visits``: draw from shards. ``most``: so many at
    once, while plenty are left. ``limited``: each worker has its own number of mini-batches.
    ``last``: request no other with the next push. ``several``: a step has one of several loaders.
    """

    lap: LoaderPass
    spans: Spans
    length: int
    sizes: tuple[int, ...]
    drop_last: bool = False
    begins: bool = False
    batches_per_turn: int = 0
    fills: bool = False
    visits: Visits | None = None
    most: int = 1
    limited: bool = False
    last: bool = False
    several: bool = False
    continues: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """The worker has processed this mini-batch, which another one may process, too."""

    batch: DrawnBatch


@dataclass(frozen=True, slots=True)
class Pull:
    """Update the worker's parameters, after these ``writes`` of user code, which count once if all
    make them ``alike`` between two meetings. ``looks``: only wait until the masters may be read."""

    writes: Writes = field(default_factory=dict)
    alike: bool = False
    looks: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Request the optimizers' states (in ``place``); ``refresh``: the worker's parameters, too."""

    refresh: bool = True
    place: str = ""


@dataclass(frozen=True, slots=True)
class ReadStats:
    """Request the statistics of the run."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Ask to begin a mini-batch, after these ``writes``; ``Released`` at the worker's turn."""

    writes: Writes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GetState:
    """Request the state of optimizer ``optimizer`` (``SharedState``), that of its ``flat`` update
    (``Lent``), or ``arena``."""

    optimizer: int = 0
    arena: int | None = None
    flat: bool = False


Request = (
    Begin
    | Share
    | Install
    | Average
    | Push
    | Gather
    | Draw
    | Claim
    | Pull
    | Snapshot
    | ReadStats
    | GetState
)

# ---- notes: requests without an answer ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Paused:
    """Training pauses (for a validation); the clock of the throughput stops."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Training resumes."""


@dataclass(frozen=True, slots=True)
class StillWaits:
    """The worker is in a step, and waits for another one of its host."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The worker has stopped or failed (``broke``); ``left``: for the last checkpoint."""

    broke: bool = False
    left: bytes = b""


@dataclass(frozen=True, slots=True)
class Described:
    """A description of the data, in plain types, for the record of the run."""

    said: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Changed:
    """Hyper-parameters that have changed in rounds made without the server."""

    optimizer: int
    changes: Changes


@dataclass(frozen=True, slots=True)
class Called:
    """A worker has called ``step`` of learning-rate schedules in its mini-batches.

    The server forwards it to each other worker before its next answer. Calls for an update it
    forwards to all, in one order, the first of each update only.
    """

    calls: tuple[ScheduleCall, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """The training progress, for the ``worker`` that is restarted, as ``torch.save`` writes it.

    ``worker`` is ``None`` for a report that the roster keeps, in case that no worker can be asked.
    """

    worker: int | None
    payload: bytes
    question: int = 0


@dataclass(frozen=True, slots=True)
class Saved:
    """The last checkpoint has been written (``well``), or none will be."""

    well: bool


Note = Paused | Resumed | StillWaits | Stopped | Described | Changed | Called | Progress | Saved
NOTES: tuple[type[Note], ...] = get_args(Note)

# ---- replies ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shared:
    """The arena's size; its descriptor is sent with the message. ``lent``: number of a lent one."""

    n_bytes: int
    lent: int | None = None


@dataclass(frozen=True, slots=True)
class Claimed:
    """``counts``: the worker's answer to the mini-batch is the first."""

    counts: bool


@dataclass(frozen=True, slots=True)
class Done:
    """Confirms an ``Install``."""


@dataclass(frozen=True, slots=True)
class Averaged:
    """The mean is in its row, without parameters ``absent`` in all; ``packed``: sparse in all."""

    absent: tuple[int, ...]
    packed: tuple[Packed, ...] = ()


@dataclass(frozen=True, slots=True)
class StepNumber:
    """The generation of the lent state, and the number of steps before this one.

    ``steps``: one number, or by slot number if parameters differ; ``None``: the server has made
    the step.
    """

    generation: int
    steps: int | dict[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Lent:
    """The places of an optimizer's state; ``None``: workers may not step it."""

    state: LentState | None


@dataclass(frozen=True, slots=True)
class Released:
    """Continue with the parameters of update ``version``.

    ``counted``: the push is part of this or a later update, or had no weight. ``again``: the step
    has not ended, evaluate the closure once more at the current parameters, after clearing the
    gradients if ``cleared``. ``groups``: hyper-parameters that the optimizer has changed itself, by
    group. ``step_number``: for workers that step the masters. ``tickets``: answers to the push's
    ``draws``. ``ahead``: the update is yet to be made.
    """

    version: int
    again: bool = False
    cleared: bool = False
    groups: tuple[dict[str, Any], ...] | None = None
    step_number: StepNumber | None = None
    counted: bool = True
    tickets: tuple[Ticket, ...] = ()
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class Gathered:
    """All payloads, in the order of ``workers``; ``remaining``: lost workers left mini-batches.
    ``join``: there was no meeting; a patient worker must join a "round" or "meeting" first."""

    payloads: tuple[bytes, ...]
    workers: tuple[int, ...]
    remaining: bool = False
    join: str = ""


@dataclass(frozen=True, slots=True)
class Ticket:
    """The positions of a mini-batch in the epoch's order; none: the pass is over. If it does not
    count, its gradient gets no weight. ``more``: those after it, if several were requested."""

    spans: Spans
    counts: bool = True
    more: tuple[Spans, ...] = ()


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """The optimizers' states after update ``version``; ``unseen``: positions not trained on.

    ``updates``, ``samples``: of this run, counted until then.
    """

    payload: bytes
    version: int
    unseen: dict[LoaderPass, Spans] = field(default_factory=dict)
    updates: int = 0
    samples: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """See :meth:`hybridtrain.engine.server.run_statistics.RunStatistics.stats`."""

    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Refused:
    """The request is invalid, or cannot be answered; ``reason`` is for the user."""

    reason: str


# ---- notices: sent by the server without a request ----------------------------------------------


@dataclass(frozen=True, slots=True)
class Gone:
    """The worker is gone; update ``version`` was the last that it may have contributed to.

    ``for_now``: it will be restarted.
    """

    worker: int
    version: int
    for_now: bool = False


@dataclass(frozen=True, slots=True)
class Back:
    """The worker trains again."""

    worker: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop as soon as possible. ``now``: the pending request will not be answered.

    ``behind``: stop after that update, because a worker has ended training by itself.
    """

    now: bool = False
    behind: int | None = None


@dataclass(frozen=True, slots=True)
class Overtaken:
    """Another worker's answer to this mini-batch has come first."""

    batch: DrawnBatch


@dataclass(frozen=True, slots=True)
class SavePermission:
    """To a stopped worker: write the last checkpoint (``saves``) with what all have ``left``."""

    saves: bool
    left: Mapping[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """Send the training progress (``Progress``) for the ``worker`` that will be restarted;
    ``question``: its number, as an answer to an earlier one does not count."""

    worker: int
    question: int = 0


Answer = (
    Shared
    | Lent
    | Done
    | Averaged
    | Released
    | Gathered
    | Ticket
    | Claimed
    | OptimizerState
    | Stats
    | Refused
    | SharedState
)
Reply = Answer | Stop | Gone | Back | Overtaken | Called | RequestProgress | SavePermission


def name_of(message: object) -> str:
    """The name of a message's kind in records; all pushes have one."""
    return Push.__name__ if isinstance(message, Push) else type(message).__name__
