"""Tables in text files: a header that names the columns, then one row of cells per line.

What spreadsheets and pandas write is read as it is meant: a byte order mark, CRLF, spaces around
cells, empty rows, empty cells behind the last column, and ``;`` or tabs between cells. Where cells
and columns do not match, no cell is believed: the row has a fault, which its reader raises or
counts.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridtrain.errors import UserError
from hybridtrain.util.files import read_text

_BETWEEN = {",": "','", ";": "';'", "\t": "a tab"}  # cells, and how messages call it


@dataclass(frozen=True, slots=True)
class TableRow:
    """One row: its line in the file (from 1), and its cells by column.

    ``fault`` says what is wrong with the row and what to do; then there are no cells.
    """

    line: int
    cells: dict[str, str] = field(default_factory=dict)
    fault: str = ""


def read_table(
    path: Path, what: str, needed: Sequence[str], known: Sequence[str] = ()
) -> list[TableRow]:
    """Read the columns ``needed``, and those of ``known`` that are there, of all rows.

    Args:
        path: of the file.
        what: its name in messages: ``the manifest``.
        needed: columns that must be there.
        known: columns that may be there; all others are ignored.

    Raises:
        UserError: if the file cannot be read or split into cells, a needed column is missing, or a
            column is there twice.
    """
    text = read_text(path, what)
    between = _between(text, needed)
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=between, skipinitialspace=True)
    try:
        rows = _filled(path, lines)
        line, names = next(rows, (1, []))
        while names and not names[-1]:
            names.pop()
        _check_columns(f"{path}, line {line}", names, needed, known)
        places = {name: names.index(name) for name in (*needed, *known) if name in names}
        return [_row(number, cells, len(names), places, between) for number, cells in rows]
    except csv.Error as error:
        raise UserError(f"cannot read {what} {path}, line {lines.line_num}: {error}") from error


def whole_number(text: str) -> int | None:
    """The whole number that a cell holds, also as pandas writes it (``64044.0``); else None."""
    try:
        return int(text := text.replace("_", "?"))  # 1_0 is a number in Python only
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        return None
    return int(value) if value.is_integer() else None


def _between(text: str, needed: Sequence[str]) -> str:
    """The character with which the header has the needed columns; a comma if none does."""
    found = re.search(r"[^\r\n]*\S[^\r\n]*", text)
    head = found[0] if found else ""
    for between in _BETWEEN:
        names = _cells(head, between)
        if set(needed) <= {name.strip() for name in names}:
            return between
    return ","


def _cells(line: str, between: str) -> list[str]:
    """None if one is larger than a cell may be."""
    try:
        return next(csv.reader([line], delimiter=between, skipinitialspace=True), [])
    except csv.Error:
        return []


def _filled(path: Path, lines: Any) -> Iterator[tuple[int, list[str]]]:
    """Line and cells of the rows that are not empty."""
    before = 0
    for row in lines:
        begun, before = before + 1, lines.line_num
        if any("\n" in cell or "\r" in cell for cell in row):
            raise UserError(
                f"{path}, line {begun}: a quoted cell goes on in the line below; close it"
            )
        if any(cells := [cell.strip() for cell in row]):
            yield begun, cells


def _check_columns(
    where: str, found: Sequence[str], needed: Sequence[str], known: Sequence[str]
) -> None:
    if missing := [name for name in needed if name not in found]:
        raise UserError(
            f"{where}: the column {missing[0]} is missing (needed: {','.join(needed)}; found: "
            f"{' '.join(','.join(found).split()) or 'none'}); the first line names the columns, "
            "with ',' between them"
        )
    for name in (*needed, *known):
        if found.count(name) > 1:
            raise UserError(f"{where}: the column {name} is there twice; rename or remove one")


def _row(line: int, cells: list[str], n: int, places: dict[str, int], between: str) -> TableRow:
    """``n``: columns of the header; ``places``: of those that are read."""
    while len(cells) > n and not cells[-1]:
        cells.pop()
    if set(places) <= set(cells):
        return TableRow(line, fault="the header stands here again; remove the line")
    if len(cells) != n:
        more = f'put quotes ("…") around a cell that has {_BETWEEN[between]} in it'
        return TableRow(
            line,
            fault=f"cells in the row: {len(cells)}, columns in the header: {n}; "
            + (more if len(cells) > n else "write all of them, the empty ones too"),
        )
    return TableRow(line, {name: cells[place] for name, place in places.items()})
