"""Updates of the master parameters: torch optimizers in host memory, with merged gradients."""

from hybridtrain.updates.base import Saved
from hybridtrain.updates.factory import build_update, load_updates
from hybridtrain.updates.optimizer_set import OptimizerFailed, Optimizers, Stepped

__all__ = ["OptimizerFailed", "Optimizers", "Saved", "Stepped", "build_update", "load_updates"]
