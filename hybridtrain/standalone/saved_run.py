"""The file of a run: parameters, and what the optimizer of the masters has kept of them."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from hybridtrain.engine.exchanges import Exchange
from hybridtrain.engine.updates.named import NamedUpdate
from hybridtrain.errors import UserError
from hybridtrain.util.files import fault_of, open_input, reason_of, write_whole
from hybridtrain.util.option_types import EACH, Count, misfit, shown
from hybridtrain.util.torch_file import serialized

_CONTENT = {
    **dict.fromkeys(("updates", "epochs"), Count),
    "parameters": {EACH: torch.Tensor},
    "buffers": {EACH: torch.Tensor},
    "optimizer": {EACH: {EACH: torch.Tensor | bool | float | str | list[Any] | None}},
    "made_by": {EACH: str},
}


@dataclass(frozen=True)
class SavedRun:
    """After so many ``updates``; ``parameters``, ``buffers`` of a module and states of the
    ``optimizer`` by name.

    ``epochs``: finished ones; ``made_by``: names of the classes that have made the states.
    """

    updates: int = 0
    parameters: Mapping[str, torch.Tensor] = field(default_factory=dict)
    optimizer: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    epochs: int = 0
    made_by: Mapping[str, str] = field(default_factory=dict)
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def write(self, path: str | Path) -> None:
        """Write a file that ``torch.load(path, weights_only=True)`` reads, whole or not at all.

        Raises:
            UserError: if it cannot be written.
        """
        content = serialized(asdict(self))
        try:
            write_whole(Path(path), content.getbuffer())
        except OSError as error:
            raise UserError(f"cannot write {path}: {reason_of(error)}") from error

    @classmethod
    def read(
        cls,
        path: str | Path,
        model: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        made_by: Mapping[str, str],
        fresh: Mapping[str, Mapping[str, Any]] | None,
    ) -> SavedRun:
        """Read the file of a run of such a model, with states of such a kind.

        Args:
            path: of the file.
            model: its parameters are of these types and shapes.
            buffers: as are a module's buffers.
            made_by: must be the same in the file.
            fresh: states after a first update, by parameter, of these kinds; ``None``: not known.

        Raises:
            UserError: if it cannot be read, or is none.
        """
        content = _content_of(path)
        saved = cls(**{name: content[name] for name in _CONTENT})
        found = _kinds(saved.parameters) | _kinds(saved.buffers)
        if found != (wanted := _kinds(model) | _kinds(buffers)):
            wrong = sorted(n for n in found | wanted if found.get(n) != wanted.get(n))
            raise UserError(
                f"{path} is of another model: {wrong[0]} is {found.get(wrong[0], 'missing')} there "
                f"and {wanted.get(wrong[0], 'missing')} here"
            )
        if saved.made_by != made_by:
            other = [kind for kind, name in made_by.items() if saved.made_by.get(kind) != name]
            raise UserError(
                f"{path} was saved with {_listed(saved.made_by, other)}, and this server has "
                f"{_listed(made_by, other)}; make the server with what the file was saved with"
            )
        if (fault := saved._fault(fresh)) is not None:
            raise UserError(f"{path} was changed, or is of another optimizer: {fault}")
        return saved

    def _fault(self, fresh: Mapping[str, Mapping[str, Any]] | None) -> str | None:
        """A content that this optimizer cannot have. Parameters without gradients have no state."""
        tensors = {**self.parameters, **self.buffers}
        if odd := [name for name, value in tensors.items() if not _is_plain(value)]:
            return f"{odd[0]} is no dense tensor in host memory"
        for name, state in self.optimizer.items():
            if name not in self.parameters:
                return f"it has an optimizer state of {shown(name)}, which is no parameter"
            wanted = state if fresh is None else fresh.get(name, {})
            if wrong := sorted(map(str, state.keys() ^ wanted.keys())):
                has = "has" if wrong[0] in state else "lacks"
                return f"the optimizer state of {name} {has} {shown(wrong[0])}"
            for key, value in state.items():
                if (found := _kind(value)) != (kind := _kind(wanted[key])):
                    return f"{key} of {name} is {found}, and must be {kind}"
                if not _is_plain(value):
                    return f"{key} of {name} is no dense tensor in host memory"
                if not _is_finite(value):
                    return f"{key} of {name} is not finite"
        return None


def _content_of(path: str | Path) -> dict[str, Any]:
    """The content of a file that :meth:`SavedRun.write` has written. Raises ``UserError``."""
    refused = f"{path} is damaged, or no file of server.save"
    with open_input(path, "the saved run") as file:
        if (fault := fault_of(Path(path).expanduser())) is not None:
            raise UserError(f"{refused}: {fault}")
        if not zipfile.ZipFile(file).comment:  # what others have left out cannot be seen
            raise UserError(f"{refused}: it has no seal")
        file.seek(0)
        try:
            content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        except Exception:  # readers of damaged files raise whatever they stumble over
            raise UserError(refused) from None
    if (fault := misfit(content, _CONTENT, "the content")) is not None:
        raise UserError(f"{refused}: {fault}")
    return content


def states_after_a_step(
    optimizer: torch.optim.Optimizer, named: Mapping[str, torch.nn.Parameter]
) -> dict[str, dict[str, Any]] | None:
    """The states of a new optimizer of parameters without content; ``None``: it needs more."""
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer.step()
    except Exception:  # it needs a closure, sparse gradients or numbers
        return None
    return {name: dict(optimizer.state.get(each, {})) for name, each in named.items()}


def made_by(
    optimizer: torch.optim.Optimizer, update: NamedUpdate, exchange: Exchange
) -> dict[str, str]:
    """The names that must be the same in the server that goes on."""
    classes = {"optimizer": type(optimizer).__name__, "exchange": type(exchange).__name__}
    return {**classes, "update": update.name}


def _kinds(parameters: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: _kind(p) for name, p in parameters.items()}


def _kind(value: Any) -> str:
    is_tensor = isinstance(value, torch.Tensor)
    return f"{value.dtype} of shape {tuple(value.shape)}" if is_tensor else type(value).__name__


def _is_plain(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return True
    if value.layout is not torch.strided or value.device.type != "cpu" or value.is_quantized:
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def _is_finite(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return bool(value.isfinite().all())
    return not isinstance(value, float) or math.isfinite(value)


def _listed(kinds: Mapping[str, str], wanted: list[str]) -> str:
    return ", ".join(f"{kind} {shown(kinds.get(kind))}" for kind in wanted)
