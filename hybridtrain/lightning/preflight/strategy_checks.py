"""Refuse or warn of options that contradict the strategy's policy or exchange."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from pytorch_lightning.accelerators import CPUAccelerator
from pytorch_lightning.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
    WeightAveraging,
)
from pytorch_lightning.plugins.layer_sync import TorchSyncBatchNorm
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import nn

from hybridtrain.engine.exchanges import Exchange, Requirements
from hybridtrain.engine.exchanges.compression import codec_of
from hybridtrain.engine.memory import overlapping
from hybridtrain.engine.options.strategy_arguments import StrategyArguments
from hybridtrain.engine.scheme import Scheme
from hybridtrain.engine.step.worker_step import WorkerStep
from hybridtrain.engine.worker.device import KINDS
from hybridtrain.errors import UserError
from hybridtrain.lightning.hooks.loop_hooks import validation_seconds
from hybridtrain.lightning.hooks.trainer_hooks import layer_sync
from hybridtrain.lightning.hosts.cluster import check_key_is_reachable
from hybridtrain.lightning.run_context import strategy_of
from hybridtrain.lightning.run_setup import RunSetup
from hybridtrain.lightning_package import is_foreign, refuse_mixture
from hybridtrain.util.option_types import as_typed

# ---- refuse options of the trainer that the strategy cannot run ---------------------------------


def check_trainer(trainer: Any, setup: RunSetup) -> None:
    """Check the trainer's options against the policy and the hosts.

    Raises:
        UserError: naming the option, what is allowed, and what to do.
    """
    _check_process()
    _check_package(trainer)
    _check_accelerator(trainer.accelerator)
    _check_hosts(setup)
    if trainer.state.fn != "fit":
        return
    if any(isinstance(callback, BatchSizeFinder) for callback in trainer.callbacks):
        raise UserError(
            "the callback BatchSizeFinder was given, but one worker cannot find a batch size for "
            "all; find it first with strategy='auto', devices=1, and give it to your loader"
        )
    if not setup.scheme.requirements.whole_rounds:
        check_free_running(trainer)
    if setup.scheme.requirements.delay:
        _check_one_step(setup.scheme, trainer)


def _check_one_step(scheme: Scheme, trainer: Any) -> None:
    """One update behind, a mini-batch has one step: the next would miss the one before."""
    module = trainer.lightning_module
    if not module.automatic_optimization:
        raise UserError(
            f"{type(module).__name__} has automatic_optimization=False, with "
            f"policy={as_typed(scheme.policy)}, under which the update of one step is made beside "
            "the next: a module that steps by hand would not see what its own step has moved; use "
            "automatic optimization, or policy=hybrid"
        )


def check_free_running(trainer: Any) -> None:
    """Check that the trainer's options fit workers that run freely.

    Raises:
        UserError: naming the option, and what to do.
    """
    if any(isinstance(callback, LearningRateFinder) for callback in trainer.callbacks):
        raise UserError(
            "a search for the learning rate was asked for, but workers that run freely are "
            "never at the same step of it; search with strategy=hybrid"
        )
    if isinstance(layer_sync(strategy_of(trainer)), TorchSyncBatchNorm):
        raise UserError(
            "sync_batchnorm=True was given, but workers that run freely are never at the same "
            "layer together; leave it out, or use strategy=hybrid"
        )
    _check_averaging(trainer)
    _check_interval(trainer)
    _check_limit(trainer)


def _check_averaging(trainer: Any) -> None:
    """For the statistics of BatchNorm, this callback goes through the loaders once more."""
    module = trainer.lightning_module
    norms = any(
        isinstance(each, torch.nn.modules.batchnorm._BatchNorm) for each in module.modules()
    )
    if norms and any(isinstance(each, StochasticWeightAveraging) for each in trainer.callbacks):
        raise UserError(
            "the callback StochasticWeightAveraging was given with a module that has BatchNorm, "
            "whose statistics take one more pass over the data, but workers that run freely draw "
            "from one queue, once an epoch; use EMAWeightAveraging, or strategy=hybrid"
        )


def _check_process() -> None:
    """Daemonic processes, as those of a ``multiprocessing.Pool`` are, may have no children."""
    process = multiprocessing.current_process()
    if process.daemon:
        raise UserError(
            f"training was started in {process.name}, a daemonic process (of a "
            "multiprocessing.Pool?), which may start no workers; use "
            "concurrent.futures.ProcessPoolExecutor, or multiprocessing.Process(daemon=False)"
        )


def _check_package(trainer: Any) -> None:
    """Lightning itself refuses a module of its other package, but no other part."""
    parts = (*trainer.callbacks, *trainer.loggers, getattr(trainer, "datamodule", None))
    for part in filter(is_foreign, parts):
        raise refuse_mixture(type(part).__name__)


def _check_accelerator(accelerator: Any) -> None:
    if not isinstance(accelerator, CPUAccelerator) and type(accelerator).name() not in KINDS:
        raise UserError(
            f"accelerator={type(accelerator).name()!r} was given or found, but workers compute on "
            "'cpu' or 'cuda'; use Trainer(accelerator='cpu')"
        )


def _check_hosts(setup: RunSetup) -> None:
    place, options = setup.place, setup.options
    least = options["min_hosts"]
    if least is not None and least > place.n_hosts:
        raise UserError(
            f"training was to begin with min_hosts={least} of num_nodes={place.n_hosts}, which are "
            f"fewer; give from 1 to {place.n_hosts} (trainer.num_nodes=FROM:TO on the command "
            "line), or leave it out"
        )
    if place.n_hosts == 1:
        return
    if setup.scheme.requirements.in_place:
        raise UserError(
            f"num_nodes={place.n_hosts} was given, but workers that write to the parameters "
            "themselves (strategy=hogwild, exchange=in_place) need their memory; use num_nodes=1, "
            "or strategy=async, diloco or easgd"
        )
    check_key_is_reachable(place, options["hosts_key"])
    if options["host_sums"]:
        _check_sums(setup.scheme, options)


def _check_sums(scheme: Scheme, options: StrategyArguments) -> None:
    alike = scheme.requirements.everyone or scheme.requirements.delay
    if not alike or codec_of(scheme.exchange) is not None:
        reason = (
            "only whole gradients of all workers in lock-step can be added; use strategy=hybrid"
        )
    elif options["on_failure"] == "continue":
        reason = "a lost worker's gradient cannot be taken out of a sum; use on_failure=restart"
    elif options["record"] is not None:
        reason = "a record needs the gradient of each worker; give record=null"
    else:
        return
    raise UserError(f"host_sums was given, but {reason}, or leave host_sums out")


def _check_interval(trainer: Any) -> None:
    interval = getattr(trainer, "val_check_interval", None)
    if (seconds := validation_seconds(trainer)) is not None:
        interval = f"{seconds:.0f} s"
    if interval not in (None, 1.0) or isinstance(interval, int):
        raise UserError(
            f"val_check_interval={interval} was given, but workers that run freely meet only at "
            "the end of an epoch; leave it at 1.0 (and use check_val_every_n_epoch), or use "
            "strategy=hybrid"
        )


def _check_limit(trainer: Any) -> None:
    for name in ("overfit_batches", "limit_train_batches"):
        limit = getattr(trainer, name)
        if isinstance(limit, float) and limit not in (0.0, 1.0):
            raise UserError(
                f"{name}={limit} was given, but workers that draw from one queue have no share to "
                "take a part of; give a whole number of mini-batches per worker, or use "
                "strategy=hybrid"
            )


def check_parameters(module: torch.nn.Module) -> None:
    """Check that parameters share no memory.

    Raises:
        UserError: naming two that do.
    """
    found = overlapping(module.named_parameters(remove_duplicate=False))
    if found is None:
        return
    one, other = found
    if one == other:
        raise UserError(
            f"the elements of parameter {one} share memory with one another (expand()?), and would "
            "come apart in shared memory; use .clone(), or keep the small one and expand it in "
            "forward"
        )
    raise UserError(
        f"the parameters {one} and {other} are two that share memory, and would come apart; tie "
        "them by giving both modules one and the same torch.nn.Parameter, or clone one"
    )


def check_renormalised(module: torch.nn.Module, wants: Requirements, n_workers: int) -> None:
    """Check that no layer's forward writes to a parameter that workers share.

    Raises:
        UserError: naming a layer with ``max_norm``.
    """
    if wants.parameters not in ("masters", "copy") or n_workers == 1:
        return
    for name, layer in module.named_modules():
        if not isinstance(layer, _RENORMALISED) or not layer.weight.requires_grad:
            continue  # a frozen table is each worker's own, with the same rows
        if layer.max_norm is not None:
            raise UserError(
                f"{name} has max_norm={layer.max_norm:g}: its forward rescales the rows of a "
                "mini-batch, which are others in each worker; leave it out, and rescale all rows "
                f"in on_train_batch_end with torch.renorm(weight, {layer.norm_type:g}, 0, max_norm)"
            )


_RENORMALISED = (torch.nn.Embedding, torch.nn.EmbeddingBag)


# ---- the option transport_dtype: rounding of gradients between device and host memory -----------


def check_transport(setup: RunSetup) -> None:
    """Check the option against the others.

    Raises:
        UserError: naming the options.
    """
    scheme = setup.scheme
    if setup.options["transport_dtype"] is None:
        return
    if scheme.correction is not None:
        raise UserError(
            f"transport_dtype=bf16 was given with correction={as_typed(scheme.correction)}, "
            "which changes gradients where they lie and would round them once more; leave one out"
        )
    if codec_of(scheme.exchange) is not None:
        raise UserError(
            f"transport_dtype=bf16 was given with exchange={as_typed(scheme.exchange)}, which "
            "encodes what workers hand over, from the dtype that it has; leave one out"
        )
    if scheme.requirements.in_place:
        raise UserError(
            "transport_dtype=bf16 was given, but workers without a lock send no gradients; "
            "leave it out, or use strategy=async"
        )


_NOTEWORTHY = 0.5  # updates: as stale as with one and a half workers
_OFTEN = 8  # dropped contributions of a worker that are worth a word


def check_own_parameters(setup: RunSetup, trainer: Any) -> None:
    """Check the options beside an exchange with own parameters in each worker.

    Raises:
        UserError: naming the option, and what to do.
    """
    scheme = setup.scheme
    asked = f"exchange={as_typed(scheme.exchange)}"
    if setup.options["transport_dtype"] is not None:
        raise UserError(
            f"transport_dtype=bf16 was given with {asked}, but what workers have come to is handed "
            "over seldom, and would be rounded; leave it out, or use exchange=gradient"
        )
    if setup.n_workers > 1:
        _check_callbacks(trainer, asked)
    if scheme.requirements.evaluates and trainer.state.fn == "fit":
        check_evaluations(trainer, asked)
    _check_module(scheme, trainer, asked)


def _check_module(scheme: Scheme, trainer: Any, asked: str) -> None:
    module = trainer.lightning_module
    check = getattr(scheme.exchange, "check_tensors", None)
    if check is not None and not is_overridden("configure_model", module):
        check(sum(parameter.requires_grad for parameter in module.parameters()))
    if trainer.state.fn == "fit" and not module.automatic_optimization:
        raise UserError(
            f"{type(module).__name__} has automatic_optimization=False, with {asked}, but workers "
            "that train on their own must count their steps alike, and only Lightning's own loop "
            "tells how many a mini-batch has; use automatic optimization, or exchange=gradient"
        )


def _check_callbacks(trainer: Any, asked: str) -> None:
    for callback in trainer.callbacks:
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            raise UserError(
                f"{type(callback).__name__} was given with {asked}, but it would average each "
                "worker's own parameters, and what is validated and saved are the masters; leave "
                "it out, or use exchange=gradient"
            )


# ---- an epoch that is one evaluation of the whole loss -------------------------------------------

_BY_CHANCE = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)
_BY_PORTION = nn.modules.batchnorm._BatchNorm


def check_evaluations(trainer: Any, asked: str) -> None:
    """Check that the loss of a pass is a function of the parameters alone, as a line search takes.

    Raises:
        UserError: naming the module or option, and what to do.
    """
    for name, each in trainer.lightning_module.named_modules():
        chance = isinstance(each, _BY_CHANCE) and each.p > 0
        if each.training and (chance or isinstance(each, _BY_PORTION)):
            why = "draws anew in every pass" if chance else "sees one portion at a time"
            raise UserError(
                f"{name} ({type(each).__name__}) was given with {asked}, but it {why}, so that two "
                "passes at the same parameters have different losses, and no line search can "
                f"compare them; {'set its p to 0' if chance else 'use LayerNorm'}, put it into "
                "eval() before trainer.fit, or use strategy=hybrid"
            )
    for name, parameter in trainer.lightning_module.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            raise UserError(
                f"{name} ({parameter.dtype}) was given with {asked}, but its line search is over "
                "real parameters; keep it as torch.view_as_real(...), or use strategy=hybrid"
            )
    limit = trainer.limit_train_batches
    limited = isinstance(limit, int) or limit < 1.0
    accumulates = any(isinstance(each, GradientAccumulationScheduler) for each in trainer.callbacks)
    for name, given, why in (
        ("gradient_clip_val", trainer.gradient_clip_val, "it would clip each portion's gradient"),
        (
            "accumulate_grad_batches",
            accumulates or trainer.accumulate_grad_batches != 1,
            "the gradients of a whole pass add up already",
        ),
        (
            f"limit_train_batches={limit}",
            limited and not (trainer.fast_dev_run or trainer.overfit_batches),
            "each pass would have other samples, whose losses no line search can compare",
        ),
    ):
        if given:
            raise UserError(f"{name} was given with {asked}, but {why}; leave it out")


def warn_of_unused(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """The module's own optimizer never steps, and what it adds to the gradient is lost."""
    for group in [group for optimizer in optimizers for group in optimizer.param_groups]:
        if group.get("weight_decay"):
            rank_zero_warn(
                f"weight_decay={group['weight_decay']} of the module's own optimizer has no effect "
                "under strategy=sandblaster, whose update steps instead; add it to the loss"
            )
            return


