"""Private counters, decisions and loaders of Lightning's loops."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from lightning_fabric.utilities.data import sized_len
from pytorch_lightning.loops.evaluation_loop import RestartStage
from pytorch_lightning.overrides.distributed import _IndexBatchSamplerWrapper
from pytorch_lightning.trainer.connectors.data_connector import _parse_num_batches
from pytorch_lightning.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultMetric,
    _Sync,
)
from pytorch_lightning.trainer.states import RunningStage
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

_LOGGED_STEP = "_batches_that_stepped"

# ---- counters -----------------------------------------------------------------------------------


def logged_step(trainer: Any) -> int:
    """The loggers' number of a row: mini-batches with a step that this process has run."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def set_logged_step(trainer: Any, step: int) -> None:
    """Set the number of the next row."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = step


def saved_logged_step(loops: dict[str, Any]) -> int:
    """The same in the loops' part of a checkpoint."""
    return int(loops["epoch_loop.state_dict"][_LOGGED_STEP])


def add_to_saved_logged_step(loops: dict[str, Any], steps: int) -> None:
    """Add ``steps`` to it."""
    loops["epoch_loop.state_dict"][_LOGGED_STEP] += steps


def is_at_last_batch(trainer: Any) -> bool:
    """Whether the current or last mini-batch is this epoch's last."""
    return bool(trainer.fit_loop.epoch_loop._num_ready_batches_reached())


def accumulates(trainer: Any) -> bool:
    """Whether this mini-batch only accumulates its gradient."""
    return bool(trainer.fit_loop.epoch_loop._should_accumulate())


def forget_group(trainer: Any) -> bool:
    """Zero gradients if the next mini-batch is within a group of accumulated ones, by its number.

    Lightning zeroes them where a group begins, and would add to them. Returns whether it is within.
    """
    batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    within = batches % int(trainer.accumulate_grad_batches) > 0
    for optimizer in trainer.optimizers if within else ():
        optimizer.zero_grad()
    return within


# ---- decisions ----------------------------------------------------------------------------------


def may_stop_early(trainer: Any) -> bool:
    """Whether ``min_epochs`` and ``min_steps`` are reached."""
    return bool(trainer.fit_loop._can_stop_early)


def has_trained_epoch(trainer: Any) -> bool:
    """Whether this epoch has no more mini-batches, or ``max_steps`` is reached."""
    return bool(trainer.fit_loop.epoch_loop._is_training_done)


def has_made_last_step(trainer: Any) -> bool:
    """Whether the last mini-batch of this epoch has been trained on. All workers agree."""
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    return has_trained_epoch(trainer) and progress.ready == progress.processed


def has_ended_epoch(trainer: Any) -> bool:
    """Whether no mini-batch follows in this epoch, also because training stops."""
    return has_trained_epoch(trainer) or bool(trainer.should_stop and may_stop_early(trainer))


def validates_this_epoch(trainer: Any) -> bool:
    """Whether ``check_val_every_n_epoch`` has a validation in this epoch."""
    return bool(trainer.fit_loop.epoch_loop._should_check_val_epoch())


def validation_is_due(trainer: Any) -> bool:
    """Whether Lightning would validate after this mini-batch."""
    loop = trainer.fit_loop
    return bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))


def validates_at_end(trainer: Any) -> bool:
    """Whether an epoch whose loaders have ended before their length is to be validated now.

    So it is if a validation was due at its planned end, and none followed the last mini-batch.
    """
    loop, every = trainer.fit_loop, trainer.val_check_batch  # None: a time
    if (
        every is None
        or trainer.check_val_every_n_epoch is None
        or not validates_this_epoch(trainer)
    ):
        return False
    batches = loop.epoch_loop.batch_progress.current.ready
    return every == loop.max_batches or bool(loop.max_batches % every == 0 < batches % every)


def validation_seconds(trainer: Any) -> float | None:
    """``val_check_interval`` in seconds, if it is a time."""
    return trainer._val_check_time_interval


def note_validation(trainer: Any) -> None:
    """A validation ends here; with a time as ``val_check_interval`` the next is due after it."""
    trainer._last_val_time = time.monotonic()


