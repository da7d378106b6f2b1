"""Replace the samplers of the user's DataLoaders, and follow the epochs with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.trainer.states import RunningStage
from torch.utils.data import DataLoader, SequentialSampler

from hybridtrain.engine.options.strategy_arguments import StrategyArguments
from hybridtrain.engine.protocol.messages import Visits
from hybridtrain.engine.recording.run_description import data_teller
from hybridtrain.engine.samplers import (
    EpochPlan,
    EpochSampler,
    QueueSampler,
    ShareSampler,
)
from hybridtrain.errors import UserError
from hybridtrain.lightning.checkpointing.committed_batches import CommittedBatches
from hybridtrain.lightning.checkpointing.epoch_checkpoint import EpochCheckpoint
from hybridtrain.lightning.checkpointing.epoch_ends import EpochEnds
from hybridtrain.lightning.checkpointing.epoch_position import EpochPosition
from hybridtrain.lightning.checkpointing.rng_state import RngState
from hybridtrain.lightning.data.batch_size import Scales, keeps_all, step_fetches
from hybridtrain.lightning.data.evaluation_sampler import Dealt, EvaluationSampler, Group
from hybridtrain.lightning.data.user_loaders import (
    Batches,
    Dealing,
    Handed,
    around_another,
    as_samplers_see_it,
    batches_of,
    check_asked,
    drawing,
    is_countable,
    is_plain,
    noting,
    order_of,
    plan_behind,
    plan_of,
    sampler_in,
    sampler_of,
    shares_nothing,
    sized,
    takes_a_sampler,
    undropped,
    warn_of_dropped,
    warn_of_pairs,
    warn_of_repetition,
    with_batches,
    wrapped,
)
from hybridtrain.lightning.hooks.loop_hooks import (
    combination_of,
    combined_loader,
    data_connector,
    forget_places,
    gets_our_sampler,
    limit_now,
    reload_epochs,
    reloads_here,
    remeasure,
    set_reload_epochs,
    training_fetcher,
)
from hybridtrain.lightning.hooks.points import Point, before, instead
from hybridtrain.lightning.worker_context import WorkerContext


class Loaders:
    """Puts our samplers where Lightning would put a ``DistributedSampler``.

    Args:
        trainer: of this worker.
        worker: this one.
        options: of the strategy, about data.
    """

    def __init__(
        self, trainer: pl.Trainer, worker: WorkerContext, options: StrategyArguments
    ) -> None:
        self._trainer: Any = trainer
        self._client, self._requirements = worker.client, worker.requirements
        self._joins, self._options = worker.on_failure.joins, options
        self._tell = data_teller(worker.client.note, worker.recording is None)
        self.samplers: list[EpochSampler] = []  # the same list for all epochs
        self._made_in_epoch: int | None = None
        self._limit: float = self._trainer.limit_train_batches  # the user's
        # Of at least one loader a worker may come to it; in which epoch they were made.
        self._is_limited, self._measured_in = False, -1
        self.position = position = EpochPosition(trainer)
        self._rng_state = rng_state = RngState(worker.client)
        self._ends = ends = EpochEnds(trainer, position, worker.device)
        self.committed = committed = CommittedBatches(
            trainer, self.samplers, position, worker.client.steps, rng_state
        )
        self.checkpoint = EpochCheckpoint(
            trainer, worker, self.samplers, position, committed, ends, rng_state
        )
        self.begin_evaluation(worker.client.group.there)
        self._moved = False  # Lightning's iterator has an outdated length
        self._all_kept = True  # mini-batches have all samples that were drawn for them
        self._has_weighed = False  # the mini-batch that Lightning has fetched; not if it is None
        instead(Point.PREPARE, data_connector(trainer), self.prepare)
        loop = trainer.fit_loop.epoch_loop
        before(Point.EVALUATION, loop.val_loop, self.begin_validation)
        before(Point.FIT_RESET, trainer.fit_loop, self.set_epochs)
        before(Point.BATCHES, loop, self.begin_epoch)

    # ---- making loaders -------------------------------------------------------------------------

    def begin_evaluation(self, workers: tuple[int, ...]) -> None:
        """These workers share the samples of the next evaluation."""
        self._evaluating, self._group = workers, Group(len(workers))
        self._predict_limit = self._trainer.limit_predict_batches

    def _dealt(self, batches: Any) -> Dealt:
        return Dealt(batches, self._client.group, self._predict_limit)

    def prepare(self, dataloader: Any, shuffle: bool, mode: RunningStage) -> Any:
        """The user's loader; a copy with this worker's samples and batch size where it has one."""
        prepared = self._prepared(dataloader, shuffle, mode)
        if mode == RunningStage.TRAINING:
            self._lift_limit(plan_behind(prepared))
        return prepared

    def _lift_limit(self, plan: EpochPlan | None) -> None:
        """Lift a limit to which the shared queue has not enough mini-batches.

        As a limit is a length to Lightning, a worker that ends before it would neither validate
        nor step its last accumulated mini-batches.
        """
        limit, lifts = self._limit, False
        if self._requirements.data != "shares" and plan is not None and plan.length > 0:
            lifts = isinstance(limit, int) and limit * len(plan.sizes) >= batches_of(plan)
        if self._measured_in != self.position.epoch:  # the loaders are new or reloaded
            self._is_limited, self._measured_in = False, self.position.epoch
        self._is_limited |= not lifts
        self._trainer.limit_train_batches = limit if self._is_limited else 1.0

    def _prepared(self, given: Any, shuffle: bool, mode: RunningStage) -> Any:
        around_one = None if self._options["iterable"] == "own" else wrapped(given)
        if around_one is not None:
            name, inner = around_one
            made = self._prepared(inner, shuffle, mode)
            return given if made is inner else around_another(given, name, made)
        if not isinstance(given, DataLoader) or not gets_our_sampler(self._trainer, given):
            return self._not_chosen(given, mode)
        if mode == RunningStage.TRAINING:
            return self._for_training(given, shuffle)
        if self._client.n_workers == 1 and not (shuffle and is_plain(given)):
            return self._not_chosen(given, mode)
        if mode == RunningStage.PREDICTING:
            return self._for_prediction(given, shuffle)
        indices = self._indices(given, shuffle)
        place = self._evaluating.index(self._client.worker)
        return drawing(given, EvaluationSampler(indices, place, self._group))

    def _indices(self, dataloader: DataLoader[Any], shuffle: bool) -> Sequence[Any]:
        """Return the indices of all samples, or of all whole mini-batches, of an evaluation."""
        return order_of(as_samplers_see_it(dataloader), shuffle, self._client)(0)

    def _not_chosen(self, given: Any, mode: RunningStage) -> Any:
        """A loader whose samples are the user's choice."""
        client, option = self._client, self._options["iterable"]
        if mode == RunningStage.PREDICTING:
            return noting(given)
        if client.n_workers > 1 and shares_nothing(given):
            if option == "deal":
                if mode == RunningStage.TRAINING and self._requirements.drops_late:
                    warn_of_dropped(given)
                return Dealing(given, client.worker, client.n_workers)
            if option is None:
                warn_of_repetition(given, str(mode.value), client.n_workers)
        return self._sized(given) if mode == RunningStage.TRAINING else given

    def _sized(self, given: Any) -> Any:
        sizes = self._options["batch_size_per_worker"]
        if sizes is None or not isinstance(given, DataLoader):
            return given
        return sized(given, sizes[self._client.worker])

    def _for_prediction(self, given: DataLoader[Any], shuffle: bool) -> DataLoader[Any]:
        """Its mini-batches, dealt; a batch sampler notes their indices for prediction writers."""
        whole = undropped(given)
        indices: Any = self._indices(whole, shuffle)
        if given.batch_sampler is None:
            return drawing(given, self._dealt(indices))
        takes = takes_a_sampler(whole)
        batches = drawing(whole, Handed(indices)).batch_sampler if takes else indices
        return noting(with_batches(given, self._dealt(batches)))

    def _for_training(self, given: DataLoader[Any], shuffle: bool) -> DataLoader[Any]:
        given = self._sized(given)
        if self._client.n_workers == 1 and not is_countable(given):
            return given
        seen = as_samplers_see_it(given)
        kept = self._options["keep_order"] or self._client.n_workers == 1
        kept = kept and isinstance(sampler_of(seen), SequentialSampler)
        return drawing(given, self._training(seen, not kept and not self._trainer.overfit_batches))

    def _training(self, dataloader: DataLoader[Any] | Batches, shuffle: bool) -> EpochSampler:
        epoch, resumed = self.position.epoch, self.position.resumed
        if self._made_in_epoch != epoch:  # the loaders are new or reloaded
            self.samplers.clear()
            self._made_in_epoch = epoch
        order, number = order_of(dataloader, shuffle, self._client), len(self.samplers)
        sizes, shards = self._options["batch_size_per_worker"], self._options["data_shards"]
        sizes = None if sizes is None else tuple(sizes)
        plan = replace(
            plan_of(dataloader, order, sizes, self._client.n_workers),
            batches_per_turn=self._batches_per_turn,
            fills=self._fills,
            last=self._last_step,
            visits=None if shards is None else Visits(shards["number"], shards["visit"]),
            limit=partial(limit_now, self._trainer),
            redoes=self._requirements.drops_late,
            several=self._has_several,
        )
        if plan.drop_last and self._requirements.evaluates:
            raise UserError(
                "the training loader has drop_last=True, so each pass would have other samples, "
                "whose losses no line search can compare; leave it out"
            )
        if hasattr(dataloader, "load_state_dict") and resumed is not None:
            forget_places(self._trainer)  # worker 0's, perhaps beyond what is done
        begun = resumed.begun(number, plan) if resumed else None
        self._tell(number, dataloader.dataset)
        # Without a mini-batch Lightning is to know the length: it ends, as on one device.
        shares = self._requirements.data == "shares" or batches_of(plan) == 0
        kind = ShareSampler if shares else QueueSampler
        if kind is QueueSampler and self._client.n_workers > 1:
            warn_of_pairs(plan, self.samplers)
        self.samplers.append(kind(plan, epoch, self._client, number, begun))
        return self.samplers[-1]

    def _batches_per_turn(self) -> int:
        """Mini-batches of one worker's turn: those of one optimizer step; 0: no turns."""
        return int(self._trainer.accumulate_grad_batches) if self._requirements.takes_turns else 0

    @property
    def _training_loaders(self) -> list[Any]:
        return combined_loader(self._trainer.fit_loop).flattened

    def _has_several(self) -> bool:
        return len(self._training_loaders) > 1

    @property
    def are_alike(self) -> bool:
        """Whether a step has the same positions of all training loaders."""
        n, plans = len(self.samplers), [sampler.plan for sampler in self.samplers]
        n_all = len(self._training_loaders)
        return n == n_all > 0 and all(plan.is_like(plans[0]) for plan in plans)

    def _fills(self) -> bool:
        """Whether a loader must not end early: in a cycle, or where the user's step fetches."""
        mode = combination_of(combined_loader(self._trainer.fit_loop))
        cycles = mode == "max_size_cycle" and self._has_several()
        return cycles or step_fetches(self._trainer.lightning_module)

    def _last_step(self, worker: int) -> float:
        """The last step of the epoch that a worker takes part in, in lock-step."""
        combined = combined_loader(self._trainer.fit_loop)
        mode, module = combination_of(combined), self._trainer.lightning_module
        beside = len(combined.flattened) > len(self.samplers)  # loaders of unknown length
        if step_fetches(module) or (beside and mode == "max_size_cycle"):
            return math.inf
        steps = [s.last_step(worker) for s in self.samplers if isinstance(s, ShareSampler)]
        return min(steps) if mode == "min_size" else max(steps)

    # ---- mini-batches ---------------------------------------------------------------------------

    @cached_property
    def _scales(self) -> Scales:
        return Scales(self._trainer.lightning_module, self._options["num_samples_key"])

    def weigh(self, batch: Any) -> tuple[float, float | None]:
        """Samples in this mini-batch, and in those of all workers, if known.

        Raises:
            UserError: if the number cannot be found.
        """
        self._has_weighed = True
        self._rng_state.begin_batch(self.committed.has_unsent)
        self._ends.begin_batch()
        portions = [sampler.next_portion() for sampler in self.samplers]
        if None in portions and batch is not None and self._client.n_workers > 1:
            self._check_asked()
        weights = [portion.weight for portion in portions if portion is not None]
        known = [weight for weight in weights if weight is not None]
        sure = len(known) == len(portions) > 0
        if batch is None and not sure:
            return 1.0, None  # training_step(dataloader_iter) is about to fetch by itself
        planned = sum(known) if sure else None
        weight = self._scales.weigh(batch, planned, self._all_kept)
        # The others' share of this step is known in samples, not in the user's own count.
        in_step = len(portions) == 1 and portions[0] is not None and weight == planned
        return weight, portions[0].together if in_step and portions[0] else None

    def pop_weighed(self) -> bool:
        """Whether the mini-batch that is about to end was weighed; to be called once."""
        weighed, self._has_weighed = self._has_weighed, False
        return weighed

    def _check_asked(self) -> None:
        """A mini-batch has come that a sampler does not know of."""
        for loader in self._training_loaders:
            if (sampler := sampler_in(loader, EpochSampler)) is not None:
                check_asked(loader, sampler)

    def pass_over(self) -> float | None:
        """This worker skips the step; return the samples of all workers, if known."""
        self._ends.begin_batch()
        portions = [sampler.next_portion() for sampler in self.samplers]
        return portions[0].together if len(portions) == 1 and portions[0] else None

    # ---- epochs ---------------------------------------------------------------------------------

    def set_epochs(self) -> None:
        """Counters are restored: set the epochs of loaders that were made before."""
        epoch, every = self.position.epoch, self._trainer.reload_dataloaders_every_n_epochs
        if every and self.position.resumed is not None:  # made anew when those of a whole run are
            _, validation = reload_epochs(self._trainer)
            set_reload_epochs(self._trainer, epoch - epoch % every, validation)
        late = [sampler for sampler in self.samplers if sampler.epoch != epoch]
        for sampler in late:
            sampler.set_epoch(epoch)
        if late:
            remeasure(self._trainer)
            self._moved = True

    def begin_validation(self) -> None:
        """Let the RNG state be the checkpoint's; Lightning isolates that of its sanity check."""
        if not self._trainer.sanity_checking:
            self._rng_state.throw()

    def begin_epoch(self) -> None:
        """Let lengths and iterators be those of this epoch."""
        loop = self._trainer.fit_loop
        self._admit()
        is_first = not self.position.has_begun
        self._moved |= self.position.begin()
        for sampler in self.samplers:  # of a loader in another object Lightning sets none
            sampler.set_epoch(self.position.epoch)
        self._all_kept = self._has_several() or all(map(keeps_all, self._training_loaders))
        goes_on = loop.is_resuming or loop.epoch_loop.restarting
        lightning_iterates = self._trainer.current_epoch > 0 and not goes_on
        stale = self._moved or any(sampler.stale() for sampler in self.samplers)
        if self._rng_state.waits:
            self._rng_state.compare()
            if self.position.resumed is None:
                self._begin_with_saved_numbers(is_first)
                stale = True
        if stale and not lightning_iterates:
            iter(training_fetcher(self._trainer))
        self._moved = False

    def _begin_with_saved_numbers(self, is_first: bool) -> None:
        """An epoch begins behind a checkpoint: its iterators draw a number, and the user's sampler
        an order. Loaders have drawn theirs already, before the states were restored.

        ``is_first``: of this run; else other workers may have restored theirs in the resumed epoch,
        and do not meet for another order.
        """
        self._rng_state.throw()
        for sampler in self.samplers if is_first else ():
            sampler.forget_orders()
        if reloads_here(self._trainer):  # which in an uninterrupted run draws a number, too
            iter(training_fetcher(self._trainer))
            _, validation = reload_epochs(self._trainer)
            set_reload_epochs(self._trainer, self._trainer.current_epoch, validation)

    def _admit(self) -> None:
        """In lock-step: share the epoch with workers whose host has come since the last one.

        They are started in its first step, as restarted workers are: the others wait for them.
        """
        if not (self._joins and self._requirements.whole_rounds) or self._client.group.joins:
            return
        self._client.gather("who begins", None, admits=True)
        for sampler in self.samplers:
            if sampler.crew != self._client.group.there:
                sampler.shares_with(self._client.group.there)
                self.position.change_lengths()