def advise_on_interval(exchange: Exchange, steps: Sequence[WorkerStep]) -> None:
    """After the first epoch, warn if the interval between exchanges is longer than it was."""
    made = max((step.count for step in steps), default=None)
    if exchange.parameters == "own" and made is not None and exchange.steps > made:
        rank_zero_warn(
            f"a worker has made {made} steps in the first epoch, and exchange={as_typed(exchange)} "
            f"makes an exchange every {exchange.steps}: workers exchange only at the end of an "
            "epoch; give a smaller interval, or see that this is meant"
        )


# ---- workers that write without a lock -----------------------------------------------------------


def check_lock_free(trainer: Any, n_workers: int) -> None:
    """Check the options beside workers that write the shared parameters themselves.

    Raises:
        UserError: naming the option, and what to do.
    """
    if not isinstance(trainer.accelerator, CPUAccelerator):
        name = type(trainer.accelerator).name()
        raise UserError(
            f"accelerator={name!r} was given, but workers without a lock write to parameters in "
            "host memory; use Trainer(accelerator='cpu'), or strategy=async"
        )
    for callback in trainer.callbacks:
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging) and n_workers > 1:
            raise UserError(
                f"the callback {type(callback).__name__} was given, which swaps parameters, but "
                f"these are shared by all {n_workers} workers, each of which would swap them; "
                "leave it out, or use strategy=async"
            )