def validate_from_beginning(trainer: Any) -> None:
    """Let Lightning restart a validation, as if it had been interrupted."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    loop.batch_progress.reset_on_run()
    loop._restart_stage = RestartStage.RESTARTED_MID_EVALUATION


def set_restarting(loop: Any, restarting: bool) -> None:
    """Set it in this loop alone; the property would set it in inner loops, too."""
    loop._restarting = restarting


def step_with(trainer: Any, closure: Callable[[], Any]) -> None:
    """One step of automatic optimization with this closure."""
    loop = trainer.fit_loop.epoch_loop
    loop.automatic_optimization._optimizer_step(loop.batch_idx, closure)


# ---- loaders ------------------------------------------------------------------------------------


def combined_loader(loop: Any) -> Any:
    """The loop's loaders; ``None`` before they are made."""
    return loop._combined_loader


def forget_places(trainer: Any) -> None:
    """Resume without the states that loaders had in the checkpoint."""
    trainer.fit_loop._combined_loader_states_to_load = []


def loops_of(trainer: Any) -> list[Any]:
    """The loops of the running trainer function that iterate over loaders."""
    fit = trainer.fit_loop
    return {
        "fit": [fit, fit.epoch_loop.val_loop],
        "validate": [trainer.validate_loop],
        "test": [trainer.test_loop],
        "predict": [trainer.predict_loop],
    }[str(trainer.state.fn.value)]


def _sizes(trainer: Any) -> dict[str, tuple[Any, str]]:
    """The attributes of sizes: owner and name."""
    loops = loops_of(trainer)
    if trainer.state.fn == "predict":
        return {"predict": (loops[0], "max_batches")}
    evaluation = {"evaluation": (loops[-1], "_max_batches")}
    if trainer.state.fn != "fit":
        return evaluation
    own = {name: (loops[0], name) for name in ("max_batches", "min_epochs")}
    return evaluation | own | {"val_check_batch": (trainer, "val_check_batch")}


def sizes_of(trainer: Any) -> dict[str, Any]:
    """Numbers of mini-batches, ``min_epochs`` and ``val_check_batch`` of the loops."""
    return {key: getattr(*where) for key, where in _sizes(trainer).items()}


def set_sizes(trainer: Any, sizes: dict[str, Any]) -> None:
    """Set them in a trainer whose loops have not run."""
    for key, (owner, name) in _sizes(trainer).items():
        setattr(owner, name, sizes[key])


def source_of(loop: Any) -> Any:
    """Lightning's source of the loop's loaders."""
    return loop._data_source


def give_loaders(loop: Any, combined: Any) -> None:
    """Set the loop's loaders; ``None``: let an evaluation make them anew."""
    loop._combined_loader = combined


def evaluation_batches(loop: Any) -> Any:
    """An evaluation's number of mini-batches of each loader."""
    return loop._max_batches


def set_evaluation_batches(loop: Any, batches: Any) -> None:
    """Set them."""
    loop._max_batches = batches


def reload_epochs(trainer: Any) -> tuple[float, float]:
    """The epochs in which the loaders for training and for validation were last made."""
    loop = trainer.fit_loop
    return loop._last_train_dl_reload_epoch, loop.epoch_loop.val_loop._last_val_dl_reload_epoch


def set_reload_epochs(trainer: Any, training: float, validation: float) -> None:
    """Set them: ``reload_dataloaders_every_n_epochs`` counts from there."""
    loop = trainer.fit_loop
    loop._last_train_dl_reload_epoch = training
    loop.epoch_loop.val_loop._last_val_dl_reload_epoch = validation


def reloads_here(trainer: Any) -> bool:
    """Whether an uninterrupted training makes its loaders anew where this epoch begins."""
    every, epoch = trainer.reload_dataloaders_every_n_epochs, trainer.current_epoch
    return every > 0 and epoch > 0 and epoch % every == 0


def combination_of(combined: Any) -> str:
    """The ``mode`` of a ``CombinedLoader``."""
    return combined._mode


def training_fetcher(trainer: Any) -> Any:
    """The fetcher of training mini-batches."""
    return trainer.fit_loop._data_fetcher


