"""Find hooks and user code that read gradients, as far as the source code tells.

Under all-reduce ``.grad`` holds the mean of all workers from the end of backward until it is set to
zero, in every hook and even in the next ``training_step``. Here that costs a second exchange per
step, so it is done only where somebody may look: where a hook is overridden that is there for
looking, or where code of the module or of a callback, or of a function that it calls by name, names
a gradient. ``p.grad`` in a compiled function is the name ``grad``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.callbacks import LambdaCallback
from pytorch_lightning.utilities.model_helpers import is_overridden

from hybridtrain.lightning.hooks.trainer_hooks import scaler_of

_HOOKS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
_MODULE_HOOKS = (*_HOOKS, "configure_gradient_clipping", "optimizer_step")
_NAMES = frozenset(
    {"grad", "grad_norm", "clip_grad_norm_", "clip_grad_value_", "get_total_norm", "clip_gradients"}
)
# Frameworks, whose own callbacks look at gradients in the hooks above or not at all.
FOREIGN = {"builtins", "torch", "pytorch_lightning", "lightning", "lightning_fabric"}
FOREIGN |= {"lightning_utilities", "torchmetrics", "hybridtrain", "abc", "typing", "functools"}
FOREIGN |= {"dataclasses"}


def gradients_are_final(trainer: Any) -> bool:
    """Whether nobody reads or changes ``.grad`` between backward and the next ``zero_grad``."""
    module, callbacks = trainer.lightning_module, trainer.callbacks
    if not module.automatic_optimization or scaler_of(trainer) is not None:
        return False
    if any(is_overridden(hook, module, parent=LightningModule) for hook in _MODULE_HOOKS):
        return False
    if any(is_overridden(h, each, parent=Callback) for each in callbacks for h in _HOOKS):
        return False
    return not names_a_gradient((module, *callbacks))


def is_hooked(trainer: Any, *hooks: str) -> bool:
    """Whether the user's module, or a callback of the user's, has one of these hooks."""
    module, callbacks = trainer.lightning_module, trainer.callbacks
    if any(is_overridden(hook, module, parent=LightningModule) for hook in hooks):
        return True
    frameworks = ((each, type(each).__module__.partition(".")[0]) for each in callbacks)
    own = [x for x, name in frameworks if name not in FOREIGN or isinstance(x, LambdaCallback)]
    known = [hook for hook in hooks if hasattr(Callback, hook)]
    return any(is_overridden(hook, each, parent=Callback) for hook in known for each in own)


def names_a_gradient(objects: Iterable[object]) -> bool:
    """Whether code that these objects bring along names a gradient."""
    seen: set[CodeType] = set()
    return any(_looks(f, seen) for each in objects for f in _functions(each))


def _functions(instance: object) -> Iterator[FunctionType]:
    """Yield functions that users have written: methods, properties, functions in attributes."""
    values: list[Any] = list(vars(instance).values())
    for kind in type(instance).__mro__:
        if kind.__module__.partition(".")[0] not in FOREIGN:
            values += vars(kind).values()
    return functions_in(values)


def _looks(function: FunctionType, seen: set[CodeType]) -> bool:
    function = getattr(function, "__wrapped__", function)
    if not isinstance(function, FunctionType) or function.__code__ in seen:
        return False
    if (function.__module__ or "").partition(".")[0] in FOREIGN:
        return False
    seen.add(function.__code__)
    # The name is a constant in ``getattr(p, "grad")``.
    codes = list(codes_of(function.__code__))
    if any(not _NAMES.isdisjoint((*code.co_names, *code.co_consts)) for code in codes):
        return True
    called = [function.__globals__.get(name) for code in codes for name in code.co_names]
    called += filled_cells(function)
    return any(_looks(each, seen) for each in called if isinstance(each, FunctionType))


def functions_in(values: Iterable[object]) -> Iterator[FunctionType]:
    """The functions among them; of properties, class and static methods, the functions inside."""
    for value in values:
        parts = (value.fget, value.fset) if isinstance(value, property) else (value,)
        for part in parts:
            function = getattr(part, "__func__", part)
            if isinstance(function, FunctionType):
                yield function


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """The code and that of functions and comprehensions inside."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_of(constant)


def filled_cells(function: FunctionType) -> Iterator[Any]:
    """The values that a function has kept of the one that made it."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
