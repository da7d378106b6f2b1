"""Virtual time: runs with thousands of workers in one process, by the clock of a simulation.

The server, policies and updates are those of real runs. Time and the network are simulated;
gradients are real where a task is given. ``plan`` predicts strategies from the records of runs.

It starts no process and must not know Lightning, Hydra, other hosts' connections or the public
server. A task with real gradients is given to it from outside
(:mod:`hybridtrain.lightning.replay.module_task`).
"""

from hybridtrain.virtual.service_times import Measured, ServiceTimes
from hybridtrain.virtual.simulations import SimulationPlan, SimulationRow, StrategySpec, simulate

__all__ = [
    "Measured",
    "ServiceTimes",
    "SimulationPlan",
    "SimulationRow",
    "StrategySpec",
    "simulate",
]
