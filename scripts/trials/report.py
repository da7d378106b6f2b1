"""Write the results of trials to a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.machine import machine


def write_report(folder: Path, name: str, content: dict[str, Any], text: str) -> None:
    """``name.json`` with all that was seen and the machine, and ``name.md``."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine(), **content}
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    (folder / f"{name}.md").write_text(f"{text}\n")
