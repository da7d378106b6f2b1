"""Check the content of a Lightning checkpoint before anything is restored from it.

Lightning and torch accept a count of −5, a learning rate of NaN, a text for an epoch. Checked are
Lightning's and torch's entries and this package's own; states of callbacks, of schedulers and of
users' parts are not.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import torch
from torch import Tensor

from hybridtrain.errors import UserError
from hybridtrain.lightning.checkpointing.checkpoint_sizes import check_sizes
from hybridtrain.lightning.checkpointing.mid_epoch import read_format
from hybridtrain.lightning.checkpointing.rng_state import are_states
from hybridtrain.lightning.hooks.points import Point, around
from hybridtrain.lightning.hooks.trainer_hooks import dumper
from hybridtrain.util.option_types import (
    EACH,
    Count,
    NotNegative,
    Range,
    Rule,
    is_number,
    misfit,
    shown,
)

WORKERS = "workers"  # in an optimizer's saved state: what is each worker's own
READ = "read"  # the parameters that workers computed with, if they were an update behind

_Version = Annotated[str, Rule("such as 2.6.1", re.compile(r"\d{1,9}(\.\d{1,9}){1,3}").match)]
_One = Annotated[Tensor, Rule("of one number", lambda rate: rate.numel() == 1)]
_Rate = _One | NotNegative
_RateOrNone = _One | NotNegative | None  # an optimizer may find its own rate
_Finite = Annotated[float, Rule("that is finite", math.isfinite)]
_Format = Annotated[int, Range(1, 2**62)]
_Epoch = Annotated[int, Range(-1, 2**62)]
_Batches = Annotated[int, Range(0, 2**40)]  # so that as many samples fit in 64 bits
_COUNTS = {EACH: Count}
_PROGRESS = {"total": _COUNTS, "current": _COUNTS, "is_last_batch?": bool}
_OF_OPTIMIZER = {"optimizer": {"step": _PROGRESS, "zero_grad": _PROGRESS}}
_LOOP = {
    "*progress": (_OF_OPTIMIZER, _PROGRESS),
    "epoch_loop.state_dict?": {"_batches_that_stepped?": Count},
}
_FIT_LOOP = {**_LOOP, "epoch_progress": _PROGRESS, "epoch_loop.batch_progress": _PROGRESS}
_LOADER = {
    **dict.fromkeys(("lap", "batches"), _Batches),
    "length": Count,
    "spans": [[Count]],
    "seed": Count | None,
    "indices": Tensor | None,
    "sizes?": (None, [Count]),
    "crew?": [Count],  # for a worker of this run
}
_NUMBERS = Annotated[dict[str, Any], Rule("of states of random number generators", are_states)]
_WEIGHTS = {
    "state_dict": dict,
    "epoch?": Count,
    "global_step?": Count,
    "pytorch-lightning_version": _Version,
    "hybridtrain?": {
        "format": _Format,
        "epoch": Count,
        "batches": _Batches,
        "loaders": [_LOADER],
        "together?": _Batches,  # of all workers
        "over?": bool,
        "metrics?": {EACH: Tensor},
        "dice?": _NUMBERS,
        "dice_of?": {EACH: _NUMBERS},
    },
}
_GROUP = {
    "params": [Count],
    **dict.fromkeys(("lr?", "initial_lr?", "momentum?", "weight_decay?"), _RateOrNone),
    "eps?": (_Rate, [NotNegative | None]),  # Adafactor has two
    "betas?": [_RateOrNone],
}
_VALUE = Tensor | bool | _Finite | str | list[Any] | dict[str, Any] | None  # a method by its name
_MOMENTS = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "exp_inf"}
# States of torch's optimizers, of one kind for all parameters. Others keep what they like, under
# names of their own or of none of the parameters (MADGRAD, SM3).
_SCALARS = {"step", "mu_product"}
_KNOWN = _MOMENTS | _SCALARS | {"momentum_buffer", "grad_avg", "sum", "step_size"}
_STATES = (
    dict.fromkeys((f"{name}?" for name in sorted(_KNOWN)), _VALUE),
    Tensor | int | float | list[Any],
)
_OF_WORKER = {
    "state?": {EACH: _STATES},
    "exchange?": {EACH: object, "residuals?": {EACH: Tensor}},
    "parameters?": [Tensor],
    "used?": NotNegative,
}
_OPTIMIZER = {
    "state?": {EACH: _STATES},
    "param_groups?": [_GROUP],
    "masters?": {"update": str, "state": {EACH: _STATES}},
    "workers?": {EACH: _OF_WORKER},
    "read?": {EACH: [Tensor]},
}
_FULL = {
    "loops?": {"fit_loop": _FIT_LOOP, "*loop": _LOOP},
    "optimizer_states": [_OPTIMIZER],
    "lr_schedulers": [{"last_epoch?": _Epoch, "_step_count?": Count, "base_lrs?": [_Rate]}],
    "callbacks?": dict,
}


def check_content(content: Any, source: str, resumes: bool) -> None:
    """Refuse content that no run can have written.

    Args:
        content: of the checkpoint.
        source: the user's argument, for the error: ``ckpt=last.ckpt``.
        resumes: training resumes from it; else only its weights are loaded.

    Raises:
        UserError: naming the entry, and its allowed values.
    """
    if not isinstance(content, Mapping) or not isinstance(content.get("state_dict"), Mapping):
        raise UserError(f"{source}: this file holds no Lightning checkpoint (no state_dict)")
    read_format(content)
    check_sizes(content, source)
    if resumes and "optimizer_states" not in content:
        raise UserError(
            f"{source}: this checkpoint holds weights only (save_weights_only=True wrote it), and "
            "training cannot go on without the optimizer's state; give a full checkpoint; to begin "
            "anew with these weights load them in your module, to test them say test_only=true"
        )
    described = {**_WEIGHTS, **_FULL} if resumes else _WEIGHTS
    fault = misfit(content, described, "checkpoint")
    fault = fault or _odd_version(content)
    if fault is None and isinstance(content.get("hybridtrain"), Mapping):
        loaders = content["hybridtrain"]["loaders"]
        fault = next(filter(None, map(_odd_loader, loaders)), None)
    if fault is None and resumes:
        weights = content["state_dict"].values()
        alike = all(map(_filled, weights)) and all(weight.numel() for weight in weights)
        faults = (_uneven(each, alike) for each in content["optimizer_states"])
        fault = next(filter(None, faults), None)
    if fault is not None:
        raise UserError(f"{source}: the file was changed or is damaged: {fault}")


def _odd_version(content: Mapping[str, Any]) -> str | None:
    """The fault of loops that Lightning would migrate from a version that has not written them."""
    version, loops = content["pytorch-lightning_version"], content.get("loops")
    fit = loops.get("fit_loop") if isinstance(loops, Mapping) else None
    if int(version.partition(".")[0]) >= 2 or not isinstance(fit, Mapping):
        return None
    if "epoch_loop.automatic_optimization.state_dict" not in fit:
        return None
    return f"pytorch-lightning_version is {version}, and the loops are of version 2 or later"


def _odd_loader(loader: Mapping[str, Any]) -> str | None:
    """The fault of a loader's rest, which is drawn anew: a few bytes may stand for any number."""
    indices, sizes = loader["indices"], loader.get("sizes")
    n = loader["length"]
    if indices is not None:
        if indices.dim() != 1 or indices.dtype is not torch.int64:
            return f"a loader's indices are {indices.dtype} of shape {tuple(indices.shape)}"
        n = len(indices) if sizes is None else len(sizes)
        if sizes is not None and sum(sizes) != len(indices):
            return f"a loader's {len(indices)} indices are in mini-batches of {sum(sizes)}"
    spans = [tuple(span) for span in loader["spans"]]
    ends = [0, *(end for span in sorted(spans) for end in span), n]
    if any(len(span) != 2 for span in spans) or ends != sorted(ends):
        return f"a loader's spans are {shown(spans)}, and its order has {n}"
    return None


