"""Layers that a module makes in ``configure_model`` are there in the calling process, too.

Lightning calls the hook in every call of the trainer, behind ``setup``, and asks that it may be
called again. Workers call it; when their weights come home, the calling process calls it once, so
that there is something to load them into. ``setup`` is not called there (it may read data): what
the module has written down in it (how many classes there are) is brought along, as it was just
before the hook, which may itself write down that it has been called.
"""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
from lightning_utilities.core.rank_zero import rank_zero_warn
from pytorch_lightning.utilities.model_helpers import is_overridden

from hybridtrain.lightning.results.callback_state import CallbackState, give_to_module, of_module

_HOOKS = ("configure_sharded_model", "configure_model")  # the first is Lightning's older name


def before_configuring(module: pl.LightningModule) -> CallbackState | None:
    """In a worker, behind ``setup``; ``None``: the module makes no layers later."""
    return of_module(module) if _hooks(module) else None


def load_weights(
    trainer: pl.Trainer, weights: dict[str, Any], before: CallbackState | None
) -> None:
    """In the calling process, with the hook called if a worker has called it.

    Warns of weights that the module has no place for.
    """
    module = trainer.lightning_module
    error = None if before is None else _configure(trainer, before)
    trainer.precision_plugin.convert_module(module)  # as the workers did
    # Not strict: a worker may have made layers that this process has not. torch does not count as
    # unexpected what would belong to an attribute that is None here.
    module.load_state_dict(weights, strict=False)
    homeless = weights.keys() - module.state_dict().keys()
    if homeless:
        why = "make layers in __init__ or configure_model"
        if error is not None:
            why = f"its configure_model ends here with {type(error).__name__}: {error}"
        rank_zero_warn(
            f"{', '.join(sorted(homeless))} of {type(module).__name__} were made in the workers "
            f"and cannot come home, as this process has no such layers; {why}, or load the last "
            "checkpoint"
        )


def _configure(trainer: pl.Trainer, before: CallbackState) -> Exception | None:
    """Call the hook, on the CPU; returns what it has raised, as training has ended well."""
    module: Any = trainer.lightning_module
    give_to_module(module, before)
    module.trainer = trainer  # as behind a call in one process
    try:
        with trainer.precision_plugin.module_init_context():
            for hook in _hooks(module):
                getattr(module, hook)()
    except Exception as error:
        return error
    return None


def _hooks(module: pl.LightningModule) -> list[str]:
    return [hook for hook in _HOOKS if is_overridden(hook, module)]
