"""What Lightning's loops do not offer under a public name: counters, decisions, loaders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_fabric.utilities.data import sized_len
from pytorch_lightning.loops.evaluation_loop import RestartStage, _EvaluationLoop
from pytorch_lightning.loops.fit_loop import _FitLoop
from pytorch_lightning.loops.prediction_loop import _PredictionLoop
from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop
from pytorch_lightning.trainer.connectors.data_connector import _parse_num_batches
from pytorch_lightning.trainer.states import RunningStage

# Methods of loops, to be wrapped.
BEFORE_FETCH = "_on_before_fetch"  # of the loop over an epoch's mini-batches
BEHIND_LOADER = "_store_dataloader_outputs"  # of a validation or test
BEHIND_EVALUATION = "_on_evaluation_end"  # callbacks hear of its outcome
ITERATING: tuple[tuple[type[Any], str], ...] = (  # what a StopIteration may leave
    (_FitLoop, "on_advance_start"),
    (_FitLoop, "advance"),
    (_FitLoop, "on_advance_end"),
    (_TrainingEpochLoop, "advance"),
    (_TrainingEpochLoop, "on_advance_end"),
    (_EvaluationLoop, "_evaluation_step"),
    (_EvaluationLoop, BEHIND_LOADER),
    (_PredictionLoop, "_predict_step"),
)
_LOGGED_STEP = "_batches_that_stepped"

# ---- counters -----------------------------------------------------------------------------------


def logged_step(trainer: Any) -> int:
    """The number that loggers give to a row: mini-batches with a step that this process has run."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def set_logged_step(trainer: Any, step: int) -> None:
    """The next row has this number."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = step


def saved_logged_step(loops: dict[str, Any]) -> int:
    """The same in the loops' part of a checkpoint."""
    return int(loops["epoch_loop.state_dict"][_LOGGED_STEP])


def add_to_saved_logged_step(loops: dict[str, Any], steps: int) -> None:
    """So many more."""
    loops["epoch_loop.state_dict"][_LOGGED_STEP] += steps


def is_at_last_batch(trainer: Any) -> bool:
    """Whether the mini-batch that is under way, or was, is this epoch's last."""
    return bool(trainer.fit_loop.epoch_loop._num_ready_batches_reached())


def accumulates(trainer: Any) -> bool:
    """Whether this mini-batch makes no step: its gradient waits for others."""
    return bool(trainer.fit_loop.epoch_loop._should_accumulate())


# ---- decisions ----------------------------------------------------------------------------------


def may_stop_early(trainer: Any) -> bool:
    """Whether ``min_epochs`` and ``min_steps`` are reached."""
    return bool(trainer.fit_loop._can_stop_early)


def has_trained_epoch(trainer: Any) -> bool:
    """Whether there is nothing more to train on in this epoch, or by ``max_steps``."""
    return bool(trainer.fit_loop.epoch_loop._is_training_done)


def has_ended_epoch(trainer: Any) -> bool:
    """Whether no mini-batch follows in this epoch, also because training is to stop."""
    return has_trained_epoch(trainer) or bool(trainer.should_stop and may_stop_early(trainer))


def validates_this_epoch(trainer: Any) -> bool:
    """As ``check_val_every_n_epoch`` wants it."""
    return bool(trainer.fit_loop.epoch_loop._should_check_val_epoch())


def validation_is_due(trainer: Any) -> bool:
    """Whether Lightning would validate behind this mini-batch."""
    loop = trainer.fit_loop
    return bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))


def replace_validation_check(trainer: Any, by: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Let ``by`` say whether a validation is due; returns what has said it until now.

    Both take the fetcher of mini-batches.
    """
    loop = trainer.fit_loop.epoch_loop
    former: Callable[[Any], bool] = loop._should_check_val_fx
    loop._should_check_val_fx = by
    return former


def validation_seconds(trainer: Any) -> float | None:
    """Of ``val_check_interval``, where it is a time."""
    return trainer._val_check_time_interval


def validate_from_beginning(trainer: Any) -> None:
    """Lightning goes back to a validation that it takes for one that was broken off."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    loop.batch_progress.reset_on_run()
    loop._restart_stage = RestartStage.RESTARTED_MID_EVALUATION


def set_restarting(loop: Any, restarting: bool) -> None:
    """Of this loop alone; its property sets that of the loops inside as well."""
    loop._restarting = restarting


def step_with(trainer: Any, closure: Callable[[], Any]) -> None:
    """One step of automatic optimization, with another closure than that of a mini-batch."""
    loop = trainer.fit_loop.epoch_loop
    loop.automatic_optimization._optimizer_step(loop.batch_idx, closure)


# ---- loaders ------------------------------------------------------------------------------------


def combined_loader(loop: Any) -> Any:
    """What a loop iterates over, ``None`` before there is anything."""
    return loop._combined_loader


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
    """Where loops keep the number of mini-batches: the loop, and the attribute's name."""
    loops = loops_of(trainer)
    if trainer.state.fn == "predict":
        return {"predict": (loops[0], "max_batches")}
    evaluation = {"evaluation": (loops[-1], "_max_batches")}
    if trainer.state.fn != "fit":
        return evaluation
    own = {name: (loops[0], name) for name in ("max_batches", "min_epochs")}
    return evaluation | own | {"val_check_batch": (trainer, "val_check_batch")}


def sizes_of(trainer: Any) -> dict[str, Any]:
    """How many mini-batches the loops have, and the like."""
    return {key: getattr(*where) for key, where in _sizes(trainer).items()}


def set_sizes(trainer: Any, sizes: dict[str, Any]) -> None:
    """The same in a trainer whose loops have not run."""
    for key, (owner, name) in _sizes(trainer).items():
        setattr(owner, name, sizes[key])


def has_loaders(loop: Any) -> bool:
    """Whether there is anything that it iterates over."""
    return loop._combined_loader is not None


def source_of(loop: Any) -> Any:
    """Where its loaders come from."""
    return loop._data_source


def give_loaders(loop: Any, combined: Any) -> None:
    """Let the loop iterate over these loaders."""
    loop._combined_loader = combined


def forget_loaders(loop: Any) -> None:
    """An evaluation makes its loaders anew when it begins next."""
    loop._combined_loader = None


def evaluation_batches(loop: Any) -> Any:
    """How many mini-batches an evaluation has of each of its loaders."""
    return loop._max_batches


def set_evaluation_batches(loop: Any, batches: Any) -> None:
    """Let it look as if it had so many."""
    loop._max_batches = batches


def combination_of(combined: Any) -> str:
    """How it combines several loaders: the ``mode`` of a ``CombinedLoader``."""
    return combined._mode


def training_fetcher(trainer: Any) -> Any:
    """What fetches mini-batches for training."""
    return trainer.fit_loop._data_fetcher


def limited_batches(stage: RunningStage, length: float, limit: float) -> float:
    """How many mini-batches ``limit_*_batches`` leaves of ``length``."""
    return _parse_num_batches(stage, length, limit)


def predictions(trainer: Any) -> list[Any]:
    """What ``trainer.predict`` has collected in this process."""
    return trainer.predict_loop._predictions


def remeasure(trainer: Any) -> None:
    """The training loaders have other lengths than when Lightning asked for them."""
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
    interval = getattr(trainer, "val_check_interval", None)  # not there where the clock says when
    if isinstance(interval, float) and trainer.val_check_batch != float("inf"):
        trainer.val_check_batch = max(1, int(length * interval))
