"""A worker's step on parameters of its own, which its exchange hands over now and then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hybridtrain.engine.exchanges import Await, Leaving, LocalExchange, Offer
from hybridtrain.engine.profiling import Phase
from hybridtrain.engine.protocol.messages import Changes, ExchangePush, Released, Row
from hybridtrain.engine.step.remote_state import without_fetching
from hybridtrain.engine.step.worker_step import Closure, StepParts, WorkerStep, as_float, run
from hybridtrain.engine.updates import SavedOptimizer
from hybridtrain.engine.worker.host_group import HostGroup, HostMean
from hybridtrain.engine.worker.local_steps import LocalSteps
from hybridtrain.engine.worker.replica_own import OwnReplica
from hybridtrain.errors import UserError


class LocalStep(WorkerStep):
    """Steps parameters of the worker's own, and hands over what the exchange says, when it says.

    Args:
        optimizer, number, parts: see :class:`~hybridtrain.engine.step.worker_step.WorkerStep`.
        replica: the worker's parameters.
        exchange: decides when something leaves.
        group: the workers of this host, if they go on together.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        number: int,
        parts: StepParts,
        replica: OwnReplica,
        exchange: LocalExchange,
        group: HostGroup | None = None,
    ) -> None:
        super().__init__(optimizer, number, parts)
        client, wants = parts.client, parts.requirements
        if wants.means_gradients and isinstance(optimizer, torch.optim.SparseAdam):
            raise UserError(
                "SparseAdam was given with inside=hybrid, but it takes no dense gradients, as the "
                "mean of a host's workers is; use Adam, SGD or Adagrad, or inside=local_sgd"
            )
        place, self._own, self._group = (client.worker, client.n_workers), replica, group
        self._by_rate = getattr(exchange, "by_rate", False)
        self.answered = 0  # nothing has been handed over
        self._used = 0.0  # samples of this worker since its last offer, in a group
        # By how much the weights of the steps since then exceed their samples.
        self._surplus = 0.0
        self._means: HostMean | None = None
        if group is not None:
            place = group.number, group.n_groups
            if wants.mean_every:
                self._means = HostMean(replica, group, self.numbers, wants.mean_every)
        source = self._means or replica
        fresh = wants.whole_rounds
        self._local = LocalSteps(optimizer, self.numbers, source, exchange, fresh, *place)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _: parts.client.queue.check_need())
            for parameter in self.parameters
            if wants.backs_up and not parts.manual and parameter.requires_grad
        ]

    def _step(self, closure: Closure | None) -> Any:
        loss = run(closure) if closure is not None else None
        self._advance(self._gathered.weight)
        return loss

    def skip(self) -> None:
        if self._group is not None:
            self._group.pop_weight()  # the precision plugin skips this step in all workers alike
        self._advance(0.0)

    def flush(self, ends: bool) -> None:
        invites = self._parts.requirements.whole_rounds
        self._hand_over(self._local.flush(ends), invites)

    @property
    def has_unsent(self) -> bool:
        return self._local.has_unsent

    def _advance(self, samples: float) -> None:
        """One step with the gradients of so many samples; with none, the others make it."""
        self._check_members()
        new = self._gathered.pop_samples()  # of a mini-batch that an earlier step had: none
        self._end_step()
        self._used += samples
        if self._parts.requirements.backs_up and not self._client.queue.claim():
            samples = 0.0
        self._surplus += samples - new if samples > 0 else 0.0
        if samples > 0 and self._parts.requirements.evaluates:  # a sum could not tell which it was
            self._guard.accepts(self.numbers, self._replica.collect(self.numbers))
        if self._means is not None:
            self._means.begin_step(samples)
        elif self._group is not None:
            samples = self._group.pop_weight()
        leaving = self._local.advance(samples, as_float(self._loss))
        if self._means is not None:
            self._means.end_step()
        self._hand_over(leaving)

    def _hand_over(self, leaving: Leaving, invites: bool = False) -> None:
        """Push what leaves the worker, and wait for the release where the exchange does.

        ``invites``: workers that wait patiently hand over theirs, too.
        """
        while leaving is not None:
            if isinstance(leaving, Offer):
                self._push(leaving, invites)
                if leaving.later:
                    return
            self._client.pushes.settle()
            self.answered = self._client.steps.version
            fetched = isinstance(leaving, Await) or leaving.fetch
            leaving = self._local.take() if fetched else None

    def _push(self, offer: Offer, invites: bool) -> None:
        (weight, samples), encoded = self._counted(offer), offer.encoded
        absent = self._own.hand_over(self.numbers, offer.values, encoded)
        looks = weight > 0 and encoded is None  # only what is finite is encoded
        if looks and not self._guard.accepts(self.numbers, absent):
            weight = 0.0
        n_bytes = None if encoded is None else len(encoded)
        push = ExchangePush(
            self.number,
            weight,
            Row(absent, encoded=n_bytes),
            Changes(self._told_groups(whole=False)),
            samples=samples,
            fault=self._guard.pop_fault(),
            loss=as_float(self._loss) if offer.loss is None else offer.loss,
            waited_s=0.0 if self._group is None else self._group.pop_waited_s(),
            fetch=offer.fetch,
            step=self.count if self._by_rate else 0,
            later=offer.later,
            invites=invites,
        )
        self._client.pushes.offer(push, self._take, settles=not offer.only_fetches)

    def _counted(self, offer: Offer) -> tuple[float, float]:
        """Return the weight of the offer, and the number of samples this worker has used for it."""
        weight, samples = offer.weight, offer.weight if offer.samples is None else offer.samples
        if offer.only_fetches:
            return weight, samples
        if self._group is None:
            surplus, self._surplus, self._used = self._surplus, 0.0, 0.0
            return weight, samples - surplus
        if self._means is not None:
            weight = self._group.sum(weight)
        samples, self._used = self._used, 0.0
        return weight if self._group.leads else 0.0, samples

    def timed(self) -> list[tuple[Phase, object, str, str]]:
        round_ = (Phase.WAIT, self._group, "_complete_round", "mean of the host")
        return [] if self._group is None else [round_]

    def _take(self, released: Released) -> None:
        self.version = released.version
        self.hyper_parameters.confirm(None)

    def state_dict(self, saved: SavedOptimizer) -> dict[str, Any]:
        return without_fetching(self.optimizer) | self._of_masters(saved)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def own_state(self) -> dict[str, Any]:
        if self._parts.requirements.evaluates:  # a pass is begun anew
            return {}
        own = {
            "state": without_fetching(self.optimizer)["state"],
            "exchange": self._local.exchange.state(),
            "parameters": self._own.kept(self.numbers),
            "used": self._used,
        }
        return own if self._means is None else {**own, "means": self._means.state()}

    def load_own_state(self, saved: Mapping[str, Any]) -> None:
        if "state" in saved:
            now = self.optimizer.state_dict()
            self.optimizer.load_state_dict(now | {"state": saved["state"]})
        self._local.exchange.load_state(saved["exchange"])
        self._used = saved.get("used", 0.0)
        if self._means is not None and (since := saved.get("means")):
            self._means.load_state(since)
        if own := saved.get("parameters"):
            self._own.keep(self.numbers, own)
