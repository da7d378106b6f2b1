"""What every test starts from."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_process_group_is_handed_on() -> Iterator[None]:
    """Lightning's ddp leaves its process group behind, and forked ranks of a later test hang in it.

    Also takes back the environment variables that its launchers leave.
    """
    before = dict(os.environ)
    yield
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if name not in before:
            os.environ.pop(name, None)
