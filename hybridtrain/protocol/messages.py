"""What a worker says to the server, and what it hears back.

Every request but a note is answered exactly once; until then the worker waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

from hybridtrain.memory.layout import Layout
from hybridtrain.memory.lending import GetState, Lent, SharedState, StepNumber
from hybridtrain.memory.sparse_rows import Packed
from hybridtrain.protocol.notices import (
    Back,
    Called,
    Gone,
    Progress,
    RequestProgress,
    Saved,
    SavePermission,
    Stop,
)
from hybridtrain.protocol.spans import Spans

Writes = Mapping[int, bytes]  # number of a parameter -> its elements, in the order of its shape

# ---- requests -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Share:
    """These are my parameters: where do they lie? Answered with ``Shared`` when all have asked.

    ``averaging``: gradients will be averaged before they are pushed, which needs one more row.
    ``meets``: this worker can make updates with the others alone.
    """

    layout: Layout
    averaging: bool = False
    meets: bool = False


@dataclass(frozen=True, slots=True)
class Install:
    """The optimizers as the user configured them (worker 0), or nothing (the others).

    Each is what :func:`hybridtrain.updates.serialize.dump` has made, or the number of one that is
    to stay (where others are replaced in mid-run). ``version`` is the number of updates already
    behind the parameters, ``last`` how many there may be in all, if the server is to see to that.
    Answered with ``Done`` when all have asked, so that nobody pushes too early.
    """

    optimizers: tuple[bytes | int, ...] = ()
    version: int = 0
    last: int | None = None


@dataclass(frozen=True, slots=True)
class Clip:
    """How the merged gradient is to be clipped: ``algorithm`` is ``norm`` or ``value``."""

    algorithm: str
    limit: float


@dataclass(frozen=True, slots=True)
class Average:
    """The gradient in my row is one of ``weight`` samples; I want the mean of all before I push.

    ``absent`` are the parameters without a gradient; their places in the row hold zeros. ``packed``
    are the sparse gradients. Answered with ``Averaged`` when nobody is left who may still ask.
    """

    weight: float
    absent: tuple[int, ...] = ()
    packed: tuple[Packed, ...] = ()


class LoaderPass(NamedTuple):
    """One pass over one loader; ``number`` counts the passes within the epoch."""

    loader: int
    epoch: int
    number: int = 0


class Visits(NamedTuple):
    """The epoch's order is cut into ``shards``; workers go from one to the next.

    Each takes ``mini_batches`` from one shard, then goes to the one that was visited least.
    """

    shards: int
    mini_batches: int


class DrawnBatch(NamedTuple):
    """One mini-batch drawn from the shared queue."""

    lap: LoaderPass
    spans: Spans


@dataclass(frozen=True, slots=True)
class Push:
    """My contribution lies in my row; step optimizer number ``optimizer``.

    What is handed over:
    - ``weight``: what the contribution counts for, in samples (0 abstains); ``samples``: how many
      are behind it, if that is another number.
    - ``absent``: the numbers of the parameters without a gradient; ``packed``: the sparse ones.
    - ``averaged``: the gradient is already the mean of all, so one row stands for all.
    - ``encoded``: so many bytes at the front of the row are the contribution, as its codec has it.
    - ``writes``: parameters that user code has changed itself since the last release.
    - ``covers``: the mini-batches from the shared queue that are done with this push.
    - ``loss``: of the evaluation, for optimizers and policies that compare losses;
      ``repeatable``: the worker can evaluate again.
    - ``fault``: why there is no contribution where there should be one; ``veto``: because of it,
      the whole step is left out.

    Changes of the optimizer since the last push:
    - ``groups``: hyper-parameters of each group that have changed; ``members``: the slot numbers
      of each group, only when they have changed; then ``groups`` is whole.
    - ``state``: the state by slot number, if user code has changed it, as ``torch.save`` writes it.

    The answer:
    - ``fetch``: the worker wants the newest parameters with its release; ``draws``: and answers
      to these; ``later``: it does not wait for the release, and computes until it needs it;
      ``calls``: workers that wait patiently hand over what they have, too.

    Steps that the worker makes itself, on shared parameters:
    - ``own``: the row holds nothing, the worker steps; ``age``: it has stepped, so many steps of
      others after it had read the parameters; ``former``: its earlier steps of that kind of which
      the server has not been told.
    """

    optimizer: int
    weight: float
    absent: tuple[int, ...] = ()
    groups: tuple[dict[str, Any], ...] | None = None
    clip: Clip | None = None
    averaged: bool = False
    samples: float | None = None
    writes: Writes = field(default_factory=dict)
    fault: str = ""
    veto: bool = False
    covers: tuple[DrawnBatch, ...] = ()
    packed: tuple[Packed, ...] = ()
    members: tuple[tuple[int, ...], ...] | None = None
    loss: float | None = None
    repeatable: bool = False
    state: bytes | None = None
    own: bool = False
    fetch: bool = True
    encoded: int | None = None
    draws: tuple[Draw, ...] = ()
    later: bool = False
    age: int | None = None
    former: tuple[Push, ...] = ()
    calls: bool = False


@dataclass(frozen=True, slots=True)
class Gather:
    """Give everybody's payload to everybody. ``tag`` names the meeting, to find mismatches;
    ``patient``: until all are here, the others may meet without me; ``calls``: but the server calls
    me to a meeting, or a round, that asks for it; ``wish``: see ``stop_requests.py``."""

    tag: str
    payload: bytes
    patient: bool = False
    wish: bool = False
    calls: bool = False


@dataclass(frozen=True, slots=True)
class Draw:
    """Positions for my next mini-batch, from the shared queue.
    ``spans``: what of the epoch's order, ``length`` long, is to be done in this pass; ``sizes``:
    everybody's mini-batches; ``drop_last``: whole ones only; ``begins``: I begin the pass (perhaps
    anew: what I had drawn of it, but not trained on, goes back). ``turn``: mini-batches are
    dealt to the workers in turn, so many at a time; 0: first come, first served. ``fills``: if
    there is nothing for me, give me something that does not count. ``visits``: from shards.
    ``most``: so many mini-batches at once, as long as there are plenty for all.
    """

    lap: LoaderPass
    spans: Spans
    length: int
    sizes: tuple[int, ...]
    drop_last: bool = False
    begins: bool = False
    turn: int = 0
    fills: bool = False
    visits: Visits | None = None
    most: int = 1


@dataclass(frozen=True, slots=True)
class Pull:
    """Bring my own parameters up to date, after these ``writes`` of user code."""

    writes: Writes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The optimizers' states, maybe in a file; ``refresh``: my parameters of that version, too."""

    refresh: bool = True
    place: str = ""


