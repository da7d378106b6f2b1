"""``strategy=ddp``: Lightning's own DDP, with a start method that fits the machine."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from pytorch_lightning.strategies import DDPStrategy

from hybridtrain.errors import UserError

START_METHODS = ("auto", "fork", "spawn", "popen")
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


def lightning_ddp(
    start_method: str = "auto",
    process_group_backend: str | None = None,
    find_unused_parameters: bool = False,
    **options: Any,
) -> DDPStrategy:
    """Lightning's DDPStrategy, which takes the remaining ``options`` too.

    ``auto`` forks the ranks where there is no CUDA device: they share what is imported, start in a
    moment and never see the command line. A forked process cannot use CUDA once its parent has, so
    there each rank is the command run again (Lightning's ``popen``).
    """
    if start_method not in START_METHODS:
        raise UserError(
            f"strategy.start_method={start_method}: choose one of {', '.join(START_METHODS)}"
        )
    if start_method == "auto":
        start_method = "popen" if torch.cuda.is_available() else "fork"
    return DDPStrategy(
        start_method=cast(StartMethod, start_method),
        process_group_backend=process_group_backend,
        find_unused_parameters=find_unused_parameters,
        **options,
    )
