"""The file of a run: parameters, and what the optimizer of the masters has kept of them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from hybridtrain.errors import UserError
from hybridtrain.exchanges import Exchange
from hybridtrain.updates.named import NamedUpdate
from hybridtrain.util.files import open_input, reason_of, write_whole
from hybridtrain.util.option_types import EACH, Count, misfit

_CONTENT = {
    **dict.fromkeys(("updates", "epochs"), Count),
    "parameters": {EACH: torch.Tensor},
    "optimizer": {EACH: {EACH: torch.Tensor | bool | float | str | list[Any] | None}},
    "made_by": {EACH: str},
}


@dataclass(frozen=True)
class SavedRun:
    """After so many ``updates``; ``parameters`` and states of the ``optimizer`` by name.

    ``epochs``: finished ones; ``made_by``: names of the classes that have made the states.
    """

    updates: int = 0
    parameters: Mapping[str, torch.Tensor] = field(default_factory=dict)
    optimizer: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    epochs: int = 0
    made_by: Mapping[str, str] = field(default_factory=dict)

    def write(self, path: str | Path) -> None:
        """Write a file that ``torch.load(path, weights_only=True)`` reads, whole or not at all.

        Raises:
            UserError: if it cannot be written.
        """
        content = io.BytesIO()
        torch.save(asdict(self), content)
        try:
            write_whole(Path(path), content.getbuffer())
        except OSError as error:
            raise UserError(f"cannot write {path}: {reason_of(error)}") from error

    @classmethod
    def read(
        cls, path: str | Path, model: Mapping[str, torch.Tensor], made_by: Mapping[str, str]
    ) -> SavedRun:
        """Read the file of a run of such a model, with states of such a kind.

        Raises:
            UserError: if it cannot be read, or is none.
        """
        with open_input(path, "the saved run") as file:
            try:
                content = torch.load(file, map_location="cpu", weights_only=True)
            except Exception:  # readers of damaged files raise whatever they stumble over
                raise UserError(f"{path} is damaged, or no file of server.save") from None
        if (fault := misfit(content, _CONTENT, "the content")) is not None:
            raise UserError(f"{path} is damaged, or no file of server.save: {fault}")
        saved = cls(**{name: content[name] for name in _CONTENT})
        if (found := _kinds(saved.parameters)) != (wanted := _kinds(model)):
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
        return saved


def made_by(
    optimizer: torch.optim.Optimizer, update: NamedUpdate, exchange: Exchange
) -> dict[str, str]:
    """The names that must be the same in the server that goes on."""
    classes = {"optimizer": type(optimizer).__name__, "exchange": type(exchange).__name__}
    return {**classes, "update": update.name}


def _kinds(parameters: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: f"{p.dtype} of shape {tuple(p.shape)}" for name, p in parameters.items()}


def _listed(kinds: Mapping[str, str], wanted: list[str]) -> str:
    return ", ".join(f"{kind} {kinds.get(kind)}" for kind in wanted)
