"""Corrections of stale gradients: shorter steps, or changed gradients."""

from collections.abc import Callable, Mapping
from typing import Any

from hybridtrain.engine.updates.staleness.correction import (
    ByStaleness,
    Correction,
    DcAsgd,
    DcAsgdAdaptive,
    GapAware,
    Polynomial,
)
from hybridtrain.util.option_types import choose

__all__ = ["CORRECTIONS", "Correction", "CorrectionSpec", "make_correction"]


# A name, {"name": ..., parameters}, an object, or None.
CorrectionSpec = str | Mapping[str, Any] | Correction | None

CORRECTIONS: dict[str, Callable[..., Correction]] = {
    "by_staleness": ByStaleness,
    "polynomial": Polynomial,
    "dc_asgd": DcAsgd,
    "dc_asgd_adaptive": DcAsgdAdaptive,
    "gap_aware": GapAware,
}


def make_correction(given: CorrectionSpec) -> Correction | None:
    """A correction from its name, its name and parameters, or the object itself.

    Raises:
        UserError: if the name is not known, or the parameters make no sense.
    """
    return None if given is None else choose("correction", given, CORRECTIONS, Correction)
