"""Chooses the kernel of a user's optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import torch

from hybridtrain.engine.updates.groups import look_for_no_device
from hybridtrain.engine.updates.kernels.kernel import (
    Figures,
    FusedAdam,
    FusedSgd,
    Group,
    Kernel,
    KernelState,
    PlainAdagrad,
    RmsProp,
    StepChunk,
    Tensors,
    number,
)

# ---- rarely used elementwise optimizers through their public class ------------------------------


class KeptState(KernelState):
    """The state of an optimizer class that does not depend on hyper-parameters.

    Args:
        names: of the state tensors.
        figures: besides the number of steps.
        start: initial values other than zero; ``None``: the learning rate.
        may_be_rounded: they are moments, not values of the parameters.
    """

    def __init__(
        self,
        *names: str,
        figures: tuple[str, ...] = (),
        start: Mapping[str, float | None] = MappingProxyType({}),
        may_be_rounded: bool = True,
    ) -> None:
        self._names, self._start, self.may_be_rounded = names, start, may_be_rounded
        self.figures = ("step", *figures)

    def names(self, group: Group) -> tuple[str, ...]:
        return self._names

    def start(self, group: Group) -> dict[str, float]:
        rate = number(group["lr"])
        return {name: rate if value is None else value for name, value in self._start.items()}


class PublicClass(Kernel):
    """Steps a chunk as the only parameter of an optimizer of the class.

    Args:
        like: the state of the class.
        kind: the optimizer's class.
        fused: with its fused engine.
    """

    def __init__(
        self, like: KernelState, kind: type[torch.optim.Optimizer], fused: bool = False
    ) -> None:
        self._like, self._kind = like, kind
        self.figures, self.may_be_rounded = like.figures, like.may_be_rounded
        self._engine = {"fused": fused, "foreach": False}

    def names(self, group: Group) -> tuple[str, ...]:
        return self._like.names(group)

    def start(self, group: Group) -> dict[str, float]:
        return self._like.start(group)

    def prepare(self, group: Group, figures: Figures, first: bool) -> StepChunk:
        before = {name: figure.clone() for name, figure in figures.items()}
        names, group = self.names(group), group | self._engine  # copied: its rate may be temporary
        nothing = [torch.zeros(1, dtype=torch.float32) for _ in range(2 + len(names))]
        self._step(group, nothing, figures, names)  # counts

        def step(p: torch.Tensor, g: torch.Tensor, state: Tensors, scratch: Tensors) -> None:
            own = {name: figure.clone() for name, figure in before.items()}
            self._step(group, [p, g, *state], own, names)

        return step

    def _step(
        self, group: Group, tensors: Tensors, figures: Figures, names: tuple[str, ...]
    ) -> None:
        parameter = torch.nn.Parameter(tensors[0])
        parameter.grad = tensors[1]
        optimizer = self._kind([parameter])  # type: ignore[call-arg]
        look_for_no_device(optimizer)
        optimizer.param_groups[0].update(group)
        kept: dict[str, Any] = dict(zip(names, tensors[2:], strict=True))
        optimizer.state[parameter] = dict(figures) | kept
        step_of(optimizer)(optimizer)  # the worker runs the step hooks
        for name, flat in kept.items():
            made = optimizer.state[parameter][name]
            if made.data_ptr() != flat.data_ptr():
                flat.copy_(made)


_OPTIM = torch.optim
_FUSED: Mapping[type, type[Kernel]] = {
    _OPTIM.Adam: FusedAdam,
    _OPTIM.AdamW: FusedAdam,
    _OPTIM.SGD: FusedSgd,
}
_PLAIN: Mapping[type, type[Kernel]] = {
    _OPTIM.Adagrad: PlainAdagrad,
    _OPTIM.RMSprop: RmsProp,
}
_MOMENTS = ("exp_avg", "exp_avg_sq")
_RARE: Mapping[type, KernelState] = {
    _OPTIM.Adam: FusedAdam(),  # with ``fused=False``
    _OPTIM.AdamW: FusedAdam(),
    _OPTIM.NAdam: KeptState(*_MOMENTS, figures=("mu_product",), start={"mu_product": 1.0}),
    _OPTIM.RAdam: KeptState(*_MOMENTS),
    _OPTIM.Adamax: KeptState("exp_avg", "exp_inf"),
    _OPTIM.Adadelta: KeptState("square_avg", "acc_delta"),
    _OPTIM.ASGD: KeptState(
        "ax", figures=("eta", "mu"), start={"eta": None, "mu": 1.0}, may_be_rounded=False
    ),
    _OPTIM.Rprop: KeptState("prev", "step_size", start={"step_size": None}),
}


def kernel_for(optimizer: torch.optim.Optimizer) -> Kernel | None:
    """The kernel of a torch optimizer on float32; ``None`` if there is none.

    Subclasses have none, nor has ``foreach=True``, which rounds differently. Adam without a choice
    of ``fused`` or ``foreach`` gets the fused engine, several times as fast as torch's choice; all
    others have the bits of torch's choice.
    """
    kind, groups = type(optimizer), optimizer.param_groups
    engines = {group.get("fused") for group in groups}
    if not groups or not all(map(_is_plain, groups)) or len(engines) != 1:
        return None
    if may_be_fused(kind, fused := engines.pop()) or fused:
        if kind is _OPTIM.Adagrad:
            return PublicClass(PlainAdagrad(), kind, fused=True)
        return _FUSED[kind]() if kind in _FUSED else None
    if kind in _RARE:
        return PublicClass(_RARE[kind], kind)
    return _PLAIN[kind]() if kind in _PLAIN else None


def may_be_fused(kind: type[torch.optim.Optimizer], fused: bool | None) -> bool:
    """Whether the fused engine steps an optimizer of this class with the user's ``fused``."""
    return kind is _OPTIM.SGD or (fused is None and kind in (_OPTIM.Adam, _OPTIM.AdamW))