def is_limited(trainer: Any) -> bool:
    """Whether an epoch has a given number, or a part, of its mini-batches."""
    limit = trainer.limit_train_batches
    return isinstance(limit, int) or limit not in (1.0, None)  # 1 is one mini-batch, 1.0 all


def limit_now(trainer: Any) -> float:
    """Mini-batches that one worker may have in an epoch."""
    return float(trainer.limit_train_batches) if is_limited(trainer) else math.inf


def hook_ends_epoch(loop: Any) -> bool:
    """Whether ``on_train_batch_start`` has returned -1 for the mini-batch of the epoch loop."""
    now = loop.batch_progress.current
    return bool(now.started < now.ready)


def set_fetched_batches(trainer: Any, fetched: int) -> None:
    """Set the fetched mini-batches of this epoch: others take the place of the last ones."""
    fetcher = training_fetcher(trainer)
    fetcher.fetched = fetched
    if fetcher.length is not None:
        fetcher.done = fetched >= fetcher.length


def limited_batches(stage: RunningStage, length: float, limit: float) -> float:
    """The number of mini-batches that ``limit_*_batches`` allows of ``length``."""
    return _parse_num_batches(stage, length, limit)


def predictions(trainer: Any) -> list[Any]:
    """This process's outputs of ``trainer.predict``."""
    return trainer.predict_loop._predictions


def remeasure(trainer: Any) -> None:
    """Let Lightning measure the training loaders anew."""
    loop, loader = trainer.fit_loop, trainer.fit_loop._combined_loader
    if loader is None or loader.limits is None or (length := sized_len(loader)) is None:
        return
    lengths = [sized_len(each) for each in loader.flattened]
    loader.limits[:] = [  # in place: the iterator holds the same list
        limited_batches(
            RunningStage.TRAINING, float("inf") if n is None else n, trainer.limit_train_batches
        )
        for n in lengths
    ]
    length = len(loader)
    loop.max_batches = length
    interval = getattr(trainer, "val_check_interval", None)  # missing if it is a time
    if isinstance(interval, float) and trainer.val_check_batch != float("inf"):
        trainer.val_check_batch = max(1, int(length * interval))


# ---- samplers that Lightning chooses ------------------------------------------------------------


def data_connector(trainer: Any) -> Any:
    """Lightning's connector, which makes loaders and their samplers."""
    return trainer._data_connector


def gets_our_sampler(trainer: Any, dataloader: Any) -> bool:
    """Whether Lightning would put a ``DistributedSampler`` into this DataLoader."""
    return bool(data_connector(trainer)._requires_distributed_sampler(dataloader))


def noting_indices(batches: Any) -> Any:
    """A batch sampler that records the indices of each mini-batch, for prediction writers."""
    return _IndexBatchSamplerWrapper(batches)


def inside(batches: Any) -> Any:
    """The batch sampler inside ``noting_indices``, or the given one."""
    return getattr(batches, "_batch_sampler", batches)


# ---- results ------------------------------------------------------------------------------------
# Results of ``self.log``: entries, metrics of callbacks and loggers, states of torchmetrics.

_SHOWN = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_SYNC = ("_should", "rank_zero_only", "_op")
_OF_METRIC = ("_computed", "_forward_cache", "_update_count", "_is_synced", "_cache")

# ---- entries of an epoch ------------------------------------------------------------------------


def training_results(trainer: Any) -> dict[str, Any]:
    """The training's logged entries of this epoch, by name."""
    return trainer.fit_loop.epoch_loop._results


def current_results(trainer: Any) -> Any:
    """The logged entries of the loop that runs, by name."""
    results = trainer._results  # which Lightning looks for anew each time
    return {} if results is None else results


def all_results(trainer: Any) -> list[Any]:
    """The collections of logged entries of the loops that log."""
    fit = trainer.fit_loop.epoch_loop
    loops = (fit, fit.val_loop, trainer.validate_loop, trainer.test_loop)
    return [each._results for each in loops]


def valid_entries(results: Any) -> dict[str, Any]:
    """The entries that an epoch has logged so far: those of the loader at hand."""
    return dict(results.valid_items())


def is_computed(entry: Any) -> bool:
    """Whether the entry's value of the epoch is known."""
    return entry._computed is not None


