"""What Lightning does around each of a step's hooks, at less cost, in workers.

Its loop notes the running hook's name as an attribute of the module, 44 times a step, and each time
torch looks whether that string is a parameter, a module or a buffer; and it enters thirty contexts
of a profiler that does nothing. Together that is a tenth of a small model's step (60 to 100 µs).
What comes of it is the same here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pytorch_lightning import LightningModule
from pytorch_lightning.profilers import PassThroughProfiler, Profiler

_NOTE = "_current_fx_name"
_NOTHING: AbstractContextManager[None] = nullcontext()


def be_lean() -> None:
    """From now on, in this process."""
    LightningModule.__setattr__ = _set  # type: ignore[method-assign, assignment]
    PassThroughProfiler.profile = _profile  # type: ignore[method-assign, assignment]


def _set(module: LightningModule, name: str, value: Any) -> None:
    if name == _NOTE:  # a string, or nothing
        module.__dict__[name] = value
    else:
        super(LightningModule, module).__setattr__(name, value)


def _profile(profiler: PassThroughProfiler, action_name: str) -> AbstractContextManager[Any]:
    """Of a subclass, ``start`` and ``stop`` may do something."""
    if type(profiler) is PassThroughProfiler:
        return _NOTHING
    return Profiler.profile(profiler, action_name)
