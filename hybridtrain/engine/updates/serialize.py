"""Pickles a configured optimizer in a worker, for the process that steps it.

Parameters are replaced by their numbers, and become views of the masters on the other side.
Hyper-parameters, state (of a resumed run) and the instance's own attributes, which pickling an
optimizer alone would lose, are kept. The bytes pass only between the processes of one run: over
inherited sockets, and between hosts over authenticated connections. Pickle is as safe as ``fork``.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hybridtrain.engine.memory.scratch_file import as_bytes
from hybridtrain.errors import UserError

# Attributes that torch, a scheduler or a wrapper sets on an instance: rebuilt or not needed.
_NOT_CARRIED = frozenset(
    {"step", "zero_grad", "_opt_called", "defaults", "state", "param_groups"}
    | set(vars(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)))
)


def dump(optimizer: torch.optim.Optimizer, number_of: Mapping[int, int]) -> bytes:
    """Pickle an optimizer, its parameters replaced by their numbers (``id(parameter)`` -> number).

    Raises:
        pickle.PicklingError, TypeError, AttributeError: something it holds cannot be pickled.
    """
    buffer = io.BytesIO()
    own = {k: v for k, v in vars(optimizer).items() if k not in _NOT_CARRIED}
    _StatePickler(buffer, number_of).dump((type(optimizer), optimizer.__getstate__(), own))
    return buffer.getvalue()


def load(
    payload: bytes, parameter: Callable[[int], torch.Tensor]
) -> tuple[torch.optim.Optimizer, list[int]]:
    """Rebuild the optimizer over ``parameter(number)``; also the numbers, in the order of groups.

    Raises:
        UserError: if this process cannot find the optimizer's class.
    """
    unpickler = _Unpickler(io.BytesIO(payload), parameter)
    kind, state, own = unpickler.load()
    optimizer: torch.optim.Optimizer = kind.__new__(kind)
    vars(optimizer).update(own)
    optimizer.__setstate__(state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = {id(p): number for number, p in unpickler.made.items()}
    return optimizer, [numbers[id(p)] for p in parameters]


class _StatePickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, number_of: Mapping[int, int]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._number_of = number_of

    def persistent_id(self, obj: Any) -> tuple[str, Any] | None:
        if isinstance(obj, torch.Tensor):
            if id(obj) in self._number_of:
                return "parameter", self._number_of[id(obj)]
            return "tensor", as_bytes(obj.detach().clone())
        if isinstance(obj, type) and issubclass(obj, torch.optim.Optimizer):
            return "class", (obj.__module__, obj.__qualname__)
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, parameter: Callable[[int], torch.Tensor]) -> None:
        super().__init__(file)
        self._parameter = parameter
        self.made: dict[int, torch.Tensor] = {}

    def persistent_load(self, pid: tuple[str, Any]) -> Any:
        match pid:
            case ("parameter", number):
                if number not in self.made:
                    self.made[number] = self._parameter(number)
                return self.made[number]
            case ("tensor", payload):
                return torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
            case ("class", (module, qualname)):
                return self._optimizer_class(module, qualname)
        raise pickle.UnpicklingError(f"unknown reference {pid!r}")

    def _optimizer_class(self, module: str, qualname: str) -> type[torch.optim.Optimizer]:
        """Also finds classes that cannot be imported (defined in a function, before the fork)."""
        try:
            return self.find_class(module, qualname)
        except (ImportError, AttributeError) as error:
            for kind in reversed(subclasses(torch.optim.Optimizer)):  # the latest of its name
                if (kind.__module__, kind.__qualname__) == (module, qualname):
                    return kind
            raise UserError(
                f"the optimizer class {module}.{qualname} exists only in the worker that made it, "
                "and the server cannot find it; define it at the top level of a module"
            ) from error


def subclasses(kind: type) -> list[type]:
    """All classes below this one that the process has loaded."""
    found: list[type] = list(kind.__subclasses__())
    return found + [deeper for child in found for deeper in subclasses(child)]