def give_value(entry: Any, value: torch.Tensor) -> None:
    """Set the entry's value of the epoch."""
    entry._computed = value


def compute_anew(entry: Any) -> None:
    """Compute a metric object's value of the epoch, also if the object remembers one."""
    entry._computed = entry.value._computed = None
    entry.compute()


def step_value(entry: Any) -> torch.Tensor:
    """The entry's value of the mini-batch."""
    return entry._forward_cache


def give_step_value(entry: Any, value: torch.Tensor) -> None:
    """Set it."""
    entry._forward_cache = value


def begun_batches(trainer: Any) -> int:
    """How many mini-batches have begun in this epoch, or evaluation, the one at hand included."""
    loop = trainer._active_loop
    return int(getattr(loop, "epoch_loop", loop).batch_progress.current.ready)


def forget_batch(trainer: Any, and_its_size: bool = False) -> None:
    """Forget the current mini-batch, for logging."""
    results = trainer._results
    results.batch = None
    if and_its_size:
        results.batch_size = None


def described(entry: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of an entry, and of its reduction."""
    meta: _Metadata = entry.meta
    about = {each.name: getattr(meta, each.name) for each in fields(meta) if each.name != "_sync"}
    return about, {name: getattr(meta.sync, name) for name in _SYNC}


def operation(sync: dict[str, Any]) -> str:
    """The reduction of an entry with these options, over workers."""
    return str(sync["_op"])


def entry_of(about: dict[str, Any], sync: dict[str, Any], is_tensor: bool, reduce: Any) -> Any:
    """An entry without a value, with these options."""
    meta = _Metadata(**about)
    meta.sync = _Sync(fn=reduce, **sync)
    return _ResultMetric(meta, is_tensor)


def begin_anew(entry: Any) -> None:
    """Mark the entry as updated in this epoch, or it would warn."""
    entry.has_reset = False
    entry._computed = None  # may be of an earlier epoch
    entry._update_count = 1


# ---- metrics of callbacks, loggers and the progress bar -----------------------------------------


def callback_metrics(trainer: Any) -> dict[str, Any]:
    """The metrics as last collected; the trainer's property would collect, a meeting of all."""
    return trainer._logger_connector._callback_metrics


def shown_metrics(trainer: Any) -> dict[str, dict[str, Any]]:
    """The three collections, as last collected."""
    connector = trainer._logger_connector
    return {name: dict(getattr(connector, name)) for name in _SHOWN}


def show_metrics(trainer: Any, metrics: dict[str, dict[str, Any]]) -> None:
    """Add to each of them."""
    for name, values in metrics.items():
        getattr(trainer._logger_connector, name).update(values)


def log_connector(trainer: Any) -> Any:
    """Lightning's connector, which collects logged values at the ends of steps and epochs."""
    return trainer._logger_connector


# ---- torchmetrics -------------------------------------------------------------------------------


def named_metrics(module: torch.nn.Module) -> dict[str, Metric]:
    """The metrics of a module, by their names in it."""
    # ``isinstance`` would ask each subclass of this abstract class: 7 ms in every new worker.
    every = module.named_modules()
    return {name: each for name, each in every if Metric in type(each).__mro__}


def metrics_in(module: torch.nn.Module) -> list[Metric]:
    """The metrics of a module."""
    return [*named_metrics(module).values()]


def state_in(metric: Metric, tensor: torch.Tensor) -> str:
    """The name of the state that torchmetrics is about to synchronise.

    A list that is concatenated is one new tensor; of another each element comes by itself.
    """
    for key, state in metric.metric_state.items():
        if state is tensor:
            return key
        if isinstance(state, list) and metric._reductions[key] is not dim_zero_cat:
            for number, element in enumerate(state):
                if element is tensor:
                    return f"{key}[{number}]"
    return "a list"


def state_of_metric(metric: Metric) -> tuple[dict[str, Any], dict[str, Any]]:
    """A metric's states, copied, and its private attributes."""
    known = vars(metric)
    return metric._copy_state_dict(), {name: known[name] for name in _OF_METRIC if name in known}


def put_back_metric(metric: Metric, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Restore them."""
    for name, value in state[0].items():
        setattr(metric, name, value)
    vars(metric).update(state[1])
