"""Comments of the files in conf/: what each file is for, and what each of its keys means."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

_KEY = re.compile(r"( *)([\w.]+):(?: +([^#\s].*?))?(?: +# (.*))?$")
_COMMENT = re.compile(r"( *)# ?(.*)$")
_NEAR = 8  # columns; a comment that begins farther to the right continues the one above


@dataclass
class Key:
    """A key of a file: its value as it is written, and what its comment says."""

    value: str
    meaning: str = ""


@dataclass
class ConfFile:
    """One file of conf/: keys by their path in the file, ``_target_`` and the like included."""

    path: Path
    description: str = ""
    keys: dict[str, Key] = field(default_factory=dict)

    @property
    def is_global(self) -> bool:
        """Whether it sets keys of other groups."""
        return self.path.read_text().startswith("# @package _global_")


def read(path: Path) -> ConfFile:
    """Read a file; a comment stands behind its key, or in whole lines above it."""
    lines = [line.rstrip() for line in path.read_text().splitlines()]
    lines = [line for line in lines if not line.startswith("# @package")]
    first = next((n for n, line in enumerate(lines) if not line.startswith("#")), len(lines))
    found = ConfFile(path, " ".join(line[2:].strip() for line in lines[:first]))
    parents: list[tuple[int, str]] = []
    above: list[str] = []
    key, block = None, -1
    for line in lines[first:]:
        indent = len(line) - len(line.lstrip())
        if line and block >= 0 and indent > block:
            continue  # of a text of several lines
        comment, match = _COMMENT.match(line), _KEY.match(line)
        if comment and key and key.meaning and indent > parents[-1][0] + _NEAR:
            key.meaning += " " + comment[2]
        elif comment and not comment[2].startswith("--"):
            above.append(comment[2].strip())
        elif match:
            while parents and parents[-1][0] >= indent:
                parents.pop()
            if match[2] == "_target_" and parents and above:  # says what the object is for
                found.keys[".".join(name for _, name in parents)].meaning = " ".join(above)
                above = []
            parents.append((indent, match[2]))
            key = Key(match[3] or "", " ".join([*above, match[4] or ""]).strip())
            found.keys[".".join(name for _, name in parents)] = key
            above, block = [], indent if (match[3] or "")[:1] in ("|", ">") else -1
        elif not line:
            above, key = [], None
    return found
