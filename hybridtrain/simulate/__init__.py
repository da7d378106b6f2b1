"""Strategies in virtual time: ``python -m hybridtrain.simulate --help``."""

from hybridtrain.simulate.cli import main
from hybridtrain.simulate.options import parse
from hybridtrain.simulate.runs import Plan, Row, Way, simulate

__all__ = ["Plan", "Row", "Way", "main", "parse", "simulate"]
