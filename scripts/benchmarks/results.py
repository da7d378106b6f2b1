"""A result as a file: written, read again, and renewed part by part."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import in_short
from benchmarks.plan import PARTS
from benchmarks.rows import Row, Skipped, row_of
from benchmarks.shown import table
from hybridtrain.errors import UserError


@dataclass(frozen=True, slots=True)
class Result:
    """``machines``: what each part was measured on, by its name, in the order of the parts."""

    rows: Sequence[Row | Skipped]
    machines: dict[str, dict[str, Any]]

    def write(self, file: Path) -> None:
        """As JSON."""
        content = {"machines": self.machines, "rows": [row.as_dict() for row in self.rows]}
        file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    def publish(self, folder: Path) -> None:
        """JSON, the table, and a plot, named by the date; other parts of that date are kept."""
        stem = folder / list(self.machines.values())[-1]["date"]
        file = stem.with_suffix(".json")
        whole = self.over(read(file)) if file.exists() else self
        whole.write(file)
        stem.with_suffix(".md").write_text(table(whole.rows, whole.where()) + "\n")
        from benchmarks.plot import draw

        draw(whole.rows, whole.where(), stem.with_suffix(".png"))

    def over(self, former: Result) -> Result:
        """These rows, and those of the former result that were not measured again.

        A part that was measured as a whole has no other rows than these.
        """
        again = {_key(row) for row in self.rows}
        whole = {name for name, machine in self.machines.items() if not machine.get("only")}
        kept = [row for row in former.rows if row.part not in whole and _key(row) not in again]
        machines = former.machines | self.machines
        order = [name for name in PARTS if name in machines]
        rows = [row for name in order for row in [*self.rows, *kept] if row.part == name]
        return Result(rows, {name: machines[name] for name in order})

    def where(self) -> str:
        """Describe the machines, in a line for each set of parts."""
        lines: dict[str, list[str]] = {}
        for name, machine in self.machines.items():
            lines.setdefault(in_short(machine), []).append(name)
        if len(lines) == 1:
            return next(iter(lines))
        return "\n".join(f"{', '.join(names)}: {line}" for line, names in lines.items())


def _key(row: Row | Skipped) -> tuple[str, ...]:
    """A work that was left out before may have been measured now."""
    return row.key if isinstance(row, Row) else (row.part, row.work)


def read(file: Path) -> Result:
    """An earlier result.

    Raises:
        UserError: if the file is none.
    """
    try:
        content = json.loads(file.read_text())
        return Result([row_of(row) for row in content["rows"]], content["machines"])
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{file} is no result of benchmark.py --json") from None
