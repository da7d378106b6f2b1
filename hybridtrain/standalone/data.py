"""The data of a run: positions of samples, and how a mini-batch is taken from what was given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from typing import Any

import numpy as np
import torch

from hybridtrain.errors import UserError
from hybridtrain.util.option_types import shown

_ARRAYS = (np.ndarray, torch.Tensor)


class Data:
    """Samples by position.

    Args:
        given: a number of samples; an array, whose rows they are; a tuple or mapping of arrays of
            one length; a sequence or data set; or anything else that can be iterated, which is read
            into memory once.

    Raises:
        UserError: if there are no samples, arrays differ in length, or a tuple has other parts.
    """

    def __init__(self, given: Any) -> None:
        if isinstance(given, np.integer):
            given = int(given)
        columns = _columns(given)
        if columns is None and not _is_number(given) and not _has_positions(given):
            if not isinstance(given, Iterable):
                raise UserError(
                    f"data={shown(given)} was given; give arrays, a sequence, a data set or a "
                    "number of samples"
                )
            given = list(given)
        self._given, self._columns = given, columns
        self.length = _length(given, columns)
        if self.length < 1:
            raise UserError(f"data={shown(given)} has no samples")

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, position: int) -> Any:
        return self.take([position])

    def take(self, positions: list[int]) -> Any:
        """The samples at these positions, in the form of the data: rows of arrays, or a list."""
        given = self._given
        if isinstance(given, int):
            return np.asarray(positions)
        if self._columns is None:
            return [given[position] for position in positions]
        taken = {name: _rows(column, positions) for name, column in self._columns.items()}
        if isinstance(given, Mapping):
            return taken
        return tuple(taken.values()) if isinstance(given, tuple) else taken[""]


def as_data(given: Any) -> Data:
    """Make :class:`Data` of what was given; data that are made already stay."""
    return given if isinstance(given, Data) else Data(given)


def _columns(given: Any) -> dict[Any, Any] | None:
    """The arrays, by name; ``None``: samples are taken one by one."""
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(given, tuple) and any(map(_is_array, given)):
        if others := [part for part in given if not _is_array(part)]:
            raise UserError(
                f"data=(...) has an array and {shown(others[0])}; give arrays for columns, or a "
                "list for samples"
            )
        return dict(enumerate(given))
    return {"": given} if _is_array(given) else None


def _is_array(given: Any) -> bool:
    # The last two are scipy's and pandas'.
    return isinstance(given, _ARRAYS) or hasattr(given, "tocsr") or hasattr(given, "iloc")


def _is_number(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)


def _has_positions(given: Any) -> bool:
    known = isinstance(given, Sized) and hasattr(given, "__getitem__")
    return known and not isinstance(given, torch.utils.data.IterableDataset)


def _length(given: Any, columns: dict[Any, Any] | None) -> int:
    if isinstance(given, int):
        return given
    if columns is None:
        return len(given)
    lengths = {name: _n_rows(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise UserError(
            "data: the arrays have "
            + ", ".join(f"{n} ({name})" for name, n in lengths.items())
            + " rows; they must have as many"
        )
    return next(iter(lengths.values()), 0)


def _n_rows(column: Any) -> int:
    return column.shape[0] if _is_array(column) and column.ndim else len(column)


def _rows(column: Any, positions: list[int]) -> Any:
    if hasattr(column, "iloc"):  # of pandas, which looks a number up among its labels
        return column.iloc[positions].to_numpy()
    if _is_array(column):
        return column[np.asarray(positions)]
    return [column[position] for position in positions]
