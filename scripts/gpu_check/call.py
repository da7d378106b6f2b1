"""The process of one check: its argument is JSON of ``["module:name", {arguments}, "answer"]``."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path


def main() -> None:
    """Call the function and write down what it has found."""
    function, arguments, answer = json.loads(sys.argv[1])
    module, _, name = function.partition(":")
    found = getattr(importlib.import_module(module), name)(**arguments)
    Path(answer).write_text(json.dumps(asdict(found), default=str), encoding="utf-8")


if __name__ == "__main__":
    main()
