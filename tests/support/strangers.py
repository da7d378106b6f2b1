"""Files and directories of another user, also where this one may give none away."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hybridtrain.util import own_directory

STRANGER = 12345


def give_away(path: Path, patch: pytest.MonkeyPatch) -> None:
    """Let a file, directory or link belong to another user; else let it look so."""
    try:
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
    except PermissionError:
        given, before = path.lstat(), own_directory._owner

        def owner(found: os.stat_result) -> int:
            return STRANGER if os.path.samestat(found, given) else before(found)

        patch.setattr(own_directory, "_owner", owner)
