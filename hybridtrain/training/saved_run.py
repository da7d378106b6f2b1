"""The file of a run: parameters, and what the optimizer of the masters has kept of them."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from hybridtrain.errors import UserError
from hybridtrain.util.files import open_input, reason_of, write_whole


@dataclass(frozen=True)
class SavedRun:
    """After so many ``updates``; ``parameters`` and states of the ``optimizer`` by name."""

    updates: int = 0
    parameters: Mapping[str, torch.Tensor] = field(default_factory=dict)
    optimizer: Mapping[str, dict[str, Any]] = field(default_factory=dict)

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
    def read(cls, path: str | Path, model: Mapping[str, torch.Tensor]) -> SavedRun:
        """Read the file of a run of such a model.

        Raises:
            UserError: if it cannot be read, or is none.
        """
        with open_input(path, "the saved run") as file:
            try:
                saved = cls(**torch.load(file, map_location="cpu", weights_only=True))
                found = {name: tuple(each.shape) for name, each in saved.parameters.items()}
            except (RuntimeError, pickle.UnpicklingError, EOFError, TypeError, AttributeError):
                raise UserError(f"{path} is damaged, or no file of server.save") from None
        if found != (wanted := {name: tuple(each.shape) for name, each in model.items()}):
            wrong = sorted(n for n in found | wanted if found.get(n) != wanted.get(n))
            raise UserError(
                f"{path} is of another model: {wrong[0]} has the shape "
                f"{found.get(wrong[0])} there and {wanted.get(wrong[0])} here"
            )
        return saved
