"""Requirements of a policy and an exchange on the rest of the system."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Literal, NamedTuple

from hybridtrain.engine.exchanges.exchange import Exchange, evaluates
from hybridtrain.engine.memory import UpdateMaker
from hybridtrain.engine.policies import Needs, Policy
from hybridtrain.errors import UserError
from hybridtrain.util.option_types import as_typed

ParameterSource = Literal["masters", "copy", "own", "shared"]
Data = Literal["shares", "queue", "dealt"]


class Inside(NamedTuple):
    """The ``workers`` of each host are one to the exchange.

    They take the mean of their parameters ``every`` so many steps, or, 0, of each step's gradients.
    """

    workers: int
    every: int = 0


@dataclass(frozen=True, slots=True)
class Requirements(Needs):
    """Properties of a run that server, workers and data loading follow. Records have these names.

    They are the policy's, and those that follow from policy and exchange together.

    ``parameters``: workers compute with the ``"masters"``, which they only read; with a ``"copy"``
    that every release renews; with their ``"own"``, which their own optimizers move; or with
    ``"shared"`` masters, which they write to. ``data``: fixed ``"shares"`` of every epoch, one
    shared ``"queue"``, or mini-batches ``"dealt"`` in turn.
    """

    whole_rounds: bool = True
    parameters: ParameterSource = "masters"
    data: Data = "shares"
    counts: Literal["worker", "server"] = "worker"  # whose steps are the training's step count
    private_state: bool = False  # of the optimizer, in each worker that writes to the masters
    evaluates: bool = False  # an epoch computes the whole loss once, and an update uses it
    together: int = 1  # workers of a host that act as one; the first of them pushes for all
    mean_every: int = 0  # steps between means of their parameters; 0: of each step's gradients

    @property
    def means_gradients(self) -> bool:
        """Whether the workers of a host step with the mean of their gradients."""
        return self.together > 1 and not self.mean_every

    @property
    def steps_in_worker(self) -> bool:
        """Whether workers step an optimizer of their own."""
        return self.parameters in ("own", "shared")

    @property
    def own_state(self) -> bool:
        """Whether each worker's optimizer has moments of its own."""
        return self.parameters == "own" or self.private_state

    @property
    def schedules_own_steps(self) -> bool:
        """Whether a schedule counts its worker's own steps, several of which make an update."""
        return self.parameters == "own" and self.gathers > 1 and not self.evaluates

    @property
    def in_place(self) -> bool:
        """Whether workers write to the masters."""
        return self.parameters == "shared"

    @property
    def has_copies(self) -> bool:
        """Whether each worker needs a row of parameters, as it has read them last."""
        return not self.whole_rounds and not self.in_place

    @property
    def n_rows(self) -> int:
        """Rows of each worker: with a delay one is merged while the other is written to."""
        return 2 if self.delay else 1

    def n_copies(self, n_workers: int) -> int:
        """Copies of the parameters in shared memory, beside the masters."""
        return 2 if self.delay else n_workers * self.has_copies

    def stages_on_device(self, on_device: bool, comes: bool) -> bool:
        """Whether workers copy the masters to their devices while an update steps them.

        Else they read buffers in host memory: those that another host receives, those that are not
        quite the masters, and those in which a worker that comes in mid-epoch finds what others
        have. ``comes``: there are other hosts, or new workers in mid-epoch.
        """
        plain = not (self.extrapolates or self.encodes or comes)
        return self.delay > 0 and on_device and plain

    @property
    def newest_between_steps(self) -> bool:
        """Whether the parameters that a worker has behind a step are the newest."""
        return self.whole_rounds and not self.delay

    @property
    def may_go_ahead(self) -> bool:
        """Whether a worker can predict the release of a push that counts.

        Where all step together, or where the push is part of an update by then.
        """
        free = self.data == "queue" and not (self.holds or self.drops_late)
        return self.whole_rounds or free

    @property
    def steps_unasked(self) -> bool:
        """Whether a worker may step the masters first and say so later."""
        return self.in_place and self.free

    @property
    def maker(self) -> UpdateMaker:
        """The part that makes the updates, unless parameters or user code rule it out."""
        if self.in_place:
            return UpdateMaker.IN_PLACE
        if self.everyone:
            return UpdateMaker.LAST_WORKER
        alone = self.free and self.parameters == "copy"  # each gradient is an update at once
        return UpdateMaker.ONE_BY_ONE if alone else UpdateMaker.SERVER

    @property
    def takes_turns(self) -> bool:
        """Whether one worker computes at a time."""
        return self.data == "dealt"


def check_visits(requirements: Requirements) -> None:
    """Raises ``UserError`` where workers do not draw from a queue, which could be cut."""
    if requirements.data != "queue":
        how = "have fixed shares of the data" if requirements.whole_rounds else "take turns"
        raise UserError(
            f"data_shards was given, but under this policy workers {how}; leave it out, or use a "
            "policy under which workers draw from one queue: async, grace"
        )


