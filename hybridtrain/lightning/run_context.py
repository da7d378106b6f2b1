"""The strategy as the parts of a run get it.

Lightning types ``trainer.strategy`` as its own base class. Parts get ours from the functions below,
and import its class for type checkers alone, as it puts all of them together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.strategies import Strategy

if TYPE_CHECKING:
    from hybridtrain.lightning.strategy import HybridStrategy


def strategy_of(trainer: Any) -> Strategy:
    """The trainer's strategy, of any kind."""
    return cast(Strategy, trainer.strategy)


def context_of(trainer: Any) -> HybridStrategy:
    """The strategy of ours; members of workers must not be read in another process."""
    return cast("HybridStrategy", trainer.strategy)


def context_if_ours(trainer: Any) -> HybridStrategy | None:
    """The same; ``None`` under a strategy of Lightning's own."""
    return context_of(trainer) if hasattr(trainer.strategy, "requirements") else None


def checkpoints_of(trainer: Any) -> list[ModelCheckpoint]:
    """The trainer's ``ModelCheckpoint`` callbacks."""
    return [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
