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


@dataclass(frozen=True)
class SavedRun:
    """After so many ``updates``; ``parameters`` and states of the ``optimizer`` by name.

    ``epochs``: that are done; ``made_by``: classes and names that say what the states mean.
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
                saved = cls(**torch.load(file, map_location="cpu", weights_only=True))
                found = {name: tuple(each.shape) for name, each in saved.parameters.items()}
            except Exception:  # readers of damaged files raise whatever they stumble over
                raise UserError(f"{path} is damaged, or no file of server.save") from None
        if found != (wanted := {name: tuple(each.shape) for name, each in model.items()}):
            wrong = sorted(n for n in found | wanted if found.get(n) != wanted.get(n))
            raise UserError(
                f"{path} is of another model: {wrong[0]} has the shape "
                f"{found.get(wrong[0])} there and {wanted.get(wrong[0])} here"
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
    """What must be the same in the server that goes on."""
    classes = {"optimizer": type(optimizer).__name__, "exchange": type(exchange).__name__}
    return {**classes, "update": update.name}


def _listed(kinds: Mapping[str, str], wanted: list[str]) -> str:
    return ", ".join(f"{kind} {kinds.get(kind)}" for kind in wanted)