# ---- late gradients ------------------------------------------------------------------------------


def advise(optimizers: Iterable[torch.optim.Optimizer], staleness: float) -> None:
    """Warn of a momentum in addition to that of late gradients.

    Gradients that are tau updates late on average act like a momentum of tau / (1 + tau): for M
    workers of random speed 1 - 1/M (Mitliagkas et al., *Asynchrony begets Momentum*, 2016,
    arXiv:1605.09774, theorem 3).
    """
    momenta = [(o, g.get("momentum")) for o in optimizers for g in o.param_groups]
    for optimizer, momentum in momenta:
        if staleness >= _NOTEWORTHY and isinstance(momentum, float) and momentum > 0:
            warnings.warn(
                f"gradients are {staleness:.1f} updates late on average, which acts like a "
                f"momentum of {staleness / (1 + staleness):.2f} on top of the {momentum:g} of "
                f"{type(optimizer).__name__} (Mitliagkas et al. 2016); try a smaller momentum or "
                "learning rate, or strategy.correction=gap_aware",
                stacklevel=2,
            )
            return


def advise_on_late(policy: object, stats: Mapping[str, Any]) -> bool:
    """Warn if a worker's contributions come too late so often that it hardly counts; whether so."""
    samples, dropped = stats["samples_per_worker"], stats["dropped"]
    total, n_workers = sum(samples), len(samples)
    least = min(range(n_workers), key=samples.__getitem__)
    if dropped[least] < _OFTEN or 2 * n_workers * samples[least] >= total:
        return False
    rank_zero_warn(
        f"of the {total} samples in updates so far {samples[least]} are of worker {least}, and "
        f"{dropped[least]} of its contributions came too late under policy={as_typed(policy)} and "
        "were dropped (others compute these mini-batches again): its device does little. To use "
        "late contributions choose k_async or ssp; to wait for all, hybrid"
    )
    return True
