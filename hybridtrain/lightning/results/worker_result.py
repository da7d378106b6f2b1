"""Results of workers: after ``fit`` the calling process is as if it had trained itself.

Lightning's own multi-process launchers return weights, metrics and one path. Worker 0 also returns
the loops' counters, the callbacks' states, and plain attributes of callbacks, module and loggers,
so that ``trainer.global_step``, ``early_stopping.stopped_epoch`` or ``trainer.log_dir`` are those
of a training in this process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from hybridtrain.engine.memory.scratch_file import Scratch, as_bytes, fill, read
from hybridtrain.lightning.async_training.expected_updates import ExpectedUpdates
from hybridtrain.lightning.checkpointing.checkpoint_writing import CheckpointWriting
from hybridtrain.lightning.data.evaluation_sampler import Outputs, collect, in_order
from hybridtrain.lightning.hooks.loop_hooks import (
    log_connector,
    logged_step,
    set_logged_step,
    show_metrics,
)
from hybridtrain.lightning.hooks.trainer_hooks import attach_module_callbacks
from hybridtrain.lightning.participation.logged_metrics import metrics_of
from hybridtrain.lightning.results.returned_optimizers import TrainedOptimizers
from hybridtrain.lightning.results.returned_training import Sizes, load_weights
from hybridtrain.lightning.states.callback_state import (
    CallbackState,
    ModuleState,
    give_to_callback,
    give_to_module,
    of_callback,
    of_module,
    pairs,
)
from hybridtrain.lightning.states.held_objects import HeldObjects
from hybridtrain.lightning.states.logger_state import give_to_logger, of_logger
from hybridtrain.lightning.worker_callback import WorkerCallback
from hybridtrain.util.files import interrupted_in
from hybridtrain.util.streams import say

Remember = Callable[[TrainedOptimizers, float | None, HeldObjects], None]


@dataclass(frozen=True)
class WorkerResult:
    """Worker 0's result. Tensors are bytes of ``torch.save``.

    ``heavy``: weights, states of optimizers and schedulers; empty where these are in the calling
    process's scratch file.
    """

    returned: Any
    heavy: bytes
    tensors: bytes
    trainer_state: Any
    progress: dict[str, dict[str, Any]]
    callbacks: list[CallbackState]
    module: ModuleState
    before_configuring: ModuleState | None
    loggers: list[dict[str, Any]]
    sizes: Sizes
    outputs: Outputs | None


@dataclass(frozen=True)
class WorkersTraining:
    """The parts of a worker's training, kept until the trainer's function has returned.

    Args:
        gather: collective: brings each worker's own state to the saving worker.
        unify: brings the state of optimizers to one version.
        before_configuring: the module's attributes after ``setup``.
        expected: of a worker that runs freely.
    """

    gather: Callable[[], None]
    unify: Callable[[], None]
    before_configuring: ModuleState | None
    expected: ExpectedUpdates | None


def pack(
    trainer: pl.Trainer,
    training: WorkersTraining,
    returned: Any,
    held: HeldObjects,
    room: str = "",
) -> WorkerResult | Outputs | None:
    """In every worker, at the end: worker 0's result, the other workers' predictions.

    ``room``: the path of the calling process's scratch file, if it has one.
    """
    training.gather()
    module = trainer.lightning_module
    weights, outputs = module.state_dict(), collect(trainer)
    if not trainer.is_global_zero:
        return outputs
    fits = trainer.state.fn == "fit"
    stepped: list[Any] = [*trainer.optimizers] if fits else []
    stepped += [config.scheduler for config in trainer.lr_scheduler_configs] if fits else []
    if fits:
        training.unify()
    heavy = {
        "weights": weights,
        "parameters": {
            name: None if name in weights else parameter.detach()
            for name, parameter in module.named_parameters(remove_duplicate=False)
        },
        "buffers": dict(module.named_buffers(remove_duplicate=False)),
        "trained": TrainedOptimizers.of(trainer, held) if fits else None,
        "held": held.contents({id(each) for each in stepped}),
    }
    return WorkerResult(
        returned=None if outputs is not None else returned,
        outputs=outputs,
        heavy=fill(room, heavy),
        tensors=as_bytes(metrics_of(trainer, collects=True)),
        trainer_state=trainer.state,
        progress=_progress(trainer),
        callbacks=[of_callback(c, module, held.refer) for c in _all(trainer)],
        module=of_module(module, held.refer),
        before_configuring=training.before_configuring,
        loggers=[of_logger(logger, held.refer) for logger in trainer.loggers],
        sizes=Sizes.of(trainer, training.expected),
    )


def unpack(
    trainer: pl.Trainer,
    results: Sequence[WorkerResult | Outputs | None],
    held: HeldObjects,
    remember: Remember,
    keeping: CheckpointWriting,
    scratch: Scratch | None = None,
    given: Mapping[str, Any] | None = None,
) -> Any:
    """In the parent: take over worker 0's state; return the result of the trainer's method.

    ``held``: what there was when the run started; ``remember``: keeps optimizers, and how many
    updates were expected; ``keeping``: knows missing checkpoints; ``given``: the arguments of that
    method.

    Raises:
        RuntimeError: if worker 0 died before it had packed.
    """
    home = _first(results)
    others = [each for each in results if not isinstance(each, WorkerResult)]
    heavy = read("" if scratch is None else scratch.path, home.heavy)
    load_weights(trainer, heavy, home.before_configuring)
    log_connector(trainer).reset_metrics()  # of the last call only, as in one process
    show_metrics(trainer, read("", home.tensors))
    trainer.state = home.trainer_state
    _restore_progress(trainer, home.progress)
    home.sizes.give(trainer, given or {})
    module = trainer.lightning_module
    give_to_module(module, home.module, held)
    held.fill(heavy["held"])
    if heavy["trained"] is not None:  # configure_optimizers runs here
        remember(heavy["trained"], home.sizes.total, held)
        held.fill(heavy["held"], again=True)
        give_to_module(module, home.module, held)
    if len(_all(trainer)) != len(home.callbacks):  # the module has some of its own
        attach_module_callbacks(trainer)
    for callback, belongings in pairs(_all(trainer), home.callbacks):
        give_to_callback(callback, module, belongings, held)
    keeping.forget_lost(trainer)
    for logger, brought in zip(trainer.loggers, home.loggers, strict=True):
        give_to_logger(logger, brought, held)
    return home.returned if home.outputs is None else in_order([home.outputs, *others])


def whole(scratch: Scratch, results: list[Any]) -> list[Any]:
    """The results, with what lies in this host's scratch file."""
    return [
        replace(each, heavy=as_bytes(read(scratch.path)))
        if isinstance(each, WorkerResult) and not each.heavy
        else each
        for each in results
    ]