def _uneven(optimizer: Mapping[str, Any], alike: bool) -> str | None:
    """The fault of a state that is incomplete, or of another type than the other parameters'.

    Args:
        alike: no weight is a scalar or empty, so no state may be, either.
    """
    states, groups = optimizer.get("state", {}), optimizer.get("param_groups", [])
    numbers = [number for group in groups for number in group["params"]]
    if sorted(numbers) != list(range(len(numbers))):
        return f"the optimizer's parameters are numbered {numbers[:9]}"
    for group in groups:
        members = {n: states[n] for n in group["params"] if n in states}
        kinds: dict[str, set[str]] = defaultdict(set)
        for number, state in members.items():
            if not isinstance(state, Mapping) or _lacks(state, group, members.values()):
                return f"the optimizer's state of parameter {number} is not whole"
            shapes = {name: x.shape for name, x in state.items() if name in _MOMENTS and _filled(x)}
            if len(set(shapes.values())) > 1:
                said = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
                return f"the moments of parameter {number} have different shapes: {said}"
            for name, value in state.items():
                if name not in _KNOWN:
                    continue
                if name in _SCALARS and isinstance(value, Tensor) and value.numel() != 1:
                    return f"{name} of parameter {number} has shape {tuple(value.shape)}, not ()"
                kinds[name].add(_kind(value) if alike else type(value).__name__)
                kind_differs = len(kinds[name] - {"NoneType"}) > 1
                if kind_differs or (value is None and name in _MOMENTS):
                    return f"{name} of parameter {number} is {_kind(value)}, which does not fit"
    return None