@dataclass(frozen=True, slots=True)
class ReadStats:
    """What has been counted so far."""


@dataclass(frozen=True, slots=True)
class Begin:
    """May I begin a mini-batch, after these ``writes``? ``Released`` when it is my turn."""

    writes: Writes = field(default_factory=dict)


Request = (
    Begin
    | Share
    | Install
    | Average
    | Push
    | Gather
    | Draw
    | Pull
    | Snapshot
    | ReadStats
    | GetState
)

# ---- notes: nobody waits for an answer ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Paused:
    """No training for now (a validation begins); the clock of the throughput stands still."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Training goes on."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """I was asked to stop, and have, or have failed (``broke``); I shall not push again."""

    broke: bool = False


@dataclass(frozen=True, slots=True)
class Described:
    """What I train on, in plain data, for the record of the run."""

    said: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Changed:
    """Hyper-parameters that have changed, group by group, in rounds that only workers know of."""

    optimizer: int
    groups: tuple[dict[str, Any], ...]


Note = Paused | Resumed | Stopped | Described | Changed | Called | Progress | Saved
NOTES: tuple[type[Note], ...] = get_args(Note)

# ---- replies ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shared:
    """The arena's size; its descriptor travels beside the message. ``lent``: which of those."""

    n_bytes: int
    lent: int | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """It is done."""


@dataclass(frozen=True, slots=True)
class Averaged:
    """The mean lies in the row for it, but for parameters ``absent`` from all; those ``packed`` are
    sparse in all."""

    absent: tuple[int, ...]
    packed: tuple[Packed, ...] = ()


@dataclass(frozen=True, slots=True)
class Released:
    """Go on; your parameters are those after update number ``version``.

    ``counted``: what you have pushed is part of this or a later update, or you have abstained.
    ``again``: the step is not over, evaluate the closure once more, at the parameters as they are
    now, after clearing the gradients if ``cleared``. ``groups``: hyper-parameters that the
    optimizer has changed by itself, group by group. ``turn``: for workers that step themselves.
    ``tickets``: the answers to the push's ``draws``.
    """

    version: int
    again: bool = False
    cleared: bool = False
    groups: tuple[dict[str, Any], ...] | None = None
    turn: StepNumber | None = None
    counted: bool = True
    tickets: tuple[Ticket, ...] = ()


@dataclass(frozen=True, slots=True)
class Gathered:
    """All payloads, in the order of ``workers``; ``left``: of the queue, by those who are gone.
    ``call``: none have met; a worker that waits patiently comes to a "round" or "meeting" first."""

    payloads: tuple[bytes, ...]
    workers: tuple[int, ...]
    left: bool = False
    call: str = ""


@dataclass(frozen=True, slots=True)
class Ticket:
    """The positions of a mini-batch in the epoch's order; none: the pass has no more. One that does
    not count is run, but its gradient has no weight. ``more``: the positions of the mini-batches
    after this one, where several were asked for."""

    spans: Spans
    counts: bool = True
    more: tuple[Spans, ...] = ()


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """The optimizers' states after update ``version``; what of the queue is not behind them."""

    payload: bytes
    version: int
    unseen: dict[LoaderPass, Spans] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stats:
    """See :meth:`hybridtrain.server.run_statistics.RunStatistics.stats`."""

    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Refused:
    """What you asked makes no sense; ``reason`` is for the user."""

    reason: str


Answer = (
    Shared
    | Lent
    | Done
    | Averaged
    | Released
    | Gathered
    | Ticket
    | OptimizerState
    | Stats
    | Refused
    | SharedState
)
Reply = Answer | Stop | Gone | Back | Called | RequestProgress | SavePermission
