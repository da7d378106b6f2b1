"""What is done about gradients that arrive late: shorter steps, or other gradients."""

from hybridtrain.updates.staleness.correction import Correction, Late
from hybridtrain.updates.staleness.corrections import CORRECTIONS, CorrectionSpec, make_correction
from hybridtrain.updates.staleness.delay_compensated import DcAsgd, DcAsgdAdaptive
from hybridtrain.updates.staleness.gap_aware import GapAware
from hybridtrain.updates.staleness.rates import ByStaleness, Polynomial

__all__ = [
    "CORRECTIONS",
    "ByStaleness",
    "Correction",
    "CorrectionSpec",
    "DcAsgd",
    "DcAsgdAdaptive",
    "GapAware",
    "Late",
    "Polynomial",
    "make_correction",
]