def _first(results: Sequence[WorkerResult | Outputs | None]) -> WorkerResult:
    home = next((each for each in results if isinstance(each, WorkerResult)), None)
    if home is None:
        raise RuntimeError(
            "the first worker was lost after training, and with it metrics and weights; the last "
            "checkpoint has what it had saved"
        )
    return home


def save_finished(
    trainer: pl.Trainer,
    results: Sequence[WorkerResult | Outputs | None],
    held: HeldObjects,
    remember: Remember,
    keeping: CheckpointWriting,
    scratch: Scratch,
) -> None:
    """In the parent, after a signal when workers had finished training, so that none saves."""
    if trainer.state.fn != "fit" or not any(isinstance(each, WorkerResult) for each in results):
        return
    unpack(trainer, results, held, remember, keeping, scratch)
    keeping.is_whole()
    folder = getattr(trainer.checkpoint_callback, "dirpath", None)
    if folder:
        path = interrupted_in(Path(folder))
        try:
            trainer.save_checkpoint(path)
        except Exception as error:  # the interrupt is to be raised, not this
            warnings.warn(f"no checkpoint could be written to {path}: {error}", stacklevel=2)
            return
        say(f"stopped after step {trainer.global_step}, checkpoint: {path}")


def _all(trainer: Any) -> list[pl.Callback]:
    """All callbacks but ``WorkerCallback``, those of ``configure_callbacks`` included."""
    return [callback for callback in trainer.callbacks if not isinstance(callback, WorkerCallback)]


# ---- the loops' counters ------------------------------------------------------------------------


def _progress_objects(trainer: pl.Trainer) -> dict[str, Any]:
    epoch_loop = trainer.fit_loop.epoch_loop
    return {
        "epoch": trainer.fit_loop.epoch_progress,
        "batch": epoch_loop.batch_progress,
        "scheduler": epoch_loop.scheduler_progress,
        "automatic": epoch_loop.automatic_optimization.optim_progress,
        "manual": epoch_loop.manual_optimization.optim_step_progress,
    }


def _progress(trainer: pl.Trainer) -> dict[str, dict[str, Any]]:
    states = {name: loop.state_dict() for name, loop in _progress_objects(trainer).items()}
    states["stepped"] = {"batches": logged_step(trainer)}
    states["stop"] = {"should_stop": trainer.should_stop}
    return states


def _restore_progress(trainer: pl.Trainer, states: dict[str, dict[str, Any]]) -> None:
    for name, progress in _progress_objects(trainer).items():
        progress.load_state_dict(states[name])
    set_logged_step(trainer, states["stepped"]["batches"])
    trainer.should_stop = states["stop"]["should_stop"]
