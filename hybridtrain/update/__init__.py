"""How the master parameters move: a torch optimizer in host memory, fed with a merged gradient."""

from hybridtrain.update.build import build_update, load_updates
from hybridtrain.update.contribution import Contribution
from hybridtrain.update.evaluation import Again, Evaluation
from hybridtrain.update.optimizers import OptimizerFailed, Optimizers, Stepped
from hybridtrain.update.saved import Saved
from hybridtrain.update.update import Update

__all__ = [
    "Again",
    "Contribution",
    "Evaluation",
    "OptimizerFailed",
    "Optimizers",
    "Saved",
    "Stepped",
    "Update",
    "build_update",
    "load_updates",
]
