"""Make the key by which the hosts of a run know each other.

    python -m hybridtrain key FILE

FILE must not be there yet; only you may read it. Copy it to every host (scp -p keeps it private),
and give strategy.hosts_key=FILE. Whoever has it may take part in the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hybridtrain.errors import UserError
from hybridtrain.hosts.key import Key
from hybridtrain.util.arguments import command


def run(arguments: Sequence[str]) -> None:
    """Write the key; print what to do with it."""
    if len(arguments) != 1 or not arguments[0] or arguments[0].startswith("-"):
        given = " ".join(map(repr, arguments)) or "nothing"
        raise UserError(f"{given} was given; write python -m hybridtrain key FILE")
    path = Path(arguments[0])
    Key.new().write(path)
    print(
        f"{path}: a key; copy it to every host (scp -p), and start the run with "
        f"strategy.hosts_key={path}"
    )


def main(arguments: Sequence[str]) -> int:
    """The command line behind ``key``: 0, or 2 after one line on standard error."""
    return command(run, __doc__, arguments)