def _is_plain(group: dict[str, object]) -> bool:
    special = any(group.get(key) for key in ("foreach", "capturable", "differentiable"))
    parameters = group["params"]
    assert isinstance(parameters, list)
    return not special and all(p.dtype == torch.float32 for p in parameters)


# ---- A step of a worker's own optimizer, fused where possible -----------------------------------
# Torch steps Adam and SGD on a CPU tensor by tensor unless ``fused=True``. The masters use the
# fused engine; a worker's step does, too, if the user has not chosen. The option is set only during
# the step, so that the parameter groups that the user sees or saves are unchanged.


def _no_step() -> None:
    """For torch's wrapper."""


_hooked: Any = torch.optim.Optimizer.profile_hook_step(_no_step)
_WRAPPER = _hooked.__code__  # a decorator of the user's copies torch's mark


def step_of(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The class' ``step``, without torch's wrapper that runs step hooks."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "__code__", None) is _WRAPPER else step


def own_step(optimizer: torch.optim.Optimizer) -> None:
    """One step with the present gradients, without hooks."""
    fused = all(_can_be_fused(optimizer, group) for group in optimizer.param_groups)
    with _fused(optimizer.param_groups) if fused else nullcontext():
        step_of(optimizer)(optimizer)


@contextmanager
def _fused(groups: list[dict[str, Any]]) -> Iterator[None]:
    before = [group["fused"] for group in groups]
    for group in groups:
        group["fused"] = True
    try:
        yield
    finally:
        for group, fused in zip(groups, before, strict=True):
            group["fused"] = fused


def _can_be_fused(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether the fused engine gives the same result.

    It does not check that gradients are laid out like their parameters, or that all parameters have
    momentum or none.
    """
    special = any(group.get(key) for key in ("foreach", "capturable", "differentiable"))
    if special or group.get("fused") is not None or not may_be_fused(type(optimizer), None):
        return False
    begun = set()
    for parameter in group["params"]:
        if (gradient := parameter.grad) is None:
            continue
        known = optimizer.state[parameter].values() if parameter in optimizer.state else ()
        kept = [each for each in known if isinstance(each, torch.Tensor)]
        if not _is_contiguous(parameter, gradient, kept):
            return False
        begun.add(bool(kept))
    return len(begun) < 2


def _is_contiguous(
    parameter: torch.nn.Parameter, gradient: torch.Tensor, kept: list[torch.Tensor]
) -> bool:
    if parameter.dtype != torch.float32 or parameter.device.type != "cpu" or gradient.is_sparse:
        return False
    return all(each.is_contiguous() for each in (parameter, gradient, *kept))
