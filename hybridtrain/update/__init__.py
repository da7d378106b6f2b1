"""How the master parameters move: a torch optimizer in host memory, fed with a merged gradient."""

from hybridtrain.update.build import build_update, load_updates
from hybridtrain.update.contribution import Contribution
from hybridtrain.update.optimizers import OptimizerFailed, Optimizers
from hybridtrain.update.update import Update

__all__ = [
    "Contribution",
    "OptimizerFailed",
    "Optimizers",
    "Update",
    "build_update",
    "load_updates",
]
