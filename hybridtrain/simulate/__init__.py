"""Strategies in virtual time: ``python -m hybridtrain.simulate --help``."""

from hybridtrain.simulate.simulate_cli import main
from hybridtrain.simulate.simulate_options import parse
from hybridtrain.simulate.simulations import SimulationPlan, SimulationRow, StrategySpec, simulate

__all__ = ["SimulationPlan", "SimulationRow", "StrategySpec", "main", "parse", "simulate"]
