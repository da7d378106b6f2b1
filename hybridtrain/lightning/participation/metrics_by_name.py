"""Reduce values logged with ``self.log(..., sync_dist=True)`` over workers, by their names.

Lightning reduces each value by a collective of its own, where it is logged or computed. Workers
that log other names, or the same in another order (a branch on the data, a class that one worker
has not seen), would average values of different names. Here all of them exchange what they have
logged, with its names: an epoch's values at its end, a mini-batch's values behind it. Each name has
the values that were logged under it. A name that only some workers have logged is reduced over
these, with Lightning's weights, and all get the result, because all may monitor it.

All workers meet where Lightning collects an epoch's values. Elsewhere they meet if they read
(``trainer.callback_metrics``) what they have logged since: so must all, or the run ends with a line
that has the names. A progress bar reads alone, and sees what is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from pytorch_lightning.trainer.states import RunningStage
from torchmetrics import Metric

from hybridtrain.errors import UserError
from hybridtrain.lightning.collectives import fold
from hybridtrain.lightning.hooks.loop_hooks import (
    all_results,
    begin_anew,
    begun_batches,
    compute_anew,
    current_results,
    described,
    give_step_value,
    give_value,
    is_computed,
    log_connector,
    operation,
    step_value,
    valid_entries,
)
from hybridtrain.lightning.hooks.points import Point, around
from hybridtrain.lightning.participation.logged_metrics import made_entry
from hybridtrain.lightning.worker_context import WorkerContext
from hybridtrain.util.attributes import temporarily


@dataclass(frozen=True, slots=True)
class Logged:
    """One worker's entry of one name.

    ``about`` and ``reduction``: the options of ``self.log``; ``values``: in host memory, of a mean
    also the number of samples, empty for what is not reduced; ``computed``: whether its value is
    known.
    """

    about: dict[str, Any]
    reduction: dict[str, Any]
    is_tensor: bool
    values: tuple[torch.Tensor, ...]
    computed: bool

    @property
    def reduces(self) -> bool:
        """Whether workers put its values together."""
        return bool(self.values) or not self.is_tensor

    @property
    def options(self) -> str:
        """Describe the options that must be equal on all workers."""
        if not self.is_tensor:
            return f"the metric object {self.about['metric_attribute']}"
        reduce_fx = getattr(self.about["reduce_fx"], "__name__", self.about["reduce_fx"])
        levels = [f"{level}={self.about[level]}" for level in ("on_step", "on_epoch")]
        return f"sync_dist={self.reduces}, reduce_fx={reduce_fx}, {', '.join(levels)}"


class MetricsByName:
    """Puts together what all workers have logged, in one worker.

    Args:
        trainer: of this worker.
        worker: this one.
    """

    def __init__(self, trainer: Any, worker: WorkerContext) -> None:
        self._trainer, self._collectives = trainer, worker.collectives
        self._device = worker.device
        self._pending: set[str] = set()  # logged in this mini-batch, to be put together
        self._ended: object = None  # the mini-batch whose values have been put together
        self._has_synced = False  # a mini-batch's value was logged that is reduced over workers
        self._before = 0  # mini-batches of an evaluation's earlier loaders
        self._collects = self._shows = False  # all workers read; a progress bar does
        for results in all_results(trainer):
            around(Point.LOGGED, results, self.log)
            around(Point.READ, results, self.read)
        around(Point.COLLECT, log_connector(trainer), self.collect)
        for loop in (
            trainer.fit_loop.epoch_loop.val_loop,
            trainer.validate_loop,
            trainer.test_loop,
        ):
            around(Point.LOADER_END, loop, self.end_loader)

    def watch_progress_bar(self) -> None:
        """Once the trainer has all its callbacks: its progress bar reads in one worker alone."""
        if (bar := self._trainer.progress_bar_callback) is not None:
            around(Point.SHOWN, bar, self.show)

    # ---- where values are logged and read -------------------------------------------------------

    def log(self, proceed: Callable[..., None], fx: str, name: str, *args: Any, **kw: Any) -> None:
        """Lightning's, without a collective for the value of a mini-batch."""
        synced = kw.get("sync_dist") and kw.get("on_step") and not kw.get("rank_zero_only")
        self._has_synced = self._has_synced or bool(synced)
        if not (synced and self._collectives.meets):
            proceed(fx, name, *args, **kw)
            return
        later = self._ended != self._batch
        with self._collectives.logging(name, later):
            proceed(fx, name, *args, **kw)
        if later:
            place = current_results(self._trainer).dataloader_idx
            has_place = kw.get("add_dataloader_idx", True) and place is not None
            self._pending.add(f"{fx}.{name}.{place}" if has_place else f"{fx}.{name}")

    def read(self, proceed: Callable[[bool], Any], on_step: bool) -> Any:
        """Lightning's, behind the exchange of what has not been exchanged."""
        if not self._collectives.meets:
            return proceed(on_step)
        if self._shows:
            with ExitStack() as hidden:
                for entry in self._unknown():
                    hidden.enter_context(temporarily(entry, has_reset=True))
                return proceed(on_step)
        if on_step and self._pending:
            self._meet_behind_batch()
        elif not on_step:
            self._meet_behind_epoch(self._collects)
        return proceed(on_step)

    def collect(self, proceed: Callable[[], None]) -> None:
        """All workers collect an epoch's values."""
        with temporarily(self, _collects=True):
            proceed()
        self._ended, self._before = None, 0

    def end_loader(self, proceed: Callable[[], None]) -> None:
        """All workers collect the values of an evaluation's loader."""
        self.collect(proceed)
        self._before = begun_batches(self._trainer)

    @property
    def _batch(self) -> tuple[RunningStage, int]:
        """The mini-batch at hand: its number in its loader, which all workers share."""
        return self._trainer.state.stage, begun_batches(self._trainer) - self._before

    def show(self, proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A progress bar collects values, in one worker alone."""
        with temporarily(self, _shows=True):
            return proceed(*args, **kwargs)

    def end_steps(self) -> None:
        """An epoch's mini-batches have ended, before its hooks."""
        if self._collectives.meets:
            self._meet_behind_epoch(together=True)

    def end_batch(self) -> None:
        """A mini-batch has ended, before its hooks; what they log is reduced where they log it."""
        if not self._collectives.meets:
            return
        if self._has_synced:  # most modules log none; to look at entries takes some time a step
            entries = current_results(self._trainer).values()
            if self._pending or any(each.meta.on_step and _is_synced(each) for each in entries):
                self._meet_behind_batch()
        self._ended = self._batch

    # ---- a mini-batch ---------------------------------------------------------------------------

    @torch.no_grad()
    def _meet_behind_batch(self) -> None:
        results = current_results(self._trainer)
        pending, self._pending = self._pending, set()
        mine = {key: _logged(results[key], (step_value(results[key]),)) for key in pending}
        stage, number = self._batch
        tag = f"self.log(..., on_step=True, sync_dist=True) of mini-batch {number} ({stage.value})"
        for key, known in self._exchanged(tag, mine, self._trainer.training).items():
            value = fold(
                torch.stack([each.values[0] for each in known]), operation(known[0].reduction)
            )
            give_step_value(self._entry(key, known[0]), value.to(self._device))

    # ---- an epoch -------------------------------------------------------------------------------

    @torch.no_grad()
    def _meet_behind_epoch(self, together: bool) -> None:
        """``together``: all workers come here, also with nothing to exchange."""
        results = current_results(self._trainer)
        entries = {k: e for k, e in valid_entries(results).items() if e.meta.on_epoch}
        mine = {key: _logged(entry, _accumulated(entry)) for key, entry in entries.items()}
        unknown = any(each.reduces and not each.computed for each in mine.values())
        if not unknown and (not together or self._collectives.alone):
            return
        when = "at the end of an epoch" if together else "read within an epoch or its hooks"
        found = self._exchanged(f"what self.log has logged, {when}", mine)
        computed = [each for each in found.items() if not all(one.computed for one in each[1])]
        for key, known in computed:
            if known[0].is_tensor:
                give_value(self._entry(key, known[0]), _reduced(known).to(self._device))
        for key, known in computed:
            if not known[0].is_tensor and (key in mine or self._synchronises(known[0])):
                compute_anew(self._entry(key, known[0]))

    def _synchronises(self, known: Logged) -> bool:
        """Whether the metric object, which this worker has not logged, has others' values, too."""
        module = self._trainer.lightning_module
        metric = module.get_submodule(known.about["metric_attribute"])
        return isinstance(metric, Metric) and bool(metric.sync_on_compute)

    # ---- both -----------------------------------------------------------------------------------

    def _exchanged(
        self, tag: str, mine: Mapping[str, Logged], in_step: bool = False
    ) -> dict[str, list[Logged]]:
        """Exchange logged values; return those to reduce, by key, of each worker that logged it.

        Raises:
            UserError: if workers have logged a name with different options.
        """
        names = sorted({each.about["name"] for each in mine.values() if each.reduces})
        met = self._collectives.exchange(tag, mine, names, in_step)
        found: dict[str, list[tuple[int, Logged]]] = {}
        for worker, theirs in met:
            for key, logged in theirs.items():
                found.setdefault(key, []).append((worker, logged))
        reduced = {k: known for k, known in found.items() if any(e.reduces for _, e in known)}
        for known in reduced.values():
            _check_options(known)
        return {key: [each for _, each in known] for key, known in reduced.items()}

    def _entry(self, key: str, known: Logged) -> Any:
        """This worker's entry; made, or begun anew, if it has logged nothing under this name."""
        results = current_results(self._trainer)
        if key not in results:
            results[key] = made_entry(self._trainer, known.about, known.reduction, known.is_tensor)
            begin_anew(results[key])
        elif results[key].has_reset:
            begin_anew(results[key])
        return results[key]

    def _unknown(self) -> list[Any]:
        """Entries whose values of all workers are not known yet."""
        entries = valid_entries(current_results(self._trainer)).values()
        reduced = [each for each in entries if _is_synced(each) or not each.is_tensor]
        return [each for each in reduced if not is_computed(each)]


def _is_synced(entry: Any) -> bool:
    return entry.is_tensor and entry.meta.sync.should and not entry.meta.sync.rank_zero_only


def _accumulated(entry: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors that a synced entry has accumulated in the epoch; else none."""
    if not _is_synced(entry):
        return ()
    counts = (entry.cumulated_batch_size,) if entry.meta.is_mean_reduction else ()
    return (entry.value, *counts)


def _logged(entry: Any, values: tuple[torch.Tensor, ...]) -> Logged:
    values = tuple(each.detach().cpu() for each in values)
    return Logged(*described(entry), entry.is_tensor, values, is_computed(entry))


def _reduced(known: list[Logged]) -> torch.Tensor:
    op = operation(known[0].reduction)
    columns = zip(*(each.values for each in known), strict=True)
    value, *counts = (fold(torch.stack(column), op) for column in columns)
    return value / counts[0] if counts else value


def _check_options(known: list[tuple[int, Logged]]) -> None:
    (first, one), *others = known
    for worker, other in others:
        if other.options != one.options:
            raise UserError(
                f"self.log({one.about['name']!r}, ...) was called with {one.options} in worker "
                f"{first}, and with {other.options} in worker {worker}; give a name the same "
                "options in all workers"
            )
