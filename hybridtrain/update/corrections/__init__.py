"""What is done about gradients that arrive late: shorter steps, or other gradients."""

from hybridtrain.update.corrections.correction import Correction, Late
from hybridtrain.update.corrections.delay_compensated import DcAsgd, DcAsgdAdaptive
from hybridtrain.update.corrections.gap_aware import GapAware
from hybridtrain.update.corrections.known import CORRECTIONS, CorrectionSpec, make_correction
from hybridtrain.update.corrections.rates import ByStaleness, Polynomial

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
