"""The points where Lightning, and torch below it, is patched: each here, and once.

A part of this package listens at a point: its listener runs in place of the method and receives the
rest as ``proceed``, which is the next listener, or at last the original method. Each point lists
its listeners, outermost first, whatever the order in which they are added.
``docs/lightning_points.md`` says why each point is patched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, unique
from functools import partial
from typing import Any


@unique
class Point(Enum):
    """By owner: the methods, and the qualified names of their listeners, outermost first."""

    # trainer
    SAVE = "save_checkpoint", "Requeue.save WorkerCallback.save HybridStrategy.save_together"
    # checkpoint connector
    DUMP = "dump_checkpoint", "Injection.begin_checkpoint HybridStrategy.before_checkpoint"
    RESUME = "resume_start", "HostMemoryStrategy.resume_together"
    RESTORE = "restore_callbacks restore_training_state", "Restoration.restore"
    # data connector
    PREPARE = "_prepare_dataloader", "Loaders.prepare"
    # signal connector
    SIGNALS = "register_signal_handlers", "install_nothing"
    # logger connector
    COLLECT = "on_epoch_end", "EpochEnds.allow MetricsByName.collect"
    # logged values of a loop
    LOGGED = "log", "MetricsByName.log"
    READ = "metrics", "MetricsByName.read"
    # progress bar
    SHOWN = "get_metrics", "MetricsByName.show"
    # fit loop
    FIT = "run", "Rejoin.agree"
    FIT_RESET = "reset", "Loaders.set_epochs EpochEnds.settle"
    EPOCH_START = "on_advance_start", "only_the_end"
    EPOCH = "advance", "only_the_end"
    EPOCH_END = "on_advance_end", "only_the_end"
    # epoch loop
    BATCHES = "on_run_start", "Loaders.begin_epoch Absence.begin_epoch"
    BATCH = "advance", "Validations.advance EpochEnds.go_on Absence.advance only_the_end"
    BATCH_END = "on_advance_end", "Absence.end_advance only_the_end"
    FETCH = "_on_before_fetch", "StepRollback.settle RejoinState.fetch"
    SCHEDULERS = (
        "update_lr_schedulers",
        "LostSampleRedistribution.look StepRollback.keep_schedules UpdateCount.update "
        "EpochEnds.keep_schedules Absence.schedule_plateaus",
    )
    VALIDATION_DUE = (
        "_should_check_val_fx",
        "UpdateCount.call_for_logged WorkerCallback.validate_together Validations.is_due "
        "Absence.validation_is_due",
    )
    # progress of mini-batches
    STEP_MADE = "increment_processed", "Absence.step_is_made"
    # evaluation and prediction loops
    EVALUATION = (
        "run",
        "StepProfiler.validate Loaders.begin_validation UnevenEvaluation.run",
    )
    EVALUATION_DATA = "setup_data", "UnevenEvaluation.setup_data"
    EVALUATION_END = "on_run_end", "UnevenEvaluation.end"
    # evaluation loops
    EVALUATION_STEP = "_evaluation_step", "only_the_end"
    LOADER_END = (
        "_store_dataloader_outputs",
        "UnevenEvaluation.end_loader MetricsByName.end_loader only_the_end",
    )
    EVALUATION_HOOKS = "_on_evaluation_end", "UnevenEvaluation.conclude"
    # prediction loop
    PREDICTION_STEP = "_predict_step", "only_the_end"
    # ModelCheckpoint
    CHECKPOINT_START = "on_train_start", "DueFiles.begin"
    CHECKPOINT_HOOKS = "on_train_batch_end on_exception", "save_whole_steps SavedMultiples.save"
    CHECKPOINT_DECISION = "_monitor_candidates", "HybridStrategy.decide_on_checkpoint"
    CHECKPOINT_SEARCH = "_find_last_checkpoints", "find_whole"
    CHECKPOINT_LINK = "_link_checkpoint", "CheckpointWriting.link"
    CHECKPOINT_SAVE = "_save_checkpoint", "WholeCheckpointIO.save_later"
    CHECKPOINT_EXISTS = "file_exists", "WholeCheckpointIO.exists_then"
    # WeightAveraging
    SWAP = "_swap_models", "Swapping.swap"
    # loggers
    LOG = (
        "log_metrics log_hyperparams log_graph save finalize after_save_checkpoint",
        "Patience.write",
    )
    # precision plugin
    CLIP = "clip_gradients", "Session.record_clip Session.average_own"
    BACKWARD = "backward", "Session.backward_and_average ForeignSteps.backward"
    # session
    AVERAGE = "average", "Absence.gradients_are_there"
    # pushes of a worker
    OFFER = "offer", "RejoinState.push"
    # strategy
    TEARDOWN = "teardown", "Injection.tear_down"
    # schedulers
    SCHEDULER_STEP = "step", "CallsByHand.call"
    # Trainer
    EXPECTED = "estimated_stepping_batches", "estimated"
    LAST_BATCH = "is_last_batch", "looked"
    # LightningModule
    RUNNING_HOOK = "__setattr__", "set_attribute"
    GATHER = "all_gather", "by_keys"
    # PassThroughProfiler
    PROFILE = "profile", "profile"
    # training epoch loop's module
    SIGNATURE = "is_param_in_hook_signature", "has_parameter"
    # _MapDatasetFetcher
    ITEMS = "fetch", "strict"
    # _IterableDatasetFetcher
    STREAM = "__init__", "strict"
    # _BaseDatasetFetcher
    COLLATE = "__init__", "collating_strictly"
    # ExceptionWrapper
    RERAISE = "reraise", "in_its_words"

    def __init__(self, methods: str, listeners: str) -> None:
        self.methods, self.listeners = methods.split(), listeners.split()


class _Chain(partial[Any]):
    """The listeners of one method, around each other."""

    listeners: dict[str, Callable[..., Any]]


def around(point: Point, owner: Any, listener: Callable[..., Any]) -> None:
    """Let ``listener(proceed, *args, **kwargs)`` run in place of the owner's method."""
    _join(point, owner, _name_of(point, listener), listener)