def begin_policy(
    policy: Policy, exchange: Exchange, n_workers: int, inside: Inside | None = None
) -> Requirements:
    """Begin the policy for so many workers; returns what it and the exchange require.

    ``inside``: what the workers of one host do together.

    Raises:
        UserError: if the two contradict each other, or the policy makes no sense for so many.
    """
    needs = policy.begin(n_workers)
    if not isinstance(needs, Needs):
        raise UserError(
            f"policy={as_typed(policy)}: begin() returned {needs!r}; it must return a "
            "hybridtrain.engine.policies.Needs, such as Needs(whole_rounds=True)"
        )
    _check_needs(policy, needs)
    _check(policy, needs, exchange)
    if inside is not None:
        _check_inside(policy, needs, exchange, inside)
    exchange.check(n_workers, needs.whole_rounds)
    source: ParameterSource = "masters" if needs.whole_rounds else "copy"
    free: Data = "dealt" if needs.turns else "queue"
    later, steps = needs.later, exchange.steps
    needs = replace(
        needs,
        watches_loss=needs.watches_loss or evaluates(exchange),
        gathers=needs.gathers * steps,
        later=None if later is None else (later[0], later[1] * steps),
        everyone=needs.everyone and n_workers > 1 and exchange.parameters == "read",
    )
    return Requirements(
        **asdict(needs),
        parameters=source if exchange.parameters == "read" else exchange.parameters,
        data="shares" if needs.whole_rounds else free,
        counts="worker" if needs.whole_rounds else "server",
        private_state=getattr(exchange, "optimizer_state", "shared") == "private",
        evaluates=evaluates(exchange),
        together=1 if inside is None else inside.workers,
        mean_every=0 if inside is None else inside.every,
    )


_LOCK_STEP = "in lock-step every contribution counts in its round"
# Members of ``Needs`` that contradict each other, and why.
_CONTRADICTORY = {
    ("whole_rounds", "turns"): "one worker computes at a time, and not all",
    ("whole_rounds", "free"): _LOCK_STEP,
    ("whole_rounds", "holds"): _LOCK_STEP,
    ("whole_rounds", "drops_late"): _LOCK_STEP,
    ("delay", "everyone"): "the server makes the updates that workers do not wait for",
    ("free", "turns"): "a worker that is released at once waits for no turn",
    ("free", "holds"): "every contribution is an update at once",
    ("free", "drops_late"): "every contribution is an update at once",
}
_ONLY_WITH = {
    "everyone": "whole_rounds",
    "backs_up": "whole_pass",
    "delay": "whole_rounds",
    "extrapolates": "delay",
    "encodes": "delay",
    "delay_from": "delay",
}


def _check_needs(policy: Policy, needs: Needs) -> None:
    """Raises ``UserError`` if the policy's needs contradict each other, or are no numbers."""
    given = f"policy={as_typed(policy)}: begin() returned Needs with"
    for (one, other), reason in _CONTRADICTORY.items():
        if getattr(needs, one) and getattr(needs, other):
            raise UserError(f"{given} {one} and {other}, but {reason}; leave one of them out")
    for one, other in _ONLY_WITH.items():
        if getattr(needs, one) and not getattr(needs, other):
            raise UserError(f"{given} {one}, which goes with {other} only; leave it out")
    later = (needs.gathers,) if needs.later is None else (needs.gathers, *needs.later)
    if not all(isinstance(each, int) and each > 0 for each in later):
        raise UserError(
            f"{given} gathers={needs.gathers!r}, later={needs.later!r}; gathers is the number of "
            "contributions that make an update, at least 1, and later is None, or the update from "
            "which on it is another, and that number"
        )


def _check_inside(policy: Policy, needs: Needs, exchange: Exchange, inside: Inside) -> None:
    """Workers of a host that go on together need an exchange with steps of their own between."""
    if exchange.parameters != "own":
        reason = "every step's gradient goes to the server"
        if exchange.parameters == "shared":
            reason = "workers write to the masters at every step"
    elif not needs.whole_rounds:
        reason = "workers run freely there, and those of one host step together"
    elif inside.every and exchange.keeps:
        reason = "it pulls each worker's own parameters; inside=hybrid goes with it"
    else:
        return
    raise UserError(
        f"inside was given with policy={as_typed(policy)}, exchange={as_typed(exchange)}, but "
        f"{reason}; use strategy=diloco, local_sgd, post_local_sgd or streaming_diloco (or easgd "
        "with policy=hybrid), or leave inside out"
    )


def _check(policy: Policy, needs: Needs, exchange: Exchange) -> None:
    """Workers that step parameters themselves need a policy that lets them."""
    shared = exchange.parameters == "shared"
    given = f"exchange={as_typed(exchange)} was given with policy={as_typed(policy)}"
    if needs.whole_pass != evaluates(exchange):
        raise UserError(
            f"{given}, but a pass over the data that is one evaluation of the loss takes both "
            "policy=sandblaster and exchange=summed; use strategy=sandblaster, or another pair"
        )
    if getattr(policy, "exchange", None) == "in_place" and not shared:
        raise UserError(
            f"{given}, but there workers write to the masters and hand nothing over; use "
            "policy=async, or exchange=in_place"
        )
    if exchange.parameters == "read":
        return
    if needs.delay:
        raise UserError(
            f"{given}, but under it the server steps the masters with gradients while workers "
            "compute; use exchange=gradient, or policy=hybrid"
        )
    if shared and needs.whole_rounds:
        reason = "workers that write to the masters cannot wait for one another's updates"
    elif shared and needs.holds:
        reason = "nothing is handed over that could be put aside"
    elif exchange.keeps and needs.holds:
        reason = "what is put aside is averaged, and here it adds up"
    elif needs.turns:
        reason = "one worker computes at a time there"
    elif needs.drops_late:
        reason = "what comes late is dropped there, and a worker cannot take back its own steps"
    else:
        return
    fits = "hogwild (or async)" if shared else "hybrid, ssp or async"
    raise UserError(f"{given}, but {reason}; use policy={fits}, or exchange=gradient")
