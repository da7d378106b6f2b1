"""Strategies in virtual time: ``python -m hybridtrain.simulate --help``."""

from hybridtrain.simulate.simulate_cli import main
from hybridtrain.simulate.simulate_options import parse
from hybridtrain.simulate.simulations import SimulationPlan, SimulationRow, StrategySpec, simulate
from hybridtrain.worlds.virtual.service_times import Measured, ServiceTimes

__all__ = [
    "Measured",
    "ServiceTimes",
    "SimulationPlan",
    "SimulationRow",
    "StrategySpec",
    "main",
    "parse",
    "simulate",
]
