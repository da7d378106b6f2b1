"""Chooses the kernel of a user's optimizer."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hybridtrain.updates.kernels.fused import FusedAdam, FusedSgd
from hybridtrain.updates.kernels.kernel import Kernel
from hybridtrain.updates.kernels.public_class import KeptState, PublicClass
from hybridtrain.updates.kernels.unfused import PlainAdagrad, PlainAdam, RmsProp

_OPTIM = torch.optim
_FUSED: Mapping[type, type[Kernel]] = {
    _OPTIM.Adam: FusedAdam,
    _OPTIM.AdamW: FusedAdam,
    _OPTIM.SGD: FusedSgd,
}
_PLAIN: Mapping[type, type[Kernel]] = {
    _OPTIM.Adam: PlainAdam,
    _OPTIM.AdamW: PlainAdam,
    _OPTIM.Adagrad: PlainAdagrad,
    _OPTIM.RMSprop: RmsProp,
}
_MOMENTS = ("exp_avg", "exp_avg_sq")
_RARE: Mapping[type, KeptState] = {
    _OPTIM.NAdam: KeptState(*_MOMENTS, figures=("mu_product",), start={"mu_product": 1.0}),
    _OPTIM.RAdam: KeptState(*_MOMENTS),
    _OPTIM.Adamax: KeptState("exp_avg", "exp_inf"),
    _OPTIM.Adadelta: KeptState("square_avg", "acc_delta"),
    _OPTIM.ASGD: KeptState("ax", figures=("eta", "mu"), start={"eta": None, "mu": 1.0}),
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