def _lacks(state: Mapping[str, Any], group: Mapping[str, Any], others: Iterable[Any]) -> bool:
    """The state lacks a part that torch's optimizers keep, and that another parameter's has."""
    known = _KNOWN & set(state)
    found = (set(other) for other in others if isinstance(other, Mapping))
    parts = any(set(state) < other and known < _KNOWN & other for other in found)
    return parts or bool(group.get("amsgrad") and "max_exp_avg_sq" not in state)


def _filled(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _kind(value: Any) -> str:
    return ("a tensor" if value.numel() else "empty") if _filled(value) else type(value).__name__


def check_weights(
    source: str, found: Mapping[str, Any], module: torch.nn.Module, strict: bool = True
) -> None:
    """Refuse weights of another model.

    Args:
        source: the user's argument, for the error: ``ckpt=last.ckpt``.
        found: weights by name.
        module: of this run.
        strict: with all names, shapes and dtypes; else only weights whose layout (a sparse one)
            cannot be copied to the module's.

    Raises:
        UserError: with the first differences.
    """
    wanted = module.state_dict() if strict else _own_tensors(module)
    problems = [f"it lacks {x}" for x in wanted if strict and x not in found]
    problems += [f"it has an unknown {x}" for x in found if strict and x not in wanted]
    problems += [
        f"{x} has {_kind_of_weight(found[x])} instead of {_kind_of_weight(value)}"
        for x, value in wanted.items()
        if x in found and isinstance(value, Tensor) and _differ(found[x], value, strict)
    ]
    weights = {x: value for x, value in found.items() if isinstance(value, Tensor)}
    problems += [f"{x} has no content" for x, value in weights.items() if strict and value.is_meta]
    if problems:
        more = f", and {len(problems) - 2} more differences" if len(problems) > 2 else ""
        raise UserError(
            f"{source}: this is a checkpoint of another model: {'; '.join(problems[:2])}{more}; "
            "give the model and task options it was trained with"
        )


def _own_tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, without a call of the user's ``state_dict``."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _differ(found: Any, wanted: Tensor, strict: bool) -> bool:
    if strict:
        return _kind_of_weight(found) != _kind_of_weight(wanted)
    return isinstance(found, Tensor) and found.layout is not wanted.layout


def _kind_of_weight(value: Any) -> str:
    """Type, shape and dtype in words; all floating-point dtypes are the same."""
    if not isinstance(value, Tensor):
        return f"type {type(value).__name__}"
    numbers = "" if value.is_floating_point() else f" of {value.dtype}"
    layout = "" if value.layout is torch.strided else f" in {value.layout}"
    return f"shape {tuple(value.shape)}{numbers}{layout}"


class Restoration:
    """Lets the trainer raise ``UserError`` where a checkpoint does not restore a part of it.

    What is restored into optimizers and torch's schedules must be of the kind that
    ``configure_optimizers`` has made.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        around(Point.RESTORE, dumper(trainer), self.restore)

    def restore(self, proceed: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Lightning's, with errors as ``UserError``."""
        made = list(self._parts())
        with restoring():
            proceed(*args, **kwargs)
        for (name, before), (_, after) in zip(made, self._parts(), strict=False):
            for key, value in before.items():
                if not _is_alike(value, found := after.get(key)):
                    raise UserError(
                        f"ckpt: the checkpoint has {key}={shown(found)} of {name}, and "
                        f"configure_optimizers {key}={shown(value)}; the file was changed or is "
                        "damaged, or is of another module"
                    )

    def _parts(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for optimizer in self._trainer.optimizers:
            for group in optimizer.param_groups:
                known = {key: group[key] for key in optimizer.defaults if key in group}
                yield type(optimizer).__name__, known
        for config in self._trainer.lr_scheduler_configs:
            if type(config.scheduler).__module__.startswith("torch."):
                yield type(config.scheduler).__name__, dict(vars(config.scheduler))


def _is_alike(made: Any, found: Any) -> bool:
    """Whether a number is a number, and a tuple as long as the one that was made."""
    if isinstance(made, tuple):
        return isinstance(found, tuple | list) and len(found) == len(made)
    return not is_number(made) or isinstance(found, int | float | Tensor)


@contextmanager
def restoring() -> Iterator[None]:
    """Turn the errors of restoring a checkpoint into ``UserError``."""
    try:
        yield
    except UserError:
        raise
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "loading state_dict" not in str(error):
            raise
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"ckpt: a part of the checkpoint cannot be restored: {said}") from error