def before(point: Point, owner: Any, first: Callable[[], object]) -> None:
    """Let ``first`` run before every call of the owner's method."""

    def call(proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        first()
        return proceed(*args, **kwargs)

    _join(point, owner, _name_of(point, first), call)


def _name_of(point: Point, listener: Callable[..., Any]) -> str:
    """The listener's name in the list; a subclass may have its own method of that name."""
    kinds = type(getattr(listener, "__self__", None)).__mro__
    names = [listener.__qualname__, *(f"{kind.__name__}.{listener.__name__}" for kind in kinds)]
    found = next((name for name in names if name in point.listeners), None)
    assert found is not None, f"{listener.__qualname__} is not listed at {point}"
    return found


def _join(point: Point, owner: Any, name: str, listener: Callable[..., Any]) -> None:
    for method in point.methods:
        found = vars(owner).get(method)
        chained = isinstance(found, _Chain)
        known = found.listeners if chained else {"": getattr(owner, method)}
        known = {**known, name: listener}
        call = known[""]
        for each in reversed(point.listeners):
            if each in known:
                call = _Chain(known[each], call)
                call.listeners = known
        setattr(owner, method, call)


def instead(point: Point, owner: Any, method: Any) -> None:
    """Set the owner's method, in a class or module for all its users."""
    for name in point.methods:
        setattr(owner, name, method)


@contextmanager
def instead_within(point: Point, owner: Any, method: Any) -> Iterator[None]:
    """Set the owner's method as ``instead`` does; restore its own one at the end."""
    own = {name: getattr(owner, name) for name in point.methods}
    instead(point, owner, method)
    try:
        yield
    finally:
        for name, each in own.items():
            setattr(owner, name, each)


def instead_in(point: Point, owner: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    """Set the method in a class of the owner's own, as its attributes are its state.

    Returns the original method.
    """
    kind, (name,) = type(owner), point.methods
    changed = {name: lambda self, *args, **kwargs: method(*args, **kwargs)}
    about = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    owner.__class__ = type(kind.__name__, (kind,), changed | about)
    return partial(getattr(kind, name), owner)
